#pragma once

// What process 0 does with what comes in, whoever sends it: lets in who proves the run's key,
// passes members' messages on, and ends the run when one breaks the rules. It reads and writes no
// socket: tcp_relay.h does.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "executor/host/launch.h"
#include "executor/host/tcp_frames.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_socket.h"

namespace shardwright::tcp {

class Switchboard {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State { kStranger, kProven, kMember, kSentAway };
  struct Peer {
    Socket socket;        // of the relay
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
    void ClearOut() {
      out.clear();
      out_begin = 0;
    }
  };

  // `port` is for messages; ranks may come until `timeout` is over, which is also how long one may
  // take nothing, until set_timeout.
  Switchboard(const Launch& launch, int port, std::chrono::milliseconds timeout);

  // Who has connected and proven nothing yet: at most so many at once, each for so long. If more
  // knock, those that have had their time to answer make room.
  static constexpr std::size_t kMostStrangers = 64;
  static constexpr std::chrono::milliseconds kTimeToProve{5000};
  static constexpr std::chrono::milliseconds kTimeWhenCrowded{100};
  // What may wait for one process; then those that send to it wait, too.
  static constexpr std::size_t kMostQueued = std::size_t{4} << 20;

  // Process 0's own connection, which is no network's.
  Peer& AddOwn(Socket socket);
  // Whether one more stranger may come now.
  [[nodiscard]] bool MakeRoom(Clock::time_point now);
  void DropOldestStranger();
  Peer& AddStranger(Socket socket, const std::string& address, Clock::time_point now);
  // One that is not even asked.
  void TurnAway(const std::string& address);

  // How many bytes may be added to what has come of a peer, at most; of a stranger its answer.
  [[nodiscard]] static std::size_t MostFrom(const Peer& peer);
  // They have been. False: the peer is not wanted.
  [[nodiscard]] bool Receive(Peer& peer);
  // One that had to wait and need not any more: the same.
  [[nodiscard]] bool Resume(Peer& peer) { return TakeAll(peer); }
  [[nodiscard]] bool MustWait(const Peer& peer) const;
  // A peer is gone; its reference is no longer valid.
  void Lose(const Peer& peer);
  void DropStrangers();
  // Ends the run if ranks have not come in time, or one takes nothing while others wait for it.
  void CheckTimes(Clock::time_point now);

  // Any thread.
  void set_timeout(std::chrono::milliseconds timeout) { stuck_after_ = timeout; }

  [[nodiscard]] const std::vector<std::unique_ptr<Peer>>& peers() const { return peers_; }
  void Clear() { peers_.clear(); }
  [[nodiscard]] bool IsEmptied() const;
  [[nodiscard]] bool IsComplete() const { return known_ == size_; }

 private:
  [[nodiscard]] bool CheckAnswer(Peer& peer);
  [[nodiscard]] bool Welcome(Peer& peer);
  [[nodiscard]] bool TakeAll(Peer& peer);
  // What a member may not send now; empty: it may.
  [[nodiscard]] std::string ProblemOf(const Peer& peer, const Frame& frame) const;
  void Take(Peer& peer, const Frame& frame, const std::byte* data);
  [[nodiscard]] Peer* MemberOf(int rank) const;
  [[nodiscard]] static std::string NameOf(const Peer& peer);
  static void Push(Peer& peer, const void* data, std::size_t bytes);
  static void Push(Peer& peer, const Frame& frame, const void* data);
  void PushToAll(const Frame& frame, const void* data, const Peer* but);
  void FailAll(const std::string& cause, const Peer* but);
  void CheckLate(Clock::time_point now);
  void CheckStuck(Clock::time_point now);

  const int size_;
  const int port_;
  const std::string key_;
  const std::string job_;
  const Clock::time_point deadline_;
  const std::chrono::milliseconds timeout_;  // for ranks to come
  std::atomic<std::chrono::milliseconds> stuck_after_;
  std::vector<std::unique_ptr<Peer>> peers_;
  int known_ = 0;                 // peers with a rank
  std::int64_t turned_away_ = 0;  // proved nothing
  std::string last_turned_away_;
  std::string cause_;  // of the first failure
};

}  // namespace shardwright::tcp
