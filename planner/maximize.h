#pragma once

// The maximum of a concave function of a few variables, by cutting planes.

#include <functional>
#include <vector>

namespace shardwright {

// A value of the function and a slope there: nowhere is the function above value + slope * (x -
// at).
struct Slope {
  double value = 0;
  std::vector<double> slope;  // per variable
};

struct Maximum {
  double value = 0;  // attained
  std::vector<double> at;
};

// Maximises f over 0 <= x_i <= 1 where each of `limits` (all entries >= 0) has limit * x <= 1.
// Stops when no point can be better by more than the fraction `tolerance`, or after a fixed number
// of evaluations; every value of f that it meets is attained, so that a maximum found too early is
// still a value of f. Starts at `start`, which must keep the limits.
[[nodiscard]] Maximum Maximize(const std::function<Slope(const std::vector<double>&)>& f,
                               const std::vector<std::vector<double>>& limits,
                               std::vector<double> start, double tolerance);

}  // namespace shardwright
