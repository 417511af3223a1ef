#include "executor/host/tcp_socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/error.h"

namespace shardwright::tcp {
namespace {

void SetTimeLimit(int fd, int direction, std::chrono::milliseconds limit) {
  const auto ms = std::max<std::int64_t>(limit.count(), 0);
  const timeval time{ms / 1000, ms % 1000 * 1000};
  (void)::setsockopt(fd, SOL_SOCKET, direction, &time, sizeof time);
}

// The name of a user's meeting point for a port: no file, so that nothing is left behind, and the
// user's number, so that two users do not take it from each other by chance.
sockaddr_un UserAddress(int port, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name =
      "shardwright-" + std::to_string(::geteuid()) + '-' + std::to_string(port);
  std::copy(name.begin(), name.end(), address.sun_path + 1);  // behind a zero: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Socket ListenWithinUser(int port) {
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = UserAddress(port, &length);
  if (socket.fd() < 0 ||
      ::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(socket.fd(), SOMAXCONN) != 0) {
    throw EnvironmentError("rank 0: cannot listen at port " + std::to_string(port) + ": " +
                           std::strerror(errno) + "; set MASTER_PORT to a free one");
  }
  return socket;
}

Socket ConnectWithinUser(int port, std::string* problem) {
  Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t length = 0;
  const sockaddr_un address = UserAddress(port, &length);
  if (socket.fd() < 0 ||
      ::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    *problem = std::string(std::strerror(errno)) +
               " (without a key only among processes of one user on one machine)";
    return Socket();
  }
  return socket;
}

Socket ConnectByTcp(const std::string& address, int port, std::chrono::milliseconds limit,
                    std::string* problem) {
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
    socket.LimitWrites(limit);  // of connect, too
    const bool connected =
        socket.fd() >= 0 && ::connect(socket.fd(), a->ai_addr, a->ai_addrlen) == 0;
    if (connected && !socket.CallsItself()) {
      return socket;
    }
    const int error = connected ? ECONNREFUSED : errno;
    *problem = std::strerror(error == EINPROGRESS ? ETIMEDOUT : error);
  }
  return Socket();
}

// The socket address of `port` on this machine: of a loopback address, or of all.
sockaddr_storage OwnAddress(const std::string& address, int port, int family) {
  sockaddr_storage storage{};
  storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET6) {
    auto& six = reinterpret_cast<sockaddr_in6&>(storage);
    six.sin6_port = htons(static_cast<std::uint16_t>(port));
    if (!IsLoopback(address) || ::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1) {
      six.sin6_addr = in6addr_any;
    }
  } else {
    auto& four = reinterpret_cast<sockaddr_in&>(storage);
    four.sin_port = htons(static_cast<std::uint16_t>(port));
    four.sin_addr.s_addr = htonl(IsLoopback(address) ? INADDR_LOOPBACK : INADDR_ANY);
    if (IsLoopback(address)) {
      (void)::inet_pton(AF_INET, address.c_str(), &four.sin_addr);  // "localhost" is no number
    }
  }
  return storage;
}

bool Bind(const Socket& socket, const sockaddr_storage& address) {
  const int on = 1, off = 0;
  const bool is_six = address.ss_family == AF_INET6;
  return socket.fd() >= 0 &&
         (!is_six || ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
         ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
         ::bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address),
                is_six ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)) == 0;
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
    errno = 0;
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

void Socket::LimitReads(std::chrono::milliseconds limit) const {
  SetTimeLimit(fd_, SO_RCVTIMEO, limit);
}

void Socket::LimitWrites(std::chrono::milliseconds limit) const {
  SetTimeLimit(fd_, SO_SNDTIMEO, limit);
}

bool Socket::CallsItself() const {
  sockaddr_storage own{}, other{};
  socklen_t own_size = sizeof own, other_size = sizeof other;
  return ::getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(fd_, reinterpret_cast<sockaddr*>(&other), &other_size) == 0 &&
         own_size == other_size && std::memcmp(&own, &other, own_size) == 0;
}

std::string Socket::PeerName() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::getpeername(fd_, generic, &length) == 0 && address.ss_family != AF_UNIX) {
    std::array<char, INET6_ADDRSTRLEN> host{};
    std::array<char, 8> port{};
    if (::getnameinfo(generic, length, host.data(), host.size(), port.data(), port.size(),
                      NI_NUMERICHOST | NI_NUMERICSERV) == 0) {
      const std::string text = host.data();
      const std::string mapped = "::ffff:";  // IPv4 at a socket of both
      const bool is_six = text.find(':') != std::string::npos;
      return (text.starts_with(mapped) ? text.substr(mapped.size())
              : is_six                 ? '[' + text + ']'
                                       : text) +
             ':' + port.data();
    }
  }
  ucred credentials{};
  length = sizeof credentials;
  if (::getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0) {
    return "pid " + std::to_string(credentials.pid);
  }
  return "an unknown address";
}

bool Socket::PeerIsThisUser() const {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return ::getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         credentials.uid == ::geteuid();
}

void Socket::Shutdown() const {
  (void)::shutdown(fd_, SHUT_RDWR);
}

void Configure(const Socket& socket) {
  const int on = 1;
  (void)::setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  constexpr int kIdle = 20, kBetween = 10, kTries = 4;  // seconds, and questions
  constexpr std::array<std::pair<int, int>, 4> kOptions = {
      {{TCP_NODELAY, 1}, {TCP_KEEPIDLE, kIdle}, {TCP_KEEPINTVL, kBetween}, {TCP_KEEPCNT, kTries}}};
  for (const auto& [option, value] : kOptions) {  // refused by sockets that are not TCP's
    (void)::setsockopt(socket.fd(), IPPROTO_TCP, option, &value, sizeof value);
  }
}

Socket Listen(const std::string& address, int port) {
  const bool is_four = IsLoopback(address) && address.find(':') == std::string::npos;
  Socket socket(::socket(is_four ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  bool bound = Bind(socket, OwnAddress(address, port, is_four ? AF_INET : AF_INET6));
  if (!bound && !IsLoopback(address) && errno != EADDRINUSE) {  // a kernel without IPv6
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    bound = Bind(socket, OwnAddress(address, port, AF_INET));
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

bool MeetsWithinUser(const Launch& launch) {
  return launch.key.empty() && !launch.is_insecure && IsLoopback(launch.address);
}

Socket ListenFor(const Launch& launch) {
  if (launch.listener >= 0) {
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(launch.listener, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 ||
        listens == 0) {
      throw InputError("environment: SHARDWRIGHT_LISTENER", std::to_string(launch.listener),
                       "a socket that listens");
    }
    return Socket(launch.listener);
  }
  return MeetsWithinUser(launch) ? ListenWithinUser(launch.port)
                                 : Listen(launch.address, launch.port);
}

Socket ConnectTo(const Launch& launch, int port, std::chrono::milliseconds limit,
                 std::string* problem) {
  return MeetsWithinUser(launch) ? ConnectWithinUser(port, problem)
                                 : ConnectByTcp(launch.address, port, limit, problem);
}

}  // namespace shardwright::tcp
