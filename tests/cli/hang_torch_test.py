"""shardwright hang on dumps of PyTorch's Flight Recorder: faults planted into FSDP2 jobs under gloo, and jobs without any.

    python3 tests/cli/hang_torch_test.py SHARDWRIGHT

Each job is 2 to 4 processes. The truth about a fault (unit, phase, micro-batch, step) comes from FSDP2's own objects at the
moment when it is planted. SHARDWRIGHT_DEEP=1: 40 faults and 40 jobs without.
"""

import ctypes
import json
import multiprocessing
import os
import pathlib
import random
import sys
import tempfile
import threading
import time
import unittest
from datetime import timedelta

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "schedule"))

try:
    import torch
    import torch._dynamo  # noqa: F401  # FSDP2 imports it: once here, not in every process
    from torch import distributed, nn
    from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

from shardwright_test_case import ShardwrightTestCase, main  # noqa: E402

IS_DEEP = bool(os.environ.get("SHARDWRIGHT_DEEP"))
KINDS = ["skip", "swap", "size", "sleep", "crash"]
STEPS = 3
QUIET = 4.0  # seconds after a fault in which no rank issued or computed anything: the job hangs
SETTLED = 1.0  # the same, of the ranks without the fault, before the faulty one sends them anything


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.embed = nn.Embedding(21, job["width"])
        self.blocks = nn.ModuleList([Block(job["width"], hidden) for hidden in job["hidden"]])
        self.head = nn.Linear(job["width"], 21, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def plan_of(job):
    """The plan file: the model as model.json, and the units."""
    width, units = job["width"], len(job["hidden"])
    linear = lambda name, rows, columns, bias=True: {  # noqa: E731
        "name": name, "class": "Linear",
        "params": [{"name": "weight", "shape": [rows, columns]}] + ([{"name": "bias", "shape": [rows]}] if bias else [])}
    ops = [{"op": "embedding", "module": "embed", "inputs": ["ids"], "output": "x0"}]
    for i in range(units):
        ops += [{"op": "linear", "module": f"blocks.{i}.fc1", "inputs": [f"x{i}"], "output": f"a{i}"},
                {"op": "activation", "module": f"blocks.{i}", "function": "relu", "inputs": [f"a{i}"], "output": f"b{i}"},
                {"op": "linear", "module": f"blocks.{i}.fc2", "inputs": [f"b{i}"], "output": f"c{i}"},
                {"op": "add", "module": f"blocks.{i}", "inputs": [f"x{i}", f"c{i}"], "output": f"x{i + 1}"}]
    ops += [{"op": "linear", "module": "head", "inputs": [f"x{units}"], "output": "logits"},
            {"op": "cross_entropy", "name": "loss", "inputs": ["logits", "labels"], "output": "loss"}]
    model = {
        "format": "shardwright-model", "version": 1, "class": "Net", "block_class": "Block", "sequence_length": 6,
        "inputs": {"ids": {"ids": "sequence_length"}, "labels": {"ids": "sequence_length"}},
        "modules": [
            {"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [21, width]}]},
            {"name": "blocks", "class": "ModuleList", "modules": [
                {"name": str(i), "class": "Block",
                 "modules": [linear("fc1", hidden, width), linear("fc2", width, hidden)]}
                for i, hidden in enumerate(job["hidden"])]},
            linear("head", 21, width, bias=False)], "ops": ops}
    names = [f"blocks.{i}" for i in range(units)]
    return {
        "format": "shardwright-plan", "version": 1, "model": {"name": "net", "json": model},
        "kernel_set": {"name": "torch-eager", "fp32_logits": False},
        "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": job["shard"] * job["replicate"]},
        "profile": {"name": "a100-torch-eager"},
        "job": {"mode": "train", "sequence_length": 6, "precision": {"master": "fp32", "param": "fp32", "reduce": "fp32"},
                "optimizer": {"kind": "adamw", "impl": "foreach", "weight_decay": True}, "clip_gradients": False, "frozen": []},
        "plan": {"dialect": "fsdp2", "shard_size": job["shard"], "replicate_size": job["replicate"], "micro_batch": 1,
                 "accumulation": job["accumulation"], "sync": job["sync"], "recompute": [],
                 "units": [{"name": name, "modules": [name], "reshard": "always"} for name in names]
                 + [{"name": "root", "modules": [""], "reshard": "never"}]}}


def random_job(seed):
    rng = random.Random(seed)
    shard, replicate = rng.choice([(2, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
    accumulation = rng.choice([1, 2])
    hidden = rng.sample(range(8, 40), rng.choice([2, 3, 4]))
    return {"width": rng.choice([6, 8, 10]), "hidden": hidden, "shard": shard, "replicate": replicate, "seed": seed,
            "accumulation": accumulation, "sync": rng.choice(["every", "last"]) if accumulation > 1 else "every",
            "form": rng.choice(["pickle", "pickle", "json"])}


def place():
    """(unit, phase) of the collective that is being issued, as FSDP2 itself knows it."""
    frame = sys._getframe(2)
    while frame is not None:
        group = frame.f_locals.get("self")
        if type(group).__name__ == "FSDPParamGroup":
            phase = "forward" if group._training_state.name == "FORWARD" else "backward"
            return group._module_fqn or "root", phase
        frame = frame.f_back
    return None, None


class Planter:
    """Counts the collectives of FSDP2 on a rank and does something else at one of them."""

    def __init__(self, job, rank, progress):
        self.fault = job.get("fault") if job.get("fault") and job["fault"]["rank"] == rank else None
        self.job, self.rank, self.progress, self.count, self.held = job, rank, progress, 0, None
        self.is_recording = bool(job.get("fault")) and job["fault"]["kind"] in ("skip", "swap", "size")
        self.micro_batch = self.step = 0
        self.truth = pathlib.Path(job["folder"]) / "truth.json"
        for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(distributed, name):
                setattr(distributed, name, self.patched(getattr(distributed, name)))

    def patched(self, original):
        recorded = self.recorded(original) if self.is_recording else original

        def call(*args, **kwargs):
            self.progress.value += 1
            self.count += 1
            if self.is_recording and self.fault and self.count == self.fault["at"] + (self.fault["kind"] != "size"):
                self.settle()
            if self.held is not None:
                held, self.held = self.held, None
                works = [original(*args, **{**kwargs, "async_op": True}), held()]
                write_dump(self.job, self.rank)  # of both: gloo may end this process at once
                return [work.wait() for work in works][0]
            if self.fault is None or self.count != self.fault["at"]:
                return recorded(*args, **kwargs)
            unit, phase = place()
            self.truth.write_text(json.dumps({"unit": unit, "phase": phase, "micro_batch": self.micro_batch,
                                              "step": self.step}))
            return self.do(recorded, args, kwargs)
        return call

    def settle(self):
        """Waits until the others have written down what they wait for: gloo ends a process that is sent more than it expects,
        which may be this one, too; then it leaves no dump."""
        folder = pathlib.Path(self.job["folder"])
        (folder / "settle").touch()
        while not (folder / "settled").exists():
            time.sleep(0.05)
        for dump in (folder / "dumps").glob(f"nccl_trace_rank_{self.rank}*"):
            dump.unlink()

    def recorded(self, original):
        """Writes a dump with every collective."""
        def call(*args, **kwargs):
            work = original(*args, **{**kwargs, "async_op": True})
            if self.step > 0:
                write_dump(self.job, self.rank)
            if kwargs.get("async_op"):
                return work
            work.wait()
            return None
        return call

    def do(self, original, args, kwargs):
        kind = self.fault["kind"]
        if kind == "skip":
            return None
        if kind == "swap":
            self.held = lambda: original(*args, **{**kwargs, "async_op": True})
            return None
        if kind == "size":  # one element more per rank
            more = [torch.zeros(t.numel() + (self.fault["world"] if t is max(tensors_of(args, kwargs), key=torch.numel) else 1))
                    for t in tensors_of(args, kwargs)]
            group = kwargs.get("group", args[2] if len(args) > 2 else None)
            return original(more[0], more[1], group=group)
        if kind == "crash":
            os._exit(1)
        time.sleep(3600)
        return None


def tensors_of(args, kwargs):
    """Output and input, in this order."""
    return [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)][:2]


def train(job, rank, planter):
    torch.manual_seed(0)
    model = Net(job)
    if job["replicate"] > 1:
        mesh = init_device_mesh("cpu", (job["replicate"], job["shard"]), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (job["shard"],))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(21, (1, 6))
    for planter.step in range(job.get("steps", STEPS)):
        for planter.micro_batch in range(job["accumulation"]):
            if job["sync"] == "last":
                model.set_requires_gradient_sync(planter.micro_batch + 1 == job["accumulation"])
            model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def write_dump(job, rank):
    """With the time of its content."""
    now = time.time()
    file = pathlib.Path(job["folder"]) / "dumps" / f"nccl_trace_rank_{rank}{'' if job['form'] == 'pickle' else '.json'}"
    content = _dump_fr_trace() if job["form"] == "pickle" else _dump_fr_trace_json()
    new = pathlib.Path(job["folder"]) / f"new{rank}.{threading.get_ident()}"
    new.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.utime(new, (now, now))
    new.rename(file)


def work(job, rank, world, progress, done):
    """One rank: trains until it is over or told to dump."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo tells of connections that end
    torch.set_num_threads(1)

    def write():
        while not (pathlib.Path(job["folder"]) / "dump").exists():
            time.sleep(0.05)
        write_dump(job, rank)
        os._exit(0)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    distributed.init_process_group("gloo", init_method=f"file://{job['folder']}/store", rank=rank, world_size=world,
                                   timeout=timedelta(seconds=600))
    try:
        train(job, rank, Planter(job, rank, progress))
        done.value = 1
    except Exception:  # pylint: disable=broad-except  # of gloo, which ends a job whose sizes differ
        pass
    writer.join()


def is_computing(worker):
    """Whether the main thread of the process could run now, however busy the machine is."""
    try:
        return pathlib.Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "RD"
    except OSError:
        return False


def run_job(job):
    """Dumps in job["folder"]/dumps, and truth.json where a fault was planted."""
    context = multiprocessing.get_context("fork")
    world = job["shard"] * job["replicate"]
    folder = pathlib.Path(job["folder"])
    (folder / "dumps").mkdir()
    progress = [context.Value(ctypes.c_int64, 0, lock=False) for _ in range(world)]
    done = [context.Value(ctypes.c_int64, 0, lock=False) for _ in range(world)]
    workers = [context.Process(target=work, args=(job, rank, world, progress[rank], done[rank]), daemon=True)
               for rank in range(world)]
    for worker in workers:
        worker.start()
    last, since, begin = -1, time.monotonic(), time.monotonic()
    while time.monotonic() - begin < 300:
        time.sleep(0.05)
        total = sum(value.value for value in progress)
        is_settling = (folder / "settle").exists() and not (folder / "settled").exists()
        is_planted = is_settling or (folder / "truth.json").exists()
        watched = [worker for rank, worker in enumerate(workers) if not is_settling or rank != job["fault"]["rank"]]
        if total != last or not is_planted or any(is_computing(worker) for worker in watched):
            last, since = total, time.monotonic()
        if is_settling and time.monotonic() - since > SETTLED:
            (folder / "settled").touch()
            since = time.monotonic()
        if all(value.value for value in done) or (job.get("stop_at") and total >= job["stop_at"]):
            break
        if time.monotonic() - since > QUIET:
            break
    (folder / "dump").touch()  # an Event waits for those that died
    for worker in workers:
        worker.join(60)
        if worker.is_alive():
            worker.kill()
            worker.join()


def collectives_of(job):
    """That FSDP2 issues on a rank in one step, the all-reduces of replicas aside: for choosing a place."""
    units, total = len(job["hidden"]), 0
    for micro_batch in range(job["accumulation"]):
        total += 2 * units + 1  # gathers; the root's stay
        if job["sync"] == "every" or micro_batch + 1 == job["accumulation"]:
            total += units + 1
    return total


def planted(seed):
    rng = random.Random(seed)
    job = random_job(seed)
    world, step = job["shard"] * job["replicate"], collectives_of(job)
    job["fault"] = {"kind": KINDS[seed % len(KINDS)], "rank": rng.randrange(world), "world": job["shard"],
                    "at": rng.randint(step + 1, 2 * step)}
    return job


class HangTorch(ShardwrightTestCase):

    def diagnose(self, job, *flags):
        plan = pathlib.Path(job["folder"]) / "plan.json"
        plan.write_text(json.dumps(plan_of(job)))
        code, out, err = self.run_program("hang", f"{job['folder']}/dumps", "--patience", "2 s", "--json", *flags,
                                          *([] if "--alone" in flags else ["--plan", str(plan)]))
        self.assertIn(err, ("", "warning: some ranks left no dump\n"), out)
        return code, json.loads(out)

    def run_in_folder(self, job):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        job["folder"] = folder.name
        run_job(job)

    def check_fault(self, seed):
        job = planted(seed)
        self.run_in_folder(job)
        truth = json.loads((pathlib.Path(job["folder"]) / "truth.json").read_text())
        code, report = self.diagnose(job)
        self.assertEqual((code, len(report["findings"])), (1, 1), (job, truth, report))
        finding = report["findings"][0]
        call = finding["expected"]
        kinds = {"skip": ["skipped"], "swap": ["swapped"], "size": ["other_size"], "sleep": ["late"], "crash": ["no_dump"]}
        # Gloo ends a process that is sent more than it expects; if that is the guilty one, its death is what is left.
        died = ["no_dump"] if report["missing"] == [job["fault"]["rank"]] else []
        self.assertIn(finding["kind"], kinds[job["fault"]["kind"]] + died, (job, truth, report))
        self.assertEqual((finding["ranks"], call["units"], call["phase"], call["micro_batch"], call["step"]),
                         ([job["fault"]["rank"]], [truth["unit"]], truth["phase"], truth["micro_batch"], truth["step"]),
                         (job, truth, report))

    def check_healthy(self, seed):
        job = random_job(seed)
        if seed % 2:  # dumps while it runs
            job["steps"] = 1000
            job["stop_at"] = random.Random(seed).randint(20, 300)
        self.run_in_folder(job)
        code, report = self.diagnose(job)
        self.assertEqual((code, report["findings"]), (0, []), job)
        self.assertEqual(report["ranks"], list(range(job["shard"] * job["replicate"])))

    def test_faults(self):
        for seed in range(40 if IS_DEEP else 5):
            with self.subTest(seed=seed):
                self.check_fault(seed)

    def test_no_faults(self):
        for seed in range(40 if IS_DEEP else 4):
            with self.subTest(seed=seed):
                self.check_healthy(seed)


if __name__ == "__main__":
    main()
