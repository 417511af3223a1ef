#include "cli/plan_search.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <optional>

#include <unistd.h>

#include "analysis/predict_run.h"
#include "cli/flow.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"

namespace shardwright {
namespace {

std::atomic<bool> g_stop{false};  // a signal handler can reach nothing else

extern "C" void OnStop(int /*signal*/) {
  g_stop.store(true);
}

// While it lives, Ctrl-C ends the search instead of the program.
class StopOnInterrupt {
 public:
  StopOnInterrupt() : before_(std::signal(SIGINT, OnStop)) { g_stop.store(false); }
  ~StopOnInterrupt() { (void)std::signal(SIGINT, before_); }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

 private:
  void (*before_)(int);
};

void ShowProgress(const SearchProgress& progress) {
  const std::string best = progress.best.value > 0 ? Format(progress.best) : "none fits";
  SayProgress(std::to_string(progress.simulated) + " plans simulated, best " + best +
              ", none below " + Format(progress.lower_bound) + "   ");
}

SearchOptions OptionsOf(const PlanOptions& options, const PlanFile& file) {
  if (options.node_counts.empty() && file.job.global_batch % file.cluster.RankCount() != 0) {
    throw InputError("--global-batch: got " + std::to_string(file.job.global_batch) +
                     ", expected a multiple of " + std::to_string(file.cluster.RankCount()) +
                     " ranks x micro-batch 1");
  }
  SearchOptions search;
  search.base = options.plan;
  search.fixed = options.fixed;
  search.reshard = options.reshard;
  search.objective = options.objective;
  search.memory_limit = options.memory_limit;
  search.threads = static_cast<int>(options.threads);
  const std::int64_t ranks = file.cluster.RankCount();
  if (options.fixed.mesh) {
    SetMesh(options, ranks, search.base);
  }
  if (options.fixed.units || options.fixed.recompute) {
    // Without --wrap the units are not used.
    SetUnits(options, file.model.model, file.job, search.base);
  }
  if (options.accumulation > 0) {
    const std::int64_t passes = ranks * options.accumulation;
    const std::int64_t batch = file.job.global_batch;
    const bool contradicts = options.has_micro_batch && options.plan.micro_batch * passes != batch;
    if (batch % passes != 0 || contradicts) {
      throw InputError("--accumulation: got " + std::to_string(options.accumulation) +
                       ", expected one that divides the global batch of " + std::to_string(batch) +
                       " over " + std::to_string(ranks) + " ranks and their micro-batches");
    }
    search.base.micro_batch = batch / passes;
  }
  return search;
}

// The plan of the cheapest node count, whose cluster becomes the file's.
SearchResult SearchCost(const PlanOptions& options, const SearchInput& input,
                        const SearchOptions& search, SearchedPlan& searched) {
  searched.counts = SearchNodes(input, search, options.node_counts, options.token_budget);
  const std::optional<std::size_t> cheapest = CheapestOf(searched.counts, search.tie);
  // Where nothing fits the first count with a search says why.
  const auto shown = cheapest ? searched.counts.begin() + static_cast<std::ptrdiff_t>(*cheapest)
                              : std::find_if(searched.counts.begin(), searched.counts.end(),
                                             [](const auto& row) { return row.result; });
  if (shown == searched.counts.end()) {
    throw InputError("--nodes: none of them divides the global batch of " +
                     std::to_string(input.job.global_batch) + " over its GPUs");
  }
  searched.file.cluster.node_count = shown->nodes;
  return *shown->result;
}

SearchResult RunSearch(const PlanOptions& options, const SearchInput& input,
                       const SearchOptions& search, SearchedPlan& searched) {
  if (options.objective == Objective::kCost) {
    return SearchCost(options, input, search, searched);
  }
  return options.objective == Objective::kPareto ? SearchFront(input, search)
                                                 : Search(input, search);
}

}  // namespace

SearchedPlan SearchPlan(const PlanOptions& options, const std::atomic<bool>* stop) {
  SearchedPlan searched;
  searched.file = MakeJobFile(options);
  PlanFile& file = searched.file;
  file.plan = options.plan;  // its dialect is told where nothing fits
  SearchOptions search = OptionsOf(options, file);
  std::optional<PlanFile> previous;
  if (!options.keep.empty()) {
    previous = ReadPlanFile(options.keep);
    search.previous = &previous->plan;
  }
  const bool on_terminal = ::isatty(STDERR_FILENO) == 1;
  if (on_terminal) {
    search.progress = ShowProgress;
  }
  searched.whole_front = options.objective == Objective::kPareto;
  {
    const SearchInput input = {file.model.model, file.kernels, file.cluster, file.profile,
                               file.job};
    std::optional<StopOnInterrupt> guard;
    if (stop == nullptr) {
      guard.emplace();
    }
    search.stop = stop == nullptr ? &g_stop : stop;
    searched.result = RunSearch(options, input, search, searched);
    if (!searched.result.is_feasible && !search.stop->load()) {
      searched.fixes = FindFixes(input, search);
    }
    if (searched.result.is_feasible && options.explain) {
      searched.explanation = ExplainChoice(input, search, searched.result);
    }
  }
  if (on_terminal) {
    SayLines("\n");
  }
  searched.baselines = EvaluateBaselines(file, {}, searched.result.memory_limit, search.threads);
  if (searched.result.is_feasible) {
    file.plan = searched.result.best.plan;
    CheckPlan(file, "plan");
    searched.time_band = StepTimeBand(file);
  }
  return searched;
}

}  // namespace shardwright
