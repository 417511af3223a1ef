"""Stages of a pipeline in gloo processes: what each rank sends, receives, gathers and reduces is what its program says, in order.

    python3 tests/schedule/torch_pipeline.py SHARDWRIGHT [--all] [--verbose]

PipelineStages under torch's schedules over modules cut as torchtitan cuts them, under fully_shard (with replicas, experts
shared out, cut layers or tokens, too), under DistributedDataParallel, or under nothing. The first step also exchanges shapes, so the third is compared.
"""

import collections
import itertools
import json
import re
import sys
import warnings

try:
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

import pathlib  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import mesh_cases  # noqa: E402
import torch_context  # noqa: E402
import torch_experts  # noqa: E402
import torch_tensor  # noqa: E402
from program_collectives import first_difference  # noqa: E402
from random_cases import Shardwright  # noqa: E402
from torch_pool import NAMES, Failure, Pools  # noqa: E402

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS", "zero_bubble": "InterleavedZeroBubble",
             "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
# Ranks of the pipeline, ranks of each, flags of plan, layers.
CASES = [
    (2, 1, "--accumulation 4 --schedule zero_bubble --stages 2", 4),
    (2, 2, "--accumulation 5 --schedule zbv --stages 2 --precision bf16-mixed --clip on", 5),
    (2, 2, "--accumulation 4 --schedule dualpipev --stages 2 --precision bf16-mixed --wrap torchtitan", 4),
    (4, 1, "--accumulation 8 --schedule zero_bubble --stages 2 --precision bf16-mixed", 7),
    (2, 1, "--accumulation 4 --schedule interleaved --stages 2", 4),
    (2, 2, "--accumulation 4 --schedule interleaved --stages 2 --precision bf16-mixed --clip on", 5),
    (4, 2, "--accumulation 3 --schedule looped_bfs --stages 2 --precision bf16", 7),
    (2, 2, "--accumulation 3 --cut tp=2 --precision bf16-mixed", 2),
    (2, 4, "--accumulation 2 --cut tp=2 --precision bf16-mixed --clip on --schedule gpipe", 3),
    (2, 1, "--accumulation 3", 2),
    (2, 1, "--accumulation 2 --schedule gpipe", 3),
    (2, 2, "--accumulation 2 --precision bf16-mixed", 2),
    (2, 2, "--accumulation 4 --precision bf16-mixed --schedule gpipe --wrap torchtitan", 4),
    (4, 1, "--accumulation 6 --precision bf16", 6),
    (4, 1, "--accumulation 5 --schedule gpipe", 2),
    (2, 2, "--accumulation 5 --dialect ddp", 2),
    (2, 2, "--accumulation 3 --dialect ddp", 3),
    (2, 2, "--accumulation 3 --clip on", 2),
    (2, 4, "--accumulation 3 --precision bf16-mixed --shard 2 --replicate 2", 3),
    (4, 2, "--accumulation 4 --precision bf16-mixed --recompute full", 5),
    (4, 2, "--accumulation 7 --precision fp32 --wrap torchtitan --micro-batch 2", 4),
    (2, 4, "--accumulation 2 --precision bf16 --schedule gpipe", 5),
    (4, 2, "--accumulation 9 --dialect ddp", 6),
    (4, 1, "--accumulation 8 --schedule interleaved --stages 2", 8),
    (4, 2, "--accumulation 8 --schedule interleaved --stages 3 --precision bf16-mixed --recompute full", 11),
    (2, 2, "--accumulation 4 --schedule interleaved --stages 4 --precision bf16-mixed", 7),
    (2, 4, "--accumulation 6 --schedule interleaved --stages 2 --precision bf16-mixed --shard 2 --replicate 2 --wrap torchtitan", 4),
    (2, 4, "--accumulation 2 --schedule looped_bfs --stages 2 --cut tp=2 --precision bf16-mixed", 4),
    (4, 2, "--accumulation 4 --schedule interleaved --stages 2 --cut cp=2 --precision bf16-mixed", 7),
    (2, 2, "--accumulation 3 --schedule interleaved --precision bf16-mixed", 2),
    (2, 2, "--accumulation 3 --schedule zero_bubble --precision bf16-mixed", 2),
    (2, 4, "--accumulation 2 --schedule zero_bubble --stages 4 --cut tp=2 --precision bf16-mixed", 8),
    (4, 2, "--accumulation 4 --schedule zero_bubble --stages 2 --cut cp=2 --precision bf16-mixed", 7),
    (2, 4, "--accumulation 6 --schedule zero_bubble --stages 2 --precision bf16-mixed --shard 2 --replicate 2", 4),
    (2, 4, "--accumulation 4 --schedule zbv --stages 2 --cut ep=2 --clip on", 3),
    (4, 1, "--accumulation 4 --schedule zbv --stages 2", 6),
    (4, 2, "--accumulation 9 --schedule zbv --stages 2 --precision bf16", 9),
    (2, 4, "--accumulation 3 --schedule zbv --stages 2 --cut tp=2 --precision bf16-mixed", 3),
    (4, 2, "--accumulation 8 --schedule dualpipev --stages 2 --precision fp32", 6),
    (2, 2, "--accumulation 6 --schedule dualpipev --stages 2 --cut cp=2", 3),
    (2, 4, "--accumulation 3 --cut cp=2 --precision bf16-mixed --shard 2 --replicate 2", 3),
    (2, 4, "--accumulation 2 --cut cp=4:ulysses --precision bf16-mixed --schedule gpipe", 2),
    (2, 4, "--accumulation 3 --cut ep=2 --precision bf16-mixed --clip on", 3),
    (2, 4, "--accumulation 2 --cut ep=2 --shard 2 --replicate 2 --schedule gpipe --wrap torchtitan", 3),
    (4, 2, "--accumulation 4 --cut ep=2 --precision bf16 --recompute full", 3),
    (4, 2, "--accumulation 4 --cut cp=2:ring --precision bf16 --recompute full", 5),
    (2, 4, "--accumulation 4 --cut tp=4 --recompute full", 4),
    (4, 2, "--accumulation 5 --cut tp=2 --precision bf16 --wrap torchtitan --micro-batch 2", 5),
    (2, 4, "--accumulation 3 --cut tp=2 --precision bf16-mixed --wrap torchtitan", 3),
    (2, 2, "--accumulation 3 --adapted q,k,v,o,gate,up,down", 3),
    (2, 2, "--accumulation 4 --schedule gpipe --clip on --recompute full --adapted v,down", 4),
    (2, 4, "--accumulation 3 --cut tp=2 --precision bf16-mixed --adapted q,o,up", 3),
    (4, 2, "--accumulation 9 --dialect ddp --adapted q", 6),
]


class Net(torch_tensor.Net):
    """A stage of it: what it lacks is None, or not among the blocks."""

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for i, block in self.blocks.items():
            x = checkpoint(block, x, use_reentrant=False) if f"blocks.{i}" in self.recompute else block(x)
        return x if self.head is None else self.head(self.norm(x))


class Mixture(torch_experts.Net):
    forward = Net.forward


def stages_of(layers, stages):
    """torchtitan's _generate_llm_fqn_per_model_part with one layer's weight for embedding and head each: blocks of each stage."""
    count = layers + 2
    sizes = [count // stages + (s < count % stages) for s in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return [list(range(sum(sizes[:s]), sum(sizes[:s + 1]))) for s in range(stages)]


def part_of(network, plan, stage, mesh, experts):
    torch.manual_seed(0)
    stages = plan["pipeline_size"] * plan.get("pipeline_stages", 1)
    model = Mixture(experts["ep"]) if "expert_size" in plan else Net(network)
    if "tensor_size" in plan:
        torch_tensor.cut(model, mesh["tp"], network)
    if "context_size" in plan:
        torch_context.cut(model, mesh["cp"], plan)
    blocks = stages_of(network["layers"], stages)[stage]
    model.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
    for name, param in model.named_parameters() if network["adapted"] else ():
        param.requires_grad_("lora_" in name)
    if stage > 0:
        model.embed = None
    if stage + 1 < stages:
        model.norm = model.head = None
    return model


class Log(TorchDispatchMode):
    """(kind, ranks or peer, elements, dtype) of all that is communicated."""

    KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce", "send": "send",
             "recv_": "receive", "all_reduce": "all_reduce", "all_to_all_single": "all_to_all", "alltoall_base_": "all_to_all", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # asked for what it does with its part
        name = func._schema.name.split("::")[1]
        if "c10d" in func.namespace and name in self.KINDS:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [a for a in args[:2] if isinstance(a, torch.Tensor)]
            group = next((a for a in args if isinstance(a, torch.ScriptObject)), args[-1])
            group = distributed.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
            group = group if isinstance(group, distributed.ProcessGroup) else distributed.ProcessGroup.unbox(group)
            ranks = distributed.get_process_group_ranks(group)
            where = ranks[args[2]] if name in ("send", "recv_") else tuple(ranks)
            whole = len(ranks) if name == "all_gather_into_tensor" else 1  # of which it is given a part
            self.found.append((self.KINDS[name], str(where), whole * max(t.numel() for t in tensors), NAMES.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch."))))
        return func(*args, **(kwargs or {}))

    def take(self):
        found, self.found = self.found, []
        return found


def wrap(model, argument, mesh, of_experts):
    plan, job = argument["plan"], argument["job"]
    names = {name for name, _ in model.named_modules()}
    units = [unit | {"modules": [m for m in unit["modules"] if m in names]} for unit in plan["units"]]
    plan = plan | {"units": [unit for unit in units if unit["modules"]]}
    model.recompute = tuple(r["module"] for r in plan.get("recompute", []))
    if plan["dialect"] == "ddp":
        return DistributedDataParallel(model, process_group=mesh["replicate"].get_group(), bucket_cap_mb=25)
    if mesh.size() > mesh["pp"].size():
        has_replicas = mesh["replicate"].size() > 1
        meshes = {"all": mesh["replicate", "shard"] if has_replicas else mesh["shard"]}
        if "expert_size" in plan:
            meshes["experts"] = of_experts["replicate", "efsdp"] if has_replicas else of_experts["efsdp"]
        torch_experts.wrap(model, plan, job, meshes)
    else:
        model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[job["precision"]["param"]])
    return model


def loss_of(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def norm_of(models):
    grads = collections.defaultdict(list)
    for p in itertools.chain.from_iterable(model.parameters() for model in models):
        if p.grad is not None:
            grads["efsdp" not in p.device_mesh.mesh_dim_names].append(p.grad)
    return sum(nn.utils.get_total_norm(grads[which]).full_tensor() for which in sorted(grads))


def run_case(rank, argument):
    warnings.simplefilter("ignore")
    plan, network = argument["plan"], argument["network"]
    stages, ranks = plan["pipeline_size"] * plan.get("pipeline_stages", 1), plan["pipeline_size"]
    context = plan.get("context_size", 1)
    sizes = (ranks, plan["replicate_size"], plan["shard_size"] // context, context, plan.get("tensor_size", 1))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "replicate", "rows", "cp", "tp"))
    mesh["rows", "cp"]._flatten("shard")
    of_experts = mesh
    if "expert_size" in plan:
        sizes = (*sizes[:2], plan["shard_size"] // plan["expert_size"], plan["expert_size"])
        of_experts = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "replicate", "efsdp", "ep"))
    place = mesh.get_local_rank("pp")
    name = plan.get("pipeline_schedule", "1f1b")
    own = [place, 2 * ranks - 1 - place] if name in ("zbv", "dualpipev") else range(place, stages, ranks)
    models = [wrap(part_of(network, plan, stage, mesh, of_experts), argument, mesh, of_experts) for stage in own]
    parts = [PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh["pp"].get_group()) for model, stage in zip(models, own)]
    schedule = get_schedule_class(SCHEDULES[name])(parts[0] if name in ("gpipe", "1f1b") else parts, plan["accumulation"], loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], foreach=False)
    with loss_parallel(), Log() as log:
        for _ in range(3):
            ids = torch.randint(network["vocabulary"], (plan["micro_batch"] * plan["accumulation"], network["sequence"] // context))
            log.take()
            schedule.step(*([ids] if place == 0 else []), target=ids if stages - 1 in own else None, return_outputs=False)
            if argument["job"]["clip_gradients"]:
                norm = norm_of(models)
                distributed.all_reduce(norm, group=mesh["pp"].get_group())  # torchtitan adds squares
            optimizer.step()
            optimizer.zero_grad()
        return log.take()


SIZES = {"fp32": 4, "bf16": 2, "int32": 4, "int64": 8}
LINE = re.compile(r"^  (\S+) \[\w+, group ([\w.]+), (\d+) B, (\w+)")


def programs_of(ours, made):
    """Per stage the rows of its steady step, with the group's name in place of ranks."""
    text = ours.call("inspect", ours.write(made), "--program")
    rows, is_step = [], False
    for line in text.splitlines():
        if line.startswith("rank "):
            rows.append([])
        is_step = line.startswith("body step") or (is_step and not line.startswith("body "))
        found = LINE.match(line)
        if is_step and found:
            name, group, size, dtype = found.groups()
            kind = name.rsplit(".", 1)[1].split("#")[0]
            for one in ("send", "receive") if kind == "send_receive" else (kind,):
                rows[-1].append(("all_to_all" if one == "permute" else one, group, int(size) // SIZES[dtype], dtype))
    return rows


def placed(rows, rank, plan):
    """Rows of a program with a rank's groups and peers in place of their names."""
    tensor, context = plan.get("tensor_size", 1), plan.get("context_size", 1)
    shard, each = plan["shard_size"] * tensor, plan["shard_size"] * plan["replicate_size"] * tensor
    groups = {"tp": (tensor, 1), "cp": (context, tensor), "shard": (shard // tensor, tensor), "replicate": (each // shard, shard),
              "ep": (plan.get("expert_size", 1), 1), "efsdp": (shard // plan.get("expert_size", 1), plan.get("expert_size", 1)),
              "pp": (plan["pipeline_size"], each)}
    names = {name: str(tuple(rank - rank // stride % size * stride + i * stride for i in range(size))) for name, (size, stride) in groups.items()}
    world = each * plan["pipeline_size"]
    names |= {"pp.next": str((rank + each) % world), "pp.previous": str((rank - each) % world)}
    return [(kind, names[where], size, dtype) for kind, where, size, dtype in rows]


def made_by(ours, stages, each, flags, network):
    words = flags.split()
    schedule = words.pop(words.index("--schedule") + 1) if "--schedule" in words else "1f1b"
    words = [w for w in words if w != "--schedule"]
    virtual = "x" + words.pop(words.index("--stages") + 1) if "--stages" in words else ""
    words = [w for w in words if w != "--stages"]
    cut = words.pop(words.index("--cut") + 1) + "," if "--cut" in words else ""
    words = [w for w in words if w != "--cut"]
    if "ddp" not in words and "--shard" not in words:
        words += ["--shard", str(each // int(cut[3:-1]) if "tp" in cut else each)]
    shard = f"{words.pop(words.index('--shard') + 1)}," if "--shard" in words else ""
    words = [w for w in words if w != "--shard"]
    for flag, value in (("--precision", "fp32"), ("--clip", "off")):
        words += [] if flag in words else [flag, value]
    folder = pathlib.Path(ours.folder.name)
    (folder / "net.json").write_text(json.dumps(torch_experts.model_json() if "ep=" in cut else torch_tensor.model_json(network)), encoding="utf-8")
    ours.call("plan", "--model", str(folder / "net.json"), "--cluster", f"a100-80 x{stages * each}, nvlink 300 GB/s", "--kernel-set",
              "torch-eager", "--shard", f"{shard}{cut}pp={stages}{virtual}:{schedule}", "--no-search", *words, "-o", str(folder / "made.json"))
    return json.loads((folder / "made.json").read_text(encoding="utf-8"))


def main(arguments):
    ours, failures = Shardwright(arguments[0]), 0
    with Pools() as pools:
        for stages, each, flags, layers in CASES if "--all" in arguments else CASES[:18] + CASES[-3:-2]:
            network = torch_tensor.SMALL | {"layers": layers} | ({"vocabulary": torch_experts.VOCABULARY} if "ep=" in flags else {})
            flags, network["adapted"] = (flags.split(" --adapted ") + [""])[:2]
            made = made_by(ours, stages, each, torch_tensor.flags_of(flags, network), network)
            plan = made["plan"]
            expected = programs_of(ours, made)
            try:
                found = pools.run(stages * each, "torch_pipeline", "run_case", made | {"network": network})
            except Failure as failure:
                print(getattr(failure, "trace", ""))
                found = [[]] * (stages * each)
            differences = [(rank, first_difference(placed(expected[rank // each], rank, plan), rows)) for rank, rows in enumerate(found)]
            wrong = [f"rank {rank}: {text}" for rank, text in differences if text]
            failures += bool(wrong)
            print(f"{stages} stages of {each}, {layers} layers {flags} {network['adapted']}: " + (wrong[0] if wrong else f"{sum(map(len, found))} calls, equal"))
            if wrong and "--verbose" in arguments:
                rank = int(wrong[0].split()[1].rstrip(":"))
                for a, b in zip(placed(expected[rank // each], rank, plan), found[rank]):
                    print("   ", a, b)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
