// Processes that meet by TCP, here as threads with a connection each.

#include "executor/host/tcp_processes.h"

#include <array>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/error.h"
#include "executor/host/launch.h"
#include "executor/host/process_communicator.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_relay.h"
#include "executor/host/together.h"
#include "tests/executor/wire_peer.h"

namespace shardwright::testing {
namespace {

// Runs `work` as `size` processes that have met.
using Process = std::function<void(MessagePassing& processes)>;
void RunTogether(int size, const Process& work,
                 std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  const int port = tcp::PortOf(listener);
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Launch launch{
          .launcher = "test", .rank = r, .size = size, .address = "127.0.0.1", .port = port};
      launch.key = kTestKey;
      launch.listener = r == 0 ? ::dup(listener.fd()) : -1;
      const std::unique_ptr<MessagePassing> processes = MeetByTcp(launch, timeout);
      work(*processes);
    });
  }
}

void Await(const std::unique_ptr<MessagePassing::Pending>& pending) {
  while (!pending->IsOver()) {
    std::this_thread::yield();
  }
}

TEST_CASE("TcpProcesses.MessagesArriveInOrderOnTheirChannel") {
  RunTogether(3, [](MessagePassing& all) {
    const int r = all.rank();
    // Ranks 0 and 2 form one group, rank 1 the other.
    const MessagePassing::Channel evens = all.Split(r % 2);
    if (r == 0) {
      const int first = 10;
      const int second = 20;
      const int other = 30;
      (void)all.Send(MessagePassing::kAll, 2, &first, sizeof first);
      (void)all.Send(evens, 1, &other, sizeof other);
      (void)all.Send(MessagePassing::kAll, 2, &second, sizeof second);
    } else if (r == 2) {
      int first = 0;
      int second = 0;
      int other = 0;
      const auto a = all.Receive(MessagePassing::kAll, 0, &first, sizeof first);
      const auto b = all.Receive(MessagePassing::kAll, 0, &second, sizeof second);
      const auto c = all.Receive(evens, 0, &other, sizeof other);
      Await(c);
      Await(b);
      Await(a);
      CHECK(first == 10);
      CHECK(second == 20);
      CHECK(other == 30);
    }
    const std::vector<RankReport> shared = ShareReports(
        all, MessagePassing::kAll, {}, {{static_cast<float>(r), 0.5F}, SimTime(7 + r)});
    REQUIRE(shared.size() == 3);
    for (int m = 0; m < 3; ++m) {
      const RankReport& its = shared[static_cast<std::size_t>(m)];
      CHECK(its.losses == std::vector<float>{static_cast<float>(m), 0.5F});
      CHECK(its.end == SimTime(7 + m));
    }
    // More than the sockets hold, so that it goes in pieces.
    constexpr std::size_t kMany = 3'000'000;
    const auto bytes = CollectBytes(all, MessagePassing::kAll, {},
                                    std::vector<std::byte>(kMany, static_cast<std::byte>(r + 1)));
    if (r == 0) {
      REQUIRE(bytes.size() == 3);
      CHECK(bytes[2].size() == kMany);
      CHECK(bytes[2].back() == std::byte{3});
    }
    all.Finish();
  });
}

TEST_CASE("TcpProcesses.AllToAllIsATransposition") {
  RunTogether(2, [](MessagePassing& all) {
    const int r = all.rank();
    const std::vector<int> from = {10 * r, 10 * r + 1};
    std::vector<int> to = {-1, -1};
    const std::vector<MessagePart> parts = {{0, 4}, {4, 4}};
    Await(all.AllToAll(MessagePassing::kAll, from.data(), parts, to.data(), parts));
    CHECK(to == std::vector<int>{r, 10 + r});
    all.Finish();
  });
}

TEST_CASE("TcpProcesses.RanksThatWereGivenDifferentThingsAreNamed") {
  const RankFacts facts = {{"version", "1"}, {"--seed", "1"}, {"PLAN: a", "x"}};
  const auto problem_of = [&](const RankFacts& zero, const RankFacts& one, const RankFacts& two) {
    std::mutex mutex;
    std::set<std::string> problems;
    RunTogether(3, [&](MessagePassing& all) {
      std::string problem;
      try {
        CheckAlike(&all, all.rank() == 0 ? zero : all.rank() == 1 ? one : two);
      } catch (const InputError& error) {
        problem = error.what();
      }
      all.Finish();
      const std::lock_guard lock(mutex);
      problems.insert(problem);
    });
    CHECK(problems.size() == 1);  // all say the same
    return *problems.begin();
  };
  RankFacts other = facts;
  other[1].second = "7";
  other[2].second = "y";
  CHECK(problem_of(facts, facts, facts).empty());
  CHECK(problem_of(facts, facts, other) ==
        "rank 2: --seed 7, rank 0 has 1; give all ranks the same");
  CHECK(problem_of(other, facts, facts) ==
        "ranks 1, 2: --seed 1, rank 0 has 7; give all ranks the same");
  other[0].second = "2";
  CHECK(problem_of(facts, other, facts) ==
        "rank 1: version 2, rank 0 has 1; give all ranks the same");
  // Fields that one of them lacks, in the middle and at the end.
  RankFacts more = facts;
  more.insert(more.begin() + 1, {"--new", "on"});
  CHECK(problem_of(facts, more, facts) ==
        "rank 1: --new on, rank 0 has none; give all ranks the same");
  CHECK(problem_of(more, more, facts) ==
        "rank 2: --new none, rank 0 has on; give all ranks the same");
  more = facts;
  more.emplace_back("PLAN: b", "");
  CHECK(problem_of(facts, facts, more) ==
        "rank 2: PLAN: b , rank 0 has none; give all ranks the same");
  CHECK(problem_of(more, facts, more) ==
        "rank 1: PLAN: b none, rank 0 has ; give all ranks the same");
}

// Who answers, who does not, and that process 0 is named where nothing comes through.
TEST_CASE("TcpProcesses.RanksThatDoNotAnswerAreNamed") {
  RunTogether(3, [](MessagePassing& all) {
    CHECK(all.Silent().empty());
    CHECK(all.AtFault({1, 2}) == std::set<std::int64_t>{1, 2});
    int never = 0;
    if (all.rank() == 0) {  // a group's message names those that it is of
      const std::vector<MessagePart> parts = {{0, 4}, {4, 4}, {8, 4}};
      std::array<int, 3> data{};
      const auto pending = all.AllGather(MessagePassing::kAll, data.data(), parts);
      int ready = 0;
      Await(all.Receive(MessagePassing::kAll, 1, &ready, sizeof ready));
      CHECK_FALSE(pending->IsOver());
      CHECK(pending->Missing() == std::set<std::int64_t>{2});
      (void)all.Send(MessagePassing::kAll, 2, &never, sizeof never);
      Await(pending);
      CHECK(pending->Missing().empty());
    } else {
      if (all.rank() == 2) {
        Await(all.Receive(MessagePassing::kAll, 0, &never, sizeof never));  // its part
        Await(all.Receive(MessagePassing::kAll, 0, &never, sizeof never));
      }
      (void)all.Send(MessagePassing::kAll, 0, &never, sizeof never);
      if (all.rank() == 1) {
        (void)all.Send(MessagePassing::kAll, 0, &never, sizeof never);
      }
    }
    all.Finish();
  });
}

// While a checkpoint is written the others wait long for a rank that answers, and not for a machine
// that is gone.
TEST_CASE("TcpProcesses.ALongWaitIsForThoseThatAnswer") {
  const Wait wait{"checkpoint of step 7", std::chrono::hours(1)};
  const std::chrono::milliseconds limit(100);
  RunTogether(
      2,
      [&](MessagePassing& all) {
        if (all.rank() == 1) {  // a slow disk
          std::this_thread::sleep_for(20 * limit);
        }
        CHECK(ShareBytes(all, MessagePassing::kAll, wait, {}).size() == 2);
        all.Finish();
      },
      limit);
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  Launch first = WorkerOf(listener);
  first.rank = 0;
  first.listener = ::dup(listener.fd());
  std::string problem, cause;
  tcp::Socket gone;
  std::jthread peer([&] {
    gone = SayHello(tcp::ConnectTo(WorkerOf(listener), tcp::PortOf(listener), kPatience, &problem),
                    1, 2);
  });
  const std::unique_ptr<MessagePassing> all = MeetByTcp(first, kPatience);
  all->set_timeout(limit);
  const auto begin = std::chrono::steady_clock::now();
  try {
    (void)ShareBytes(*all, MessagePassing::kAll, wait, {});
  } catch (const RunError& error) {
    cause = error.what();
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::minutes(1));
  CHECK(cause.find("rank 0, checkpoint of step 7: waited ") == 0);
  CHECK(cause.find(" ms for rank 1") != std::string::npos);
}

// A checkpoint's thread and a step's collective find at once that rank 1 stands still. One question
// serves both: with one after the other, a step of `--timeout 4 s` would be told of at 8 s, where
// "not over after twice the time-out" names nobody.
TEST_CASE("TcpProcesses.ThreadsThatAskAtOnceShareOneAnswer") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  Launch first = WorkerOf(listener);
  first.rank = 0;
  first.listener = ::dup(listener.fd());
  std::string problem;
  tcp::Socket still;
  std::jthread peer([&] {
    still = SayHello(tcp::ConnectTo(WorkerOf(listener), tcp::PortOf(listener), kPatience, &problem),
                     1, 2);
  });
  const std::unique_ptr<MessagePassing> all = MeetByTcp(first, kPatience);
  peer.join();
  std::barrier begin(3);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        begin.arrive_and_wait();
        CHECK(all->Silent() == std::set<std::int64_t>{1});
      });
    }
  }
  CHECK(all->Silent() == std::set<std::int64_t>{1});  // later: asked anew
  still.LimitReads(std::chrono::milliseconds(100));
  int questions = 0;
  for (tcp::Frame frame; still.Read(&frame, sizeof frame);) {
    questions += frame.kind == tcp::Kind::kPing ? 1 : 0;
  }
  CHECK(questions == 2);
}

// Where nothing is sent the system asks for whoever is gone: 20 s, then four times 10 s.
TEST_CASE("TcpSocket.AMachineThatIsGoneIsNoticedWithinAMinute") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  std::string problem;
  const tcp::Socket socket =
      tcp::ConnectTo(WorkerOf(listener), tcp::PortOf(listener), kPatience, &problem);
  tcp::Configure(socket);
  const auto value_of = [&](int level, int option) {
    int value = -1;
    socklen_t length = sizeof value;
    CHECK(::getsockopt(socket.fd(), level, option, &value, &length) == 0);
    return value;
  };
  CHECK(value_of(SOL_SOCKET, SO_KEEPALIVE) == 1);
  CHECK(value_of(IPPROTO_TCP, TCP_NODELAY) == 1);
  CHECK(value_of(IPPROTO_TCP, TCP_KEEPIDLE) +
            value_of(IPPROTO_TCP, TCP_KEEPCNT) * value_of(IPPROTO_TCP, TCP_KEEPINTVL) <=
        60);
}

// The thread that watches collectives tells of them until it is stopped, which is after the end.
TEST_CASE("TcpProcesses.ANoticeAfterTheEndChangesNothing") {
  RunTogether(2, [](MessagePassing& all) {
    if (all.rank() == 1) {
      std::jthread finish([&] { CHECK_NOTHROW(all.Finish()); });
      const int late = 7;
      for (int i = 0; i < 100; ++i) {
        CHECK_NOTHROW(all.Post(std::as_bytes(std::span(&late, 1))));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK_NOTHROW(all.Finish());
  });
}

// A process that goes without a word ends the others; one that fails tells them why.
TEST_CASE("TcpProcesses.OneFailureReachesAll") {
  for (const bool says_why : {true, false}) {
    std::mutex mutex;
    std::vector<std::string> heard;
    RunTogether(3, [&](MessagePassing& all) {
      if (all.rank() == 1) {
        if (says_why) {
          all.Fail("rank 1, op x: no");
        }
        return;
      }
      std::string cause;
      int never = 0;
      const auto pending = all.Receive(MessagePassing::kAll, 1, &never, sizeof never);
      try {
        Await(pending);
      } catch (const RunError& error) {
        cause = error.what();
      }
      std::string watched;
      all.OnFailure(&all, [&](const std::string& text) { watched = text; });
      all.OnFailure(&all, {});
      const std::lock_guard lock(mutex);
      heard.push_back(cause);
      heard.push_back(watched);
    });
    REQUIRE(heard.size() == 4);
    for (const std::string& text : heard) {
      CHECK(text == heard.front());
    }
    if (says_why) {
      CHECK(heard.front() == "rank 1, op x: no");
    } else {
      CHECK(heard.front().starts_with("rank 1 (127.0.0.1:"));
      CHECK(heard.front().ends_with("): its process has ended"));
    }
  }
}

// A device withdraws when it goes: its watcher would report to what is no more.
TEST_CASE("TcpProcesses.WhoHasWithdrawnHearsOfNoFailure") {
  RunTogether(2, [](MessagePassing& all) {
    if (all.rank() == 0) {
      int ready = 0;
      Await(all.Receive(MessagePassing::kAll, 1, &ready, sizeof ready));
      all.Fail("rank 0, op x: no");
      return;
    }
    bool is_told = false;
    std::promise<std::string> heard;
    all.OnFailure(&is_told, [&](const std::string&) { is_told = true; });
    all.OnFailure(&heard, [&](const std::string& cause) { heard.set_value(cause); });
    all.OnFailure(&is_told, {});
    const int ready = 1;
    (void)all.Send(MessagePassing::kAll, 0, &ready, sizeof ready);
    CHECK(heard.get_future().get() == "rank 0, op x: no");
    all.OnFailure(&heard, {});  // waits until all have been told
    CHECK_FALSE(is_told);
  });
}

std::string MeetingProblem(Launch launch) {
  try {
    (void)MeetByTcp(launch, std::chrono::milliseconds(100));
  } catch (const EnvironmentError& error) {
    return "environment: " + std::string(error.what());
  } catch (const RunError& error) {
    return error.what();
  }
  return "met";
}

TEST_CASE("MessagePassing.LargeMessagesAreCountedInWhatDividesThem") {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const std::vector<MessagePart> small = {{0, kMost - 7}, {kMost - 7, 7}};
  CHECK(CountingUnit(small) == 1);
  const std::vector<MessagePart> one_more = {{0, kMost - 7}, {kMost - 7, 8}};
  CHECK(CountingUnit(one_more) == 8);  // 2^31 - 8 and 8
  const std::vector<MessagePart> halves = {{0, kMost + 3}, {kMost + 3, kMost + 1}};
  CHECK(CountingUnit(halves) == 2);  // bf16: 2^31 + 2 is no multiple of four
  const std::vector<MessagePart> gib = {{0, std::int64_t{1} << 32},
                                        {std::int64_t{1} << 32, std::int64_t{1} << 32}};
  CHECK(CountingUnit(gib) == 1 << 20);
}

// A member that waits for a collective names those that did not come, each once.
TEST_CASE("TcpProcesses.WhoIsMissingIsNamedOnce") {
  RunTogether(3, [](MessagePassing& all) {
    const MessagePassing::Channel channel = all.Split(0);
    if (all.rank() == 0) {
      FaultBoard faults;
      const RunClock clock;
      ProcessCommunicator communicator(all, channel, {.size = 3}, std::chrono::milliseconds(50),
                                       clock, faults);
      CollectiveCall call;
      call.code = OpCode::kAllGather;
      CHECK_THROWS_WITH_AS((void)communicator.Run(0, call, "x", SimTime(0), SimTime(0)),
                           "rank 0, op x: waited 50 ms for ranks 1, 2", RunError);
    }
    all.Finish();
  });
}

// Whatever a process does, it does not wait for another one without end, and the other one hears
// why.
TEST_CASE("TcpProcesses.EveryWaitEnds") {
  static constexpr std::chrono::milliseconds kTimeout{3000};
  constexpr MessagePassing::Channel kAll = MessagePassing::kAll;
  struct Way {
    std::string what;
    Process wait;
    std::string limit = "3000";
  };
  std::int64_t number = 0;
  const std::vector<Way> ways = {
      {"comparison of clocks", [](MessagePassing& all) { (void)AgreeOnStart(all); }},
      {"groups of ranks", [](MessagePassing& all) { (void)all.Split(0); }},
      {"x", [](MessagePassing& all) { (void)CollectBytes(all, kAll, {"x"}, {}); }},
      {"x", [](MessagePassing& all) { (void)ShareBytes(all, kAll, {"x"}, {}); }},
      {"x", [](MessagePassing& all) { (void)ShareReports(all, kAll, {"x"}, {}); }},
      {"x", [](MessagePassing& all) { AllOrNone(&all, kAll, {"x"}, [] {}); }},
      {"x",
       [](MessagePassing& all) {
         AllOrNone(&all, kAll, {"x", std::chrono::milliseconds(10)}, [] {});
       },
       "3010"},
      {"end of the run", [](MessagePassing& all) { FinishTogether(&all); }},
      {"end of the run", [](MessagePassing& all) { all.Finish(); }},
      {"x",
       [&](MessagePassing& all) {
         (void)all.Receive(kAll, 1, &number, sizeof number);
         ShareFromFirst(all, kAll, {"x"}, &number, sizeof number);
         (void)ShareBytes(all, kAll, {"x"}, {});
       }},
  };
  std::vector<std::jthread> threads;
  for (const Way& way : ways) {
    threads.emplace_back([&way] {
      std::promise<void> over;
      std::string waited, heard;
      RunTogether(
          2,
          [&](MessagePassing& all) {
            if (all.rank() == 1) {
              over.get_future().wait();
              return;
            }
            try {
              way.wait(all);
            } catch (const RunError& error) {
              waited = error.what();
            }
            over.set_value();
          },
          kTimeout);
      CHECK(waited == "rank 0, " + way.what + ": waited " + way.limit + " ms for rank 1");
    });
  }
}

// Process 0 stands still: its machine takes what its buffers hold, and no more.
TEST_CASE("TcpProcesses.NobodySendsWithoutEnd") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  std::promise<void> over;
  const std::jthread first([&] {
    const tcp::Socket peer = AcceptAsFirst(listener);
    over.get_future().wait();
  });
  const std::unique_ptr<MessagePassing> all =
      MeetByTcp(WorkerOf(listener), std::chrono::milliseconds(1000));
  const std::vector<std::byte> many(std::size_t{64} << 20);
  CHECK_THROWS_WITH_AS((void)all->Send(MessagePassing::kAll, 0, many.data(), std::ssize(many)),
                       "rank 1, a message on its way: waited 1000 ms for rank 0", RunError);
  over.set_value();
}

// What happens when the kernel gives a caller the port that it calls: here the caller asks for it.
TEST_CASE("TcpProcesses.ASocketThatCallsItselfIsKnown") {
  const tcp::Socket self(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(::bind(self.fd(), generic, size) == 0);
  REQUIRE(::getsockname(self.fd(), generic, &size) == 0);
  REQUIRE(::connect(self.fd(), generic, size) == 0);
  CHECK(self.CallsItself());

  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  address.sin_port = htons(static_cast<std::uint16_t>(tcp::PortOf(listener)));
  const tcp::Socket other(::socket(AF_INET, SOCK_STREAM, 0));
  REQUIRE(::connect(other.fd(), generic, size) == 0);
  CHECK(!other.CallsItself());
}

TEST_CASE("TcpProcesses.WhoDoesNotComeIsNamed") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  const std::string port = std::to_string(tcp::PortOf(listener));
  CHECK(MeetingProblem({.rank = 0, .size = 3, .listener = ::dup(listener.fd())}) ==
        "rank 0: waited 100 ms at port " + port + " for ranks 1, 2");
  // Two at one port.
  CHECK(MeetingProblem({.rank = 0, .size = 2, .port = tcp::PortOf(listener)}) ==
        "environment: rank 0: cannot listen at port " + port +
            ": Address already in use; set MASTER_PORT to a free one");
  const int nobody = tcp::PortOf(tcp::Listen("127.0.0.1", 0));  // closed again
  Launch alone{.rank = 1, .size = 2, .address = "127.0.0.1", .port = nobody};
  const std::string refused =
      "rank 1: rank 0 does not answer at 127.0.0.1:" + std::to_string(nobody) +
      " within 100 ms: Connection refused";
  CHECK(MeetingProblem(alone) ==
        refused + " (without a key only among processes of one user on one machine)");
  alone.key = kTestKey;
  CHECK(MeetingProblem(alone) == refused);
}

TEST_CASE("TcpProcesses.StrangersAreSentAway") {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  Launch first{.rank = 0, .size = 2, .address = "127.0.0.1", .port = tcp::PortOf(listener)};
  first.job = "7";
  first.key = kTestKey;
  first.listener = ::dup(listener.fd());
  const tcp::Relay relay(first, std::chrono::milliseconds(60000));
  const auto problem_of = [&](const std::string& job, int size) {
    Launch other = first;
    other.rank = 1;
    other.job = job;
    other.size = size;
    try {
      (void)tcp::Join(other, relay.port(), std::chrono::milliseconds(60000));
    } catch (const RunError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(problem_of("8", 2) == "rank 1: it belongs to job \"8\", rank 0 to job \"7\"");
  CHECK(problem_of("7", 4) == "rank 1: it was started as one of 4 processes, rank 0 as one of 2");
}

}  // namespace
}  // namespace shardwright::testing
