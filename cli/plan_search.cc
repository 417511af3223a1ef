#include "cli/plan_search.h"

#include <atomic>
#include <csignal>
#include <cstdio>

#include <unistd.h>

#include "cli/flow.h"
#include "core/json.h"

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
  std::fprintf(stderr, "\r%lld plans simulated, best %s, none below %s   ",
               static_cast<long long>(progress.simulated), best.c_str(),
               Format(progress.lower_bound).c_str());
}

SearchOptions OptionsOf(const PlanOptions& options, const PlanFile& file) {
  if (file.job.global_batch % file.cluster.RankCount() != 0) {
    throw UsageError("--global-batch: got " + std::to_string(file.job.global_batch) +
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
    SetUnits(options, file.model.model, search.base);  // without --wrap the units are not used
  }
  if (options.accumulation > 0) {
    const std::int64_t passes = ranks * options.accumulation;
    const std::int64_t batch = file.job.global_batch;
    const bool contradicts = options.has_micro_batch && options.plan.micro_batch * passes != batch;
    if (batch % passes != 0 || contradicts) {
      throw UsageError("--accumulation: got " + std::to_string(options.accumulation) +
                       ", expected one that divides the global batch of " + std::to_string(batch) +
                       " over " + std::to_string(ranks) + " ranks and their micro-batches");
    }
    search.base.micro_batch = batch / passes;
  }
  return search;
}

}  // namespace

SearchedPlan SearchPlan(const PlanOptions& options) {
  SearchedPlan searched;
  searched.file = MakeJobFile(options);
  PlanFile& file = searched.file;
  file.plan = options.plan;  // its dialect is told where nothing fits
  SearchOptions search = OptionsOf(options, file);
  const bool on_terminal = ::isatty(STDERR_FILENO) == 1;
  if (on_terminal) {
    search.progress = ShowProgress;
  }
  {
    const SearchInput input = {file.model.model, file.kernels, file.cluster, file.profile,
                               file.job};
    const StopOnInterrupt guard;
    search.stop = &g_stop;
    searched.result = Search(input, search);
    if (!searched.result.is_feasible && !g_stop.load()) {
      searched.fixes = FindFixes(input, search);
    }
  }
  if (on_terminal) {
    std::fprintf(stderr, "\n");
  }
  if (searched.result.is_feasible) {
    file.plan = searched.result.best.plan;
    CheckPlan(file, "plan");
  }
  return searched;
}

}  // namespace shardwright
