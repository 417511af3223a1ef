"""Applies a plan that `shardwright emit --to fairscale` wrote with FairScale's FullyShardedDataParallel (0.4).

    torch.distributed.init_process_group(...)
    model = apply_plan(model, "fairscale_plan.json")  # checks everything first; train what it returns
    for i, batch in enumerate(micro_batches):
        with micro_batch(model, i):
            (loss(model, batch) / len(micro_batches)).backward()
"""

import contextlib

from shardwright_plan import PlanError, check_model, dtype_of, load_plan, wrap_recompute


def apply_plan(model, plan="fairscale_plan.json", **options):
    """A FullyShardedDataParallel around `model`. Raises PlanError, before any change, when something does not fit.

    options: further arguments of FullyShardedDataParallel, such as process_group.
    """
    from fairscale.nn import FullyShardedDataParallel
    from torch.distributed import get_world_size
    plan = load_plan(plan, "fairscale")
    if get_world_size() != plan["mesh"]["shard"]:
        raise PlanError(f'{get_world_size()} ranks run, the plan expects {plan["mesh"]["shard"]}')
    modules = check_model(model, plan)
    wrappers = wrap_recompute(model, plan, modules)
    dtypes = plan["dtypes"]
    is_mixed = dtypes["param"] != dtypes["master"]

    def wrap(module, unit):
        mixes = is_mixed and not unit.get("full_precision")
        return FullyShardedDataParallel(
            module, reshard_after_forward=unit["reshard_after_forward"], mixed_precision=mixes,
            compute_dtype=dtype_of(dtypes["param" if mixes else "master"]),
            fp32_reduce_scatter=mixes and dtypes["reduce"] == "float32",
            bucket_cap_mb=0 if unit.get("full_precision") else plan["fairscale"]["bucket_cap_mb"],
            move_params_to_cpu=plan["offload"]["parameters"], **options)

    for unit in plan["units"][:-1]:  # inner units first
        inner = modules[unit["modules"][0]]
        inner = wrappers.get(id(inner), inner)
        outer = wrap(inner, unit)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child is inner:
                    setattr(parent, name, outer)
    wrapped = wrap(model, plan["units"][-1])
    wrapped._shardwright_plan = plan
    return wrapped


def micro_batch(model, index):
    """The context of micro-batch `index` of a step: delays reductions as the plan says."""
    training = model._shardwright_plan["training"]
    is_last = index + 1 == training["accumulation"]
    return model.no_sync() if training["sync"] == "last" and not is_last else contextlib.nullcontext()
