"""Reads plan data that `shardwright emit` wrote, and checks that a model is the one it was made for.

Needs nothing but PyTorch. Everything is checked before anything is changed, and all that is wrong is said at once.
"""

import difflib
import json
import warnings

import torch

MOST_PROBLEMS = 20
# Wrappers by the class of theirs, or of one of their bases, and what is to be done about one.
WRAPPERS = {
    "ActivationWrapper": "the plan says what is recomputed and offloaded: apply it to the module without the wrapper",
    "OptimizedModule": "apply the plan first and compile then, or compile by block.compile(), which keeps the module",
    "FullyShardedDataParallel": "apply the plan to the module that is not sharded",
    "FSDPModule": "apply the plan to the module that is not sharded",
    "DistributedDataParallel": "apply the plan to its .module",
    "DataParallel": "apply the plan to its .module",
    "DeepSpeedEngine": "apply the plan to its .module",
}


class PlanError(Exception):
    """The plan and the model, the mesh or this PyTorch do not fit together."""


def load_plan(plan, kind):
    """A plan from a path, a file or a dictionary. `kind` is "fsdp2" or "fsdp1"."""
    if isinstance(plan, dict):
        document, name = plan, "the plan"
    elif hasattr(plan, "read"):
        document, name = json.load(plan), getattr(plan, "name", "the plan")
    else:
        with open(plan, encoding="utf-8") as file:
            document, name = json.load(file), str(plan)
    expected = f"shardwright-{kind}"
    if document.get("format") != expected:
        raise PlanError(f'{name}: format: got {document.get("format")!r}, expected {expected!r}; emit it with --to {kind}')
    if document.get("version") != 1:
        raise PlanError(f'{name}: version: got {document.get("version")!r}, expected 1; this script is older than the plan')
    return document


def torch_version():
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def check_release(plan):
    """Warns where the rules that the plan follows are of another release than the PyTorch that runs."""
    release, here = plan.get("torch"), ".".join(map(str, torch_version()))
    if release not in (None, here):
        warnings.warn(f"the plan follows the rules of PyTorch {release}, and {torch.__version__} runs: its collectives may be others in "
                      "number and order", stacklevel=4)


def dtype_of(name):
    return getattr(torch, name)


def unwrapped(name):
    """The name of a parameter or module without the parts that wrappers put in."""
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"))


def _did_you_mean(name, names):
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f'; did you mean "{near[0]}"?' if near else ""


def _check_modules(plan, modules, problems):
    for what in ("units", "recompute"):
        for i, entry in enumerate(plan[what]):
            for fqn in entry.get("modules", [entry.get("module")]):
                if fqn not in modules:
                    problems.append(f'{what}[{i}]: the model has no module "{fqn}"' + _did_you_mean(fqn, modules))


def _check_parameters(plan, params, problems):
    planned = {p["fqn"]: p for p in plan["parameters"]}
    for fqn, entry in planned.items():
        if fqn not in params:
            problems.append(f'the model has no parameter "{fqn}"' + _did_you_mean(fqn, [n for n in params if n not in planned]))
        elif not params[fqn].dim() and entry["shape"] == [1]:
            problems.append(f'parameter "{fqn}" has no dimension, and PyTorch shards no such parameter; make its shape [1]')
        elif list(params[fqn].shape) != entry["shape"]:
            problems.append(f'parameter "{fqn}" has shape {list(params[fqn].shape)}, the plan expects {entry["shape"]}')
    storages = {id(params[fqn]) for fqn in planned if fqn in params}
    for fqn, param in params.items():
        if fqn not in planned and id(param) not in storages:
            problems.append(f'the plan has no parameter "{fqn}" of the model')
    return planned


def _check_ties(planned, params, problems):
    first = {}  # by storage, the first planned name
    for fqn, entry in planned.items():
        if fqn not in params:
            continue
        tied_to = entry.get("tied_to")
        if tied_to is not None and tied_to in params and params[fqn] is not params[tied_to]:
            problems.append(f'parameters "{tied_to}" and "{fqn}" are tied in the plan, not in the model')
        elif tied_to is None and id(params[fqn]) in first:
            problems.append(f'parameters "{first[id(params[fqn])]}" and "{fqn}" are tied in the model, not in the plan')
        first.setdefault(id(params[fqn]), fqn)


def _unit_of_parameters(plan, modules):
    """By storage, the index of the unit that takes it: modules inside others come first, by whatever name they are inside."""
    size = lambda fqn: sum(1 for _ in modules[fqn].modules())
    order = sorted(((size(fqn), u, fqn) for u, unit in enumerate(plan["units"]) for fqn in unit["modules"] if fqn in modules),
                   key=lambda entry: entry[0])
    unit_of = {}
    for _, u, fqn in order:
        for param in modules[fqn].parameters():
            unit_of.setdefault(id(param), u)
    return unit_of


def _check_units(plan, modules, planned, params, problems):
    unit_of = _unit_of_parameters(plan, modules)
    units = plan["units"]
    for fqn, entry in planned.items():
        if fqn not in params:
            continue
        found = unit_of.get(id(params[fqn]))
        if found != entry["unit"]:
            where = "no unit" if found is None else f'unit "{units[found]["name"]}"'
            problems.append(f'parameter "{fqn}" falls into {where}, the plan expects unit "{units[entry["unit"]]["name"]}"')


def _check_states(planned, params, master, problems):
    """What a wrapper would change, drop or stop on: gradients off or on, layouts, hooks of parameters."""
    for fqn, param in params.items():
        expected = planned[fqn].get("trainable", True) if fqn in planned else param.requires_grad
        if param.requires_grad != expected:
            problems.append(f'parameter "{fqn}" has requires_grad {param.requires_grad}, the plan expects {expected}; call '
                            f"requires_grad_({expected}) on it, or plan for the parameters that are trained")
        if not param.is_contiguous():
            problems.append(f'parameter "{fqn}" is not contiguous (stride {list(param.stride())}), and PyTorch shards no such parameter; '
                            "make it contiguous")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            problems.append(f'parameter "{fqn}" has hooks, which sharding drops; register them on the parameters of the wrapped model')
    wrong = [fqn for fqn, param in params.items() if param.is_floating_point() and param.dtype != master]
    if wrong:
        problems.append(f'{len(wrong)} parameters such as "{wrong[0]}" have dtype {params[wrong[0]].dtype}, the plan expects '
                        f"{master}; call model.to({master})")


def composable(module):
    """The names of PyTorch's functions, such as replicate and checkpoint, that were applied to the module in place."""
    try:
        from torch.distributed._composable.contract import _get_registry
        return list(_get_registry(module) or ())
    except ImportError:
        return []


def _is_recomputed(fqn, plan):
    return any(region["module"] == fqn or fqn.startswith(region["module"] + ".") for region in plan["recompute"])


def check_wrappers(model, plan):
    """Raises PlanError that names every module with a wrapper, checkpointing of its own or hooks that the plan does not know."""
    problems = []
    for name, module in model.named_modules():
        shown, kinds = f'module "{name}"' if name else "the model", {kind.__name__ for kind in type(module).__mro__}
        for kind in WRAPPERS:
            if kind in kinds:
                problems.append(f"{shown} is a {type(module).__name__}: {WRAPPERS[kind]}")
        problems += [f"{shown} is wrapped by {what}: apply the plan to the module as it was before" for what in composable(module)
                     if what != "fully_shard"]  # whose module is an FSDPModule
        if getattr(module, "gradient_checkpointing", False) is True:
            problems.append(f"{shown} recomputes by itself: call gradient_checkpointing_disable() on the model; the plan says what is "
                            "recomputed")
        if hasattr(module, "_hf_hook"):
            problems.append(f"{shown} is dispatched by Accelerate: call remove_hook_from_module(model, recurse=True)")
        if (module._forward_hooks or module._forward_pre_hooks) and _is_recomputed(unwrapped(name), plan):
            problems.append(f"{shown} has forward hooks, and the plan recomputes it, so they would run twice; remove them")
    _raise(problems, "the model is not as it was built")


def _raise(problems, what):
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:MOST_PROBLEMS])
        more = f"\n  and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise PlanError(f"{what}:{shown}{more}")


def check_model(model, plan):
    """The model's modules by name. Raises PlanError naming every module, parameter, shape, tie, unit and state that differs; nothing is
    changed here."""
    check_release(plan)
    check_wrappers(model, plan)
    modules = {unwrapped(name): module for name, module in model.named_modules(remove_duplicate=False)}
    params = {unwrapped(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    problems = []
    _check_modules(plan, modules, problems)
    planned = _check_parameters(plan, params, problems)
    missing = sum(fqn not in params for fqn in planned)
    if missing > len(planned) // 2:
        dialect = plan["model"]["fqns"]
        raise PlanError(f'{missing} of {len(planned)} parameters of {plan["model"]["name"]} are not in this model, such as '
                        f'"{next(fqn for fqn in planned if fqn not in params)}"; the plan names them as {dialect} does: '
                        "is it the right model, or was another --fqns meant?")
    _check_ties(planned, params, problems)
    if not problems:
        _check_units(plan, modules, planned, params, problems)
    total = sum(param.numel() for param in {id(p): p for p in params.values()}.values())
    if not problems and total != plan["model"]["parameters"]:
        problems.append(f'the model has {total} parameters, the plan expects {plan["model"]["parameters"]}')
    _check_states(planned, params, dtype_of(plan["dtypes"]["master"]), problems)
    _raise(problems, "the model is not what the plan was made for")
    return modules


def check_mesh(mesh, plan):
    """Two dimensions (replicate, shard), or one (shard) where there is one copy."""
    replicate, shard = plan["mesh"]["replicate"], plan["mesh"]["shard"]
    expected = [(replicate, shard)] + ([(shard,)] if replicate == 1 else [])
    if tuple(mesh.mesh.shape) not in expected:
        raise PlanError(f"the mesh has shape {tuple(mesh.mesh.shape)}, the plan expects {expected[-1]}")


def make_mesh(plan, device_type=None):
    """The mesh of the plan over all ranks of the default process group."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    replicate, shard = plan["mesh"]["replicate"], plan["mesh"]["shard"]
    if get_world_size() != replicate * shard:
        raise PlanError(f"{get_world_size()} ranks run, the plan expects {replicate * shard} "
                        f"({replicate} x {shard}); torchrun --nproc-per-node sets them")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def _selective_contexts(keep_every):
    """Keeps the output of every `keep_every`-th product of two matrices, and of fused attention and convolutions always.

    Batched and grouped products (a mixture's experts) are not on the list, as in torchtitan's: the plan's program has the same
    list (KeptOps in schedule/lower/regions.cc)."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    aten = torch.ops.aten
    linears = {aten.mm.default, aten.addmm.default, aten.linear.default}
    attention = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
                 aten.convolution.default}
    for name in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
                 "_scaled_dot_product_fused_attention_overrideable"):
        if hasattr(aten, name):
            attention.add(getattr(aten, name).default)

    def contexts():
        seen = {False: 0, True: 0}  # by pass: forward and recomputation count alike

        def policy(context, op, *_, **__):
            if op in attention:
                return CheckpointPolicy.MUST_SAVE
            if op in linears:
                seen[context.is_recompute] += 1
                if (seen[context.is_recompute] - 1) % keep_every == 0:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _turn_caches_off(model):
    """transformers' key/value caches: recomputation would append to them once more."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def wrap_recompute(model, plan, modules):
    """Wraps the recomputed modules in place. Returns the wrappers by the id of what they wrap."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (CheckpointImpl, checkpoint_wrapper,
                                                                            offload_wrapper)
    wrappers = {}
    if plan["recompute"]:
        _turn_caches_off(model)
    for region in plan["recompute"]:
        module = modules[region["module"]]
        if module is model:
            raise PlanError("the whole model cannot be recomputed: it has no parent to put a wrapper into")
        if id(module) in wrappers:
            continue
        options = {}
        if region["kind"] == "selective":
            options["context_fn"] = _selective_contexts(region["keep_every"])
        wrapper = checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        if plan["offload"]["activations"]:
            wrapper = offload_wrapper(wrapper)
        wrappers[id(module)] = wrapper
    parents = list(model.modules())
    for parent in parents:
        for name, child in list(parent._modules.items()):  # named_children() leaves out a second name
            wrapper = wrappers.get(id(child))
            if wrapper is not None and wrapper is not parent:
                setattr(parent, name, wrapper)
    return wrappers
