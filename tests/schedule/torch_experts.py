"""Expert parallel around real FSDP2: the collectives of a mixture in gloo processes are those of our programs.

    python3 tests/schedule/torch_experts.py SHARDWRIGHT [--all] [--random FIRST COUNT] [--verbose]

The network's experts send their rows as torchtitan's do (models/common/token_dispatcher.py): numbers first, which the host reads,
then rows, and back. Every expert gets as many rows as any other (torchtitan's _debug_force_load_balance). `plan` makes the units;
compared are order, kind, ranks, elements and dtype of all collectives of the first step and of a later one.
"""

import json
import pathlib
import random
import sys
import warnings

try:
    import torch
    from torch import distributed, nn
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from program_collectives import first_difference  # noqa: E402
from random_cases import Shardwright  # noqa: E402
from torch_pool import Failure, Pools, Recorder  # noqa: E402

VOCABULARY, WIDTH, HIDDEN, LAYERS, SEQUENCE, CHOSEN = 24, 8, 12, 3, 16, 2
EXPERTS = 8  # unless a case says 4
LARGE = {"VOCABULARY": 64, "WIDTH": 64, "HIDDEN": 96, "LAYERS": 4, "SEQUENCE": 256}
# Ranks, ranks that share the experts, flags of plan; for the memory of LARGE.
MEMORY_CASES = [
    (4, 2, "--precision bf16-mixed --micro-batch 8"),
    (4, 4, "--precision bf16-mixed"),
    (4, 2, "--recompute full --precision bf16-mixed --micro-batch 8"),
]

# Ranks, ranks that share the experts, flags of plan.
CASES = [
    (2, 2, ""),
    (4, 2, ""),
    (4, 4, ""),
    (4, 2, "--precision bf16-mixed --wrap torchtitan"),
    (4, 4, "--precision bf16-mixed --clip on"),
    (4, 2, "--clip on"),
    (4, 2, "--shard 2 --replicate 2"),
    (8, 2, "--shard 4 --replicate 2 --clip on"),
    (8, 4, "--precision bf16"),
    (4, 2, "--accumulation 2"),
    (4, 2, "--accumulation 3 --sync last --precision bf16-mixed"),
    (8, 2, "--shard 4 --replicate 2 --accumulation 2 --sync replicate_last"),
    (4, 2, "--recompute full"),
    (4, 4, "--recompute full --precision bf16-mixed --wrap torchtitan"),
    (4, 2, "--reshard never"),
    (4, 2, "--frozen embed.*"),
    (8, 8, "--micro-batch 2"),
    (8, 2, "4"),  # of 4 experts: each of the 4 ranks that have the same two has a part of both
]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context, rows, group, come, leave):
        context.given = group, come, leave
        out = rows.new_empty((sum(come), rows.shape[1]))
        distributed.all_to_all_single(out, rows.contiguous(), come, leave, group=group)
        return out

    @staticmethod
    def backward(context, grad):
        group, come, leave = context.given
        out = grad.new_empty((sum(leave), grad.shape[1]))
        distributed.all_to_all_single(out, grad.contiguous(), leave, come, group=group)
        return out, None, None, None


class Experts(nn.Module):
    """Those of this rank, as slices of two tensors; rows arrive rank by rank."""

    def __init__(self, mesh):
        super().__init__()
        self.group = mesh.get_group()
        self.up = nn.Parameter(distribute_tensor(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3, mesh, [Shard(0)]))

    def forward(self, rows, counts):
        ranks = distributed.get_world_size(self.group)
        come = torch.empty_like(counts)
        distributed.all_to_all_single(come, counts, group=self.group)
        leaves, comes = counts.view(ranks, -1).sum(1).tolist(), come.view(ranks, -1).sum(1).tolist()
        rows = Exchange.apply(rows, self.group, comes, leaves)
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        order = torch.arange(len(up)).repeat(ranks).repeat_interleave(come).argsort(stable=True)
        pieces = rows[order].split(come.view(ranks, -1).sum(0).tolist())
        done = torch.cat([torch.relu(piece @ u.T) @ d.T for piece, u, d in zip(pieces, up, down)])
        back = torch.empty_like(done)
        back[order] = done
        return Exchange.apply(back, self.group, leaves, comes)


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(mesh)

    def forward(self, x):
        x = self.fc(x)
        tokens = x.flatten(0, 1)
        scores = torch.softmax(self.router(tokens).float(), -1)
        chosen = (torch.arange(len(tokens) * CHOSEN) % EXPERTS).view(-1, CHOSEN)
        weights = scores.gather(1, chosen)
        order = chosen.flatten().argsort(stable=True)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()[order]
        order = order // CHOSEN
        rows = self.experts(tokens[order], torch.bincount(chosen.flatten(), minlength=EXPERTS))
        rows = (rows.float() * weights[:, None]).to(rows.dtype)
        return x + torch.zeros_like(tokens).scatter_add(0, order[:, None].expand_as(rows), rows).view_as(x)


class Net(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(mesh) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = ()

    def forward(self, ids):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if f"blocks.{i}" in self.recompute else block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def linear(name, rows, columns, bias=True):
    shapes = [{"name": "weight", "shape": [rows, columns]}] + ([{"name": "bias", "shape": [rows]}] if bias else [])
    return {"name": name, "class": "Linear", "params": shapes}


def model_json():
    experts = [{"name": "up", "shape": [EXPERTS, HIDDEN, WIDTH]}, {"name": "down", "shape": [EXPERTS, WIDTH, HIDDEN]}]
    return {
        "format": "shardwright-model", "version": 1, "class": "Net", "block_class": "Block", "sequence_length": SEQUENCE,
        "inputs": {"ids": {"ids": "sequence_length"}, "labels": {"ids": "sequence_length"}},
        "modules": [
            {"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [VOCABULARY, WIDTH]}]},
            {"name": "blocks", "class": "ModuleList", "modules": [
                {"repeat": LAYERS, "name": "{i}", "class": "Block", "modules": [
                    linear("fc", WIDTH, WIDTH), linear("router", EXPERTS, WIDTH, False),
                    {"name": "experts", "class": "Experts", "params": experts}]}]},
            {"name": "norm", "class": "LayerNorm", "params": [{"name": n, "shape": [WIDTH]} for n in ("weight", "bias")]},
            linear("head", VOCABULARY, WIDTH, False)],
        "ops": [
            {"op": "embedding", "module": "embed", "inputs": ["ids"], "output": "x0"},
            {"repeat": LAYERS, "ops": [
                {"op": "linear", "module": "blocks.{i}.fc", "inputs": ["x{i}"], "output": "a{i}"},
                {"op": "router", "module": "blocks.{i}.router", "inputs": ["a{i}"], "output": "r{i}", "experts_per_token": CHOSEN},
                {"op": "experts", "module": "blocks.{i}.experts", "inputs": ["a{i}", "r{i}"], "output": "e{i}",
                 "function": "relu", "experts_per_token": CHOSEN},
                {"op": "add", "module": "blocks.{i}", "inputs": ["a{i}", "e{i}"], "output": "x{i+1}"}]},
            {"op": "layer_norm", "module": "norm", "inputs": [f"x{LAYERS}"], "output": "y"},
            {"op": "linear", "module": "head", "inputs": ["y"], "output": "logits"},
            {"op": "cross_entropy", "name": "loss", "inputs": ["logits", "labels"], "output": "loss"}]}


def random_case(seed):
    draw = random.Random(seed)
    ranks = draw.choice((2, 4, 4, 8))
    ep = draw.choice([n for n in (2, 4, 8) if n <= ranks])
    shard = draw.choice([n for n in (2, 4, 8) if ep <= n <= ranks])
    accumulation = draw.choice((1, 1, 2, 3))
    syncs = ["every"] + (["last"] if accumulation > 1 else []) + (["replicate_last"] if accumulation > 1 and shard < ranks else [])
    flags = [f"--shard {shard} --replicate {ranks // shard}", f"--accumulation {accumulation} --sync {draw.choice(syncs)}",
             "--precision " + draw.choice(("fp32", "bf16-mixed", "bf16", "fp32/bf16/bf16")), "--clip " + draw.choice(("on", "off")),
             "--wrap " + draw.choice(("block", "torchtitan", "root")), "--micro-batch " + draw.choice(("1", "2"))]
    flags += draw.choice(([], ["--reshard never"], ["--reshard always"]))
    flags += draw.choice(([], ["--recompute full"], ["--recompute full:0.5"]))
    flags += draw.choice(([], [], ["--frozen embed.*"]))
    return ranks, ep, " ".join(flags)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wrap(model, plan, job, meshes):
    precision = {k: DTYPES[v] for k, v in job["precision"].items()}
    if precision["master"] != torch.float32:
        model.to(precision["master"])
    policy = MixedPrecisionPolicy(param_dtype=precision["param"], reduce_dtype=precision["reduce"], cast_forward_inputs=False)
    first = {}
    for unit in plan["units"]:
        modules = [model.get_submodule(m) for m in unit["modules"]]
        first[unit["name"]] = modules[0]
        is_shared = isinstance(modules[0], Experts)
        shards = plan["shard_size"] // plan["expert_size"]
        placement = (lambda _: Shard(1)) if is_shared and shards * plan["expert_size"] > EXPERTS else None
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=meshes["experts" if is_shared else "all"],
                    reshard_after_forward=unit["reshard"] == "always", mp_policy=policy, shard_placement_fn=placement)
        if is_shared:
            modules[0].set_gradient_divide_factor(float(distributed.get_world_size()))
            modules[0].set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    for unit in plan["units"]:
        for key, call in (("forward_prefetch", "set_modules_to_forward_prefetch"), ("backward_prefetch", "set_modules_to_backward_prefetch")):
            if unit.get(key):
                getattr(first[unit["name"]], call)([first[name] for name in unit[key]])
    model.recompute = tuple(r["module"] for r in plan.get("recompute", []))


def clip(model):
    """torchtitan's _clip_grad_norm_with_ep."""
    grads = {True: [], False: []}
    for p in model.parameters():
        if p.grad is not None:
            grads["ep" in p.device_mesh.mesh_dim_names].append(p.grad)
    norms = [torch.nn.utils.get_total_norm(grads[which]).full_tensor() for which in (True, False)]
    total = (norms[0] ** 2 + norms[1] ** 2) ** 0.5
    for which in (True, False):
        torch.nn.utils.clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None
                                              and ("ep" in p.device_mesh.mesh_dim_names) == which], 1.0, total)


def set_experts(count):
    global EXPERTS  # pylint: disable=global-statement
    EXPERTS = count


def model_of(argument):
    warnings.simplefilter("ignore")
    set_experts(argument["experts"])
    plan, job = argument["plan"], argument["job"]
    shard, replicate, ep = plan["shard_size"], plan["replicate_size"], plan["expert_size"]
    mesh = init_device_mesh("cpu", (replicate, shard // ep, ep), mesh_dim_names=("replicate", "efsdp", "ep"))
    dense = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
    meshes = {"all": dense if replicate > 1 else dense["shard"],
              "experts": mesh["replicate", "efsdp"] if replicate > 1 else mesh["efsdp"]}
    torch.manual_seed(0)
    model = Net(mesh["ep"])
    model.embed.requires_grad_(not job.get("frozen"))
    wrap(model, plan, job, meshes)
    return model


def run_memory(_, argument):
    """Bytes of each category at the peak of FSDPMemTracker, of the second step."""
    globals().update(LARGE)
    model = model_of(argument)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(VOCABULARY, (argument["plan"]["micro_batch"], SEQUENCE))
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


def run_case(_, argument):
    model = model_of(argument)
    plan, job = argument["plan"], argument["job"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    steps = []
    with Recorder({}) as recorder:
        recorder.replace(distributed, "all_to_all_single", "all_to_all", "input", "output")
        for _ in range(3):
            for i in range(plan["accumulation"]):
                if plan["sync"] == "last":
                    model.set_requires_gradient_sync(i + 1 == plan["accumulation"])
                if plan["sync"] == "replicate_last":
                    model.set_requires_all_reduce(i + 1 == plan["accumulation"])
                model(torch.randint(VOCABULARY, (plan["micro_batch"], SEQUENCE))).backward()
            if job["clip_gradients"]:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(recorder.take())
    return [steps[0], steps[-1]]


def ranks_of(plan):
    shard, ep = plan["shard_size"], plan["expert_size"]
    groups = {"shard": range(shard), "ep": range(ep), "efsdp": range(0, shard, ep),
              "replicate": range(0, shard * plan["replicate_size"], shard)}
    return {name: str(tuple(ranks)) for name, ranks in groups.items()}


def made_by(ours, ranks, ep, flags):
    folder = pathlib.Path(ours.folder.name)
    set_experts(4 if flags == "4" else 8)
    (folder / "net.json").write_text(json.dumps(model_json()), encoding="utf-8")
    words = [] if flags == "4" else flags.split()
    shard = words.pop(words.index("--shard") + 1) if "--shard" in words else str(ranks)
    words = [w for w in words if w != "--shard"]
    for flag, value in (("--precision", "fp32"), ("--clip", "off"), ("--wrap", "block")):
        words += [] if flag in words else [flag, value]
    ours.call("plan", "--model", str(folder / "net.json"), "--cluster", f"a100-80 x{ranks}, nvlink 300 GB/s", "--kernel-set", "torch-eager",
              "--shard", f"{shard},ep={ep}", "--no-search", *words, "-o", str(folder / "made.json"))
    return json.loads((folder / "made.json").read_text(encoding="utf-8"))


def memory_agrees(ours, pools, ranks, ep, flags):
    """Activations to a KiB (the loss, torch's scalars), the whole peak to 2 %."""
    made = made_by(ours, ranks, ep, flags)
    memory = json.loads(ours.call("simulate", ours.write(made), "--json"))["memory"]
    theirs = pools.run(ranks, "torch_experts", "run_memory", made | {"experts": 8})[0]
    kept, peak = memory["at_peak"]["activation"] - theirs["Activation"], memory["peak_allocated_bytes"] / theirs["Total"]
    good = abs(kept) <= 1024 and abs(peak - 1) <= 0.02
    print(f"memory of {ranks} ranks, ep {ep} {flags}: activations {kept:+} B, peak {peak - 1:+.2%}" + ("" if good else " <<<"))
    return good


def main(arguments):
    ours, failures = Shardwright(arguments[0]), 0
    with Pools() as pools:
        cases = CASES if "--all" in arguments else CASES[3:8]
        if "--random" in arguments:  # FIRST COUNT
            first, count = (int(word) for word in arguments[arguments.index("--random") + 1:][:2])
            cases = [random_case(seed) for seed in range(first, first + count)]
        for ranks, ep, flags in cases:
            made = made_by(ours, ranks, ep, flags) | {"experts": 4 if flags == "4" else 8}
            names = ranks_of(made["plan"])
            expected = [[(row[0], names[row[1]], *row[2:]) for row in step] for step in ours.collectives({k: v for k, v in made.items() if k != "experts"})]
            try:
                found = pools.run(ranks, "torch_experts", "run_case", made)[0]
            except Failure as failure:
                print(getattr(failure, "trace", ""))
                found = [[], []]
            theirs = [[tuple(row) for row in step] for step in found]
            differences = [first_difference(a, b) for a, b in zip(expected, theirs)]
            failures += any(differences)
            print(f"{ranks} ranks, ep {ep} {flags}: " + (next(filter(None, differences), "") or f"{len(theirs[1])} collectives, equal"))
            if any(differences) and "--verbose" in arguments:
                for a, b in zip(expected[1], theirs[1]):
                    print("   ", a, b)
        globals().update(LARGE)
        for ranks, ep, flags in MEMORY_CASES if "--all" in arguments else MEMORY_CASES[:1]:
            failures += not memory_agrees(ours, pools, ranks, ep, flags)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
