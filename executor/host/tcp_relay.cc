#include "executor/host/tcp_relay.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/error.h"
#include "core/ranges.h"
#include "core/threads.h"

namespace shardwright::tcp {
namespace {

[[noreturn]] void ThrowSystem(const char* what) {
  throw EnvironmentError("rank 0: " + std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

Relay::Relay(const Launch& launch, std::chrono::milliseconds timeout)
    : is_within_user_(MeetsWithinUser(launch) && launch.listener < 0),
      listener_(ListenFor(launch)),
      port_(is_within_user_ ? launch.port : PortOf(listener_)),
      board_(launch, port_, timeout) {
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
  Socket own_peer(ends[1]);
  // Who was about to connect may have gone again: then accept must not wait for the next one.
  if (::fcntl(listener_.fd(), F_SETFL, O_NONBLOCK) != 0 ||
      ::fcntl(own_peer.fd(), F_SETFL, O_NONBLOCK) != 0) {
    ThrowSystem("cannot set up a socket");
  }
  (void)board_.AddOwn(std::move(own_peer));
  thread_ = StartThread([this] { Run(); });
}

Relay::~Relay() {
  const char end = 0;
  (void)!::write(wake_write_.fd(), &end, 1);
  thread_.join();
}

void Relay::Run() {
  try {
    Clock::time_point end = Clock::time_point::max();
    while (Clock::now() < end && (end == Clock::time_point::max() || !board_.IsEmptied())) {
      Turn(&end);
    }
  } catch (const std::exception&) {
    // Out of memory. All lose their connection, and say so.
  }
  board_.Clear();
}

void Relay::Turn(Clock::time_point* end) {
  const bool listens = MayAccept() && board_.MakeRoom(Clock::now());
  std::vector<pollfd> polled = {
      {listens ? listener_.fd() : -1, POLLIN, 0},
      {*end == Clock::time_point::max() ? wake_read_.fd() : -1, POLLIN, 0}};
  for (const std::unique_ptr<Peer>& peer : board_.peers()) {
    const int in = peer->waits_for >= 0 ? POLLRDHUP : POLLIN;
    polled.push_back(
        {peer->socket.fd(), static_cast<short>(in | (peer->out.empty() ? 0 : POLLOUT)), 0});
  }
  const bool has_work = AnyOf(board_.peers(), [&](const auto& peer) {
    return peer->waits_for >= 0 && !board_.MustWait(*peer);
  });
  constexpr int kWait = 100;  // ms
  (void)::poll(polled.data(), polled.size(), has_work ? 0 : kWait);
  constexpr std::chrono::seconds kLinger{2};  // for what is to be written when all is over
  if (polled[1].revents != 0) {
    *end = Clock::now() + kLinger;
  }
  std::vector<Peer*> gone;
  for (std::size_t i = 2; i < polled.size(); ++i) {
    Peer& peer = *board_.peers()[i - 2];
    const int events = polled[i].revents;
    // One that waits has its rank's messages in front of everything, so its end is seen here.
    const bool has_ended = (events & (POLLRDHUP | POLLHUP | POLLERR)) != 0 && peer.waits_for >= 0;
    if (has_ended || ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !ReadFrom(peer)) ||
        (peer.waits_for >= 0 && !board_.MustWait(peer) && !board_.Resume(peer))) {
      gone.push_back(&peer);
    }
  }
  for (Peer* const peer : gone) {
    board_.Lose(*peer);
  }
  // What this round brought goes out at once where it fits.
  for (const std::unique_ptr<Peer>& peer : board_.peers()) {
    if (!WriteTo(*peer)) {
      peer->ClearOut();  // reading tells that it is gone
    }
  }
  const Clock::time_point now = Clock::now();
  if ((polled[0].revents & POLLIN) != 0) {
    Accept();
  }
  CloseDoor();
  board_.CheckTimes(now);
}

bool Relay::MayAccept() const {
  return listener_.fd() >= 0 && Clock::now() >= no_accept_before_;
}

void Relay::Accept() {
  const Clock::time_point now = Clock::now();
  while (MayAccept() && board_.MakeRoom(now)) {
    Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.fd() < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        board_.DropOldestStranger();
        no_accept_before_ = now + Switchboard::kTimeWhenCrowded;
      }
      return;
    }
    Configure(socket);
    const std::string address = socket.PeerName();
    if (is_within_user_ && !socket.PeerIsThisUser()) {
      board_.TurnAway(address);
      continue;
    }
    (void)WriteTo(board_.AddStranger(std::move(socket), address, now));
  }
}

bool Relay::ReadFrom(Peer& peer) {
  if (peer.state == Switchboard::State::kSentAway || peer.waits_for >= 0) {
    return peer.state != Switchboard::State::kSentAway;
  }
  const std::size_t before = peer.in.size();
  const std::size_t most = Switchboard::MostFrom(peer);
  peer.in.resize(before + most);
  const ssize_t count = ::recv(peer.socket.fd(), peer.in.data() + before, most, 0);
  peer.in.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (count <= 0) {
    return count < 0 && (errno == EAGAIN || errno == EINTR);
  }
  const bool is_wanted = board_.Receive(peer);
  if (!is_wanted && peer.state == Switchboard::State::kStranger) {
    // What it is told goes out now, if it takes it; then it is closed.
    (void)WriteTo(peer);
  }
  return is_wanted;
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
    peer.ClearOut();
  }
  peer.last_took = Clock::now();
  return true;
}

void Relay::CloseDoor() {
  if (board_.IsComplete() && listener_.fd() >= 0) {
    listener_ = Socket();
    board_.DropStrangers();
  }
}

}  // namespace shardwright::tcp
