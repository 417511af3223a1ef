#include "analysis/prediction.h"

#include <algorithm>
#include <utility>

#include "planner/evaluate.h"
#include "planner/search.h"
#include "schedule/dialect_facts.h"

namespace shardwright {

Prediction Predict(const PlanFile& file, const Program& program, const SimulationResult& result) {
  return Predict(file, result, AccountFor(program, result, SumsOf(file)));
}

SumSpans SumsOf(const PlanFile& file) {
  return [&file](const Program& program, const SimulationResult& result) {
    return SumsForMfu(file, program, result);
  };
}

Prediction Predict(const PlanFile& file, const SimulationResult& result, StepAccount account) {
  Prediction p;
  p.step_time = ToSeconds(result.step_time);
  p.first_step_time = ToSeconds(result.first_step_time);
  p.exposed_comm = ToSeconds(result.exposed_comm);
  const Rates rates = RatesOf(file, file.plan, p.step_time);
  p.tokens_per_second_per_gpu = rates.tokens_per_second_per_gpu;
  p.counts_images = file.model.sequence_length == 0;
  p.mfu = rates.mfu;
  p.waterfall = ExplainMfu(file, account.sums, account.attribution);
  p.peak = rates.peak;
  p.has_dtype = rates.has_dtype;
  const AllocatedMemory& allocated = result.memory.allocated;
  p.device_peak = allocated.DevicePeak();
  p.peak_is_first = p.device_peak == allocated.device_first;
  p.outside = result.memory.outside;
  p.placed = account.placed;
  p.attribution = std::move(account.attribution);
  p.device = account.device;
  const ReservedMemory& reserved = *result.memory.reserved;
  p.reserved = std::max({reserved.peak_first, reserved.peak_steady, p.device_peak.total});
  p.retries_per_step = reserved.retries_steady;
  p.usable = UsableMemory(file);
  const auto whole = static_cast<double>(file.cluster.gpu.usable_memory.value.value);
  p.memory_error =
      Bytes(static_cast<std::int64_t>(DefaultMargin(file.cluster, file.profile) * whole));
  p.has_allocator = !FactsOf(file.plan).has_arena;
  p.host_peak = allocated.HostPeak().total * file.cluster.gpus_per_node;
  p.host_limit = file.cluster.node.pinned_limit;
  for (const Misfit& misfit : FindMisfits(file, file.plan, p.usable, p.placed, result)) {
    p.misfits.push_back(misfit.text);
  }
  return p;
}

}  // namespace shardwright
