"""A small residual network as a torch module and as the same network's model.json, and units to wrap it with.

Shared by the tests that hold our fsdp2 programs against PyTorch's FSDP2 itself.
"""

import dataclasses

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Network:
    """Sizes; the default ones are odd, so that every parameter is padded when it is cut into 2 or 4."""
    vocabulary: int = 21
    width: int = 10
    hidden: int = 15
    layers: int = 3
    sequence: int = 6
    tied: bool = False
    bias: bool = True


@dataclasses.dataclass
class Unit:
    """One call of fully_shard; `reshard` None is PyTorch's default, which frees all but the root."""
    modules: list
    reshard: object = None
    forward_prefetch: tuple = ()
    backward_prefetch: tuple = ()

    def name(self):
        return "+".join(self.modules) or "root"


@dataclasses.dataclass
class Case:
    name: str
    units: list
    network: Network = dataclasses.field(default_factory=Network)
    shard: int = 4
    replicate: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    sync: str = "every"
    precision: tuple = ("fp32", "bf16", "fp32")
    recompute: tuple = ()
    frozen: tuple = ()


def blocks(count=3, **options):
    return [Unit([f"blocks.{i}"], **options) for i in range(count)]


def root(**options):
    return Unit([""], **options)


class Block(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.fc1 = nn.Linear(network.width, network.hidden, bias=network.bias)
        self.fc2 = nn.Linear(network.hidden, network.width, bias=network.bias)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, network, recompute=()):
        super().__init__()
        self.embed = nn.Embedding(network.vocabulary, network.width)
        self.blocks = nn.ModuleList([Block(network) for _ in range(network.layers)])
        self.norm = nn.LayerNorm(network.width, bias=network.bias)
        self.head = nn.Linear(network.width, network.vocabulary, bias=False)
        if network.tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids, labels):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if f"blocks.{i}" in self.recompute else block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shard_module(case, mesh):
    """The case's network, wrapped by PyTorch in the order of the units."""
    torch.manual_seed(0)
    model = Net(case.network, case.recompute)
    for name, parameter in model.named_parameters():
        if name in case.frozen:
            parameter.requires_grad_(False)
    master, param, reduce = (DTYPES[d] for d in case.precision)
    if master != torch.float32:
        model.to(master)
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False)
    for unit in case.units:
        modules = [model.get_submodule(m) for m in unit.modules]
        fully_shard(modules[0] if len(modules) == 1 else modules, mesh=mesh, reshard_after_forward=unit.reshard,
                    mp_policy=policy)
    first = {unit.name(): model.get_submodule(unit.modules[0]) for unit in case.units}
    for unit in case.units:
        if unit.forward_prefetch:
            first[unit.name()].set_modules_to_forward_prefetch([first[n] for n in unit.forward_prefetch])
        if unit.backward_prefetch:
            first[unit.name()].set_modules_to_backward_prefetch([first[n] for n in unit.backward_prefetch])
    return model


def _linear(name, rows, columns, bias):
    shapes = [{"name": "weight", "shape": [rows, columns]}] + ([{"name": "bias", "shape": [rows]}] if bias else [])
    return {"name": name, "class": "Linear", "params": shapes}


def model_json(network):
    n = network
    norm = [{"name": "weight", "shape": [n.width]}] + ([{"name": "bias", "shape": [n.width]}] if n.bias else [])
    head = {"name": "weight", "tied_to": "embed.weight"} if n.tied else {"name": "weight",
                                                                         "shape": [n.vocabulary, n.width]}
    return {
        "format": "shardwright-model", "version": 1, "class": "Net", "block_class": "Block",
        "sequence_length": n.sequence,
        "inputs": {"ids": {"ids": "sequence_length"}, "labels": {"ids": "sequence_length"}},
        "modules": [
            {"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [n.vocabulary, n.width]}]},
            {"name": "blocks", "class": "ModuleList", "modules": [
                {"repeat": n.layers, "name": "{i}", "class": "Block", "modules": [
                    _linear("fc1", n.hidden, n.width, n.bias), _linear("fc2", n.width, n.hidden, n.bias)]}]},
            {"name": "norm", "class": "LayerNorm", "params": norm},
            {"name": "head", "class": "Linear", "params": [head]}],
        "ops": [
            {"op": "embedding", "module": "embed", "inputs": ["ids"], "output": "x0"},
            {"repeat": n.layers, "ops": [
                {"op": "linear", "module": "blocks.{i}.fc1", "inputs": ["x{i}"], "output": "a{i}"},
                {"op": "activation", "module": "blocks.{i}", "function": "relu", "inputs": ["a{i}"], "output": "b{i}"},
                {"op": "linear", "module": "blocks.{i}.fc2", "inputs": ["b{i}"], "output": "c{i}"},
                {"op": "add", "module": "blocks.{i}", "inputs": ["x{i}", "c{i}"], "output": "x{i+1}"}]},
            {"op": "layer_norm", "module": "norm", "inputs": [f"x{n.layers}"], "output": "y"},
            {"op": "linear", "module": "head", "inputs": ["y"], "output": "logits"},
            {"op": "cross_entropy", "name": "loss", "inputs": ["logits", "labels"], "output": "loss"}]}


def _reshard(unit):
    if unit.reshard is None:
        return "never" if unit.modules == [""] else "always"
    if isinstance(unit.reshard, bool):
        return "always" if unit.reshard else "never"
    return unit.reshard


def plan_json(case):
    """The plan file of the case. The network's loss takes the logits in the compute dtype."""
    units = []
    for unit in case.units:
        units.append({"name": unit.name(), "modules": unit.modules, "reshard": _reshard(unit),
                      "forward_prefetch": list(unit.forward_prefetch),
                      "backward_prefetch": list(unit.backward_prefetch)})
    master, param, reduce = case.precision
    return {
        "format": "shardwright-plan", "version": 1,
        "model": {"name": "net", "json": model_json(case.network)},
        "kernel_set": {"name": "torch-eager", "fp32_logits": False},
        "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": case.shard * case.replicate},
        "profile": {"name": "a100-torch-eager"},
        "job": {"mode": "train", "sequence_length": case.network.sequence,
                "precision": {"master": master, "param": param, "reduce": reduce},
                "optimizer": {"kind": "adamw", "impl": "foreach", "weight_decay": True},
                "clip_gradients": False, "frozen": list(case.frozen)},
        "plan": {"dialect": "fsdp2", "shard_size": case.shard, "replicate_size": case.replicate,
                 "micro_batch": case.micro_batch, "accumulation": case.accumulation, "sync": case.sync,
                 "recompute": [{"module": m, "kind": "full"} for m in case.recompute], "units": units}}


def backward_settings(case, model, micro_batch):
    """What a training loop calls on the model before a micro-batch, for the case's sync mode."""
    last = micro_batch + 1 == case.accumulation
    if case.sync == "last":
        model.set_requires_gradient_sync(last)
    if case.sync == "replicate_last":
        model.set_requires_all_reduce(last)
