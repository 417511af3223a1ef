"""Random small networks as torch modules, for tests that hold our programs against a framework.

A network is a dictionary (JSON): {"width", "vocabulary", "sequence", "inputs", "body", "norm", "tied_head"}. Its body is a
tree of parts, each from (batch, sequence, width) to the same:
  linear  one matrix                       mlp   two of them around an activation, with a residual sum
  norm    a layer norm                     moe   a router and experts in two tensors [experts, ...]
  borrow  a product with the weight of an earlier linear, which is another module's
  seq     `children`, of which `calls` runs some: [index, mode], where an index may come twice or never. Modes: "chain",
          "residual" (x + child(x)), "tower" (x + child(the input of the seq)) and "dead" (runs, the result is dropped); and without
          some gradient "stopped" (x + child(x).detach()), "detached" (x + child(x.detach())), "no_grad" (x + child(x) under
          torch.no_grad()), "data" (x + child(x.data)) and "cut" (child(x).detach(), so that what is before it gets no gradient).
          Without calls it returns what it is given. "list": the children are in a ModuleList, or in the "container": "dict", "lists"
          (pairs in a ModuleList of ModuleLists), "sequential" (a Sequential that is only a list) or "holder" (a module that is never
          called). "empty": it has an empty ModuleList, too. "scale": it multiplies its result by a parameter of its own of so many
          elements. "alias": the path of an earlier part, registered here a second time as the last child.
  A linear may have "tied", the path of an earlier linear whose weight it has.
A network with "mask" reads the ids in another op, too. Paths are those of torch (body.c0.fc1). `make` builds the module, `smaller` lists
simpler networks for shrinking. `enriched` adds what users do to modules.
"""

import copy
import fnmatch
import json
import random

import torch
from torch import nn


class Linear(nn.Linear):
    """A class of its own, so that rules by class find it."""


class Mlp(nn.Module):
    def __init__(self, width, hidden, bias):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class TopKRouter(nn.Module):
    def __init__(self, width, experts, chosen):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / width)
        self.chosen = chosen

    def forward(self, x):
        scores = nn.functional.linear(x, self.weight).softmax(-1)
        values, indices = scores.topk(self.chosen, -1)
        return scores, values, indices


class SiLU:
    """No module: a framework's hooks would see as many calls as there are experts with tokens, which depends on values."""

    def __call__(self, x):
        return nn.functional.silu(x)


class Experts(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / width)
        self.act_fn = SiLU()

    def forward(self, x, values, indices):
        y = torch.zeros_like(x)
        for e in range(self.gate_up_proj.shape[0]):
            weight = (values * (indices == e)).sum(-1, keepdim=True)
            gate, up = nn.functional.linear(x, self.gate_up_proj[e]).chunk(2, -1)
            y = y + weight * nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e])
        return y


class Moe(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.router = TopKRouter(width, experts, min(2, experts))
        self.experts = Experts(width, hidden, experts)

    def forward(self, x):
        _, values, indices = self.router(x)
        return x + self.experts(x, values, indices)


class Borrow(nn.Module):
    """Holds a module without registering it."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        return nn.functional.linear(x, self.other[0].weight)


class Holder(nn.Module):
    def __init__(self, children):
        super().__init__()
        self.parts = nn.ModuleList(children)


CONTAINERS = {
    "list": nn.ModuleList,
    "dict": lambda children: nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)}),
    "lists": lambda children: nn.ModuleList(nn.ModuleList(children[i:i + 2]) for i in range(0, len(children), 2)),
    "sequential": lambda children: nn.Sequential(*children),
    "holder": Holder,
}


def container_of(part):
    """A key of CONTAINERS, or "": the children are attributes."""
    return part.get("container") or ("list" if part.get("list") else "")


def child_path(part, path, index):
    """The name of a child of the seq."""
    inner = {"": f"c{index}", "dict": f"layers.k{index}", "lists": f"layers.{index // 2}.{index % 2}",
             "holder": f"layers.parts.{index}"}.get(container_of(part), f"layers.{index}")
    return f"{path}.{inner}"


class Seq(nn.Module):
    def __init__(self, spec, children, calls, width):
        super().__init__()
        self.spec, self.calls = spec, calls
        if container_of(spec):
            self.layers = CONTAINERS[container_of(spec)](children)
        else:
            for i, child in enumerate(children):
                self.add_module(f"c{i}", child)
        if spec.get("empty"):
            self.nothing = nn.ModuleList()
        if spec.get("scale"):
            self.scale = nn.Parameter(torch.ones(width if spec["scale"] > 1 else 1))

    def forward(self, x):
        start = x
        for index, mode in self.calls:
            child = self.part(index)
            if mode == "chain":
                x = child(x)
            elif mode == "residual":
                x = x + child(x)
            elif mode == "tower":
                x = x + child(start)
            elif mode == "stopped":
                x = x + child(x).detach()
            elif mode == "detached":
                x = x + child(x.detach())
            elif mode == "data":
                x = x + child(x.data)
            elif mode == "cut":
                x = child(x).detach()
            elif mode == "no_grad":
                with torch.no_grad():
                    y = child(x)
                x = x + y
            else:
                child(x)
        return x * self.scale if hasattr(self, "scale") else x

    def part(self, index):
        """By its name, under which a wrapper may stand."""
        return self.get_submodule(child_path(self.spec, "", index)[1:])


class Network(nn.Module):
    def __init__(self, spec):
        super().__init__()
        width, vocabulary = spec["width"], spec["vocabulary"]
        self.embed = nn.Embedding(vocabulary, width)
        if spec["inputs"] == 2:
            self.embed2 = nn.Embedding(vocabulary + 1, width)
        made = {}
        self.body = make_part(spec["body"], width, "body", made)
        if spec["norm"]:
            self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if spec["tied_head"]:
            self.head.weight = self.embed.weight
        self.has_norm, self.inputs, self.has_mask = spec["norm"], spec["inputs"], spec.get("mask", False)

    def forward(self, ids, labels, ids2=None):
        x = self.embed(ids)
        if self.inputs == 2:
            x = x + self.embed2(ids2)
        elif self.inputs == 3:
            x = x + self.embed(ids2)
        if self.has_mask:
            x = x * (ids > 2)[..., None].to(x.dtype)
        x = self.body(x)
        if self.has_norm:
            x = self.norm(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_part(spec, width, path, made):
    kind = spec["kind"]
    if kind == "linear":
        part = Linear(width, width, bias=spec.get("bias", False))
        if spec.get("tied") in made:
            part.weight = made[spec["tied"]].weight
    elif kind == "mlp":
        part = Mlp(width, spec["hidden"], spec.get("bias", False))
    elif kind == "norm":
        part = nn.LayerNorm(width)
    elif kind == "moe":
        part = Moe(width, spec["hidden"], spec["experts"])
    elif kind == "borrow":
        part = Borrow(made[spec["of"]]) if spec["of"] in made else nn.Identity()
    else:
        children = [make_part(child, width, child_path(spec, path, i), made) for i, child in enumerate(spec["children"])]
        if spec.get("alias") in made:
            children.append(made[spec["alias"]])
        calls = [call for call in spec["calls"] if call[0] < len(children)]
        part = Seq(spec, children, calls, width)
    made[path] = part
    return part


def make(spec):
    torch.manual_seed(0)
    return Network(spec)


def freeze(model, patterns):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def average(case, model):
    """What a loop with running averages of all weights does after a step."""
    if not case.get("averages"):
        return
    with torch.no_grad():
        if not hasattr(model, "averages"):
            model.averages = [parameter.detach().clone() for parameter in model.parameters()]
        for mean, parameter in zip(model.averages, model.parameters()):
            mean.lerp_(parameter.detach(), 0.1)


def sample(spec, batch, seed=1):
    """Keyword arguments of one forward pass."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(spec["vocabulary"], (batch, spec["sequence"]), generator=generator)  # noqa: E731
    inputs = {"ids": draw(), "labels": draw()}
    if spec["inputs"] > 1:
        inputs["ids2"] = draw()
    return inputs


def paths_of(spec, path="body"):
    """Path and part of every part, outer ones first."""
    found = [(path, spec)]
    if spec["kind"] == "seq":
        for i, child in enumerate(spec["children"]):
            found += paths_of(child, child_path(spec, path, i))
    return found


def random_leaf(rng, done):
    kind = rng.choices(["linear", "mlp", "norm", "moe", "borrow"], [3, 6, 1, 1, 0.4])[0]
    linears = [path for path, part in done if part["kind"] == "linear"]
    if kind == "borrow" and not linears:
        kind = "linear"
    part = {"kind": kind, "bias": rng.random() < 0.5}
    if kind in ("mlp", "moe"):
        part["hidden"] = rng.choice([6, 8, 12, 15])
    if kind == "moe":
        part["experts"] = rng.choice([2, 3, 4, 6])
    if kind == "borrow":
        part["of"] = rng.choice(linears)
    if kind == "linear" and linears and rng.random() < 0.2:
        part["tied"] = rng.choice(linears)
    return part


def random_seq(rng, depth, path, done):
    part = {"kind": "seq", "list": rng.random() < 0.5, "children": [], "calls": []}
    count = rng.choice([2, 3, 3, 4]) if depth == 0 else rng.choice([1, 2, 2, 3])
    for i in range(count):
        name = child_path(part, path, i)
        child = random_seq(rng, depth + 1, name, done) if depth < 2 and rng.random() < 0.35 else random_leaf(rng, done)
        part["children"].append(child)
        done.append((name, child))
    aliases = [p for p, other in done if other["kind"] in ("linear", "mlp") and "tied" not in other]
    if aliases and rng.random() < 0.08:
        part["alias"] = rng.choice(aliases)
        count += 1
    for i in range(count):
        mode = rng.choices(["chain", "residual", "tower", "dead"], [8, 3, 1, 0.7])[0]
        part["calls"].append([i, mode])
        if rng.random() < 0.1:
            part["calls"].append([i, rng.choice(["chain", "residual"])])
    if rng.random() < 0.1:
        part["calls"].insert(rng.randrange(len(part["calls"]) + 1), [rng.randrange(count), "chain"])
    if rng.random() < 0.1:
        rng.shuffle(part["calls"])
    return part


def with_unused_part(rng, body):
    """The body without the calls of one child."""
    seqs = [path for path, part in paths_of(body) if part["kind"] == "seq" and len({index for index, _ in part["calls"]}) > 1]
    if not seqs:
        return body
    body, chosen = copy.deepcopy(body), rng.choice(seqs)
    part = dict(paths_of(body))[chosen]
    unused = rng.choice(part["calls"])[0]
    part["calls"] = [call for call in part["calls"] if call[0] != unused]
    return body


def with_idle_part(rng, body):
    """The body with a seq in it, if it has one, that runs nothing and returns what it is given."""
    seqs = [path for path, part in paths_of(body) if part["kind"] == "seq" and path != "body"]
    if not seqs:
        return body
    body = copy.deepcopy(body)
    dict(paths_of(body))[rng.choice(seqs)]["calls"] = []
    return body


def with_stopped_calls(rng, body):
    """The body with some of its calls without a gradient."""
    copied = copy.deepcopy(body)
    calls = [call for _, part in paths_of(copied) if part["kind"] == "seq" for call in part["calls"]]
    for call in rng.sample(calls, min(len(calls), rng.choice([1, 1, 2]))):
        call[1] = rng.choices(["stopped", "detached", "no_grad", "cut"], [3, 3, 4, 1])[0]
    return copied


def random_network(rng):
    spec = {"width": rng.choice([8, 10, 12]), "vocabulary": rng.choice([16, 21, 24]), "sequence": rng.choice([3, 4]),
            "inputs": rng.choices([1, 2, 3], [8, 2, 1])[0], "norm": rng.random() < 0.6, "tied_head": rng.random() < 0.15}
    spec["body"] = random_seq(rng, 0, "body", [])
    apart = random.Random(json.dumps(spec))  # so that it changes no other draw
    if apart.random() < 0.06:
        spec["body"] = with_unused_part(apart, spec["body"])
    if apart.random() < 0.06:
        spec["body"] = with_idle_part(apart, spec["body"])
    if apart.random() < 0.15:
        spec["body"] = with_stopped_calls(apart, spec["body"])
    return spec


def renamed(old, new):
    """The body `new`, a copy of `old` with other containers, with the names of parts as they are there."""
    names = {before: after for (before, _), (after, _) in zip(paths_of(old), paths_of(new))}
    for _, part in paths_of(new):
        for key in ("tied", "of", "alias"):
            if part.get(key):
                part[key] = names[part[key]]
    return new


FIRST_RICH = 30000  # the seed from which on networks are enriched


def rich_random(seed):
    """Draws what is added to the case of such a seed; None for another one."""
    return random.Random(f"rich {seed}") if seed >= FIRST_RICH else None


def rich_network(seed):
    """Four seeds have one, as does each framework: to describe a network takes longer than to lower a plan of it."""
    rng = random.Random(f"network {seed // 4}")
    return enriched(rng, random_network(rng))


def enriched(rng, spec):
    """The network with more of what users do to modules: containers of any kind, parameters of containers, ids read by another op, and
    calls without a gradient."""
    body = copy.deepcopy(spec["body"])
    for _, part in paths_of(body):
        if part["kind"] == "seq":
            kind = rng.choice(["", "", "list", *CONTAINERS])
            part.update(list=kind == "list", **({"container": kind} if kind not in ("", "list") else {}))
            if rng.random() < 0.15:
                part["empty"] = True
            if rng.random() < 0.15:
                part["scale"] = rng.choice([1, 2])
    body = renamed(spec["body"], body)
    if rng.random() < 0.4:
        body = with_stopped_calls(rng, body)
        for _, part in paths_of(body):
            for call in part.get("calls", []):
                if call[1] == "detached" and rng.random() < 0.3:
                    call[1] = "data"
    return {**spec, "body": body, **({"mask": True} if rng.random() < 0.15 else {})}


def enriched_frozen(rng, spec):
    """Names of parameters: all but biases, all of some parts, or of the parts that run without a gradient. The head is trained."""
    names = [name for name, _ in make(spec).named_parameters() if name != "head.weight"]
    how = rng.choice(["weights", "parts", "teachers"])
    if how == "weights":
        return [name for name in names if not name.endswith("bias")]
    chosen = []
    for path, part in paths_of(spec["body"]):
        if part["kind"] == "seq":
            stopped = {call[0] for call in part["calls"] if call[1] == "no_grad"}
            chosen += [child_path(part, path, i) for i in range(len(part["children"]))
                       if (i in stopped if how == "teachers" else rng.random() < 0.3)]
    return [name for name in names if any(name.startswith(path + ".") for path in chosen)]


def without_child(part, index):
    """The seq without one of its children."""
    smaller = copy.deepcopy(part)
    del smaller["children"][index]
    smaller["calls"] = [[i - (i > index), mode] for i, mode in smaller["calls"] if i != index]
    return smaller


def smaller_parts(part):
    if part["kind"] != "seq":
        for key in ("bias", "tied"):
            if part.get(key):
                yield {k: v for k, v in part.items() if k != key}
        if part["kind"] in ("mlp", "moe", "borrow"):
            yield {"kind": "linear"}
        return
    for i in range(len(part["children"])):
        if len(part["children"]) > 1:
            yield without_child(part, i)
    for i in range(len(part["calls"])):
        if len(part["calls"]) > 1:
            smaller = copy.deepcopy(part)
            del smaller["calls"][i]
            yield smaller
        if part["calls"][i][1] != "chain":
            smaller = copy.deepcopy(part)
            smaller["calls"][i][1] = "chain"
            yield smaller
    for key in ("alias", "empty", "scale"):
        if part.get(key):
            yield {k: v for k, v in part.items() if k != key}
    if part.get("container"):
        yield {k: v for k, v in part.items() if k != "container"}
    for i, child in enumerate(part["children"]):
        if child["kind"] == "seq":
            yield {**copy.deepcopy(part), "children": [*part["children"][:i], {"kind": "linear"}, *part["children"][i + 1:]]}
        for smaller_child in smaller_parts(child):
            smaller = copy.deepcopy(part)
            smaller["children"][i] = smaller_child
            yield smaller


def smaller(spec):
    """Networks that are simpler in one thing; some may be broken (a path is gone)."""
    for key, value in (("tied_head", False), ("norm", False), ("inputs", 1), ("mask", False)):
        if spec.get(key, False) != value:
            yield {**spec, key: value}
    for body in smaller_parts(spec["body"]):
        yield {**spec, "body": body}
