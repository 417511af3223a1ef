#pragma once

// How two processes of a run prove to each other that they have its key, before either says
// anything of the run:
//
//   process 0 -> worker   a magic number, nonce N0 of 32 random bytes
//   worker -> process 0   the magic number, nonce Nw, HMAC(S, "worker")
//   process 0 -> worker   the magic number, HMAC(S, "rank 0"); or zeros: another key
//   worker -> process 0   a hello frame: its rank and the number of processes, and behind it
//                         HMAC(S, "hello", rank, processes, job) and the job's name
//
// with HMAC-SHA-256 and S = HMAC(key, "shardwright 2", N0, Nw). Nonces are fresh, so nothing that
// was overheard proves anything later, and the labels differ, so neither side's answer is the
// other's. What follows is neither encrypted nor signed: docs/security.md says why.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "executor/host/launch.h"
#include "executor/host/tcp_socket.h"

namespace shardwright::tcp {

using Digest = std::array<std::uint8_t, 32>;
using Nonce = Digest;
inline constexpr std::array<char, 8> kHandshake = {'S', 'W', 'k', 'e', 'y', '2', '\r', '\n'};

struct Challenge {
  std::array<char, 8> magic = kHandshake;
  Nonce nonce{};
};
struct Answer {
  std::array<char, 8> magic = kHandshake;
  Nonce nonce{};
  Digest proof{};
};
struct Acceptance {
  std::array<char, 8> magic = kHandshake;
  Digest proof{};  // zeros: the answer was wrong
};

// What both ends compute with; `key` empty: that of runs without one, which proves nothing.
class Session {
 public:
  Session() = default;
  Session(const std::string& key, const Nonce& of_first, const Nonce& of_worker);
  [[nodiscard]] Digest WorkerProof() const;
  [[nodiscard]] Digest FirstProof() const;
  [[nodiscard]] Digest HelloProof(std::int32_t rank, std::int32_t size, std::string_view job) const;

 private:
  Digest key_{};
};

[[nodiscard]] Nonce NewNonce();
// In a time that tells nothing of where they differ.
[[nodiscard]] bool AreEqual(const Digest& a, const Digest& b);

// A new key for processes that this one starts, as text.
[[nodiscard]] std::string NewKey();
// The content of a file that only its owner, this user, can read. Throws InputError.
[[nodiscard]] std::string ReadKeyFile(const std::string& path);

// What a hello names the job by; longer names are cut.
inline constexpr std::size_t kLongestJob = 1024;
[[nodiscard]] std::string_view JobOf(const Launch& launch);

// A worker's side of one attempt to prove the key, up to its hello. False: the other end, at
// `where`, has closed before it proved anything; process 0 does that when too many knock at once,
// so that the caller may try again. Throws RunError where it is not process 0 of this run.
[[nodiscard]] bool Prove(const Socket& socket, const Launch& launch, const std::string& where,
                         std::chrono::milliseconds timeout, Session* session);
// A worker's way in: finds process 0, proves the key and has it prove it, says who this is, and
// waits for the welcome. Throws RunError that names the address.
[[nodiscard]] Socket Join(const Launch& launch, int port, std::chrono::milliseconds timeout);
// The end of that: `where` for messages.
void AwaitWelcome(const Socket& socket, const std::string& where,
                  std::chrono::milliseconds timeout);

}  // namespace shardwright::tcp
