#include "executor/host/tcp_mailbox.h"

#include <algorithm>

namespace shardwright::tcp {

Mailbox::Mailbox(int rank, int size) : rank_(rank), size_(size) {
  members_.emplace_back();
  for (int r = 0; r < size_; ++r) {
    members_.front().push_back(r);
  }
}

Mailbox::Channel Mailbox::AddChannel(std::vector<int> members) {
  members_.push_back(std::move(members));
  return static_cast<Channel>(members_.size()) - 1;
}

std::string Mailbox::ProblemOf(const Frame& frame) const {
  const bool is_known = frame.kind >= Kind::kData && frame.kind <= Kind::kPong;
  if (!IsSane(frame) || !is_known || (frame.kind >= Kind::kBye && frame.bytes > 0)) {
    return "sent what is no message: kind " + std::to_string(static_cast<int>(frame.kind)) +
           " of " + std::to_string(frame.bytes) + " bytes";
  }
  if (frame.from < 0 || frame.from >= size_) {
    return "sent a message of rank " + std::to_string(frame.from);
  }
  if ((frame.kind == Kind::kData || frame.kind > Kind::kBye) && frame.to != rank_) {
    return "sent a message for rank " + std::to_string(frame.to);
  }
  return "";
}

std::string Mailbox::Take(const Frame& frame, std::vector<std::byte> data) {
  if (frame.kind == Kind::kBye) {
    finished_ = true;
    return "";
  }
  if (frame.kind == Kind::kPong) {
    answered_.insert(frame.from);
    return "";
  }
  if (frame.kind == Kind::kPost) {
    notices_[frame.from] = std::move(data);
    return "";
  }
  const auto channel = static_cast<std::size_t>(frame.channel);
  // Another process may have split off a channel that this one does not know yet.
  if (channel < members_.size() &&
      !std::binary_search(members_[channel].begin(), members_[channel].end(), frame.from)) {
    return "sent a message of rank " + std::to_string(frame.from) + " on a channel of other ranks";
  }
  Inbox& inbox = InboxOf(frame.channel, frame.from);
  if (inbox.left > 0 && inbox.left != frame.bytes + frame.left) {
    return "sent a message of rank " + std::to_string(frame.from) + " in wrong pieces";
  }
  unread_ += frame.bytes + (inbox.left == 0 ? kPerMessage : 0);
  if (unread_ > kMostUnread) {
    return "sent more than " + std::to_string(kMostUnread >> 20) +
           " MiB that nobody asked for, the last of rank " + std::to_string(frame.from);
  }
  inbox.left = frame.left;
  if (inbox.begun.empty()) {
    inbox.begun = std::move(data);
  } else {
    inbox.begun.insert(inbox.begun.end(), data.begin(), data.end());
  }
  if (inbox.left == 0) {
    inbox.messages.emplace(inbox.arrived++, std::exchange(inbox.begun, {}));
  }
  return "";
}

bool Mailbox::Collect(Inbox& inbox, std::uint64_t number, std::vector<std::byte>* message) {
  const auto found = inbox.messages.find(number);
  if (found == inbox.messages.end()) {
    return false;
  }
  *message = std::move(found->second);
  unread_ -= std::ssize(*message) + kPerMessage;
  inbox.messages.erase(found);
  return true;
}

std::vector<std::byte> Mailbox::NoticeOf(int rank) const {
  const auto found = notices_.find(rank);
  return found == notices_.end() ? std::vector<std::byte>() : found->second;
}

}  // namespace shardwright::tcp
