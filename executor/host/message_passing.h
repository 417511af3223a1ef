#pragma once

// What ranks in processes of their own tell each other, by MPI or by TCP
// (executor/host/tcp_processes.h). MPI's library is loaded at run time, so the program starts, and
// runs ranks as threads, where none is installed.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace shardwright {

// A number of bytes at an offset, for each member of a group.
struct MessagePart {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

// What MPI counts such parts in, since its counts are int: bytes, or where they lie beyond 2^31 - 1
// the largest power of two, up to 1 MiB, that divides all offsets and sizes.
[[nodiscard]] inline std::int64_t CountingUnit(std::span<const MessagePart> parts) {
  constexpr std::int64_t kLargest = std::int64_t{1} << 20;
  std::int64_t end = 0;
  std::int64_t bits = kLargest;  // what is not divided by a power of two has a lower bit
  for (const MessagePart& part : parts) {
    end = std::max(end, part.offset + part.bytes);
    bits |= part.offset | part.bytes;
  }
  return end > std::numeric_limits<std::int32_t>::max() ? bits & -bits : 1;
}

// Errors of MPI end the process (MPI_ERRORS_ARE_FATAL), and with it the run on all ranks; those of
// TCP are thrown as RunError. Calls on different channels may be made from different threads at
// once.
class MessagePassing {
 public:
  // Something on its way. Its memory must stay until it is over.
  class Pending {
   public:
    virtual ~Pending() = default;
    [[nodiscard]] virtual bool IsOver() = 0;
    // The ranks that it waits for; none: that is not known.
    [[nodiscard]] virtual std::set<std::int64_t> Missing() { return {}; }
  };
  // Members of a group, on whose channel messages of other groups never arrive.
  using Channel = int;
  static constexpr Channel kAll = 0;  // all processes

  explicit MessagePassing(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  MessagePassing(const MessagePassing&) = delete;
  MessagePassing& operator=(const MessagePassing&) = delete;
  virtual ~MessagePassing() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  // How long one process waits for the others, whatever for; then it ends the run. All begin with
  // the limit of the set-up and set that of steps when they have met behind it.
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  virtual void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  // Called by all processes in the same order: those that give the same colour form a group, with
  // members in the order of their ranks.
  [[nodiscard]] virtual Channel Split(int color) = 0;
  [[nodiscard]] virtual std::unique_ptr<Pending> Send(Channel channel, int to, const void* data,
                                                      std::int64_t bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Pending> Receive(Channel channel, int from, void* data,
                                                         std::int64_t bytes) = 0;
  // Part m of `data` is what member m has, and gets from it; this member's part is there already.
  [[nodiscard]] virtual std::unique_ptr<Pending> AllGather(Channel channel, void* data,
                                                           std::span<const MessagePart> parts) = 0;
  // Sends part m of `from` to member m, and puts what m sends into part m of `to`.
  [[nodiscard]] virtual std::unique_ptr<Pending> AllToAll(
      Channel channel, const void* from, std::span<const MessagePart> from_parts, void* to,
      std::span<const MessagePart> to_parts) = 0;
  // Called once by all, when nothing is on its way: after that they are alone. FinishTogether
  // (together.h) names those that do not come.
  virtual void Finish() = 0;

  // This process fails: the others' watcher is called with the cause, if they have not failed
  // before. Under mpirun it need not be said, since the launcher ends the others.
  virtual void Fail(const std::string& /*cause*/) {}
  // `owner`'s watcher hears, on a thread of its own, when another process fails or is gone; at once
  // if that has happened. An empty one takes it away.
  virtual void OnFailure(const void* /*owner*/,
                         const std::function<void(const std::string& cause)>& /*watcher*/) {}

  // The ranks that do not answer, since their processes stand still or cannot be reached; asked
  // when a wait has been too long, and waits itself.
  [[nodiscard]] virtual std::set<std::int64_t> Silent() = 0;
  // Whom to name: ranks that do not answer, or if all do, those that have not come.
  [[nodiscard]] std::set<std::int64_t> AtFault(const std::set<std::int64_t>& missing) {
    std::set<std::int64_t> silent = Silent();
    return silent.empty() ? missing : silent;
  }

  // A notice that the others may read whenever they like; a new one takes its place. Once this
  // process has called Finish, nobody gets it. MPI has none.
  virtual void Post(std::span<const std::byte> /*notice*/) {}
  // The last notice of a process; empty: none has come.
  [[nodiscard]] virtual std::vector<std::byte> PostOf(int /*rank*/) { return {}; }

 private:
  std::atomic<std::chrono::milliseconds> timeout_;
};

// Joins the processes that mpirun started; `timeout` is theirs. Throws EnvironmentError when this
// build has no MPI module or the module's MPI cannot be loaded. The result lives until the process
// ends.
[[nodiscard]] MessagePassing& JoinProcesses(std::chrono::milliseconds timeout);

}  // namespace shardwright
