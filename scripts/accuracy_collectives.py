#!/usr/bin/env python3
"""Prints the collectives section of bench/accuracy.md.

    scripts/accuracy_collectives.py build/shardwright

Runs `bench/validate_nccl.py` on the published sweeps and writes Markdown to standard output.
"""

import collections
import csv
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import collective_sets
from bench_command import bench_command

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PUBLISHED = "bench/published/nccl_measured.csv"
SCALE = "bench/published/nccl_simai_ratio.csv"


def percent(value, signed=False):
    return f"{100 * value:{'+' if signed else ''}.1f} %"


def errors(statistics):
    if statistics["count"] == 0:
        return ["0"] + [""] * 5
    return [
        str(statistics["count"]),
        percent(statistics["mean"]),
        percent(statistics["median"]),
        percent(statistics["p90"]),
        percent(statistics["max"]),
        percent(statistics["bias"], signed=True),
    ]


ERROR_COLUMNS = ["scored", "mean", "median", "p90", "worst", "bias"]


def table(header, rows, left_columns):
    lines = ["| " + " | ".join(header) + " |"]
    marks = ["---" if i < left_columns else "---:" for i in range(len(header))]
    lines.append("| " + " | ".join(marks) + " |")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def size(count):
    for unit, bytes_per_unit in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= bytes_per_unit:
            return f"{count / bytes_per_unit:g} {unit}"
    return f"{count} B"


def scale_table(points):
    nodes = sorted({p["nodes"] for p in points})
    by_size = {}
    for p in points:
        cell = f"{p['predicted']:.3f} / {p['published']:.3f}"
        by_size.setdefault(p["bytes"], {})[p["nodes"]] = cell
    rows = [[size(b)] + [by_size[b].get(n, "") for n in nodes] for b in sorted(by_size)]
    return table(["size"] + [f"{n} nodes" for n in nodes], rows, 1)


def statistics_of(rows):
    """As the program's: of rows of 64 KiB to 16 GiB."""
    values = [r["error"] for r in rows if 2**16 <= r["bytes"] <= 2**34]
    if not values:
        return {"count": 0}
    sizes = sorted(map(abs, values))
    at = 0.9 * (len(sizes) - 1)
    low = int(at)
    high = min(low + 1, len(sizes) - 1)
    return {"count": len(sizes), "mean": statistics.fmean(sizes), "median": statistics.median(sizes),
            "p90": sizes[low] + (at - low) * (sizes[high] - sizes[low]), "max": sizes[-1],
            "bias": statistics.fmean(values)}


def predictions(program, sweep, *flags):
    command = [*bench_command(program, "validate-nccl"), str(sweep), "--json", *flags]
    return json.loads(subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)["rows"]


def without_its_source(program, predicted):
    """All-reduces and all-to-alls of every source, predicted with numbers that were fitted to all other sources' rows."""
    columns, rows = collective_sets.read_table()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)

        def write(name, chosen):
            with open(folder / name, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(chosen)
            return folder / name

        by_source = collections.defaultdict(lambda: collections.defaultdict(list))
        for prediction in predicted:
            if prediction["op"] in ("all_reduce", "alltoall"):
                row = rows[prediction["line"] - 2]
                by_source[collective_sets.source_of(row)][prediction["profile"]].append(row)
        for source, by_profile in sorted(by_source.items()):
            others = write("others.csv", [r for r in rows if collective_sets.source_of(r) != source])
            left_out = []
            for profile, members in sorted(by_profile.items()):
                fitted = folder / "fitted.json"
                subprocess.run([*bench_command(program, "fit-nccl"), str(others), "--all-reduce", "--extends", profile, "--date", "2026-11-28",
                                "-o", str(fitted)], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
                left_out += predictions(program, write("rows.csv", members), "--profile", str(fitted))
            groups = collections.defaultdict(list)
            for prediction in left_out:
                groups[prediction["fabric"], prediction["op"]].append(prediction)
            for (fabric, op), members in sorted(groups.items()):
                figures = errors(statistics_of(members))
                if figures[0] != "0":
                    lines.append([source, fabric, op] + figures)
    return table(["source", "fabric", "collective"] + ERROR_COLUMNS, lines, 3)


def sets_tables(predicted):
    """Two tables of the program's rows: collectives by set, and fabrics by set."""
    rows = collective_sets.read_table()[1]
    chosen = collective_sets.sets_of(rows)
    by_op = collections.defaultdict(list)
    by_fabric = collections.defaultdict(list)
    for prediction in predicted:
        row = rows[prediction["line"] - 2]  # after the header
        name = chosen[prediction["line"] - 2]
        by_op[prediction["op"], collective_sets.SETS.index(name)].append(prediction)
        key = (prediction["fabric"], row["gpu"].split("-")[0], prediction["op"],
               collective_sets.SETS.index(name), collective_sets.source_of(row))
        by_fabric[key].append(prediction)
    ops = [[op, collective_sets.SETS[i]] + errors(statistics_of(members))
           for (op, i), members in sorted(by_op.items())]
    fabrics = [[fabric, gpu, op, collective_sets.SETS[i], source] + errors(statistics_of(members))
               for (fabric, gpu, op, i, source), members in sorted(by_fabric.items())]
    return (table(["collective", "set"] + ERROR_COLUMNS, ops, 2),
            table(["fabric", "GPU", "collective", "set", "source"] + ERROR_COLUMNS,
                  [row for row in fabrics if row[5] != "0"], 5))


def main(arguments):
    if len(arguments) != 2:
        sys.exit(f"usage: {arguments[0]} PATH_OF_SHARDWRIGHT")
    program = str(pathlib.Path(arguments[1]).resolve())
    command = [*bench_command(program, "validate-nccl"), PUBLISHED, "--left-out", "--scale", SCALE, "--json"]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    report = json.loads(output.stdout)

    print("## Collectives\n")
    print(f"`bench/validate_nccl.py {PUBLISHED} --left-out --scale {SCALE}`. Errors are")
    print("predicted / measured time - 1 for sizes from 64 KiB to 16 GiB. Numbers of gathers were fitted to all")
    print("rows of all-gathers and reduce-scatters before they were split; those of all-reduces and all-to-alls")
    print("to the fit rows alone, but for two (`scripts/collective_sets.py`: the rule, fixed before there was a model of them;")
    print("bench/protocol_collectives.json: hashes).\n")
    by_op, by_fabric = sets_tables(report["rows"])
    print(table(["collective"] + ERROR_COLUMNS,
                [["all-gather and reduce-scatter"] + errors(report["pooled"])]
                + [[g["op"]] + errors(g["errors"]) for g in report["by_op"]], 1))
    print("By set. The test set of all-reduces and all-to-alls was scored once, on 2026-11-28: 119 all-reduces 15.9 % in the")
    print("mean, 8.4 % in the median, 38.5 % p90 (18.5, 12.0 and 44.9 before there was a model of them); 12 all-to-alls 5.1, 2.3")
    print("and 6.1 % (23.1, 18.8, 42.8). Three things that it showed were built afterwards (docs/cost_model.md, 3.4), so that its")
    print("lines here are those of a second look. Gathers' numbers had been fitted to rows of all sets before.\n")
    print(by_op)
    print(by_fabric)
    print("All-reduces and all-to-alls of each source, fitted to all rows of all other sources: what to expect of a")
    print("source that nobody has seen. A fabric that no other source has keeps its shipped numbers.\n")
    print(without_its_source(program, report["rows"]))
    print("Gathers and reduce-scatters, each fabric left out of the fit and predicted from its link rates, above 64 MiB:\n")
    print(table(["fabric", "predicted from"] + ERROR_COLUMNS,
                [[f["fabric"], f["from"]] + errors(f["above_64_mib"]) for f in report["left_out"]],
                2))
    print("By source:\n")
    print(table(["source", "fabric", "collective", "rows"] + ERROR_COLUMNS,
                [[g["source"], g["fabric"], g["op"], str(g["rows"])] + errors(g["errors"])
                 for g in report["groups"]], 3))
    print("Not predicted:\n")
    print(table(["source", "rows", "why"],
                [[s["source"], str(s["rows"]), s["reason"]] for s in report["skipped"]], 1))
    print("Fraction of the adapters' rate that an all-gather reaches over many nodes, predicted /")
    print("published by SimAI (origin of its numbers not documented; the slope of step latency over")
    print(f"nodes was taken from it): median error {percent(report['scale']['errors']['median'])},")
    print(f"90 % within {percent(report['scale']['errors']['p90'])}.\n")
    print(scale_table(report["scale"]["points"]))
    print("Two reports of one machine type (a3-high, all-gather above 64 MiB) differ by 41 %: no model")
    print("can be within 17 % of both.")


if __name__ == "__main__":
    main(sys.argv)
