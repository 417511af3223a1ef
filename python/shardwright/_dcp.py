"""Checkpoints of torch.distributed.checkpoint.save, read as data: no function that their pickles name is called. Needs torch."""

from __future__ import annotations

import io
import math
import os
import pathlib
import pickle
import stat
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch

from ._errors import InputError

_DCP = "torch.distributed.checkpoint"
_DTYPES = {f"torch {name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_STORAGES = {f"torch {name}Storage": dtype for name, dtype in (
    ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16), ("BFloat16", torch.bfloat16), ("Long", torch.int64),
    ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8), ("Bool", torch.bool))}
_CLASSES = frozenset({
    "collections OrderedDict", "torch Size", "torch.serialization _get_layout", "pathlib PosixPath", "pathlib._local PosixPath",
    f"{_DCP}.filesystem _StorageInfo", f"{_DCP}.filesystem _StoragePrefix",
    *(f"{_DCP}.metadata {name}" for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                                             "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")),
    *(f"torch.distributed._shard.sharded_tensor.metadata {name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(f"torch._utils {name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
    "torch.storage UntypedStorage", *_DTYPES, *_STORAGES})
_LARGEST = 256 << 20  # bytes of the metadata
_MOST_STEPS = 20_000_000  # of a pickle; a part of a tensor takes about 30
_MOST = 1 << 50  # elements
_MOST_DIMENSIONS = 64  # as PyTorch


class _Name(str):
    """A class or function, as "module name"."""


class _Object:
    """What a pickle says of an object: its class or function, the arguments, the state. Nothing of it has been called."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def field(self, key: str) -> Any:
        return self.state[key]  # type: ignore[index]


class _Machine:
    """Runs the opcodes that PyTorch writes, on data. Every other opcode is refused."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        at = 0
        for _ in range(_MOST_STEPS):
            width, act = _ACTS[data[at]]
            at += 1
            argument: Any = None
            if width > 0:
                argument = int.from_bytes(data[at:at + width], "little")
                at += width
            elif width < 0:  # a text or number with its length before it
                begin = at - width
                at = begin + int.from_bytes(data[at:begin], "little")
                argument = data[begin:at]
            elif act is _Machine.name_lines:
                end = data.index(b"\n", data.index(b"\n", at) + 1)
                argument, at = data[at:end], end + 1
            elif act is _Machine.stop:
                return self.stack.pop()
            act(self, argument)
        raise ValueError(f"more than {_MOST_STEPS:,} steps of a pickle")

    def stop(self, _: Any) -> None:
        pass

    def many(self, count: int = -1) -> list[Any]:
        """The last `count` values, or those since the mark."""
        begin = self.marks.pop() if count < 0 else len(self.stack) - count
        if begin < (self.marks[-1] if self.marks else 0):
            raise ValueError("too few values")
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    def name(self, name: str) -> None:
        if name not in _CLASSES:
            raise InputError(f'got "{name[:200]}", expected the classes of a checkpoint\'s tensors; a file that names another one is '
                             "damaged, or made to run code")
        self.stack.append(_Name(name))

    def name_lines(self, lines: bytes) -> None:
        self.name(lines.decode().replace("\n", " "))

    def make(self, _: Any) -> None:
        name, arguments = self.many(2)
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of what is no class")
        self.stack.append({} if name == "collections OrderedDict" else _Object(name, arguments))

    def build(self, _: Any) -> None:
        (state,) = self.many(1)
        target = self.stack[-1]
        if isinstance(target, _Object):
            target.state = state
        elif state:  # attributes of an OrderedDict
            raise ValueError("a state of what has none")

    def extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("no list to append to")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or not all(isinstance(key, (str, int, _Object)) for key in values[::2]):
            raise ValueError("no dictionary, or keys that are neither text nor numbers")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]


def _push(read: Callable[[Any], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, argument: machine.stack.append(read(argument))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


# By opcode: the bytes of its argument, less than 0 where they are the argument's length; what it does.
_ACTS: dict[int, tuple[int, Callable[[_Machine, Any], None]]] = {ord(code): (width, act) for code, width, act in (
    (pickle.PROTO, 1, lambda m, _: None), (pickle.FRAME, 8, lambda m, _: None), (pickle.STOP, 0, _Machine.stop),
    (pickle.MARK, 0, lambda m, _: m.marks.append(len(m.stack))),
    (pickle.NONE, 0, _push(lambda _: None)), (pickle.NEWTRUE, 0, _push(lambda _: True)), (pickle.NEWFALSE, 0, _push(lambda _: False)),
    (pickle.BININT, 4, _push(lambda number: number - (number >> 31 << 32))), (pickle.BININT1, 1, _push(int)), (pickle.BININT2, 2, _push(int)),
    (pickle.LONG1, -1, _push(lambda data: int.from_bytes(data, "little", signed=True))),
    (pickle.BINFLOAT, 8, _push(lambda bits: struct.unpack(">d", bits.to_bytes(8, "little"))[0])),
    (pickle.SHORT_BINUNICODE, -1, _push(_text)), (pickle.BINUNICODE, -4, _push(_text)), (pickle.BINUNICODE8, -8, _push(_text)),
    (pickle.SHORT_BINBYTES, -1, _push(bytes)), (pickle.BINBYTES, -4, _push(bytes)),
    (pickle.EMPTY_DICT, 0, _push(lambda _: {})), (pickle.EMPTY_LIST, 0, _push(lambda _: [])), (pickle.EMPTY_TUPLE, 0, _push(lambda _: ())),
    (pickle.TUPLE, 0, lambda m, _: m.stack.append(tuple(m.many()))), (pickle.TUPLE1, 0, lambda m, _: m.stack.append(tuple(m.many(1)))),
    (pickle.TUPLE2, 0, lambda m, _: m.stack.append(tuple(m.many(2)))), (pickle.TUPLE3, 0, lambda m, _: m.stack.append(tuple(m.many(3)))),
    (pickle.APPEND, 0, lambda m, _: m.extend(m.many(1))), (pickle.APPENDS, 0, lambda m, _: m.extend(m.many())),
    (pickle.SETITEM, 0, lambda m, _: m.set_items(m.many(2))), (pickle.SETITEMS, 0, lambda m, _: m.set_items(m.many())),
    (pickle.MEMOIZE, 0, lambda m, _: m.put(len(m.memo))), (pickle.BINPUT, 1, _Machine.put), (pickle.LONG_BINPUT, 4, _Machine.put),
    (pickle.BINGET, 1, lambda m, place: m.stack.append(m.memo[place])), (pickle.LONG_BINGET, 4, lambda m, place: m.stack.append(m.memo[place])),
    (pickle.GLOBAL, 0, _Machine.name_lines), (pickle.STACK_GLOBAL, 0, lambda m, _: m.name(" ".join(m.many(2)))),
    (pickle.REDUCE, 0, _Machine.make), (pickle.NEWOBJ, 0, _Machine.make), (pickle.BUILD, 0, _Machine.build),
    (pickle.BINPERSID, 0, lambda m, _: m.stack.append(_Object("persistent", tuple(m.many(1)[0]))))
)}


def _sizes(value: Any) -> tuple[int, ...]:
    """Of a torch.Size or a tuple."""
    sizes = value.arguments[0] if isinstance(value, _Object) and value.name == "torch Size" else value
    if (not isinstance(sizes, tuple) or len(sizes) > _MOST_DIMENSIONS
            or not all(type(size) is int and 0 <= size <= _MOST for size in sizes) or math.prod(sizes) > _MOST):
        raise ValueError("sizes that no tensor has")
    return sizes


class Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]  # offsets and sizes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Place(NamedTuple):
    file: str
    offset: int
    length: int


def _tensor_metadata(entry: _Object) -> Tensor:
    properties = entry.field("properties").state
    dtype = _DTYPES[properties["dtype"] if isinstance(properties, dict) else properties[0]]
    shape = _sizes(entry.field("size"))
    chunks = [(_sizes(chunk.field("offsets")), _sizes(chunk.field("sizes"))) for chunk in entry.field("chunks")]
    for offsets, sizes in chunks:
        if not len(offsets) == len(sizes) == len(shape) or any(o + s > n for o, s, n in zip(offsets, sizes, shape)):
            raise ValueError("a part outside of its tensor")
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
        raise ValueError("parts that are more or less than their tensor")
    return Tensor(shape, dtype, chunks)


def _place(info: _Object) -> _Place:
    place = _Place(info.field("relative_path"), info.field("offset"), info.field("length"))
    if not isinstance(place.file, str) or "\0" in place.file or place.file.startswith("/") or ".." in place.file.split("/"):
        raise ValueError("a file outside of the folder")
    if info.state.get("transform_descriptors"):  # type: ignore[union-attr]
        raise ValueError("parts that were transformed (compressed) when they were saved")
    if not all(type(number) is int and 0 <= number <= _MOST for number in place[1:]):
        raise ValueError("a place that no file has")
    return place


class Folder:
    """A checkpoint of DCP. `known`: by key, the tensor; None for other values."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.known: dict[str, Optional[Tensor]] = {}
        self._places: dict[tuple[str, Optional[tuple[int, ...]]], _Place] = {}
        file = path / ".metadata"
        size = self._size(file)
        if size > _LARGEST:
            raise InputError(f"{file}: got {size} bytes, expected at most {_LARGEST}")
        self._understand(file, lambda: self._take(_Machine().run(self._read(_Place(".metadata", 0, size)))))
        sizes = {place.file: 0 for place in self._places.values()}
        stored = sum(place.length for place in self._places.values())
        there = sum(self._size(path / name) for name in sizes)
        told = sum(tensor.nbytes for tensor in self.known.values() if tensor is not None)
        if max(stored, told) > there:
            raise InputError(f"{file}: got tensors of {max(stored, told)} bytes, expected no more than the {there} of the files beside it")

    def value(self, key: str) -> Any:
        """Of what is no tensor: a number, or lists and dictionaries of numbers."""
        def read() -> Any:
            return _Machine().run(_records(self._read(self._places[key, None]))("data.pkl"))
        return self._understand(self.path, read)

    def tensor(self, key: str) -> torch.Tensor:
        tensor = self.known[key]
        assert tensor is not None
        return self._understand(self.path, lambda: self._whole(key, tensor))  # type: ignore[no-any-return]

    def _whole(self, key: str, tensor: Tensor) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        filled = torch.zeros(tensor.shape if len(tensor.chunks) > 1 else (), dtype=torch.bool)
        for offsets, sizes in tensor.chunks:
            part = _tensor_of(_records(self._read(self._places[key, offsets])))
            if part.dtype != tensor.dtype or tuple(part.shape) != sizes:
                raise ValueError(f"a part of {key} with another shape or dtype than the metadata say")
            place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes))
            if len(tensor.chunks) > 1:
                if filled[place].any():
                    raise ValueError(f"parts of {key} that overlap")
                filled[place] = True
            whole[place] = part
        return whole

    def _take(self, metadata: _Object) -> None:
        for key, entry in metadata.field("state_dict_metadata").items():
            if not isinstance(key, str):
                raise ValueError("a key that is no text")
            self.known[key] = _tensor_metadata(entry) if entry.name.endswith(" TensorStorageMetadata") else None
        for index, info in metadata.field("storage_data").items():
            offset = index.state.get("offset")  # a class attribute where there is none
            self._places[index.field("fqn"), None if offset is None else _sizes(offset)] = _place(info)

    def _understand(self, file: pathlib.Path, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}") from None
        except (ValueError, TypeError, AttributeError, LookupError, EOFError, RecursionError, OverflowError, NotImplementedError,
                RuntimeError, zipfile.BadZipFile) as error:
            raise InputError(f"{file}: got {' '.join(str(error).split())[:200] or type(error).__name__}, expected what "
                             "torch.distributed.checkpoint.save writes") from None

    def _size(self, file: pathlib.Path) -> int:
        try:
            status = file.stat()
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{file}: got no regular file, expected one of a checkpoint")
        return status.st_size

    def _read(self, place: _Place) -> bytes:
        with open(self.path / place.file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            file.seek(place.offset)
            data = file.read(min(place.length, self._size(self.path / place.file)))
        if len(data) != place.length:
            raise ValueError(f"a file {place.file} that ends early")
        return data


def _records(data: bytes) -> Callable[[str], bytes]:
    """The reader of the records that torch.save writes: an archive that is not compressed."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def read(name: str) -> bytes:
        info = infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
            raise ValueError("a compressed record")
        return archive.read(info)

    if "byteorder" in infos and read("byteorder") != b"little":
        raise ValueError("numbers that do not begin with their lowest byte")
    return read


def _tensor_of(read: Callable[[str], bytes]) -> torch.Tensor:
    made = _Machine().run(read("data.pkl"))
    if made.name == "torch._utils _rebuild_parameter":
        made = made.arguments[0]
    if made.name not in ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"):
        raise ValueError("no plain tensor")
    storage, offset, shape, stride = made.arguments[:4]
    kind, storage_type, key = storage.arguments[:3]
    dtype = _DTYPES[made.arguments[6]] if made.name.endswith("_v3") else _STORAGES[storage_type]
    if kind != "storage" or not isinstance(key, str):
        raise ValueError("no storage")
    data = read(f"data/{key}")
    (offset,), shape, stride = _sizes((offset,)), _sizes(shape), _sizes(stride)
    count = math.prod(shape)
    if len(shape) != len(stride) or count and (offset + sum((n - 1) * s for n, s in zip(shape, stride)) + 1) * dtype.itemsize > len(data):
        raise ValueError("a tensor outside of its storage")
    if count * dtype.itemsize > len(data):
        raise ValueError("a tensor that is more than its storage")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype, count=len(data) // dtype.itemsize)
    return flat.as_strided(shape, stride, offset)
