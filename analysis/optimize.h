#pragma once

// Minimising a function of few bounded variables whose derivatives are not known.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace shardwright {

struct FitVariable {
  std::string name;
  double lower = 0;
  double upper = 1;
  double start = 0;  // within the bounds
};

struct FitResult {
  std::vector<double> values;  // within the bounds
  double objective = 0;
  std::int64_t evaluations = 0;
};

// A local minimum near the start: subspace simplex search (T. Rowan's Subplex) from the NLopt
// library, restarted from its own result until that no longer helps. Deterministic. `objective`
// must return a finite number within the bounds. Requires at least one variable.
[[nodiscard]] FitResult Minimise(const std::function<double(std::span<const double>)>& objective,
                                 const std::vector<FitVariable>& variables,
                                 std::int64_t most_evaluations);

}  // namespace shardwright
