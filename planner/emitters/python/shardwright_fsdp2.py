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

from shardwright_plan import (PlanError, check_mesh, check_model, composable, dtype_of, load_plan, make_mesh, torch_version,
                              unwrapped, wrap_recompute)


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


# What a setter of FSDPModule changes: of the state, or of its groups of parameters. A release without the setter has no such attribute.
SETTERS = {
    "set_requires_gradient_sync": "reduce_grads",
    "set_requires_all_reduce": "all_reduce_grads",
    "set_modules_to_forward_prefetch": "_states_to_forward_prefetch",
    "set_modules_to_backward_prefetch": "_states_to_backward_prefetch",
    "set_reshard_after_forward": "post_forward_mesh_info",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers": "reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group": "reduce_scatter_process_group",
    "set_gradient_divide_factor": "gradient_divide_factor",
    "set_reduce_scatter_divide_factor": "reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms": "force_sum_reduction_for_comms",
    "set_all_reduce_hook": "_all_reduce_hook",
    "set_custom_all_gather, set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm": "_all_gather_comm",
    "set_custom_reduce_scatter, set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm": "_reduce_scatter_comm",
    "set_is_last_backward": "is_last_backward",
    "set_post_optim_event": "post_optim_event",
    "_set_unshard_async_op": "unshard_async_op",
    "the mixed-precision policy": "mp_policy",
    "the offload policy": "offload_policy",
}


def _value(value):
    """What tells two settings apart: of objects that a setter makes anew, the class."""
    if isinstance(value, (list, tuple)):
        return [id(state) for state in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value) if type(value).__name__.endswith("Policy") else type(value).__name__


def _groups(state):
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) is not None else []  # before 2.11


def _forward_methods(module):
    """Of a module, the methods beside forward that gather its parameters since register_fsdp_forward_method."""
    codes = {name: getattr(getattr(value, "__func__", None), "__code__", None) for name, value in vars(module).items()}
    return ", ".join(sorted(name for name, code in codes.items() if getattr(code, "co_name", "") == "wrapped_method")) or None


def read_settings(model):
    """By module and setter of fully_shard, what is set, beside what set_micro_batch sets."""
    found, training = {}, model._shardwright_plan["training"]
    own = (("reduce_grads",) if training["sync"] != "every" else ()) + (("reshard_after_backward",) if training.get("keeps_gathered") else ())
    found["", "share_comm_ctx"] = id(getattr(model._get_fsdp_state(), "_comm_ctx", None))
    for name, module in model.named_modules():
        found[unwrapped(name), "PyTorch's functions that wrap"] = ", ".join(composable(module)) or None
        found[unwrapped(name), "register_fsdp_forward_method"] = _forward_methods(module)
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        groups = _groups(state)
        for owner in (state, getattr(state, "_state_ctx", None), *groups, *(group.mesh_info for group in groups)):
            for setter, attribute in SETTERS.items():
                if hasattr(owner, attribute) and not attribute.endswith(own):
                    found[unwrapped(name), setter] = _value(getattr(owner, attribute))
    return found


def changed_settings(model):
    """What was set on the wrapped model after the plan was applied, in a line each."""
    now, lines = read_settings(model), []
    shown = lambda value: f"{len(value)} modules" if isinstance(value, list) else value  # noqa: E731
    for (name, setter), before in model._shardwright_settings.items():
        after = now.get((name, setter), before)
        if after != before:
            lines.append(f'{setter} on {f"module {name}" if name else "the root"}: the plan has {shown(before)}, now it is {shown(after)}')
    return lines


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
    model._shardwright_settings = read_settings(model)
    return model


def set_micro_batch(model, index):
    """To be called before micro-batch `index` of a step: delays reductions as the plan says."""
    training = model._shardwright_plan["training"]
    is_last = index + 1 == training["accumulation"]
    if training["sync"] == "last":
        model.set_requires_gradient_sync(is_last)
    elif training["sync"] == "replicate_last":
        model.set_requires_all_reduce(is_last)
    if training.get("keeps_gathered"):
        model.set_reshard_after_backward(is_last)
