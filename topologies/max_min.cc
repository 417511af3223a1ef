// Max-min fair sharing by progressive filling. Declared in topologies/routing.h.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "core/error.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// Shares that differ by less than this relative amount are one bottleneck: rounding of sums of a
// few dozen doubles stays far below, real capacities differ by far more.
constexpr double kSameShare = 1e-12;

// Total weight of the flows in `is_open` on each constraint.
std::vector<double> Loads(std::span<const SharedFlow> flows, const std::vector<bool>& is_open,
                          std::size_t constraint_count) {
  std::vector<double> loads(constraint_count, 0.0);
  for (std::size_t f = 0; f < flows.size(); ++f) {
    if (is_open[f]) {
      for (const SharedFlow::Use& use : flows[f].uses) {
        loads[static_cast<std::size_t>(use.constraint)] += use.weight;
      }
    }
  }
  return loads;
}

// For each constraint what is left of it per unit of open weight; infinity where no open flow is.
std::vector<double> Shares(std::span<const double> remaining, std::span<const double> loads) {
  std::vector<double> shares(remaining.size(), std::numeric_limits<double>::infinity());
  for (std::size_t c = 0; c < remaining.size(); ++c) {
    if (loads[c] > 0) {
      shares[c] = std::max(remaining[c], 0.0) / loads[c];
    }
  }
  return shares;
}

// The rate up to which all open flows can grow together: the least share or bound.
double CommonLevel(std::span<const SharedFlow> flows, const std::vector<bool>& is_open,
                   std::span<const double> shares) {
  double level = std::numeric_limits<double>::infinity();
  for (const double share : shares) {
    level = std::min(level, share);
  }
  for (std::size_t f = 0; f < flows.size(); ++f) {
    if (is_open[f]) {
      level = std::min(level, flows[f].bound);
    }
  }
  return level;
}

}  // namespace

// All open flows grow at one common rate. The next event is a flow reaching its bound or a
// constraint filling up: with u_c the open weight on constraint c, that is at min(bound_f,
// remaining_c / u_c). What stops there is fixed, the rest goes on. Source: the textbook algorithm
// (Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2), with weights.
std::vector<double> MaxMinRates(std::span<const SharedFlow> flows,
                                std::span<const double> capacities) {
  std::vector<double> rates(flows.size(), 0.0);
  std::vector<bool> is_open(flows.size(), true);
  std::vector<double> remaining(capacities.begin(), capacities.end());
  std::size_t open_count = flows.size();
  while (open_count > 0) {
    const std::vector<double> shares = Shares(remaining, Loads(flows, is_open, capacities.size()));
    const double level = CommonLevel(flows, is_open, shares);
    const double reached = level * (1 + kSameShare);
    std::size_t fixed_count = 0;
    for (std::size_t f = 0; f < flows.size(); ++f) {
      const auto is_full = [&](const SharedFlow::Use& use) {
        return use.weight > 0 && shares[static_cast<std::size_t>(use.constraint)] <= reached;
      };
      if (!is_open[f] || !(flows[f].bound <= reached ||
                           std::any_of(flows[f].uses.begin(), flows[f].uses.end(), is_full))) {
        continue;
      }
      is_open[f] = false;
      ++fixed_count;
      rates[f] = std::min(level, flows[f].bound);
      for (const SharedFlow::Use& use : flows[f].uses) {
        remaining[static_cast<std::size_t>(use.constraint)] -= use.weight * rates[f];
      }
    }
    SW_CHECK(fixed_count > 0, "every round fixes a flow");
    open_count -= fixed_count;
  }
  return rates;
}

}  // namespace shardwright
