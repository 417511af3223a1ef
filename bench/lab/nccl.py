"""Published sweeps of collectives: where each row was measured, what the program predicts, and how far that is off."""

import json
import re

from lab.base import ROOT, InputError, data, error_cells, number_in, read_table, report, statistics, table

COLUMNS = ("source", "system", "gpu", "gpus", "nodes", "gpus_per_node", "network", "op", "bytes", "time_us")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "alltoall")
GATHERS = ("all_gather", "reduce_scatter")
# Sizes that the goals are stated for. Below, only latency counts, which FSDP hardly sees.
SMALLEST, LARGEST = 64 << 10, 16 << 30
LARGE = 64 << 20
MACHINES = data("machines.json")
HAS_NVLINK = {gpu["name"] for gpu in json.loads((ROOT / "topologies/catalog/gpus.json").read_text(encoding="utf-8"))["gpus"] if "scale_up" in gpu}


class Skip(Exception):
    """Why a row is not predicted."""


def first_with(rows, text):
    return next((row for row in MACHINES[rows] if row["part"] in text), None)


class SweepRow:
    """One line, as published. What a source does not say is empty or 0."""

    def __init__(self, row):
        self.line = row.line
        self.source, self.system, self.gpu, self.network, self.op = (row[c] for c in ("source", "system", "gpu", "network", "op"))
        self.gpus, self.nodes, self.gpus_per_node = (row.count(c) for c in ("gpus", "nodes", "gpus_per_node"))
        self.bytes = row.count("bytes")
        self.time_s = 1e-6 * row.number("time_us")
        self.skipped = ""  # why it is not predicted; empty: the rest is set
        self.place = None  # its number among the places that were asked for
        self.fabric = self.profile = ""
        self.predicted_s = 0.0

    def short_source(self):
        """"NVIDIA/nccl" of "github.com/NVIDIA/nccl/issues/527 (comment)", or the first words of anything else."""
        if self.source.startswith("github.com/"):
            return "/".join(self.source.removeprefix("github.com/").split("/")[:2])
        return self.source.split(" section")[0]

    def check(self):
        """Raises Skip for what no cluster has."""
        if self.op not in OPS:
            raise Skip("no such operation in programs: " + self.op)
        if not self.bytes or not self.time_s:
            raise Skip("no size or no time given")
        if self.gpus < 2 or self.nodes < 1 or self.gpus_per_node < 1:
            raise Skip("number of GPUs or nodes not given")
        if "loopback" in self.network:
            raise Skip("ranks share one GPU and talk through the loopback interface: not a network")

    def key(self):
        return self.system, self.gpu, self.network, self.gpus, self.nodes, self.gpus_per_node

    def question(self):
        """The place in the program's terms."""
        is_one_domain = self.nodes == 1 or "one NVLink domain" in self.network  # trays of a GB200 NVL72 are one node
        nodes, per_node = (1, self.gpus) if is_one_domain else (self.nodes, self.gpus_per_node)
        known = first_with("systems", self.system) or {}
        return {"cluster": known.get("cluster") or self.inline(nodes, per_node), "nodes": nodes, "gpus_per_node": per_node,
                "gpus": self.gpus, "profile": known.get("profile", "")}

    def inline(self, nodes, per_node):
        """A cluster that the catalog does not have, in one line."""
        gpu = first_with("gpus", self.gpu)
        if gpu is None:
            raise Skip("GPU not in the catalog: " + self.gpu)
        text = f"{gpu['gpu']} x{per_node}"
        if "no NVLink" in self.network and gpu["gpu"] in HAS_NVLINK:
            text += ", nvlink none"
        if nodes > 1:
            network = first_with("networks", self.network)
            if network is None:
                raise Skip("network not known: " + self.network)
            rate = re.search(r"[\dx]+$", self.network.split("Gb/s")[0]) if "Gb/s" in self.network else None
            text += f", nic {rate[0] + ' Gbit/s' if rate else gpu['nic']}, network {network['network']}"
        return text

    def tool_s(self):
        tool = first_with("tools", self.system)
        return tool["time_s"] if tool else 0

    def error(self):
        return self.predicted_s / self.time_s - 1

    def is_scored_size(self):
        return not self.skipped and SMALLEST <= self.bytes <= LARGEST

    def is_scored(self):
        return self.is_scored_size() and self.op in GATHERS


def read_sweep(file):
    return [SweepRow(row) for row in read_table(file, COLUMNS, "a table of collective measurements")]


class Sweep:
    """Rows with their places. Fits change the numbers that prices depend on: `steps` says which, in turn."""

    def __init__(self, program, rows, profile=""):
        self.program, self.rows, self.profile = program, rows, profile
        self.places, self.profiles = [], {}
        numbers = {}  # of places by what they depend on
        for row in rows:
            try:
                row.check()
                if row.key() not in numbers:
                    question = row.question()
                    numbers[row.key()] = len(self.places)
                    self.places.append(question)
                row.place = numbers[row.key()]
            except Skip as why:
                row.skipped = str(why)
        answers = self.ask([], []).get("places", [])
        for row in rows:
            if not row.skipped:
                answer = answers[row.place]
                row.skipped = answer.get("error", "")
                row.fabric, row.profile = answer.get("fabric", ""), answer.get("profile", "")
                row.architecture, row.is_inside = answer.get("architecture", ""), answer.get("is_inside")
        self.predicted = [row for row in rows if not row.skipped]
        self.predict([])

    def ask(self, collectives, steps):
        answer = self.program.ask("price", {"profile": self.profile, "places": self.places, "collectives": collectives, "steps": steps})
        self.profiles = {row["name"]: row for row in answer.get("profiles", [])}
        return answer

    def predict(self, steps):
        """Prices after the steps; returns what each of them found."""
        rows = [{"place": row.place, "op": row.op, "bytes": row.bytes, "tool_s": row.tool_s(), "measured_s": row.time_s}
                for row in self.predicted]
        answer = self.ask(rows, steps)
        for row, predicted in zip(self.predicted, answer.get("collectives", [])):
            row.predicted_s = predicted
        return answer.get("steps", [])

    def numbers_of(self, rows):
        """Their numbers among the predicted ones, for steps."""
        wanted = {id(row) for row in rows}
        return [i for i, row in enumerate(self.predicted) if id(row) in wanted]


def groups_of(rows, key):
    found = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return sorted(found.items())


def scored(rows):
    return statistics([row.error() for row in rows if row.is_scored_size()])


def sweep_report(rows):
    predicted = [row for row in rows if not row.skipped]
    skipped = groups_of([row for row in rows if row.skipped], lambda row: (row.short_source(), row.skipped))
    return {
        "groups": [{"source": source, "fabric": fabric, "op": op, "rows": len(group), "errors": scored(group)}
                   for (source, fabric, op), group in groups_of(predicted, lambda row: (row.short_source(), row.fabric, row.op))],
        "by_op": [{"op": op, "rows": len(group), "errors": scored(group)} for op, group in groups_of(predicted, lambda row: row.op)],
        "pooled": statistics([row.error() for row in predicted if row.is_scored()]),
        "skipped": [{"source": source, "reason": reason, "rows": len(group)} for (source, reason), group in skipped]}


def rows_json(rows):
    return [{"line": row.line, "fabric": row.fabric, "op": row.op, "bytes": row.bytes, "predicted_s": row.predicted_s,
             "measured_s": row.time_s, "error": row.error(), "profile": row.profile} for row in rows if not row.skipped]


# Many nodes


ADAPTER_RATE = 48.5e9  # B/s; SimAI's calbusbw.h counts ConnectX-7 so
ADAPTERS = 8
SCOPE = "nodes_"


def positive(row, column, text):
    value = number_in(text)
    if not 0 < value <= 1e15:
        raise InputError(row.where(column), f'"{text}"', "a positive number")
    return value


def scale_report(program, file):
    """Efficiency of rings over many nodes against the table that SimAI ships: the rows of `nic_ratio` for two and more nodes."""
    columns = ("table", "bytes", "scope", "fraction_of_link_rate")
    points = []
    for row in read_table(file, columns, "a table of efficiencies by size and nodes"):
        if row["table"] != "nic_ratio" or not row["scope"].startswith(SCOPE):
            continue
        point = {"nodes": int(positive(row, "scope", row["scope"].removeprefix(SCOPE))), "bytes": int(positive(row, "bytes", row["bytes"])),
                 "published": positive(row, "fraction_of_link_rate", row["fraction_of_link_rate"])}
        if point["nodes"] > 1:
            points.append(point)
    if not points:
        raise InputError(file, "no nic_ratio for two or more nodes", "some")
    points.sort(key=lambda point: (point["nodes"], point["bytes"]))
    places = [{"cluster": "h100-80 x8, nic 8x400 Gbit/s, network roce", "nodes": point["nodes"], "gpus_per_node": 8,
               "gpus": 8 * point["nodes"]} for point in points]
    rows = [{"place": i, "op": "all_gather", "bytes": point["bytes"]} for i, point in enumerate(points)]
    for point, time_s in zip(points, program.ask("price", {"places": places, "collectives": rows})["collectives"]):
        ranks = 8 * point["nodes"]
        point["predicted"] = point["bytes"] * ((ranks - 1) / ranks) / time_s / (ADAPTERS * ADAPTER_RATE)
    return {"errors": statistics([point["published"] / point["predicted"] - 1 for point in points]), "points": points}


# Text


def left_out_text(fabrics):
    if not fabrics:
        return ""
    rows = [[fabric["fabric"], fabric["from"], *error_cells(fabric["above_64_mib"])] for fabric in fabrics]
    head = ["fabric", "predicted from", "rows", "mean", "median", "p90", "worst", "bias"]
    return "\nEach fabric left out of the fit and predicted from its link rates, above 64 MiB\n\n" + table("llrrrrrr", [head, *rows])


def size_text(count):
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count} B"


def scale_text(scale):
    """A row per size, a column per number of nodes."""
    nodes = sorted({point["nodes"] for point in scale["points"]})
    cells = {(p["bytes"], p["nodes"]): f"{p['predicted']:.3f} / {p['published']:.3f}" for p in scale["points"]}
    rows = [["size", *(f"{n} nodes" for n in nodes)]]
    rows += [[size_text(size), *(cells.get((size, n), "") for n in nodes)] for size in sorted({size for size, _ in cells})]
    errors = [["points", "mean", "median", "p90", "worst", "bias"], error_cells(scale["errors"])]
    return ("\nFraction of the adapters' rate, predicted / published\n\n" + table("r" * (len(nodes) + 1), rows) + "\n"
            + table("rrrrrr", errors))


def sweep_text(answer, rows):
    head = ["scored", "mean", "median", "p90", "worst", "bias"]
    groups = [["source", "fabric", "collective", "rows", *head]]
    groups += [[g["source"], g["fabric"], g["op"], g["rows"], *error_cells(g["errors"])] for g in answer["groups"]]
    ops = [["collective", "rows", *head]] + [[g["op"], g["rows"], *error_cells(g["errors"])] for g in answer["by_op"]]
    pooled = [["", *head], ["all-gather and reduce-scatter", *error_cells(answer["pooled"])]]
    text = (f"{rows} rows. Scored are sizes from 64 KiB to 16 GiB; errors are predicted / measured time - 1.\n\n"
            + table("lllrrrrrrr", groups) + "\n" + table("lrrrrrrr", ops) + "\n" + table("lrrrrrr", pooled))
    if answer["skipped"]:
        text += "\n" + table("lrl", [["source", "skipped", "why"], *([s["source"], s["rows"], s["reason"]] for s in answer["skipped"])])
    return text + left_out_text(answer.get("left_out", [])) + (scale_text(answer["scale"]) if "scale" in answer else "")
