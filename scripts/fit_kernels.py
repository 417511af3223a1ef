"""Numbers of a profile from a table of kernel times: the least errors on two thirds of the rows, and what that is worth on the others.

    python3 scripts/fit_kernels.py PROGRAM TABLE.csv PROFILE.json compute.NUMBER[=START] ... [--rows stack=A,B op=C ...] [-o NEW.json]

PROFILE.json is a file of its own or of topologies/profiles; the numbers stand there, or are set to START first. Rows are those whose columns are
among the words of --rows. A row is left out of the fit where a hash of its shape (all columns but the time, its statistic, source and note) is
divisible by three. The sum of sqrt(1 + (e / 0.05)^2), e = log(predicted / measured), is minimised by turns, one number after the other, with
ever smaller steps; so large errors of few rows count linearly. Prints the numbers and the mean absolute errors of both parts.
"""

import argparse
import csv
import hashlib
import json
import math
import pathlib
import subprocess
import tempfile

import left_out
from bench_command import bench_command

MEASURED = ("time_us", "statistic", "source", "note")
SMALL_ERROR = 0.05
# Of a peak.
MOST = 0.95


def is_left_out(row):
    shape = ",".join(value for key, value in row.items() if key not in MEASURED)
    return int(hashlib.sha256(shape.encode()).hexdigest(), 16) % 3 == 0


def number_at(profile, path):
    """(the object that holds the number, its key)."""
    *sections, key = path.split(".")
    for section in sections:
        profile = profile.setdefault(section, {})
    return profile, key


def value_of(number):
    text = number["value"]
    return left_out.seconds(text)


def set_value(number, value):
    number["value"] = f"{value * 1e6:.4g} us" if isinstance(number["value"], str) else float(f"{value:.4g}")


def is_fraction(number):
    return isinstance(number["value"], float) and number["value"] <= 1


class Table:
    def __init__(self, program, path, wanted):
        with open(path, newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if all(row[key] in values for key, values in wanted)]
        self.program, self.rows = program, rows
        self.left_out = [is_left_out(row) for row in rows]
        self.scratch = tempfile.TemporaryDirectory()
        self.file = pathlib.Path(self.scratch.name) / "rows.csv"
        left_out.write_rows(self.file, rows)

    def errors(self, profile):
        """log(predicted / measured) of every row."""
        path = pathlib.Path(self.scratch.name) / "profile.json"
        path.write_text(json.dumps(profile), encoding="utf-8")
        done = subprocess.run([*bench_command(self.program, "validate-kernels"), str(self.file), "--profile", str(path), "--json"],
                              check=True, capture_output=True, text=True)
        rows = json.loads(done.stdout)["rows"]
        if len(rows) != len(self.rows):
            raise SystemExit(f"{self.file}: {len(self.rows) - len(rows)} of the rows cannot be priced")
        return [math.log1p(row["error"]) for row in rows]


def loss(errors, skip):
    return sum(math.sqrt(1 + (e / SMALL_ERROR) ** 2) for e, out in zip(errors, skip) if not out)


def fit(table, profile, paths):
    numbers = [holder[key] for holder, key in (number_at(profile, path) for path in paths)]
    best = loss(table.errors(profile), table.left_out)
    step = 0.2
    while step > 0.002:
        gained = False
        for number in numbers:
            for factor in (1 + step, 1 / (1 + step)):
                before = number["value"]
                if is_fraction(number) and before * factor > MOST:
                    continue
                set_value(number, value_of(number) * factor)
                now = loss(table.errors(profile), table.left_out)
                if now < best:
                    best, gained = now, True
                    break
                number["value"] = before
        if not gained:
            step /= 2


def mean_error(errors):
    return sum(abs(math.expm1(e)) for e in errors) / len(errors) if errors else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("table")
    parser.add_argument("profile")
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    profile = json.loads(pathlib.Path(arguments.profile).read_text(encoding="utf-8"))
    wanted = [(key, values.split(",")) for key, values in (word.split("=", 1) for word in arguments.rows)]
    table = Table(arguments.program, arguments.table, wanted)
    paths = []
    for word in arguments.numbers:
        path, _, start = word.partition("=")
        holder, key = number_at(profile, path)
        if start:
            is_number = start.replace(".", "", 1).isdigit()
            holder[key] = {"value": float(start) if is_number else start, "kind": "fitted", "source": "scripts/fit_kernels.py", "date": left_out.DATE}
        paths.append(path)
    fit(table, profile, paths)
    errors = table.errors(profile)
    for path in paths:
        holder, key = number_at(profile, path)
        print(f"{path:40} {holder[key]['value']}")
    for name, out in (("read", False), ("left out", True)):
        of_part = [e for e, skip in zip(errors, table.left_out) if skip == out]
        print(f"{name:>9}: {len(of_part):3} rows, mean error {100 * mean_error(of_part):.1f} %, bias {100 * sum(map(math.expm1, of_part)) / max(len(of_part), 1):+.1f} %")
    if arguments.output:
        pathlib.Path(arguments.output).write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
