#pragma once

// One end of a connection of a run that does what a test wants: it has the key, and no manners.

#include <chrono>
#include <cstddef>
#include <string>

#include <doctest/doctest.h>
#include <sys/socket.h>

#include "executor/host/launch.h"
#include "executor/host/tcp_frames.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_socket.h"

namespace shardwright::testing {

inline constexpr const char* kTestKey = "a key that is known to this test only";
inline constexpr std::chrono::milliseconds kPatience{20000};

// Rank 1 of 2 that is to find `listener`.
inline Launch WorkerOf(const tcp::Socket& listener) {
  Launch launch{.rank = 1, .size = 2, .address = "127.0.0.1", .port = tcp::PortOf(listener)};
  launch.key = kTestKey;
  return launch;
}

// Rank 0's side up to the welcome. `key`: what it proves.
inline tcp::Socket AcceptAsFirst(const tcp::Socket& listener, const std::string& key = kTestKey) {
  tcp::Socket peer(::accept(listener.fd(), nullptr, nullptr));
  peer.LimitReads(kPatience);
  const tcp::Challenge challenge{.nonce = tcp::NewNonce()};
  tcp::Answer answer;
  CHECK(peer.Write(&challenge, sizeof challenge));
  CHECK(peer.Read(&answer, sizeof answer));
  const tcp::Session session(key, challenge.nonce, answer.nonce);
  const tcp::Acceptance acceptance{.proof = session.FirstProof()};
  CHECK(peer.Write(&acceptance, sizeof acceptance));
  tcp::Frame hello;
  if (!peer.Read(&hello, sizeof hello)) {
    return peer;  // it was not believed
  }
  std::string body(static_cast<std::size_t>(hello.bytes), '\0');
  CHECK(peer.Read(body.data(), body.size()));
  const tcp::Frame welcome{.kind = tcp::Kind::kWelcome};
  CHECK(peer.Write(&welcome, sizeof welcome));
  return peer;
}

// A worker's side up to its hello; Join waits for the welcome, too.
inline tcp::Socket SayHello(tcp::Socket socket, int rank, int size) {
  tcp::Challenge challenge;
  CHECK(socket.Read(&challenge, sizeof challenge));
  tcp::Answer answer{.nonce = tcp::NewNonce()};
  const tcp::Session session(kTestKey, challenge.nonce, answer.nonce);
  answer.proof = session.WorkerProof();
  CHECK(socket.Write(&answer, sizeof answer));
  tcp::Acceptance acceptance;
  CHECK(socket.Read(&acceptance, sizeof acceptance));
  const tcp::Digest proof = session.HelloProof(rank, size, "");
  const tcp::Frame hello{
      .kind = tcp::Kind::kHello, .from = rank, .size = size, .bytes = sizeof proof};
  CHECK(socket.Write(&hello, sizeof hello));
  CHECK(socket.Write(proof.data(), proof.size()));
  return socket;
}

}  // namespace shardwright::testing
