// PyTorch's own FSDP: plan data beside the Python that applies it.

#include <array>
#include <span>
#include <string>
#include <utility>

#include "planner/emitters/emitters.h"
#include "planner/emitters/plan_data.h"

namespace shardwright {
namespace {

constexpr std::array<LossReason, 7> kFsdp2Reasons = {{
    {"plan.dialect", "fully_shard has its own schedule"},
    {"plan.offload.optimizer", "fully_shard offloads parameters, gradients and optimizer together"},
    {"plan.offload.moments", "fully_shard offloads parameters, gradients and optimizer together"},
    {"plan.offload.activations", "only the inputs of fully recomputed regions can go to the host"},
    {"plan.bounded_memory", "PyTorch has no such option"},
    {"plan.units.gap", "FSDP2 gathers a unit once per pass"},
    {"plan", "fully_shard has no such option"},
}};

constexpr std::array<LossReason, 10> kFsdp1Reasons = {{
    {"plan.dialect", "FullyShardedDataParallel has its own schedule"},
    {"plan.sync", "no_sync() delays reduce-scatter and all-reduce together"},
    {"plan.offload.optimizer", "FSDP1 offloads parameters, gradients and optimizer together"},
    {"plan.offload.moments", "FSDP1 offloads parameters, gradients and optimizer together"},
    {"plan.offload.activations", "only the inputs of fully recomputed regions can go to the host"},
    {"plan.units.reshard", "a unit is freed or kept"},
    {"plan.units.gap", "FSDP1 gathers a unit once per pass"},
    {"plan.units.forward_prefetch", "FSDP1 has no prefetch lists"},
    {"plan.units.backward_prefetch", "FSDP1 has no prefetch lists"},
    {"plan", "FullyShardedDataParallel has no such option, or cannot group modules"},
}};

void AddScriptDuties(const PlanFile& file, Emission& emission) {
  emission.by_hand.push_back("make the optimizer after apply_plan, and feed micro-batches of " +
                             std::to_string(file.plan.micro_batch) + " samples");
  if (file.plan.accumulation > 1) {
    emission.by_hand.push_back("before micro-batch i of " + std::to_string(file.plan.accumulation) +
                               " call set_micro_batch(model, i), and divide its loss by their "
                               "number");
  }
  if (file.job.clip_gradients) {
    emission.by_hand.emplace_back("clip gradients by global norm");
  }
  if (file.job.clip_gradients && file.plan.offload.parameters &&
      file.plan.dialect == Dialect::kFsdp2) {  // NCCL alone: no backend for device type cpu
    emission.by_hand.emplace_back(
        "make the process group with backend \"cpu:gloo,cuda:nccl\": the norm of gradients on the "
        "host is summed there");
  }
}

// The applied plan offloads by offload_wrapper, whose save_on_cpu copies while compute waits and
// the host waits for it.
void AddOffloadLoss(Emission& emission) {
  if (emission.as_emitted.plan.offload.activations) {
    emission.losses.push_back({"plan.offload.activations", "", "beside compute", "while it waits",
                               "save_on_cpu copies on the compute stream and waits for it, so the "
                               "step takes longer than predicted"});
  }
}

constexpr std::array<LossReason, 10> kFairscaleReasons = {{
    {"job.precision", "reductions run in fp32 under mixed precision, or in the compute dtype"},
    {"plan.dialect", "FairScale's FSDP has its own schedule"},
    {"plan.shard_size", "FairScale shards over all ranks"},
    {"plan.replicate_size", "FairScale shards over all ranks"},
    {"plan.sync", "no_sync() delays every reduction"},
    {"plan.offload", "FairScale offloads parameters, gradients and optimizer together"},
    {"plan.units.reshard", "a unit is freed or kept, and the root is kept"},
    {"plan.units", "FairScale flattens units of one module, without prefetching"},
    {"plan.reduce_scatter_bucket", "buckets are whole MiB"},
    {"plan", "FairScale has no such option"},
}};

// Plan data as "NAME_plan.json" and "shardwright_NAME.py", which applies it; `duty` is what the
// user's script does with it.
Emission EmitApplied(const PlanFile& file, const EmitOptions& options, PlanFile as_emitted,
                     std::span<const LossReason> reasons, const std::string& name,
                     const std::string& duty) {
  Emission emission;
  emission.as_emitted = std::move(as_emitted);
  emission.losses = FindLosses(file, emission.as_emitted, reasons);
  AddOffloadLoss(emission);
  emission.files = {{name + "_plan.json", PlanDataJson(emission.as_emitted, name, options.fqns)},
                    PythonFile("shardwright_plan.py"),
                    PythonFile("shardwright_" + name + ".py")};
  emission.by_hand.push_back(duty);
  AddScriptDuties(file, emission);
  return emission;
}

}  // namespace

Emission EmitFsdp2(const PlanFile& file, const EmitOptions& options) {
  return EmitApplied(file, options, AsFsdp2(file), kFsdp2Reasons, "fsdp2",
                     "call shardwright_fsdp2.apply_plan(model, \"fsdp2_plan.json\") before the "
                     "optimizer is made");
}

Emission EmitFsdp1(const PlanFile& file, const EmitOptions& options) {
  return EmitApplied(file, options, AsFsdp1(file), kFsdp1Reasons, "fsdp1",
                     "train what model = shardwright_fsdp1.apply_plan(model, \"fsdp1_plan.json\") "
                     "returns");
}

Emission EmitFairscale(const PlanFile& file, const EmitOptions& options) {
  return EmitApplied(file, options, AsFairscale(file), kFairscaleReasons, "fairscale",
                     "train what model = shardwright_fairscale.apply_plan(model, "
                     "\"fairscale_plan.json\") returns");
}

}  // namespace shardwright
