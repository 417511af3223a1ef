#include "executor/host/tcp_relay.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/error.h"

namespace shardwright::tcp {
namespace {

std::string TextOf(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

std::string RankText(int rank) {
  return "rank " + std::to_string(rank);
}

[[noreturn]] void ThrowSystem(const char* what) {
  throw EnvironmentError("rank 0: " + std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

Relay::Relay(const Launch& launch, std::chrono::milliseconds timeout)
    : size_(launch.size),
      key_(launch.key),
      job_(JobOf(launch)),
      is_within_user_(MeetsWithinUser(launch) && launch.listener < 0),
      deadline_(Clock::now() + timeout),
      timeout_(timeout),
      listener_(ListenFor(launch)),
      port_(is_within_user_ ? launch.port : PortOf(listener_)) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    ThrowSystem("cannot make a pipe");
  }
  wake_read_ = Socket(ends[0]);
  wake_write_ = Socket(ends[1]);
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    ThrowSystem("cannot make a pair of sockets");
  }
  own_ = Socket(ends[0]);
  own_peer_ = Socket(ends[1]);
  // Who was about to connect may have gone again: then accept must not wait for the next one.
  if (::fcntl(listener_.fd(), F_SETFL, O_NONBLOCK) != 0 ||
      ::fcntl(own_peer_.fd(), F_SETFL, O_NONBLOCK) != 0) {
    ThrowSystem("cannot set up a socket");
  }
  AddOwn();
  thread_ = std::thread([this] { Run(); });
}

Relay::~Relay() {
  const char end = 0;
  (void)!::write(wake_write_.fd(), &end, 1);
  thread_.join();
}

// Nobody else can have rank 0.
void Relay::AddOwn() {
  peers_.push_back(std::make_unique<Peer>());
  Peer& peer = *peers_.back();
  peer.socket = std::move(own_peer_);
  peer.state = State::kMember;
  peer.since = peer.last_took = Clock::now();
  peer.rank = 0;
  known_ = 1;
  if (IsComplete()) {
    Push(peer, {.kind = Kind::kWelcome}, nullptr);
  }
}

std::string Relay::NameOf(const Peer& peer) {
  return RankText(peer.rank) + (peer.address.empty() ? "" : " (" + peer.address + ')');
}

bool Relay::IsEmptied() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return peer->out.empty(); });
}

void Relay::Run() {
  try {
    Clock::time_point end = Clock::time_point::max();
    while (Clock::now() < end && (end == Clock::time_point::max() || !IsEmptied())) {
      Turn(&end);
    }
  } catch (const std::exception&) {
    // Out of memory. All lose their connection, and say so.
  }
  peers_.clear();
}

void Relay::Turn(Clock::time_point* end) {
  const bool listens = listener_.fd() >= 0 && MakeRoom(Clock::now());
  std::vector<pollfd> polled = {
      {listens ? listener_.fd() : -1, POLLIN, 0},
      {*end == Clock::time_point::max() ? wake_read_.fd() : -1, POLLIN, 0}};
  for (const std::unique_ptr<Peer>& peer : peers_) {
    const int in = peer->waits_for >= 0 ? POLLRDHUP : POLLIN;
    polled.push_back(
        {peer->socket.fd(), static_cast<short>(in | (peer->out.empty() ? 0 : POLLOUT)), 0});
  }
  const bool has_work = std::any_of(peers_.begin(), peers_.end(), [&](const auto& peer) {
    return peer->waits_for >= 0 && !MustWait(*peer);
  });
  constexpr int kWait = 100;  // ms
  (void)::poll(polled.data(), polled.size(), has_work ? 0 : kWait);
  constexpr std::chrono::seconds kLinger{2};  // for what is to be written when all is over
  if (polled[1].revents != 0) {
    *end = Clock::now() + kLinger;
  }
  std::vector<Peer*> gone;
  for (std::size_t i = 2; i < polled.size(); ++i) {
    Peer& peer = *peers_[i - 2];
    const int events = polled[i].revents;
    // One that waits has its rank's messages in front of everything, so its end is seen here.
    const bool has_ended = (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0 && peer.waits_for >= 0;
    if (has_ended || ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !ReadFrom(peer)) ||
        (peer.waits_for >= 0 && !MustWait(peer) && !TakeAll(peer))) {
      gone.push_back(&peer);
    }
  }
  for (Peer* const peer : gone) {
    Lose(*peer);
  }
  // What this round brought goes out at once where it fits.
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (!WriteTo(*peer)) {
      peer->out.clear();  // reading tells that it is gone
      peer->out_begin = 0;
    }
  }
  const Clock::time_point now = Clock::now();
  if ((polled[0].revents & POLLIN) != 0 && listener_.fd() >= 0) {
    Accept();
  }
  CloseDoor();
  CheckLate(now);
  CheckStuck(now);
}

bool Relay::MakeRoom(Clock::time_point now) {
  if (now < no_accept_before_) {
    return false;
  }
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

void Relay::DropOldestStranger() {
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

void Relay::Accept() {
  const Clock::time_point now = Clock::now();
  while (MakeRoom(now)) {
    Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.fd() < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        DropOldestStranger();
        no_accept_before_ = now + kTimeWhenCrowded;
      }
      return;
    }
    Configure(socket);
    auto peer = std::make_unique<Peer>();
    peer->address = socket.PeerName();
    peer->since = peer->last_took = now;
    if (is_within_user_ && !socket.PeerIsThisUser()) {
      ++turned_away_;
      last_turned_away_ = peer->address;
      continue;
    }
    peer->socket = std::move(socket);
    peer->nonce = NewNonce();
    const Challenge challenge{.nonce = peer->nonce};
    Push(*peer, &challenge, sizeof challenge);
    (void)WriteTo(*peer);
    peers_.push_back(std::move(peer));
  }
}

bool Relay::ReadFrom(Peer& peer) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  if (peer.state == State::kSentAway || peer.waits_for >= 0) {
    return peer.state != State::kSentAway;
  }
  const std::size_t before = peer.in.size();
  // Of a stranger only its answer is read, and only so much is kept.
  const std::size_t most = peer.state == State::kStranger ? sizeof(Answer) - before : kPiece;
  peer.in.resize(before + most);
  const ssize_t count = ::recv(peer.socket.fd(), peer.in.data() + before, most, 0);
  peer.in.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (count <= 0) {
    return count < 0 && (errno == EAGAIN || errno == EINTR);
  }
  switch (peer.state) {
    case State::kStranger:
      return peer.in.size() < sizeof(Answer) || CheckAnswer(peer);
    case State::kProven:
      return Welcome(peer);
    case State::kMember:
    case State::kSentAway:
      break;
  }
  return TakeAll(peer);
}

bool Relay::CheckAnswer(Peer& peer) {
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
  if (is_right) {
    peer.state = State::kProven;
  } else {
    // What it is told goes out in this round, if it takes it; then it is closed.
    (void)WriteTo(peer);
  }
  return is_right;
}

bool Relay::TakeAll(Peer& peer) {
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

bool Relay::MustWait(const Peer& peer) const {
  const Peer* const target = MemberOf(peer.waits_for);
  return target != nullptr && target->queued() >= kMostQueued;
}

bool Relay::WriteTo(Peer& peer) {
  while (peer.out_begin < peer.out.size()) {
    const ssize_t written = ::send(peer.socket.fd(), peer.out.data() + peer.out_begin,
                                   peer.out.size() - peer.out_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written <= 0) {
      return written < 0 && (errno == EAGAIN || errno == EINTR);
    }
    peer.out_begin += static_cast<std::size_t>(written);
    peer.last_took = Clock::now();
  }
  if (!peer.out.empty()) {
    peer.out.clear();
    peer.out_begin = 0;
  }
  peer.last_took = Clock::now();
  return true;
}

void Relay::Push(Peer& peer, const void* data, std::size_t bytes) {
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

void Relay::Push(Peer& peer, const Frame& frame, const void* data) {
  Push(peer, &frame, sizeof frame);
  Push(peer, data, static_cast<std::size_t>(frame.bytes));
}

void Relay::PushToAll(const Frame& frame, const void* data, const Peer* but) {
  for (const std::unique_ptr<Peer>& peer : peers_) {
    // Who is behind can do without a notice: the next one takes its place.
    const bool is_full = frame.kind == Kind::kPost && peer->queued() >= kMostQueued;
    if (peer.get() != but && peer->state == State::kMember && !is_full) {
      Push(*peer, frame, data);
    }
  }
}

void Relay::FailAll(const std::string& cause, const Peer* but) {
  if (!cause_.empty()) {
    return;  // they have been told
  }
  cause_ = cause.substr(0, static_cast<std::size_t>(kLongestCause));
  PushToAll({.kind = Kind::kFail, .bytes = std::ssize(cause_)}, cause_.data(), but);
}

std::string Relay::ProblemOf(const Peer& peer, const Frame& frame) const {
  if (!IsSane(frame)) {
    return "sent what is no message: kind " + std::to_string(static_cast<int>(frame.kind)) +
           " of " + std::to_string(frame.bytes) + " bytes";
  }
  if (frame.from != peer.rank) {
    return "sent a message in the name of rank " + std::to_string(frame.from);
  }
  const bool may_fail = frame.kind == Kind::kFail;
  if ((!IsComplete() && !may_fail) || (peer.done && !may_fail)) {
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
    case Kind::kBye:
      return frame.bytes > 0 ? "sent a message that is too long" : "";
    case Kind::kHello:
    case Kind::kWelcome:
      break;
  }
  return "sent a message of kind " + std::to_string(static_cast<int>(frame.kind));
}

Relay::Peer* Relay::MemberOf(int rank) const {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [&](const auto& peer) {
    return peer->state == State::kMember && peer->rank == rank;
  });
  return found == peers_.end() ? nullptr : found->get();
}

void Relay::Take(Peer& peer, const Frame& frame, const std::byte* data) {
  switch (frame.kind) {
    case Kind::kData:
      if (Peer* const other = MemberOf(frame.to); other != nullptr) {
        Push(*other, frame, data);
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
      if (std::all_of(peers_.begin(), peers_.end(),
                      [](const auto& p) { return p->done || p->rank < 0; })) {
        PushToAll({.kind = Kind::kBye}, nullptr, nullptr);
      }
      break;
    case Kind::kHello:
    case Kind::kWelcome:
      break;  // not of a member (ProblemOf)
  }
}

// A process that has the key and does not belong here is told so, and nobody else is.
bool Relay::Welcome(Peer& peer) {
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

void Relay::Lose(const Peer& peer) {
  if (peer.state == State::kMember && !peer.done) {
    FailAll(NameOf(peer) + ": its process has ended", &peer);
  }
  if (peer.state == State::kStranger) {
    ++turned_away_;
    last_turned_away_ = peer.address;
  }
  std::erase_if(peers_, [&](const auto& p) { return p.get() == &peer; });
}

void Relay::CloseDoor() {
  if (IsComplete() && listener_.fd() >= 0) {
    listener_ = Socket();
    std::erase_if(peers_, [](const auto& p) { return p->state == State::kStranger; });
  }
}

void Relay::CheckLate(Clock::time_point now) {
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
void Relay::CheckStuck(Clock::time_point now) {
  for (const std::unique_ptr<Peer>& peer : peers_) {
    const Peer* const target = peer->waits_for >= 0 ? MemberOf(peer->waits_for) : nullptr;
    if (target != nullptr && now - target->last_took > timeout_) {
      FailAll("rank 0, messages for " + NameOf(*target) + ": waited " + TextOf(timeout_) + " for " +
                  RankText(target->rank),
              nullptr);
      return;
    }
  }
}

}  // namespace shardwright::tcp
