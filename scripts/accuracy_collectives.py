#!/usr/bin/env python3
"""Prints the collectives section of bench/accuracy.md.

    scripts/accuracy_collectives.py build/shardwright

Runs `shardwright validate-nccl` on the published sweeps and writes Markdown to standard output.
"""

import json
import pathlib
import subprocess
import sys

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


def main(arguments):
    if len(arguments) != 2:
        sys.exit(f"usage: {arguments[0]} PATH_OF_SHARDWRIGHT")
    program = str(pathlib.Path(arguments[1]).resolve())
    command = [program, "validate-nccl", PUBLISHED, "--left-out", "--scale", SCALE, "--json"]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    report = json.loads(output.stdout)

    print("## Collectives\n")
    print(f"`shardwright validate-nccl {PUBLISHED} --left-out --scale {SCALE}`. Errors are")
    print("predicted / measured time - 1 for sizes from 64 KiB to 16 GiB. Numbers were fitted to the")
    print("all-gathers and reduce-scatters only, except one factor and one latency per generation for")
    print("all-reduce inside the switch (NVLS).\n")
    print(table(["collective"] + ERROR_COLUMNS,
                [["all-gather and reduce-scatter"] + errors(report["pooled"])]
                + [[g["op"]] + errors(g["errors"]) for g in report["by_op"]], 1))
    print("Each fabric left out of the fit and predicted from its link rates, above 64 MiB:\n")
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
