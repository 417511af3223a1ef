#!/usr/bin/env python3
"""Calibrates the bands of step times on rows that were left out: writes analysis/bands.json from bench/left_out_kinds.csv.

    python3 scripts/left_out.py build/shardwright kinds      the rows, each by how much of it was unknown (a quarter of an hour)
    bench/bands.py                                           the half-widths, and how many rows lie within
    bench/bands.py --check                                   analysis/bands.json is that of the rows

A kind's half-width holds 86 of 100 of its rows, the middle of the goal, 80 to 92: the mean of the share where sources count alike, since a user
is a new source, and of the share of rows, since small sources are few rows. A kind that has too few rows takes the widest that was found.
What a band must hold is |measured / predicted - 1|. Kinds: docs/cost_model.md, "Bands".
"""

import argparse
import json
import sys

from lab import base, runs

ROWS = base.ROOT / "bench/left_out_kinds.csv"
LOG = base.ROOT / "bench/left_out.csv"
BANDS = base.ROOT / "analysis/bands.json"
MEASURED = base.ROOT / "bench/published/measured_runs.csv"
HELD = 0.86
LEAST_ROWS = 20  # fewer do not tell a quantile
ABOUT = ("Half-widths of step time bands by what is known of a run, written by bench/bands.py. known: its kernel set and chip were both fitted to "
         "steps; stack: its chip alone; chip: its kernel set alone; both: neither is known; generic: nothing of the chip was measured. The "
         "others widen these: offload to the host, fp8 (and fp4) products, cards that add in fp32 at half rate, chips of other makers than NVIDIA.")


def errors_by_kind():
    """{kind: [(source, |measured / predicted - 1|)]}; the special ones are of all kinds' rows with their stack known."""
    measured = {run.id: run for run in runs.read_runs(str(MEASURED))}
    found = {kind: [] for kind in ("known", "stack", "chip", "both", "offload", "fp8", "half rate", "other maker")}
    for row in base.read_table(str(ROWS)):
        run = measured[row["id"]]
        if "power limited" in run.gpu:
            continue  # cards with a limit that their source does not state
        error = (row["source"], abs(row.number("measured") / row.number("predicted") - 1))
        special = ("other maker" if run.gpu_class.startswith("MI") else "offload" if run.offload and not run.offload.startswith("n")
                   else "fp8" if run.compute_dtype in ("fp8", "fp4") else None)
        if special:
            if row["kind"] in ("known", "chip"):
                found[special].append(error)
        else:
            found[row["kind"]].append(error)
    return found


def share_within(errors, width):
    """Of rows, sources counting alike."""
    inside = {}
    for source, error in errors:
        inside.setdefault(source, []).append(error <= width)
    return base.total(sum(rows) / len(rows) for rows in inside.values()) / len(inside)


def half_width(errors):
    """The least error that holds enough, up to a tenth of a per cent."""
    sizes = sorted(error for _, error in errors)
    return round(next(error for n, error in enumerate(sizes, 1) if share_within(errors, error) + n / len(sizes) >= 2 * HELD) + 0.0005, 3)


def bands():
    found = errors_by_kind()
    kinds = {}
    widths = {kind: half_width(errors) for kind, errors in found.items() if len(errors) >= LEAST_ROWS}
    for kind, errors in found.items():
        width = widths.get(kind, max(widths.values()))
        sizes = [error for _, error in errors]
        kinds[kind] = {"half_width": width, "rows": len(errors), "inside": round(share_within(errors, width), 3) if errors else None,
                       "rows_inside": round(sum(size <= width for size in sizes) / len(sizes), 3) if errors else None,
                       "mean": round(base.total(sizes) / len(sizes), 3) if errors else None}
    # Every chip by the profile of no GPU in particular: the last such line of the log, whose half-width is narrowed from nine tenths to eight.
    last = [row for row in base.read_table(str(LOG)) if row["left_out"] == "gpu, generic" and row["group"] == "all"][-1]
    kinds["generic"] = {"half_width": round(last.number("half_width") * 1.6449 / 1.2816, 3), "rows": last.count("rows"),
                        "inside": None, "rows_inside": round(last.number("inside_band"), 3), "mean": round(last.number("mean"), 3)}
    return kinds


def text_of(kinds):
    lines = ",\n".join(f'    {json.dumps(kind)}: {json.dumps(row)}' for kind, row in kinds.items())
    return f'{{\n  "about": {json.dumps(ABOUT)},\n  "kinds": {{\n{lines}\n  }}\n}}\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    kinds = bands()
    if arguments.check:
        if BANDS.read_text(encoding="utf-8") != text_of(kinds):
            sys.exit("analysis/bands.json is not that of bench/left_out_kinds.csv; run bench/bands.py")
        return
    base.write(BANDS, text_of(kinds))
    lines = [["kind", "rows", "mean", "half-width", "inside, sources alike", "inside, by rows"]]
    lines += [[kind, row["rows"], row["mean"] and base.percent(row["mean"]), base.percent(row["half_width"]),
               *(row[key] is not None and base.percent(row[key]) or "" for key in ("inside", "rows_inside"))] for kind, row in kinds.items()]
    print(base.table("lrrrrr", lines), end="")


base.start(main)
