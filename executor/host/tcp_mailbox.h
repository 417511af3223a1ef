#pragma once

// What a process has got from process 0 and nobody has asked for yet. Whoever owns it locks it.

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "executor/host/message_passing.h"
#include "executor/host/tcp_frames.h"

namespace shardwright::tcp {

class Mailbox {
 public:
  using Channel = MessagePassing::Channel;
  // Of process `rank` of `size`, with the channel of all.
  Mailbox(int rank, int size);

  // Returns the number of a new channel, of these ranks in ascending order.
  Channel AddChannel(std::vector<int> members);
  [[nodiscard]] const std::vector<int>& MembersOf(Channel channel) const {
    return members_[static_cast<std::size_t>(channel)];
  }

  // What process 0 may not pass on; empty: it may. Only of its frame, before memory is taken; needs
  // no lock.
  [[nodiscard]] std::string ProblemOf(const Frame& frame) const;
  // The same of what it belongs to; else it is kept. Not of a kFail or kPing.
  [[nodiscard]] std::string Take(const Frame& frame, std::vector<std::byte> data);

  // Messages of one sender on one channel, in the order in which they were sent; receivers take
  // them in the order in which they asked.
  struct Inbox {
    std::uint64_t asked = 0, arrived = 0;
    std::map<std::uint64_t, std::vector<std::byte>> messages;
    std::vector<std::byte> begun;  // what has come of the next one
    std::int64_t left = 0;         // what is to come of it
  };
  // Stays where it is.
  [[nodiscard]] Inbox& InboxOf(Channel channel, int rank) { return inboxes_[{channel, rank}]; }
  // Message `number` of it, once: false if it has not come.
  [[nodiscard]] bool Collect(Inbox& inbox, std::uint64_t number, std::vector<std::byte>* message);

  // The last notice of a process; empty: none has come.
  [[nodiscard]] std::vector<std::byte> NoticeOf(int rank) const;
  // Who has sent a kPong since the last kPing.
  [[nodiscard]] std::set<std::int64_t>& answered() { return answered_; }
  [[nodiscard]] bool finished() const { return finished_; }  // all have said bye

  // What may have arrived and wait for its receiver, of all channels. Collectives are never more
  // than a piece ahead of each other, and everything else waits to be asked.
  static constexpr std::int64_t kMostUnread = std::int64_t{1} << 28;
  [[nodiscard]] std::int64_t unread() const { return unread_; }

 private:
  static constexpr std::int64_t kPerMessage = 128;  // what an empty one takes, roughly

  const int rank_, size_;
  std::vector<std::vector<int>> members_;  // by channel
  std::map<std::pair<Channel, int>, Inbox> inboxes_;
  std::map<int, std::vector<std::byte>> notices_;  // by rank
  std::set<std::int64_t> answered_;
  std::int64_t unread_ = 0;
  bool finished_ = false;
};

}  // namespace shardwright::tcp
