"""What torch_experts.py and torch_tensor.py share: networks under fully_shard in gloo processes, on meshes with another axis beside FSDP's."""

import json
import pathlib

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from program_collectives import first_difference
from torch_pool import Failure

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def linear(name, rows, columns, bias=True):
    """A linear layer of a model.json."""
    shapes = [{"name": "weight", "shape": [rows, columns]}] + ([{"name": "bias", "shape": [rows]}] if bias else [])
    return {"name": name, "class": "Linear", "params": shapes}


def random_flags(draw, shard, ranks, precisions):
    """Flags of plan for `ranks` data-parallel ranks, `shard` of which share a copy."""
    accumulation = draw.choice((1, 1, 2, 3))
    syncs = ["every"] + (["last"] if accumulation > 1 else []) + (["replicate_last"] if accumulation > 1 and shard < ranks else [])
    flags = [f"--shard {shard} --replicate {ranks // shard}", f"--accumulation {accumulation} --sync {draw.choice(syncs)}",
             "--precision " + draw.choice(precisions), "--clip " + draw.choice(("on", "off")),
             "--wrap " + draw.choice(("block", "torchtitan", "root")), "--micro-batch " + draw.choice(("1", "2"))]
    flags += draw.choice(([], ["--reshard never"], ["--reshard always"]))
    flags += draw.choice(([], ["--recompute full"], ["--recompute full:0.5"]))
    flags += draw.choice(([], [], ["--frozen embed.*"]))
    return " ".join(flags)


def made_by(ours, model, ranks, shard, other, flags):
    """What `plan` makes of a model.json; `other` is the axis in --shard, "tp=2"; `shard` is what flags do not say."""
    folder = pathlib.Path(ours.folder.name)
    (folder / "net.json").write_text(json.dumps(model), encoding="utf-8")
    words = flags.split()
    shard = words.pop(words.index("--shard") + 1) if "--shard" in words else str(shard)
    words = [w for w in words if w != "--shard"]
    for flag, value in (("--precision", "fp32"), ("--clip", "off"), ("--wrap", "block")):
        words += [] if flag in words else [flag, value]
    ours.call("plan", "--model", str(folder / "net.json"), "--cluster", f"a100-80 x{ranks}, nvlink 300 GB/s", "--kernel-set", "torch-eager",
              "--shard", f"{shard},{other}", "--no-search", *words, "-o", str(folder / "made.json"))
    return json.loads((folder / "made.json").read_text(encoding="utf-8"))


def wrap(model, plan, job, mesh_of, settings_of=lambda module: {}):
    """fully_shard as the plan's units have it; a unit's mesh and further settings are those of its first module."""
    precision = {k: DTYPES[v] for k, v in job["precision"].items()}
    if precision["master"] != torch.float32:
        model.to(precision["master"])
    policy = MixedPrecisionPolicy(param_dtype=precision["param"], reduce_dtype=precision["reduce"], cast_forward_inputs=False)
    first = {}
    for unit in plan["units"]:
        modules = [model.get_submodule(m) for m in unit["modules"]]
        first[unit["name"]] = modules[0]
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh_of(modules[0]), reshard_after_forward=unit["reshard"] == "always",
                    mp_policy=policy, **settings_of(modules[0]))
    for unit in plan["units"]:
        for key, call in (("forward_prefetch", "set_modules_to_forward_prefetch"), ("backward_prefetch", "set_modules_to_backward_prefetch")):
            if unit.get(key):
                getattr(first[unit["name"]], call)([first[name] for name in unit[key] if name in first])
    model.recompute = tuple(r["module"] for r in plan.get("recompute", []))


def train(model, argument, draw_ids, clip, take):
    """What `take` says of the first and of the third step."""
    plan = argument["plan"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    steps = []
    for _ in range(3):
        for i in range(plan["accumulation"]):
            if plan["sync"] == "last":
                model.set_requires_gradient_sync(i + 1 == plan["accumulation"])
            if plan["sync"] == "replicate_last":
                model.set_requires_all_reduce(i + 1 == plan["accumulation"])
            model(draw_ids()).backward()
        if argument["job"]["clip_gradients"]:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(take())
    return [steps[0], steps[-1]]


def peak_memory(model, ids):
    """Bytes of each category at the peak of FSDPMemTracker, of the second step."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids,))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(key, "value", key)): value for key, value in snapshot.items()}


def memory_differs(ours, theirs, made):
    """Bytes by which our activations at the peak are more, and our whole peak over theirs, less 1."""
    memory = json.loads(ours.call("simulate", ours.write(made), "--json"))["memory"]
    return memory["at_peak"]["activation"] - theirs["Activation"], memory["peak_allocated_bytes"] / theirs["Total"] - 1


def chosen_cases(arguments, every, some, random_case):
    """--all: all of them; --random FIRST COUNT: those of so many seeds."""
    if "--random" in arguments:
        first, count = (int(word) for word in arguments[arguments.index("--random") + 1:][:2])
        return [random_case(seed) for seed in range(first, first + count)]
    return every if "--all" in arguments else some


def is_equal(ours, pools, module, ranks, made, extra, names, title, verbose):
    """Are the program's collectives those that `run_case` of `module` records? `names`: a group's name -> the ranks of rank 0's."""
    expected = [[(row[0], names[row[1]], *row[2:]) for row in step] for step in ours.collectives(made)]
    try:
        found = pools.run(ranks, module, "run_case", made | extra)[0]
    except Failure as failure:
        print(getattr(failure, "trace", ""))
        found = [[], []]
    theirs = [[tuple(row) for row in step] for step in found]
    differences = [first_difference(a, b) for a, b in zip(expected, theirs)]
    print(f"{title}: " + (next(filter(None, differences), "") or f"{len(theirs[1])} collectives, equal"))
    if any(differences) and verbose:
        for a, b in zip(expected[1], theirs[1]):
            print("   ", a, b)
    return not any(differences)
