// Counts the operators that FSDP's hooks call inside of checkpointed regions, and refuses plans on
// which torch's selective checkpoint fails.
//
// Example: in forward the hooks inside of a region call one all-gather. When the region runs again
// and its hooks call one all-gather or none, torch is content. A second one has no entry in the
// list, so torch stops with "encountered during backward but not found in storage". The user then
// sees the error in the first backward, and this check says it before the run.
//
// The check costs O(1) per hook. Full checkpoints are not checked: torch caches no calls for them.

#include "schedule/lower/selective_hooks.h"

#include <string>

#include "core/error.h"

namespace shardwright {

void SelectiveHooks::BeginMicroBatch() {
  region_ = kNoRegion;
  seen_.assign(e_.a.regions.size(), Counts{});
}

void SelectiveHooks::InRegion(std::uint32_t region, Phase phase) {
  region_ = region;
  is_rerun_ = phase == Phase::kRecompute;
  if (is_rerun_) {
    seen_again_ = {};
  }
}

void SelectiveHooks::See(UnitId u, HookCall what, std::size_t times) {
  if (region_ == kNoRegion || e_.a.regions[region_].planned == Region::kNotPlanned) {
    return;
  }
  const auto k = static_cast<std::size_t>(what);
  std::uint32_t& count = (is_rerun_ ? seen_again_ : seen_[region_])[k];
  count += static_cast<std::uint32_t>(times);
  const Plan& plan = e_.in.plan;
  const std::size_t entry = e_.a.regions[region_].planned;
  const RecomputeRegion& planned = plan.recompute[entry];
  if (!is_rerun_ || planned.kind != RecomputeKind::kSelective || count <= seen_[region_][k] ||
      !RulesOf(plan.torch).counts_hooks) {
    return;
  }
  constexpr std::array kNames = {"profiler._record_function_enter_new", "fsdp.all_gather_copy_in",
                                 "fsdp.split_with_sizes_copy", "c10d._allgather_base_"};
  throw InputError("plan.recompute[" + std::to_string(entry) + "].kind", "\"selective\"",
                   "\"full\", or no unit inside of \"" + planned.module + '"',
                   "unit \"" + plan.units[u.value].name +
                       "\" is inside, and torch's selective checkpoint fails on its hooks: " +
                       kNames[k] + " encountered during backward but not found in storage");
}

}  // namespace shardwright
