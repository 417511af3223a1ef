"""Writes the tables of bench/accuracy.md from the JSON reports of bench/validate.py and bench/fit.py."""

import concurrent.futures
import csv
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import accuracy_left_out
from bench_command import bench_command

# Arguments of `fit`, as in scripts/fit_profiles.sh.
FEW = "compute.gemm.bf16,overlap.compute_sensitivity,compute.rank_spread,host.step"
TORCH = ["--source", "torchtitan,torchao,ibmfsdp,torchtune", "--one-per-gpu"]
FITS = [
    ["--source", "llmfoundry", "--numbers",
     "compute.gemm.bf16,compute.elementwise,compute.triton_attention_forward,compute.triton_attention_backward,"
     "overlap.compute_sensitivity,compute.rank_spread,compute.gemm.fp8,compute.gemm_ramp"],
    [*TORCH, "--gpu-class", "A100", "--numbers", FEW],
    [*TORCH, "--gpu-class", "H100", "--numbers",
     "compute.gemm.bf16,compute.elementwise,overlap.compute_sensitivity,compute.gemm.fp8,host.step,"
     "compute.rank_spread,compute.fp8_rowwise"],
    [*TORCH, "--gpu-class", "B200", "--numbers",
     "compute.gemm.bf16,compute.elementwise,compute.attention_forward,compute.attention_backward,"
     "compute.reduction,overlap.compute_sensitivity,compute.gemm.fp8,host.step"],
    [*TORCH, "--gpu-class", "MI300", "--numbers", "compute.attention_backward,compute.gemm.fp8,compute.fp8_rowwise"],
    ["--source", "fmsaccel", "--numbers", FEW],
    ["--source", "internevo", "--numbers", FEW],
]
# What the groups of a source are called in the tables of models left out.
FRAMEWORKS = {"llmfoundry": "composer", "fmsaccel": "hf", "internevo": "internevo", "torchtitan": "torch", "torchao": "torch",
              "ibmfsdp": "torch", "torchtune": "torch"}


# What a fit depends on besides its arguments.
FIT_FOLDERS = ["analysis", "bench/lab", "core", "models", "schedule", "simulator", "topologies"]


def is_fitted(path):
    """Whether fits wrote this profile: no fit starts from it, so a new one changes no other."""
    return path.parent.name == "profiles" and "fit" in json.loads(path.read_text(encoding="utf-8"))


def fit_key(arguments, runs):
    digest = hashlib.sha256(repr(arguments).encode())
    for folder in FIT_FOLDERS:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.is_file() and not (path.suffix == ".json" and is_fitted(path)):
                digest.update(str(path).encode() + b"\0" + path.read_bytes())
    digest.update(pathlib.Path(runs).read_bytes())
    return digest.hexdigest()


def kept_fit(program, cache, runs, flags):
    """The report of one fit, made now or by an earlier call on the same sources and table."""
    path = cache / (fit_key(flags, runs) + ".json")
    if not path.exists():
        cache.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(report(program, "fit", runs, *flags)), encoding="utf-8")
        os.replace(unfinished, path)
    return json.loads(path.read_text(encoding="utf-8"))


def report(program, command, *arguments):
    done = subprocess.run([*bench_command(program, command), *arguments, "--json"], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True)
    return json.loads(done.stdout)


def percent(value):
    return f"{100 * value:.1f} %"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def statistics(s):
    return [s["rows"], percent(s["mean"]), percent(s["median"]), percent(s["p90"]),
            percent(s["max"]), f"{100 * s['bias']:+.1f} %"]


COLUMNS = ["rows", "mean", "median", "p90", "worst", "bias"]


def errors_table(validation, key):
    rows = []
    for group in validation["groups"]:
        if group[key]:
            rows.append([group["source"], group["gpu_class"], *statistics(group[key])])
    for source in validation["sources"]:
        if source[key] and sum(1 for row in rows if row[0] == source["source"]) > 1:
            rows.append([source["source"], "all", *statistics(source[key])])
    if validation["pooled"][key]:
        rows.append(["all", "all", *statistics(validation["pooled"][key])])
    return table(["source", "GPU", *COLUMNS], rows)


def quantile(values, q):
    """As in bench/lab/base.py."""
    values = sorted(values)
    below = int(q * (len(values) - 1))
    above = min(below + 1, len(values) - 1)
    return values[below] + (q * (len(values) - 1) - below) * (values[above] - values[below])


def summarise(errors):
    sizes = [abs(error) for error in errors]
    return {"rows": len(errors), "mean": sum(sizes) / len(sizes), "median": quantile(sizes, 0.5),
            "p90": quantile(sizes, 0.9), "max": max(sizes), "bias": sum(errors) / len(errors)}


def left_out_section(fits):
    """Statistics by source, and a row per model. A source may be part of several fits."""
    errors = {}
    by_model = []
    for fit in fits:
        for row in fit["left_out_rows"]:
            errors.setdefault(row["id"].split("-")[0], []).append(row["error"])
        for fold in fit["left_out"]:
            by_model.append([fold["gpu"], fold["framework"], fold["model"],
                             *statistics(fold["errors"])])
    return {source: summarise(of_source) for source, of_source in errors.items()}, by_model


class Before:
    """The tables of the report before, for sources whose fits are not made again."""

    def __init__(self, path, sources):
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines() if sources else []
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        frameworks = [FRAMEWORKS[source] for source in sources]
        self.sources = sources
        self.goals = [row for row in rows if any(row[0].startswith(f"step time, {s}, left out,") for s in sources)]
        self.by_source = [row for row in rows if len(row) == 7 and row[0] in sources]
        self.by_model = [row for row in rows if len(row) == 9 and row[1] in frameworks]
        self.note = ""
        if sources:
            self.note = ("\nRows of these sources are those of the report before this one; their fits were not made again: "
                         + ", ".join(sources) + ".\n")


def skipped_table(details):
    reasons = {}
    for row in details:
        if "skipped" in row and not row["id"].startswith("oom-ref"):
            reasons.setdefault(row["skipped"], []).append(row["id"])
    rows = []
    for reason in sorted(reasons):
        ids = reasons[reason]
        rows.append([len(ids), reason, ", ".join(ids[:4]) + (", ..." if len(ids) > 4 else "")])
    return table(["rows", "why", "which"], rows)


def worst_table(validation):
    rows = [row for row in validation["rows"] if row.get("error") is not None]
    rows.sort(key=lambda row: -abs(row["error"]))
    return table(["row", "predicted s", "measured s", "error", "profile"],
                 [[row["id"], f"{row['predicted']:.3f}", f"{row['measured']:.3f}",
                   f"{100 * row['error']:+.1f} %", row["profile"]] for row in rows[:25]])


def twins_table(validation):
    return table(["rows", "step time", "memory", "which"],
                 [[len(twins["ids"]), percent(twins["step_time_spread"]),
                   percent(twins["memory_spread"]), ", ".join(twins["ids"])]
                  for twins in validation["twins"]])


def bands_table(validation):
    rows = []
    for group in [*validation["sources"], validation["pooled"]]:
        if group["band_coverage"] is not None:
            rows.append([group["source"] or "all", group["step_time"]["rows"],
                         percent(group["band_coverage"]), percent(group["band_median"])])
    return table(["source", "rows", "inside", "median half-width"], rows)


def oom_table(validation):
    rows = []
    for row in validation["oom"]["details"]:
        if not row["id"].startswith("oom-ref") and "predicted_oom" in row:
            rows.append([row["id"], row["outcome"], "oom" if row["predicted_oom"] else "fits",
                         f"{row['margin_gib']:+.2f}"])
    return table(["row", "measured", "predicted", "margin GiB"], rows)


# Columns that say what a run was; those of one choice differ together.
CHOICES = {"microbatch_per_gpu": ("microbatch_per_gpu",), "gpus": ("gpus", "internode_network"),
           "parallelism": ("parallelism", "sharding_strategy")}
NOT_THE_RUN = {"id", "source", "outcome", "outcome_basis", "peak_mem_GiB", "peak_mem_kind", "notes", "dims_source",
               "global_batch_sequences"}


def brackets(validation, path):
    """(oom row, fits row, choice) for every row that ran out of memory and the nearest one that fitted, which differs from it in
    one choice only."""
    details = {row["id"]: row for row in validation["oom"]["details"] if "predicted_oom" in row}
    with open(path, encoding="utf-8", newline="") as file:
        runs = [run for run in csv.DictReader(file) if run["id"] in details and not run["id"].startswith("oom-ref")]
    found = []
    for oom in (run for run in runs if run["outcome"] == "oom"):
        for choice, columns in CHOICES.items():
            same = [column for column in oom if column not in NOT_THE_RUN and column not in columns]
            near = [run for run in runs if run["outcome"].startswith("fits") and run[choice] != oom[choice]
                    and all(run[column] == oom[column] for column in same)]
            if near:
                def distance(run):
                    values = run[choice], oom[choice]
                    return abs(float(values[0]) - float(values[1])) if all(v.isdigit() for v in values) else 0
                found.append((details[oom["id"]], details[min(near, key=distance)["id"]], choice, oom[choice],
                              min(near, key=distance)[choice]))
    return found


def is_right(bracket):
    return bracket[0]["predicted_oom"] and not bracket[1]["predicted_oom"]


def brackets_table(found):
    return table(["ran out", "margin GiB", "fitted", "margin GiB", "differ in", "both right"],
                 [[oom["id"], f"{oom['margin_gib']:+.2f}", fits["id"], f"{fits['margin_gib']:+.2f}",
                   f"{choice}: {a}, {b}", "yes" if is_right((oom, fits)) else "**no**"] for oom, fits, choice, a, b in found])


def lengths_text(details):
    """What the rows whose samples differ in length add to the false alarms."""
    fits = [r for r in details if r["outcome"].startswith("fits") and "predicted_oom" in r
            and not r["id"].startswith("oom-ref")]
    derived = [r for r in fits if any("tokens per sample not stated: their mean" in n for n in r["notes"])]
    alarms = sum(r["predicted_oom"] for r in fits)
    of_derived = sum(r["predicted_oom"] for r in derived)
    rest = len(fits) - len(derived)
    return (f"{len(derived)} of the rows that fitted ran on samples of different lengths; their mean is taken from the step time and throughput of the same job in `measured_runs.csv`.\n"
            f"They fit easily ({of_derived} false alarms); without them false alarms are {alarms - of_derived} of {rest} ({percent((alarms - of_derived) / rest)}).")


def collectives(program):
    """The section on collectives, which its own script writes."""
    done = subprocess.run([sys.executable, "-B", "scripts/accuracy_collectives.py", program],
                          check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


# The source that most rows come from, with a goal of its own.
MAIN_SOURCE = "llmfoundry"
MANY_ROWS = 8


def step_time_goals(validation, left_out, kept):
    goals = []
    if MAIN_SOURCE in left_out:
        s = left_out[MAIN_SOURCE]
        for key, limit in [("median", 0.015), ("mean", 0.025), ("p90", 0.05)]:
            goals.append([f"step time, {MAIN_SOURCE}, left out, {key}", limit, s[key]])
    for source, s in sorted(left_out.items()):
        if source != MAIN_SOURCE and s["rows"] >= MANY_ROWS:
            goals.append([f"step time, {source}, left out, mean", 0.08, s["mean"]])
            goals.append([f"step time, {source}, left out, bias", 0.05, abs(s["bias"])])
    for group in validation["sources"]:
        s = group["step_time"]
        if s and s["rows"] < MANY_ROWS and group["source"] not in [*left_out, *kept]:
            goals.append([f"step time, {group['source']}, nothing fitted, mean", 0.12, s["mean"]])
    return goals


def goals_table(validation, nccl, left_out, edges, before):
    """Every goal, what was reached, and whether that is enough."""
    goals = step_time_goals(validation, left_out, before.sources)
    pooled = validation["pooled"]
    goals.append(["memory allocated, mean", 0.04, pooled["memory_allocated"]["mean"]])
    goals.append(["memory reserved, mean", 0.06, pooled["memory_reserved"]["mean"]])
    oom = validation["oom"]
    goals.append(["out of memory, rows missed", 0.05, 1 - (oom["recall"] or 0)])
    goals.append(["out of memory, false alarms", 0.05, oom["false_alarms"] or 0])
    wrong = sum(not is_right(edge) for edge in edges)
    goals.append(["out of memory, sharp edges not met", 0, wrong / len(edges)])
    goals.append(["bands, outside, at most", 0.15, 1 - pooled["band_coverage"]])
    goals.append(["bands, outside, at least", 0.03, 1 - pooled["band_coverage"]])
    goals.append(["bands, median half-width", 0.06, pooled["band_median"]])
    goals.append(["all-gather and reduce-scatter, median", 0.08, nccl["pooled"]["median"]])
    goals.append(["all-gather and reduce-scatter, p90", 0.20, nccl["pooled"]["p90"]])
    worst = max(f["above_64_mib"]["median"] for f in nccl["left_out"])
    goals.append(["worst fabric left out, median above 64 MiB", 0.20, worst])
    rows = list(before.goals)
    for what, limit, reached in goals:
        is_floor = what.endswith("at least")
        is_met = reached >= limit if is_floor else reached <= limit
        rows.append([what, percent(limit), f"{100 * reached:.2f} %",
                     "met" if is_met else "**missed**"])
    missed = sum(1 for row in rows if row[3] != "met")
    return f"{len(rows) - missed} of {len(rows)} met, {missed} missed.\n\n" + table(
        ["what", "goal", "reached", ""], rows)


def main():
    build, folder, output, *keep = sys.argv[1:]
    program = build + "/shardwright"
    cache = pathlib.Path(build) / "accuracy"
    runs = folder + "/measured_runs.csv"
    before = Before(output, keep)
    wanted = [flags for flags in FITS if not set(flags[1].split(",")) <= set(keep)]
    # A fit keeps all cores busy but at its end, when the last of its models is left out.
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        fits = [pool.submit(kept_fit, program, cache, runs, flags) for flags in wanted]
        validation = pool.submit(report, program, "validate", runs, "--oom", folder + "/oom_runs.csv", "--bands").result()
        left_out, by_model = left_out_section([fit.result() for fit in fits])
    by_source = table(["source", *COLUMNS], before.by_source + [[k, *statistics(s)] for k, s in left_out.items()])
    by_model = table(["GPU", "framework", "left out", *COLUMNS], before.by_model + by_model)
    oom = validation["oom"]
    edges = brackets(validation, folder + "/oom_runs.csv")
    nccl = report(program, "validate-nccl", "bench/published/nccl_measured.csv", "--left-out")
    of_main = next((row for row in before.by_source if row[0] == MAIN_SOURCE), [MAIN_SOURCE, *statistics(left_out[MAIN_SOURCE])]
                   if MAIN_SOURCE in left_out else None)
    text = f"""# Accuracy against published training runs

Written by `scripts/accuracy.sh`; nothing in it is edited by hand. Rows: bench/published, tier A. Errors are predicted / measured - 1; mean, median, p90 and worst are of absolute errors.

{accuracy_left_out.first_contact()}
## Goals

{goals_table(validation, nccl, left_out, edges, before)}
## 1. Step time of rows that were not fitted

Every model is left out in turn, the numbers are fitted to the other rows of the same chip and framework, and the left-out rows are predicted (in a group with one model: every number of
GPUs; with one number of GPUs: every choice of dtypes). This is what to expect for a new model. The fit does not replay the allocator, so stalls near the memory limit are missing here.
Which numbers are fitted, the size of errors from which the fit counts them linearly, and how strongly numbers that have one cause are drawn to each other, were chosen among some sixty variants by this table.
Attention and norms of PyTorch on A100 and H100 are not fitted to steps: they are what single kernels were measured to take (docs/cost_model.md). Two variants of that were tried.
llm-foundry's rows are those of fits made on 2026-11-28 with Triton's attention to start from; the profiles that ship for it are of the fits before, which were 2.47 % off in the mean,
1.49 % in the median and 4.96 % at p90 (docs/cost_model.md, section 4.1).
{before.note}
{by_source}
{by_model}
## 2. Step time with the shipped profiles

The profiles were fitted to the sources llmfoundry, torchtitan, torchao, ibmfsdp, torchtune, fmsaccel and internevo, so their rows are no test here; nothing was fitted to the other sources.

{errors_table(validation, "step_time")}
The worst rows:

{worst_table(validation)}
## 3. Uncertainty

Measured times inside the stated 90 % band (goal: 85 to 97 %, median half-width at most 6 %):

{bands_table(validation)}
## 4. Memory

Against the mean of all rows that differ only in what they measured. Allocated:

{errors_table(validation, "memory_allocated")}
Reserved:

{errors_table(validation, "memory_reserved")}
## 5. Out of memory

Recall {percent(oom["recall"] or 0)} ({oom["oom_found"]} of {oom["oom_rows"]} rows that ran out of memory), false alarms {percent(oom["false_alarms"] or 0)} ({oom["false_alarm_rows"]} of {oom["fits_rows"]} that fitted, without copies
of measured runs); {oom["presumed_found"]} of {oom["presumed_rows"]} rows that failed for an unpublished reason are predicted to; {oom["skipped"]} rows cannot be mapped.

{lengths_text(oom["details"])}

Sharp edges: a row that ran out of memory and the nearest that fitted and differs from it in one choice. The margin is the device's memory less tensors at their peak and what lies outside the allocator; the prediction follows the replay of the allocator.

{brackets_table(edges)}
{oom_table(validation)}
Rows that cannot be mapped:

{skipped_table(oom["details"])}
## 6. Rows that no model can tell apart

Equal in every column but the measured ones; (largest - smallest) / mean.

{twins_table(validation)}
## 7. Rows skipped

{skipped_table(validation["rows"])}
{accuracy_left_out.sections(program, validation, nccl, of_main[1:5])}
{collectives(program)}"""
    with open(output, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
