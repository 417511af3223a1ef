"""Random networks under real DeepSpeed ZeRO 1 to 3: its collectives, step by step, are those of our zero1, zero2 and zero3 programs.

    python3 tests/schedule/torch_zero_random.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--no-shrink] [--page]

2 to 4 gloo processes train a random network (random_networks.py) on DeepSpeed's CPU accelerator for three steps, with the
configuration that `emit --to deepspeed` writes. Compared are order, kind, elements and dtype of every collective; all ranks must
end with the same parameters. docs/conformance.md says what the cases leave out.
"""

import json
import logging
import os
import pathlib
import random
import re
import sys
import tempfile
import warnings

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", DEEPSPEED_LOG_LEVEL="error")

try:
    import deepspeed
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import random_networks  # noqa: E402
from random_cases import Outcome, Refused, attempt, compare, main_of, model_json, smaller_networks  # noqa: E402
from torch_fsdp2_random import LAYERS, calling, fitted, idling, layers, random_recompute  # noqa: E402
from torch_pool import NAMES, Failure  # noqa: E402

STEPS = 3
LINEAR = torch.nn.functional.linear  # which stage 3 replaces for good
DTYPES = {**NAMES, torch.float64: "fp32"}  # DeepSpeed sums the one number of the norm in fp64
PRECISIONS = [("fp32", "fp32", "fp32"), ("fp32", "bf16", "bf16"), ("fp32", "bf16", "fp32")]
HALVES = [("fp32", "fp16", "fp16"), ("fp32", "fp16", "fp32")]
BUDGETS = [60, 100, 400, 2000, 10**9]
PLAIN = {"stage": 3, "shard": 2, "replicate": 1, "micro_batch": 1, "accumulation": 1, "precision": PRECISIONS[0], "clip": False,
         "frozen": [], "overlap_comm": None, "contiguous_gradients": True, "reduce_bucket": 10**9,
         "gradient_reduction": None, "max_reuse_distance": 0, "persistence_threshold": 0, "units": [], "recompute": [], "reentrant": False,
         "offload": [], "sub_group": 10**9, "prefetch_bucket": 0, "max_live": 10**9, "overflows": False}


def fixed(network=None, **settings):
    return {**PLAIN, "network": network or layers(), **settings}


DEAD = {**layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [1, "dead"], [2, "chain"]]}}
# One parameter per module.
FLAT = {**layers(), "norm": False, "body": {"kind": "seq", "list": True, "calls": [[i, "residual"] for i in range(3)], "children": [
    {"kind": "linear"}, {"kind": "mlp", "hidden": 12}, {"kind": "linear"}]}}
# A weight that two modules share, one right behind the other.
TIED = {**FLAT, "body": {**FLAT["body"], "children": [*FLAT["body"]["children"][:2], {"kind": "linear"}, {"kind": "linear", "tied": "body.layers.2"}],
                         "calls": [[i, "chain"] for i in range(4)]}}
# The same with a bias of each module's own.
BIASED = {**TIED, "body": {**TIED["body"], "children": [*TIED["body"]["children"][:2], {"kind": "linear", "bias": True},
                                                        {"kind": "linear", "bias": True, "tied": "body.layers.2"}]}}
CALLED = {**FLAT, "inputs": 3, "body": {**FLAT["body"], "calls": [[0, "chain"], [0, "chain"], [1, "chain"], [2, "chain"], [0, "dead"]]}}
# A block of four, of which one reaches no loss.
BLOCK = {**FLAT, "body": {**FLAT["body"], "calls": [[0, "chain"], [1, "residual"]], "children": [
    {"kind": "seq", "list": False, "calls": [[0, "chain"], [2, "dead"], [1, "chain"], [3, "chain"]],
     "children": [*FLAT["body"]["children"], {"kind": "linear"}]}, {"kind": "linear"}]}}
FIXED = {
    "a part that reaches no loss, clipped": fixed(DEAD, clip=True),
    "a layer called twice in a row": fixed(calling([0, 1, 1, 2])),
    "a part that nothing calls": fixed(calling([0, 2])),
    "stage 2, a part that nothing calls": fixed(calling([0, 2]), stage=2, clip=True),
    "stage 1, a part that nothing calls": fixed(calling([0, 2]), stage=1, accumulation=2),
    "modules that persist": fixed(FLAT, persistence_threshold=64, max_reuse_distance=100),
    "modules that share a weight, one behind the other": fixed(TIED),
    "modules that share a weight beside biases of their own": fixed(BIASED),
    "modules that share a weight beside biases of their own, kept": fixed(BIASED, max_reuse_distance=100, accumulation=2),
    "modules that persist and are called three times": fixed(CALLED, persistence_threshold=64, accumulation=2),
    "stage 1, gradients larger than the bucket": fixed(FLAT, stage=1, shard=3, reduce_bucket=40, accumulation=2, clip=True),
    "stage 2, gradients larger than the bucket": fixed(FLAT, stage=2, shard=3, reduce_bucket=40, overlap_comm=True),
    "asked to all-reduce without a bucket": fixed(gradient_reduction="all_reduce", contiguous_gradients=False),
    "layers recomputed": fixed(recompute=[{"module": name} for name in LAYERS]),
    "layers recomputed by the reentrant checkpoint, persistent": fixed(
        FLAT, recompute=[{"module": name} for name in LAYERS], reentrant=True, persistence_threshold=64, max_reuse_distance=100),
    "a part that reaches no loss, recomputed by the reentrant checkpoint": fixed(
        DEAD, recompute=[{"module": name} for name in LAYERS], reentrant=True),
    "frozen weights recomputed, persistent": fixed(FLAT, frozen=["body.layers.1.fc1.weight"], persistence_threshold=100,
                                                   recompute=[{"module": "body.layers.1"}]),
    "frozen weights recomputed, used again soon": fixed(BLOCK, frozen=["body.layers.0.c0.weight", "body.layers.0.c1.fc1.weight"],
                                                        max_reuse_distance=2000, recompute=[{"module": "body.layers.0"}]),
    "frozen weights of a part that reaches no loss, recomputed": fixed(
        BLOCK, frozen=["body.layers.0.c2.weight", "body.layers.0.c3.weight"], persistence_threshold=100, recompute=[{"module": "body.layers.0"}]),
    "frozen weights recomputed for a module that hands no gradient on": fixed(
        {**FLAT, "body": {**FLAT["body"], "calls": [[0, "chain"], [1, "chain"]], "children": [
            {"kind": "seq", "list": False, "calls": [[0, "chain"], [1, "chain"], [2, "tower"]], "children": [{"kind": "linear"}] * 3},
            {"kind": "linear"}]}},
        frozen=["embed.weight", "body.layers.0.c1.weight"], recompute=[{"module": "body.layers.0"}]),
    "a part that reaches no loss at the end of what is recomputed": fixed(
        {**BLOCK, "body": {**BLOCK["body"], "children": [
            {**BLOCK["body"]["children"][0], "calls": [[0, "chain"], [1, "chain"], [2, "dead"]]}, BLOCK["body"]["children"][1]]}},
        recompute=[{"module": "body.layers.0"}]),
    "a reentrant checkpoint on detached data": fixed(
        {**FLAT, "body": {**FLAT["body"], "calls": [[0, "chain"], [1, "detached"], [2, "chain"]]}},
        stage=1, recompute=[{"module": name} for name in LAYERS], reentrant=True),
    "a module under two names": fixed(
        {**FLAT, "body": {**FLAT["body"], "alias": "body.layers.1.c0", "calls": [[0, "residual"], [3, "chain"], [1, "chain"], [2, "chain"]],
                          "children": [{"kind": "linear"}, {"kind": "seq", "list": False, "calls": [[0, "chain"]], "children": [{"kind": "mlp", "hidden": 12}]},
                                       {"kind": "linear"}]}}, max_reuse_distance=100),
    "a weight that the module behind it uses, too": fixed(
        {**FLAT, "body": {**FLAT["body"], "children": [{"kind": "linear"}, {"kind": "borrow", "of": "body.layers.0"}, {"kind": "linear"}]}}),
    "the optimizer offloaded": fixed(offload=["optimizer"], accumulation=2),
    "parameters offloaded, clipped, in several sub-groups": fixed(FLAT, offload=["parameters"], sub_group=60, clip=True),
    "in several sub-groups": fixed(FLAT, sub_group=60, clip=True),
    "fp16": fixed(precision=HALVES[0], clip=True),
    "stage 2, fp16, reduced in fp32": fixed(stage=2, precision=HALVES[1], recompute=[{"module": name} for name in LAYERS]),
    "requested ahead, from calls of blocks without parameters on": fixed(FLAT, prefetch_bucket=100),
    "requested ahead, parameter by parameter": fixed(prefetch_bucket=100, max_reuse_distance=100),
    "requested ahead, with few live parameters, recomputed": fixed(
        prefetch_bucket=400, max_live=500, recompute=[{"module": name} for name in LAYERS]),
    "requested ahead past a block that runs nothing": fixed(
        idling([[0, "chain"], [1, "residual"], [2, "chain"]]), prefetch_bucket=60),
    "kept as in the first pass ahead, when what persists was not there yet": fixed(
        {**FLAT, "inputs": 3, "body": {"kind": "seq", "list": True, "calls": [[0, "chain"]], "children": [{"kind": "linear"}]}},
        prefetch_bucket=60, persistence_threshold=70, accumulation=2),
    "biases that persist beside weights that do not": fixed(persistence_threshold=12, prefetch_bucket=10**9, accumulation=2),
    "sub-groups that part within modules": fixed(sub_group=30, clip=True),
    "buckets that part within modules": fixed(reduce_bucket=110),
    "buckets that part within modules, without contiguous gradients": fixed(reduce_bucket=110, contiguous_gradients=False),
    "stage 1, buckets that part within modules": fixed(stage=1, shard=3, reduce_bucket=110),
    "stage 2, buckets that part within modules, gradients larger than the bucket": fixed(stage=2, reduce_bucket=90, overlap_comm=True),
    "a weight beside a bias that another module uses": fixed({**FLAT, "body": {**FLAT["body"], "children": [
        {"kind": "linear", "bias": True}, {"kind": "borrow", "of": "body.layers.0"}, {"kind": "linear"}]}}),
    "fp16, a step that overflows": fixed(precision=HALVES[0], overflows=True, persistence_threshold=12),
    "stage 1, fp16, a step that overflows": fixed(stage=1, precision=HALVES[0], overflows=True, accumulation=2),
    "asked to all-reduce, a gradient larger than the bucket": fixed(FLAT, gradient_reduction="all_reduce", reduce_bucket=100),
}


def one_parameter_each(part):
    """The part with modules of one parameter: no biases, norms or experts."""
    if part["kind"] != "seq":
        kept = {key: value for key, value in part.items() if key != "bias"}
        return kept if part["kind"] in ("linear", "mlp", "borrow") else {"kind": "linear"}
    kept = {key: value for key, value in part.items() if key != "scale"}
    return {**kept, "children": [one_parameter_each(child) for child in part["children"]]}


def shares_weights(network):
    """Does some module run twice, or use the weight of another?"""
    parts = [part for _, part in random_networks.paths_of(network["body"])]
    calls = [[index for index, _ in part.get("calls", [])] for part in parts]
    return any(part["kind"] == "borrow" or part.get("tied") or part.get("alias") for part in parts) or network["tied_head"] or any(
        len(indices) != len(set(indices)) for indices in calls)


def random_case(seed):
    rng = random.Random(seed)
    network = random_networks.random_network(rng)
    rich = random_networks.rich_random(seed)
    if rich:
        network = random_networks.rich_network(seed)
    case = {**PLAIN, "stage": rng.choice([1, 2, 3, 3]), "shard": rng.choice([2, 2, 3, 4]), "micro_batch": rng.choice([1, 2]),
            "accumulation": rng.choices([1, 2, 3], [6, 3, 1])[0], "clip": rng.random() < 0.3, "precision": rng.choice(PRECISIONS),
            "overlap_comm": rng.choice([None, True, False]), "contiguous_gradients": rng.random() < 0.8}
    if case["stage"] == 3:
        case.update(max_reuse_distance=rng.choice(BUDGETS), gradient_reduction=rng.choice([None, None, "all_reduce"]))
    parts = rng.random() < 0.6
    if parts:  # parameters of a module
        network = {**network, "norm": False, "body": one_parameter_each(network["body"])}
        case["reduce_bucket"] = rng.choice(BUDGETS)
        case["persistence_threshold"] = rng.choice([0, 70, 100, 150]) if case["stage"] == 3 else 0
    if rng.random() < 0.2:
        names = [n for n, _ in random_networks.make(network).named_parameters() if n != "head.weight"]
        case["frozen"] = [name for name in names if rng.random() < 0.4]
    if rich and rich.random() < 0.4:
        case["frozen"] = random_networks.enriched_frozen(rich, network)
    case["network"] = network
    apart = random.Random(json.dumps(case))  # what came in later changes no other draw
    if apart.random() < 0.3:
        # A reentrant checkpoint runs a backward of its own: DeepSpeed fails where a weight gets a gradient from two, and torch
        # trains nothing in a region whose inputs need no gradient.
        case.update(recompute=[{"module": region["module"]} for region in random_recompute(apart, network)],
                    reentrant=apart.random() < 0.5 and not shares_weights(network) and not case["frozen"])
    if apart.random() < 0.15:
        case["precision"] = apart.choice(HALVES)
    if case["stage"] == 3 and apart.random() < 0.25:
        case["offload"] = [apart.choice(["optimizer", "parameters"])]
    if case["stage"] == 3 and parts and apart.random() < 0.5:
        case["sub_group"] = apart.choice(BUDGETS)
    return with_later(case, parts)


def with_later(case, parts):
    """What came in later still: requests ahead, small buckets of modules with several parameters, steps that overflow."""
    apart = random.Random(json.dumps(case))
    if case["stage"] == 3 and apart.random() < 0.6:
        case["prefetch_bucket"] = apart.choice(BUDGETS)
        case["max_live"] = apart.choice([200, 1000, 10**9, 10**9])
    if not parts and apart.random() < 0.5:
        case["reduce_bucket"] = apart.choice(BUDGETS)
        if case["stage"] == 3:
            case.update(persistence_threshold=apart.choice([0, 10, 70, 100, 150]), sub_group=apart.choice(BUDGETS))
    case["overflows"] = "fp16" in case["precision"] and apart.random() < 0.5
    return case


def plan_of(ours, case):
    """`shardwright plan` chooses the units: those that DeepSpeed's hooks see."""
    def on(value):
        return "on" if value else "off"

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "net.json"
        path.write_text(json.dumps(model_json(case["network"])), encoding="utf-8")
        flags = {"model": str(path), "cluster": "dgx-a100", "gpus": case["shard"], "dialect": f"zero{case['stage']}",
                 "seq": case["network"]["sequence"], "precision": "/".join(case["precision"]), "clip": on(case["clip"]),
                 "micro-batch": case["micro_batch"], "accumulation": case["accumulation"], "optimizer": "adamw:foreach",
                 "contiguous-gradients": on(case["contiguous_gradients"]), "reduce-bucket": case["reduce_bucket"]}
        if case["overlap_comm"] is not None:
            flags["overlap-comm"] = on(case["overlap_comm"])
        if case["stage"] == 3:
            flags.update({"prefetch-bucket": case["prefetch_bucket"], "max-live-parameters": case["max_live"], "max-reuse-distance": case["max_reuse_distance"],
                          "persistence-threshold": case["persistence_threshold"], "sub-group": case["sub_group"]})
        if case["gradient_reduction"]:
            flags["gradient-reduction"] = case["gradient_reduction"]
        if case["frozen"]:
            flags["frozen"] = ",".join(case["frozen"])
        if case["offload"]:
            flags["offload"] = ",".join(case["offload"])
        plan = json.loads(ours.call("plan", "--no-search", *[text for key, value in flags.items() for text in (f"--{key}", str(value))]))
    plan["plan"]["recompute"] = [{**region, "kind": "full"} for region in case["recompute"]]
    if case["reentrant"]:
        plan["kernel_set"] = {"name": "torch-2022"}
    return plan


class Collectives(TorchDispatchMode):
    """Notes what is sent, also by functions that DeepSpeed took from torch when it was imported."""

    KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in self.KINDS:
            result, source = (args[0][0], args[0][0]) if name == "allreduce_" else args[:2]
            if source.dtype != torch.uint8:  # not the flag of an overflow
                self.found.append((self.KINDS[name], "shard", source.numel(), result.numel(), DTYPES.get(source.dtype, str(source.dtype))))
        elif func.namespace == "c10d" and name not in ("barrier", "broadcast_"):  # the latter of a few integers, to check that ranks are alike
            self.found.append((name,))
        return func(*args, **(kwargs or {}))


def recompute(model, case):
    """The script's own part, which DeepSpeed has no setting for. As Transformers' layers do it, and without a module around them, which
    would have hooks, too."""
    from torch.utils.checkpoint import checkpoint
    for module in {id(m): m for m in (model.get_submodule(region["module"]) for region in case["recompute"])}.values():
        def call(self, x):
            return checkpoint(super(type(self), self).__call__, x, use_reentrant=case["reentrant"])

        module.__class__ = type(type(module).__name__, (type(module),), {"__call__": call})


def trains_nothing(case, entry):
    """Does torch alone leave some call of this recomputed module without a gradient for all of its parameters?"""
    warnings.simplefilter("ignore")
    model = random_networks.make(case["network"]).train()
    recompute(model, case)
    model(**random_networks.sample(case["network"], case["micro_batch"])).backward()
    return all(p.grad is None for p in model.get_submodule(case["recompute"][entry]["module"]).parameters())


def run_case(rank, argument):
    """In a worker: the collectives of each step, and the parameters at the end."""
    case, settings = argument
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["shard"]), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler, and is for inference
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # where it is slow, too, as GPUs have it
    deepspeed.init_distributed("gloo", verbose=False)
    model = random_networks.make(case["network"]).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
    recompute(model, case)
    if "fp16" in case["precision"]:  # without overflows, whose steps are left out
        settings["fp16"]["initial_scale_power"] = 0
    if case["offload"]:  # DeepSpeed's own Adam has to be compiled
        settings["optimizer"]["params"]["torch_adam"] = True
        settings["zero_force_ds_cpu_optimizer"] = False
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    steps = []
    for step in range(STEPS):
        if case["overflows"] and step + 1 == STEPS:
            engine.optimizer.loss_scaler.cur_scale = 2.0**40
        with Collectives() as recorder:
            for i in range(case["accumulation"]):
                inputs = random_networks.sample(case["network"], case["micro_batch"], 100 * step + 10 * i + rank)
                engine.backward(engine(**inputs))
                engine.step()
        steps.append(recorder.found)
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=case["stage"] == 3):
        whole = torch.cat([p.detach().float().flatten() for p in parameters]).numpy().tobytes()
    engine.destroy()
    torch.nn.functional.linear = LINEAR
    return steps, whole


def judge(ours, pools, case):
    def data_of(recompute):
        plan = plan_of(ours, {**case, "recompute": recompute})
        answer = json.loads(ours.call("emit", ours.write(plan), "--to", "deepspeed", "--json"))
        lost = [loss for loss in answer["losses"] if loss["field"] != "plan.recompute"]  # which the script does
        if lost:
            raise AssertionError(f"emit changes the plan: {lost}")
        found = ours.collectives(plan, beside_update=case["overflows"])
        return found, json.loads(answer["files"][0]["text"])

    said = attempt(data_of, case["recompute"])
    plain = attempt(data_of, []) if isinstance(said, Refused) else said  # which has the same settings
    if isinstance(plain, Refused):
        return Outcome("refused by us only", str(plain))
    # The kinds that we refuse by name though DeepSpeed runs them: ZeRO-3 with recomputation of a model whose gradients stop, and a
    # reentrant checkpoint that trains nothing.
    if isinstance(said, Refused) and "DeepSpeed's gathers are not known then" in str(said):
        return Outcome("refused", str(said))
    if isinstance(said, Refused) and "of which no input needs a gradient" in str(said):
        entry = int(re.search(r"recompute\[(\d+)\]", str(said)).group(1))
        return Outcome("refused" if trains_nothing(case, entry) else "refused by us only", str(said))
    answers = attempt(lambda: pools.run(case["shard"], "torch_zero_random", "run_case", (case, plain[1])))
    if isinstance(answers, Failure) or isinstance(said, Refused):
        return compare(said if isinstance(said, Refused) else said[0], answers)
    outcome = compare(said[0], answers[0][0])
    if outcome.is_good and any(parameters != answers[0][1] for _, parameters in answers):
        return Outcome("different", "the ranks end with different parameters")
    return outcome


def smaller_cases(case):
    """Simpler in the plan, then in the network."""
    for key, value in PLAIN.items():
        if json.dumps(case[key]) != json.dumps(value) and key != "stage":
            yield {**case, key: value}
    for i in range(len(case["frozen"])):
        yield {**case, "frozen": case["frozen"][:i] + case["frozen"][i + 1:]}
    for candidate in smaller_networks(case):
        yield fitted(candidate)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"DeepSpeed {deepspeed.__version__} ZeRO", "0:8", "0:400,30000:30012,40000:40012,40019", FIXED, PLAIN))
