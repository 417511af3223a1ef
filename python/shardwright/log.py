"""What a run printed with --json, as scalars of TensorBoard and MLflow.

    shardwright run plan.json --steps 100 --json > run.json
    python -m shardwright.log run.json --tensorboard logs --mlflow http://localhost:5000

TensorBoard's event files are written by this module, MLflow's runs by its client, which must be installed (mlflow, or mlflow-skinny for a
server).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

from ._errors import Error, InputError, MachineError, UsageError
from ._export.model_export import outside

RunLike = Union[str, "os.PathLike[str]", "Mapping[str, Any]"]
"""A file that `run --json` wrote, "-" for standard input, or what shardwright.commands.run returned."""


class Scalar(NamedTuple):
    tag: str  # "train/loss"
    step: int  # of the optimizer; of what is told per epoch, the epoch
    seconds: float  # since the run began; of what is told per epoch, when the run ended
    value: float


def scalars(run: RunLike) -> list[Scalar]:
    """All numbers of the run that have a step. What is no finite number is NaN, as JSON has no word for it."""
    printed, _ = _read(run)
    return list(_scalars(printed))


def to_tensorboard(run: RunLike, folder: Union[str, "os.PathLike[str]"]) -> pathlib.Path:
    """Writes one event file into the folder, which TensorBoard shows as one run. Returns its path."""
    return _write_events(*_read(run), pathlib.Path(folder))


def _write_events(printed: Mapping[str, Any], ended: float, folder: pathlib.Path) -> pathlib.Path:
    rows = list(_scalars(printed))
    begin = ended - max((row.seconds for row in rows), default=0.0)
    events = [_event(begin, 0, _bytes(3, b"brain.Event:2"))]
    events += [_event(begin + row.seconds, row.step, _summary(row)) for row in rows]
    path = folder / f"events.out.tfevents.{int(begin)}.{platform.node()}.{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        outside.write(path, b"".join(map(_record, events)), follows=False)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror}") from None
    return path


def to_mlflow(run: RunLike, uri: Optional[str] = None, *, experiment: str = "shardwright", name: Optional[str] = None) -> str:
    """Makes a run of the experiment at the tracking URI (default: MLflow's own setting). Returns its id."""
    return _make_run(*_read(run), uri, experiment, name)


def _make_run(printed: Mapping[str, Any], ended: float, uri: Optional[str], experiment: str, name: Optional[str]) -> str:
    try:
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
        from mlflow.entities import Metric, Param  # type: ignore[import-not-found, unused-ignore]
        from mlflow.exceptions import MlflowException  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MachineError("MLflow is not installed; pip install mlflow-skinny") from None
    rows = list(_scalars(printed))
    begin = ended - max((row.seconds for row in rows), default=0.0)
    metrics = [Metric(row.tag, row.value, int(1000 * (begin + row.seconds)), row.step) for row in rows]
    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(experiment)
        made = client.create_run(known.experiment_id if known else client.create_experiment(experiment), int(1000 * begin), run_name=name)
        run_id: str = made.info.run_id
        client.log_batch(run_id, params=[Param(key, str(printed[key])) for key in ("device", "ranks") if key in printed])
        most = 1000  # metrics that one request may have
        for first in range(0, len(metrics), most):
            client.log_batch(run_id, metrics=metrics[first:first + most])
        client.set_terminated(run_id, "KILLED" if printed.get("interrupted") else "FINISHED", int(1000 * ended))
    except MlflowException as error:
        raise MachineError(f"MLflow: {' '.join(str(error).split())}") from None
    return run_id


def _read(run: RunLike) -> tuple[Mapping[str, Any], float]:
    """The run, and when it ended: when its file was written, or now."""
    if isinstance(run, Mapping):
        printed, ended, place = run, time.time(), "the run"
    else:
        place = "standard input" if str(run) == "-" else str(run)
        try:
            text = sys.stdin.read() if str(run) == "-" else pathlib.Path(run).read_text(encoding="utf-8")
            ended = time.time() if str(run) == "-" else os.stat(run).st_mtime
            printed = json.loads(text)
        except OSError as error:
            raise InputError(f"{place}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{place}: {error}; expected what run --json prints") from None
    if not isinstance(printed, Mapping) or printed.get("schema") != "shardwright-run":
        raise InputError(f"{place}: expected what run --json prints, with \"schema\": \"shardwright-run\"")
    return printed, ended


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _scalars(printed: Mapping[str, Any]) -> Iterator[Scalar]:
    before = 0.0
    for row in printed["steps"]:
        step, end = int(row["step"]), float(row["end_s"])
        for key in ("loss", "learning_rate", "gradient_norm"):
            if key in row:
                yield Scalar(f"train/{key}", step, end, _number(row[key]))
        yield Scalar("train/step_time_s", step, end, end - before)
        before = end
    for where, at, rows in (("epoch", "epoch", printed.get("epochs", [])), ("test", "step", printed.get("tests", []))):
        for row in rows:
            step = int(row[at])
            if "train_loss" in row:
                yield Scalar(f"{where}/train_loss", step, before, _number(row["train_loss"]))
            if "test_loss" in row:
                yield Scalar(f"{where}/loss", step, before, _number(row["test_loss"]))
                yield Scalar(f"{where}/accuracy", step, before, row["test_correct"] / max(row["test_count"], 1))


# An event file is a TFRecord file of protocol buffers of type Event (tensorboard/compat/proto/event.proto).


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _summary(row: Scalar) -> bytes:
    value = _bytes(1, row.tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", row.value)
    return _bytes(5, _bytes(1, value))


def _event(when: float, step: int, content: bytes) -> bytes:
    return _varint(1 << 3 | 1) + struct.pack("<d", when) + _varint(2 << 3) + _varint(step) + content


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # CRC-32C, reversed
        table.append(byte)
    return table


_CRC = _crc_table()


def _masked_crc(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _masked_crc(length) + content + _masked_crc(content)


def main(words: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwright.log", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", metavar="RUN", help="what run --json printed: a file, or - for standard input")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write an event file into it")
    parser.add_argument("--mlflow", metavar="URI", help="make a run at this tracking URI")
    parser.add_argument("--experiment", default="shardwright", help="MLflow's experiment (default shardwright)")
    parser.add_argument("--name", help="MLflow's name of the run")
    given = parser.parse_args(words)
    try:
        if given.tensorboard is None and given.mlflow is None:
            raise UsageError("expected --tensorboard FOLDER, --mlflow URI or both")
        run = _read(given.run)
        if given.tensorboard is not None:
            print(f"Wrote {_write_events(*run, pathlib.Path(given.tensorboard))}")
        if given.mlflow is not None:
            print(f"Made run {_make_run(*run, given.mlflow, given.experiment, given.name)} of {given.experiment}")
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 3 if isinstance(error, InputError) else 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
