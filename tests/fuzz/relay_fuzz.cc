// What workers and strangers send to process 0: the bytes are a script of who comes, what it sends,
// raw or framed and with the right proofs or nearly right ones, who takes what is for it, and how
// time passes. Nobody without the key becomes a member, nothing piles up, and members get whole
// frames in the name of others only.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "executor/host/tcp_switchboard.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {
namespace {

using tcp::Frame;
using tcp::Kind;
using tcp::Switchboard;
using Peer = Switchboard::Peer;
using State = Switchboard::State;

class Play {
 public:
  explicit Play(std::string_view script) : script_(script), board_(TheLaunch(), 29'500, kTimeout) {
    (void)board_.AddOwn(tcp::Socket());
  }

  void Run() {
    while (!script_.empty() && !board_.peers().empty()) {
      Act();
      for (Peer* const peer : Peers()) {
        if (peer->waits_for >= 0 && !board_.MustWait(*peer) && !board_.Resume(*peer)) {
          Lose(*peer);
        }
      }
      board_.CheckTimes(now_);
      Check();
    }
    for (Peer* const peer : Peers()) {
      TakeFrom(*peer, peer->queued());
      CheckFrames(*peer);
    }
  }

 private:
  static constexpr std::chrono::milliseconds kTimeout{60'000};
  static constexpr std::int64_t kMostLong = std::int64_t{8} << 20;  // of all long frames

  static const Launch& TheLaunch() {
    static const Launch launch = {.rank = 0,
                                  .size = 3,
                                  .address = "127.0.0.1",
                                  .job = "job",
                                  .key = "a key that is known to this test only"};
    return launch;
  }

  std::uint8_t Byte() {
    const std::uint8_t byte = script_.empty() ? 0 : static_cast<std::uint8_t>(script_[0]);
    script_.remove_prefix(script_.empty() ? 0 : 1);
    return byte;
  }
  std::string Text(std::size_t bytes) {
    std::string text(script_.substr(0, bytes));
    script_.remove_prefix(text.size());
    return text;
  }
  // Small, or where numbers end.
  std::int64_t Number() {
    constexpr std::array<std::int64_t, 8> kEnds = {-1,
                                                   tcp::kLongestFrame,
                                                   tcp::kLongestFrame + 1,
                                                   tcp::kLongestCause + 1,
                                                   tcp::kLongestMessage,
                                                   tcp::kLongestMessage + 1,
                                                   std::int64_t{1} << 62,
                                                   -(std::int64_t{1} << 62)};
    const std::uint8_t byte = Byte();
    return byte < 248 ? byte : kEnds[byte - 248U];
  }

  // Those that are there, of which some may go while they are listed.
  [[nodiscard]] std::vector<Peer*> Peers() const {
    std::vector<Peer*> peers;
    for (const auto& peer : board_.peers()) {
      peers.push_back(peer.get());
    }
    return peers;
  }

  void Act() {
    const std::uint8_t act = Byte();
    Peer& peer = *board_.peers()[Byte() % board_.peers().size()];
    switch (act % 9) {
      case 0:
        if (board_.MakeRoom(now_)) {
          Forget(board_.AddStranger(tcp::Socket(), "10.0.0.7:40312", now_));
        }
        break;
      case 1:
        Send(peer, Text(Byte()));
        break;
      case 2:
        SendAnswer(peer);
        break;
      case 3:
        SendHello(peer);
        break;
      case 4:
        SendFrame(peer);
        break;
      case 5:
        TakeFrom(peer, Byte() * std::size_t{64});
        break;
      case 6:
        now_ += Byte() * std::chrono::milliseconds(50);
        break;
      case 7:
        if (peer.rank != 0) {
          Lose(peer);
        }
        break;
      default:
        SendLong(peer);
        break;
    }
  }

  // As the relay reads: never more than is asked for, and nothing while the peer has to wait.
  void Send(Peer& peer, std::string_view bytes) {
    while (!bytes.empty() && peer.waits_for < 0 && peer.state != State::kSentAway) {
      const std::string_view piece = bytes.substr(0, Switchboard::MostFrom(peer));
      const auto* const begin = reinterpret_cast<const std::byte*>(piece.data());
      peer.in.insert(peer.in.end(), begin, begin + piece.size());
      bytes.remove_prefix(piece.size());
      if (!board_.Receive(peer)) {
        Lose(peer);
        return;
      }
    }
  }
  template <class Value>
  static std::string BytesOf(const Value& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
  // Xor of one byte; usually of none.
  void Damage(std::string& bytes) {
    const std::uint8_t mask = Byte();
    if (mask >= 128 && !bytes.empty()) {
      bytes[Byte() % bytes.size()] ^= static_cast<char>(mask);
    }
  }

  void SendAnswer(Peer& peer) {
    if (peer.address.empty()) {
      return;
    }
    tcp::Answer answer;
    answer.nonce.fill(7);
    sessions_[&peer] = tcp::Session(TheLaunch().key, peer.nonce, answer.nonce);
    answer.proof = sessions_[&peer].WorkerProof();
    std::string bytes = BytesOf(answer);
    Damage(bytes);
    if (peer.state == State::kStranger && peer.in.empty() && bytes == BytesOf(answer)) {
      proven_.insert(&peer);
    }
    Send(peer, bytes);
  }
  void SendHello(Peer& peer) {
    const std::int32_t rank = Byte() % 5 - 1, size = 3 + (Byte() == 255 ? 1 : 0);
    const std::string job = Byte() == 255 ? Text(Byte()) : "job";
    const tcp::Digest proof = sessions_[&peer].HelloProof(rank, size, job);
    const Frame hello{.kind = Kind::kHello,
                      .from = rank,
                      .size = size,
                      .bytes = static_cast<std::int64_t>(proof.size() + job.size())};
    std::string bytes = BytesOf(hello) + BytesOf(proof) + job;
    Damage(bytes);
    Send(peer, bytes);
  }
  void SendFrame(Peer& peer) {
    Frame frame{.kind = static_cast<Kind>(Byte() % 8 - 1)};
    const std::uint8_t from = Byte();
    frame.from = from < 200 ? peer.rank : from % 5 - 1;
    frame.to = Byte() % 5 - 1;
    frame.channel = static_cast<std::int32_t>(Number());
    frame.bytes = Number();
    frame.left = Number();
    const std::size_t body = Byte();
    std::string bytes = BytesOf(frame) + Text(body);
    Damage(bytes);
    Send(peer, bytes);
  }
  void SendLong(Peer& peer) {
    const Frame frame{.kind = Byte() % 4 == 0 ? Kind::kPost : Kind::kData,
                      .from = peer.rank,
                      .to = Byte() % 3,
                      .bytes = std::int64_t{1} << Byte() % 21};
    long_ += frame.bytes;
    if (long_ <= kMostLong) {
      Send(peer, BytesOf(frame) + std::string(static_cast<std::size_t>(frame.bytes), 'x'));
    }
  }

  void TakeFrom(Peer& peer, std::size_t bytes) {
    bytes = std::min(bytes, peer.queued());
    const char* const begin = reinterpret_cast<const char*>(peer.out.data()) + peer.out_begin;
    taken_[&peer].append(begin, bytes);
    peer.out_begin += bytes;
    peer.last_took = now_;
    if (peer.queued() == 0) {
      peer.ClearOut();
    }
  }
  void Lose(Peer& peer) {
    Forget(peer);
    board_.Lose(peer);
  }
  // What was known of one that had its address before.
  void Forget(const Peer& peer) {
    sessions_.erase(&peer);
    proven_.erase(&peer);
    taken_.erase(&peer);
  }

  void Check() {
    std::size_t strangers = 0;
    std::set<int> ranks;
    for (const Peer* const peer : Peers()) {
      strangers += peer->state == State::kStranger ? 1 : 0;
      const bool is_own = peer->address.empty();
      SW_CHECK(peer->state == State::kStranger || is_own || proven_.contains(peer),
               "one without the key came in");
      if (peer->state == State::kMember) {
        SW_CHECK(peer->rank >= (is_own ? 0 : 1) && peer->rank < TheLaunch().size, "rank");
        SW_CHECK(ranks.insert(peer->rank).second, "two of a rank");
      }
      constexpr std::size_t kLongest = sizeof(Frame) + tcp::kLongestFrame;
      SW_CHECK(peer->in.size() <= kLongest + Switchboard::MostFrom(*peer), "input piles up");
      SW_CHECK(peer->queued() <= Switchboard::kMostQueued + 2 * kLongest, "output piles up");
    }
    SW_CHECK(strangers <= Switchboard::kMostStrangers, "strangers");
  }

  // What a member got behind challenge and acceptance.
  void CheckFrames(const Peer& peer) {
    if (peer.state != State::kMember) {
      return;
    }
    std::string_view bytes = taken_[&peer];
    bytes.remove_prefix(peer.address.empty() ? 0
                                             : sizeof(tcp::Challenge) + sizeof(tcp::Acceptance));
    while (!bytes.empty()) {
      Frame frame;
      SW_CHECK(bytes.size() >= sizeof frame, "half a frame");
      std::memcpy(&frame, bytes.data(), sizeof frame);
      bytes.remove_prefix(sizeof frame);
      SW_CHECK(tcp::IsSane(frame) && frame.kind != Kind::kHello, "no frame");
      const bool is_passed_on = frame.kind == Kind::kData || frame.kind == Kind::kPost;
      SW_CHECK(!is_passed_on || frame.from != peer.rank, "in its own name");
      SW_CHECK(frame.kind != Kind::kData || frame.to == peer.rank, "for somebody else");
      SW_CHECK(bytes.size() >= static_cast<std::size_t>(frame.bytes), "half a frame");
      bytes.remove_prefix(static_cast<std::size_t>(frame.bytes));
    }
  }

  std::string_view script_;
  Switchboard board_;
  Switchboard::Clock::time_point now_ = Switchboard::Clock::now();
  std::map<const Peer*, tcp::Session> sessions_;
  std::map<const Peer*, std::string> taken_;
  std::set<const Peer*> proven_;
  std::int64_t long_ = 0;
};

}  // namespace

void Read(std::string_view bytes) {
  Play(bytes).Run();
}

}  // namespace shardwright::fuzz
