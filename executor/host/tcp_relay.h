#pragma once

// The thread of process 0 that lets the others in and passes their messages on: the sockets of a
// switchboard.

#include <chrono>
#include <thread>
#include <utility>

#include "executor/host/launch.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/tcp_switchboard.h"

namespace shardwright::tcp {

class Relay {
 public:
  // Listens from now on, until all ranks are there. Throws EnvironmentError where the port is
  // taken.
  Relay(const Launch& launch, std::chrono::milliseconds timeout);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Process 0's own connection, which is no network's; to be taken once.
  [[nodiscard]] Socket TakeOwn() { return std::move(own_); }
  [[nodiscard]] int port() const { return port_; }
  // How long others may wait for a rank that takes nothing; any thread.
  void set_timeout(std::chrono::milliseconds timeout) { board_.set_timeout(timeout); }

 private:
  using Clock = Switchboard::Clock;
  using Peer = Switchboard::Peer;
  void Run();
  void Turn(Clock::time_point* end);
  [[nodiscard]] bool MayAccept() const;
  void Accept();
  // False: the peer is gone, or is not wanted.
  [[nodiscard]] bool ReadFrom(Peer& peer);
  [[nodiscard]] static bool WriteTo(Peer& peer);
  // When all are there nobody else may come: strangers find no port from then on.
  void CloseDoor();

  const bool is_within_user_;
  Socket listener_;
  int port_ = 0;
  Switchboard board_;                   // of the thread
  Socket wake_read_, wake_write_;       // ends the thread
  Socket own_;                          // process 0's end of its connection
  Clock::time_point no_accept_before_;  // descriptors have run out
  std::thread thread_;
};

}  // namespace shardwright::tcp
