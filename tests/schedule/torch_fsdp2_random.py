"""Random networks and settings: the collectives of real FSDP2 runs are those of our fsdp2 programs, or both refuse.

    python3 tests/schedule/torch_fsdp2_random.py SHARDWRIGHT [--seeds 0:10,13] [--case JSON] [--no-shrink] [--page]

Each case is a network (random_networks.py) and a plan. tools/export_model.py describes the network to us, `emit` writes the plan
for the applier, which wraps the module in 2 to 6 gloo processes; three steps run there, and order, kind, group, elements and
dtype of every collective are compared with those of the simulated program.
"""

import contextlib
import copy
import pathlib
import random
import sys

try:
    import torch
    import torch.distributed.fsdp  # before processes are forked
    from torch.distributed.device_mesh import init_device_mesh
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "planner" / "emitters" / "python"))

import random_networks  # noqa: E402
import shardwright_fsdp2  # noqa: E402
import shardwright_plan  # noqa: E402
from random_cases import RELEASE, Refused, attempt, compare, main_of, model_json, smaller_networks  # noqa: E402
from torch_pool import Recorder  # noqa: E402

STEPS = 3
MESHES = [(2, 1), (3, 1), (4, 1), (2, 2), (6, 1), (3, 2), (2, 3)]  # shard, replicate
PRECISIONS = [("fp32", "fp32", "fp32"), ("fp32", "bf16", "fp32"), ("fp32", "bf16", "bf16"), ("bf16", "bf16", "bf16")]
FP16 = [("fp32", "fp16", "fp32"), ("fp32", "fp16", "fp16")]  # of some seeds, with a loss scaler
FIRST_FP16 = 1500  # the seed from which on a tenth has one of these
LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCALE = 16.0  # at which small networks do not overflow
meshes = {}  # of a worker
# Setters that leave the collectives as they are, and must be noticed.
SETTINGS = {"set_force_sum_reduction_for_comms": lambda model: model.set_force_sum_reduction_for_comms(True),
            "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(enable=True),
            "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3)}

def layers():
    """Three layers: residual sums of a norm and an MLP."""
    layer = {"kind": "seq", "list": False, "calls": [[0, "chain"], [1, "chain"]],
             "children": [{"kind": "norm"}, {"kind": "mlp", "hidden": 12, "bias": True}]}
    return {"width": 8, "vocabulary": 21, "sequence": 4, "inputs": 1, "norm": True, "tied_head": False,
            "body": {"kind": "seq", "list": True, "calls": [[i, "residual"] for i in range(3)], "children": [layer] * 3}}


def calling(calls):
    """The layers, called in this order."""
    return {**layers(), "body": {**layers()["body"], "calls": [[i, "chain"] for i in calls]}}


def under_two_names():
    """body.c1.c1 is body.c0."""
    return {**layers(), "body": {
        "kind": "seq", "list": False, "calls": [[0, "residual"], [1, "residual"]],
        "children": [{"kind": "mlp", "hidden": 12, "bias": True},
                     {"kind": "seq", "list": False, "alias": "body.c0", "calls": [[0, "residual"], [1, "residual"]],
                      "children": [{"kind": "norm"}]}]}}


def nested(calls):
    """body.c1 calls a norm, a linear layer and body.c0 (2) like this; both are recomputed, one inside the other."""
    network = under_two_names()
    network["body"]["children"][1] = {"kind": "seq", "list": False, "alias": "body.c0", "calls": [[i, "chain"] for i in calls],
                                      "children": [{"kind": "norm"}, {"kind": "linear"}]}
    return {"network": network, "recompute": [{"module": name, "kind": "full"} for name in ("body.c0", "body.c1")]}


PLAIN = {"network": layers(), "shard": 2, "replicate": 1, "micro_batch": 1, "accumulation": 1, "sync": "every",
         "precision": ("fp32", "fp32", "fp32"), "recompute": [], "frozen": [], "mode": "train", "clip": False, "offload": False}


def fixed(*units, **settings):
    units = [{"modules": unit if isinstance(unit, list) else [unit], "reshard": None} for unit in (*units, "")]
    return {**PLAIN, "units": units, **settings}


def fetching(case, module, names, when="backward_prefetch"):
    """The case where the unit that ends with the module gathers these ahead, in backward if nothing else is said."""
    return {**case, "units": [{**unit, when: names} if unit["modules"][-1] == module else unit for unit in case["units"]]}


def with_dead_layer():
    """The second of the layers reaches no loss."""
    return {**layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [1, "dead"], [2, "chain"]]}}


def returning():
    """The second layer, called twice, drops what it computes and returns what it is given."""
    layer = layers()["body"]["children"][0]
    second = {"kind": "seq", "list": False, "calls": [[0, "dead"]], "children": [{"kind": "linear", "bias": True}]}
    return {**layers(), "body": {"kind": "seq", "list": True, "children": [layer, second, layer],
                                 "calls": [[0, "chain"], [1, "chain"], [1, "residual"], [2, "chain"]]}}


def idling(calls):
    """The second layer runs nothing and returns what it is given."""
    layer = layers()["body"]["children"][0]
    second = {"kind": "seq", "list": False, "calls": [], "children": [{"kind": "linear", "bias": True}]}
    return {**layers(), "body": {"kind": "seq", "list": True, "children": [layer, second, layer], "calls": calls}}


def with_pair():
    """A linear layer, and behind it two in a layer of their own."""
    pair = {"kind": "seq", "list": False, "calls": [[0, "chain"], [1, "chain"]], "children": [{"kind": "linear"}, {"kind": "linear", "bias": True}]}
    return {**layers(), "norm": False, "body": {"kind": "seq", "list": False, "calls": [[0, "chain"], [1, "chain"]],
                                                "children": [{"kind": "linear"}, pair]}}


def with_dead_end():
    """The first layer ends with a part that reaches no loss; nothing calls the second."""
    first = {"kind": "seq", "list": True, "calls": [[0, "chain"], [1, "dead"]], "children": [{"kind": "linear"}] * 2}
    return {**layers(), "body": {"kind": "seq", "list": True, "calls": [[0, "chain"], [2, "chain"]],
                                 "children": [first, {"kind": "linear"}, {"kind": "linear"}]}}


def reshard_root(case):
    """The case with a root that is resharded after forward."""
    return {**case, "units": [{**unit, "reshard": True} if unit["modules"] == [""] else unit for unit in case["units"]]}


def called_by_second_name():
    """Nothing calls body.c1, whose child runs under the name body.c2."""
    return {**layers(), "body": {
        "kind": "seq", "list": False, "calls": [[0, "chain"], [2, "chain"]], "alias": "body.c1.c0",
        "children": [{"kind": "linear"}, {"kind": "seq", "list": False, "calls": [[0, "chain"]], "children": [{"kind": "linear"}] * 2}]}}


def stopping(*modes):
    """The layers, called like this."""
    return {**layers(), "body": {**layers()["body"], "calls": [[i, mode] for i, mode in enumerate(modes)]}}


LAYERS = [f"body.layers.{i}" for i in range(3)]
FIXED = {
    "forward only, a unit gathered ahead that has run already, none of them kept": fetching(reshard_root(
        fixed(*LAYERS, mode="forward")), LAYERS[1], [LAYERS[0]], "forward_prefetch"),
    "a layer under no_grad": fixed(*LAYERS, network=stopping("chain", "no_grad", "chain"), accumulation=2, sync="last"),
    "a frozen layer under no_grad": fixed(*LAYERS, network=stopping("chain", "no_grad", "chain"), frozen=[f"{LAYERS[1]}.*"]),
    "frozen layers under no_grad, one recomputed": fixed(
        *LAYERS, network=stopping("no_grad", "no_grad", "chain"), frozen=[f"{LAYERS[0]}.*", f"{LAYERS[1]}.*"],
        recompute=[{"module": LAYERS[1], "kind": "full"}]),
    "a layer whose result is detached": fixed(*LAYERS, network=stopping("chain", "stopped", "chain"), precision=("fp32", "bf16", "fp32")),
    "a layer that is given what is detached": fixed(*LAYERS, network=stopping("chain", "detached", "residual"), replicate=2),
    "layers before all is detached": fixed(*LAYERS, network=stopping("chain", "cut", "chain"), clip=True),
    "fp16, reduced in fp32, with replicas": fixed(*LAYERS, precision=("fp32", "fp16", "fp32"), replicate=2),
    "fp16, clipped, in two micro-batches": fixed(*LAYERS, precision=("fp32", "fp16", "fp16"), clip=True, accumulation=2, sync="last", shard=3),
    "fp16, clipped, in which every step overflows": fixed(*LAYERS, precision=("fp32", "fp16", "fp32"), clip=True, scale=2.0 ** 40),
    "fp16, offloaded and clipped": fixed(*LAYERS, precision=("fp32", "fp16", "fp32"), clip=True, offload=True),
    "offloaded and clipped, in bf16": fixed(*LAYERS, offload=True, clip=True, precision=("fp32", "bf16", "bf16"), shard=3),
    "offloaded and clipped, with replicas and a frozen layer": fixed(*LAYERS, offload=True, clip=True, replicate=2, accumulation=2,
                                                                     frozen=[f"{LAYERS[0]}.c1.fc1.weight"]),
    "a recomputed layer called twice at the end of a recomputed one": fixed("body.c0.fc1", "body.c0.fc2", **nested([0, 2, 2])),
    "a recomputed layer called in the middle of a recomputed one": fixed("body.c0", "body.c1.c0", "body.c1.c1", **nested([0, 2, 1])),
    "a recomputed layer called everywhere in a recomputed one": fixed("body.c0", "body.c1", **nested([2, 0, 2, 2, 1, 2])),
    "a part that nothing calls": fixed(*LAYERS, network=calling([0, 2])),
    "a part that nothing calls, in a unit with others": fixed("body.layers.0", network=calling([0, 2]), clip=True),
    "a unit that nothing calls, where gradients wait in another dtype": fixed(
        *LAYERS, network=calling([0, 2]), accumulation=2, sync="last", precision=("fp32", "bf16", "fp32")),
    "a layer called twice in a row": fixed(*LAYERS, network=calling([0, 1, 1, 2])),
    "a layer called three times in a row, in bf16": fixed(*LAYERS, network=calling([0, 0, 0, 1, 2]), precision=("fp32", "bf16", "fp32")),
    "a layer called twice in a row, recomputed": fixed(*LAYERS, network=calling([0, 1, 1, 2]),
                                                       recompute=[{"module": name, "kind": "full"} for name in LAYERS]),
    "a layer called twice in a row, of which the last call hands no gradient on": fixed(*LAYERS[:2], frozen=["embed.weight"], network={
        **layers(), "body": {**layers()["body"], "calls": [[0, "chain"], [1, "chain"], [1, "tower"]]}}),
    "a unit inside a layer called twice in a row": fixed("body.layers.1.c1", LAYERS[1], network=calling([0, 1, 1, 2]), accumulation=2),
    "a module under two names": fixed("body.c0", "body.c1", network=under_two_names()),
    "a module under two names, the outer unit listed first": fixed("body.c1", "body.c0", network=under_two_names()),
    "units without hooks, listed backwards": fixed("head", "embed2", "embed", network={**layers(), "inputs": 2}),
    "a unit at the end of what is recomputed selectively": fixed(f"{LAYERS[1]}.c1", recompute=[
        {"module": LAYERS[1], "kind": "selective", "keep_every": 2}]),
    "a unit at the beginning of what is recomputed selectively": fixed(f"{LAYERS[1]}.c0", recompute=[
        {"module": LAYERS[1], "kind": "selective", "keep_every": 2}]),
    "a unit inside of what is recomputed selectively that nothing gathers ahead": fetching(
        fixed(LAYERS[0], f"{LAYERS[1]}.c0", LAYERS[2], recompute=[{"module": LAYERS[1], "kind": "selective", "keep_every": 2}]),
        LAYERS[2], [LAYERS[0]]),
    "units at both ends of what is recomputed selectively": fixed(f"{LAYERS[1]}.c0", f"{LAYERS[1]}.c1", recompute=[
        {"module": LAYERS[1], "kind": "selective", "keep_every": 1}], precision=("fp32", "bf16", "fp32")),
    "a unit of two modules, of which one begins what is recomputed selectively": fetching(
        fixed(["body.c1.c0", "body.c0"], "body.c1.c1", network=with_pair(), recompute=[
            {"module": "body.c1", "kind": "selective", "keep_every": 1}]), "body.c0", ["root"], "forward_prefetch"),
    "a layer that returns what it is given": fixed(*LAYERS, network=returning()),
    "a layer that runs nothing": fixed(*LAYERS, network=idling([[0, "chain"], [1, "chain"], [2, "chain"]])),
    "a layer that runs nothing, called twice, in two micro-batches": fixed(
        *LAYERS, network=idling([[0, "chain"], [1, "residual"], [1, "chain"], [2, "chain"]]), accumulation=2, precision=("fp32", "bf16", "fp32")),
    "a layer that runs nothing, behind frozen ones": fixed(*LAYERS, network=idling([[1, "chain"], [0, "chain"], [2, "chain"]]),
                                                           frozen=["embed.weight"]),
    "a layer that runs nothing at the beginning of another": fixed("body.c0", "embed", "body.c0.c0", network={**layers(), "body": {
        "kind": "seq", "list": False, "calls": [[0, "chain"]], "children": [{
            "kind": "seq", "list": False, "calls": [[0, "chain"], [1, "chain"]], "children": [
                idling([])["body"]["children"][1], {"kind": "linear"}]}]}}),
    "a unit of two modules, of which the first runs nothing": fixed(
        [LAYERS[1], f"{LAYERS[2]}.c1"], network=idling([[1, "chain"], [0, "chain"], [2, "chain"]])),
    "a unit of two modules, of which the last runs nothing, with another between": fetching(
        fixed("embed", LAYERS[:2], LAYERS[2], network=idling([[0, "chain"], [2, "chain"], [1, "chain"]])), "", ["embed"]),
    "a unit of two modules, of which one runs nothing and nothing calls the other": fixed(
        LAYERS[:2], LAYERS[2], network=idling([[1, "chain"], [2, "chain"]])),
    "units of two modules, of which nothing calls one, the one that begins first ends the model": fixed(
        [f"{LAYERS[1]}.c1", "norm"], ["head", f"{LAYERS[1]}.c0"], network=calling([0, 2])),
    "layers in a layer that return what they are given": fixed(
        "body.c0.c0", "body.c0", "body.c1", precision=("fp32", "bf16", "fp32"), network={**layers(), "body": {
            "kind": "seq", "list": False, "calls": [[0, "residual"], [0, "chain"], [1, "chain"]], "children": [
                {"kind": "seq", "list": False, "calls": [[0, "chain"]], "children": [returning()["body"]["children"][1]]}, {"kind": "linear"}]}}),
    "a layer under a second name at the end of another, both recomputed": fixed(
        "body.c0", "body.c1.c0", network=under_two_names(), recompute=[{"module": name, "kind": "full"} for name in ("body.c0", "body.c1")]),
    "units before a sum that ends what is recomputed": fetching(
        fixed(f"{LAYERS[2]}.c1.fc1", f"{LAYERS[2]}.c1.fc2", LAYERS[0], recompute=[{"module": LAYERS[2], "kind": "full"}]),
        "", [LAYERS[0]]),
    "a unit of two modules, of which the first begins a layer": fixed([f"{LAYERS[1]}.c0", "norm"], *LAYERS),
    "a unit of two modules, of which the last ends a layer": fixed(["body.layers.0.c0", f"{LAYERS[1]}.c1"], *LAYERS),
    "a unit of two modules, of which nothing calls one": reshard_root(fixed(LAYERS[:2], LAYERS[2], network=calling([0, 2]))),
    "a unit of two modules, of which the last reaches no loss": fixed(LAYERS[:2], network=with_dead_layer()),
    "a unit of two modules, of which the last reaches no loss and the first needs no gather": fixed(
        ["embed", LAYERS[1]], network=with_dead_layer()),
    "a unit of two modules, of which one lies in another unit": fixed([f"{LAYERS[1]}.c1.fc1", LAYERS[0]], f"{LAYERS[1]}.c1"),
    "a unit that nothing calls, with a module that another name calls": fixed(
        "body.c1", "body.c1.c0", network=called_by_second_name()),
    "a frozen unit that runs again without a backward": fixed(
        f"{LAYERS[0]}.c1.fc1", *LAYERS, network=calling([0, 0, 1, 2]), recompute=[{"module": LAYERS[0], "kind": "full"}], frozen=[
            "embed.weight", *(f"{LAYERS[0]}.{name}" for name in ("c0.weight", "c0.bias", "c1.fc1.weight", "c1.fc1.bias"))]),
    "a frozen unit that runs again without a backward, in two micro-batches": fixed(
        f"{LAYERS[0]}.c1.fc1", network=calling([0, 0, 1, 2]), accumulation=2, recompute=[{"module": LAYERS[0], "kind": "full"}], frozen=[
            "embed.weight", *(f"{LAYERS[0]}.{name}" for name in ("c0.weight", "c0.bias", "c1.fc1.weight", "c1.fc1.bias"))]),
    "recomputation of what nothing calls": fixed(*LAYERS, network=calling([0, 2]), recompute=[{"module": LAYERS[1], "kind": "full"}]),
    "a unit that nobody calls, gathered ahead while another waits that was gathered to run again": fetching(fetching(
        fixed("body.layers.0.layers.1", LAYERS[1], LAYERS[2], LAYERS[0], network=with_dead_end(),
              recompute=[{"module": LAYERS[0], "kind": "full"}]), LAYERS[2], ["body.layers.0.layers.1"]), LAYERS[0], [LAYERS[1]]),
    "units without hooks, with one of two modules": fixed(["head", "embed2"], "body.layers.0", "embed", network={**layers(), "inputs": 2}),
}


def random_modules(rng, network):
    """Modules that can be units: all but lists. Inner ones first."""
    names = ["embed", "head"] + (["norm"] if network["norm"] else []) + (["embed2"] if network["inputs"] == 2 else [])
    for path, part in random_networks.paths_of(network["body"]):
        if part["kind"] == "borrow":
            continue
        names.append(path)
        if part["kind"] == "mlp":
            names += [f"{path}.fc1", f"{path}.fc2"]
        if part["kind"] == "moe":
            names += [f"{path}.router", f"{path}.experts"]
    return sorted(names, key=lambda name: -name.count("."))


def unit_name(unit):
    return "+".join(unit["modules"]) or "root"


def random_units(rng, network, shard):
    share = rng.choice([0.2, 0.4, 0.7])
    chosen = [name for name in random_modules(rng, network) if rng.random() < share]
    divisors = [g for g in range(2, shard) if shard % g == 0]
    reshard = lambda: rng.choice([None, None, None, True, False] + divisors[:1])  # noqa: E731
    units = []
    while chosen:
        modules = [chosen.pop(0)]
        if chosen and rng.random() < 0.12 and not is_inside(chosen[-1], modules[0]) and not is_inside(modules[0], chosen[-1]):
            modules.append(chosen.pop())
            rng.shuffle(modules)
        units.append({"modules": modules, "reshard": reshard()})
    if rng.random() < 0.25:
        rng.shuffle(units)
    if rng.random() < 0.9:
        units = [unit for unit in units if not any(splits(unit, tie) for tie in ties_of(network))]
    units.append({"modules": [""], "reshard": rng.choice([None, None, None, True, False])})
    if rng.random() < 0.2:
        for unit in units:
            others = [unit_name(u) for u in units if u is not unit]
            for key in ("forward_prefetch", "backward_prefetch"):
                if others and rng.random() < 0.4:
                    unit[key] = rng.sample(others, rng.choice([1, 1, min(2, len(others))]))
    return units


def ties_of(network):
    """Pairs of modules that share what may not be in two units."""
    ties = [("embed", "head")] if network["tied_head"] else []
    for path, part in random_networks.paths_of(network["body"]):
        if part.get("tied"):
            ties.append((path, part["tied"]))
        if part.get("alias"):
            ties.append((random_networks.child_path(part, path, len(part["children"])), part["alias"]))
    return ties


def splits(unit, tie):
    """Has the unit one of the two only, though it is not (a part of) what is registered twice?"""
    has = [any(is_inside(name, module) for module in unit["modules"]) for name in tie]
    return has[0] != has[1]


def is_inside(name, other):
    return name == other or name.startswith(other + ".")


def random_recompute(rng, network):
    paths = [path for path, part in random_networks.paths_of(network["body"]) if part["kind"] != "borrow"]
    children = [random_networks.child_path(network["body"], "body", i) for i in range(len(network["body"]["children"]))]
    blocks = [path for path in children if path in paths]
    every = rng.choice([1, 2])
    chosen = blocks[::every] if rng.random() < 0.6 else [rng.choice(paths)]
    kind = "selective" if rng.random() < 0.2 else "full"
    keep = rng.choice([1, 2, 3])
    return [{"module": module, "kind": kind, **({"keep_every": keep} if kind == "selective" else {})} for module in chosen]


def random_case(seed):
    rng = random.Random(seed)
    network = random_networks.random_network(rng)
    rich = random_networks.rich_random(seed)
    if rich:
        network = random_networks.rich_network(seed)
    shard, replicate = rng.choice(MESHES)
    case = {"network": network, "shard": shard, "replicate": replicate, "micro_batch": rng.choice([1, 2]),
            "accumulation": rng.choices([1, 2, 3], [6, 3, 1])[0], "sync": "every", "precision": rng.choice(PRECISIONS),
            "units": random_units(rng, network, shard), "recompute": [], "frozen": [], "mode": "train", "clip": rng.random() < 0.2,
            "offload": rng.random() < 0.08}
    if case["accumulation"] > 1:
        case["sync"] = rng.choice(["every", "last"] + (["replicate_last"] if replicate > 1 else []))
    if rng.random() < 0.3:
        case["recompute"] = random_recompute(rng, network)
    if rng.random() < 0.2:
        names = [n for n, _ in random_networks.make(network).named_parameters() if n != "head.weight"]
        share = rng.choice([0.2, 0.6])
        case["frozen"] = [name for name in names if rng.random() < share]
    if rich and rich.random() < 0.4:
        case["frozen"] = random_networks.enriched_frozen(rich, network)
    if rng.random() < 0.12:
        case.update(mode="forward", recompute=[], frozen=[], clip=False, accumulation=1, sync="every")
    if seed >= FIRST_FP16 and rng.random() < 0.1:
        case["precision"] = rng.choice(FP16)
    if rich:
        case["averages"] = rich.random() < 0.3
        case["settings"] = rich.sample(sorted(SETTINGS), rich.choice([0, 0, 1, 2]))
    return case


def reshard_of(unit):
    if unit["reshard"] is None or (unit["modules"] == [""] and RELEASE == "2.6"):  # which keeps its root
        return "never" if unit["modules"] == [""] else "always"
    if isinstance(unit["reshard"], bool):
        return "always" if unit["reshard"] else "never"
    return unit["reshard"]


def plan_of(case):
    master, param, reduce = case["precision"]
    units = [{"name": unit_name(unit), "modules": unit["modules"], "reshard": reshard_of(unit),
              "forward_prefetch": unit.get("forward_prefetch", []), "backward_prefetch": unit.get("backward_prefetch", [])}
             for unit in case["units"]]
    return {
        "format": "shardwright-plan", "version": 1, "model": {"name": "net", "json": model_json(case["network"])},
        "kernel_set": {"name": "torch-eager", "fp32_logits": False},
        "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": case["shard"] * case["replicate"]},
        "profile": {"name": "a100-torch-eager"},
        "job": {"mode": case["mode"], "sequence_length": case["network"]["sequence"],
                "precision": {"master": master, "param": param, "reduce": reduce},
                "optimizer": {"kind": "adamw", "impl": "foreach", "weight_decay": True}, "clip_gradients": case["clip"],
                "frozen": case["frozen"]},
        "plan": {"dialect": "fsdp2", "torch": RELEASE, "shard_size": case["shard"], "replicate_size": case["replicate"],
                 "micro_batch": case["micro_batch"], "accumulation": case["accumulation"], "sync": case["sync"],
                 "recompute": case["recompute"], "offload": {"parameters": case["offload"]}, "units": units}}


def run_on_a_cpu():
    """Lets fully_shard of torch 2.6 run where it asks for more than a CPU has: streams, which do nothing here, and copies that leave
    autograd's counts of changes alone, as those on a GPU do."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    from torch.distributed.fsdp import fully_shard  # noqa: F401, which defines what is replaced
    torch.cpu.Stream.record_event = lambda stream, event=None: torch.cpu.Event()
    torch.cpu.Stream.wait_event = lambda stream, event: None
    torch.cuda.current_stream = torch.cpu.current_stream
    copy = torch.ops.fsdp.split_with_sizes_copy

    def copy_out(source, sizes, dim, out):
        with contextlib.ExitStack() as stack:
            for tensor in out:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            copy(source, sizes, dim=dim, out=out)

    copy_out.default = copy.default
    torch.ops.fsdp.split_with_sizes_copy = copy_out
    reduce = torch.distributed.all_reduce  # gloo has no mean
    torch.distributed.all_reduce = lambda tensor, op=None, group=None, async_op=False: reduce(tensor, group=group, async_op=async_op)


def mesh_of(case):
    key = (case["replicate"], case["shard"])
    if key not in meshes:
        shape, names = (key, ("replicate", "shard")) if key[0] > 1 else (key[1:], ("shard",))
        meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return meshes[key]


def groups_of(case):
    """Names of the groups of rank 0, as our programs call them."""
    shard, replicate = case["shard"], case["replicate"]
    names = {tuple(range(g)): f"reshard{g}" for g in range(2, shard) if shard % g == 0}
    names[tuple(range(shard))] = "shard"
    if replicate > 1:
        names[tuple(range(0, shard * replicate, shard))] = "replicate"
    return names


def wrap_by_hand(model, case):
    """What the applier does, for plans that `emit` refuses."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case["frozen"])
    regions = [{"keep_every": 1, **region} for region in case["recompute"]]
    wrappers = shardwright_plan.wrap_recompute(model, {"recompute": regions, "offload": {"activations": False}}, modules)
    master, param, reduce = (shardwright_plan.dtype_of(LONG[d]) for d in case["precision"])
    policy = MixedPrecisionPolicy(param_dtype=None if param == master else param, reduce_dtype=None if reduce == param else reduce)
    options = {"mesh": mesh_of(case), "mp_policy": policy,
               "offload_policy": CPUOffloadPolicy(pin_memory=False) if case["offload"] else OffloadPolicy()}
    targets = {}
    for unit in sorted(case["units"], key=lambda unit: max((-1 if m == "" else m.count(".")) for m in unit["modules"]),
                       reverse=True):
        chosen = [wrappers.get(id(modules[m]), modules[m]) for m in unit["modules"]]
        targets[unit_name(unit)] = chosen[0]
        fully_shard(chosen[0] if len(chosen) == 1 else chosen, reshard_after_forward={"never": False, "always": True}.get(
            reshard_of(unit), unit["reshard"]), **options)
    for unit in case["units"]:
        for key in ("forward_prefetch", "backward_prefetch"):
            if unit.get(key):
                getattr(targets[unit_name(unit)], f"set_modules_to_{key}")([targets[n] for n in unit[key]])
    model._shardwright_plan = {"training": {"accumulation": case["accumulation"], "sync": case["sync"]}}


def set_and_notice(model, case):
    if not shardwright_fsdp2._groups(model._get_fsdp_state()):
        return  # a root without parameters of its own
    for setter in case.get("settings", []):
        SETTINGS[setter](model)
        assert any(setter in line for line in shardwright_fsdp2.changed_settings(model)), f"{setter} is not noticed"


def run_case(rank, argument, more=lambda model, optimizer: ()):
    """In a worker: the collectives of each step, and of each what `more` says. Rank 0's, all ranks having the same kinds and sizes."""
    case, data = argument
    run_on_a_cpu()
    model = random_networks.make(case["network"]).train()
    if case["precision"][0] == "bf16":
        model.to(torch.bfloat16)
    if data is None:
        wrap_by_hand(model, case)
    else:
        random_networks.freeze(model, case["frozen"])
        shardwright_fsdp2.apply_plan(model, data, mesh_of(case))
        set_and_notice(model, case)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, foreach=True) if trainable else None
    scaler = torch.amp.GradScaler("cpu", init_scale=case.get("scale", SCALE), enabled=case["precision"][1] == "fp16")
    steps = []
    with Recorder(groups_of(case), lambda: more(model, optimizer)) as recorder:
        for step in range(STEPS):
            if case["mode"] == "forward":
                with torch.no_grad():
                    model(**random_networks.sample(case["network"], case["micro_batch"], rank))
                steps.append(recorder.take())
                continue
            for i in range(case["accumulation"]):
                shardwright_fsdp2.set_micro_batch(model, i)
                inputs = random_networks.sample(case["network"], case["micro_batch"], 100 * step + 10 * i + rank)
                scaler.scale(model(**inputs) / case["accumulation"]).backward()
            if case["clip"]:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0, foreach=True)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            assert "scale" not in case or scaler.get_scale() < before, "no gradient overflowed"
            optimizer.zero_grad()
            random_networks.average(case, model)
            steps.append(recorder.take())
    return steps


def smaller_cases(case):
    """Simpler in the plan, then in the network; units of modules that are gone go with them."""
    for key, value in (("recompute", []), ("frozen", []), ("clip", False), ("offload", False), ("accumulation", 1),
                       ("precision", ["fp32"] * 3), ("micro_batch", 1), ("settings", []), ("averages", False)):
        if key not in case:
            continue
        if case[key] != value and list(case[key] if isinstance(case[key], tuple) else [case[key]]) != [value]:
            yield {**case, key: value, **({"sync": "every"} if key == "accumulation" else {})}
    if (case["shard"], case["replicate"]) != (2, 1):
        units = [{**unit, "reshard": True if type(unit["reshard"]) is int else unit["reshard"]} for unit in case["units"]]
        if case["sync"] != "replicate_last":
            yield {**case, "shard": 2, "replicate": 1, "units": units}
    for i, unit in enumerate(case["units"]):
        for key in ("forward_prefetch", "backward_prefetch"):
            if unit.get(key):
                yield {**case, "units": [{k: v for k, v in u.items() if u is not unit or k != key} for u in case["units"]]}
        if unit["reshard"] is not None:
            yield {**case, "units": [{**u, "reshard": None} if u is unit else u for u in case["units"]]}
        if i + 1 < len(case["units"]):
            yield {**case, "units": without_names(case["units"][:i] + case["units"][i + 1:])}
    if len(case["recompute"]) > 1:
        for i in range(len(case["recompute"])):
            yield {**case, "recompute": case["recompute"][:i] + case["recompute"][i + 1:]}
    for i in range(len(case["frozen"])):
        yield {**case, "frozen": case["frozen"][:i] + case["frozen"][i + 1:]}
    for candidate in smaller_networks(case):
        yield fitted(candidate)


def without_names(units):
    """Without entries of prefetch lists that name no unit."""
    names = {unit_name(unit) for unit in units}
    return [{k: [n for n in v if n in names] if k.endswith("prefetch") else v for k, v in unit.items()} for unit in units]


def fitted(case):
    """Without units, regions and frozen parameters that the network does not have."""
    model = random_networks.make(case["network"])
    modules, params = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    case = copy.deepcopy(case)
    for unit in case["units"]:
        unit["modules"] = [m for m in unit["modules"] if m in modules]
    case["units"] = without_names([unit for unit in case["units"] if unit["modules"]])
    case["recompute"] = [region for region in case["recompute"] if region["module"] in modules]
    case["frozen"] = [name for name in case["frozen"] if name in params]
    return case


def judge(ours, pools, case):
    def data_of():
        plan = plan_of(case)
        return ours.collectives(plan), ours.emitted(plan, "fsdp2")

    said = attempt(data_of)
    refused = isinstance(said, Refused)
    theirs = attempt(lambda: pools.run(case["shard"] * case["replicate"], "torch_fsdp2_random", "run_case",
                                       (case, None if refused else said[1]))[0])
    return compare(said if refused else said[0], theirs)


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], sys.modules[__name__], f"PyTorch {torch.__version__} FSDP2", "0:11,12:15", "0:1500,40000:40012", FIXED, PLAIN))
