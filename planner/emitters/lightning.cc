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

constexpr const char* kFsdp2Module = R"PY("""Written by shardwright emit for Lightning 2.6.

    class MyModule(PlannedModule):
        def build(self):
            return LlamaForCausalLM(config)

    Trainer(strategy=strategy(), **TRAINER).fit(MyModule(), data)
"""

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy

import shardwright_fsdp2

PLAN = "fsdp2_plan.json"
TRAINER = {
@TRAINER@}


def strategy():
    """The ranks as Lightning's mesh: it calls the data-parallel dimension data_parallel."""
    return ModelParallelStrategy(data_parallel_size=@RANKS@, tensor_parallel_size=1, save_distributed_checkpoint=True)


class PlannedModule(LightningModule):
    """Builds a model and applies the plan to it where Lightning wants that: in configure_model."""

    def __init__(self):
        super().__init__()
        self.model = None

    def build(self):
        """The unwrapped torch.nn.Module."""
        raise NotImplementedError

    def configure_model(self):
        if self.model is None:
            self.model = shardwright_fsdp2.apply_plan(self.build(), PLAN, device_type=self.device_mesh.device_type)
)PY";

constexpr const char* kFsdp1Module = R"PY("""Written by shardwright emit for Lightning 2.6.

    Trainer(strategy=strategy(model), **TRAINER).fit(module_around(model), data)
"""

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

import shardwright_fsdp1
import shardwright_plan

PLAN = "fsdp1_plan.json"
TRAINER = {
@TRAINER@}


def strategy(model):
    """FSDPStrategy with the plan's units, for the very `model` that will be trained."""
    plan = shardwright_plan.load_plan(PLAN, "fsdp1")
    modules = shardwright_plan.check_model(model, plan)
    wrappers = shardwright_plan.wrap_recompute(model, plan, modules)
    dtypes, choices, mesh = plan["dtypes"], plan["fsdp1"], plan["mesh"]
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    return FSDPStrategy(
        auto_wrap_policy=shardwright_fsdp1.auto_wrap_policy(plan, modules, wrappers),
        sharding_strategy=shardwright_fsdp1.root_strategy(plan),
        device_mesh=(mesh["replicate"], mesh["shard"]) if min(mesh["replicate"], mesh["shard"]) > 1 else None,
        mixed_precision=MixedPrecision(param_dtype=getattr(torch, dtypes["param"]),
                                       reduce_dtype=getattr(torch, dtypes["reduce"]),
                                       _module_classes_to_ignore=()),
        cpu_offload=plan["offload"]["parameters"], backward_prefetch=prefetch[choices["backward_prefetch"]],
        forward_prefetch=choices["forward_prefetch"], limit_all_gathers=choices["limit_all_gathers"],
        use_orig_params=choices["use_orig_params"])
)PY";

std::string Filled(std::string text, const std::string& mark, const std::string& value) {
  const std::size_t at = text.find(mark);
  return at == std::string::npos ? text : text.replace(at, mark.size(), value);
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
  std::string text =
      Filled(is_v1 ? kFsdp1Module : kFsdp2Module, "@TRAINER@", TrainerArguments(file));
  text = Filled(text, "@RANKS@", std::to_string(file.cluster.RankCount()));
  emission.files = {{kind + "_plan.json", PlanDataJson(emission.as_emitted, kind, options.fqns)},
                    PythonFile("shardwright_plan.py"),
                    PythonFile("shardwright_" + kind + ".py"),
                    {"lightning_plan.py", text}};
  emission.by_hand.push_back("feed micro-batches of " + std::to_string(file.plan.micro_batch) +
                             " samples");
  return emission;
}

}  // namespace shardwright
