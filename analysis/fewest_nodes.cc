#include "analysis/fewest_nodes.h"

#include <algorithm>
#include <cmath>

namespace shardwright {
namespace {

// Steps that believe in linear speed-up; after them halves are taken.
constexpr int kLinearSteps = 4;

// The first count that ends in time if `nodes` that take `time` speed up with their number.
std::size_t FirstIfLinear(std::span<const std::int64_t> counts, std::int64_t nodes, Seconds time,
                          Seconds deadline) {
  const double needed = std::ceil(static_cast<double>(nodes) * time.value / deadline.value);
  const auto it = std::lower_bound(
      counts.begin(), counts.end(), needed,
      [](std::int64_t count, double least) { return static_cast<double>(count) < least; });
  return static_cast<std::size_t>(it - counts.begin());
}

}  // namespace

std::optional<std::size_t> FirstInTime(
    std::span<const std::int64_t> counts, Seconds deadline,
    const std::function<std::optional<Seconds>(std::int64_t)>& time_of) {
  std::size_t low = 0;               // all before it are late
  std::size_t high = counts.size();  // in time, where there is such a count
  std::size_t stride = 1;
  std::size_t next = 0;
  bool is_linear = false;  // `next` is what linear speed-up says
  for (int step = 0; low < high; ++step) {
    const std::optional<Seconds> time = time_of(counts[next]);
    const bool is_late = !time || *time > deadline;
    (is_late ? low : high) = is_late ? next + 1 : next;
    if (is_late && time && step < kLinearSteps) {
      next = FirstIfLinear(counts, counts[next], *time, deadline);
      is_linear = true;
    } else if (high < counts.size()) {  // nothing is faster than linear: one fewer is late
      next = is_linear && !is_late ? high - 1 : low + (high - low) / 2;
      is_linear = false;
    } else {
      next = low + stride;
      stride *= 2;
    }
    next = std::clamp(next, low, std::max(low, high - 1));
  }
  return low < counts.size() ? std::optional(low) : std::nullopt;
}

}  // namespace shardwright
