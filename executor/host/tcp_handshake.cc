#include "executor/host/tcp_handshake.h"

#include <cerrno>
#include <thread>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "executor/host/tcp_frames.h"

namespace shardwright::tcp {
namespace {

using Clock = std::chrono::steady_clock;

Digest Hmac(const void* key, std::size_t key_bytes, std::string_view data) {
  Digest digest{};
  unsigned int length = 0;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(data.data());
  if (::HMAC(EVP_sha256(), key, static_cast<int>(key_bytes), bytes, data.size(), digest.data(),
             &length) == nullptr ||
      length != digest.size()) {
    throw EnvironmentError("libcrypto cannot compute HMAC-SHA-256");
  }
  return digest;
}

std::string_view TextOf(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

void FillRandomly(std::uint8_t* data, std::size_t bytes) {
  if (::RAND_bytes(data, static_cast<int>(bytes)) != 1) {
    throw EnvironmentError("libcrypto has no random numbers");
  }
}

std::string TimeText(std::chrono::milliseconds time) {
  return std::to_string(time.count()) + " ms";
}

std::string WhoIs(const Launch& launch) {
  return "rank " + std::to_string(launch.rank);
}

[[noreturn]] void ThrowNotFirst(const std::string& who, const std::string& where,
                                const std::string& why) {
  throw RunError(who + ": what answers at " + where + " is not rank 0 of this run: " + why);
}

}  // namespace

Session::Session(const std::string& key, const Nonce& of_first, const Nonce& of_worker) {
  // libcrypto takes no empty key. A given one is never as short as this.
  const std::string used = key.empty() ? "no key" : key;
  std::string text = "shardwright 2";
  text += TextOf(of_first);
  text += TextOf(of_worker);
  key_ = Hmac(used.data(), used.size(), text);
}

Digest Session::WorkerProof() const {
  return Hmac(key_.data(), key_.size(), "worker");
}

Digest Session::FirstProof() const {
  return Hmac(key_.data(), key_.size(), "rank 0");
}

Digest Session::HelloProof(std::int32_t rank, std::int32_t size, std::string_view job) const {
  std::string text = "hello ";
  text += std::to_string(rank) + ' ' + std::to_string(size) + ' ';
  text += job;
  return Hmac(key_.data(), key_.size(), text);
}

Nonce NewNonce() {
  Nonce nonce{};
  FillRandomly(nonce.data(), nonce.size());
  return nonce;
}

bool AreEqual(const Digest& a, const Digest& b) {
  return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string NewKey() {
  std::string text;
  for (const std::uint8_t byte : NewNonce()) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

std::string ReadKeyFile(const std::string& path) {
  constexpr std::int64_t kMost = 4096;
  const auto least = static_cast<std::int64_t>(kShortestKey);
  if (Exists(path) && !IsRegularFile(path)) {
    throw InputError(path, "no regular file", "a file with the run's key");
  }
  InputFile in(path, "a file with the run's key");
  struct stat status {};
  (void)::fstat(in.descriptor(), &status);
  constexpr mode_t kOthers = 077, kBits = 0777;
  if (status.st_uid != ::geteuid()) {
    throw InputError(path, "a file of user " + std::to_string(status.st_uid),
                     "one of this user, " + std::to_string(::geteuid()));
  }
  if ((status.st_mode & kOthers) != 0) {
    std::string mode = "000";
    for (std::size_t i = 0; i < mode.size(); ++i) {
      mode[i] = static_cast<char>('0' + ((status.st_mode & kBits) >> (6 - 3 * i) & 7U));
    }
    throw InputError(path, "mode " + mode, "a file that only its owner can read",
                     "chmod 600 " + path);
  }
  std::string key(static_cast<std::size_t>(kMost) + 1, '\0');
  const std::size_t length = in.Read(key.data(), key.size());
  key.resize(length);
  if (std::ssize(key) < least || std::ssize(key) > kMost) {
    throw InputError(
        path, std::ssize(key) > kMost ? "more" : std::to_string(length) + " bytes",
        "a key of " + std::to_string(least) + " to " + std::to_string(kMost) + " bytes",
        "openssl rand -hex 32 makes one");
  }
  return key;
}

std::string_view JobOf(const Launch& launch) {
  return std::string_view(launch.job).substr(0, kLongestJob);
}

bool Prove(const Socket& socket, const Launch& launch, const std::string& where,
           std::chrono::milliseconds timeout, Session* session) {
  const std::string who = WhoIs(launch);
  if (MeetsWithinUser(launch) && !socket.PeerIsThisUser()) {
    ThrowNotFirst(who, where, "it belongs to another user");
  }
  socket.LimitReads(timeout);
  socket.LimitWrites(timeout);
  Challenge challenge;
  if (!socket.Read(&challenge, sizeof challenge)) {
    if (errno == EAGAIN) {
      ThrowNotFirst(who, where, "it says nothing");
    }
    return false;
  }
  if (challenge.magic != kHandshake) {
    ThrowNotFirst(who, where, "it does not speak this version's protocol");
  }
  Answer answer{.nonce = NewNonce()};
  *session = Session(launch.key, challenge.nonce, answer.nonce);
  answer.proof = session->WorkerProof();
  Acceptance acceptance;
  if (!socket.Write(&answer, sizeof answer) || !socket.Read(&acceptance, sizeof acceptance)) {
    return false;
  }
  if (acceptance.magic != kHandshake) {
    ThrowNotFirst(who, where, "it does not speak this version's protocol");
  }
  if (AreEqual(acceptance.proof, Digest{})) {
    throw RunError(who + ": rank 0 at " + where +
                   " has another key; give all ranks the same --rendezvous-key");
  }
  if (!AreEqual(acceptance.proof, session->FirstProof())) {
    ThrowNotFirst(who, where, "it does not prove the run's key");
  }
  return true;
}

Socket Join(const Launch& launch, int port, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  const std::string who = WhoIs(launch);
  const std::string where = launch.address + ':' + std::to_string(port);
  std::string problem;
  Session session;
  Socket socket;
  for (;;) {
    socket = ConnectTo(launch, port, timeout, &problem);
    if (socket.fd() >= 0) {
      Configure(socket);
      // The relay says who is missing; this is for one that says nothing.
      if (Prove(socket, launch, where, 2 * timeout, &session)) {
        break;
      }
      problem = "it closes the connection";
    }
    if (Clock::now() >= deadline) {
      throw RunError(who + ": rank 0 does not answer at " + where + " within " + TimeText(timeout) +
                     ": " + problem);
    }
    constexpr std::chrono::milliseconds kPause{20};
    std::this_thread::sleep_for(kPause);
  }
  const std::string_view job = JobOf(launch);
  const Digest proof = session.HelloProof(launch.rank, launch.size, job);
  const Frame hello{.kind = Kind::kHello,
                    .from = launch.rank,
                    .size = launch.size,
                    .bytes = static_cast<std::int64_t>(proof.size() + job.size())};
  if (!socket.Write(&hello, sizeof hello) || !socket.Write(proof.data(), proof.size()) ||
      !socket.Write(job.data(), job.size())) {
    throw RunError(who + ": rank 0 at " + where + " is gone");
  }
  AwaitWelcome(socket, who + ": rank 0 at " + where, timeout);
  return socket;
}

void AwaitWelcome(const Socket& socket, const std::string& where,
                  std::chrono::milliseconds timeout) {
  socket.LimitReads(2 * timeout);
  Frame answer;
  if (!socket.Read(&answer, sizeof answer)) {
    throw RunError(where + (errno == EAGAIN ? " says nothing" : " is gone"));
  }
  const bool is_welcome = answer.kind == Kind::kWelcome && answer.bytes == 0;
  if (!IsSane(answer) || (!is_welcome && answer.kind != Kind::kFail)) {
    throw RunError(where + " answers with what is no welcome");
  }
  if (answer.kind == Kind::kFail) {
    std::string cause(static_cast<std::size_t>(answer.bytes), '\0');
    (void)socket.Read(cause.data(), cause.size());
    throw RunError(CauseOf(cause.data(), answer.bytes));
  }
  // Nothing may come for as long as it likes; what goes out, process 0 has to take.
  socket.LimitReads(std::chrono::milliseconds(0));
  socket.LimitWrites(timeout);
}

}  // namespace shardwright::tcp
