#!/usr/bin/env python3
"""Scores runs of sources that nobody had looked at, as their authors name them, and logs the scoring.

    bench/first_contact.py --variants 2            scores the 57 rows, prints, and adds a line to bench/first_contact.csv
    bench/first_contact.py --show                  prints the log; scores nothing

Nothing is fitted to these rows and nothing is chosen by them (bench/protocol.json). --variants says how many variants were scored on
them before this one, so that whoever looks often can be seen doing so.
"""

import argparse
import csv
import datetime
import json
import os
import pathlib
import subprocess

from lab import base, runs, validation

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "published/first_contact_runs.csv"
LOG = HERE / "first_contact.csv"
COLUMNS = ("date", "commit", "variants_before", "rows", "mean", "median", "mean_of_sources", "inside_band", "half_width", "false_oom",
           "memory_mean")


def score(rows):
    """What is logged, of validated rows; a row that cannot be told as a job is a UsageError, since all of them are to be scored."""
    if skipped := [f"{row.run.id}: {row.skipped}" for row in rows if row.skipped]:
        raise base.InputError("; ".join(skipped))
    validation.score_twins(rows)
    errors = [abs(row.time_error()) for row in rows]
    sources = [base.statistics([row.time_error() for row in group])["mean"]
               for _, group in validation.grouped(rows, lambda row: row.run.source())]
    memory = [abs(row.memory_error()) for row in rows if row.has_memory()]
    return {"rows": len(rows), "mean": base.total(errors) / len(errors), "median": base.quantile(errors, 0.5),
            "mean_of_sources": base.total(sources) / len(sources),
            "inside_band": sum(is_inside(row) for row in rows) / len(rows), "half_width": base.quantile([row.band for row in rows], 0.5),
            "false_oom": sum(row.out_of_memory for row in rows), "memory_mean": base.total(memory) / len(memory) if memory else 0}


def is_inside(row):
    return abs(row.measured_s / row.predicted_s - 1) <= row.band


def text_of(rows, answer):
    lines = [["row", "predicted s", "measured s", "error", "band", "", "profile", "assumed"]]
    lines += [[row.run.id, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", base.percent(row.time_error(), "+"), base.percent(row.band),
               ("in" if is_inside(row) else "out") + (", out of memory" if row.out_of_memory else ""), row.profile, "; ".join(row.notes)]
              for row in rows]
    groups = [["source", "GPU", "rows", "mean", "inside", "out of memory"]]
    for key, group in validation.grouped(rows, lambda row: (row.run.source(), row.run.gpu_class)):
        part = score(group)
        groups.append([*key, part["rows"], base.percent(part["mean"]), base.percent(part["inside_band"]), part["false_oom"]])
    return (base.table("lrrrrlll", lines, 2, wrap=True) + "\n" + base.table("llrrrr", groups, 2) +
            f"\n{answer['rows']} rows: mean {base.percent(answer['mean'])}, median {base.percent(answer['median'])}, one vote a source "
            f"{base.percent(answer['mean_of_sources'])}, inside the band {base.percent(answer['inside_band'])}, falsely out of memory "
            f"{answer['false_oom']}, memory {base.percent(answer['memory_mean'])}\n")


def log_line(answer, variants):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()
    return {"date": datetime.date.today().isoformat(), "commit": commit, "variants_before": variants,
            **{key: value if isinstance(value, int) else f"{value:.4f}" for key, value in answer.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--program", default=os.environ.get("SHARDWRIGHT", base.ROOT / "build/shardwright"), help="default: build/shardwright")
    parser.add_argument("--show", action="store_true", help="only the log")
    parser.add_argument("--variants", type=int, help="variants that were scored on these rows before")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.show:
        print(LOG.read_text(encoding="utf-8"), end="")
        return
    if arguments.variants is None or arguments.variants < 0:
        raise base.UsageError("--variants: expected how many variants were scored on these rows before")
    rows = validation.predict(base.Program(arguments.program), runs.read_runs(str(TABLE)), ("A", "B"), bands=True)
    answer = score(rows)
    is_new = not LOG.exists()
    with open(LOG, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(log_line(answer, arguments.variants))
    print(json.dumps(answer, indent=2) if arguments.json else text_of(rows, answer), end="")


base.start(main)
