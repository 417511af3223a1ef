#include "core/parallel.h"

#include <atomic>
#include <stdexcept>
#include <string>
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

}  // namespace
}  // namespace shardwright
