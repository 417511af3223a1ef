"""Checkpoints of `run` for torch.distributed.checkpoint (DCP), and its checkpoints for `run`. Needs torch."""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import pathlib
import stat
import struct
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from . import commands
from ._dcp import Folder
from ._errors import InputError, UsageError
from ._export.model_export import outside
from ._results import _in_file

Path = Union[str, "os.PathLike[str]"]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32}
_STATES = {"momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"),
           "adadelta": ("square_avg", "acc_delta"), "sgd": ()}
_HAS_STEP = ("adam", "adamw", "adadelta")  # torch.optim counts updates per parameter
# Of torch.optim's parameter groups; LRScheduler adds the last one.
_HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
                     "decoupled_weight_decay", "momentum", "dampening", "nesterov", "rho", "params", "initial_lr")


class _Stretch(NamedTuple):
    begin: int  # first element of the tensor
    count: int
    file: str
    offset: int  # of its first byte in the file


class _Saved(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stretches: list[_Stretch]  # by begin


def _open(path: pathlib.Path) -> BinaryIO:
    """A regular file. A folder of a stranger may hold a pipe or a link to a device, which would be waited on for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path}: got {error.strerror}, expected a file of the checkpoint") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: got no regular file, expected a file of the checkpoint")
    return open(descriptor, "rb")


def _newest(folder: pathlib.Path) -> pathlib.Path:
    if (folder / "manifest.json").exists():
        return folder
    steps = sorted(child for child in folder.glob("step-*") if child.name[5:].isdigit() and (child / "manifest.json").exists())
    if not steps:
        raise InputError(f"{folder}: got no finished checkpoint, expected a checkpoint or a folder of checkpoints")
    return steps[-1]


def _manifest(folder: pathlib.Path) -> dict[str, Any]:
    with _open(folder / "manifest.json") as file:
        text = file.read()
    body, mark, _ = text.rpartition(b',\n "manifest_crc32": "')
    manifest: dict[str, Any] = json.loads(text)
    if not mark or f"{zlib.crc32(body):08x}" != manifest.get("manifest_crc32"):
        raise InputError(f"{folder / 'manifest.json'}: its checksum is another one; the manifest is damaged")
    return manifest


def _header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """Of a safetensors file, and where its tensors begin."""
    with _open(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if 8 + length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(file.read(length)), 8 + length


def _saved_tensors(folder: pathlib.Path, manifest: Mapping[str, Any]) -> dict[str, _Saved]:
    tensors = {t["name"]: _Saved(_DTYPES[t["dtype"]], tuple(t["shape"]), []) for t in manifest["tensors"]}
    for file in manifest["files"]:
        if file["name"] in ("", "..") or "/" in file["name"]:
            raise ValueError(f"the file name {file['name']!r}")
        path = folder / file["name"]
        if not path.is_file() or path.stat().st_size != file["size_bytes"]:
            raise InputError(f"{path}: expected a file of {file['size_bytes']} bytes, as the manifest says")
        header, begin = _header(path)
        at: dict[str, int] = {}  # by tensor: the end of its stretches so far, which lie one behind the other
        for part in file["stretches"]:
            saved = tensors[part["tensor"]]
            first, end = header[part["tensor"]]["data_offsets"]
            first = at.get(part["tensor"], first)
            at[part["tensor"]] = first + part["count"] * saved.dtype.itemsize
            if not 0 <= first <= at[part["tensor"]] <= end or begin + end > file["size_bytes"]:
                raise ValueError(f"bytes {first} to {end} of {part['tensor']} in {file['name']}")
            saved.stretches.append(_Stretch(part["begin"], part["count"], file["name"], begin + first))
        for name, end in at.items():
            if end != header[name]["data_offsets"][1]:
                raise ValueError(f"{name} in {file['name']} has more bytes than stretches")
    for name, saved in tensors.items():
        saved.stretches.sort()
        end = 0
        for stretch in saved.stretches:
            if stretch.begin != end:
                break
            end += stretch.count
        else:
            if end == math.prod(saved.shape):
                continue
        raise InputError(f"{folder / 'manifest.json'}: got stretches of {name!r} that end at element {end}, expected stretches that "
                         f"cover all {math.prod(saved.shape)} once")
    return tensors


def _state_key(name: str) -> tuple[str, str]:
    """Of "optimizer.exp_avg.<parameter>": exp_avg and the parameter."""
    _, state, parameter = name.split(".", 2)
    return state, parameter


def _flat_range(shape: tuple[int, ...], offsets: torch.Size, lengths: torch.Size) -> tuple[int, int, list[int]]:
    """The first element of a block of a tensor, the number of elements up to its last one, and the tensor's strides."""
    strides = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    first = sum(o * s for o, s in zip(offsets, strides))
    last = first + sum((n - 1) * s for n, s in zip(lengths, strides))
    return first, (last - first + 1 if all(lengths) else 0), strides


class CheckpointReader(dcp.StorageReader):
    """Lets torch.distributed.checkpoint.load read a checkpoint of `shardwright run`, on any number of ranks.

        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.load(state, storage_reader=shardwright.CheckpointReader("checkpoints"))

    folder: a checkpoint, or a folder of them, which stands for its newest one. model, optimizer: where the state dict has the two; ""
    for a model's that is one itself. Each rank reads what it holds, and nothing else. The optimizer's parameter groups stay as they
    are: hyper-parameters are the caller's.
    """

    def __init__(self, folder: Path, *, model: str = "model", optimizer: str = "optimizer") -> None:
        super().__init__()
        self._model = model + "." if model else ""
        self._optimizer = optimizer + "." if optimizer else ""
        self.reset(folder)

    def reset(self, checkpoint_id: Optional[Path] = None) -> None:
        if checkpoint_id is not None:
            self.folder = _newest(pathlib.Path(checkpoint_id))
            try:
                self.manifest = _manifest(self.folder)
                self._tensors = _saved_tensors(self.folder, self.manifest)
            except InputError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, struct.error, RecursionError) as error:
                raise InputError(f"{self.folder}: got {error!r}, expected a checkpoint of shardwright run") from None

    @functools.cached_property
    def _keys(self) -> dict[str, Optional[str]]:
        """Of state dicts: the tensor of the checkpoint, or None for the number of updates."""
        keys: dict[str, Optional[str]] = {}
        with_states = []
        for tensor in self.manifest["tensors"]:
            name = tensor["name"]
            if tensor["kind"] != "state":
                keys[self._model + name] = name
                continue
            state, parameter = _state_key(name)
            keys[f"{self._optimizer}state.{parameter}.{state}"] = name
            with_states.append(parameter)
        if self.manifest["optimizer"] in _HAS_STEP:
            keys.update((f"{self._optimizer}state.{parameter}.step", None) for parameter in with_states)
        keys.update((self._model + alias["name"], alias["target"]) for alias in self.manifest["aliases"])
        return keys

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        known: dict[str, Any] = {}
        for key, name in self._keys.items():
            saved = self._tensors[name] if name is not None else _Saved(torch.float32, (), [])
            size = torch.Size(saved.shape)
            known[key] = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), size,
                                               [ChunkStorageMetadata(torch.Size([0] * len(size)), size)])
        groups = self._optimizer + "param_groups"
        known[groups] = BytesStorageMetadata()
        for tensor in self.manifest["tensors"]:  # as flatten_optimizer_state_dict has them
            if tensor["kind"] == "parameter":
                known.update((f"{groups}.{tensor['name']}.{key}", BytesStorageMetadata()) for key in _HYPER_PARAMETERS)
        return Metadata(state_dict_metadata=known, storage_data={MetadataIndex(key): key for key in known})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return pathlib.Path(checkpoint_id).is_dir()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue  # the caller's own stay
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._block(self._keys[item.storage_index.fqn], item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _block(self, name: Optional[str], offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
        if name is None:
            return torch.tensor(float(self.manifest["update"]))
        saved = self._tensors[name]
        first, count, strides = _flat_range(saved.shape, offsets, lengths)
        return self._elements(saved, first, count).as_strided(lengths, strides)

    def _elements(self, saved: _Saved, first: int, count: int) -> torch.Tensor:
        width = saved.dtype.itemsize
        memory = memoryview(bytearray(count * width))
        at = bisect.bisect_right(saved.stretches, first, key=lambda stretch: stretch.begin) - 1
        place = first
        while place < first + count:
            stretch = saved.stretches[at]
            end = min(first + count, stretch.begin + stretch.count)
            with _open(self.folder / stretch.file) as file:
                file.seek(stretch.offset + (place - stretch.begin) * width)
                if file.readinto(memory[(place - first) * width:(end - first) * width]) != (end - place) * width:
                    raise InputError(f"{self.folder / stretch.file}: it ends before its tensors do")
            place, at = end, at + 1
        return torch.frombuffer(memory, dtype=saved.dtype) if count else torch.empty(0, dtype=saved.dtype)


def to_dcp(checkpoint: Path, folder: Path, *, model: str = "model", optimizer: str = "optimizer") -> None:
    """Writes a checkpoint of `shardwright run` as one that torch.distributed.checkpoint.load reads.

    For jobs that cannot give load() a CheckpointReader: in this process, with all of it in memory. Its state dict is
    {model: {name: parameter}, optimizer: {"state": {name: {state: tensor}}}}, without parameter groups: load() with
    DefaultLoadPlanner(allow_partial_load=True) leaves the caller's.
    """
    reader = CheckpointReader(checkpoint, model=model, optimizer=optimizer)
    state = {key: reader._block(name, torch.Size([0] * len(shape)), shape) for key, name in reader._keys.items()
             for shape in [torch.Size(reader._tensors[name].shape if name is not None else ())]}
    with outside.filling(folder) as unfinished:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=True)


class _Parts(NamedTuple):
    """Of a checkpoint of DCP, by key there."""
    names: dict[str, str]  # ours
    steps: list[str]  # numbers of updates
    optimizer: Optional[str]


def _hyper_parameter(saved: Folder, prefix: str, name: str) -> Any:
    """Its value in the first parameter group; None: there is none."""
    whole = prefix + "param_groups"
    flat = [key for key in saved.known if key.startswith(whole + ".") and key.endswith("." + name)]
    key = whole if whole in saved.known else flat[0] if flat else None
    if key is None:
        return None
    value = saved.value(key)
    if key != whole:
        return value
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return value[0].get(name) if is_list else None


def _parts(saved: Folder, model: str, optimizer: Optional[str]) -> _Parts:
    names, steps, states = {}, [], set()
    for key, tensor in saved.known.items():
        if tensor is None:
            continue
        if optimizer is not None and key.startswith(optimizer + "state."):
            parameter, _, state = key[len(optimizer) + len("state."):].rpartition(".")
            if state == "step":
                steps.append(key)
            else:
                names[key] = f"optimizer.{state}.{parameter}"
                states.add(state)
        elif key.startswith(model):
            names[key] = key[len(model):]
    if all(name.startswith("optimizer.") for name in names.values()):
        raise InputError(f"{saved.path}: got no tensor whose key begins with \"{model}\", expected those of a model; keys begin with "
                         f"{', '.join(sorted({key.split('.')[0] for key in saved.known}))}")
    kinds = [kind for kind, of_kind in _STATES.items() if of_kind and states == set(of_kind)]
    if states and not kinds:
        raise InputError(f"{saved.path}: got the optimizer states {', '.join(sorted(states))}, expected those of SGD with momentum, Adam, "
                         "AdamW or Adadelta")
    if optimizer is not None and len(kinds) > 1:
        is_decoupled = _hyper_parameter(saved, optimizer, "decoupled_weight_decay")
        kinds = ["adam" if is_decoupled is False else "adamw"]
    return _Parts(names, steps, kinds[0] if kinds else None)


def _write(path: pathlib.Path, saved: Folder, parts: _Parts, metadata: dict[str, str]) -> None:
    """All tensors as one safetensors file; wide elements first, so that all are aligned."""
    dtypes = {dtype: name for name, dtype in _DTYPES.items()}
    tensors = {key: tensor for key, tensor in saved.known.items() if tensor is not None and key in parts.names}
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, parts.names[key]))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for key in order:
        dtype = tensors[key].dtype
        if dtype not in dtypes:
            raise InputError(f"{key}: got {dtype}, expected one of {', '.join(map(str, dtypes))}")
        begin, end = end, end + tensors[key].nbytes
        header[parts.names[key]] = {"dtype": dtypes[dtype], "shape": list(tensors[key].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with outside.replacing(path) as unfinished, open(unfinished, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for key in order:
            tensor = saved.tensor(key)
            out.write(tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"")


def _updates(saved: Folder, keys: list[str]) -> int:
    steps = [saved.tensor(key) for key in keys]
    if not all(step.numel() == 1 and 0 <= float(step) < 1 << 53 for step in steps):
        raise InputError(f"{saved.path}: got numbers of updates that are none")
    counts = sorted({int(step) for step in steps})
    if not counts:
        raise UsageError(f"from_dcp: the states in {saved.path} do not say how often they were updated; updates= says it")
    if len(counts) > 1:
        raise InputError(f"{saved.path}: got parameters that were updated {counts[0]} and {counts[-1]} times, expected one number")
    return counts[0]


def from_dcp(checkpoint: Path, folder: Path, model: Any, *, prefix: str = "model", optimizer: Optional[str] = "optimizer",
             updates: Optional[int] = None) -> str:
    """Writes a checkpoint of torch.distributed.checkpoint.save into `folder`, from which `shardwright run --checkpoint FOLDER --resume`
    goes on, under any plan of the model. Returns the folder of the step.

    model: what describe() returned, or what plan(model=) takes. prefix, optimizer: where the state dict that was saved had the model's
    and the optimizer's; "" for a model's that is one itself, None for an optimizer whose states are left out. updates: how many were
    done, where the states do not say it (SGD with momentum). A run that goes on takes its data from the place of the step on, and its
    hyper-parameters from its own options. The checkpoint is read as data: nothing that its files name is called.
    """
    path = pathlib.Path(checkpoint)
    if not (path / ".metadata").is_file():
        raise InputError(f"{path}: got no file .metadata, expected a folder that torch.distributed.checkpoint.save wrote")
    saved = Folder(path)
    parts = _parts(saved, prefix + "." if prefix else "", optimizer + "." if optimizer else optimizer)
    metadata = {}
    if parts.optimizer is not None:
        count = updates if updates is not None else _updates(saved, parts.steps)
        metadata = {"shardwright.optimizer": parts.optimizer, "shardwright.updates": str(count)}
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=pathlib.Path(folder).resolve().parent, prefix=".from-dcp-") as scratch:
        model = getattr(model, "model", model)
        if isinstance(model, Mapping):
            model = _in_file(scratch, model.get("model_type") or "model", model)
        weights = pathlib.Path(scratch) / "weights.safetensors"
        _write(weights, saved, parts, metadata)
        commands.checkpoint("import", weights, output=folder, model=model)
    return str(_newest(pathlib.Path(folder)))
