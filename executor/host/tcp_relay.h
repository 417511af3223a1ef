#pragma once

// The thread of process 0 that lets the others in and passes their messages on.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "executor/host/launch.h"
#include "executor/host/tcp_frames.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_socket.h"

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

  // Who has connected and proven nothing yet: at most so many at once, each for so long. If more
  // knock, those that have had their time to answer make room.
  static constexpr std::size_t kMostStrangers = 64;
  static constexpr std::chrono::milliseconds kTimeToProve{5000};
  static constexpr std::chrono::milliseconds kTimeWhenCrowded{100};
  // What may wait for one process; then those that send to it wait, too.
  static constexpr std::size_t kMostQueued = std::size_t{4} << 20;

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kStranger, kProven, kMember, kSentAway };
  struct Peer {
    Socket socket;
    std::string address;  // for messages; empty: process 0's own
    State state = State::kStranger;
    Clock::time_point since;      // it came
    Clock::time_point last_took;  // something, or had nothing to take
    Nonce nonce{};                // what it was asked
    Session session;
    int rank = -1;
    bool done = false;           // has said bye
    int waits_for = -1;          // its next message goes to this rank, which has too many
    std::vector<std::byte> in;   // of a message that is not whole
    std::vector<std::byte> out;  // what it has not taken, from `out_begin` on
    std::size_t out_begin = 0;
    [[nodiscard]] std::size_t queued() const { return out.size() - out_begin; }
  };
  void Run();
  void Turn(Clock::time_point* end);
  void AddOwn();
  void Accept();
  // Whether one more stranger may come now.
  [[nodiscard]] bool MakeRoom(Clock::time_point now);
  void DropOldestStranger();
  // False: the peer is gone, or is not wanted.
  [[nodiscard]] bool ReadFrom(Peer& peer);
  [[nodiscard]] bool TakeAll(Peer& peer);
  [[nodiscard]] bool CheckAnswer(Peer& peer);
  [[nodiscard]] bool Welcome(Peer& peer);
  [[nodiscard]] bool WriteTo(Peer& peer);
  // What a member may not send now; empty: it may.
  [[nodiscard]] std::string ProblemOf(const Peer& peer, const Frame& frame) const;
  void Take(Peer& peer, const Frame& frame, const std::byte* data);
  [[nodiscard]] Peer* MemberOf(int rank) const;
  [[nodiscard]] bool MustWait(const Peer& peer) const;
  [[nodiscard]] static std::string NameOf(const Peer& peer);
  static void Push(Peer& peer, const void* data, std::size_t bytes);
  static void Push(Peer& peer, const Frame& frame, const void* data);
  void PushToAll(const Frame& frame, const void* data, const Peer* but);
  void FailAll(const std::string& cause, const Peer* but);
  void Lose(const Peer& peer);
  // When all are there nobody else may come: strangers find no port from then on.
  void CloseDoor();
  void CheckLate(Clock::time_point now);
  void CheckStuck(Clock::time_point now);
  [[nodiscard]] bool IsEmptied() const;
  [[nodiscard]] bool IsComplete() const { return known_ == size_; }

  const int size_;
  const std::string key_;
  const std::string job_;
  const bool is_within_user_;
  const Clock::time_point deadline_;
  const std::chrono::milliseconds timeout_;
  Socket listener_;
  int port_ = 0;
  Socket wake_read_, wake_write_;             // ends the thread
  Socket own_, own_peer_;                     // process 0's connection
  std::vector<std::unique_ptr<Peer>> peers_;  // of the thread
  Clock::time_point no_accept_before_;        // descriptors have run out
  int known_ = 0;                             // peers with a rank
  std::int64_t turned_away_ = 0;              // proved nothing
  std::string last_turned_away_;
  std::string cause_;  // of the first failure
  std::thread thread_;
};

}  // namespace shardwright::tcp
