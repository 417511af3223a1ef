#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "topologies/routing.h"

namespace shardwright {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums of at most a dozen doubles near 1.
constexpr double kRounding = 1e-9;

TEST_CASE("MaxMin: one link is shared evenly, by hand") {
  const std::vector<SharedFlow> flows(4, SharedFlow{kInfinity, {{0, 1}}});
  CHECK(MaxMinRates(flows, std::vector<double>{100}) == std::vector<double>{25, 25, 25, 25});
  CHECK(MaxMinRates({}, std::vector<double>{100}).empty());
}

// The textbook chain: flow 0 crosses both links, flow 1 the first, flow 2 the second.
TEST_CASE("MaxMin: a long flow is held by its tightest link, by hand") {
  const std::vector<SharedFlow> flows = {
      {kInfinity, {{0, 1}, {1, 1}}}, {kInfinity, {{0, 1}}}, {kInfinity, {{1, 1}}}};
  CHECK(MaxMinRates(flows, std::vector<double>{10, 30}) == std::vector<double>{5, 5, 25});
}

TEST_CASE("MaxMin: own bounds free capacity for the others, by hand") {
  const std::vector<SharedFlow> flows = {
      {2, {{0, 1}}}, {kInfinity, {{0, 1}}}, {kInfinity, {{0, 1}}}};
  CHECK(MaxMinRates(flows, std::vector<double>{10}) == std::vector<double>{2, 4, 4});
}

// 2 r + r = 9 on the shared link: equal rates 3, the first taking 6 of the 9.
TEST_CASE("MaxMin: weights are capacity per rate, by hand") {
  const std::vector<SharedFlow> flows = {{kInfinity, {{0, 2}}}, {kInfinity, {{0, 1}}}};
  CHECK(MaxMinRates(flows, std::vector<double>{9}) == std::vector<double>{3, 3});
}

TEST_CASE("MaxMin: a closed link and a bound of zero stop only their flows") {
  const std::vector<SharedFlow> flows = {
      {kInfinity, {{0, 1}}}, {0, {{1, 1}}}, {kInfinity, {{1, 1}}}};
  CHECK(MaxMinRates(flows, std::vector<double>{0, 8}) == std::vector<double>{0, 0, 8});
}

// The definition, checked on random instances: the allocation fits, and every flow is either at its
// own bound or crosses a full constraint on which no flow is faster. Only the max-min fair
// allocation has this property (Bertsekas and Gallager, section 6.5.2).
TEST_CASE("MaxMin: every flow has a bottleneck, on 2000 random instances") {
  std::uint64_t state = 12345;
  const auto draw = [&](std::uint64_t n) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % n;
  };
  for (int round = 0; round < 2000; ++round) {
    CAPTURE(round);
    std::vector<double> capacities(1 + draw(6));
    for (double& capacity : capacities) {
      capacity = static_cast<double>(1 + draw(20)) / 4;
    }
    std::vector<SharedFlow> flows(1 + draw(8));
    for (SharedFlow& flow : flows) {
      flow.bound = draw(3) == 0 ? static_cast<double>(1 + draw(8)) / 4 : 100;
      for (std::size_t c = 0; c < capacities.size(); ++c) {
        if (draw(2) == 0) {
          flow.uses.push_back({static_cast<std::int32_t>(c), static_cast<double>(1 + draw(4)) / 2});
        }
      }
    }
    const std::vector<double> rates = MaxMinRates(flows, capacities);
    std::vector<double> loads(capacities.size(), 0);
    std::vector<double> fastest(capacities.size(), 0);
    for (std::size_t f = 0; f < flows.size(); ++f) {
      for (const SharedFlow::Use& use : flows[f].uses) {
        const auto c = static_cast<std::size_t>(use.constraint);
        loads[c] += use.weight * rates[f];
        fastest[c] = std::max(fastest[c], rates[f]);
      }
    }
    for (std::size_t c = 0; c < capacities.size(); ++c) {
      CHECK(loads[c] <= capacities[c] * (1 + kRounding));
    }
    for (std::size_t f = 0; f < flows.size(); ++f) {
      bool has_bottleneck = rates[f] >= flows[f].bound * (1 - kRounding);
      for (const SharedFlow::Use& use : flows[f].uses) {
        const auto c = static_cast<std::size_t>(use.constraint);
        has_bottleneck = has_bottleneck || (loads[c] >= capacities[c] * (1 - kRounding) &&
                                            rates[f] >= fastest[c] * (1 - kRounding));
      }
      CHECK(has_bottleneck);
      CHECK(rates[f] <= flows[f].bound);
    }
  }
}

}  // namespace
}  // namespace shardwright
