#include "analysis/fewest_nodes.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

std::vector<std::int64_t> UpTo(std::int64_t most) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(most));
  std::iota(counts.begin(), counts.end(), 1);
  return counts;
}

TEST_CASE("FirstInTime: linear speed-up takes three calls") {
  // 1 node takes 1,000 s: 34 nodes take 29.4 s, 33 take 30.3 s.
  std::vector<std::int64_t> asked;
  const auto found = FirstInTime(UpTo(16'384), Seconds(30), [&](std::int64_t nodes) {
    asked.push_back(nodes);
    return std::optional(Seconds(1000.0 / static_cast<double>(nodes)));
  });
  CHECK(found == 33);
  CHECK(asked == std::vector<std::int64_t>{1, 34, 33});
}

TEST_CASE("FirstInTime: every count is late, none fits, or there is none") {
  const auto slow = [](std::int64_t) { return std::optional(Seconds(2)); };
  CHECK(FirstInTime(UpTo(100), Seconds(1), slow) == std::nullopt);
  const auto none = [](std::int64_t) { return std::optional<Seconds>(); };
  CHECK(FirstInTime(UpTo(100), Seconds(1), none) == std::nullopt);
  CHECK(FirstInTime({}, Seconds(1), slow) == std::nullopt);
  CHECK(FirstInTime(UpTo(100), Seconds(2), slow) == 0);
}

TEST_CASE("FirstInTime: equals a scan for falling times, and asks few") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    const auto most = static_cast<std::int64_t>(1 + random() % 300);
    std::vector<std::int64_t> counts = UpTo(most);
    std::erase_if(counts, [&](std::int64_t) { return random() % 3 == 0; });
    // Does not fit below `fits`; from there time falls by random factors, also faster than linear.
    const auto fits = static_cast<std::int64_t>(random() % 20);
    std::vector<double> times(static_cast<std::size_t>(most) + 1);
    double time = 1000;
    for (double& at : times) {
      time *= 1.0 - 0.2 * static_cast<double>(random() % 100) / 100;
      at = time;
    }
    const double deadline = 1000 * static_cast<double>(1 + random() % 1000) / 1000;
    std::set<std::int64_t> asked;
    const auto time_of = [&](std::int64_t nodes) {
      return nodes < fits ? std::optional<Seconds>()
                          : std::optional(Seconds(times[static_cast<std::size_t>(nodes)]));
    };
    const auto found = FirstInTime(counts, Seconds(deadline), [&](std::int64_t nodes) {
      asked.insert(nodes);
      return time_of(nodes);
    });
    const auto it = std::find_if(counts.begin(), counts.end(), [&](std::int64_t nodes) {
      return time_of(nodes) && time_of(nodes)->value <= deadline;
    });
    REQUIRE(found.has_value() == (it != counts.end()));
    CHECK(asked.size() <= 24);
    if (found) {
      CHECK(*found == static_cast<std::size_t>(it - counts.begin()));
      CHECK((*found == 0 || asked.contains(counts[*found - 1])));
    }
  }
}

}  // namespace
}  // namespace shardwright
