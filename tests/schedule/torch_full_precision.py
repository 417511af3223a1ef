"""Batch norms in full precision under real FSDP2 and FSDP1: what shardwright emits moves what our programs move.

    python3 tests/schedule/torch_full_precision.py SHARDWRIGHT

Two gloo processes train a small ConvNet that the emitted files have wrapped, in bf16 with its norms in fp32. Compared are kind,
elements and dtype of all collectives of a step with those of the program, and the dtypes that the norms see.
"""

import collections
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.multiprocessing
    from torch import distributed, nn
    from torch.profiler import ProfilerActivity, profile
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

RANKS = 2
BATCH = 4
CALLS = {"c10d::_allgather_base_": ("all_gather", 1, 0), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 1)}
OURS = {"_allgather_base": ("all_gather", "In msg nelems"), "_reduce_scatter_base": ("reduce_scatter", "In msg nelems")}
DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "Float": "fp32", "BFloat16": "bf16"}


class Block(nn.Module):

    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(2, 4), Block(4, 6)])
        self.fc = nn.Linear(24, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.fc(x.flatten(1))


def model_json():
    def block(i, channels_in, channels_out):
        size = [{"name": n, "shape": [channels_out]} for n in ("weight", "bias")]
        return {"name": str(i), "class": "Block", "modules": [
            {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [channels_out, channels_in, 3, 3]}]},
            {"name": "norm", "class": "BatchNorm2d", "buffers": 2 * channels_out, "full_precision": True, "params": size}]}

    ops = []
    for i in range(2):
        ops += [{"op": "conv2d", "module": f"blocks.{i}.conv", "inputs": [f"x{i}"], "output": f"a{i}"},
                {"op": "batch_norm", "module": f"blocks.{i}.norm", "inputs": [f"a{i}"], "output": f"b{i}"},
                {"op": "activation", "module": f"blocks.{i}", "function": "relu", "inputs": [f"b{i}"], "output": f"x{i + 1}"}]
    return {"format": "shardwright-model", "version": 1, "class": "Net", "block_class": "Block",
            "inputs": {"x0": {"shape": [2, 6, 6]}, "y": {"ids": 1}},
            "modules": [{"name": "blocks", "class": "ModuleList", "modules": [block(0, 2, 4), block(1, 4, 6)]},
                        {"name": "fc", "class": "Linear", "params": [{"name": "weight", "shape": [4, 24]},
                                                                     {"name": "bias", "shape": [4]}]}],
            "ops": ops + [{"op": "flatten", "inputs": ["x2"], "output": "f"},
                          {"op": "linear", "module": "fc", "inputs": ["f"], "output": "z"},
                          {"op": "cross_entropy", "name": "loss", "inputs": ["z", "y"], "output": "loss"}]}


def run(program, folder, *arguments):
    result = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def our_collectives(program, folder):
    """(kind, elements sent, dtype) of the last simulated step, counted."""
    run(program, folder, "simulate", "plan.json", "--json", "--trace", "t.json")
    found = collections.defaultdict(list)
    for event in json.loads((folder / "t.json").read_text())["traceEvents"]:
        args = event.get("args", {})
        if args.get("Collective name") in OURS and event["cat"] == "kernel":
            kind, size = OURS[args["Collective name"]]
            found[args["step"]].append((kind, args[size], DTYPES[args["dtype"]]))
    return collections.Counter(found[max(found)])


def step(model, optimizer):
    images = torch.randn(BATCH, 2, 6, 6)
    nn.functional.cross_entropy(model(images).float(), torch.arange(BATCH) % 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def work(rank, folder, target):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path.insert(0, str(folder / "emitted"))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store-{target}", rank=rank, world_size=RANKS)
    net = Net()
    seen = set()

    def look(norm, inputs):
        seen.add((str(norm.weight.dtype), str(norm.bias.dtype), str(inputs[0].dtype)))

    for block in net.blocks:
        block.norm.register_forward_pre_hook(look)
    more = {"device_id": torch.device("cpu")} if target == "fsdp1" else {}
    model = importlib.import_module(f"shardwright_{target}").apply_plan(
        net, str(folder / "emitted" / f"{target}_plan.json"), device_type="cpu", **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    seen.clear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step(model, optimizer)
    if rank == 0:
        profiler.export_chrome_trace(str(folder / f"{target}.json"))
        (folder / f"{target}.seen").write_text(json.dumps(sorted(seen)))
    distributed.barrier()
    distributed.destroy_process_group()


def their_collectives(path):
    found = collections.Counter()
    for event in json.loads(path.read_text())["traceEvents"]:
        args = event.get("args", {})
        if event.get("name") in CALLS:
            kind, sent, dtype = CALLS[event["name"]]
            found[kind, args["Input Dims"][sent][0], DTYPES[args["Input type"][dtype]]] += 1
        elif event.get("name") == "c10d::allgather_":  # FSDP1 on CPUs: lists, whose dtype is not in the trace
            found["all_gather", args["Input Dims"][1][0][0], None] += 1
    return found


def main(program):
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "net.json").write_text(json.dumps(model_json()))
        for target in ("fsdp2", "fsdp1"):
            run(program, folder, "plan", "--model", "net.json", "--cluster", f"a100-80 x{RANKS}, nvlink 300 GB/s", "--dialect",
                target, "--precision", "bf16-mixed", "--micro-batch", str(BATCH), "-o", "plan.json")
            run(program, folder, "emit", "plan.json", "--to", target, "-o", "emitted/")
            context = torch.multiprocessing.get_context("fork")
            workers = [context.Process(target=work, args=(rank, folder, target)) for rank in range(RANKS)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert not any(worker.exitcode for worker in workers), f"{target}: a PyTorch process failed"
            ours, theirs = our_collectives(program, folder), their_collectives(folder / f"{target}.json")
            if target == "fsdp1":
                ours = collections.Counter({(kind, n, None if kind == "all_gather" else dtype): count
                                            for (kind, n, dtype), count in ours.items()})
            seen = json.loads((folder / f"{target}.seen").read_text())
            good = ours == theirs and seen == [["torch.float32", "torch.float32", "torch.bfloat16"]]
            failures += not good
            print(f"{'ok' if good else 'FAILED'} {target}: {sum(theirs.values())} collectives, norms see {seen}")
            if ours != theirs:
                print(f"  only ours {dict(ours - theirs)}\n  only PyTorch's {dict(theirs - ours)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(os.path.abspath(sys.argv[1])))
