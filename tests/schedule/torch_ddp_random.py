"""Random networks under real DistributedDataParallel: its all-reduces, step by step, are those of our ddp programs.

    python3 tests/schedule/torch_ddp_random.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--no-shrink]

2 to 4 gloo processes train a random network (random_networks.py) for three steps, with buckets from a few hundred bytes on, with
and without gradient_as_bucket_view, find_unused_parameters and static_graph, also with accumulation. Compared are elements and dtype
of every all-reduce, those of the map of parameters in use (int32) among them; all ranks must end with the same parameters. What
reaches no loss, and what nothing calls, both refuse without one of the two, and static_graph with no_sync.
"""

import contextlib
import pathlib
import random
import sys
import warnings

try:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import random_networks  # noqa: E402
from random_cases import RELEASE, Outcome, Refused, attempt, compare, main_of, model_json, smaller_networks  # noqa: E402
from torch_fsdp2_random import fitted, layers  # noqa: E402
from torch_pool import NAMES, Failure  # noqa: E402

STEPS = 3
KIB = 1024
FLAGS = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
DTYPES = {**NAMES, torch.int32: "int32"}
PLAIN = {"shard": 1, "replicate": 2, "micro_batch": 1, "accumulation": 1, "sync": "every", "autocast": False, "frozen": [], "wide": [],
         "bucket": 25 * KIB * KIB, "units": [{"modules": [""]}], "recompute": [], **dict.fromkeys(FLAGS, False)}


def fixed(network=None, **settings):
    return {**PLAIN, "network": network or layers(), **settings}


def without_layer():
    """Nothing calls the second of the layers."""
    return {**layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [2, "chain"]]}}


NORMS = ["norm", *(f"body.layers.{i}.c0" for i in range(3))]  # of the layers; a norm of fp32 in 16 bits runs on no CPU
DEAD = {**layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [1, "dead"], [2, "chain"]]}}
FIXED = {
    "every parameter in a bucket of its own": fixed(bucket=32),
    "buckets that end between the parameters of an op": fixed(bucket=100, accumulation=2, autocast=True),
    "a part that reaches no loss": fixed(DEAD),
    "a part that reaches no loss, looked for": fixed(DEAD, find_unused_parameters=True, bucket=100, accumulation=2),
    "a part that reaches no loss, looked for, synced at the end": fixed(
        DEAD, find_unused_parameters=True, bucket=400, accumulation=2, sync="last", gradient_as_bucket_view=True),
    "a part that reaches no loss, in a static graph": fixed(DEAD, static_graph=True, bucket=100),
    "a static graph of three micro-batches": fixed(static_graph=True, bucket=400, accumulation=3),
    "a static graph without sync": fixed(static_graph=True, accumulation=2, sync="last"),
    "a static graph in which parameters are looked for": fixed(without_layer(), static_graph=True, find_unused_parameters=True, bucket=300,
                                                               accumulation=2),
    "nothing is without a gradient, and looked for": fixed(find_unused_parameters=True, bucket=300, autocast=True),
    "two dtypes": fixed(autocast=True, wide=["embed", *NORMS], bucket=300),
    "two dtypes, the last one first": fixed(autocast=True, wide=["head", "body.layers.0.c1.fc1"], bucket=4 * KIB, accumulation=2),
    "two dtypes in buckets without end": fixed(autocast=True, wide=["head", "embed", *NORMS], gradient_as_bucket_view=True),
    "two dtypes in a static graph": fixed(autocast=True, wide=["body.layers.1.c1.fc2", "body.layers.2.c0"], static_graph=True, bucket=256),
    "a part that nothing calls": fixed(without_layer()),
    "a part that nothing calls, frozen": fixed(without_layer(), frozen=[
        f"body.layers.1.{name}" for name in ("c0.weight", "c0.bias", "c1.fc1.weight", "c1.fc1.bias", "c1.fc2.weight", "c1.fc2.bias")]),
}


def called(part):
    """The part with every child in use and every result, too."""
    if part["kind"] != "seq":
        return part
    part = {**part, "children": [called(child) for child in part["children"]]}
    part["calls"] = [[i, "chain" if mode == "dead" else mode] for i, mode in part["calls"]]
    part["calls"] += [[i, "chain"] for i in range(len(part["children"])) if i not in [call[0] for call in part["calls"]]]
    return part


def random_case(seed):
    rng = random.Random(seed)
    network = random_networks.random_network(rng)
    rich = random_networks.rich_random(seed)
    if rich:
        network = random_networks.rich_network(seed)
    reaches = rng.random() < 0.9
    network = {**network, "body": called(network["body"]) if reaches else network["body"]}
    case = {**PLAIN, "network": network, "replicate": rng.choice([2, 2, 3, 4]), "micro_batch": 1,
            "accumulation": rng.choices([1, 2, 3], [6, 3, 1])[0], "autocast": rng.random() < 0.3,
            "bucket": rng.choice([40, 256, 512, KIB, 4 * KIB, 25 * KIB * KIB]), "gradient_as_bucket_view": rng.random() < 0.5}
    if case["accumulation"] > 1:
        case["sync"] = rng.choice(["every", "last"])
    if rng.random() < 0.2:
        names = [n for n, _ in random_networks.make(network).named_parameters() if n != "head.weight"]
        case["frozen"] = [name for name in names if rng.random() < 0.4]
    if rich and rich.random() < 0.4:
        case["frozen"] = random_networks.enriched_frozen(rich, network)
    if rich:
        case["averages"] = rich.random() < 0.3
    case["static_graph"] = rng.random() < 0.3
    case["find_unused_parameters"] = rng.random() < 0.3
    if case["autocast"] and rng.random() < 0.5:
        made = random_networks.make(network)
        products = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv2d)
        owners = {name.rpartition(".")[0] for name, _ in made.named_parameters()} - {""}  # tied ones by their first name
        case["wide"] = [name for name in sorted(owners) if not isinstance(made.get_submodule(name), products) or rng.random() < 0.4]
    return case


def plan_of(case):
    param = "bf16" if case["autocast"] else "fp32"
    master = "bf16" if case["wide"] else "fp32"
    return {
        "format": "shardwright-plan", "version": 1, "model": {"name": "net", "json": model_json(case["network"])},
        "kernel_set": {"name": "torch-eager", "fp32_logits": False},
        "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": case["replicate"]}, "profile": {"name": "a100-torch-eager"},
        "job": {"mode": "train", "sequence_length": case["network"]["sequence"],
                "precision": {"master": master, "param": param, "reduce": master},
                **({"fp32_masters": [f"{name}.*" for name in case["wide"]]} if case["wide"] else {}),
                "optimizer": {"kind": "sgd", "impl": "foreach", "weight_decay": False}, "clip_gradients": False,
                "frozen": case["frozen"]},
        "plan": {"dialect": "ddp", "torch": RELEASE, "shard_size": 1, "replicate_size": case["replicate"], "micro_batch": case["micro_batch"],
                 "accumulation": case["accumulation"], "sync": case["sync"], "first_bucket": f"{case['bucket']} B",
                 "bucket": f"{case['bucket']} B", "find_unused_parameters": case["find_unused_parameters"],
                 "static_graph": case["static_graph"], "units": [{"name": "root", "modules": [""], "reshard": "never"}]}}


class AllReduces(TorchDispatchMode):
    """Notes what the reducer, which is C++, sends."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "allreduce" in str(func):
            tensor = args[0][0]
            self.found.append(("all_reduce", "replicate", tensor.numel(), tensor.numel(), DTYPES.get(tensor.dtype, str(tensor.dtype))))
        return func(*args, **(kwargs or {}))


def run_case(rank, case):
    from torch.nn.parallel import DistributedDataParallel
    warnings.simplefilter("ignore")
    model = random_networks.make(case["network"]).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
        if case["wide"] and name.rpartition(".")[0] not in case["wide"]:
            parameter.data = parameter.data.to(torch.bfloat16)
    model = DistributedDataParallel(model, bucket_cap_mb=case["bucket"] / KIB / KIB,
                                    **{key: case[key] for key in FLAGS})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    steps = []
    for step in range(STEPS):
        with AllReduces() as recorder:
            for i in range(case["accumulation"]):
                syncs = case["sync"] == "every" or i + 1 == case["accumulation"]
                inputs = random_networks.sample(case["network"], case["micro_batch"], 100 * step + 10 * i + rank)
                with contextlib.nullcontext() if syncs else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
                        loss = model(**inputs)
                    (loss / case["accumulation"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        random_networks.average(case, model)
        steps.append(recorder.found)
    return steps, torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()


def judge(ours, pools, case):
    said = attempt(lambda: ours.collectives(plan_of(case)))
    answers = attempt(lambda: pools.run(case["replicate"], "torch_ddp_random", "run_case", case))
    if isinstance(said, Refused) or isinstance(answers, Failure):
        return compare(said, answers if isinstance(answers, Failure) else [])
    outcome = compare(said, answers[0][0])
    if outcome.is_good and any(parameters != answers[0][1] for _, parameters in answers):
        return Outcome("different", "the ranks end with different parameters")
    return outcome


def smaller_cases(case):
    for key, value in (("accumulation", 1), ("wide", []), ("autocast", False), ("frozen", []), ("replicate", 2), ("bucket", 256),
                       *((flag, False) for flag in FLAGS)):
        if case[key] != value:
            yield {**case, key: value, **({"sync": "every"} if key == "accumulation" else {})}
    for candidate in smaller_networks(case):
        yield fitted(candidate)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"PyTorch {torch.__version__} DDP", "0:12", "0:300", FIXED, PLAIN))
