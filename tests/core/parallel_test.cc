#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

TEST_CASE("ParallelFor: every index is taken once, whatever the number of threads") {
  for (const std::size_t threads : {1U, 2U, 7U}) {
    std::vector<std::atomic<int>> taken(100);
    std::atomic<bool> worker_is_known = true;
    ParallelFor(taken.size(), threads, [&](std::size_t i, std::size_t worker) {
      ++taken[i];
      worker_is_known = worker_is_known && worker < threads;
    });
    CHECK(worker_is_known);
    for (const std::atomic<int>& count : taken) {
      CHECK(count == 1);
    }
  }
  ParallelFor(0, 4, [](std::size_t, std::size_t) { FAIL("nothing to do"); });
}

TEST_CASE("ParallelFor: of several exceptions the one of the lowest index comes out") {
  for (const std::size_t threads : {1U, 2U, 7U}) {
    std::string what;
    try {
      ParallelFor(50, threads, [](std::size_t i, std::size_t) {
        if (i % 10 == 7) {
          throw std::runtime_error(std::to_string(i));
        }
      });
    } catch (const std::runtime_error& error) {
      what = error.what();
    }
    CHECK(what == "7");
  }
}

TEST_CASE("Team: many loops on the same threads, each whole when it ends") {
  Team team(4);
  CHECK(team.threads() == 4);
  std::vector<std::int64_t> values(1000);
  for (int loop = 0; loop < 300; ++loop) {
    team.For(values.size(), [&](std::size_t i, std::size_t) { ++values[i]; });
    CHECK(std::count(values.begin(), values.end(), loop + 1) == 1000);
  }
}

TEST_CASE(
    "Team: a loop that another thread's holds up runs on its caller, and so does one inside") {
  Team team(3);
  std::atomic<int> taken = 0;
  std::atomic<bool> is_alone = true;
  team.For(6, [&](std::size_t, std::size_t) {
    const std::thread::id caller = std::this_thread::get_id();
    std::thread other([&] {
      const std::thread::id mine = std::this_thread::get_id();
      team.For(5, [&](std::size_t, std::size_t worker) {
        is_alone = is_alone && worker == 0 && std::this_thread::get_id() == mine;
        ++taken;
      });
    });
    other.join();
    CHECK(std::this_thread::get_id() == caller);
  });
  CHECK(taken == 30);
  CHECK(is_alone);
}

TEST_CASE("Team: it goes on after an exception, and tells what its threads computed") {
  Team team(2);
  CHECK_THROWS_AS(team.For(8, [](std::size_t, std::size_t) { throw std::runtime_error("no"); }),
                  std::runtime_error);
  (void)team.TakeNanoseconds();
  std::atomic<int> at_work = 0;
  team.For(2, [&](std::size_t, std::size_t) {  // both threads have to be there
    for (++at_work; at_work < 2;) {
    }
    const std::clock_t begin = std::clock();
    while (std::clock() - begin < CLOCKS_PER_SEC / 50) {
    }
  });
  CHECK(team.TakeNanoseconds() > 1'000'000);
  CHECK(team.TakeNanoseconds() == 0);
}

TEST_CASE("Team: every thread keeps memory of its own, aligned") {
  Team team(2);
  const std::span<std::byte> first = team.Memory(1, 100);
  CHECK(first.size() == 100);
  CHECK(reinterpret_cast<std::uintptr_t>(first.data()) % 64 == 0);
  CHECK(team.Memory(1, 80).data() == first.data());
  CHECK(team.Memory(1, 100'000).size() == 100'000);
}

}  // namespace
}  // namespace shardwright
