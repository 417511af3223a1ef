#include "analysis/optimize.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include <nlopt.h>

#include "core/error.h"

namespace shardwright {
namespace {

// What the C callback needs. Exceptions must not pass through the library.
struct Call {
  const std::function<double(std::span<const double>)>* objective = nullptr;
  nlopt_opt optimizer = nullptr;
  std::int64_t evaluations = 0;
  std::exception_ptr failure;
};

double Evaluate(unsigned count, const double* values, double* /*gradient*/, void* data) {
  auto& call = *static_cast<Call*>(data);
  ++call.evaluations;
  try {
    return (*call.objective)({values, count});
  } catch (...) {  // rethrown by Minimise
    call.failure = std::current_exception();
    nlopt_force_stop(call.optimizer);
    return 0;
  }
}

struct Destroy {
  void operator()(nlopt_opt optimizer) const { nlopt_destroy(optimizer); }
};
using Optimizer = std::unique_ptr<nlopt_opt_s, Destroy>;

// One search; returns the evaluations it took.
std::int64_t Search(const std::function<double(std::span<const double>)>& objective,
                    const std::vector<FitVariable>& variables, std::int64_t most_evaluations,
                    FitResult& best) {
  const Optimizer optimizer(nlopt_create(NLOPT_LN_SBPLX, static_cast<unsigned>(variables.size())));
  std::vector<double> lower;
  std::vector<double> upper;
  std::vector<double> steps;
  for (const FitVariable& variable : variables) {
    lower.push_back(variable.lower);
    upper.push_back(variable.upper);
    // Steps of a tenth of the range; a search that starts on a bound goes inwards by itself.
    steps.push_back((variable.upper - variable.lower) / 10);
  }
  Call call{&objective, optimizer.get(), 0, nullptr};
  nlopt_set_lower_bounds(optimizer.get(), lower.data());
  nlopt_set_upper_bounds(optimizer.get(), upper.data());
  nlopt_set_initial_step(optimizer.get(), steps.data());
  nlopt_set_min_objective(optimizer.get(), &Evaluate, &call);
  nlopt_set_xtol_rel(optimizer.get(), 1e-6);
  nlopt_set_maxeval(optimizer.get(), static_cast<int>(most_evaluations));
  std::vector<double> values = best.values;
  double found = 0;
  const nlopt_result result = nlopt_optimize(optimizer.get(), values.data(), &found);
  if (call.failure) {
    std::rethrow_exception(call.failure);
  }
  SW_CHECK(result > 0 || result == NLOPT_ROUNDOFF_LIMITED,
           "NLopt failed with " + std::to_string(result));
  if (found < best.objective) {
    best.objective = found;
    best.values = std::move(values);
  }
  return call.evaluations;
}

}  // namespace

FitResult Minimise(const std::function<double(std::span<const double>)>& objective,
                   const std::vector<FitVariable>& variables, std::int64_t most_evaluations) {
  SW_CHECK(!variables.empty(), "nothing to fit");
  FitResult best;
  for (const FitVariable& variable : variables) {
    SW_CHECK(variable.lower < variable.upper, variable.name);
    best.values.push_back(std::clamp(variable.start, variable.lower, variable.upper));
  }
  best.objective = objective(best.values);
  best.evaluations = 1;
  while (best.evaluations < most_evaluations) {
    const double before = best.objective;
    best.evaluations += Search(objective, variables, most_evaluations - best.evaluations, best);
    constexpr double kWorthGoingOn = 1e-6;  // of the objective
    if (!(best.objective < before * (1 - kWorthGoingOn))) {
      break;
    }
  }
  return best;
}

}  // namespace shardwright
