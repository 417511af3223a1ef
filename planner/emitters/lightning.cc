// Lightning: a strategy beside the plan data. FSDP1 plans take FSDPStrategy, all others
// ModelParallelStrategy, whose configure_model applies the plan with fully_shard.

#include "planner/emitters/emitters.h"
#include "planner/emitters/plan_data.h"

namespace shardwright {
namespace {

std::string TrainerArguments(const PlanFile& file) {
  const Plan& plan = file.plan;
  std::string text = "    \"num_nodes\": " + std::to_string(file.cluster.node_count) +
                     ",\n    \"devices\": " + std::to_string(file.cluster.gpus_per_node) +
                     ",\n    \"accumulate_grad_batches\": " + std::to_string(plan.accumulation) +
                     ",\n";
  if (file.job.clip_gradients) {
    text += "    \"gradient_clip_val\": 1.0,\n";
  }
  return text;
}

}  // namespace

Emission EmitLightning(const PlanFile& file, const EmitOptions& options) {
  const bool is_v1 = file.plan.dialect == Dialect::kFsdp1;
  const std::string kind = is_v1 ? "fsdp1" : "fsdp2";
  Emission emission;
  emission.as_emitted = is_v1 ? AsFsdp1(file) : AsFsdp2(file);
  // Its block_backward_sync (strategies/parallel.py) knows DDP only.
  emission.as_emitted.plan.sync = SyncMode::kEvery;
  emission.losses = FindLosses(file, emission.as_emitted, "lightning");
  const std::string text = FilledTemplate(
      "lightning_" + kind + ".py",
      {{"TRAINER", TrainerArguments(file)}, {"RANKS", std::to_string(file.cluster.RankCount())}});
  emission.files = {{kind + "_plan.json", PlanDataJson(emission.as_emitted, kind, options.fqns)},
                    PythonFile("shardwright_plan.py"),
                    PythonFile("shardwright_" + kind + ".py"),
                    {"lightning_plan.py", text}};
  emission.by_hand.push_back("feed micro-batches of " + std::to_string(file.plan.micro_batch) +
                             " samples");
  return emission;
}

}  // namespace shardwright
