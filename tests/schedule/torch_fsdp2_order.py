"""The collectives of a real FSDP2 run, in the order of PyTorch's profiler, are those of our fsdp2 program.

    python3 tests/schedule/torch_fsdp2_order.py SHARDWRIGHT [--verbose]

Four processes train small networks over gloo; rank 0 records two steps of every case with the profiler. Compared are kind,
order, elements in and out and dtype of every all-gather, reduce-scatter and all-reduce, in the first step and in a later one.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.multiprocessing
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.profiler import ProfilerActivity, profile
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

from fsdp2_networks import (Case, Network, Unit, backward_settings, blocks, model_json, plan_json, root,  # noqa: F401
                            shard_module)

RANKS = 4
EVEN = Network(vocabulary=24, width=8, hidden=16)
FP32 = ("fp32", "fp32", "fp32")


def inner_first(ahead=False):
    """Blocks whose linears are units inside the block's unit, the first asking for the second if `ahead`."""
    units = []
    for i in range(3):
        units.append(Unit([f"blocks.{i}.fc1"], forward_prefetch=(f"blocks.{i}.fc2",) if ahead else ()))
        units += [Unit([f"blocks.{i}.fc2"])] if ahead else []
        units.append(Unit([f"blocks.{i}"]))
    return units + [root()]


def explicit(depth):
    """Every block asks for the next `depth` blocks in forward and the previous `depth` in backward."""
    units = []
    for i in range(5):
        ahead = tuple(f"blocks.{j}" for j in range(i + 1, min(5, i + 1 + depth)))
        behind = tuple(f"blocks.{j}" for j in range(i - 1, max(-1, i - 1 - depth), -1))
        units.append(Unit([f"blocks.{i}"], forward_prefetch=ahead, backward_prefetch=behind))
    return units + [root()]


ENDS = [Unit(["embed"]), *blocks(), Unit(["norm", "head"], reshard=False), root()]
TIED = Network(tied=True)

CASES = [
    Case("default", [*blocks(), root()]),
    Case("fp32", [*blocks(), root()], precision=FP32),
    Case("bf16 reduction", [*blocks(), root()], precision=("fp32", "bf16", "bf16")),
    Case("even shards", [*blocks(), root()], network=EVEN),
    Case("two ranks per copy, two copies", [*blocks(), root()], shard=2, replicate=2),
    Case("root only", [root()]),
    Case("root freed after forward", [*blocks(), root(reshard=True)]),
    Case("kept after forward", [*blocks(reshard=False), root(reshard=False)]),
    Case("resharded to groups of two", [*blocks(reshard=2), root()], network=EVEN),
    Case("explicit prefetch of one", explicit(1), network=Network(layers=5)),
    Case("explicit prefetch of two", explicit(2), network=Network(layers=5)),
    Case("forward prefetch only", [Unit(["blocks.0"], forward_prefetch=("blocks.1", "blocks.2")), *blocks()[1:], root()]),
    Case("backward prefetch only", [*blocks(2), Unit(["blocks.2"], backward_prefetch=("blocks.1", "blocks.0")), root()]),
    Case("nested units", inner_first()),
    Case("grouped ends", ENDS),
    Case("group with a gap", [Unit(["embed", "norm"]), *blocks(), root()]),
    Case("two blocks per unit", [Unit(["blocks.0", "blocks.1"]), Unit(["blocks.2"]), root()]),
    Case("tied weights in the root", [*blocks(), root()], network=TIED),
    Case("tied ends in one unit", [Unit(["embed", "norm", "head"], reshard=False), *blocks(), root()], network=TIED),
    Case("every micro-batch reduced", [*blocks(), root()], accumulation=3),
    Case("reduced in the last micro-batch", [*blocks(), root()], accumulation=3, sync="last"),
    Case("kept and reduced last", [*blocks(reshard=False), root()], accumulation=2, sync="last"),
    Case("HSDP, every micro-batch", ENDS, shard=2, replicate=2, accumulation=2),
    Case("HSDP, all-reduce last", ENDS, shard=2, replicate=2, accumulation=3, sync="replicate_last"),
    Case("HSDP, reduced last", [*blocks(), root()], shard=2, replicate=2, accumulation=2, sync="last"),
    Case("recomputed blocks", [*blocks(), root()], recompute=("blocks.0", "blocks.1", "blocks.2")),
    Case("recomputed nested units", inner_first(), recompute=("blocks.0", "blocks.1", "blocks.2")),
    Case("recomputed nested units, explicit prefetch", inner_first(ahead=True),
         recompute=("blocks.0", "blocks.1", "blocks.2")),
    Case("frozen embedding", ENDS, frozen=("embed.weight",)),
    Case("frozen first block", [*blocks(), root()],
         frozen=("embed.weight", "blocks.0.fc1.weight", "blocks.0.fc1.bias", "blocks.0.fc2.weight", "blocks.0.fc2.bias")),
    Case("frozen biases", [*blocks(), root()], frozen=tuple(f"blocks.{i}.fc1.bias" for i in range(3))),
]

TORCH_NAMES = {"c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter",
               "c10d::allreduce_": "all_reduce"}
OUR_NAMES = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce"}
TORCH_DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
OUR_DTYPES = {"Float": "fp32", "BFloat16": "bf16", "Half": "fp16"}


def profiled_collectives(path):
    """(kind, elements in, elements out, dtype) of the c10d calls of an exported profiler trace, in call order."""
    found = []
    events = json.loads(path.read_text())["traceEvents"]
    for event in sorted((e for e in events if e.get("name") in TORCH_NAMES), key=lambda e: e["ts"]):
        kind = TORCH_NAMES[event["name"]]
        dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
        if kind == "all_reduce":
            # The list's dtype is not in the trace; the tensor is the reduce-scatter's output.
            found.append((kind, dims[0][0][0], dims[0][0][0], found[-1][3]))
        else:
            found.append((kind, dims[1][0], dims[0][0], TORCH_DTYPES[types[0]]))
    return found


def train_step(case, model, ids, labels):
    for micro_batch in range(case.accumulation):
        backward_settings(case, model, micro_batch)
        model(ids, labels).backward()


def record(case, model, folder, rank):
    torch.manual_seed(1)
    ids = torch.randint(case.network.vocabulary, (case.micro_batch, case.network.sequence))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    for step in range(2):
        if rank == 0:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
                train_step(case, model, ids, ids)
            profiler.export_chrome_trace(str(folder / f"{case.name}.{step}.json"))
        else:
            train_step(case, model, ids, ids)
        optimizer.step()
        optimizer.zero_grad()


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    meshes = {(RANKS, 1): init_device_mesh("cpu", (RANKS,)),
              (2, 2): init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    for case in CASES:
        record(case, shard_module(case, meshes[case.shard, case.replicate]), folder, rank)
    distributed.barrier()
    distributed.destroy_process_group()


def our_collectives(program, case, folder):
    """The same of our program: of its first step and of the last simulated one."""
    plan, trace = folder / "plan.json", folder / "trace.json"
    plan.write_text(json.dumps(plan_json(case)))
    result = subprocess.run([program, "simulate", str(plan), "--json", "--trace", str(trace)], capture_output=True,
                            text=True, check=False)
    assert result.returncode == 0, f"{case.name}: {result.stderr}"
    steps = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        args = event.get("args", {})
        if "Collective name" in args and event["cat"] == "kernel":
            steps.setdefault(args["step"], []).append(
                (args["correlation"], (OUR_NAMES[args["Collective name"]], args["In msg nelems"],
                                       args["Out msg nelems"], OUR_DTYPES[args["dtype"]])))
    ordered = [[row for _, row in sorted(steps[step])] for step in sorted(steps)]
    return [ordered[0], ordered[-1]]


def agree(case, ours, theirs, verbose):
    if ours == theirs:
        return True
    print(f"FAILED {case.name}: {len(ours)} collectives in ours, {len(theirs)} in PyTorch's")
    for i in range(max(len(ours), len(theirs))):
        a = ours[i] if i < len(ours) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b or verbose:
            print(f"  {i:3d} ours {a}, PyTorch's {b}{'' if a == b else '   <<<'}")
    return False


def main(arguments):
    program, verbose = arguments[0], "--verbose" in arguments
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        context = torch.multiprocessing.get_context("fork")
        workers = [context.Process(target=work, args=(rank, folder)) for rank in range(RANKS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            print("FAILED: a PyTorch process ended with", [worker.exitcode for worker in workers])
            return 1
        for case in CASES:
            ours = our_collectives(program, case, folder)
            theirs = [profiled_collectives(folder / f"{case.name}.{step}.json") for step in range(2)]
            assert theirs[0], case.name
            good = all([agree(case, ours[step], theirs[step], verbose) for step in range(2)])
            failures += not good
            if good:
                print(f"{case.name}: {len(theirs[1])} collectives per step, equal")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    sys.exit(main(sys.argv[1:]))
