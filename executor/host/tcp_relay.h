#pragma once

// The connections below executor/host/tcp_processes.h: sockets, how processes find process 0, and
// the thread of process 0 that passes messages on.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "executor/host/launch.h"

namespace shardwright::tcp {

enum class Kind : std::int32_t {
  kHello,    // the first one: who connects; its bytes name the job
  kWelcome,  // all are there
  kData,
  kPost,  // a notice for everybody else
  kFail,  // bytes: why
  kBye    // the sender is done; back from the relay: all are
};
inline constexpr std::int32_t kEverybody = -1;
inline constexpr std::uint32_t kMagic = 0x53575431;  // "SWT1": raised with the format

// Before every message. Machines of one run share their byte order.
struct Frame {
  std::uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t channel = 0;
  std::int32_t size = 0;  // of a hello: how many processes there are
  std::int64_t bytes = 0;
};

// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket();

  [[nodiscard]] int fd() const { return fd_; }
  // All bytes, or false when the other end is gone; or, where Join set a limit, took nothing for so
  // long: then errno is EAGAIN.
  [[nodiscard]] bool Write(const void* data, std::size_t bytes) const;
  [[nodiscard]] bool Read(void* data, std::size_t bytes) const;
  // TCP lets a socket connect to itself: where nobody listens, and the port that the kernel chose
  // for this end is the one that is called.
  [[nodiscard]] bool CallsItself() const;
  // Ends reads and writes of other threads.
  void Shutdown() const;

 private:
  int fd_ = -1;
};

// A listening socket on all of this machine's addresses; `port` 0: any free one. Throws
// EnvironmentError.
[[nodiscard]] Socket Listen(int port);
[[nodiscard]] int PortOf(const Socket& listener);

// Connects to process 0 and waits for its welcome. Throws RunError.
[[nodiscard]] Socket Join(const Launch& launch, int port, std::chrono::milliseconds timeout);

class Relay {
 public:
  // Listens from now on. Throws EnvironmentError where the port is taken.
  Relay(const Launch& launch, std::chrono::milliseconds timeout);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  [[nodiscard]] int port() const { return port_; }

 private:
  // A process, or somebody who has connected and not said hello.
  struct Peer {
    Socket socket;
    int rank = -1;
    bool done = false;           // has said bye
    std::vector<std::byte> in;   // of a message that is not whole
    std::vector<std::byte> out;  // what it has not taken, from `out_begin` on
    std::size_t out_begin = 0;
  };
  void Run();
  void Accept();
  // False: the peer is gone.
  [[nodiscard]] bool ReadFrom(Peer& peer);
  [[nodiscard]] static bool WriteTo(Peer& peer);
  void Take(Peer& peer, const Frame& frame, const std::byte* data);
  void Welcome(Peer& peer, const Frame& frame, const std::byte* data);
  static void Push(Peer& peer, const Frame& frame, const void* data);
  void PushToAll(const Frame& frame, const void* data, const Peer* but);
  void FailAll(const std::string& cause, const Peer* but);
  void Lose(const Peer& peer);
  void CheckLate();
  [[nodiscard]] bool IsEmptied() const;

  const int size_;
  const std::string job_;
  const std::chrono::steady_clock::time_point deadline_;
  const std::chrono::milliseconds timeout_;
  Socket listener_;
  int port_ = 0;
  Socket wake_read_, wake_write_;             // ends the thread
  std::vector<std::unique_ptr<Peer>> peers_;  // of the thread
  int known_ = 0;                             // peers with a rank
  std::string cause_;                         // of the first failure
  std::thread thread_;
};

}  // namespace shardwright::tcp
