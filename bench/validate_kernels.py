#!/usr/bin/env python3
"""Predicts measured times of single GPU kernels and reports the errors.

    bench/validate_kernels.py kernels.csv
    bench/validate_kernels.py kernels.csv --profile my-profile.json --json

The columns of a table are described in bench/README.md.
"""

import itertools

from lab import base

TEXTS = ("gpu", "stack", "op", "direction", "dtype")
COUNTS = ("batch", "m", "n", "k", "groups", "sequence", "kv_sequence", "heads", "kv_heads", "head_dim", "value_dim", "rows", "features")
COLUMNS = TEXTS + COUNTS[:11] + ("causal",) + COUNTS[11:] + ("time_us",)
GPUS = base.data("machines.json")["kernel_gpus"]
CALLS = base.data("machines.json")["kernel_calls"]
PROFILES = base.data("machines.json")["kernel_profiles"]


def read_rows(file):
    """(line, question for the program, measured seconds) of every row."""
    rows = []
    for row in base.read_table(file, COLUMNS, "a table of kernel times"):
        if row["causal"] not in ("", "0", "1"):
            raise base.InputError(row.where("causal"), f'"{row["causal"]}"', "0, 1 or nothing")
        question = {**{c: row[c] for c in TEXTS}, **{c: row.count(c) for c in COUNTS}, "causal": int(row["causal"] == "1")}
        question["gpu"] = next((known["gpu"] for known in GPUS if known["part"] in row["gpu"]), row["gpu"])
        rows.append((row.line, question, 1e-6 * row.number("time_us")))
    return rows


def least_call(question):
    """Seconds that the host needs for one call of a library whose kernels Python launches."""
    return next((call["time_s"] for call in CALLS if question["stack"].startswith(call["stack"]) and call["direction"] == question["direction"]), 0)


def profile_of(question):
    """The library's own numbers where the default profile has a framework's."""
    return next((row["profile"] for row in PROFILES if (row["gpu"], row["stack"]) == (question["gpu"], question["stack"])), "")


def report_of(program, rows, profile):
    timed = sorted((row for row in rows if row[2] > 0), key=lambda row: profile or profile_of(row[1]))
    answers = [answer for name, group in itertools.groupby(timed, lambda row: profile or profile_of(row[1]))
               for answer in program.ask("price", {"profile": name, "kernels": [question for _, question, _ in group]})["kernels"]]
    skipped, errors, found = {}, {}, []
    if len(timed) < len(rows):
        skipped["no time"] = len(rows) - len(timed)
    for (line, question, measured), answer in zip(timed, answers):
        if "error" in answer:
            skipped[answer["error"]] = skipped.get(answer["error"], 0) + 1
            continue
        of = {key: question[key] for key in ("gpu", "stack", "op")}
        predicted = max(answer["time_s"], least_call(question))
        found.append({"line": line, **of, "predicted_s": predicted, "measured_s": measured,
                      "error": predicted / measured - 1, "profile": answer["profile"]})
        errors.setdefault(tuple(of.values()), []).append(found[-1]["error"])
    groups = []
    for (gpu, stack, op), values in sorted(errors.items()):
        s = base.statistics(values)
        groups.append({"gpu": gpu, "stack": stack, "op": op, "n": s["count"], "mean_abs": s["mean"], "median_abs": s["median"],
                       "p90_abs": s["p90"], "bias": s["bias"]})
    return {"groups": groups, "skipped": [{"reason": reason, "rows": count} for reason, count in sorted(skipped.items())], "rows": found}


def text_of(answer):
    rows = [["GPU", "library", "op", "rows", "mean", "median", "p90", "bias"]]
    rows += [[g["gpu"], g["stack"], g["op"], g["n"], base.percent(g["mean_abs"]), base.percent(g["median_abs"]),
              base.percent(g["p90_abs"]), base.percent(g["bias"], "+")] for g in answer["groups"]]
    text = base.table("lllrrrrr", rows)
    if answer["skipped"]:
        text += "\n" + base.table("rl", [["rows", "not priced"], *([s["rows"], s["reason"]] for s in answer["skipped"])])
    return text


def main():
    parser = base.parser(__doc__, "table of kernel times (CSV)")
    parser.add_argument("--profile", default="", help="profile for all rows (default: by GPU and library)")
    arguments = parser.parse_args()
    answer = base.report("shardwright-kernel-validation",
                         **report_of(base.Program(arguments.program), read_rows(arguments.table), arguments.profile))
    base.show(arguments.json, answer, lambda: text_of(answer))


base.start(main)
