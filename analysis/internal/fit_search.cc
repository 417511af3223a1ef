#include "analysis/internal/fit_search.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

#include "analysis/optimize.h"

namespace shardwright {
namespace {

// The rows that a variable has something to do with.
RowMask RowsOf(const FitGroup& group, const Variable& variable, const RowMask& mask) {
  RowMask rows = mask;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = mask[i] && (variable.is_shared || group.rows[i].stack == variable.stack);
  }
  return rows;
}

// Forward differences.
Linear Linearise(const FitGroup& group, const std::vector<double>& point, const RowMask& mask,
                 FitWork& work) {
  Linear linear{point, RowErrors(group, point, mask, work), {}};
  for (std::size_t k = 0; k < point.size(); ++k) {
    constexpr double kStep = 0.03;
    const double step = point[k] + kStep > group.variables[k].upper ? -kStep : kStep;
    std::vector<double> moved = point;
    moved[k] += step;
    const RowMask rows = RowsOf(group, group.variables[k], mask);
    std::vector<double> slopes = RowErrors(group, moved, rows, work);
    for (std::size_t i = 0; i < slopes.size(); ++i) {
      slopes[i] = rows[i] ? (slopes[i] - linear.errors[i]) / step : 0;
    }
    linear.slopes.push_back(std::move(slopes));
  }
  work.evaluations += point.size() + 1;
  return linear;
}

// Errors of about this size are expected; larger ones count linearly, not squared.
constexpr double kErrorScale = 0.01;
// A number that is this factor away from what was expected counts like one row with an error of
// kErrorScale: where rows do not tell, numbers stay what they were.
const double kPriorWidth = std::log(2.0);
// The same for the difference of a number's deviation to that of those that it follows.
const double kFollowWidth = std::log(1.25);

double Loss(double error) {
  const double z = error / kErrorScale;
  return 2 * (std::sqrt(1 + z * z) - 1);
}

double Prior(const FitGroup& group, std::span<const double> point) {
  double sum = 0;
  const auto deviation = [&](std::size_t k) { return point[k] - group.variables[k].start; };
  for (std::size_t k = 0; k < point.size(); ++k) {
    const double own = deviation(k) / kPriorWidth;
    sum += own * own;
    const std::vector<std::size_t>& follows = group.variables[k].follows;
    if (follows.empty() && group.variables[k].moves_with.empty()) {
      continue;
    }
    double followed = 0;  // what moves with another number is its deviation from that one already
    for (const std::size_t other : follows) {
      followed += deviation(other) / static_cast<double>(follows.size());
    }
    const double apart = (deviation(k) - followed) / kFollowWidth;
    sum += apart * apart;
  }
  return sum;
}

double FitObjective(const FitGroup& group, const std::vector<double>& errors,
                    std::span<const double> point, const RowMask& mask) {
  double sum = Prior(group, point);
  for (std::size_t i = 0; i < errors.size(); ++i) {
    sum += mask[i] ? Loss(errors[i]) : 0;
  }
  return sum;
}

// Neither a step nor the search after them goes further than this from where it began.
constexpr double kReach = 0.5;

// A box of `reach` around `point`, within the bounds.
std::vector<FitVariable> Around(const FitGroup& group, const std::vector<double>& point,
                                double reach) {
  std::vector<FitVariable> variables;
  for (std::size_t k = 0; k < point.size(); ++k) {
    const Variable& v = group.variables[k];
    variables.push_back({v.path, std::max(v.lower, point[k] - reach),
                         std::min(v.upper, point[k] + reach), point[k]});
  }
  return variables;
}

// The best point near `linear` if errors were straight lines, at most `reach` away.
std::vector<double> Step(const FitGroup& group, const Linear& linear, const RowMask& mask,
                         double reach) {
  std::vector<double> errors(linear.errors.size());
  const auto objective = [&](std::span<const double> point) {
    errors = linear.errors;
    for (std::size_t k = 0; k < point.size(); ++k) {
      const double move = point[k] - linear.at[k];
      for (std::size_t i = 0; i < errors.size(); ++i) {
        errors[i] += move * linear.slopes[k][i];
      }
    }
    return FitObjective(group, errors, point, mask);
  };
  constexpr std::int64_t kMostEvaluations = 20000;
  return Minimise(objective, Around(group, linear.at, reach), kMostEvaluations).values;
}

// Gauss-Newton with a trust region from where the base profiles are.
Linear Approach(const FitGroup& group, const RowMask& mask, FitWork& work) {
  std::vector<double> start;
  for (const Variable& variable : group.variables) {
    start.push_back(variable.start);
  }
  constexpr int kMostRounds = 20;
  constexpr double kLeastReach = 0.01;
  constexpr double kSmallGain = 1e-3;
  Linear linear = Linearise(group, start, mask, work);
  double reach = kReach;
  for (int round = 0; round < kMostRounds && reach >= kLeastReach; ++round) {
    const std::vector<double> point = Step(group, linear, mask, reach);
    const std::vector<double> errors = RowErrors(group, point, mask, work);
    ++work.evaluations;
    const double before = FitObjective(group, linear.errors, linear.at, mask);
    if (FitObjective(group, errors, point, mask) < (1 - kSmallGain) * before) {
      linear = Linearise(group, point, mask, work);
      reach = std::min(2 * reach, kReach);
    } else {
      reach /= 4;
    }
  }
  return linear;
}

}  // namespace

std::vector<double> RowErrors(const FitGroup& group, const std::vector<double>& point,
                              const RowMask& mask, FitWork& work) {
  std::vector<Profile> profiles;
  for (std::size_t s = 0; s < group.stacks.size(); ++s) {
    profiles.push_back(ProfileAt(group, s, point));
  }
  std::vector<double> errors(group.rows.size(), 0.0);
  SimulateOptions options;
  options.reserved = false;
  for (std::size_t i = 0; i < group.rows.size(); ++i) {
    if (!mask[i]) {
      continue;
    }
    const GroupRow& row = group.rows[i];
    if (work.simulator) {
      work.simulator->Use(row.run->plan.cluster, profiles[row.stack]);
    } else {
      work.simulator.emplace(row.run->plan.cluster, profiles[row.stack]);
    }
    const SimTime time = work.simulator->Run(row.program, options).step_time;
    errors[i] = std::log(ToSeconds(time).value / row.run->step_time_s);
  }
  return errors;
}

Linear FitRows(const FitGroup& group, const RowMask& mask, FitWork& work) {
  const Linear near = Approach(group, mask, work);
  // Errors have corners where something else becomes the critical path, at which straight lines
  // stop: from there on the simulator itself is asked.
  const auto objective = [&](std::span<const double> values) {
    const std::vector<double> point(values.begin(), values.end());
    return FitObjective(group, RowErrors(group, point, mask, work), point, mask);
  };
  constexpr std::int64_t kMostEvaluations = 300;
  const FitResult best = Minimise(objective, Around(group, near.at, kReach), kMostEvaluations);
  work.evaluations += static_cast<std::size_t>(best.evaluations);
  return Linearise(group, best.values, mask, work);
}

}  // namespace shardwright
