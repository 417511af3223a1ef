"""Written by shardwright emit for Lightning 2.6.

    Trainer(strategy=strategy(model), **TRAINER).fit(module_around(model), data)
"""

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision

import shardwright_fsdp1
import shardwright_plan

PLAN = "fsdp1_plan.json"
TRAINER = {
    "num_nodes": 2,
    "devices": 8,
    "accumulate_grad_batches": 1,
}


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
