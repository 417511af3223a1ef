#include "analysis/fit_runs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "analysis/optimize.h"
#include "analysis/profile_numbers.h"
#include "analysis/run_mapping.h"
#include "core/error.h"
#include "core/json.h"
#include "core/parallel.h"
#include "schedule/lower.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/simulate.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

// What a number may become, and what is expected of one that profiles leave at 0.
struct Bounds {
  std::string_view path;
  double lower = 0;
  double upper = 0;
  double expected = 0;  // 0: what the base profile says
};
constexpr std::array<Bounds, 8> kBounds = {{
    {"compute.gemm.", 0.3, 0.95, 0},
    {"compute.attention_", 0.08, 0.9, 0},
    {"compute.elementwise", 0.2, 0.95, 0},
    {"compute.reduction", 0.2, 0.95, 0},
    {"compute.optimizer", 0.05, 0.95, 0},
    {"compute.rank_spread", 0.0005, 0.03, 0.01},
    {"host.step", 1e-4, 0.1, 5e-3},
    {"overlap.compute_sensitivity", 0.1, 4, 0},
}};
// Any other number may be up to this factor away from what the base profile says.
constexpr double kOtherFactor = 10;

// One number of one stack, or of all stacks of a group. The search works on logarithms.
struct Variable {
  std::string path;
  std::size_t stack = 0;
  bool is_shared = true;
  double lower = 0, upper = 0, start = 0;  // logarithms
  bool is_time = false;
  std::vector<std::size_t> follows = {};  // variables whose mean deviation this one shares
};

struct FitRow {
  const MeasuredRun* run = nullptr;
  double measured_s = 0;
  std::size_t stack = 0;
  Cluster cluster;
  Program program;
};

struct StackBase {
  std::string gpu;
  std::string kernel_set;
  Profile profile;
};

struct FitGroup {
  std::string gpus;    // the GPU types of its rows, such as "a100-40, a100-80"
  std::string family;  // first word of the kernel set
  std::vector<StackBase> stacks;
  std::vector<FitRow> rows;
  std::vector<Variable> variables;
};

// A point and the errors there: log(predicted / measured) by row, and their slopes.
struct Linear {
  std::vector<double> at;
  std::vector<double> errors;
  std::vector<std::vector<double>> slopes;  // [variable][row]
};

using Mask = std::vector<bool>;  // rows to use

Bounds BoundsOf(const std::string& path, double base) {
  for (const Bounds& row : kBounds) {
    if (path.starts_with(row.path)) {
      Bounds bounds = row;
      bounds.expected = row.expected > 0 ? row.expected : base;
      return bounds;
    }
  }
  return {path, base / kOtherFactor, base * kOtherFactor, base};
}

std::string FamilyOf(const std::string& kernel_set) {
  return kernel_set.substr(0, kernel_set.find('-'));
}

// GPU types with the same multiprocessors, however much memory they have and how fast it is: A100
// of 40 and 80 GB, H100 and H200.
std::string ChipOf(const GpuSpec& gpu) {
  std::string chip = gpu.architecture + ' ' + std::to_string(gpu.sm_count.value);
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    const std::optional<FlopsPerSecond> peak = PeakFlops(gpu, static_cast<MathType>(i));
    chip += ' ' + (peak ? Format(*peak) : "-");
  }
  return chip;
}

// The profile that fits start from and extend: the eager one of the GPU's architecture.
Profile BaseProfile(const GpuSpec& gpu) {
  return DefaultProfile(gpu, "torch-eager");
}

// The stack of `plan` in `group`, added if it is new.
std::size_t StackOf(const PlanFile& plan, FitGroup& group) {
  const GpuSpec& gpu = plan.cluster.gpu;
  for (std::size_t i = 0; i < group.stacks.size(); ++i) {
    if (group.stacks[i].gpu == gpu.name && group.stacks[i].kernel_set == plan.kernels.name) {
      return i;
    }
  }
  const bool is_new_gpu =
      std::none_of(group.stacks.begin(), group.stacks.end(),
                   [&](const StackBase& stack) { return stack.gpu == gpu.name; });
  if (is_new_gpu) {
    group.gpus += (group.gpus.empty() ? "" : ", ") + gpu.name;
  }
  group.stacks.push_back({gpu.name, plan.kernels.name, BaseProfile(gpu)});
  return group.stacks.size() - 1;
}

// "compute.gemm.fp8", a dtype that exists but that some GPUs lack.
bool IsGemm(const std::string& path) {
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (path == "compute.gemm." + std::string(MathTypeName(static_cast<MathType>(i)))) {
      return true;
    }
  }
  return false;
}

bool HasNumber(const Profile& profile, const std::string& path) {
  const std::vector<std::string> paths = NumberPaths(profile);
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}

// What keeps matrix products below the peak (clocks under the power limit, heat) does so for all
// dtypes: fractions of further dtypes follow those of the first one.
void LinkDtypes(FitGroup& group) {
  std::vector<std::size_t> first;
  for (std::size_t k = 0; k < group.variables.size(); ++k) {
    Variable& variable = group.variables[k];
    if (!IsGemm(variable.path)) {
      continue;
    }
    if (first.empty() || variable.path == group.variables[first[0]].path) {
      first.push_back(k);
    } else {
      variable.follows = first;
    }
  }
}

void AddVariables(const FitOptions& options, FitGroup& group) {
  const auto add = [&](const std::string& path, std::size_t stack, bool is_shared) {
    Profile profile = group.stacks[stack].profile;
    if (IsGemm(path) && !HasNumber(profile, path)) {
      return;  // a dtype that these GPUs do not multiply
    }
    const NumberRef number = NumberAt(profile, path, "--numbers");
    const Bounds bounds = BoundsOf(path, *number.value);
    if (bounds.expected <= 0) {
      throw InputError("--numbers", '"' + path + '"', "a number that the base profile has");
    }
    const double expected = std::clamp(bounds.expected, bounds.lower, bounds.upper);
    group.variables.push_back({path, stack, is_shared, std::log(bounds.lower),
                               std::log(bounds.upper), std::log(expected), number.is_time});
  };
  for (const std::string& path : options.numbers) {
    const bool is_own =
        std::find(options.own.begin(), options.own.end(), path) != options.own.end();
    for (std::size_t s = 0; s < (is_own ? group.stacks.size() : 1); ++s) {
      add(path, s, !is_own);
    }
  }
  LinkDtypes(group);
}

Profile ProfileAt(const FitGroup& group, std::size_t stack, std::span<const double> point) {
  Profile profile = group.stacks[stack].profile;
  for (std::size_t k = 0; k < group.variables.size(); ++k) {
    const Variable& variable = group.variables[k];
    if (variable.is_shared || variable.stack == stack) {
      *NumberAt(profile, variable.path, "--numbers").value = std::exp(point[k]);
    }
  }
  return profile;
}

// log(predicted / measured) of the rows in `mask`; 0 elsewhere.
std::vector<double> Errors(const FitGroup& group, const std::vector<double>& point,
                           const Mask& mask) {
  std::vector<Profile> profiles;
  for (std::size_t s = 0; s < group.stacks.size(); ++s) {
    profiles.push_back(ProfileAt(group, s, point));
  }
  std::vector<double> errors(group.rows.size(), 0.0);
  ParallelFor(group.rows.size(), ThreadCount(), [&](std::size_t i, std::size_t) {
    if (!mask[i]) {
      return;
    }
    const FitRow& row = group.rows[i];
    SimulateOptions options;
    options.reserved = false;
    const SimulationResult result = Simulate({.program = row.program,
                                              .cluster = row.cluster,
                                              .profile = profiles[row.stack],
                                              .options = options});
    errors[i] = std::log(ToSeconds(result.step_time).value / row.measured_s);
  });
  return errors;
}

// Forward differences.
Linear Linearise(const FitGroup& group, const std::vector<double>& point, const Mask& mask,
                 std::size_t& evaluations) {
  Linear linear{point, Errors(group, point, mask), {}};
  for (std::size_t k = 0; k < point.size(); ++k) {
    constexpr double kStep = 0.03;
    const double step = point[k] + kStep > group.variables[k].upper ? -kStep : kStep;
    std::vector<double> moved = point;
    moved[k] += step;
    std::vector<double> slopes = Errors(group, moved, mask);
    for (std::size_t i = 0; i < slopes.size(); ++i) {
      slopes[i] = (slopes[i] - linear.errors[i]) / step;
    }
    linear.slopes.push_back(std::move(slopes));
  }
  evaluations += point.size() + 1;
  return linear;
}

// Errors of about this size are expected; larger ones count linearly, not squared.
constexpr double kErrorScale = 0.01;
// A number that is this factor away from what was expected counts like one row with an error of
// kErrorScale: where rows do not tell, numbers stay what they were.
const double kPriorWidth = std::log(2.0);
// The same for the difference of one dtype's deviation to another's.
const double kDtypeWidth = std::log(1.25);

double Loss(double error) {
  const double z = error / kErrorScale;
  return 2 * (std::sqrt(1 + z * z) - 1);
}

double Prior(const FitGroup& group, std::span<const double> point) {
  double sum = 0;
  const auto deviation = [&](std::size_t k) { return point[k] - group.variables[k].start; };
  for (std::size_t k = 0; k < point.size(); ++k) {
    const std::vector<std::size_t>& follows = group.variables[k].follows;
    double expected = 0;
    for (const std::size_t other : follows) {
      expected += deviation(other) / static_cast<double>(follows.size());
    }
    const double z = (deviation(k) - expected) / (follows.empty() ? kPriorWidth : kDtypeWidth);
    sum += z * z;
  }
  return sum;
}

double Objective(const FitGroup& group, const std::vector<double>& errors,
                 std::span<const double> point, const Mask& mask) {
  double sum = Prior(group, point);
  for (std::size_t i = 0; i < errors.size(); ++i) {
    sum += mask[i] ? Loss(errors[i]) : 0;
  }
  return sum;
}

// The best point near `linear` if errors were straight lines, at most `reach` away.
std::vector<double> Step(const FitGroup& group, const Linear& linear, const Mask& mask,
                         double reach) {
  std::vector<FitVariable> variables;
  for (std::size_t k = 0; k < linear.at.size(); ++k) {
    const Variable& v = group.variables[k];
    variables.push_back({v.path, std::max(v.lower, linear.at[k] - reach),
                         std::min(v.upper, linear.at[k] + reach), linear.at[k]});
  }
  std::vector<double> errors(linear.errors.size());
  const auto objective = [&](std::span<const double> point) {
    errors = linear.errors;
    for (std::size_t k = 0; k < point.size(); ++k) {
      const double move = point[k] - linear.at[k];
      for (std::size_t i = 0; i < errors.size(); ++i) {
        errors[i] += move * linear.slopes[k][i];
      }
    }
    return Objective(group, errors, point, mask);
  };
  constexpr std::int64_t kMostEvaluations = 20000;
  return Minimise(objective, variables, kMostEvaluations).values;
}

// Gauss-Newton from `linear`, whose slopes are those at its point. Returns the last linearisation.
Linear Search(const FitGroup& group, Linear linear, const Mask& mask, int rounds,
              std::size_t& evaluations) {
  double reach = 0.5;
  for (int round = 0; round < rounds; ++round) {
    const std::vector<double> point = Step(group, linear, mask, reach);
    const std::vector<double> errors = Errors(group, point, mask);
    ++evaluations;
    const double before = Objective(group, linear.errors, linear.at, mask);
    const double after = Objective(group, errors, point, mask);
    constexpr double kSmallGain = 1e-3;
    if (after < before) {
      if (round + 1 == rounds || before - after < kSmallGain * before) {
        return {point, errors, linear.slopes};
      }
      linear = Linearise(group, point, mask, evaluations);
    } else {
      reach /= 4;
    }
  }
  return linear;
}

// Rows whose plan can be lowered, by chip and family of stacks.
std::map<std::pair<std::string, std::string>, FitGroup> MakeGroups(
    const std::vector<MeasuredRun>& runs, const FitOptions& options, std::size_t& skipped) {
  std::map<std::pair<std::string, std::string>, FitGroup> groups;
  for (const MeasuredRun& run : runs) {
    const bool has_tier = run.tier.empty() || std::find(options.tiers.begin(), options.tiers.end(),
                                                        run.tier) != options.tiers.end();
    MappedRun mapped;
    if (has_tier && run.step_time_s > 0) {
      mapped = MapRun(run, "auto");
    }
    if (!has_tier || run.step_time_s <= 0 || !mapped.skipped.empty()) {
      ++skipped;
      continue;
    }
    const PlanFile& plan = mapped.plan;
    const std::string family = FamilyOf(plan.kernels.name);
    FitGroup& group = groups[{ChipOf(plan.cluster.gpu), family}];
    group.family = family;
    const std::size_t stack = StackOf(plan, group);
    try {
      Program program = Lower(
          {.model = plan.model.model, .kernels = plan.kernels, .job = plan.job, .plan = plan.plan});
      group.rows.push_back({&run, run.step_time_s, stack, plan.cluster, std::move(program)});
    } catch (const InputError&) {
      ++skipped;
    }
  }
  return groups;
}

// What is left out together: a model; in a group with one model only, a number of GPUs; with one
// number of GPUs only, a choice of dtypes.
std::vector<std::string> FoldsOf(const FitGroup& group) {
  std::array<std::vector<std::string>, 3> folds;
  for (const FitRow& row : group.rows) {
    const MeasuredRun& run = *row.run;
    folds[0].push_back(run.model_name);
    folds[1].push_back(run.model_name + " on " + std::to_string(run.gpus) + " GPUs");
    folds[2].push_back(run.param_dtype);
  }
  const auto is_one = [](const std::vector<std::string>& names) {
    return std::all_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name == names[0]; });
  };
  return !is_one(folds[0]) ? folds[0] : !is_one(folds[1]) ? folds[1] : folds[2];
}

// Half-width of all numbers that makes bands cover nine tenths of `errors`: the band of a row is
// spread * sqrt(sum of squared slopes).
double SpreadFor(const Linear& linear, const std::vector<double>& errors) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    double squares = 0;
    for (const std::vector<double>& slopes : linear.slopes) {
      squares += slopes[i] * slopes[i];
    }
    ratios.push_back(std::abs(errors[i]) / std::sqrt(squares));
  }
  return Quantile(ratios, 0.9);
}

// Fits without each fold in turn; returns the errors of the rows while they were left out.
std::vector<double> LeaveOut(const FitGroup& group, const Linear& best, RunFit& fit) {
  const std::vector<std::string> folds = FoldsOf(group);
  std::vector<std::string> names = folds;
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::vector<double> result(group.rows.size(), 0.0);
  for (const std::string& name : names) {
    Mask mask(group.rows.size());
    Mask others(group.rows.size());
    for (std::size_t i = 0; i < mask.size(); ++i) {
      mask[i] = folds[i] != name;
      others[i] = !mask[i];
    }
    // The full fit's slopes give the first step, fresh ones the second and third.
    constexpr int kRounds = 3;
    const Linear without = Search(group, best, mask, kRounds, fit.evaluations);
    const std::vector<double> errors = Errors(group, without.at, others);
    std::vector<double> fold_errors;
    for (std::size_t i = 0; i < mask.size(); ++i) {
      if (others[i]) {
        result[i] = errors[i];
        fold_errors.push_back(std::expm1(errors[i]));
      }
    }
    fit.left_out.push_back({group.gpus, group.family, name, Summarise(fold_errors)});
  }
  return result;
}

void AddStacks(const FitGroup& group, const Linear& best, double spread, RunFit& fit) {
  for (std::size_t s = 0; s < group.stacks.size(); ++s) {
    FittedStack stack;
    stack.gpu = group.stacks[s].gpu;
    stack.kernel_set = group.stacks[s].kernel_set;
    stack.base = group.stacks[s].profile.name;
    stack.spread = spread;
    std::vector<double> errors;
    for (std::size_t i = 0; i < group.rows.size(); ++i) {
      if (group.rows[i].stack == s) {
        errors.push_back(std::expm1(best.errors[i]));
      }
    }
    stack.rows = errors.size();
    stack.errors = Summarise(errors);
    for (std::size_t k = 0; k < group.variables.size(); ++k) {
      const Variable& v = group.variables[k];
      if (v.is_shared || v.stack == s) {
        stack.numbers.push_back({v.path, std::exp(best.at[k]), std::exp(v.lower), std::exp(v.upper),
                                 std::exp(v.start), !v.is_shared, v.is_time});
      }
    }
    fit.stacks.push_back(std::move(stack));
  }
}

void FitGroupRows(FitGroup& group, const FitOptions& options, RunFit& fit) {
  AddVariables(options, group);
  std::vector<double> start;
  for (const Variable& variable : group.variables) {
    start.push_back(variable.start);
  }
  const Mask all(group.rows.size(), true);
  constexpr int kRounds = 8;
  const Linear best =
      Search(group, Linearise(group, start, all, fit.evaluations), all, kRounds, fit.evaluations);
  double spread = 0;
  if (options.leave_out) {
    const std::vector<double> errors = LeaveOut(group, best, fit);
    for (std::size_t i = 0; i < errors.size(); ++i) {
      fit.left_out_rows.push_back({group.rows[i].run->id, std::expm1(errors[i])});
    }
    spread = SpreadFor(best, errors);
  }
  AddStacks(group, best, spread, fit);
  if (options.progress) {
    options.progress(group.gpus + ", " + group.family + ": " + std::to_string(group.rows.size()) +
                     " rows fitted");
  }
}

}  // namespace

std::vector<std::string> DefaultFitNumbers() {
  return {"compute.gemm.bf16",         "compute.elementwise",
          "compute.attention_forward", "compute.attention_backward",
          "compute.reduction",         "overlap.compute_sensitivity",
          "compute.rank_spread",       "host.step"};
}

RunFit FitRuns(const std::vector<MeasuredRun>& runs, const FitOptions& options) {
  FitOptions complete = options;
  if (complete.numbers.empty()) {
    complete.numbers = DefaultFitNumbers();
  }
  if (complete.own.empty()) {
    complete.own = {complete.numbers[0], "compute.elementwise"};
  }
  RunFit fit;
  auto groups = MakeGroups(runs, complete, fit.skipped);
  constexpr std::size_t kFewestRows = 4;
  for (auto& [key, group] : groups) {
    if (group.rows.size() < kFewestRows) {
      fit.skipped += group.rows.size();
      continue;
    }
    FitGroupRows(group, complete, fit);
  }
  if (fit.stacks.empty()) {
    throw InputError(
        "table",
        "no chip and framework with " + std::to_string(kFewestRows) + " rows that have a step time",
        "more rows");
  }
  std::vector<double> errors;
  for (const LeftOutRow& row : fit.left_out_rows) {
    errors.push_back(row.error);
  }
  fit.cross_validation = Summarise(errors);
  return fit;
}

}  // namespace shardwright
