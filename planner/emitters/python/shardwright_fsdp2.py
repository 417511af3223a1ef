"""Applies a plan that `shardwright emit --to fsdp2` wrote with PyTorch's fully_shard.

    torch.distributed.init_process_group(...)
    model = ...                                   # on any device, in the plan's master dtype
    apply_plan(model, "fsdp2_plan.json")          # checks everything first, then wraps in place
    optimizer = torch.optim.AdamW(model.parameters())
    for i, batch in enumerate(micro_batches):
        set_micro_batch(model, i)
        (loss(model, batch) / len(micro_batches)).backward()
"""

import torch

from shardwright_plan import (PlanError, check_mesh, check_model, dtype_of, freeze, load_plan, make_mesh, torch_version,
                              wrap_recompute)


def _check_version(plan):
    # Groups of modules and the public import path are in 2.6; before 2.8 the root is never resharded.
    if torch_version() < (2, 6):
        raise PlanError(f"PyTorch is {torch.__version__}, fully_shard needs 2.6 or later")
    if plan["units"][-1]["reshard_after_forward"] is not False and torch_version() < (2, 8):
        raise PlanError(f"PyTorch is {torch.__version__}; before 2.8 the root unit cannot be resharded after forward")


def _check_containers(plan, modules):
    for unit in plan["units"]:
        for fqn in unit["modules"]:
            if isinstance(modules[fqn], (torch.nn.ModuleList, torch.nn.ModuleDict)):
                raise PlanError(f'unit "{unit["name"]}": module "{fqn}" is a {type(modules[fqn]).__name__}, which has no forward '
                                "for fully_shard to hook")


def _inner_first(units, modules):
    """The units in an order in which they can be wrapped, whatever theirs in the plan: an outer one takes what is left."""
    inside = {unit["name"]: {id(m) for fqn in unit["modules"] for m in modules[fqn].modules()} for unit in units}
    own = {unit["name"]: {id(modules[fqn]) for fqn in unit["modules"]} for unit in units}
    left, ordered = sorted(units, key=lambda unit: len(inside[unit["name"]])), []
    while left:
        unit = next((u for u in left if not any(own[v["name"]] & inside[u["name"]] for v in left if v is not u)), None)
        if unit is None:
            raise PlanError("units: each of " + ", ".join(f'"{u["name"]}"' for u in left) + " has a module inside of another")
        ordered.append(unit)
        left.remove(unit)
    return ordered


def _targets(unit, modules, wrappers):
    """What fully_shard takes for a unit: wrappers in place of what they wrap, each module once."""
    targets = []
    for fqn in unit["modules"]:
        module = wrappers.get(id(modules[fqn]), modules[fqn])
        if all(module is not other for other in targets):
            targets.append(module)
    return targets


def apply_plan(model, plan="fsdp2_plan.json", mesh=None, device_type=None):
    """Wraps `model` in place and returns it. Raises PlanError, before any change, when something does not fit.

    mesh: a DeviceMesh (shard) or (replicate, shard); by default one over all ranks, of `device_type`.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    plan = load_plan(plan, "fsdp2")
    _check_version(plan)
    modules = check_model(model, plan)
    _check_containers(plan, modules)
    if mesh is None:
        mesh = make_mesh(plan, device_type)
    check_mesh(mesh, plan)
    ordered = _inner_first(plan["units"], modules)
    freeze(model, plan)
    wrappers = wrap_recompute(model, plan, modules)
    dtypes = plan["dtypes"]
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtypes["param"] == dtypes["master"] else dtype_of(dtypes["param"]),
            reduce_dtype=None if dtypes["reduce"] == dtypes["param"] else dtype_of(dtypes["reduce"])),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if plan["offload"]["parameters"]
        else OffloadPolicy(),
    }
    targets = {unit["name"]: _targets(unit, modules, wrappers) for unit in plan["units"]}
    for unit in ordered:
        chosen = targets[unit["name"]]
        policy = {"mp_policy": MixedPrecisionPolicy()} if unit.get("full_precision") else {}
        fully_shard(chosen[0] if len(chosen) == 1 else chosen, reshard_after_forward=unit["reshard_after_forward"],
                    **{**options, **policy})
    for unit in plan["units"]:
        first = targets[unit["name"]][0]
        if "forward_prefetch" in unit:
            first.set_modules_to_forward_prefetch([targets[name][0] for name in unit["forward_prefetch"]])
        if "backward_prefetch" in unit:
            first.set_modules_to_backward_prefetch([targets[name][0] for name in unit["backward_prefetch"]])
    model._shardwright_plan = plan
    return model


def set_micro_batch(model, index):
    """To be called before micro-batch `index` of a step: delays reductions as the plan says."""
    training = model._shardwright_plan["training"]
    is_last = index + 1 == training["accumulation"]
    if training["sync"] == "last":
        model.set_requires_gradient_sync(is_last)
    elif training["sync"] == "replicate_last":
        model.set_requires_all_reduce(is_last)
