"""Modules in odd containers: `plan` finds one under every dialect that trains, or says why there is none.

    python3 tests/schedule/odd_containers.py SHARDWRIGHT [--seeds 0:10]

The containers are lists in lists, dictionaries, Sequentials in Sequentials, empty ones, shared ones and modules that nothing calls.
"""

import argparse
import collections
import json
import os
import pathlib
import sys

try:
    import torch
    from torch import nn
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import random_networks  # noqa: E402
from random_cases import Refused, Shardwright, export_model, seeds_of  # noqa: E402

DIALECTS = ["native", "fsdp2", "fsdp1", "ddp", "zero1", "zero2", "zero3"]
WIDTH = 16


def pair():
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]


class Holder(nn.Module):
    """Is never called: others run what it holds."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(pair())


def parts_of(container):
    """The modules with a forward in it, outer ones not looked into."""
    if isinstance(container, Holder):
        container = container.parts
    if isinstance(container, (nn.ModuleList, nn.ModuleDict)) or getattr(container, "is_list", False):
        children = container.values() if isinstance(container, nn.ModuleDict) else container
        return [part for child in children for part in parts_of(child)]
    return [container]


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for part in parts_of(self.body):
            x = part(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def only_a_list(sequential):
    sequential.is_list = True
    return sequential


def shared():
    stage = nn.ModuleList(pair())
    return nn.ModuleList([stage, nn.ModuleList(pair()), stage])


ODD = {
    "lists in a list": lambda: nn.ModuleList(nn.ModuleList(pair()) for _ in range(3)),
    "lists in lists in a list": lambda: nn.ModuleList(nn.ModuleList(nn.ModuleList(pair()) for _ in range(2)) for _ in range(2)),
    "a dictionary": lambda: nn.ModuleDict({f"s{i}": nn.Linear(WIDTH, WIDTH) for i in range(3)}),
    "dictionaries in a list": lambda: nn.ModuleList(nn.ModuleDict(zip("ab", pair())) for _ in range(3)),
    "lists in a dictionary": lambda: nn.ModuleDict({f"s{i}": nn.ModuleList(pair()) for i in range(2)}),
    "Sequentials in a Sequential": lambda: nn.Sequential(*(nn.Sequential(*pair()) for _ in range(3))),
    "Sequentials in a list": lambda: nn.ModuleList(nn.Sequential(*pair()) for _ in range(3)),
    "Sequentials that are only lists": lambda: nn.ModuleList(only_a_list(nn.Sequential(*pair())) for _ in range(3)),
    "an empty list": nn.ModuleList,
    "an empty Sequential": nn.Sequential,
    "empty lists beside others": lambda: nn.ModuleList([nn.ModuleList(), nn.ModuleList(pair()), nn.ModuleList(), nn.ModuleList(pair())]),
    "a list of one": lambda: nn.ModuleList([nn.ModuleList(pair())]),
    "a list that comes twice": shared,
    "a module that comes twice": lambda: nn.ModuleList([nn.ModuleList(pair())] * 2),
    "holders that nothing calls": lambda: nn.ModuleList(Holder() for _ in range(3)),
    "lists of unequal lengths": lambda: nn.ModuleList(nn.ModuleList([*pair(), *pair()][:i + 1]) for i in range(3)),
}

SOME = ("lists in a list", "dictionaries in a list", "an empty list", "a list that comes twice")  # of ci


def described(model, inputs, tokens):
    return export_model.export(model, inputs, tokens)


def networks(names, seeds):
    """Name, and what makes its model.json."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for name, make in ((name, ODD[name]) for name in names):
        torch.manual_seed(0)
        yield name, lambda make=make: described(Net(make()), {"ids": ids, "labels": ids}, 4)
    for seed in seeds:
        spec = random_networks.rich_network(4 * seed)
        yield f"seed {seed}", lambda spec=spec: described(random_networks.make(spec), random_networks.sample(spec, 1), spec["sequence"])


def outcome(ours, document, dialect):
    """"a plan", or why there is none. A search that ends without either is our fault, as is a plan that does not lower."""
    path = pathlib.Path(ours.folder.name) / "net.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    plan = pathlib.Path(ours.folder.name) / "plan.json"
    plan.unlink(missing_ok=True)
    try:
        ours.call("plan", "--model", str(path), "--cluster", "dgx-a100", "--gpus", "2", "--dialect", dialect, "--global-batch", "4", "--output", str(plan))
    except Refused as error:
        return str(error)
    if not plan.exists():
        return ""
    try:
        ours.call("simulate", str(plan), "--json")
    except Refused as error:
        raise AssertionError(f"{dialect}: plan writes what simulate refuses: {error}") from None
    return "a plan"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seeds", default="0:100" if os.environ.get("SHARDWRIGHT_DEEP") else "0:1")
    options = parser.parse_args(arguments)
    names = ODD if os.environ.get("SHARDWRIGHT_DEEP") else SOME
    ours, counts, bad = Shardwright(options.program), collections.Counter(), 0
    for name, describe in networks(names, seeds_of(options.seeds)):
        try:
            document = describe()
        except export_model.Unsupported as error:
            counts[f"describe refuses: {error}"] += 1
            continue
        for dialect in DIALECTS:
            found = outcome(ours, document, dialect)
            counts["a plan" if found == "a plan" else f"{dialect}: {found}"] += 1
            if not found or ("expected" not in found and found != "a plan"):
                bad += 1
                print(f"{name}: {dialect}: no plan, and no reason: {found!r}")
    for text, count in counts.most_common():
        print(f"{count} x {text}")
    return 1 if bad or not counts["a plan"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
