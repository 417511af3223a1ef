"""Random networks and settings under real FSDP1: its collectives and gathered bytes, step by step, are those of our programs.

    python3 tests/schedule/torch_fsdp1_random.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--fixed NAME] [--no-shrink]

Each case is a network (random_networks.py) and a plan. `emit` writes the plan, and the emitted applier wraps the module in 2 to 4
gloo processes, where three steps run. Compared are order, kind, group, elements and dtype of every collective, and the bytes of
gathered parameters that are allocated when it is issued. All ranks must end with the same parameters and, in fp32, with the
losses of the unwrapped module. Fixed cases, which hold what once was wrong, come before the random ones. docs/conformance.md says
what the random ones leave out.
"""

import contextlib
import json
import pathlib
import random
import sys
import warnings

try:
    import torch
    import torch.distributed.fsdp  # before processes are forked
    from torch import distributed
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "planner" / "emitters" / "python"))

import random_networks  # noqa: E402
import shardwright_fsdp1  # noqa: E402
import shardwright_plan  # noqa: E402
from random_cases import RELEASE, Outcome, Refused, attempt, compare, main_of, model_json, smaller_networks  # noqa: E402
from torch_fsdp2_random import (FP16, LAYERS, LONG, SCALE, calling, fitted, idling, layers, random_modules,  # noqa: E402
                                random_recompute, splits, ties_of, returning, under_two_names, with_dead_layer)
from torch_pool import Failure, Recorder  # noqa: E402

STEPS = 3
FIRST_FP16 = 800  # the seed from which on a tenth computes in fp16, with a loss scaler
MESHES = [(2, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 2), (1, 3)]  # shard, replicate
FP32 = ("fp32", "fp32", "fp32")
PRECISIONS = [FP32, ("fp32", "bf16", "fp32"), ("fp32", "bf16", "bf16"), ("fp32", "fp32", "bf16")]
# Sums of a few hundred fp32 numbers in another order, three steps long.
TOLERANCE = 1e-4
MAX_NORM = 0.05

PLAIN = {"shard": 2, "replicate": 1, "micro_batch": 1, "accumulation": 1, "sync": "every", "precision": FP32, "recompute": [],
         "frozen": [], "clip": False, "offload": False, "backward_prefetch": "pre", "forward_prefetch": False, "limit_all_gathers": True,
         "use_orig_params": True, "mode": "train"}


def fixed(units, root="always", **settings):
    units = [{"modules": [m], "reshard": "always"} for m in units] + [{"modules": [""], "reshard": root}]
    return {**PLAIN, "network": layers(), "units": units, **settings}


def selectively(*modules):
    return [{"module": module, "kind": "selective", "keep_every": 2} for module in modules]


def with_modes(calls):
    return {**layers(), "body": {**layers()["body"], "calls": calls}}


def borrowing():
    """A linear layer, whose weight the second one uses, too."""
    return {**layers(), "body": {"kind": "seq", "list": False, "calls": [[0, "chain"], [1, "residual"]],
                                 "children": [{"kind": "linear"}, {"kind": "borrow", "of": "body.c0"}]}}


INNER = [name for layer in LAYERS for name in (f"{layer}.c1", layer)]
ENDS = ["embed", *LAYERS, "head"]
FIXED = {
    "layers": fixed(LAYERS),
    "ends apart": fixed(ENDS),
    "units in units": fixed(INNER),
    "replicas only": fixed(LAYERS, shard=1, replicate=2),
    "replicas only, bf16, accumulated": fixed(LAYERS, shard=1, replicate=3, precision=("fp32", "bf16", "bf16"), accumulation=2),
    "replicas only, flat": fixed(LAYERS, shard=1, replicate=2, use_orig_params=False, accumulation=2, sync="last", clip=True),
    "frozen beside trainable": fixed(LAYERS, frozen=[f"{name}.c1.fc1.weight" for name in LAYERS]),
    "frozen below trainable": fixed(LAYERS, frozen=["embed.weight", "body.layers.0.*", "body.layers.1.c0.*"]),
    "forward prefetch": fixed(ENDS, forward_prefetch=True),
    "forward prefetch, accumulated": fixed(ENDS, forward_prefetch=True, accumulation=2),
    "forward prefetch, units in units": fixed(INNER, forward_prefetch=True),
    "prefetch after backward": fixed(ENDS, backward_prefetch="post"),
    "no prefetch": fixed(ENDS, backward_prefetch="none"),
    "no_sync, full shard": fixed(LAYERS, accumulation=3, sync="last"),
    "no_sync, root kept": fixed(LAYERS, root="never", accumulation=3, sync="last"),
    "recomputed layers, inner units": fixed(INNER, recompute=[{"module": name, "kind": "full"} for name in LAYERS],
                                            backward_prefetch="none"),
    "the inner unit of two that end together begins": fixed([INNER[4], INNER[5]], backward_prefetch="none"),
    "frozen layer": fixed(LAYERS, frozen=["body.layers.1.*"]),
    "a first call that no gradient comes back to": {
        **fixed(["body.layers.0", "body.layers.1"], backward_prefetch="none"),
        "network": {**layers(), "body": {**layers()["body"], "calls": [[0, "dead"], [1, "chain"], [0, "chain"], [2, "chain"]]}}},
    "a layer called twice in a row": {**fixed(LAYERS, backward_prefetch="none"), "network": calling([0, 1, 1, 2])},
    "a module under two names": {**fixed(["body.c0", "body.c1"]), "network": under_two_names()},
    "a first call that no gradient comes back to, cast": {
        **fixed(["body.layers.0"], backward_prefetch="none", precision=("fp32", "bf16", "fp32")),
        "network": {**layers(), "body": {**layers()["body"], "calls": [[0, "dead"], [1, "chain"], [0, "chain"], [2, "chain"]]}}},
    "a unit at the end of what is recomputed selectively": fixed([f"{LAYERS[1]}.c1"], recompute=selectively(LAYERS[1])),
    "a unit at the beginning of what is recomputed selectively": fixed([f"{LAYERS[1]}.c0"], recompute=selectively(LAYERS[1])),
    "units in the middle of what is recomputed selectively": fixed([f"{name}.c1.fc1" for name in LAYERS], backward_prefetch="none",
                                                                   recompute=selectively(*LAYERS)),
    "units in the middle of what is recomputed selectively, without a limiter": fixed(
        [f"{name}.c1.fc1" for name in LAYERS], backward_prefetch="none", limit_all_gathers=False, recompute=selectively(*LAYERS)),
    "units in the middle of what is recomputed selectively, prefetched": fixed([f"{name}.c1.fc1" for name in LAYERS],
                                                                               recompute=selectively(*LAYERS)),
    "a unit in the middle of what is recomputed selectively, gathered ahead from outside": fixed(
        [f"{name}.c1.fc1" for name in LAYERS], backward_prefetch="none", limit_all_gathers=False, forward_prefetch=True,
        recompute=selectively(LAYERS[2])),
    "a part that reaches no loss at the end of what is recomputed": {
        **fixed(LAYERS[1:], backward_prefetch="none", recompute=[{"module": "body", "kind": "full"}]),
        "network": {**layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [1, "chain"], [2, "dead"]]}}},
    "a part that nothing calls": fixed(LAYERS, network=calling([0, 2])),
    "a part that nothing calls, flat": fixed(LAYERS, network=calling([0, 2]), use_orig_params=False, clip=True),
    "a part that nothing calls, in a flat unit with others": fixed(LAYERS[:1], network=calling([0, 2]), use_orig_params=False),
    "a part that nothing calls, in a unit with others": fixed(LAYERS[:1], network=calling([0, 2]), clip=True),
    "a frozen layer that reaches no loss": fixed(LAYERS, network=with_dead_layer(), frozen=["body.layers.1.*"]),
    "a frozen layer that reaches no loss, units in it, all kept": {
        **fixed([], backward_prefetch="post", network=with_dead_layer(), frozen=["body.layers.1.*"]),
        "units": [{"modules": [name], "reshard": "never"} for name in (f"{LAYERS[1]}.c0", *LAYERS[1:], "")]},
    "a frozen layer that reaches no loss, gathered ahead after its end": {
        **fixed([], backward_prefetch="post", network=with_dead_layer(), frozen=["body.layers.1.*"]),
        "units": [{"modules": [name], "reshard": "never"} for name in (LAYERS[1], "")]},
    "a flat layer that reaches no loss, kept for good": {
        **fixed([], network=with_dead_layer(), use_orig_params=False, accumulation=2, backward_prefetch="none"),
        "units": [{"modules": [name], "reshard": reshard} for name, reshard in ((LAYERS[0], "always"), (LAYERS[1], "never"), ("", "always"))]},
    "replicas only, flat, a weight that another module uses": fixed(
        ["body.c0"], shard=1, replicate=2, use_orig_params=False, network=borrowing()),
    "a weight that another module uses": fixed(["body.c0"], network=borrowing()),
    "a layer called twice in a row, recomputed": fixed(
        INNER, network=calling([0, 1, 1, 2]), recompute=[{"module": name, "kind": "full"} for name in LAYERS]),
    "a layer that runs nothing": fixed(LAYERS, network=idling([[0, "chain"], [1, "chain"], [2, "chain"]])),
    "a layer that runs nothing, called twice, in two micro-batches": fixed(
        LAYERS, network=idling([[0, "chain"], [1, "residual"], [1, "chain"], [2, "chain"]]), accumulation=2, forward_prefetch=True),
    "a layer that returns what it is given": fixed(LAYERS, network=returning()),
    "a layer that returns what it is given, prefetched after backward": fixed(LAYERS, network=returning(), backward_prefetch="post"),
    "an all-frozen layer that returns what it is given": fixed(LAYERS, network=returning(), frozen=["body.layers.1.*"]),
    "replicas only, a module under two names, no_sync": {
        **fixed([], shard=1, replicate=2, accumulation=2, sync="last", precision=("fp32", "bf16", "fp32")), "network": under_two_names()},
    "a layer first called under no_grad": fixed(LAYERS, network=with_modes([[0, "chain"], [1, "no_grad"], [1, "chain"], [2, "chain"]])),
    "a layer first called under no_grad, cast": fixed(
        LAYERS, network=with_modes([[0, "chain"], [1, "no_grad"], [1, "chain"], [2, "chain"]]), precision=("fp32", "bf16", "fp32")),
    "a layer called under no_grad last, kept": {
        **fixed([], network=with_modes([[0, "chain"], [1, "chain"], [1, "no_grad"], [2, "chain"]])),
        "units": [{"modules": [name], "reshard": "never"} for name in (*LAYERS, "")]},
    "a layer called under no_grad alone, kept for good": {
        **fixed([], network=with_modes([[0, "chain"], [1, "no_grad"], [2, "chain"]]), accumulation=2),
        "units": [{"modules": [name], "reshard": "never"} for name in (*LAYERS, "")]},
    "a frozen layer first called under no_grad": fixed(
        LAYERS, network=with_modes([[0, "chain"], [1, "no_grad"], [1, "chain"], [2, "chain"]]), frozen=["body.layers.1.*"]),
    "a frozen layer whose last call is given data": fixed(
        LAYERS, network=with_modes([[0, "chain"], [1, "chain"], [1, "data"], [2, "chain"]]), frozen=["body.layers.1.*"]),
    "forward only": fixed(LAYERS[:2], mode="forward", forward_prefetch=True),
    "offloaded": fixed(LAYERS, offload=True, precision=("fp32", "bf16", "fp32")),
    "offloaded and clipped": fixed(LAYERS, offload=True, clip=True, replicate=2, frozen=["body.layers.0.*"]),
    "offloaded, in two micro-batches": fixed(LAYERS, offload=True, accumulation=2, use_orig_params=False),
    "offloaded and clipped, no_sync": fixed(LAYERS, offload=True, clip=True, accumulation=2, sync="last", use_orig_params=False),
    "replicas only, offloaded and clipped": fixed(LAYERS, shard=1, replicate=2, offload=True, clip=True),
    "fp16, hybrid": fixed(ENDS, replicate=2, precision=("fp32", "fp16", "fp32")),
    "fp16, hybrid, clipped": fixed(ENDS, replicate=2, precision=("fp32", "fp16", "fp16"), clip=True, accumulation=2),
    "fp16, replicas only": fixed(LAYERS, shard=1, replicate=3, precision=("fp32", "fp16", "fp32")),
    "fp16, offloaded": fixed(LAYERS, shard=3, precision=("fp32", "fp16", "fp32"), offload=True),
    "hybrid, clipped": fixed(ENDS, replicate=2, precision=("fp32", "bf16", "fp32"), clip=True),
}


def has_repeated_parts(network):
    parts = dict(random_networks.paths_of(network["body"]))
    runs = lambda path: [index for index, _ in parts[path].get("calls", [])]  # noqa: E731
    return any(len(runs(path)) != len(set(runs(path))) or parts[path].get("alias") for path in parts)


def has_dead_parts(network):
    return any(mode == "dead" for _, part in random_networks.paths_of(network["body"]) for _, mode in part.get("calls", []))


def frozen_units(rng, case):
    """All parameters of some units, which are frozen as a whole or not at all where they are flat."""
    model = random_networks.make(case["network"])
    unit_of = shardwright_plan._unit_of_parameters(case, dict(model.named_modules(remove_duplicate=False)))
    frozen = {u for u in range(len(case["units"])) if rng.random() < 0.4} - {unit_of[id(model.head.weight)]}
    return [name for name, p in model.named_parameters() if unit_of[id(p)] in frozen]


def random_case(seed):
    rng = random.Random(seed)
    network = random_networks.random_network(rng)
    rich = random_networks.rich_random(seed)
    if rich:
        network = random_networks.rich_network(seed)
    share = rng.choice([0.2, 0.4, 0.7])
    chosen = [name for name in random_modules(rng, network) if rng.random() < share]
    chosen = [name for name in chosen if not any(splits({"modules": [name]}, tie) for tie in ties_of(network))]
    if rng.random() < 0.25:
        rng.shuffle(chosen)
    same = rng.choice(["always", "always", "never", None])
    case = {**PLAIN, "network": network, "units": [{"modules": [name], "reshard": same or rng.choice(["always", "never"])}
                                                  for name in [*chosen, ""]]}
    case["shard"], case["replicate"] = rng.choice(MESHES)
    case.update(micro_batch=rng.choice([1, 2]), accumulation=rng.choices([1, 2, 3], [6, 3, 1])[0],
                precision=rng.choice(PRECISIONS), clip=rng.random() < 0.25, forward_prefetch=rng.random() < 0.3,
                backward_prefetch=rng.choice(["pre", "pre", "post", "none"]), limit_all_gathers=rng.random() < 0.7)
    if case["accumulation"] > 1:
        case["sync"] = rng.choice(["every", "last"])
    if rng.random() < 0.25:
        names = [n for n, _ in random_networks.make(network).named_parameters() if n != "head.weight"]
        rate = rng.choice([0.2, 0.6])
        case["frozen"] = [name for name in names if rng.random() < rate]
    if rich and rich.random() < 0.4:
        case["frozen"] = random_networks.enriched_frozen(rich, network)
    # What needs gradients of some parameters only, and regions that run twice, came in later, and change no other draw.
    apart = random.Random(json.dumps(case))
    draw = apart if case["frozen"] or has_dead_parts(network) else rng
    case["use_orig_params"] = draw.random() < 0.7
    if case["frozen"] and not case["use_orig_params"]:
        case["frozen"] = frozen_units(apart, case)
    if rng.random() < 0.3:
        case["recompute"] = random_recompute(apart if has_repeated_parts(network) else rng, network)
    if rng.random() < 0.1:
        case.update(mode="forward", recompute=[], frozen=[], clip=False, accumulation=1, sync="every")
    # Where nothing is sharded torch computes with the parameters themselves if the device is a CPU, not with a copy.
    case["offload"] = case["shard"] > 1 and random.Random(json.dumps(case)).random() < 0.1
    if seed >= FIRST_FP16 and random.Random(json.dumps(case)).random() < 0.1:
        case["precision"] = FP16[seed % len(FP16)]
    if rich:
        case["averages"] = rich.random() < 0.3
    return case


def plan_of(case):
    master, param, reduce = case["precision"]
    units = [{"name": unit["modules"][0] or "root", "modules": unit["modules"], "reshard": unit["reshard"]} for unit in case["units"]]
    return {
        "format": "shardwright-plan", "version": 1, "model": {"name": "net", "json": model_json(case["network"])},
        "kernel_set": {"name": "torch-eager", "fp32_logits": False},
        "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": case["shard"] * case["replicate"]},
        "profile": {"name": "a100-torch-eager"},
        "job": {"mode": case["mode"], "sequence_length": case["network"]["sequence"],
                "precision": {"master": master, "param": param, "reduce": reduce},
                "optimizer": {"kind": "sgd", "impl": "foreach", "weight_decay": False}, "clip_gradients": case["clip"],
                "frozen": case["frozen"]},
        "plan": {"dialect": "fsdp1", "torch": RELEASE, "shard_size": case["shard"], "replicate_size": case["replicate"], "units": units,
                 "offload": {"parameters": case["offload"]}, **{key: case[key] for key in ("micro_batch", "accumulation", "sync", "recompute", "backward_prefetch",
                                               "forward_prefetch", "limit_all_gathers", "use_orig_params")}}}


def samples_of(case, step, rank=None):
    """Inputs of the step's micro-batches: those of a rank, or of all ranks."""
    ranks, size = case["shard"] * case["replicate"], case["micro_batch"]
    for i in range(case["accumulation"]):
        inputs = random_networks.sample(case["network"], ranks * size, 100 * step + i)
        yield inputs if rank is None else {key: t[rank * size:(rank + 1) * size] for key, t in inputs.items()}


def train_step(case, model, optimizer, samples, around, clip, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    total = 0.0
    if case["mode"] == "forward":
        with torch.no_grad():
            return sum(model(**inputs).item() for inputs in samples)
    for i, inputs in enumerate(samples):
        with around(i):
            loss = model(**inputs) / case["accumulation"]
            scaler.scale(loss).backward()
        total += loss.item()
    if case["clip"]:
        scaler.unscale_(optimizer)
        clip()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


def learner(model, kind="sgd"):
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=0.1) if kind == "sgd" else torch.optim.AdamW(trainable, foreach=True)


def plain_run(case):
    """The unwrapped module trained on the samples of all ranks at once, and its losses."""
    model = random_networks.make(case["network"])
    random_networks.freeze(model, case["frozen"])
    optimizer = learner(model)
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)  # noqa: E731
    return model, [train_step(case, model, optimizer, samples_of(case, step), lambda _: contextlib.nullcontext(), clip)
                   for step in range(STEPS)]


def untrained(case, parameters):
    """A parameter that only the unwrapped module changes; empty: none. Without the parameters' own views it cannot be told."""
    if not case["use_orig_params"]:
        return ""
    found = torch.frombuffer(bytearray(parameters), dtype=torch.float32)
    before = random_networks.make(case["network"])
    for (name, old), new in zip(before.named_parameters(), plain_run(case)[0].parameters()):
        mine, found = found[:old.numel()], found[old.numel():]
        if torch.equal(mine, old.detach().flatten()) and not torch.equal(new, old):
            return name
    return ""


def gathered_bytes(model):
    """What flat parameters have gathered, or, with NO_SHARD, cast."""
    total = 0
    handles = (getattr(module, "_handle", None) for module in model.modules())  # PEFT's wrappers pass on those of others
    for handle in {id(handle): handle for handle in handles if handle is not None}.values():
        name = "_full_param_padded" if handle.uses_sharded_strategy else "_mp_shard"
        tensor = getattr(handle.flat_param, name, None)
        total += tensor.untyped_storage().size() if tensor is not None else 0
    return total


def groups_of(case):
    shard, ranks = case["shard"], case["shard"] * case["replicate"]
    names = {tuple(range(shard)): "shard"}
    if case["replicate"] > 1:
        names[tuple(range(0, ranks, shard))] = "replicate"
    names.setdefault(tuple(range(ranks)), "world")
    return names


def offload_as_from_a_gpu():
    """FSDP1 pins memory and waits for copies also where the device is a CPU, and then takes gradients on "the host" for such on the
    device, to which it would add."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    if getattr(torch.Tensor.pin_memory, "is_ours", False):
        return
    pin = lambda tensor, device=None: tensor  # noqa: E731
    pin.is_ours = True
    torch.Tensor.pin_memory = pin
    torch.cpu.Stream.synchronize = lambda stream: None
    prepare = FlatParamHandle.prepare_gradient_for_backward

    def prepare_on_host(handle):
        prepare(handle)
        if handle._offload_params and hasattr(handle.flat_param, "_saved_grad_shard"):
            del handle.flat_param._saved_grad_shard

    FlatParamHandle.prepare_gradient_for_backward = prepare_on_host


def run_case(rank, argument, more=None, kind="sgd"):
    """In a worker: the collectives of each step, the losses, and the parameters at the end. `more(model, optimizer)` is what else is
    noted of each collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    warnings.simplefilter("ignore")
    case, data = argument
    if case["offload"]:
        offload_as_from_a_gpu()
    model = random_networks.make(case["network"]).train()
    random_networks.freeze(model, case["frozen"])
    model = shardwright_fsdp1.apply_plan(model, data, device_type="cpu", device_id=torch.device("cpu"))
    optimizer = learner(model, kind)
    scaler = ShardedGradScaler("cpu", init_scale=SCALE, enabled=case["precision"][1] == "fp16")
    steps, losses = [], []
    with Recorder(groups_of(case), lambda: more(model, optimizer) if more else (gathered_bytes(model),)) as recorder:
        for step in range(STEPS):
            losses.append(train_step(case, model, optimizer, samples_of(case, step, rank),
                                     lambda i: shardwright_fsdp1.micro_batch(model, i), lambda: model.clip_grad_norm_(MAX_NORM), scaler))
            random_networks.average(case, model)
            steps.append(recorder.take())
    with FullyShardedDataParallel.summon_full_params(model):
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    distributed.barrier()
    return steps, losses, parameters


def judge_training(case, answers):
    if any(parameters != answers[0][2] for _, _, parameters in answers):
        return Outcome("different", "the ranks end with different parameters")
    if tuple(case["precision"]) == FP32:
        means = [sum(losses[step] for _, losses, _ in answers) / len(answers) for step in range(STEPS)]
        wanted = plain_run(case)[1]
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(means, wanted)):
            return Outcome("different", f"losses {means} instead of {wanted}")
    return Outcome("equal")


def wrong_training(case, answers):
    """What is wrong with a run that we refuse; empty: nothing."""
    if isinstance(answers, Failure):
        return str(answers)
    name = untrained(case, answers[0][2])
    return judge_training(case, answers).text or (name and f"{name} is not trained")


def unchecked(ours, case):
    """What `emit` would write for a plan that it refuses: that of one unit in fp32 without recomputation, offload and frozen parameters,
    and what the plan asks for."""
    root = [{"modules": [""], "reshard": "always"}]
    plain = attempt(lambda: ours.emitted(plan_of({**case, "precision": FP32, "recompute": [], "frozen": [], "units": root, "offload": False}),
                                         "fsdp1"))
    if isinstance(plain, Refused):
        return None
    plain["offload"]["parameters"] = case["offload"]
    units = sorted(case["units"], key=lambda unit: -1 if unit["modules"] == [""] else unit["modules"][0].count("."), reverse=True)
    plain["units"] = [{"name": unit["modules"][0] or "root", "modules": unit["modules"],
                       "reshard_after_forward": unit["reshard"] == "always"} for unit in units]
    model = random_networks.make(case["network"])
    unit_of = shardwright_plan._unit_of_parameters(plain, dict(model.named_modules(remove_duplicate=False)))
    for parameter in plain["parameters"]:
        parameter["unit"] = unit_of[id(model.get_parameter(parameter["fqn"]))]
    _, param, reduce = (LONG[dtype] for dtype in case["precision"])
    regions = [{"keep_every": 1, **region} for region in case["recompute"]]
    random_networks.freeze(model, case["frozen"])
    for parameter in plain["parameters"]:  # also by the second of two names
        parameter["trainable"] = model.get_parameter(parameter["fqn"]).requires_grad
    return {**plain, "recompute": regions, "dtypes": {**plain["dtypes"], "param": param, "reduce": reduce}}


def judge(ours, pools, case):
    def data_of():
        plan = plan_of(case)
        return ours.collectives(plan, categories=["unsharded_parameter"]), ours.emitted(plan, "fsdp1")

    said = attempt(data_of)
    refused = isinstance(said, Refused)
    data = unchecked(ours, case) if refused else said[1]
    if data is None:
        return Outcome("refused by us only", str(said))
    run = lambda case: attempt(  # noqa: E731
        lambda: pools.run(case["shard"] * case["replicate"], "torch_fsdp1_random", "run_case", (case, data)))
    answers = run(case)
    if refused and not isinstance(answers, Failure):
        wrong = wrong_training(case, answers)
        if not wrong and tuple(case["precision"]) != FP32:  # whose losses tell more
            case = {**case, "precision": FP32}
            data["dtypes"] = {name: "float32" for name in data["dtypes"]}
            wrong = wrong_training(case, run(case))
        if not wrong and case["offload"]:  # a CPU has no copy on a device, but one that is cast
            case = {**case, "offload": False, "precision": ("fp32", "bf16", "fp32")}
            data = unchecked(ours, case)
            wrong = wrong_training(case, run(case))
        return compare(said, Failure(wrong) if wrong else answers[0][0])
    if isinstance(answers, Failure):
        return compare(said if refused else said[0], answers)
    compared = [said[0], answers[0][0]]
    if case["offload"] and case["shard"] == 1:  # the copy on the device is the parameter itself where that is the CPU
        compared = [[[row[:5] for row in step] for step in steps] for steps in compared]
    outcome = compare(*compared)
    return outcome if not outcome.is_good else judge_training(case, answers)


def smaller_cases(case):
    """Simpler in the plan, then in the network."""
    for key, value in PLAIN.items():
        if json.dumps(case[key]) != json.dumps(value) and key not in ("shard", "replicate", "sync"):
            yield {**case, key: value, **({"sync": "every"} if key == "accumulation" else {})}
    if (case["shard"], case["replicate"]) != (2, 1):
        yield {**case, "shard": 2, "replicate": 1}
    for i in range(len(case["units"]) - 1):
        yield {**case, "units": case["units"][:i] + case["units"][i + 1:]}
    for key in ("frozen", "recompute"):
        for i in range(len(case[key])):
            yield {**case, key: case[key][:i] + case[key][i + 1:]}
    for candidate in smaller_networks(case):
        yield fitted(candidate)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"PyTorch {torch.__version__} FSDP1", "0:7,30030,30043", "0:800,30000:30092,30113", FIXED, PLAIN))
