"""Applies a plan that `shardwright emit --to fsdp1` wrote with PyTorch's FullyShardedDataParallel.

    torch.distributed.init_process_group(...)
    model = apply_plan(model, "fsdp1_plan.json")  # checks everything first; train what it returns
    optimizer = torch.optim.AdamW(model.parameters())
    for i, batch in enumerate(micro_batches):
        with micro_batch(model, i):
            (loss(model, batch) / len(micro_batches)).backward()
"""

import contextlib

from shardwright_plan import PlanError, check_mesh, check_model, dtype_of, load_plan, make_mesh, wrap_recompute


def _strategy(unit, mesh):
    from torch.distributed.fsdp import ShardingStrategy
    if mesh["shard"] == 1:  # HYBRID_SHARD would become NO_SHARD within groups of one rank, which nothing synchronises
        return ShardingStrategy.NO_SHARD
    if mesh["replicate"] > 1:
        return ShardingStrategy.HYBRID_SHARD if unit["reshard_after_forward"] else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if unit["reshard_after_forward"] else ShardingStrategy.SHARD_GRAD_OP


def auto_wrap_policy(plan, modules, wrappers):
    """The CustomPolicy of the plan's units, for modules as check_model returned them."""
    from torch.distributed.fsdp.wrap import CustomPolicy
    options = {}
    for unit in plan["units"][:-1]:
        module = modules[unit["modules"][0]]
        chosen = {"sharding_strategy": _strategy(unit, plan["mesh"])}
        if unit.get("full_precision"):
            chosen["mixed_precision"] = None
        options[id(wrappers.get(id(module), module))] = chosen
    return CustomPolicy(lambda module: options.get(id(module), False))


def root_strategy(plan):
    # FSDP1 never frees the root after forward; FULL_SHARD frees it after the backward passes of no_sync(), too.
    return _strategy(plan["units"][-1], plan["mesh"])


def _mesh_of(plan, mesh, device_type):
    mesh = make_mesh(plan, device_type) if mesh is None else mesh
    check_mesh(mesh, plan)
    return mesh


def _wrap_further_names(model):
    """FSDP puts a wrapper where it meets a module first; under its other names the module would run without hooks."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    wrappers = {id(m._fsdp_wrapped_module): m for m in model.modules() if isinstance(m, FullyShardedDataParallel)}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            wrapper = wrappers.get(id(child))
            if wrapper is not None and wrapper is not parent:
                setattr(parent, name, wrapper)


def apply_plan(model, plan="fsdp1_plan.json", mesh=None, device_type=None, **options):
    """A FullyShardedDataParallel around `model`. Raises PlanError, before any change, when something does not fit.

    options: further arguments of FullyShardedDataParallel, such as device_id or param_init_fn.
    """
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision
    plan = load_plan(plan, "fsdp1")
    modules = check_model(model, plan)
    for unit in plan["units"]:
        if len(unit["modules"]) != 1:
            raise PlanError(f'unit "{unit["name"]}" groups modules, which FSDP1 cannot')
    mesh = _mesh_of(plan, mesh, device_type)
    wrappers = wrap_recompute(model, plan, modules)
    dtypes, choices = plan["dtypes"], plan["fsdp1"]
    mixed = None
    if dtypes["param"] != dtypes["master"] or dtypes["reduce"] != dtypes["master"]:
        # Which units stay in full precision is the plan's business; by default all batch norms do, cast inputs and all.
        mixed = MixedPrecision(param_dtype=dtype_of(dtypes["param"]), reduce_dtype=dtype_of(dtypes["reduce"]),
                               _module_classes_to_ignore=())
    # NO_SHARD reduces over one group of all ranks.
    ranks = {"process_group": mesh.get_group(0)} if plan["mesh"]["shard"] == 1 else {"device_mesh": mesh}
    prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
    wrapped = FullyShardedDataParallel(
        model, **ranks, sharding_strategy=root_strategy(plan),
        auto_wrap_policy=auto_wrap_policy(plan, modules, wrappers),
        cpu_offload=CPUOffload(offload_params=True) if plan["offload"]["parameters"] else None,
        backward_prefetch=prefetch[choices["backward_prefetch"]], forward_prefetch=choices["forward_prefetch"],
        limit_all_gathers=choices["limit_all_gathers"], use_orig_params=choices["use_orig_params"],
        mixed_precision=mixed, **options)
    _wrap_further_names(wrapped)
    wrapped._shardwright_plan = plan
    return wrapped


def micro_batch(model, index):
    """The context of micro-batch `index` of a step: delays reductions as the plan says."""
    training = model._shardwright_plan["training"]
    is_last = index + 1 == training["accumulation"]
    return model.no_sync() if training["sync"] == "last" and not is_last else contextlib.nullcontext()
