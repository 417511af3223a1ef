"""The sections of bench/accuracy.md on what was left out, on the three sets of rows, and on how many numbers were fitted."""

import csv
import html
import json
import pathlib
import subprocess

import kernels_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOG = ROOT / "bench/left_out.csv"
SCORINGS = ROOT / "bench/scorings.csv"
PICTURE = ROOT / "docs/images/accuracy_sets.svg"
# The most that errors of all rows should be, by what is left out.
GOALS = {"source": {"mean": 0.05, "median": 0.025, "p90": 0.11}, "size": {"mean": 0.03}, "gpu": {"mean": 0.12}}


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def percent(text, sign=""):
    return f"{100 * float(text):{sign}.1f} %" if text != "" else ""


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def first_and_last(log, what):
    """{group: (the first line of the log, the last)}, in the order of the log."""
    found = {}
    for line in log:
        if line["left_out"] == what:
            first, _ = found.get(line["group"], (line, None))
            found[line["group"]] = (first, line)
    return found


def before_and_now(log, what):
    rows = []
    for group, (first, last) in first_and_last(log, what).items():
        earlier = [percent(first[key]) for key in ("mean", "median", "p90")] if first["commit"] != last["commit"] else ["", "", ""]
        rows.append([group, last["rows"], *earlier, *(percent(last[key]) for key in ("mean", "median", "p90")), percent(last["bias"], "+"),
                     percent(last["inside_band"]), percent(last["half_width"])])
    return table([what, "rows", "before: mean", "median", "p90", "now: mean", "median", "p90", "bias", "in the 80 % band", "half-width"], rows)


def goal_lines(log, what, group="all"):
    _, last = first_and_last(log, what)[group]
    return ", ".join(f"{key} {percent(last[key])} (goal {percent(limit)}, {'met' if float(last[key]) <= limit else '**missed**'})"
                     for key, limit in GOALS[what].items())


def bands_table(log):
    """The shipped bands and those of the other sources alone, before and now."""
    rows = []
    of_others = first_and_last(log, "source, band of others")
    for group, (first, last) in first_and_last(log, "source").items():
        if group in of_others:
            alone = of_others[group][1]
            rows.append([group, last["rows"], *(percent(line[key]) for line in (first, last, alone) for key in ("inside_band", "half_width"))])
    return table(["source", "rows", "before: in the 80 % band", "half-width", "now", "half-width", "of other sources alone", "half-width"], rows)


def one_row_table(log):
    before = first_and_last(log, "row, before")
    rows, halved = [], 0
    for source, (_, last) in first_and_last(log, "row").items():
        _, unaided = before[source]
        removed = 1 - float(last["left_of_error"])
        halved += removed >= 0.5
        rows.append([source, last["rows"], percent(unaided["mean"]), percent(last["mean"]), percent(removed, "+"),
                     percent(unaided["inside_band"]), percent(unaided["half_width"]), percent(last["inside_band"]), percent(last["half_width"])])
    return halved, len(rows), table(["source", "rows", "without it: mean", "with it: mean", "removed", "in the 80 % band without", "half-width",
                                     "with", "half-width"], rows)


def counts_table(program):
    listed = json.loads(subprocess.run([program, "list", "profiles", "--json"], check=True, capture_output=True, text=True).stdout)
    rows = []
    for profile in listed["profiles"]:
        counts = profile["fitted_numbers"]
        if profile["name"] == "host" or "shardwright" in profile["kernel_set"]:
            continue
        libraries = {key: value for key, value in counts.items() if key.endswith("attention")}
        rest = sum(value for key, value in counts.items() if key not in libraries and key != "transports")
        named = ", ".join(f"{key.removesuffix('attention').strip('_') or 'usual'} {value}" for key, value in libraries.items())
        rows.append([profile["name"], rest, named, counts.get("transports", 0), rest + sum(libraries.values())])
    return table(["profile", "products, memory, host, overlap", "attention by library", "network", "all but the network"], rows)


def own_numbers(section):
    for value in section.values():
        if isinstance(value, dict):
            if "value" in value:
                yield value
            else:
                yield from own_numbers(value)


def fitted_to_steps():
    """"79 in 13 profiles": numbers that `fit` wrote."""
    counts = []
    for path in sorted((ROOT / "topologies/profiles").glob("*.json")):
        profile = json.loads(path.read_text(encoding="utf-8"))
        counts.append(sum(number.get("source", "").startswith("shardwright fit ") for number in own_numbers(profile)))
    return f"{sum(counts)} in {sum(count > 0 for count in counts)} profiles"


def scorings_table():
    rows = [[line["date"], line["commit"], line["source"], line["gpu"], line["rows"], percent(line["mean"]), percent(line["median"]),
             percent(line["p90"]), percent(line["bias"], "+"), percent(line["inside_band"])] for line in read_csv(SCORINGS)]
    return table(["date", "commit", "source", "GPU", "rows", "mean", "median", "p90", "bias", "in the 90 % band"], rows)


def kernel_rows():
    """(chip and library, op, rows, mean now) of bench/kernels.csv, from which bench/log/kernels.md has its table, too."""
    return [(f"{row['chip']}, {row['library']}", row["op"], row["rows"], float(row["mean"])) for row in kernels_table.read()]


def bars(validation, nccl):
    """(kind, set, what, rows, mean absolute error) of all that is shown."""
    protocol = json.loads((ROOT / "bench/protocol.json").read_text(encoding="utf-8"))
    sets = {source: s["name"] for s in protocol["sets"] for source in s["sources"]}
    found = []
    for name in ("fit", "validation"):
        for group in validation["sources"]:
            if sets.get(group["source"]) == name and group["step_time"]:
                found.append(("steps", name, group["source"], group["step_time"]["rows"], group["step_time"]["mean"]))
    last = read_csv(SCORINGS)
    for line in (row for row in last if row["commit"] == last[-1]["commit"] and row["source"] != "all"):
        found.append(("steps", "test", f"{line['source']}, {line['gpu']}", line["rows"], float(line["mean"])))
    fitted = {"all_gather", "reduce_scatter"}
    for op in nccl["by_op"]:
        found.append(("collectives", "fit" if op["op"] in fitted else "validation", op["op"], op["errors"]["count"], op["errors"]["mean"]))
    return found + [("kernels", "validation", f"{chip}: {op}", rows, mean) for chip, op, rows, mean in kernel_rows()]


COLOURS = {"fit": "#1f5fa8", "validation": "#2a7f62", "test": "#b3420e"}


def picture(found):
    """Bars of mean absolute errors, by kind and set."""
    left, width, height, most = 330, 420, 17, 0.4
    lines, y = [], 24
    for kind in ("steps", "collectives", "kernels"):
        lines.append(f'<text x="8" y="{y}" font-weight="bold">{kind}</text>')
        y += 8
        for _, name, what, rows, mean in (bar for bar in found if bar[0] == kind):
            length = width * min(mean, most) / most
            lines.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{html.escape(what[:42])} ({rows})</text>')
            lines.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="12" fill="{COLOURS[name]}"/>')
            lines.append(f'<text x="{left + length + 5:.1f}" y="{y + 12}">{100 * mean:.1f} %</text>')
            y += height
        y += 24
    for i, (name, colour) in enumerate(COLOURS.items()):
        lines.append(f'<rect x="{left + 110 * i}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{left + 110 * i + 17}" y="{y}">{name}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{y + 16}" viewBox="0 0 {left + width + 70} {y + 16}" '
            'role="img" font-family="sans-serif" font-size="12" fill="#222">'
            "<title>Mean absolute errors of steps, collectives and kernels, by the set that rows belong to</title>"
            f'<rect width="{left + width + 70}" height="{y + 16}" fill="#fff"/>\n' + "\n".join(lines) + "\n</svg>\n")


KINDS = {"known": "the source alone", "stack": "the source and its stack", "chip": "the chip's steps", "both": "the chip's steps and the stack",
         "generic": "the chip", "offload": "any of these, offload", "fp8": "any of these, fp8 and fp4", "half rate": "any of these, cards that add at half rate",
         "other maker": "any of these, MI300X"}


def kinds_table():
    kinds = json.loads((ROOT / "analysis/bands.json").read_text(encoding="utf-8"))["kinds"]
    return table(["what nobody had seen", "rows", "mean", "half-width of the band", "inside, sources alike", "inside, by rows"],
                 [[KINDS[kind], row["rows"], *("" if row[key] is None else percent(row[key]) for key in (
                     "mean", "half_width", "inside", "rows_inside"))] for kind, row in kinds.items()])


def first_contact():
    """The first section: what to expect of a source that nobody has seen."""
    log = read_csv(ROOT / "bench/first_contact.csv")
    scored = table(["date", "commit", "variants before", "rows", "mean", "median", "one vote a source", "inside the band", "half-width",
                    "falsely out of memory"],
                   [[row["date"], row["commit"], row["variants_before"], row["rows"], *(percent(row[key]) for key in (
                       "mean", "median", "mean_of_sources", "inside_band", "half_width")), row["false_oom"]] for row in log])
    return f"""## A source that nobody has seen

Left out, of {RUNS_TEXT}, by `scripts/left_out.py PROGRAM kinds` and `bench/bands.py`: each row is predicted by profiles that do not know its source; then with its framework unknown,
so that the nearest stack prices it; then with no profile fitted to steps on its chip. Bands are calibrated on these rows. Kinds with fewer than 20 rows take the
widest of the others. The rows were predicted before A100's profile lost a number (2026-11-29); those of blogs and bigscience without their stack, after.

{kinds_table()}
First contact: runs of sources that nobody had looked at, as their authors name them (`bench/first_contact.py`, bench/first_contact.csv). Nothing is fitted to them.

{scored}"""


RUNS_TEXT = "the 292 rows of bench/published/measured_runs.csv"


def band_of(log, what):
    return first_and_last(log, what)["all"][1]["inside_band"]


def with_main(log, main):
    """The mean of all rows whose model was left out, llm-foundry's included."""
    _, others = first_and_last(log, "size")["all"]
    of_main, of_others = int(main[0]), int(others["rows"])
    mean = (of_main * float(main[1].split()[0]) / 100 + of_others * float(others["mean"])) / (of_main + of_others)
    return f"{of_main + of_others} rows, mean {percent(mean)}"


def sections(program, validation, nccl, main):
    """`main`: rows, mean, median and p90 of llm-foundry while its models were left out."""
    log = read_csv(LOG)
    PICTURE.write_text(picture(bars(validation, nccl)), encoding="utf-8")
    halved, sources, one_row = one_row_table(log)
    first = next(line["commit"] for line in log)
    return f"""## What was left out

By `scripts/left_out.py`, which says how, and logs to bench/left_out.csv. "Before" are the profiles of commit {first}, by the same protocol. Nothing was chosen by these rows
but what one row moves (two models, by the last table); one variant of one number was tried in between (Triton's attention, docs/cost_model.md). Bands hold 90 % as printed by `plan`; here they are narrowed as a normal distribution's are, to 80 %.

**A source.** All rows: {goal_lines(log, "source")}. MI300X's and B200's steps are known from one source only: without it there are single kernels of these chips; the last line is without them.

{before_and_now(log, "source")}
Bands of sources left out (docs/cost_model.md, "Bands"; goal: 75 to 85 % of each source's rows in the 80 % band). The program's two deviations are those of all sources; in the last columns
they are those of the other sources, so that the band knows nothing of the rows that it is for.

{bands_table(log)}
**A model size of a source that has others.** {goal_lines(log, "size")}. llm-foundry is not among these: its groups have no other source, so its rows are those of section 1
({main[0]} rows, mean {main[1]}, median {main[2]}, p90 {main[3]}). Both together: {with_main(log, main)}.

{before_and_now(log, "size")}
**A GPU type.** Two ways to predict a chip that nobody has measured (goals: mean 12 %, 75 to 85 % in the 80 % band). As medians of the other chips' numbers: {goal_lines(log, "gpu")}, {percent(band_of(log, "gpu"))} in the band.

{before_and_now(log, "gpu")}
By the generic profile, which was written with a view to all chips and so is no strict test; it is what ships. Mean {percent(first_and_last(log, "gpu, generic")["all"][1]["mean"])}, {percent(band_of(log, "gpu, generic"))} in the band:

{before_and_now(log, "gpu, generic")}
Medians became worse for A100 as its Triton attention now comes from H100, which reaches half of the fraction. Fractions of the peak do not carry over: chips with a higher peak reach less of it (power, and kernels made for older instructions), MI300X's library of attention reaches a fifth of what others do backward, and the limited B200's runs took twice as long as kernels say.

**All rows of a source but one.** Each row alone corrects the profile that a source without own profile starts from (`calibrate ROW.csv`); errors of the other rows that start from the same profile, over all choices of the row.
At least half of the error goes in {halved} of {sources} sources (goal: all).

{one_row}
## How many numbers were fitted

`shardwright list profiles --json`, key `fitted_numbers`: numbers of kind "fitted", those of extended profiles included: of a stack that steps were fitted to, four to eight are told by steps, the others by single kernels and microbenchmarks.

{counts_table(program)}
Fitted to steps are {fitted_to_steps()}, each profile's own counted; before PyTorch's stacks shared one profile per GPU and Transformers' and InternEvo's kernels were those of single kernels (248a4d7 and 9a5669f, November 2026), 131 in 17 profiles, seven or eight in each.

## Rows to fit to, to look at, and to score

bench/protocol.json has the sets. Mean absolute errors by set; kernels are the rows left out by a hash of their shape (bench/log/kernels.md): they were looked at, and there is no test set of kernels or collectives in this repository.

![Mean absolute errors by set](../docs/images/accuracy_sets.svg)

Scorings of the test rows, all of them ([test_rows.md](test_rows.md)):

{scorings_table()}"""
