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
from torch_fsdp2_random import calling, fitted, layers  # noqa: E402
from torch_pool import NAMES, Failure  # noqa: E402

STEPS = 3
DTYPES = {**NAMES, torch.float64: "fp32"}  # DeepSpeed sums the one number of the norm in fp64
PRECISIONS = [("fp32", "fp32", "fp32"), ("fp32", "bf16", "bf16"), ("fp32", "bf16", "fp32")]
BUDGETS = [60, 100, 400, 2000, 10**9]
PLAIN = {"stage": 3, "shard": 2, "replicate": 1, "micro_batch": 1, "accumulation": 1, "precision": PRECISIONS[0], "clip": False,
         "frozen": [], "overlap_comm": None, "contiguous_gradients": True, "reduce_bucket": 10**9,
         "gradient_reduction": None, "max_reuse_distance": 0, "persistence_threshold": 0, "units": [], "recompute": []}


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
    "asked to all-reduce, a gradient larger than the bucket": fixed(FLAT, gradient_reduction="all_reduce", reduce_bucket=100),
}


def one_parameter_each(part):
    """The part with modules of one parameter: no biases, norms or experts."""
    if part["kind"] != "seq":
        kept = {key: value for key, value in part.items() if key != "bias"}
        return kept if part["kind"] in ("linear", "mlp", "borrow") else {"kind": "linear"}
    return {**part, "children": [one_parameter_each(child) for child in part["children"]]}


def without_second_names(part):
    """The part without weights of other modules and without second names."""
    if part["kind"] == "borrow":
        return {"kind": "linear"}
    if part["kind"] != "seq":
        return part
    count = len(part["children"])
    calls = [call for call in part["calls"] if call[0] < count] or [[0, "chain"]]
    return {"kind": "seq", "list": part["list"], "children": [without_second_names(child) for child in part["children"]], "calls": calls}


def random_case(seed):
    rng = random.Random(seed)
    network = random_networks.random_network(rng)
    case = {**PLAIN, "stage": rng.choice([1, 2, 3, 3]), "shard": rng.choice([2, 2, 3, 4]), "micro_batch": rng.choice([1, 2]),
            "accumulation": rng.choices([1, 2, 3], [6, 3, 1])[0], "clip": rng.random() < 0.3, "precision": rng.choice(PRECISIONS),
            "overlap_comm": rng.choice([None, True, False]), "contiguous_gradients": rng.random() < 0.8}
    if case["stage"] == 3:
        network = {**network, "body": without_second_names(network["body"])}
        case.update(max_reuse_distance=rng.choice(BUDGETS), gradient_reduction=rng.choice([None, None, "all_reduce"]))
    if rng.random() < 0.6:  # where parameters of a module part
        network = {**network, "norm": False, "body": one_parameter_each(network["body"])}
        case["reduce_bucket"] = rng.choice(BUDGETS)
        case["persistence_threshold"] = rng.choice([0, 70, 100, 150]) if case["stage"] == 3 else 0
    if rng.random() < 0.2:
        names = [n for n, _ in random_networks.make(network).named_parameters() if n != "head.weight"]
        case["frozen"] = [name for name in names if rng.random() < 0.4]
    return {**case, "network": network}


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
            flags.update({"prefetch-bucket": 0, "max-reuse-distance": case["max_reuse_distance"],
                          "persistence-threshold": case["persistence_threshold"]})
        if case["gradient_reduction"]:
            flags["gradient-reduction"] = case["gradient_reduction"]
        if case["frozen"]:
            flags["frozen"] = ",".join(case["frozen"])
        return json.loads(ours.call("plan", "--no-search", *[text for key, value in flags.items() for text in (f"--{key}", str(value))]))


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


def run_case(rank, argument):
    """In a worker: the collectives of each step, and the parameters at the end."""
    case, settings = argument
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case["shard"]), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # needs a compiler, and is for inference
    deepspeed.init_distributed("gloo", verbose=False)
    model = random_networks.make(case["network"]).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
    steps = []
    for step in range(STEPS):
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
    return steps, whole


def judge(ours, pools, case):
    def data_of():
        plan = plan_of(ours, case)
        answer = json.loads(ours.call("emit", ours.write(plan), "--to", "deepspeed", "--json"))
        if not answer["is_exact"]:
            raise AssertionError(f"emit changes the plan: {answer['losses']}")
        return ours.collectives(plan), json.loads(answer["files"][0]["text"])

    said = attempt(data_of)
    if isinstance(said, Refused):
        return Outcome("refused by us only", str(said))
    answers = attempt(lambda: pools.run(case["shard"], "torch_zero_random", "run_case", (case, said[1])))
    if isinstance(answers, Failure):
        return compare(said[0], answers)
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
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"DeepSpeed {deepspeed.__version__} ZeRO", "0:8", "0:400", FIXED, PLAIN))
