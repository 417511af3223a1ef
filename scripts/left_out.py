"""What predictions are worth where something was left out: a source, a size, a GPU type, all rows of a source but one.

    python3 scripts/left_out.py PROGRAM [source|size|gpu|row|kinds ...] [--profiles FOLDER --commit NAME] [--rows FILE]

Without words: the first four. Prints a table and adds its lines to bench/left_out.csv, from which scripts/accuracy.py writes its section.

  source  Every source in turn: profiles fitted to it alone are taken away, those fitted to several are fitted again without it
          (scripts/fit_profiles.sh), and its rows are predicted by what the program then chooses. "source, band of others": the band that
          rows of the other sources make (new_run_spread; the program's own constants are those of all sources), which knows nothing of this one.
  size    A model of a source that has others, by `fit --leave-out size`; llm-foundry's rows are those of bench/accuracy.md, section 1, whose
          groups have no other source (its fits take an hour).
  gpu     Every chip in turn: all profiles of it are taken away, the ones from single kernels too, and the generic one's numbers are those of
          the other chips in the middle (the median). "generic" is the shipped generic profile on the same rows, which has seen them all.
  row     As "source"; then each row of it alone (of many ten, evenly spread) corrects the profile that it starts from (`calibrate`), and the source's other rows
          that start from the same profile are predicted by the corrected one.
  kinds   What bands are calibrated on (bench/bands.py): every row four times, by how much of it is unknown. "known": as "source". "stack": the
          same, and no framework is known by name (bench/lab/stacks.json, "nearest"). "chip": profiles fitted to steps on the row's chip are
          taken away, so that single kernels are all that is known of it. "both": chip and frameworks. Writes bench/left_out_kinds.csv.

Nothing is chosen by these rows. A GPU type of "gpu" is a chip: A100 of 40 and 80 GB are left out together.
"""

import argparse
import concurrent.futures
import csv
import datetime
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import tempfile

import accuracy
from bench_command import bench_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = ROOT / "bench/published/measured_runs.csv"
LOG = ROOT / "bench/left_out.csv"
KINDS = ROOT / "bench/left_out_kinds.csv"
COLUMNS = ("date", "commit", "left_out", "group", "rows", "mean", "median", "p90", "bias", "inside_band", "half_width", "left_of_error")
DATE = datetime.date.today().isoformat()
# Whose profiles go with a chip: GPU types and architectures.
CHIPS = {"A100": ("ampere", "a100-40", "a100-80"), "H100": ("hopper", "h100-80", "h100-96", "h200-141"),
         "B200": ("blackwell", "b200-180", "b200-180-limited", "gb200-186"), "MI300X": ("mi300x", "cdna3", "cdna4"), "V100": ("volta", "v100-16", "v100-32")}
# One profile that stands for a chip where another is predicted from it.
STAND_IN = {"A100": "a100-80-torch", "H100": "h100-80-torch", "B200": "b200-torch-eager", "MI300X": "mi300x-torch", "V100": "v100-torch-eager"}
# Of a normal distribution: the half-width that holds 80 % over the one that holds 90 %.
EIGHTY = 1.2816
EIGHTY_OF_NINETY = EIGHTY / 1.6449


def run_json(program, command, *arguments):
    return json.loads(subprocess.run([*bench_command(program, command), *map(str, arguments), "--json"], check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def read_rows():
    with open(RUNS, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_rows(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def source_of(row_id):
    return row_id.split("-")[0]


class Folder:
    """A copy of the profiles' folder, from which some can be taken away."""

    def __init__(self, profiles, path):
        self.path = pathlib.Path(path)
        shutil.copytree(profiles, self.path, dirs_exist_ok=True)

    def read(self, name):
        return json.loads((self.path / (name + ".json")).read_text(encoding="utf-8"))

    def write(self, name, profile):
        (self.path / (name + ".json")).write_text(json.dumps(profile), encoding="utf-8")

    def names(self):
        return sorted(path.stem for path in self.path.glob("*.json"))

    def remove(self, names):
        """These, and those that extend them."""
        names = set(names)
        while more := {n for n in self.names() if self.read(n).get("extends") in names} - names:
            names |= more
        for name in names:
            (self.path / (name + ".json")).unlink(missing_ok=True)

    def whole(self, name):
        """The profile with what it extends, section by section; a list of products replaces the other's."""
        profile = self.read(name)
        if "extends" not in profile:
            return profile
        base = self.whole(profile["extends"])
        for section, numbers in profile.items():
            base[section] = {**base.get(section, {}), **numbers} if isinstance(numbers, dict) and section != "transports" else numbers
        return base


def recipes():
    """Arguments of `fit` by the sources that they read, as scripts/fit_profiles.sh calls it."""
    found = []
    for flags in accuracy.FITS:
        found.append({"sources": flags[1].split(","), "flags": flags,
                      "gpu": flags[flags.index("--gpu-class") + 1].split(",") if "--gpu-class" in flags else None})
    return found


def without_source(program, profiles, path, source):
    """The profiles as they would be had nobody read the source."""
    folder = Folder(profiles, path)
    rows = [row for row in read_rows() if source_of(row["id"]) != source]
    table = pathlib.Path(str(path) + ".csv")
    write_rows(table, rows)
    before = {name: folder.read(name) for name in folder.names()}
    for recipe in recipes():
        if source not in recipe["sources"]:
            continue
        others = [s for s in recipe["sources"] if s != source]
        fitted = [name for name, profile in before.items() if is_of(profile, recipe)]
        new = pathlib.Path(str(path) + ".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if others:
            flags = ["--source", ",".join(others), *recipe["flags"][2:]]
            # Fails where no row is left.
            subprocess.run([*bench_command(program, "fit"), str(table), *flags, "--leave-out", "none", "--date", DATE, "-o", f"{new}/"], capture_output=True, cwd=ROOT)
        made = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in new.glob("*.json")}
        gone = [name for name in fitted if name not in made]
        next_to = [name for name in made if name in fitted]
        redirect(folder, gone, next_to)
        for name in next_to:
            folder.write(name, with_spreads(made[name], before[name], source))
    return folder


def is_of(profile, recipe):
    """Whether a recipe's fit wrote the profile: by what its numbers say of their source."""
    if "fit" not in profile:
        return False
    text = json.dumps(profile)
    if f"--source {','.join(recipe['sources'])}" not in text and f"--source {recipe['flags'][1]}" not in text:
        return False
    gpu = profile["fit"]["gpu"]
    return recipe["gpu"] is None or any(gpu.lower().startswith(part.lower()) for part in recipe["gpu"])


def redirect(folder, gone, made):
    """Takes profiles away; those that extend one, for GPUs without runs, take the numbers of the same chip that are left."""
    for name in gone:
        chip = name.split("-")[0]
        near = [other for other in made if other.split("-")[0] == chip]
        for child in folder.names():
            profile = folder.read(child)
            if profile.get("extends") == name and near:
                folder.write(child, {**profile, "extends": near[0]})
    folder.remove(gone)


def with_spreads(made, shipped, source):
    """What a fit without cross-validation leaves open: how uncertain the numbers are. Those of the shipped profile, which knew the source."""
    spread = max(number["spread"] for section in ("compute", "overlap", "host") for number in flat(shipped.get(section, {})) if number.get("kind") == "fitted" and "shardwright fit" in number["source"])
    for section in ("compute", "overlap", "host"):
        for number in flat(made.get(section, {})):
            if number["source"].startswith("shardwright fit"):
                number["spread"] = spread
    others = [name for name in shipped["fit"]["sources"] if name != source]
    return {**made, "fit": {**shipped["fit"], "sources": others}}


def flat(section):
    for value in section.values():
        if isinstance(value, dict):
            if "value" in value:
                yield value
            else:
                yield from flat(value)


def predicted(result):
    return {row["id"]: row for row in result["rows"] if row.get("error") is not None}


def line(commit, what, group, errors, bands=(), left=None):
    """One line of the log."""
    s = accuracy.summarise(errors)
    inside = [abs(e) <= b for e, b in bands]
    return {"date": DATE, "commit": commit, "left_out": what, "group": group, "rows": s["rows"],
            **{key: f"{s[key]:.4f}" for key in ("mean", "median", "p90", "bias")},
            "inside_band": f"{sum(inside) / len(inside):.4f}" if inside else "",
            "half_width": f"{statistics.median(b for _, b in bands):.4f}" if inside else "",
            "left_of_error": "" if left is None else f"{left:.4f}"}


def lines_of(commit, what, errors_of, bands_of=None):
    """A line per group, then all rows."""
    bands_of = bands_of or {}
    lines = [line(commit, what, group, errors, bands_of.get(group, ())) for group, errors in sorted(errors_of.items())]
    everything = [error for errors in errors_of.values() for error in errors]
    return [*lines, line(commit, what, "all", everything, [b for bands in bands_of.values() for b in bands])]


class Study:
    def __init__(self, program, profiles, commit, scratch):
        self.program, self.profiles, self.commit, self.scratch = program, profiles, commit, pathlib.Path(scratch)
        self.rows = {row["id"]: row for row in read_rows()}
        self.today = predicted(run_json(program, "validate", RUNS, "--profiles", profiles))
        self.folders = {}
        self.left_out_rows = []  # of "source"

    def without(self, source):
        """Rows of a source by profiles that do not know it, and their folder."""
        if source not in self.folders:
            ids = [row_id for row_id in self.today if source_of(row_id) == source]
            folder = without_source(self.program, self.profiles, self.scratch / source, source)
            table = self.scratch / (source + "-rows.csv")
            write_rows(table, [self.rows[i] for i in ids])
            self.folders[source] = (predicted(run_json(self.program, "validate", table, "--profiles", folder.path, "--bands")), folder)
        return self.folders[source]

    def sources(self):
        return sorted({source_of(row_id) for row_id in self.today})

    def source(self):
        rows = {source: list(self.without(source)[0].values()) for source in self.sources()}
        self.left_out_rows = [{"id": row["id"], "source": source, "profile": row["profile"], "predicted": row["predicted"],
                               "measured": row["measured"], "band": row["band"]} for source, of_it in rows.items() for row in of_it]
        errors = {source: [row["error"] for row in of_it] for source, of_it in rows.items()}
        bands = {source: [eighty(row) for row in of_it] for source, of_it in rows.items()}
        # What is left where no other source has the chip is a chip left out.
        shared = [row for of_it in rows.values() for row in of_it if self.is_shared(row["id"])]
        logarithms = [(source, row["profile"], math.log(row["measured"] / row["predicted"]))
                      for source, of_it in rows.items() for row in of_it if self.rows[row["id"]]["gpu"] not in LIMITED]
        of_others = {source: [(eighty(row)[0], band_of_others(logarithms, source)) for row in of_it] for source, of_it in rows.items()}
        print("deviations between sources and of shapes: %.4f %.4f" % new_run_spread(logarithms))
        return (lines_of(self.commit, "source", errors, bands)
                + [line(self.commit, "source", "chips of several sources", [row["error"] for row in shared], [eighty(row) for row in shared])]
                + lines_of(self.commit, "source, band of others", errors, of_others))

    def kinds(self):
        """Logs nothing: writes its rows."""
        found = []

        def add(kind, rows):
            found.extend({"kind": kind, "id": row["id"], "source": source_of(row["id"]), "profile": row["profile"],
                          "predicted": f"{row['predicted']:.5g}", "measured": f"{row['measured']:.5g}"} for row in rows.values())
        for source in self.sources():
            rows, folder = self.without(source)
            add("known", rows)
            add("stack", self.validated(rows, folder, "--unknown"))
        for chip, of_it in CHIPS.items():
            rows = {row_id: row for row_id, row in self.today.items() if self.chip_of(row_id) == chip}
            folder = Folder(self.profiles, self.scratch / (chip + "-kernels"))
            gone = [name for name in folder.names() if folder.read(name).get("fit", {}).get("gpu") in of_it]
            folder.remove(gone)
            add("chip", self.validated(rows, folder))
            add("both", self.validated(rows, folder, "--unknown"))
        write_rows(KINDS, found)
        return []

    def validated(self, rows, folder, *flags):
        table = self.scratch / "validated.csv"
        write_rows(table, [self.rows[row_id] for row_id in rows])
        return predicted(run_json(self.program, "validate", table, "--profiles", folder.path, *flags))

    def is_shared(self, row_id):
        chip = self.chip_of(row_id)
        return len({source_of(other) for other in self.today if self.chip_of(other) == chip}) > 1

    def size(self):
        errors = {}
        for recipe in recipes():
            if recipe["sources"] == [accuracy.MAIN_SOURCE]:
                continue
            for row in run_json(self.program, "fit", RUNS, *recipe["flags"], "--leave-out", "size", "--profiles", self.profiles)["left_out_rows"]:
                errors.setdefault(source_of(row["id"]), []).append(row["error"])
        return lines_of(self.commit, "size", errors)

    def chip_of(self, row_id):
        return next(chip for chip in CHIPS if chip in self.rows[row_id]["gpu_class"] or chip in self.rows[row_id]["gpu"])

    def middle_of_others(self, chip, folder):
        """The generic profile with each number the median of those of the chips that are left; where none of them says anything, nothing."""
        others = [folder.whole(name) for left, name in STAND_IN.items() if left != chip]
        generic = folder.read("generic")

        def median_of(section, key, inner=None):
            values = []
            for profile in others:
                number = profile.get(section, {}).get(key, {})
                number = number.get(inner, {}) if inner else number
                if number.get("value") not in (None, 0):
                    values.append(number)
            if not values:
                return None
            values.sort(key=lambda number: seconds(number["value"]))
            return values[(len(values) - 1) // 2]

        compute = generic["compute"]
        for key in list(compute):
            if key == "gemm":
                for dtype in compute["gemm"]:
                    compute["gemm"][dtype] = median_of("compute", "gemm", dtype) or compute["gemm"][dtype]
            elif isinstance(compute[key], dict):
                compute[key] = median_of("compute", key) or compute[key]
        for key in ("attention_softmax", "attention_start", "rank_spread", "rows", "gather", "load", "grouped_overlap", "triton_attention_forward", "triton_attention_backward"):
            if number := median_of("compute", key):
                compute[key] = number
        for section, key in (("overlap", "compute_sensitivity"), ("host", "step")):
            if number := median_of(section, key):
                generic[section][key] = number
        return generic

    def gpu(self):
        errors, bands, generic = {}, {}, {}
        for chip, of_it in CHIPS.items():
            ids = [row_id for row_id in self.today if self.chip_of(row_id) == chip]
            folder = Folder(self.profiles, self.scratch / chip)
            middle = self.middle_of_others(chip, folder)
            folder.remove([name for name in folder.names() if folder.read(name).get("architecture") in of_it])
            folder.write("generic", middle)
            table = self.scratch / (chip + "-rows.csv")
            write_rows(table, [self.rows[i] for i in ids])
            rows = predicted(run_json(self.program, "validate", table, "--profiles", folder.path, "--bands"))
            errors[chip] = [row["error"] for row in rows.values()]
            bands[chip] = [eighty(row) for row in rows.values()]
            shipped = predicted(run_json(self.program, "validate", table, "--profiles", self.profiles, "--profile", "generic", "--bands"))
            generic[chip] = [row for row in shipped.values()]
        return (lines_of(self.commit, "gpu", errors, bands)
                + lines_of(self.commit, "gpu, generic", {c: [r["error"] for r in rows] for c, rows in generic.items()},
                           {c: [eighty(r) for r in rows] for c, rows in generic.items()}))

    def one_row(self, source, group, row_id, has_bands):
        """A group's other rows once this one has corrected their profile."""
        _, folder = self.without(source)
        own = self.scratch / f"{row_id}-own.csv"
        rest = self.scratch / f"{row_id}-rest.csv"
        mine = self.scratch / f"{row_id}.json"
        write_rows(own, [self.rows[row_id]])
        write_rows(rest, [self.rows[i] for i in group if i != row_id])
        jobs = self.scratch / f"{row_id}-own"
        subprocess.run([*bench_command(self.program, "jobs"), str(own), "--profiles", str(folder.path), "-o", str(jobs)],
                       check=True, capture_output=True, cwd=ROOT)
        subprocess.run([self.program, "calibrate", str(jobs / "runs.json"), "--profiles", str(folder.path), "--date", DATE, "-o", str(mine),
                        "--even-if-worse"], check=True, capture_output=True, cwd=ROOT)
        return predicted(run_json(self.program, "validate", rest, "--profile", mine, *(["--bands"] if has_bands else [])))

    def row(self):
        lines = []
        for source in self.sources():
            rows, _ = self.without(source)
            groups = {}
            for row_id, row in rows.items():
                groups.setdefault((row["profile"], self.rows[row_id]["gpu_class"]), []).append(row_id)
            groups = {key: ids for key, ids in groups.items() if len(ids) > 1}
            # Ten rows of a group, evenly spread; bands, which take 25 times as long, by every second of them.
            chosen = [(ids, ids[::-(-len(ids) // 10)]) for ids in groups.values()]
            jobs = [(source, ids, row_id, k % 2 == 0) for ids, own in chosen for k, row_id in enumerate(own)]
            with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
                results = list(pool.map(lambda job: self.one_row(*job), jobs))
            before = [rows[i]["error"] for _, ids, own, _ in jobs for i in ids if i != own]
            after = [row["error"] for result in results for row in result.values()]
            bands = [eighty(row) for result in results for row in result.values() if row["band"] is not None]
            if after:
                left = mean_size(after) / mean_size(before)
                lines.append({**line(self.commit, "row", source, after, bands, left), "rows": len(jobs)})
                lines.append({**line(self.commit, "row, before", source, before, [eighty(row) for row in rows.values()]), "rows": len(jobs)})
        return lines


# Cards with a power limit that their source does not state: what they differ by is that limit.
LIMITED = {"B200-180GB (power limited)"}


def new_run_spread(rows):
    """(deviation between sources, deviation of shapes) of log(measured / predicted): one-way analysis of variance with random effects, groups
    of one source on one GPU (by the profile that they start from) counting alike. `rows`: (source, profile, logarithm)."""
    groups = {}
    for source, profile, error in rows:
        groups.setdefault((source, profile), []).append(error)
    of_shapes = statistics.mean(statistics.variance(errors) for errors in groups.values() if len(errors) > 1)
    of_sources = statistics.mean(statistics.mean(errors) ** 2 - of_shapes / len(errors) for errors in groups.values())
    return math.sqrt(max(of_sources, 0)), math.sqrt(of_shapes)


def band_of_others(rows, source):
    """Half-width of the 80 % band that the rows of all other sources make."""
    return EIGHTY * math.hypot(*new_run_spread([row for row in rows if row[0] != source]))


def eighty(row):
    """An error and the half-width of its 80 % band, relative to what was measured."""
    return row["measured"] / row["predicted"] - 1, EIGHTY_OF_NINETY * row["band"]


def mean_size(errors):
    return sum(map(abs, errors)) / len(errors)


def seconds(value):
    """A number, or a time such as "9.7 us"."""
    if not isinstance(value, str):
        return value
    number, unit = value.split()
    return float(number) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}[unit]


def log(lines):
    is_new = not LOG.exists()
    with open(LOG, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("what", nargs="*", choices=[[], "source", "size", "gpu", "row", "kinds"])
    parser.add_argument("--profiles", default=str(ROOT / "topologies/profiles"))
    parser.add_argument("--commit", help="of these profiles (default: HEAD)")
    parser.add_argument("--no-log", action="store_true")
    parser.add_argument("--rows", help="writes each row of \"source\" with its prediction and 90 %% band, as CSV")
    arguments = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        study = Study(str(pathlib.Path(arguments.program).resolve()), arguments.profiles, arguments.commit or head, scratch)
        for what in arguments.what or ["source", "size", "gpu", "row"]:
            lines = getattr(study, what)()
            for row in lines:
                print("  ".join(f"{row[key]:>12}" for key in COLUMNS[1:]), flush=True)
            if not arguments.no_log:
                log(lines)
        if arguments.rows and study.left_out_rows:
            write_rows(arguments.rows, study.left_out_rows)


if __name__ == "__main__":
    main()
