// What a worker hears at rank 0's address. The first byte chooses: the handshake, the welcome, or
// the frames behind it.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <sys/socket.h>

#include "core/error.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_mailbox.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {
namespace {

using tcp::Frame;
using tcp::Kind;
using tcp::Mailbox;
constexpr std::chrono::milliseconds kTimeout{1000};
constexpr int kRank = 1, kSize = 4;

// The end of a connection whose other end has said so much and nothing more.
tcp::Socket Said(std::string_view bytes) {
  std::array<int, 2> ends{};
  SW_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0, "socketpair");
  const tcp::Socket other(ends[1]);
  SW_CHECK(other.Write(bytes.data(), bytes.size()), "write");
  return tcp::Socket(ends[0]);
}

void ReadHandshake(std::string_view bytes) {
  const Launch launch = {.rank = kRank,
                         .size = kSize,
                         .address = "127.0.0.1",
                         .key = "a key that is known to this test only"};
  tcp::Session session;
  const bool is_proven = tcp::Prove(Said(bytes), launch, "there", kTimeout, &session);
  SW_CHECK(!is_proven, "without the key");
}

// As executor/host/tcp_processes.cc reads, while two receivers take what they get.
void ReadFrames(std::string_view bytes) {
  Mailbox mailbox(kRank, kSize);
  SW_CHECK(mailbox.AddChannel({0, 1}) == 1, "channel");
  std::map<Mailbox::Inbox*, std::uint64_t> collected;
  while (bytes.size() >= sizeof(Frame)) {
    Frame frame;
    std::memcpy(&frame, bytes.data(), sizeof frame);
    bytes.remove_prefix(sizeof frame);
    if (!mailbox.ProblemOf(frame).empty()) {
      return;
    }
    if (bytes.size() < static_cast<std::size_t>(frame.bytes)) {
      return;  // it has not come, and nothing is kept
    }
    const auto* const begin = reinterpret_cast<const std::byte*>(bytes.data());
    std::vector<std::byte> data(begin, begin + frame.bytes);
    bytes.remove_prefix(data.size());
    if (frame.kind == Kind::kFail) {
      SW_CHECK(!tcp::CauseOf(data.data(), frame.bytes).empty(), "cause");
    } else if (!mailbox.Take(frame, std::move(data)).empty()) {
      return;
    }
    SW_CHECK(mailbox.unread() <= Mailbox::kMostUnread, "unread");
    for (const Mailbox::Channel channel : {0, 1}) {
      Mailbox::Inbox& inbox = mailbox.InboxOf(channel, 0);
      std::vector<std::byte> message;
      collected[&inbox] += mailbox.Collect(inbox, collected[&inbox], &message) ? 1 : 0;
    }
    (void)mailbox.NoticeOf(frame.from);
  }
}

}  // namespace

void Read(std::string_view bytes) {
  if (bytes.empty()) {
    return;
  }
  const std::string_view rest = bytes.substr(1);
  try {
    switch (static_cast<unsigned char>(bytes[0]) % 4) {
      case 0:
        ReadHandshake(rest);
        break;
      case 1:
        tcp::AwaitWelcome(Said(rest), "there", kTimeout);
        break;
      default:
        ReadFrames(rest);
        break;
    }
  } catch (const RunError&) {
  }
}

}  // namespace shardwright::fuzz
