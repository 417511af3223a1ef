"""How well predictions agree with published runs: error statistics per source and GPU class, and how many runs that ended out of memory
are foretold."""

import json

from lab import jobs
from lab.base import ROOT, error_cells, percent, quantile, report, statistics, table, total

GIB = 1024.0 ** 3
BANDS = json.loads((ROOT / "analysis/bands.json").read_text(encoding="utf-8"))["kinds"]
# The kind of a run whose framework is not known, by what it would be if the nearest stack were its own.
UNKNOWN = {"source": "stack", "known": "stack", "chip": "both"}
KINDS = ("allocated", "reserved", "device")


class Row:
    """One row and what became of it."""

    def __init__(self, job):
        self.job, self.run = job, job.run
        self.skipped = job.skipped
        self.notes = job.notes
        self.profile = self.kind = ""
        self.predicted_s = self.measured_s = self.band = 0.0
        self.out_of_memory = False
        self.peak_is_real = True  # could be one of a plan with these columns
        self.margin_gib = self.predicted_gib = self.measured_gib = 0.0

    def take(self, answer):
        """What the program says of it."""
        if "error" in answer:
            self.skipped = answer["error"]
            return
        run = self.run
        self.profile, self.predicted_s, self.out_of_memory = answer["profile"], answer["step_time_s"], answer["out_of_memory"]
        if self.job.has_static_memory:
            self.out_of_memory = answer["allocated"] + answer["outside"] > answer["usable"]
        self.margin_gib = (answer["usable"] - answer["outside"] - answer["allocated"]) / GIB
        if run.parameters > 0 and abs(answer["parameters"] / run.parameters - 1) > 0.02:
            # The row's own count tells whether the columns describe the whole model.
            self.notes.insert(self.job.count_note,
                              f"the model built has {answer['parameters']} parameters, the row says {run.parameters}")
        self.measured_s = run.step_time_s
        if run.step_time_s <= 0 < run.tokens_per_s_per_gpu:
            self.measured_s = self.job.micro_batch * self.job.accumulation * self.job.sequence_length / run.tokens_per_s_per_gpu
        self.band = answer.get("band", 0.0) if self.has_time() else 0.0
        self.kind = answer.get("band_kind", "")
        if self.band and not self.job.is_known and self.kind in UNKNOWN:
            self.kind = UNKNOWN[self.kind]
            self.band = max(self.band, BANDS[self.kind]["half_width"])
        # Weights, gradients and Adam's two states in 16 bits.
        least = 8 * answer["parameters"] / int(self.job.flags.get("--shard", 1)) / GIB
        is_whole = self.job.flags["--optimizer"].startswith("adam") and self.job.flags["--offload"] in ("none", "activations")
        if is_whole and 0 < run.peak_memory_gib < least:
            self.peak_is_real = False
            if run.outcome.startswith("fits"):
                self.skipped = "its peak is below weights, gradients and states"
        memory = {"allocated": answer["allocated"], "reserved": answer["reserved"], "device": answer["reserved"] + answer["outside"]}
        self.predicted_gib = memory.get(run.memory_kind, 0) / GIB

    def has_time(self):
        return self.measured_s > 0

    def has_memory(self):
        return self.run.memory_kind != "" and self.peak_is_real and not self.run.chunks_its_loss

    def time_error(self):
        return self.predicted_s / self.measured_s - 1

    def memory_error(self):
        return self.predicted_gib / self.measured_gib - 1


def predict(program, runs, tiers, profile="auto", profiles=None, bands=False, unknown=False):
    """A Row for each run. `profiles`: a folder of them instead of the shipped ones. `unknown`: no framework is known by name."""
    names = jobs.Names(program, unknown)
    flags = ["--profiles", profiles] if profiles else []
    found = []
    for run in runs:
        if run.tier and run.tier not in tiers:
            job = jobs.Job(run)
            job.skipped = "tier " + run.tier
        else:
            job = jobs.job_of(run, names, profile)
        found.append(job)
    files = jobs.Files()
    listed = jobs.listed(program, found, files, flags, profiles)
    rows = [Row(job) for job in found]
    answers = program.ask("validate", jobs.run_list(listed, bands=bands), *flags)["runs"]
    for row, answer in zip((row for row in rows if not row.skipped), answers):
        row.take(answer)
    return rows


def spread(values):
    """(largest - smallest) / mean; 0 of fewer than two."""
    return (max(values) - min(values)) * len(values) / total(values) if len(values) > 1 else 0


def score_twins(rows):
    """Rows that agree in every column but the measured ones, which no model can tell apart: memory is scored against their mean."""
    twins = {}
    for row in rows:
        if not row.skipped:
            twins.setdefault(row.run.configuration(), []).append(row)
    found = []
    for members in twins.values():
        memory = [row.run.peak_memory_gib for row in members if row.has_memory()]
        for row in members:
            if row.has_memory():
                row.measured_gib = total(memory) / len(memory)
        if len(members) > 1:
            found.append({"ids": [row.run.id for row in members],
                          "step_time_spread": spread([row.measured_s for row in members if row.has_time()]),
                          "memory_spread": spread(memory)})
    return found


def run_errors(errors):
    return statistics(errors, "rows") if errors else None


def group_of(rows, source, gpu_class):
    """Errors of some rows."""
    predicted = [row for row in rows if not row.skipped]
    timed = [row for row in predicted if row.has_time()]
    banded = [row for row in timed if row.band > 0]
    inside = [row for row in banded if abs(row.measured_s / row.predicted_s - 1) <= row.band]
    group = {"source": source, "gpu_class": gpu_class, "rows": len(predicted), "skipped": len(rows) - len(predicted),
             "step_time": run_errors([row.time_error() for row in timed])}
    for kind in KINDS:
        group["memory_" + kind] = run_errors([row.memory_error() for row in predicted if row.has_memory() and row.run.memory_kind == kind])
    group["band_coverage"] = len(inside) / len(banded) if banded else None
    group["band_median"] = quantile([row.band for row in banded], 0.5) if banded else None
    return group


def grouped(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items())


def row_json(row):
    if row.skipped:
        return {"id": row.run.id, "skipped": row.skipped}
    found = {"id": row.run.id, "predicted": row.predicted_s, "measured": row.measured_s if row.has_time() else None,
             "error": row.time_error() if row.has_time() else None, "profile": row.profile, "band": row.band or None,
             **({"band_kind": row.kind} if row.band else {})}
    if row.has_memory():
        found["memory"] = {"kind": row.run.memory_kind, "predicted_gib": row.predicted_gib, "measured_gib": row.measured_gib,
                           "error": row.memory_error()}
    return {**found, "out_of_memory": row.out_of_memory, "notes": row.notes}


# Runs of which only the outcome is known


def with_throughput(outcomes, measured):
    """A run without tokens per sample takes the step time and throughput, which tell them, from the run of `measured` that is the same job (of
    several the one with the most tokens), whatever its tier. Tables of outcomes have no columns for the dtype of products and the global batch."""
    def key(run):
        return run.configuration(without=("compute_dtype", "global_batch"))
    most = {}
    for run in measured:
        if run.sequence_length == 0 and run.tokens_per_step() > 0:
            if key(run) not in most or run.tokens_per_step() > most[key(run)].tokens_per_step():
                most[key(run)] = run
    for run in outcomes:
        if run.sequence_length == 0 and key(run) in most:
            run.step_time_s, run.tokens_per_s_per_gpu = most[key(run)].step_time_s, most[key(run)].tokens_per_s_per_gpu
    return outcomes


def is_copy(row):
    """Of a measured run: it is predicted, but does not count."""
    return row.run.id.startswith("oom-ref")


def outcomes_json(rows):
    scored = [row for row in rows if not is_copy(row) and row.run.outcome]
    predicted = [row for row in scored if not row.skipped]
    oom = [row for row in predicted if row.run.outcome == "oom"]
    presumed = [row for row in predicted if row.run.outcome == "failed_presumed_oom"]
    fits = [row for row in predicted if row.run.outcome.startswith("fits")]

    def found(group):
        return sum(row.out_of_memory for row in group)
    details = []
    for row in rows:
        rest = ({"skipped": row.skipped} if row.skipped else
                {"predicted_oom": row.out_of_memory, "margin_gib": row.margin_gib, "notes": row.notes})
        details.append({"id": row.run.id, "outcome": row.run.outcome, **rest})
    return {"recall": found(oom) / len(oom) if oom else None, "false_alarms": found(fits) / len(fits) if fits else None,
            "rows": len(predicted), "skipped": len(scored) - len(predicted), "oom_rows": len(oom), "oom_found": found(oom),
            "fits_rows": len(fits), "false_alarm_rows": found(fits), "presumed_rows": len(presumed), "presumed_found": found(presumed),
            "details": details}


def validation_report(rows, outcomes):
    twins = score_twins(rows)
    return report(
        "shardwright-validation",
        groups=[group_of(group, *key) for key, group in grouped(rows, lambda row: (row.run.source(), row.run.gpu_class))],
        sources=[group_of(group, source, None) for source, group in grouped(rows, lambda row: row.run.source())],
        pooled=group_of(rows, None, None), oom=outcomes_json(outcomes) if outcomes is not None else None,
        rows=[row_json(row) for row in rows], twins=twins)


# Text


TITLES = {"step_time": "step time", "memory_allocated": "memory allocated", "memory_reserved": "memory reserved",
          "memory_device": "memory of the device"}


def metric_text(answer, key):
    if not answer["pooled"][key]:
        return ""
    rows = [["source", "GPU", "rows", "mean", "median", "p90", "worst", "bias"]]
    for source in answer["sources"]:
        groups = [group for group in answer["groups"] if group["source"] == source["source"] and group[key]]
        rows += [[group["source"], group["gpu_class"], *error_cells(group[key], "rows")] for group in groups]
        if len(groups) > 1:
            rows.append([source["source"], "all", *error_cells(source[key], "rows")])
    rows.append(["all", "all", *error_cells(answer["pooled"][key], "rows")])
    return f"Errors of {TITLES[key]}\n" + table("llrrrrrr", rows, 2) + "\n"


def rows_text(rows):
    lines = [["row", "predicted s", "measured s", "error", "predicted GiB", "measured GiB", "error", "profile"]]
    for row in rows:
        if not row.skipped:
            time = [f"{row.measured_s:.4f}", percent(row.time_error(), "+")] if row.has_time() else ["", ""]
            memory = ([f"{row.predicted_gib:.2f}", f"{row.measured_gib:.2f}", percent(row.memory_error(), "+")] if row.has_memory()
                      else ["", "", ""])
            lines.append([row.run.id, f"{row.predicted_s:.4f}", *time, *memory, row.profile])
    return "Rows\n" + table("lrrrrrrl", lines, 2, wrap=True) + "\n"


def skipped_text(rows):
    groups = grouped([row for row in rows if row.skipped], lambda row: row.skipped)
    if not groups:
        return ""
    lines = [[len(group), reason, ", ".join(row.run.id for row in group[:3]) + (", ..." if len(group) > 3 else "")]
             for reason, group in groups]
    return "Rows skipped\n" + table("rll", lines, 2, wrap=True) + "\n"


def notes_text(rows):
    counts = {}
    for row in rows:
        for note in row.notes:
            counts[note] = counts.get(note, 0) + 1
    lines = [[count, note] for note, count in sorted(counts.items())]
    return "Assumed, with the number of rows\n" + table("rl", lines, 2, wrap=True) + "\n" if lines else ""


def twins_text(twins):
    lines = [["rows", "step time", "memory", "which"],
             *([len(t["ids"]), percent(t["step_time_spread"]), percent(t["memory_spread"]), ", ".join(t["ids"])] for t in twins)]
    return ("Rows that differ only in what they measured, (largest - smallest) / mean\n" + table("rrrl", lines, 2, wrap=True) + "\n"
            if twins else "")


def outcomes_text(score, rows):
    lines = [["row", "measured", "predicted", "margin GiB"]]
    lines += [[row.run.id, row.run.outcome, "oom" if row.out_of_memory else "fits", f"{row.margin_gib:+.2f}"]
              for row in rows if not row.skipped and not is_copy(row)]
    return (f"Out of memory\n  {score['oom_found']} of {score['oom_rows']} found, {score['false_alarm_rows']} false alarms in "
            f"{score['fits_rows']} that fit, {score['presumed_found']} of {score['presumed_rows']} that failed for an unpublished reason, "
            f"{score['skipped']} skipped\n" + table("lllr", lines, 2) + "\n" + skipped_text(rows) + notes_text(rows))


def bands_text(answer):
    groups = [group for group in [*answer["sources"], answer["pooled"]] if group["band_median"]]
    if not groups:
        return ""
    lines = [["source", "rows", "inside", "median half-width"]]
    lines += [[group["source"] or "all", group["step_time"]["rows"], percent(group["band_coverage"]), percent(group["band_median"])]
              for group in groups]
    return "Step times inside the stated band (90 %)\n" + table("lrrr", lines, 2) + "\n"


def validation_text(answer, rows, outcomes):
    text = rows_text(rows) + skipped_text(rows) + notes_text(rows) + twins_text(answer["twins"])
    if outcomes is not None:
        text += outcomes_text(answer["oom"], outcomes)
    return (text + "".join(metric_text(answer, key) for key in TITLES) + bands_text(answer))[:-1]
