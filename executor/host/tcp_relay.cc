#include "executor/host/tcp_relay.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/error.h"

namespace shardwright::tcp {
namespace {

using Clock = std::chrono::steady_clock;

// Longer messages are not ours: the memory for one is taken before it has come.
constexpr std::int64_t kLongest = std::int64_t{1} << 34;

std::string TextOf(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

void Configure(int fd) {
  const int on = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

// `direction`: SO_RCVTIMEO or SO_SNDTIMEO.
void SetTimeLimit(int fd, int direction, std::chrono::milliseconds left) {
  const auto ms = std::max<std::int64_t>(left.count(), 0);
  const timeval time{ms / 1000, ms % 1000 * 1000};
  (void)::setsockopt(fd, SOL_SOCKET, direction, &time, sizeof time);
}

// A connection, or none with the reason in `problem`.
Socket Connect(const std::string& address, int port, std::string* problem) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    *problem = ::gai_strerror(status);
    return Socket();
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const bool connected =
        socket.fd() >= 0 && ::connect(socket.fd(), a->ai_addr, a->ai_addrlen) == 0;
    if (connected && !socket.CallsItself()) {
      return socket;
    }
    *problem = std::strerror(connected ? ECONNREFUSED : errno);
  }
  return Socket();
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

bool Socket::Write(const void* data, std::size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written = ::send(fd_, at, bytes, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      return false;
    }
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return true;
}

bool Socket::Read(void* data, std::size_t bytes) const {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t count = ::recv(fd_, at, bytes, 0);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      return false;
    }
    at += count;
    bytes -= static_cast<std::size_t>(count);
  }
  return true;
}

bool Socket::CallsItself() const {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return ::getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(fd_, reinterpret_cast<sockaddr*>(&other), &other_size) == 0 &&
         own_size == other_size && std::memcmp(&own, &other, own_size) == 0;
}

void Socket::Shutdown() const {
  (void)::shutdown(fd_, SHUT_RDWR);
}

Socket Listen(int port) {
  Socket socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  const int off = 0;
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(static_cast<std::uint16_t>(port));
  address.sin6_addr = in6addr_any;
  bool bound = socket.fd() >= 0 &&
               ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
               ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
               ::bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  if (!bound && errno != EADDRINUSE) {  // a kernel without IPv6
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in old{};
    old.sin_family = AF_INET;
    old.sin_port = htons(static_cast<std::uint16_t>(port));
    bound = socket.fd() >= 0 &&
            ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            ::bind(socket.fd(), reinterpret_cast<sockaddr*>(&old), sizeof old) == 0;
  }
  if (!bound || ::listen(socket.fd(), SOMAXCONN) != 0) {
    throw EnvironmentError("rank 0: cannot listen at port " + std::to_string(port) + ": " +
                           std::strerror(errno) + "; set MASTER_PORT to a free one");
  }
  return socket;
}

int PortOf(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  SW_CHECK(::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
           "a listener without an address");
  // The port is at the same place for both families.
  return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Socket Join(const Launch& launch, int port, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  const std::string who = "rank " + std::to_string(launch.rank);
  const std::string address = launch.rank == 0 ? "127.0.0.1" : launch.address;
  std::string problem;
  Socket socket = Connect(address, port, &problem);
  while (socket.fd() < 0 && Clock::now() < deadline) {
    constexpr std::chrono::milliseconds kPause{20};
    std::this_thread::sleep_for(kPause);
    socket = Connect(address, port, &problem);
  }
  const int fd = socket.fd();
  if (fd < 0) {
    throw RunError(who + ": rank 0 does not answer at " + address + ':' + std::to_string(port) +
                   " within " + TextOf(timeout) + ": " + problem);
  }
  Configure(fd);
  const Frame hello{.kind = Kind::kHello,
                    .from = launch.rank,
                    .size = launch.size,
                    .bytes = static_cast<std::int64_t>(launch.job.size())};
  // The relay says who is missing; this is for one that says nothing.
  SetTimeLimit(fd, SO_RCVTIMEO, 2 * timeout);
  Frame answer;
  if (!socket.Write(&hello, sizeof hello) || !socket.Write(launch.job.data(), launch.job.size()) ||
      !socket.Read(&answer, sizeof answer) || answer.magic != kMagic || answer.bytes < 0 ||
      answer.bytes > kLongest || (answer.kind != Kind::kWelcome && answer.kind != Kind::kFail)) {
    throw RunError(who + ": what answers at " + address + ':' + std::to_string(port) +
                   " is not rank 0 of this run");
  }
  if (answer.kind == Kind::kFail) {
    std::string cause(static_cast<std::size_t>(answer.bytes), '\0');
    (void)socket.Read(cause.data(), cause.size());
    throw RunError(cause);
  }
  // Nothing may come for as long as it likes; what goes out, process 0 has to take.
  SetTimeLimit(fd, SO_RCVTIMEO, std::chrono::milliseconds(0));
  SetTimeLimit(fd, SO_SNDTIMEO, timeout);
  return socket;
}

Relay::Relay(const Launch& launch, std::chrono::milliseconds timeout)
    : size_(launch.size),
      job_(launch.job),
      deadline_(Clock::now() + timeout),
      timeout_(timeout),
      listener_(launch.listener >= 0 ? Socket(launch.listener) : Listen(launch.port)),
      port_(PortOf(listener_)) {
  std::array<int, 2> ends{};
  SW_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, std::strerror(errno));
  // Who was about to connect may have gone again: then accept must not wait for the next one.
  SW_CHECK(::fcntl(listener_.fd(), F_SETFL, O_NONBLOCK) == 0, std::strerror(errno));
  wake_read_ = Socket(ends[0]);
  wake_write_ = Socket(ends[1]);
  thread_ = std::thread([this] { Run(); });
}

Relay::~Relay() {
  const char end = 0;
  (void)!::write(wake_write_.fd(), &end, 1);
  thread_.join();
}

bool Relay::IsEmptied() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return peer->out.empty(); });
}

void Relay::Run() {
  constexpr std::chrono::seconds kLinger{2};  // for what is to be written when all is over
  Clock::time_point end = Clock::time_point::max();
  while (Clock::now() < end && (end == Clock::time_point::max() || !IsEmptied())) {
    std::vector<pollfd> polled = {{listener_.fd(), POLLIN, 0}, {wake_read_.fd(), POLLIN, 0}};
    for (const std::unique_ptr<Peer>& peer : peers_) {
      polled.push_back(
          {peer->socket.fd(), static_cast<short>(POLLIN | (peer->out.empty() ? 0 : POLLOUT)), 0});
    }
    constexpr int kWait = 100;  // ms
    (void)::poll(polled.data(), polled.size(), kWait);
    if (polled[1].revents != 0 && end == Clock::time_point::max()) {
      end = Clock::now() + kLinger;
    }
    std::vector<Peer*> gone;
    for (std::size_t i = 2; i < polled.size(); ++i) {
      Peer& peer = *peers_[i - 2];
      if ((polled[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !ReadFrom(peer)) {
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
      }
    }
    if ((polled[0].revents & POLLIN) != 0) {
      Accept();
    }
    CheckLate();
  }
}

void Relay::Accept() {
  const int fd = ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd >= 0) {
    Configure(fd);
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->socket = Socket(fd);
  }
}

bool Relay::ReadFrom(Peer& peer) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  const std::size_t before = peer.in.size();
  peer.in.resize(before + kPiece);
  const ssize_t count = ::recv(peer.socket.fd(), peer.in.data() + before, kPiece, 0);
  peer.in.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (count <= 0) {
    return count < 0 && (errno == EAGAIN || errno == EINTR);
  }
  std::size_t at = 0;
  Frame frame;
  while (peer.in.size() - at >= sizeof frame) {
    std::memcpy(&frame, peer.in.data() + at, sizeof frame);
    if (frame.magic != kMagic || frame.bytes < 0 || frame.bytes > kLongest ||
        (peer.rank < 0 && frame.kind != Kind::kHello)) {
      return false;
    }
    const std::size_t whole = sizeof frame + static_cast<std::size_t>(frame.bytes);
    if (peer.in.size() - at < whole) {
      break;
    }
    Take(peer, frame, peer.in.data() + at + sizeof frame);
    at += whole;
  }
  peer.in.erase(peer.in.begin(), peer.in.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

bool Relay::WriteTo(Peer& peer) {
  while (peer.out_begin < peer.out.size()) {
    const ssize_t written = ::send(peer.socket.fd(), peer.out.data() + peer.out_begin,
                                   peer.out.size() - peer.out_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written <= 0) {
      return written < 0 && (errno == EAGAIN || errno == EINTR);
    }
    peer.out_begin += static_cast<std::size_t>(written);
  }
  peer.out.clear();
  peer.out_begin = 0;
  return true;
}

void Relay::Push(Peer& peer, const Frame& frame, const void* data) {
  // A peer that is always a little behind never empties its queue: what it has taken goes once it
  // is half of all, so that a byte moves once on average.
  if (peer.out_begin > peer.out.size() / 2) {
    peer.out.erase(peer.out.begin(),
                   peer.out.begin() + static_cast<std::ptrdiff_t>(peer.out_begin));
    peer.out_begin = 0;
  }
  const auto* const head = reinterpret_cast<const std::byte*>(&frame);
  const auto* const body = static_cast<const std::byte*>(data);
  peer.out.insert(peer.out.end(), head, head + sizeof frame);
  peer.out.insert(peer.out.end(), body, body + frame.bytes);
}

void Relay::PushToAll(const Frame& frame, const void* data, const Peer* but) {
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer.get() != but && peer->rank >= 0) {
      Push(*peer, frame, data);
    }
  }
}

void Relay::FailAll(const std::string& cause, const Peer* but) {
  if (!cause_.empty()) {
    return;  // they have been told
  }
  cause_ = cause;
  PushToAll({.kind = Kind::kFail, .bytes = static_cast<std::int64_t>(cause.size())}, cause.data(),
            but);
}

void Relay::Take(Peer& peer, const Frame& frame, const std::byte* data) {
  switch (frame.kind) {
    case Kind::kHello:
      Welcome(peer, frame, data);
      break;
    case Kind::kData:
      for (const std::unique_ptr<Peer>& other : peers_) {
        if (other->rank == frame.to) {
          Push(*other, frame, data);
        }
      }
      break;
    case Kind::kPost:
      PushToAll(frame, data, &peer);
      break;
    case Kind::kFail:
      FailAll({reinterpret_cast<const char*>(data), static_cast<std::size_t>(frame.bytes)}, &peer);
      break;
    case Kind::kBye:
      peer.done = true;
      if (std::all_of(peers_.begin(), peers_.end(),
                      [](const auto& p) { return p->done || p->rank < 0; })) {
        PushToAll({.kind = Kind::kBye}, nullptr, nullptr);
      }
      break;
    case Kind::kWelcome:
      break;
  }
}

// A process that does not belong here is told so, and nobody else is.
void Relay::Welcome(Peer& peer, const Frame& frame, const std::byte* data) {
  const std::string job(reinterpret_cast<const char*>(data), static_cast<std::size_t>(frame.bytes));
  const std::string who = "rank " + std::to_string(frame.from) + ": ";
  std::string problem;
  if (frame.size != size_) {
    problem = who + "it was started as one of " + std::to_string(frame.size) +
              " processes, rank 0 as one of " + std::to_string(size_);
  } else if (job != job_) {
    problem = who + "it belongs to job \"" + job + "\", rank 0 to job \"" + job_ + '"';
  } else if (frame.from < 0 || frame.from >= size_ ||
             std::any_of(peers_.begin(), peers_.end(),
                         [&](const auto& p) { return p->rank == frame.from; })) {
    problem = who + "another process has this rank";
  } else {
    problem = cause_;
  }
  if (!problem.empty()) {
    Push(peer, {.kind = Kind::kFail, .bytes = static_cast<std::int64_t>(problem.size())},
         problem.data());
    return;
  }
  peer.rank = frame.from;
  if (++known_ == size_) {
    PushToAll({.kind = Kind::kWelcome}, nullptr, nullptr);
  }
}

void Relay::Lose(const Peer& peer) {
  const bool is_fault = peer.rank >= 0 && !peer.done;
  if (is_fault) {
    FailAll("rank " + std::to_string(peer.rank) + ": its process has ended", &peer);
  }
  std::erase_if(peers_, [&](const auto& p) { return p.get() == &peer; });
}

void Relay::CheckLate() {
  if (known_ == size_ || !cause_.empty() || Clock::now() < deadline_) {
    return;
  }
  std::string missing;
  for (int r = 1; r < size_; ++r) {  // rank 0 is here, even if its greeting was not read yet
    if (std::none_of(peers_.begin(), peers_.end(), [&](const auto& p) { return p->rank == r; })) {
      missing += (missing.empty() ? " " : ", ") + std::to_string(r);
    }
  }
  if (missing.empty()) {
    return;
  }
  FailAll("rank 0: waited " + TextOf(timeout_) + " at port " + std::to_string(port_) +
              (missing.find(',') == std::string::npos ? " for rank" : " for ranks") + missing,
          nullptr);
}

}  // namespace shardwright::tcp
