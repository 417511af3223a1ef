// Who connects to process 0, or answers in its place, without the run's key; members that break the
// rules; and what all of them cost. Real sockets on 127.0.0.1.

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/error.h"
#include "executor/host/launch.h"
#include "executor/host/tcp_frames.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_processes.h"
#include "executor/host/tcp_relay.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/together.h"
#include "tests/executor/wire_peer.h"
#include "tests/sanitizers.h"

namespace shardwright::testing {
namespace {

using tcp::Frame;
using tcp::Kind;
constexpr MessagePassing::Channel kAll = MessagePassing::kAll;

// A connection to a port of 127.0.0.1, or none.
tcp::Socket Knock(int port) {
  tcp::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    return tcp::Socket();
  }
  socket.LimitReads(kPatience);
  return socket;
}

// Whether the other end closes, and what it said before.
bool Closes(const tcp::Socket& socket, std::string* said = nullptr) {
  char byte = 0;
  while (socket.Read(&byte, 1)) {
    if (said != nullptr) {
      *said += byte;
    }
  }
  return errno != EAGAIN;
}

std::int64_t ResidentKib() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages >> pages;
  return pages * (::sysconf(_SC_PAGESIZE) / 1024);
}

// Process 0 of `size`, which waits for the others.
struct First {
  explicit First(int size, const std::string& job = "")
      : listener(tcp::Listen("127.0.0.1", 0)), port(tcp::PortOf(listener)) {
    launch = {.rank = 0, .size = size, .address = "127.0.0.1", .port = port, .job = job};
    launch.key = kTestKey;
    launch.listener = ::dup(listener.fd());
    listener = tcp::Socket();
  }
  [[nodiscard]] Launch Worker(int rank) const {
    Launch worker = launch;
    worker.rank = rank;
    worker.listener = -1;
    return worker;
  }
  tcp::Socket listener;
  int port = 0;
  Launch launch;
};

std::string ProblemOf(const std::function<void()>& work) {
  try {
    work();
  } catch (const RunError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("TcpStrangers.NothingOfTheRunIsToldBeforeTheKeyIsProven") {
  First first(2, "the job's name");
  const tcp::Relay relay(first.launch, kPatience);
  // A frame of the format before keys, with the job's name; noise; an answer by another key.
  Frame old{.kind = Kind::kHello, .from = 1, .size = 2, .bytes = 14};
  std::vector<std::byte> hello(sizeof old + 14);
  std::memcpy(hello.data(), &old, sizeof old);
  std::memcpy(hello.data() + sizeof old, "the job's name", 14);
  hello.resize(sizeof(tcp::Answer));
  const std::vector<std::byte> noise(sizeof(tcp::Answer), std::byte{0x5A});
  for (const std::vector<std::byte>& bytes : {hello, noise}) {
    const tcp::Socket stranger = Knock(first.port);
    std::string said(sizeof(tcp::Challenge), '\0');  // a magic number and random bytes
    REQUIRE(stranger.Read(said.data(), said.size()));
    REQUIRE(stranger.Write(bytes.data(), bytes.size()));
    CHECK(Closes(stranger, &said));
    // With the magic number it would be told that its key is another one, and no more.
    CHECK(said.size() == sizeof(tcp::Challenge));
    CHECK(said.find("job") == std::string::npos);
  }
  Launch worker = first.Worker(1);
  worker.key = "another key, which is as long as the other one";
  CHECK(ProblemOf([&] { (void)tcp::Join(worker, first.port, kPatience); }) ==
        "rank 1: rank 0 at 127.0.0.1:" + std::to_string(first.port) +
            " has another key; give all ranks the same --rendezvous-key");
}

TEST_CASE("TcpStrangers.WhatWasOverheardProvesNothing") {
  First first(3);
  const tcp::Relay relay(first.launch, kPatience);
  // What a member said, word by word.
  const tcp::Socket member = Knock(first.port);
  tcp::Challenge challenge;
  REQUIRE(member.Read(&challenge, sizeof challenge));
  tcp::Answer answer{.nonce = tcp::NewNonce()};
  const tcp::Session session(kTestKey, challenge.nonce, answer.nonce);
  answer.proof = session.WorkerProof();
  REQUIRE(member.Write(&answer, sizeof answer));
  tcp::Acceptance acceptance;
  REQUIRE(member.Read(&acceptance, sizeof acceptance));
  CHECK(acceptance.proof == session.FirstProof());
  // The same again; and process 0's own proof in place of a worker's.
  for (const bool reflects : {false, true}) {
    const tcp::Socket stranger = Knock(first.port);
    REQUIRE(stranger.Read(&challenge, sizeof challenge));
    tcp::Answer replayed = answer;
    if (reflects) {
      replayed.proof = acceptance.proof;
    }
    REQUIRE(stranger.Write(&replayed, sizeof replayed));
    tcp::Acceptance refused;
    REQUIRE(stranger.Read(&refused, sizeof refused));
    CHECK(refused.proof == tcp::Digest{});
    CHECK(Closes(stranger));
  }
  // The hello is bound to rank and number of processes: another rank's proof is none.
  const tcp::Digest proof = session.HelloProof(1, 3, "");
  const Frame hello{.kind = Kind::kHello, .from = 2, .size = 3, .bytes = sizeof proof};
  REQUIRE(member.Write(&hello, sizeof hello));
  REQUIRE(member.Write(proof.data(), proof.size()));
  std::string said;
  CHECK(Closes(member, &said));
  CHECK(said.empty());
}

// Somebody else answers at rank 0's address.
TEST_CASE("TcpStrangers.AWorkerChecksProcessZero") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  const std::string where = "127.0.0.1:" + std::to_string(tcp::PortOf(listener));
  const std::string start = "rank 1: what answers at " + where + " is not rank 0 of this run: ";
  struct Way {
    std::string bytes, expected;
  };
  for (const Way& way : {Way{"another key", "it does not prove the run's key"},
                         Way{"", "it does not speak this version's protocol"}}) {
    const std::jthread impostor([&] {
      if (!way.bytes.empty()) {
        (void)AcceptAsFirst(listener, "another key, of the same length or so");
        return;
      }
      const tcp::Socket peer(::accept(listener.fd(), nullptr, nullptr));
      const std::string page = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
      CHECK(peer.Write(page.data(), page.size()));
    });
    CHECK(ProblemOf([&] {
            (void)tcp::Join(WorkerOf(listener), tcp::PortOf(listener), kPatience);
          }) == start + way.expected);
  }
}

// 16 GiB announced before the hello: they are not even read.
TEST_CASE("TcpStrangers.WhatIsAnnouncedIsNotKept") {
  First first(2);
  const tcp::Relay relay(first.launch, kPatience);
  const std::int64_t before = ResidentKib();
  std::vector<tcp::Socket> strangers;
  std::vector<std::byte> piece(std::size_t{1} << 20, std::byte{7});
  for (int i = 0; i < 8; ++i) {
    const tcp::Socket& stranger = strangers.emplace_back(Knock(first.port));
    const Frame frame{.kind = Kind::kHello, .from = 1, .size = 2, .bytes = std::int64_t{1} << 34};
    (void)stranger.Write(&frame, sizeof frame);
    for (int k = 0; k < 16 && stranger.Write(piece.data(), piece.size()); ++k) {
    }
    CHECK(Closes(stranger));
  }
  CHECK(ResidentKib() - before < 50'000);
}

// More connections than process 0 keeps, all silent; then the ranks come.
TEST_CASE("TcpStrangers.SilentConnectionsKeepNobodyOut") {
  First first(2);
  std::unique_ptr<MessagePassing> zero;
  const std::jthread rank0([&] { zero = MeetByTcp(first.launch, kPatience); });
  std::vector<tcp::Socket> silent;
  for (std::size_t i = 0; i < 3 * tcp::Switchboard::kMostStrangers; ++i) {
    silent.push_back(Knock(first.port));
  }
  // The first have to make room, long before their time is over.
  const auto begin = std::chrono::steady_clock::now();
  CHECK(Closes(silent.front()));
  CHECK(std::chrono::steady_clock::now() - begin < tcp::Switchboard::kTimeToProve / 2);
  const std::unique_ptr<MessagePassing> one = MeetByTcp(first.Worker(1), kPatience);
  CHECK(std::chrono::steady_clock::now() - begin < kPatience / 2);
  // All are there: the others are closed, and nobody else can come.
  for (const tcp::Socket& socket : silent) {
    CHECK((socket.fd() < 0 || Closes(socket)));
  }
  CHECK(Knock(first.port).fd() < 0);
}

std::ptrdiff_t OpenFiles() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

std::chrono::nanoseconds ProcessorTime() {
  timespec used{};
  REQUIRE(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0);
  return std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// So many that the last ones wait at the door for ten times as long as a stranger keeps its place.
TEST_CASE("TcpStrangers.ACrowdAtTheDoorCostsNoTimeAndNoSockets") {
  First first(2);
  const tcp::Relay relay(first.launch, kPatience);
  constexpr std::size_t kMost = tcp::Switchboard::kMostStrangers;
  std::vector<tcp::Socket> silent;
  const auto before = OpenFiles();
  for (std::size_t i = 0; i < 10 * kMost; ++i) {
    silent.push_back(Knock(first.port));
    CHECK(OpenFiles() <= before + std::ssize(silent) + std::ptrdiff_t{kMost});
  }
  constexpr auto kWindow = 3 * tcp::Switchboard::kTimeWhenCrowded;
  const auto busy = ProcessorTime();
  std::this_thread::sleep_for(kWindow);
  if (!kHasSanitizer) {
    CHECK(ProcessorTime() - busy < kWindow / 6);
  }
}

TEST_CASE("TcpStrangers.ASilentConnectionIsClosedInTime") {
  First first(2);
  const tcp::Relay relay(first.launch, kPatience);
  const tcp::Socket silent = Knock(first.port);
  CHECK(Closes(silent));  // within kPatience
}

TEST_CASE("TcpStrangers.WhoDidNotProveTheKeyIsCounted") {
  First first(2);
  std::string problem;
  {
    const std::jthread rank0([&] {
      problem = ProblemOf([&] { (void)MeetByTcp(first.launch, std::chrono::milliseconds(500)); });
    });
    const tcp::Socket stranger = Knock(first.port);
    const std::string noise(sizeof(tcp::Answer), 'x');
    REQUIRE(stranger.Write(noise.data(), noise.size()));
    CHECK(Closes(stranger));
  }
  const std::string start = "rank 0: waited 500 ms at port " + std::to_string(first.port) +
                            " for rank 1; 1 connections did not prove the run's key, the last "
                            "from 127.0.0.1:";
  CHECK(problem.substr(0, start.size()) == start);
}

// Without a key ranks of one machine meet where the kernel knows their user, and at no port.
TEST_CASE("TcpStrangers.WithoutAKeyThereIsNoPort") {
  Launch launch{
      .size = 2, .address = "localhost", .port = tcp::PortOf(tcp::Listen("127.0.0.1", 0))};
  const auto start = [&](int rank) {
    Launch own = launch;
    own.rank = rank;
    return MeetByTcp(own, kPatience);
  };
  std::unique_ptr<MessagePassing> zero;
  std::jthread rank0([&] { zero = start(0); });
  CHECK(Knock(launch.port).fd() < 0);
  const std::unique_ptr<MessagePassing> one = start(1);
  rank0.join();
  const int number = 7;
  (void)zero->Send(kAll, 1, &number, sizeof number);
  int received = 0;
  const auto pending = one->Receive(kAll, 0, &received, sizeof received);
  while (!pending->IsOver()) {
    std::this_thread::yield();
  }
  CHECK(received == 7);
}

// What another user of this machine hears at that meeting point; -1: what cannot be told here.
int BytesForAnotherUser(int port) {
  if (::geteuid() != 0) {
    return -1;  // only root can become somebody else
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "shardwright-0-" + std::to_string(port);
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    constexpr int kFailed = 100;
    std::array<char, 64> bytes{};
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    if (::setuid(kNobody) != 0 ||
        ::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      ::_exit(kFailed);
    }
    ::_exit(static_cast<int>(std::max<ssize_t>(::read(fd, bytes.data(), bytes.size()), 0)));
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WEXITSTATUS(status);
}

TEST_CASE("TcpStrangers.AnotherUserOfThisMachineIsNotAsked") {
  const int port = tcp::PortOf(tcp::Listen("127.0.0.1", 0));
  const Launch launch{.size = 2, .address = "localhost", .port = port};
  const tcp::Relay relay(launch, kPatience);
  const int heard = BytesForAnotherUser(port);
  CHECK((heard == 0 || heard == -1));
  Launch worker = launch;
  worker.rank = 1;
  CHECK(ProblemOf([&] { (void)tcp::Join(worker, port, kPatience); }).empty());
}

// ---- Members that break the rules.

struct BadFrame {
  std::string what;
  Frame frame;
  std::string expected;
  bool early = false;  // before all are there
};

const std::vector<BadFrame>& BadFrames() {
  static const std::vector<BadFrame> all = {
      {"forged sender", {.from = 0, .to = 2}, "sent a message in the name of rank 0"},
      {"to nobody", {.from = 1, .to = 3}, "sent a message to rank 3"},
      {"to itself", {.from = 1, .to = 1}, "sent a message to rank 1"},
      {"-1 bytes",
       {.from = 1, .to = 0, .bytes = -1},
       "sent what is no message: kind 2 of -1 bytes"},
      {"2^62 bytes",
       {.from = 1, .to = 0, .bytes = std::int64_t{1} << 62},
       "sent what is no message: kind 2 of 4611686018427387904 bytes"},
      {"one too many",
       {.from = 1, .to = 0, .bytes = tcp::kLongestFrame + 1},
       "sent what is no message: kind 2 of 1048577 bytes"},
      {"negative rest",
       {.from = 1, .to = 0, .left = -5},
       "sent what is no message: kind 2 of 0 bytes"},
      {"no channel",
       {.from = 1, .to = 0, .channel = -1},
       "sent what is no message: kind 2 of 0 bytes"},
      {"another magic number",
       {.magic = 1, .from = 1},
       "sent what is no message: kind 2 of 0 bytes"},
      {"second hello", {.kind = Kind::kHello, .from = 1, .size = 3}, "sent a message of kind 0"},
      {"welcome", {.kind = Kind::kWelcome, .from = 1}, "sent a message of kind 1"},
      {"unknown kind", {.kind = static_cast<Kind>(77), .from = 1}, "sent a message of kind 77"},
      {"long bye", {.kind = Kind::kBye, .from = 1, .bytes = 5}, "sent a message that is too long"},
      {"early data", {.from = 1, .to = 0}, "sent a message before all were there", true},
      {"early bye", {.kind = Kind::kBye, .from = 1}, "sent a message before all were there", true},
  };
  return all;
}

TEST_CASE("TcpStrangers.AMemberThatBreaksTheRulesEndsTheRunByName") {
  for (const BadFrame& bad : BadFrames()) {
    CAPTURE(bad.what);
    First first(3);
    std::string of_zero, of_two, address;
    const auto wait = [&](MessagePassing& all) {
      int never = 0;
      const auto pending = all.Receive(kAll, 1, &never, sizeof never);
      while (!pending->IsOver()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    {
      const auto join = [&](const Launch& launch, std::string& problem) {
        return std::jthread([&wait, launch, &problem] {
          problem = ProblemOf([&] { wait(*MeetByTcp(launch, kPatience)); });
        });
      };
      const std::jthread zero = join(first.launch, of_zero);
      const tcp::Socket peer = SayHello(Knock(first.port), 1, 3);
      std::jthread two;
      if (!bad.early) {
        two = join(first.Worker(2), of_two);
        Frame welcome;
        REQUIRE(peer.Read(&welcome, sizeof welcome));
        CHECK(welcome.kind == Kind::kWelcome);
      }
      REQUIRE(peer.Write(&bad.frame, sizeof bad.frame));
      CHECK(Closes(peer));
    }
    if (bad.early) {
      of_two = of_zero;  // rank 2 has not come
    }
    for (const std::string& problem : {of_zero, of_two}) {
      CHECK(problem.starts_with("rank 1 (127.0.0.1:"));
      CHECK(problem.ends_with("): " + bad.expected));
    }
  }
}

// What a hostile process 0 passes on.
TEST_CASE("TcpStrangers.AHostileProcessZeroEndsAWorkerByName") {
  const std::vector<std::byte> body(4);
  struct Way {
    Frame frame;
    std::string expected;
  };
  const std::vector<Way> ways = {
      {{.to = 1, .bytes = -1}, "sent what is no message: kind 2 of -1 bytes"},
      {{.to = 1, .bytes = std::int64_t{1} << 62},
       "sent what is no message: kind 2 of 4611686018427387904 bytes"},
      {{.kind = Kind::kFail, .bytes = std::int64_t{1} << 20},
       "sent what is no message: kind 4 of 1048576 bytes"},
      {{.from = 2, .to = 1}, "sent a message of rank 2"},
      {{.to = 0}, "sent a message for rank 0"},
      {{.kind = Kind::kWelcome}, "sent what is no message: kind 1 of 0 bytes"},
  };
  for (const Way& way : ways) {
    const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
    const std::jthread zero([&] {
      const tcp::Socket peer = AcceptAsFirst(listener);
      CHECK(peer.Write(&way.frame, sizeof way.frame));
      CHECK(Closes(peer));
    });
    const std::unique_ptr<MessagePassing> all = MeetByTcp(WorkerOf(listener), kPatience);
    int never = 0;
    const auto pending = all->Receive(kAll, 0, &never, sizeof never);
    CHECK(ProblemOf([&] {
            while (!pending->IsOver()) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
          }) == "rank 1: rank 0 (127.0.0.1:" + std::to_string(tcp::PortOf(listener)) +
                    "): " + way.expected);
  }
}

TEST_CASE("TcpStrangers.MessagesOfWrongLengthOrInWrongPiecesEndTheRun") {
  for (const int way : {0, 1, 2}) {
    const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
    const std::jthread zero([&] {
      const tcp::Socket peer = AcceptAsFirst(listener);
      const std::vector<std::byte> many(static_cast<std::size_t>(tcp::kLongestFrame));
      Frame frame{.to = 1, .bytes = 12};
      if (way == 0) {
        CHECK(peer.Write(&frame, sizeof frame));
        CHECK(peer.Write(many.data(), 12));
      } else if (way == 1) {
        frame.left = 8;
        CHECK(peer.Write(&frame, sizeof frame));
        CHECK(peer.Write(many.data(), 12));
        frame.left = 0;  // 12 more where 8 were announced
        CHECK(peer.Write(&frame, sizeof frame));
        (void)peer.Write(many.data(), 12);
      } else {
        frame.channel = 5;
        frame.bytes = tcp::kLongestFrame;
        for (int i = 0;
             i < 300 && peer.Write(&frame, sizeof frame) && peer.Write(many.data(), many.size());
             ++i) {
        }
      }
      CHECK(Closes(peer));
    });
    const std::unique_ptr<MessagePassing> all = MeetByTcp(WorkerOf(listener), kPatience);
    std::int64_t number = 0;
    const auto pending = all->Receive(kAll, 0, &number, sizeof number);
    const std::string problem = ProblemOf([&] {
      while (!pending->IsOver()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    const std::string first =
        "rank 1: rank 0 (127.0.0.1:" + std::to_string(tcp::PortOf(listener)) + "): ";
    const std::array<std::string, 3> expected = {
        "rank 1: a message of rank 0 has 12 bytes, expected 8",
        first + "sent a message of rank 0 in wrong pieces",
        first + "sent more than 256 MiB that nobody asked for, the last of rank 0"};
    CHECK(problem == expected.at(static_cast<std::size_t>(way)));
  }
}

// Sizes that a member announces for what all share.
TEST_CASE("TcpStrangers.AnnouncedSizesAreChecked") {
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 62}) {
    for (const bool collects : {true, false}) {
      First first(2);
      std::string problem;
      {
        const std::jthread zero([&] {
          problem = ProblemOf([&] {
            const auto all = MeetByTcp(first.launch, kPatience);
            (void)(collects ? CollectBytes(*all, kAll, {"x"}, {})
                            : ShareBytes(*all, kAll, {"x"}, {}));
          });
        });
        const auto one = MeetByTcp(first.Worker(1), kPatience);
        (void)one->Send(kAll, 0, &size, sizeof size);
        std::int64_t its = 0, never = 0;
        const auto size_of_zero = one->Receive(kAll, 0, &its, sizeof its);  // where all share
        const auto pending = one->Receive(kAll, 0, &never, sizeof never);
        (void)ProblemOf([&] {  // until rank 0 has gone
          while (!pending->IsOver()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        });
      }
      CHECK(problem == "rank 0, x: rank 1 announces " + std::to_string(size) + " bytes");
    }
  }
}

// A member that reads nothing: what is sent to it does not pile up in process 0.
TEST_CASE("TcpStrangers.WhatNobodyReadsDoesNotPileUp") {
  First first(3);
  constexpr std::chrono::milliseconds kTimeout{2000};
  std::string problem;
  std::int64_t grown = 0;
  {
    std::unique_ptr<MessagePassing> zero;
    std::jthread rank0([&] { zero = MeetByTcp(first.launch, kPatience); });
    tcp::Socket deaf;
    std::jthread rank2([&] { deaf = tcp::Join(first.Worker(2), first.port, kPatience); });
    const auto one = MeetByTcp(first.Worker(1), kPatience);
    rank0.join();
    rank2.join();
    for (MessagePassing* const processes : {zero.get(), one.get()}) {
      processes->set_timeout(kTimeout);  // the relay's limit, too, or rank 0 would be blamed
    }
    const std::vector<std::byte> many(std::size_t{4} << 20);
    const std::int64_t before = ResidentKib();
    problem = ProblemOf([&] {
      for (int i = 0; i < 64; ++i) {
        (void)one->Send(kAll, 2, many.data(), std::ssize(many));
      }
    });
    grown = ResidentKib() - before;
  }
  CHECK(grown < 50'000);
  CHECK(problem.starts_with("rank 0, messages for rank 2 (127.0.0.1:"));
  CHECK(problem.ends_with("): waited 2000 ms for rank 2"));
}

// ---- Random, mutated and replayed frames.

// Changes some bytes of what would be right.
std::vector<std::byte> Mutated(const Frame& frame, std::mt19937_64& random) {
  std::vector<std::byte> bytes(sizeof frame + static_cast<std::size_t>(frame.bytes));
  std::memcpy(bytes.data(), &frame, sizeof frame);
  for (int k = 0, count = static_cast<int>(random() % 4); k < count; ++k) {
    bytes[random() % bytes.size()] = static_cast<std::byte>(random());
  }
  if (random() % 8 == 0) {
    bytes.resize(random() % bytes.size() + 1);
  }
  return bytes;
}

// Two ranks that count together, and a third with the key that sends what comes to its mind: they
// count right to the end, or are told its name.
TEST_CASE("TcpStrangers.MutatedFramesOfAMemberChangeNothingOrEndTheRun") {
  const int sessions = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 400 : 20;
  int ended = 0;
  const std::int64_t before = ResidentKib();
  for (int s = 0; s < sessions; ++s) {
    CAPTURE(s);
    First first(3);
    std::array<std::string, 2> problems;
    std::array<std::int64_t, 2> sums{};
    std::atomic<int> done{0};
    constexpr int kRounds = 50;
    const auto count = [&](const Launch& launch, std::size_t index) {
      problems[index] = ProblemOf([&] {
        const auto all = MeetByTcp(launch, kPatience);
        const int other = launch.rank == 0 ? 1 : 0;
        for (std::int64_t i = 1; i <= kRounds; ++i) {
          const std::int64_t mine = i * (launch.rank + 1);
          std::int64_t its = 0;
          const auto pending = all->Receive(kAll, other, &its, sizeof its);
          (void)all->Send(kAll, other, &mine, sizeof mine);
          while (!pending->IsOver()) {
            std::this_thread::yield();
          }
          sums[index] += its;
        }
      });
      ++done;
    };
    {
      const std::jthread zero([&] { count(first.launch, 0); });
      const std::jthread one([&] { count(first.Worker(1), 1); });
      std::mt19937_64 random(static_cast<std::uint64_t>(s) + 1);
      const tcp::Socket hostile = tcp::Join(first.Worker(2), first.port, kPatience);
      for (int f = 0; f < 25 && done < 2; ++f) {
        const Frame frame{.kind = static_cast<Kind>(2 + random() % 2),
                          .from = 2,
                          .to = static_cast<std::int32_t>(random() % 2),
                          .channel = static_cast<std::int32_t>(random() % 3),
                          .bytes = static_cast<std::int64_t>(random() % 64)};
        const std::vector<std::byte> bytes = Mutated(frame, random);
        if (!hostile.Write(bytes.data(), bytes.size())) {
          break;
        }
      }
    }
    const std::int64_t whole = kRounds * (kRounds + 1) / 2;
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK((!problems[i].empty() || sums[i] == whole * (i == 0 ? 2 : 1)));
      ended += problems[i].empty() ? 0 : 1;
    }
  }
  CHECK(ended > 0);
  CHECK(ResidentKib() - before < 50'000);
}

// The same from process 0 to a worker.
TEST_CASE("TcpStrangers.MutatedFramesOfProcessZeroEndAWorkerInWords") {
  const int sessions = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 400 : 20;
  const std::int64_t before = ResidentKib();
  for (int s = 0; s < sessions; ++s) {
    CAPTURE(s);
    const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
    const std::jthread zero([&] {
      std::mt19937_64 random(static_cast<std::uint64_t>(s) + 1);
      const tcp::Socket peer = AcceptAsFirst(listener);
      for (int f = 0; f < 25; ++f) {
        const Frame frame{.kind = static_cast<Kind>(2 + random() % 4),
                          .to = 1,
                          .channel = static_cast<std::int32_t>(random() % 3),
                          .bytes = static_cast<std::int64_t>(random() % 64)};
        const std::vector<std::byte> bytes = Mutated(frame, random);
        if (!peer.Write(bytes.data(), bytes.size())) {
          break;
        }
      }
    });
    const auto all = MeetByTcp(WorkerOf(listener), kPatience);
    std::int64_t never = 0;
    const std::string problem = ProblemOf([&] {
      for (;;) {
        const auto pending = all->Receive(kAll, 0, &never, sizeof never);
        while (!pending->IsOver()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      }
    });
    CHECK(!problem.empty());
  }
  CHECK(ResidentKib() - before < 50'000);
}

}  // namespace
}  // namespace shardwright::testing
