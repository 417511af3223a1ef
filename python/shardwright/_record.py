"""A few steps of a running job, recorded by PyTorch's profiler, beside the prediction of its plan. Needs torch."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import time
import warnings
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from . import _live
from ._errors import MachineError, UsageError
from ._export.model_export import outside
from ._results import AdviceReport, Comparison, advise, compare
from ._run import PlanLike


class Recording:
    """The context that record() makes. Call step() after each step of training."""

    def __init__(self, plan: PlanLike, folder: Union[str, "os.PathLike[str]"], wait: int, warmup: int, steps: int,
                 memory_snapshot: bool) -> None:
        if min(wait, warmup) < 0 or steps < 1:
            raise UsageError("record: expected wait and warmup of at least 0 and steps of at least 1")
        self.plan = plan
        self.folder = pathlib.Path(folder)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._has_gpu = torch.cuda.is_available()
        self._memory = memory_snapshot and self._has_gpu
        self._schedule = schedule(wait=wait, warmup=warmup, active=steps, repeat=1)
        self._first = wait + warmup
        self._last = self._first + steps
        self._step = 0
        self._profile: Optional[profile] = None
        self.changed: list[str] = []  # settings of FSDPModule that are no longer the plan's

    def __enter__(self) -> "Recording":
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in (self._file(self.rank), self._snapshot()):
            stale.unlink(missing_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._has_gpu else [])]
        self._profile = profile(activities=activities, schedule=self._schedule, record_shapes=True, profile_memory=True,
                                on_trace_ready=self._save)
        self._profile.start()
        self._begin_recorded()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def step(self) -> None:
        """Ends a step. Before and after the recorded ones it does next to nothing."""
        if self._profile is None:
            return
        self._look_at_settings()
        self._step += 1
        self._profile.step()
        if self._step >= self._last:
            self._end()
        else:
            self._begin_recorded()

    @property
    def is_complete(self) -> bool:
        """Have all steps that were asked for been recorded?"""
        return self._step >= self._last

    def traces(self, patience: float = 60.0) -> list[pathlib.Path]:
        """The recordings of all ranks, in a folder that all of them see. Waits for those of ranks that are slower."""
        files = [self._file(rank) for rank in range(self.ranks)]
        until = time.monotonic() + patience
        while not all(file.exists() for file in files):
            if time.monotonic() > until or not self.is_complete:
                missing = ", ".join(str(file) for file in files if not file.exists())
                raise MachineError(f"record: no {missing}; each rank writes its own after {self._last} calls of step()")
            time.sleep(0.05)
        return files

    def compare(self, **flags: Any) -> Comparison:
        """What was measured beside what was predicted; one rank may ask alone."""
        return compare(self.plan, *self.traces(), **flags)

    def advise(self, **flags: Any) -> AdviceReport:
        """What the job should change, and the better plan; one rank may ask alone."""
        return advise(*self.traces(), plan=self.plan or None, **flags)

    def _look_at_settings(self) -> None:
        """Warns once of each setting of fully_shard that was changed after apply(): the plan's prediction is of another run."""
        for line in _live.changed_settings():
            if line not in self.changed:
                self.changed.append(line)
                warnings.warn(f"record: the model is no longer as the plan says: {line}", stacklevel=3)

    def _file(self, rank: int) -> pathlib.Path:
        return self.folder / f"rank{rank}.json.gz"

    def _snapshot(self) -> pathlib.Path:
        return self.folder / f"rank{self.rank}.memory.pickle"

    def _begin_recorded(self) -> None:
        """Before the first recorded step: what the recording is of, and a log of the allocator on a GPU."""
        if self._step != self._first or self._profile is None:
            return
        about = {"rank": self.rank, "ranks": self.ranks, "host": platform.node(), "torch": torch.__version__,
                 "device": torch.cuda.get_device_name() if self._has_gpu else platform.processor() or platform.machine()}
        self._profile.add_metadata_json("recorded", json.dumps(about))
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    def _save(self, profiler: profile) -> None:
        with outside.replacing(self._file(self.rank), follows=False) as unfinished:
            profiler.export_chrome_trace(str(unfinished))
        if self._memory:
            with outside.replacing(self._snapshot(), follows=False) as unfinished:
                torch.cuda.memory._dump_snapshot(str(unfinished))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _end(self) -> None:
        if self._profile is not None:
            ended, self._profile = self._profile, None
            ended.stop()


def record(plan: PlanLike, folder: Union[str, "os.PathLike[str]"] = "shardwright-recording", *, wait: int = 2, warmup: int = 1,
           steps: int = 2, memory_snapshot: bool = True) -> Recording:
    """Records `steps` steps of the job that trains by `plan`, after `wait` others and `warmup` in which the profiler starts.

        with shardwright.record(plan) as recording:
            for batch in batches:
                train(batch)
                recording.step()
        if recording.rank == 0:
            print(recording.advise())

    Each rank writes FOLDER/rankN.json.gz, and on a GPU a memory snapshot of the recorded steps.
    """
    return Recording(plan, folder, wait, warmup, steps, memory_snapshot)


def trainer_callback(plan: PlanLike, folder: Union[str, "os.PathLike[str]"] = "shardwright-recording", **options: Any) -> Any:
    """A callback of transformers' Trainer that records steps as record() does, with its options; callback.recording is what it made.

        callback = shardwright.trainer_callback(plan)
        Trainer(..., callbacks=[callback]).train()
        print(callback.recording.compare())
    """
    from transformers import TrainerCallback

    class RecordCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.recording: Optional[Recording] = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.recording = record(plan, folder, **options).__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.recording is not None:
                self.recording.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.recording is not None:
                self.recording.__exit__()

    return RecordCallback()
