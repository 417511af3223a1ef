#include "cli/plan_search.h"

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include <sys/time.h>
#include <unistd.h>

#include "analysis/estimate.h"
#include "cli/exit_codes.h"
#include "cli/flow.h"
#include "cli/search_progress.h"
#include "core/error.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "planner/space.h"
#include "schedule/plan_names.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"

namespace shardwright {
namespace {

std::atomic<bool> g_stop{false};  // a signal handler can reach nothing else

// Only async-signal-safe calls; no file is half-written here.
extern "C" void OnGiveUp(int /*signal*/) {
  constexpr char kText[] = "interrupted\n";
  const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  (void)written;
  ::_exit(kExitInterrupted);
}

// The first one lets the search end with what it has, within the time that a user waits for; a
// second one does not.
extern "C" void OnStop(int signal) {
  if (g_stop.exchange(true)) {
    OnGiveUp(signal);
  }
  constexpr suseconds_t kPatience = 800'000;
  const itimerval timer = {{0, 0}, {0, kPatience}};
  (void)::setitimer(ITIMER_REAL, &timer, nullptr);
}

// While it lives, Ctrl-C ends the search instead of the program.
class StopOnInterrupt {
 public:
  StopOnInterrupt()
      : interrupt_(std::signal(SIGINT, OnStop)), alarm_(std::signal(SIGALRM, OnGiveUp)) {
    g_stop.store(false);
  }
  ~StopOnInterrupt() {
    const itimerval none = {};
    (void)::setitimer(ITIMER_REAL, &none, nullptr);
    (void)std::signal(SIGINT, interrupt_);
    (void)std::signal(SIGALRM, alarm_);
  }
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

 private:
  void (*interrupt_)(int);
  void (*alarm_)(int);
};

// What a step takes, whether or not it fits; none for choices that the plan's dialect lacks.
std::optional<Seconds> TimeOf(const PlanFile& file) {
  try {
    CheckPlan(file, file.plan, "plan");
    PlanPrograms programs({file, file.plan});
    Simulator simulator(file.cluster, file.profile);
    SimulateOptions options;
    options.reserved = false;
    return ToSeconds(SimulatePlan(simulator, programs, options).step_time);
  } catch (const InputError&) {
    return std::nullopt;
  }
}

// The chosen plan by our own schedule, which its executor runs, where that fits and is faster.
std::optional<Seconds> NativeTime(const PlanFile& chosen) {
  PlanFile file = chosen;
  file.plan.dialect = Dialect::kNative;
  for (UnitPlan& unit : file.plan.units) {
    unit.forward_prefetch.clear();
    unit.backward_prefetch.clear();
  }
  std::vector<std::pair<double, std::int64_t>> tries;  // seconds and units in flight
  for (const std::int64_t in_flight : {2, 4}) {
    file.plan.in_flight = in_flight;
    if (const std::optional<Seconds> time = TimeOf(file)) {
      tries.emplace_back(time->value, in_flight);
    }
  }
  // To place an arena takes longest: the second one's only where the faster one does not fit.
  SortAll(tries);
  for (const auto& [time, in_flight] : tries) {
    file.plan.in_flight = in_flight;
    if (Evaluate(file, file.plan, {.reserved = false}).Fits()) {
      return Seconds(time);
    }
  }
  return std::nullopt;
}

SearchOptions OptionsOf(const PlanOptions& options, const PlanFile& file) {
  const std::int64_t data_ranks = DataRanks(file.cluster, MeshOf(options.plan));
  if (options.node_counts.empty() && file.job.global_batch % data_ranks != 0) {
    throw InputError("--global-batch: got " + std::to_string(file.job.global_batch) +
                     ", expected a multiple of " + std::to_string(data_ranks) +
                     (data_ranks < file.cluster.RankCount() ? " data-parallel ranks" : " ranks") +
                     std::string(" x micro-batch 1"));
  }
  SearchOptions search;
  search.base = options.plan;
  search.fixed = options.fixed;
  search.reshard = options.reshard;
  search.objective = options.objective;
  search.memory_limit = options.memory_limit;
  search.threads = static_cast<int>(options.threads);
  if (options.fixed.mesh) {
    SetMesh(options, file.cluster.RankCount(), search.base);
  }
  if (options.fixed.units || options.fixed.recompute) {
    // Without --wrap the units are not used.
    SetUnits(options, file.model, file.job, search.base);
  }
  if (options.accumulation > 0) {
    const std::int64_t passes = data_ranks * options.accumulation;
    const std::int64_t batch = file.job.global_batch;
    const bool contradicts = options.has_micro_batch && options.plan.micro_batch * passes != batch;
    if (batch % passes != 0 || contradicts) {
      throw InputError("--accumulation: got " + std::to_string(options.accumulation) +
                       ", expected one that divides the global batch of " + std::to_string(batch) +
                       " over " + std::to_string(data_ranks) + " ranks and their micro-batches");
    }
    search.base.micro_batch = batch / passes;
  }
  return search;
}

// The batch next to `batch` that the GPUs of some node count divide.
std::string NearestBatch(const std::vector<NodeCountResult>& counts, std::int64_t batch) {
  std::int64_t nearest = 0, nodes = 0;
  for (const NodeCountResult& row : counts) {
    const std::int64_t below = std::max<std::int64_t>(batch / row.ranks, 1) * row.ranks;
    for (const std::int64_t other : {below, below + row.ranks}) {
      if (nodes == 0 || std::abs(other - batch) < std::abs(nearest - batch)) {
        nearest = other;
        nodes = row.nodes;
      }
    }
  }
  return "--global-batch " + std::to_string(nearest) + " would do for " + std::to_string(nodes) +
         " nodes";
}

// The plan of the cheapest node count, whose cluster becomes the file's.
SearchResult SearchCost(const PlanOptions& options, const SearchOptions& search,
                        SearchedPlan& searched) {
  searched.counts = SearchNodes(searched.file, search, options.node_counts, options.token_budget);
  const std::optional<std::size_t> cheapest = CheapestOf(searched.counts, search.tie);
  // Where nothing fits the first count with a search says why.
  const auto shown = cheapest ? searched.counts.begin() + static_cast<std::ptrdiff_t>(*cheapest)
                              : FindIf(searched.counts, [](const auto& row) { return row.result; });
  if (shown == searched.counts.end()) {
    throw InputError("--nodes: none of them divides the global batch of " +
                     std::to_string(searched.file.job.global_batch) + " over its GPUs; " +
                     NearestBatch(searched.counts, searched.file.job.global_batch));
  }
  searched.file.cluster.node_count = shown->nodes;
  return *shown->result;
}

SearchResult RunSearch(const PlanOptions& options, const SearchOptions& search,
                       SearchedPlan& searched) {
  if (options.objective == Objective::kCost) {
    return SearchCost(options, search, searched);
  }
  return options.objective == Objective::kPareto
             ? SearchFront(searched.file, search)
             : SearchSimplest(searched.file, search, &searched.offload_time);
}

}  // namespace

std::string VariantName(const Plan& plan) {
  return std::string(NameOf(plan.dialect)) +
         (plan.expert_size > 1 ? " with ep " + std::to_string(plan.expert_size) : "") +
         (plan.tensor_size > 1 ? " with tp " + std::to_string(plan.tensor_size) : "") +
         (plan.context_size > 1 ? " with cp " + std::to_string(plan.context_size) : "") +
         (plan.pipeline_size > 1 ? " with pp " + std::to_string(plan.pipeline_size) : "") +
         (plan.pipeline_stages > 1 ? "x" + std::to_string(plan.pipeline_stages) : "") +
         (plan.pipeline_size > 1 && SplitsBackward(plan.pipeline_schedule)
              ? ":" + std::string(NameIn(kPipelineScheduleNames, plan.pipeline_schedule))
              : "");
}

SearchedPlan SearchPlan(const PlanOptions& options, const std::atomic<bool>* stop) {
  return SearchPlanOf(MakeJobFile(options), options, stop);
}

SearchedPlan SearchPlanOf(PlanFile job, const PlanOptions& options, const std::atomic<bool>* stop) {
  SearchedPlan searched;
  searched.file = std::move(job);
  PlanFile& file = searched.file;
  file.plan = options.plan;  // its dialect is told where nothing fits
  SearchOptions search = OptionsOf(options, file);
  std::optional<PlanFile> previous;
  if (!options.keep.empty()) {
    previous = ReadPlanFile(options.keep);
    search.previous = &previous->plan;
  }
  search.progress = ProgressLines(/*ticks=*/stop == nullptr, VariantName(options.plan));
  searched.whole_front = options.objective == Objective::kPareto;
  searched.is_explained = options.explain;
  std::optional<StopOnInterrupt> guard;
  if (stop == nullptr) {
    guard.emplace();
    stop = &g_stop;
  }
  search.stop = stop;
  searched.result = RunSearch(options, search, searched);
  const bool is_feasible = searched.result.is_feasible;
  if (!is_feasible && !stop->load()) {
    searched.fixes = FindFixes(file, search);
  }
  if (is_feasible && options.explain && !stop->load()) {
    searched.explanation = ExplainChoice(file, search, searched.result);
  }
  if (!stop->load()) {
    searched.baselines =
        EvaluateBaselines(file, {}, searched.result.memory_limit, search.threads, stop);
  }
  file.plan.shard_size = searched.result.floor.candidate.plan.shard_size;  // for its warnings
  if (is_feasible) {
    file.plan = searched.result.best.plan;
    CheckPlan(file, file.plan, "plan");
  }
  if (is_feasible && !stop->load()) {
    searched.confidence = ConfidenceOf(file);
    if (!options.has_dialect) {
      searched.native_time = NativeTime(file);
    }
  }
  searched.is_interrupted = guard.has_value() && stop->load();
  return searched;
}

}  // namespace shardwright
