"""Live torch modules: what a model is, and a plan applied to it. Needs torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Optional

import torch

from ._apply import shardwright_fsdp2 as _fsdp2
from ._apply.shardwright_plan import PlanError
from ._errors import InputError, UsageError
from ._export import export_model as _exporter
from ._results import emit
from ._run import PlanLike, run

_OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adadelta": "adadelta"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and how it is trained: what plan() takes."""

    name: str
    model: dict[str, Any] = dataclasses.field(repr=False)  # model.json (docs/model_json.md)
    flags: dict[str, Any]  # of plan(): sequence length, optimizer, precision
    assumptions: list[str]  # what the module does not say and was taken


_DTYPES: dict[torch.dtype, dict[str, str]] = {
    torch.float32: {}, torch.bfloat16: {"precision": "bf16"}, torch.float16: {"precision": "fp16"}}
_applied: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def _check(model: torch.nn.Module) -> None:
    """Raises what no plan can be made of, by name."""
    kind = type(model).__name__
    try:
        _exporter.trace.check_wrappers(model)
    except _exporter.Unsupported as error:
        raise InputError(f"{kind}: {error}") from None
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.dtype, name)
        if parameter.dim() == 0:
            raise InputError(f"{kind}: parameter {name} has no dimension, and PyTorch's FSDP shards no such parameter; make its shape [1]")
        if parameter.dtype not in _DTYPES:
            raise InputError(f"{kind}: parameter {name} has dtype {parameter.dtype}, expected torch.float32, torch.bfloat16 or torch.float16")
    if len(first) > 1:
        raise InputError(f"{kind}: parameters have several dtypes ({', '.join(f'{name} {dtype}' for dtype, name in first.items())}), expected "
                         "one; call model.to(dtype), or plan in fp32 and let mixed precision cast")


def _without_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy on the meta device; `model` stays as it is, and no weight is copied."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "placements"):
            raise UsageError(f"describe: parameter {name} is sharded; describe the model before it is")
        memo[id(parameter)] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
                                                 requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(model, memo)


def _one_sample(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return torch.empty((1, *value.shape[1:]), dtype=value.dtype, device="meta")


def _inputs(model: torch.nn.Module, sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        named = dict(sample)
    else:
        values = list(sample) if isinstance(sample, (tuple, list)) else [sample]
        names = [name for name, p in inspect.signature(model.forward).parameters.items()
                 if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(names) < len(values):
            names += [f"input{i}" for i in range(len(names), len(values))]
        named = dict(zip(names, values))
    if not any(isinstance(value, torch.Tensor) for value in named.values()):
        raise UsageError("describe: the sample holds no tensor, expected what the model's forward takes, batch first")
    return {name: _one_sample(value) for name, value in named.items()}


def _sequence_length(inputs: dict[str, Any]) -> int:
    """The tokens of a sample: the second size of the first whole-number input that has two."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim() >= 2:
            return value.shape[1]
    return 0


def _optimizer_flags(optimizer: Any) -> dict[str, Any]:
    """Of plan(): from a name, a class of torch.optim or one of its objects."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, str):
        return {"optimizer": optimizer}
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if kind.__name__ not in _OPTIMIZERS:
        raise UsageError(f"describe: got the optimizer {kind.__name__}, expected one of {', '.join(_OPTIMIZERS)} or a name that "
                         "plan(optimizer=...) takes")
    name = _OPTIMIZERS[kind.__name__]
    if isinstance(optimizer, type):
        return {"optimizer": name}
    groups = optimizer.param_groups
    if any(group.get("amsgrad") for group in groups):
        raise UsageError(f"describe: got {kind.__name__} with amsgrad, which keeps a third state that no plan has, expected amsgrad=False")
    if name == "sgd" and any(group["momentum"] for group in groups):
        name = "momentum"
    given = groups[0]
    implementation = "fused" if given.get("fused") else "for_loop" if given.get("foreach") is False else "foreach"
    return {"optimizer": f"{name}:{implementation}", "weight_decay": "on" if any(g["weight_decay"] for g in groups) else "off"}


def _precision_flags(model: torch.nn.Module) -> dict[str, Any]:
    return next((dict(_DTYPES[parameter.dtype]) for parameter in model.parameters()), {})


def describe(model: torch.nn.Module, sample: Any, *, optimizer: Any = None, sequence_length: Optional[int] = None,
             dtype: torch.dtype = torch.bfloat16, device_type: str = "cuda") -> Job:
    """What `model` is, for plan(): it runs forward and backward once on tensors without data; its own weights are not touched.

    sample: what forward takes, batch first: a tensor, several in order, or a mapping by name (with labels, where the model then
    returns its loss). optimizer: a name, a class of torch.optim or an optimizer. dtype: of the computation. device_type: where it will
    run; PyTorch writes attention with a learned mask out on a "cpu", and on no GPU.
    Raises InputError that names the op, its module and its shapes where the model does what no rule knows.
    """
    _check(model)
    inputs = _inputs(model, sample)
    tokens = _sequence_length(inputs) if sequence_length is None else sequence_length
    assumptions = []

    def export(computes: torch.dtype) -> dict[str, Any]:
        try:
            with _exporter.trace.for_device(device_type):
                return _exporter.export(_without_weights(model).train(), inputs, tokens, computes)
        except _exporter.Unsupported as error:
            raise InputError(f"{type(model).__name__}: {error}") from None

    try:
        document = export(dtype)
    except InputError as error:
        if "dtype" not in str(error) or dtype is torch.float32:
            raise
        assumptions.append(f"it was run in fp32, since in {dtype} it fails: {error}")
        document = export(torch.float32)
    if "fixed_length" in document:
        assumptions.append(f"samples have {tokens} tokens always: {document['fixed_length']}")
    assumptions += _held(inputs)
    try:
        run(["inspect", "--json", "-"], json.dumps(document))
    except InputError as error:
        raise InputError(f"{type(model).__name__}: {str(error).removeprefix('standard input: ')}") from None
    flags = {**_optimizer_flags(optimizer), **_precision_flags(model)}
    if tokens:
        flags["seq"] = tokens
    return Job(name=type(model).__name__, model=document, flags=flags, assumptions=assumptions)


def _held(inputs: dict[str, Any]) -> list[str]:
    """What is assumed of tensors that a training loop may hold while backward runs."""
    outputs = [ref for ref in _exporter.export.traces[0].outputs if ref.shape and ref.dtype.is_floating_point]
    large = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    told = []
    if outputs and any(not ref.shape for ref in _exporter.export.traces[0].outputs):
        told.append("while backward runs the loop holds nothing of what forward returns beside the loss; a kernel set of Hugging Face's "
                    'Trainer (kernel_set="hf-eager") holds the logits')
    if large:
        told.append(f"while backward runs the loop holds no input ({', '.join(large)})")
    return told


def changed_settings() -> list[str]:
    """What FSDPModule's setters changed on models after apply(), in a line each."""
    return [line for model in list(_applied) for line in _fsdp2.changed_settings(model)]


def _data_parallel(mesh: Any, shape: tuple[int, int]) -> Any:
    """Of a mesh with more dimensions, those that replicate and shard parameters."""
    names = mesh.mesh_dim_names or ()
    wanted = tuple(name for name in ("dp_replicate", "dp_shard") if name in names)
    if mesh.ndim > (2 if shape[0] > 1 else 1) and wanted:
        return mesh[wanted if len(wanted) > 1 else wanted[0]]
    return mesh


def apply(model: torch.nn.Module, plan: PlanLike, mesh: Any = None, *, device_type: Optional[str] = None,
          fqns: Optional[str] = None) -> torch.nn.Module:
    """Wraps `model` in place as the plan says, with PyTorch's fully_shard, and returns it; make the optimizer afterwards.

    Units, resharding, prefetch, recomputation, offload and dtypes come from the plan, by the code that `emit --to fsdp2` writes.
    mesh: a DeviceMesh (shard) or (replicate, shard), or one with dimensions of the names dp_replicate and dp_shard; by default one
    over all ranks. fqns: whose names modules have (default hf-v5). All is checked before anything is changed: InputError.
    Call set_micro_batch(model, i) before micro-batch i where the plan accumulates.
    """
    emitted = emit(plan, to="fsdp2", **({"fqns": fqns} if fqns else {}))
    data = json.loads(next(file["text"] for file in emitted["files"] if file["name"] == "fsdp2_plan.json"))
    for loss in emitted["losses"]:
        warnings.warn(f"{loss['field']}: the plan says {loss['planned']}, fully_shard does {loss['emitted']}: {loss['why']}",
                      stacklevel=2)
    if mesh is not None:
        mesh = _data_parallel(mesh, (data["mesh"]["replicate"], data["mesh"]["shard"]))
    try:
        wrapped = _fsdp2.apply_plan(model, data, mesh, device_type)
    except PlanError as error:
        raise InputError(str(error)) from None
    _applied.add(wrapped)
    return wrapped


def set_micro_batch(model: torch.nn.Module, index: int) -> None:
    """To be called before micro-batch `index` of a step: delays reductions as the plan says."""
    _fsdp2.set_micro_batch(model, index)
