#include "executor/host/tcp_switchboard.h"

#include <cstring>
#include <utility>

#include "core/ranges.h"

namespace shardwright::tcp {
namespace {

std::string TextOf(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

std::string RankText(int rank) {
  return "rank " + std::to_string(rank);
}

}  // namespace

Switchboard::Switchboard(const Launch& launch, int port, std::chrono::milliseconds timeout)
    : size_(launch.size),
      port_(port),
      key_(launch.key),
      job_(JobOf(launch)),
      deadline_(Clock::now() + timeout),
      timeout_(timeout),
      stuck_after_(timeout) {}

// Nobody else can have rank 0.
Switchboard::Peer& Switchboard::AddOwn(Socket socket) {
  peers_.push_back(std::make_unique<Peer>());
  Peer& peer = *peers_.back();
  peer.socket = std::move(socket);
  peer.state = State::kMember;
  peer.since = peer.last_took = Clock::now();
  peer.rank = 0;
  known_ = 1;
  if (IsComplete()) {
    Push(peer, {.kind = Kind::kWelcome}, nullptr);
  }
  return peer;
}

bool Switchboard::MakeRoom(Clock::time_point now) {
  std::size_t strangers = 0;
  Clock::time_point oldest = now;
  for (const std::unique_ptr<Peer>& peer : peers_) {
    strangers += peer->state == State::kStranger ? 1 : 0;
    if (peer->state == State::kStranger) {
      oldest = std::min(oldest, peer->since);
    }
  }
  if (strangers < kMostStrangers) {
    return true;
  }
  if (now - oldest < kTimeWhenCrowded) {
    return false;
  }
  DropOldestStranger();
  return true;
}

void Switchboard::DropOldestStranger() {
  const Peer* oldest = nullptr;
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer->state == State::kStranger && (oldest == nullptr || peer->since < oldest->since)) {
      oldest = peer.get();
    }
  }
  if (oldest != nullptr) {
    Lose(*oldest);
  }
}

Switchboard::Peer& Switchboard::AddStranger(Socket socket, const std::string& address,
                                            Clock::time_point now) {
  Peer& peer = *peers_.emplace_back(std::make_unique<Peer>());
  peer.socket = std::move(socket);
  peer.address = address;
  peer.since = peer.last_took = now;
  peer.nonce = NewNonce();
  const Challenge challenge{.nonce = peer.nonce};
  Push(peer, &challenge, sizeof challenge);
  return peer;
}

void Switchboard::TurnAway(const std::string& address) {
  ++turned_away_;
  last_turned_away_ = address;
}

std::size_t Switchboard::MostFrom(const Peer& peer) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  return peer.state == State::kStranger ? sizeof(Answer) - peer.in.size() : kPiece;
}

bool Switchboard::Receive(Peer& peer) {
  switch (peer.state) {
    case State::kStranger:
      return peer.in.size() < sizeof(Answer) || CheckAnswer(peer);
    case State::kProven:
      return Welcome(peer);
    case State::kMember:
      return TakeAll(peer);
    case State::kSentAway:
      break;
  }
  return false;
}

bool Switchboard::CheckAnswer(Peer& peer) {
  Answer answer;
  std::memcpy(&answer, peer.in.data(), sizeof answer);
  peer.in.clear();
  peer.in.shrink_to_fit();
  if (answer.magic != kHandshake) {
    return false;
  }
  peer.session = Session(key_, peer.nonce, answer.nonce);
  const bool is_right = AreEqual(answer.proof, peer.session.WorkerProof());
  const Acceptance acceptance{.proof = is_right ? peer.session.FirstProof() : Digest{}};
  Push(peer, &acceptance, sizeof acceptance);
  peer.state = is_right ? State::kProven : peer.state;
  return is_right;
}

// A process that has the key and does not belong here is told so, and nobody else is.
bool Switchboard::Welcome(Peer& peer) {
  Frame frame;
  if (peer.in.size() < sizeof frame) {
    return true;
  }
  std::memcpy(&frame, peer.in.data(), sizeof frame);
  constexpr std::int64_t kProof = sizeof(Digest);
  if (!IsSane(frame) || frame.kind != Kind::kHello || frame.bytes < kProof ||
      frame.bytes > kProof + static_cast<std::int64_t>(kLongestJob)) {
    return false;
  }
  const std::size_t whole = sizeof frame + static_cast<std::size_t>(frame.bytes);
  if (peer.in.size() < whole) {
    return true;
  }
  const char* const body = reinterpret_cast<const char*>(peer.in.data()) + sizeof frame;
  Digest proof{};
  std::memcpy(proof.data(), body, proof.size());
  const std::string job(body + kProof, static_cast<std::size_t>(frame.bytes - kProof));
  peer.in.erase(peer.in.begin(), peer.in.begin() + static_cast<std::ptrdiff_t>(whole));
  if (!AreEqual(proof, peer.session.HelloProof(frame.from, frame.size, job))) {
    return false;
  }
  const std::string who = RankText(frame.from) + ": ";
  std::string problem;
  if (frame.size != size_) {
    problem = who + "it was started as one of " + std::to_string(frame.size) +
              " processes, rank 0 as one of " + std::to_string(size_);
  } else if (job != job_) {
    problem = who + "it belongs to job \"" + job + "\", rank 0 to job \"" + job_ + '"';
  } else if (frame.from < 0 || frame.from >= size_ || MemberOf(frame.from) != nullptr) {
    problem = who + "another process has this rank";
  } else {
    problem = cause_;
  }
  if (!problem.empty()) {
    peer.state = State::kSentAway;
    Push(peer, {.kind = Kind::kFail, .bytes = std::ssize(problem)}, problem.data());
    return true;
  }
  peer.state = State::kMember;
  peer.rank = frame.from;
  if (++known_ == size_) {
    PushToAll({.kind = Kind::kWelcome}, nullptr, nullptr);
  }
  return TakeAll(peer);  // nothing, unless it does not wait for the welcome
}

bool Switchboard::TakeAll(Peer& peer) {
  peer.waits_for = -1;
  std::size_t at = 0;
  Frame frame;
  while (peer.in.size() - at >= sizeof frame) {
    std::memcpy(&frame, peer.in.data() + at, sizeof frame);
    if (const std::string problem = ProblemOf(peer, frame); !problem.empty()) {
      FailAll(NameOf(peer) + ": " + problem, nullptr);
      return false;
    }
    const std::size_t whole = sizeof frame + static_cast<std::size_t>(frame.bytes);
    if (peer.in.size() - at < whole) {
      break;
    }
    if (frame.kind == Kind::kData) {
      peer.waits_for = frame.to;
      if (MustWait(peer)) {
        break;
      }
      peer.waits_for = -1;
    }
    Take(peer, frame, peer.in.data() + at + sizeof frame);
    at += whole;
  }
  peer.in.erase(peer.in.begin(), peer.in.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

bool Switchboard::MustWait(const Peer& peer) const {
  const Peer* const target = MemberOf(peer.waits_for);
  return target != nullptr && target->queued() >= kMostQueued;
}

std::string Switchboard::ProblemOf(const Peer& peer, const Frame& frame) const {
  if (!IsSane(frame)) {
    return "sent what is no message: kind " + std::to_string(static_cast<int>(frame.kind)) +
           " of " + std::to_string(frame.bytes) + " bytes";
  }
  if (frame.from != peer.rank) {
    return "sent a message in the name of rank " + std::to_string(frame.from);
  }
  const bool may_fail = frame.kind == Kind::kFail;
  const bool is_question = frame.kind == Kind::kPing || frame.kind == Kind::kPong;
  if ((!IsComplete() && !may_fail) || (peer.done && !may_fail && !is_question)) {
    return std::string("sent a message ") +
           (peer.done ? "after the end of the run" : "before all were there");
  }
  switch (frame.kind) {
    case Kind::kData:
      return frame.to < 0 || frame.to >= size_ || frame.to == peer.rank
                 ? "sent a message to rank " + std::to_string(frame.to)
                 : "";
    case Kind::kPost:
    case Kind::kFail:
      return "";
    case Kind::kPing:
    case Kind::kPong:
      if (frame.to < 0 || frame.to >= size_) {
        return "sent a message to rank " + std::to_string(frame.to);
      }
      [[fallthrough]];
    case Kind::kBye:
      return frame.bytes > 0 ? "sent a message that is too long" : "";
    case Kind::kHello:
    case Kind::kWelcome:
      break;
  }
  return "sent a message of kind " + std::to_string(static_cast<int>(frame.kind));
}

void Switchboard::Take(Peer& peer, const Frame& frame, const std::byte* data) {
  switch (frame.kind) {
    case Kind::kData:
      if (Peer* const other = MemberOf(frame.to); other != nullptr) {
        Push(*other, frame, data);
      }
      break;
    case Kind::kPing:
    case Kind::kPong:
      // One that waits to send to a rank which takes nothing could not answer.
      if (Peer* const other = MemberOf(frame.to); other != nullptr && other->waits_for >= 0) {
        Push(peer, {.kind = Kind::kPong, .from = frame.to, .to = frame.from}, nullptr);
      } else if (other != nullptr && other->queued() < kMostQueued) {
        Push(*other, frame, nullptr);
      }
      break;
    case Kind::kPost:
      PushToAll(frame, data, &peer);
      break;
    case Kind::kFail:
      FailAll(CauseOf(data, frame.bytes), &peer);
      break;
    case Kind::kBye:
      peer.done = true;
      if (AllOf(peers_, [](const auto& p) { return p->done || p->rank < 0; })) {
        PushToAll({.kind = Kind::kBye}, nullptr, nullptr);
      }
      break;
    case Kind::kHello:
    case Kind::kWelcome:
      break;  // not of a member (ProblemOf)
  }
}

Switchboard::Peer* Switchboard::MemberOf(int rank) const {
  const auto found = FindIf(peers_, [&](const auto& peer) {
    return peer->state == State::kMember && peer->rank == rank;
  });
  return found == peers_.end() ? nullptr : found->get();
}

std::string Switchboard::NameOf(const Peer& peer) {
  return RankText(peer.rank) + (peer.address.empty() ? "" : " (" + peer.address + ')');
}

void Switchboard::Push(Peer& peer, const void* data, std::size_t bytes) {
  // A peer that is always a little behind never empties its queue: what it has taken goes once it
  // is half of all, so that a byte moves once on average.
  if (peer.out_begin > peer.out.size() / 2) {
    peer.out.erase(peer.out.begin(),
                   peer.out.begin() + static_cast<std::ptrdiff_t>(peer.out_begin));
    peer.out_begin = 0;
  }
  const auto* const begin = static_cast<const std::byte*>(data);
  peer.out.insert(peer.out.end(), begin, begin + bytes);
}

void Switchboard::Push(Peer& peer, const Frame& frame, const void* data) {
  Push(peer, &frame, sizeof frame);
  Push(peer, data, static_cast<std::size_t>(frame.bytes));
}

void Switchboard::PushToAll(const Frame& frame, const void* data, const Peer* but) {
  for (const std::unique_ptr<Peer>& peer : peers_) {
    // Who is behind can do without a notice: the next one takes its place.
    const bool is_full = frame.kind == Kind::kPost && peer->queued() >= kMostQueued;
    if (peer.get() != but && peer->state == State::kMember && !is_full) {
      Push(*peer, frame, data);
    }
  }
}

void Switchboard::FailAll(const std::string& cause, const Peer* but) {
  if (!cause_.empty()) {
    return;  // they have been told
  }
  cause_ = cause.substr(0, static_cast<std::size_t>(kLongestCause));
  PushToAll({.kind = Kind::kFail, .bytes = std::ssize(cause_)}, cause_.data(), but);
}

void Switchboard::Lose(const Peer& peer) {
  if (peer.state == State::kMember && !peer.done) {
    FailAll(NameOf(peer) + ": its process has ended", &peer);
  }
  if (peer.state == State::kStranger) {
    TurnAway(peer.address);
  }
  std::erase_if(peers_, [&](const auto& p) { return p.get() == &peer; });
}

void Switchboard::DropStrangers() {
  std::erase_if(peers_, [](const auto& p) { return p->state == State::kStranger; });
}

void Switchboard::CheckTimes(Clock::time_point now) {
  CheckLate(now);
  CheckStuck(now);
}

void Switchboard::CheckLate(Clock::time_point now) {
  for (std::size_t i = peers_.size(); i-- > 0;) {
    if (peers_[i]->state != State::kMember && now - peers_[i]->since > kTimeToProve) {
      Lose(*peers_[i]);
    }
  }
  if (IsComplete() || !cause_.empty() || now < deadline_) {
    return;
  }
  std::string missing;
  for (int r = 1; r < size_; ++r) {
    if (MemberOf(r) == nullptr) {
      missing += (missing.empty() ? " " : ", ") + std::to_string(r);
    }
  }
  FailAll("rank 0: waited " + TextOf(timeout_) + " at port " + std::to_string(port_) +
              (missing.find(',') == std::string::npos ? " for rank" : " for ranks") + missing +
              (turned_away_ == 0 ? ""
                                 : "; " + std::to_string(turned_away_) +
                                       " connections did not prove the run's key, the last from " +
                                       last_turned_away_),
          nullptr);
}

// Others wait to send to a process that takes nothing.
void Switchboard::CheckStuck(Clock::time_point now) {
  const std::chrono::milliseconds limit = stuck_after_;
  for (const std::unique_ptr<Peer>& peer : peers_) {
    const Peer* const target = peer->waits_for >= 0 ? MemberOf(peer->waits_for) : nullptr;
    if (target != nullptr && now - target->last_took > limit) {
      FailAll("rank 0, messages for " + NameOf(*target) + ": waited " + TextOf(limit) + " for " +
                  RankText(target->rank),
              nullptr);
      return;
    }
  }
}

bool Switchboard::IsEmptied() const {
  return AllOf(peers_, [](const auto& peer) { return peer->out.empty(); });
}

}  // namespace shardwright::tcp
