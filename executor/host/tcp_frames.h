#pragma once

// What the processes of a run send each other by TCP once both ends have proven the run's key
// (executor/host/tcp_handshake.h). Machines of one run share their byte order.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace shardwright::tcp {

enum class Kind : std::int32_t {
  kHello,    // the first one: who connects; its bytes prove it and name the job
  kWelcome,  // all are there
  kData,
  kPost,  // a notice for everybody else
  kFail,  // bytes: why
  kBye,   // the sender is done; back from the relay: all are
  kPing,  // asks for a kPong, which a process sends from a thread that only reads
  kPong
};
inline constexpr std::int32_t kEverybody = -1;
inline constexpr std::uint32_t kMagic = 0x53575432;  // "SWT2": raised with the format

// Before every message, or piece of one.
struct Frame {
  std::uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t channel = 0;
  std::int32_t size = 0;   // of a hello: how many processes there are
  std::int64_t bytes = 0;  // behind this
  std::int64_t left = 0;   // of the same message, in frames to come
};

// Longer messages go in pieces, so that no frame of any run is longer, whatever the model.
inline constexpr std::int64_t kLongestFrame = std::int64_t{1} << 20;
inline constexpr std::int64_t kLongestMessage = std::int64_t{1} << 40;
inline constexpr std::int64_t kLongestCause = std::int64_t{1} << 14;
inline constexpr std::int32_t kMostChannels = 1 << 16;

// Whether numbers of a frame lie where those of a run's frames do.
[[nodiscard]] inline bool IsSane(const Frame& frame) {
  return frame.magic == kMagic && frame.bytes >= (frame.kind == Kind::kFail ? 1 : 0) &&
         frame.left >= 0 &&
         frame.bytes <= (frame.kind == Kind::kFail ? kLongestCause : kLongestFrame) &&
         frame.left <= (frame.kind == Kind::kData ? kLongestMessage : 0) && frame.channel >= 0 &&
         frame.channel < kMostChannels;
}

// The text of a kFail, which is one line.
[[nodiscard]] inline std::string CauseOf(const void* data, std::int64_t bytes) {
  std::string cause(static_cast<const char*>(data), static_cast<std::size_t>(bytes));
  std::replace(cause.begin(), cause.end(), '\0', '?');
  return cause;
}

}  // namespace shardwright::tcp
