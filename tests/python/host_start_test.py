"""Host memory that loading and saving take: peaks of two gloo ranks under torch against what `simulate --json` says of such a node.

    python3 tests/python/host_start_test.py SHARDWRIGHT

Memory is anonymous memory of both processes above what each had before. A CPU is device and host at once, so the shards, which are
there before, are not counted, as those on a GPU would not be.
"""

import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import distributed, multiprocessing, nn
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

LAYERS, WIDTH = 32, 1024  # 128 MiB in fp32
RANKS = 2
WHOLE = 4 * LAYERS * WIDTH**2
WHAT = ("load: every rank the whole model", "load: rank 0, then broadcast", "load: shards (DCP)", "save: whole state dict on rank 0",
        "save: shards (DCP)", "save: shards, async_save (training stands still)")


def network(device="cpu"):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def anonymous():
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])


def peak_of(action):
    """Bytes above those before, at most; and what the action returns."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = most = anonymous()
    ends = threading.Event()

    def watch():
        nonlocal most
        while not ends.wait(0.001):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    result = action()
    most = max(most, anonymous())
    ends.set()
    thread.join()
    return most - before, result


def whole_model(path):
    model = network("meta")
    model.load_state_dict(torch.load(path), assign=True)
    return model


def measure(rank, folder):
    """Writes the peak of each way, summed over the ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    if rank == 0:
        torch.save(network().state_dict(), f"{folder}/whole.pt")
    distributed.barrier()
    peaks = [peak_of(lambda: whole_model(f"{folder}/whole.pt"))[0]]
    mesh = init_device_mesh("cpu", (RANKS,))
    model = network("meta")
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def broadcast():
        state = torch.load(f"{folder}/whole.pt") if rank == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    def state():
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    save = peak_of(lambda: dcp.save(state(), checkpoint_id=f"{folder}/shards"))[0]
    peaks += [peak_of(broadcast)[0], peak_of(lambda: dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/shards"))[0],
              peak_of(lambda: get_state_dict(model, optimizer, options=whole))[0], save,
              peak_of(lambda: dcp.async_save(state(), checkpoint_id=f"{folder}/later").result())[0]]
    sums = torch.tensor(peaks, dtype=torch.float64)
    distributed.all_reduce(sums)
    if rank == 0:
        pathlib.Path(folder, "peaks.json").write_text(json.dumps(dict(zip(WHAT, sums.tolist()))), encoding="utf-8")
    distributed.destroy_process_group()


def predicted(program, folder):
    """What `simulate` says of the same network on a node of two ranks."""
    modules = [{"name": str(i), "class": "Linear", "params": [{"name": "weight", "shape": [WIDTH, WIDTH]}]} for i in range(LAYERS)]
    ops = [{"op": "linear", "module": str(i), "inputs": [f"x{i}" if i else "x"], "output": f"x{i + 1}"} for i in range(LAYERS)]
    ops.append({"op": "cross_entropy", "inputs": [f"x{LAYERS}", "label"], "output": "loss"})
    model = {"format": "shardwright-model", "version": 1, "class": "Net", "inputs": {"x": {"shape": [WIDTH]}, "label": {"ids": 1}},
             "modules": modules, "ops": ops}
    pathlib.Path(folder, "net.json").write_text(json.dumps(model), encoding="utf-8")
    subprocess.run([program, "plan", "--no-search", "--model", "net.json", "--cluster", "2xA100-80", "--precision", "fp32", "-o", "plan.json"],
                   cwd=folder, check=True, capture_output=True)
    answer = json.loads(subprocess.run([program, "simulate", "plan.json", "--json"], cwd=folder, check=True, capture_output=True).stdout)
    return {row["what"]: row["host_peak_bytes_per_node"] for row in answer["memory"]["to_load_and_save"]}


class HostStart(unittest.TestCase):
    def test_peaks_are_those_of_torch(self):
        with tempfile.TemporaryDirectory() as folder:
            said = predicted(PROGRAM, folder)
            self.assertEqual(tuple(said), WHAT)
            # By hand: 128 MiB of weights, three times that with Adam's states; what passes is one tensor of 32.
            self.assertEqual([said[what] / WHOLE for what in WHAT], [2, 1 + 1 / 32, 1 / 32, 3, 1 / 32, 3])
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed goes back at once, as large tensors do by themselves
            multiprocessing.spawn(measure, (folder,), nprocs=RANKS)
            measured = json.loads(pathlib.Path(folder, "peaks.json").read_text(encoding="utf-8"))
        for what in WHAT:
            print(f"{what}: {measured[what] / WHOLE:.2f} measured, {said[what] / WHOLE:.2f} predicted, of the model's bytes")
        for what in WHAT:  # buffers of gloo and of serialization, a few tensors on their way
            self.assertLess(abs(measured[what] - said[what]), 0.15 * WHOLE, what)


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
