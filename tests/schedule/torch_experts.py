"""Expert parallel around real FSDP2: the collectives of a mixture in gloo processes are those of our programs.

    python3 tests/schedule/torch_experts.py SHARDWRIGHT [--all] [--random FIRST COUNT] [--verbose]

The network's experts send their rows as torchtitan's do (models/common/token_dispatcher.py): numbers first, which the host reads,
then rows, and back. Every expert gets as many rows as any other (torchtitan's _debug_force_load_balance). `plan` makes the units;
compared are order, kind, ranks, elements and dtype of all collectives of the first step and of a later one.
"""

import pathlib
import random
import sys
import warnings

try:
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import mesh_cases  # noqa: E402
from mesh_cases import linear  # noqa: E402
from random_cases import Shardwright  # noqa: E402
from torch_pool import Pools, Recorder  # noqa: E402

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
    return ranks, ep, mesh_cases.random_flags(draw, shard, ranks, ("fp32", "bf16-mixed", "bf16", "fp32/bf16/bf16"))


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


def wrap(model, plan, job, meshes):
    placement = (lambda _: Shard(1)) if plan["shard_size"] > EXPERTS else None

    def settings(module):
        return {"shard_placement_fn": placement} if isinstance(module, Experts) else {}

    mesh_cases.wrap(model, plan, job, lambda module: meshes["experts" if isinstance(module, Experts) else "all"], settings)
    for unit in plan["units"]:
        module = model.get_submodule(unit["modules"][0])
        if isinstance(module, Experts):
            module.set_gradient_divide_factor(float(plan["shard_size"] * plan["replicate_size"]))
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


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


def draw_ids(argument):
    return torch.randint(VOCABULARY, (argument["plan"]["micro_batch"], SEQUENCE))


def run_memory(_, argument):
    globals().update(LARGE)
    return mesh_cases.peak_memory(model_of(argument), draw_ids(argument))


def run_case(_, argument):
    model = model_of(argument)
    with Recorder({}) as recorder:
        recorder.replace(distributed, "all_to_all_single", "all_to_all", "input", "output")
        return mesh_cases.train(model, argument, lambda: draw_ids(argument), clip, recorder.take)


def ranks_of(plan):
    shard, ep = plan["shard_size"], plan["expert_size"]
    groups = {"shard": range(shard), "ep": range(ep), "efsdp": range(0, shard, ep),
              "replicate": range(0, shard * plan["replicate_size"], shard)}
    return {name: str(tuple(ranks)) for name, ranks in groups.items()}


def made_by(ours, ranks, ep, flags):
    set_experts(4 if flags == "4" else 8)
    return mesh_cases.made_by(ours, model_json(), ranks, ranks, f"ep={ep}", "" if flags == "4" else flags)


def memory_agrees(ours, pools, ranks, ep, flags):
    """Activations to a KiB (the loss, torch's scalars), the whole peak to 2 %."""
    made = made_by(ours, ranks, ep, flags)
    theirs = pools.run(ranks, "torch_experts", "run_memory", made | {"experts": 8})[0]
    kept, peak = mesh_cases.memory_differs(ours, theirs, made)
    good = abs(kept) <= 1024 and abs(peak) <= 0.02
    print(f"memory of {ranks} ranks, ep {ep} {flags}: activations {kept:+} B, peak {peak:+.2%}" + ("" if good else " <<<"))
    return good


def main(arguments):
    ours, failures = Shardwright(arguments[0]), 0
    with Pools() as pools:
        for ranks, ep, flags in mesh_cases.chosen_cases(arguments, CASES, CASES[3:8], random_case):
            made = made_by(ours, ranks, ep, flags)
            failures += not mesh_cases.is_equal(ours, pools, "torch_experts", ranks, made, {"experts": EXPERTS}, ranks_of(made["plan"]),
                                                f"{ranks} ranks, ep {ep} {flags}", "--verbose" in arguments)
        globals().update(LARGE)
        for ranks, ep, flags in MEMORY_CASES if "--all" in arguments else MEMORY_CASES[:1]:
            failures += not memory_agrees(ours, pools, ranks, ep, flags)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
