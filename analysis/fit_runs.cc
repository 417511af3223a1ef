#include "analysis/fit_runs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

#include "analysis/internal/fit_group.h"
#include "analysis/internal/fit_search.h"
#include "core/error.h"
#include "core/parallel.h"

namespace shardwright {
namespace {

bool IsOne(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name == names[0]; });
}

// A source's models, where it has several; the sources, where there are several.
std::vector<std::string> FoldsOfSources(const FitGroup& group, FoldKind what) {
  std::map<std::string, std::set<std::string>> models;
  for (const GroupRow& row : group.rows) {
    models[row.run->source].insert(row.run->model);
  }
  std::vector<std::string> folds;
  for (const GroupRow& row : group.rows) {
    const std::string source = row.run->source;
    if (what == FoldKind::kSource) {
      folds.push_back(models.size() > 1 ? source : "");
    } else {
      folds.push_back(models[source].size() > 1 ? source + ", " + row.run->model : "");
    }
  }
  return folds;
}

// What is left out together; rows of "" never are.
std::vector<std::string> FoldsOf(const FitGroup& group, FoldKind what) {
  if (what != FoldKind::kModel) {
    return FoldsOfSources(group, what);
  }
  std::array<std::vector<std::string>, 3> folds;
  for (const GroupRow& row : group.rows) {
    const MeasuredRun& run = *row.run;
    folds[0].push_back(run.model);
    folds[1].push_back(run.model + " on " + std::to_string(run.plan.cluster.RankCount()) + " GPUs");
    folds[2].push_back(run.variant);
  }
  return !IsOne(folds[0]) ? folds[0] : !IsOne(folds[1]) ? folds[1] : folds[2];
}

// Half-width of all numbers that makes bands cover nine tenths of `errors`: the band of a row is
// spread * sqrt(sum of squared slopes).
double SpreadFor(const Linear& linear, const std::vector<std::optional<double>>& errors) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    if (!errors[i]) {
      continue;
    }
    double squares = 0;
    for (const std::vector<double>& slopes : linear.slopes) {
      squares += slopes[i] * slopes[i];
    }
    ratios.push_back(std::abs(*errors[i]) / std::sqrt(squares));
  }
  return ratios.empty() ? 0 : Quantile(ratios, 0.9);
}

// What is fitted apart: all rows of a group, or those without one fold.
struct FitTask {
  std::string without;  // empty: all rows
  RowMask rows;
  Linear best;
  std::vector<double> left_out;  // errors of the other rows
};

std::vector<FitTask> TasksOf(const FitGroup& group, FoldKind leave_out) {
  std::vector<FitTask> tasks = {{"", RowMask(group.rows.size(), true), {}, {}}};
  if (leave_out == FoldKind::kNone) {
    return tasks;
  }
  const std::vector<std::string> folds = FoldsOf(group, leave_out);
  std::set<std::string> names(folds.begin(), folds.end());
  names.erase("");
  for (const std::string& name : names) {
    FitTask task{name, RowMask(group.rows.size()), {}, {}};
    for (std::size_t i = 0; i < folds.size(); ++i) {
      task.rows[i] = folds[i] != name;
    }
    tasks.push_back(std::move(task));
  }
  return tasks;
}

// Each task starts from the base profiles and knows nothing of the others, so they share the
// processor's cores. Returns the number of evaluations.
std::size_t RunTasks(const FitGroup& group, const FitOptions& options,
                     std::vector<FitTask>& tasks) {
  const std::size_t threads = ThreadCount();
  std::vector<FitWork> works(threads);
  std::mutex mutex;  // guards options.progress
  ParallelFor(tasks.size(), threads, [&](std::size_t i, std::size_t worker) {
    FitTask& task = tasks[i];
    task.best = FitRows(group, task.rows, works[worker]);
    if (!task.without.empty()) {
      RowMask others = task.rows;
      others.flip();
      task.left_out = RowErrors(group, task.best.at, others, works[worker]);
    }
    if (options.progress) {
      const std::lock_guard lock(mutex);
      options.progress(group.gpus + ", " + group.family + ": " +
                       (task.without.empty() ? std::to_string(group.rows.size()) + " rows fitted"
                                             : "fitted without " + task.without));
    }
  });
  std::size_t evaluations = 0;
  for (const FitWork& work : works) {
    evaluations += work.evaluations;
  }
  return evaluations;
}

// The errors of the rows while they were left out, from all tasks but the first; nothing for rows
// that never were.
std::vector<std::optional<double>> LeftOutErrors(const FitGroup& group,
                                                 const std::vector<FitTask>& tasks, RunFit& fit) {
  std::vector<std::optional<double>> result(group.rows.size());
  for (std::size_t t = 1; t < tasks.size(); ++t) {
    std::vector<double> of_fold;
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (!tasks[t].rows[i]) {
        result[i] = tasks[t].left_out[i];
        of_fold.push_back(std::expm1(tasks[t].left_out[i]));
      }
    }
    fit.left_out.push_back({group.gpus, group.family, tasks[t].without, Summarise(of_fold)});
  }
  return result;
}

void AddStacks(const FitGroup& group, const Linear& best, double spread, double left_out_error,
               RunFit& fit) {
  for (std::size_t s = 0; s < group.stacks.size(); ++s) {
    FittedStack stack;
    stack.gpu = group.stacks[s].gpu;
    stack.kernel_set = group.stacks[s].kernel_set;
    stack.base = group.stacks[s].profile.name;
    stack.spread = spread;
    stack.left_out_error = left_out_error;
    std::vector<double> errors;
    for (std::size_t i = 0; i < group.rows.size(); ++i) {
      stack.sources.insert(group.rows[i].run->source);
      if (group.rows[i].stack == s) {
        errors.push_back(std::expm1(best.errors[i]));
        ++stack.rows_of[group.rows[i].run->plan.kernels.name];
      }
    }
    stack.rows = errors.size();
    stack.errors = Summarise(errors);
    for (std::size_t k = 0; k < group.variables.size(); ++k) {
      const Variable& v = group.variables[k];
      if (v.is_shared || v.stack == s) {
        stack.numbers.push_back({v.path, std::exp(LogValueAt(group, s, best.at, k)),
                                 std::exp(v.lower), std::exp(v.upper), std::exp(v.start),
                                 !v.is_shared, v.is_time});
      }
    }
    fit.stacks.push_back(std::move(stack));
  }
}

void FitGroupRows(FitGroup& group, const FitOptions& options, RunFit& fit) {
  AddVariables(options, group);
  std::vector<FitTask> tasks = TasksOf(group, options.leave_out);
  fit.evaluations += RunTasks(group, options, tasks);
  const Linear& best = tasks[0].best;
  double spread = 0;
  double left_out_error = 0;
  if (tasks.size() > 1) {
    const std::vector<std::optional<double>> errors = LeftOutErrors(group, tasks, fit);
    const auto count = errors.size() - static_cast<std::size_t>(
                                           std::count(errors.begin(), errors.end(), std::nullopt));
    for (std::size_t i = 0; i < errors.size(); ++i) {
      if (errors[i]) {
        const double error = std::expm1(*errors[i]);
        fit.left_out_rows.push_back({group.rows[i].run->id, group.rows[i].run->source, error});
        left_out_error += std::abs(error) / static_cast<double>(count);
      }
    }
    spread = SpreadFor(best, errors);
  }
  AddStacks(group, best, spread, left_out_error, fit);
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
