// PyTorch's own FSDP: plan data beside the Python that applies it.

#include <string>
#include <utility>

#include "planner/emitters/emitters.h"
#include "planner/emitters/plan_data.h"

namespace shardwright {
namespace {

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

// Plan data as "NAME_plan.json" and "shardwright_NAME.py", which applies it; `duty` is what the
// user's script does with it.
Emission EmitApplied(const PlanFile& file, const EmitOptions& options, PlanFile as_emitted,
                     const std::string& name, const std::string& duty) {
  Emission emission;
  emission.as_emitted = std::move(as_emitted);
  emission.losses = FindLosses(file, emission.as_emitted, name);
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
  return EmitApplied(file, options, AsFsdp2(file), "fsdp2",
                     "call shardwright_fsdp2.apply_plan(model, \"fsdp2_plan.json\") before the "
                     "optimizer is made");
}

Emission EmitFsdp1(const PlanFile& file, const EmitOptions& options) {
  return EmitApplied(file, options, AsFsdp1(file), "fsdp1",
                     "train what model = shardwright_fsdp1.apply_plan(model, \"fsdp1_plan.json\") "
                     "returns");
}

}  // namespace shardwright
