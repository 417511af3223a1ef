"""Groups of gloo processes that stay alive over many cases, and what a framework communicates in them.

A job is a function of (rank, argument) in a module of this folder; all ranks run it. Its result comes back from every rank, or
the error as text. A group that does not answer in time is ended and replaced. `Recorder` notes every collective that Python
asks for, in order.
"""

import importlib
import inspect
import os
import pathlib
import sys
import tempfile
import traceback

import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed import _functional_collectives as functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

TIMEOUT = 240.0  # seconds for a job, on a busy machine
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Failure(Exception):
    """A job failed in the framework; the text is the last line of the error of the lowest rank that has one."""


def work(rank, world, store, pipe, backend):
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "OFF")
    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        job = pipe.recv()
        if job is None:
            return
        module, function, argument = job
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(rank, argument)))
        except Exception as error:  # pylint: disable=broad-except
            text = str(error).strip() or repr(error)
            pipe.send((False, (type(error).__name__, text, traceback.format_exc())))


class Pool:
    """`world` processes in one group; or rank 0 alone where the backend is "fake", whose collectives move nothing."""

    def __init__(self, world, backend="gloo"):
        self.world, self.backend, self.workers, self.pipes = world, backend, [], []
        self.folder = None

    def start(self):
        context = torch.multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.workers, self.pipes = [], []
        for rank in range(1 if self.backend == "fake" else self.world):
            here, there = context.Pipe()
            worker = context.Process(target=work, args=(rank, self.world, f"{self.folder.name}/store", there, self.backend), daemon=True)
            worker.start()
            self.workers.append(worker)
            self.pipes.append(here)

    def stop(self):
        for pipe, worker in zip(self.pipes, self.workers):
            if worker.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    pass
        for worker in self.workers:
            worker.join(2)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self.workers = []

    def run(self, module, function, argument):
        """The results of all ranks, lowest first. Raises Failure."""
        if not self.workers:
            self.start()
        for pipe in self.pipes:
            pipe.send((module, function, argument))
        answers = []
        for pipe in self.pipes:
            try:
                if not pipe.poll(TIMEOUT):
                    raise EOFError
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, ("Hang", f"no answer in {TIMEOUT:.0f} s, or the process ended", "")))
                for worker in self.workers:
                    worker.kill()
        failed = [answer for good, answer in answers if not good]
        if failed:
            if any(kind == "Hang" for kind, _, _ in failed):
                self.stop()
            kind, text, trace = next((f for f in failed if f[0] != "Hang"), failed[0])
            failure = Failure(f"{kind}: {text.splitlines()[0]}")
            failure.trace = trace
            raise failure
        return [answer for _, answer in answers]


class Pools:
    """One group per number of ranks, started when it is needed."""

    def __init__(self, backend="gloo"):
        self.pools, self.backend = {}, backend

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pool in self.pools.values():
            pool.stop()

    def run(self, world, module, function, argument):
        return self.pools.setdefault(world, Pool(world, self.backend)).run(module, function, argument)


def elements(tensors):
    """Of a tensor, or of a list of them."""
    return sum(t.numel() for t in tensors) if isinstance(tensors, list) else tensors.numel()


class Recorder:
    """While it is entered: (kind, group, elements in, elements out, dtype) of each collective.

    `groups` gives names to tuples of ranks; `more()` is a tuple of what else is to be noted each time.
    """

    def __init__(self, groups, more=tuple):
        self.groups, self.more, self.found, self.saved, self.depth = groups, more, [], [], 0

    def name_of(self, group):
        if isinstance(group, tuple):  # a mesh and its dimension
            group = group[0].get_group(group[1])
        ranks = tuple(distributed.get_process_group_ranks(group if group is not None else distributed.group.WORLD))
        return self.groups.get(ranks, str(ranks))

    def replace(self, owner, name, kind, source, result):
        original = getattr(owner, name, None)
        if original is None:
            return
        signature = inspect.signature(original)

        def call(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            if self.depth == 0:
                read, written = given[source], given[result]
                self.found.append((kind, self.name_of(given.get("group")), elements(read), elements(written),
                                   NAMES.get(read.dtype, str(read.dtype)), *self.more()))
            self.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        self.saved.append((owner, name, original))
        setattr(owner, name, call)

    def __enter__(self):
        for name in ("all_gather_single", "all_gather_into_tensor", "all_gather"):  # since and before torch 2.13; lists
            self.replace(distributed, name, "all_gather", *self.tensors(name))
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            self.replace(distributed, name, "reduce_scatter", *self.tensors(name))
        self.replace(distributed, "all_reduce", "all_reduce", "tensor", "tensor")
        self.replace(functional, "all_reduce", "all_reduce", "self", "self")
        return self

    @staticmethod
    def tensors(name):
        """The names of the input and of the output among the arguments."""
        function = getattr(distributed, name, None)
        names = list(inspect.signature(function).parameters) if function else ["", ""]
        return names[1], names[0]

    def __exit__(self, *_):
        for owner, name, original in reversed(self.saved):
            setattr(owner, name, original)
        self.saved = []

    def take(self):
        found, self.found = self.found, []
        return found
