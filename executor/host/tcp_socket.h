#pragma once

// Sockets of the processes of a run: where process 0 listens, and how the others reach it.

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

#include "executor/host/launch.h"

namespace shardwright::tcp {

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
  // All bytes, or false when the other end is gone (errno 0 or what the system says); or, where a
  // limit was set, took or gave nothing for so long: then errno is EAGAIN.
  [[nodiscard]] bool Write(const void* data, std::size_t bytes) const;
  [[nodiscard]] bool Read(void* data, std::size_t bytes) const;
  // How long one piece of a read or write may wait; 0: without end.
  void LimitReads(std::chrono::milliseconds limit) const;
  void LimitWrites(std::chrono::milliseconds limit) const;
  // TCP lets a socket connect to itself: where nobody listens, and the port that the kernel chose
  // for this end is the one that is called.
  [[nodiscard]] bool CallsItself() const;
  // Who is at the other end, for messages: "10.0.0.7:40312", or "pid 4711".
  [[nodiscard]] std::string PeerName() const;
  // Whether the other end of a socket of this machine (not TCP) belongs to this process's user.
  [[nodiscard]] bool PeerIsThisUser() const;
  // Ends reads and writes of other threads.
  void Shutdown() const;

 private:
  int fd_ = -1;
};

// Small messages go out at once, and a machine that is gone is noticed within a minute, also where
// nothing is sent.
void Configure(const Socket& socket);

// Listens at one port: of 127.0.0.1 (or the loopback address that `address` is) where `address` is
// one, else of all addresses of this machine. `port` 0: any free one. Throws EnvironmentError.
[[nodiscard]] Socket Listen(const std::string& address, int port);
[[nodiscard]] int PortOf(const Socket& listener);

// The two ways for `launch`: without a key and where all ranks are on one machine (UsesOnlyUser)
// processes meet at a socket without a file, whose ends the kernel knows the users of. Everything
// else is TCP.
[[nodiscard]] bool MeetsWithinUser(const Launch& launch);
// The listener of process 0. Throws EnvironmentError where the port is taken, InputError where the
// inherited one is none.
[[nodiscard]] Socket ListenFor(const Launch& launch);
// A connection to process 0, or none with the reason in `problem`. No attempt takes longer than
// `limit`.
[[nodiscard]] Socket ConnectTo(const Launch& launch, int port, std::chrono::milliseconds limit,
                               std::string* problem);

}  // namespace shardwright::tcp
