"""What all of these scripts share: tables in, the program's answers, reports out."""

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = pathlib.Path(__file__).resolve().parent
WIDTH = 120  # of a report, in characters
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class InputError(Exception):
    """Bad input, told as the program tells it: where, what was found, what was expected."""

    def __init__(self, where, found=None, expected=None):
        super().__init__(where if found is None else f"{where}: got {found}, expected {expected}")


class UsageError(Exception):
    """A mistake on the command line."""


def data(name):
    """One of the tables beside this file."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


# Tables


class Row(dict):
    """The fields of a line by column, all of them text, with where it stands."""

    line = 0
    file = ""

    def where(self, column):
        return f"{self.file}: line {self.line}: {column}"

    def number(self, column):
        """0 for an empty field; else a positive number."""
        text = self[column]
        value = number_in(text) if text else 0
        if text and not 0 < value < math.inf:
            raise InputError(self.where(column), f'"{text}"', "a positive number or nothing")
        return value

    def count(self, column):
        value = self.number(column)
        if value != int(value) or value > 1e15:
            raise InputError(self.where(column), f'"{self[column]}"', "a positive whole number or nothing")
        return int(value)


class Rows(list):
    """Those of a table, with the names of its columns."""

    columns = ()


def number_in(text):
    """The number that is all of `text`; not a number (nan) for anything else."""
    return float(text) if NUMBER.fullmatch(text) else math.nan


FIELD = re.compile(r'"((?:[^"]|"")*)("?)|([^",\r\n]*(?:\r(?!\n)[^",\r\n]*)*)')


def records(text, file):
    """(line, fields) of every record of an RFC 4180 text; empty lines are none."""
    text = text.removeprefix("\ufeff")
    at, line = 0, 1

    def bad(found, expected):
        return InputError(f"{file}: line {line}", found, expected)

    while at < len(text):
        if end := re.compile(r"\r?\n").match(text, at):
            at, line = end.end(), line + 1
            continue
        start, fields = line, []
        while True:
            match = FIELD.match(text, at)
            if match[1] is not None:
                if not match[2]:
                    raise bad("a quote that is never closed", "a closing quote")
                fields.append(match[1].replace('""', '"'))
                line += match[1].count("\n")
            else:
                fields.append(match[3])
            at = match.end()
            rest = text[at:at + 2]
            if rest[:1] == ",":
                at += 1
                continue
            if not rest or rest[0] == "\n" or rest == "\r\n":
                break
            if match[1] is not None:
                raise bad("text behind a closing quote", "a comma or the end of the line")
            raise bad("a quote inside a field", "the whole field in quotes")
        yield start, fields


def parse_table(text, file, required=(), what=""):
    """Rows of a table with a header that names the `required` columns; `what` says what the table should be."""
    lines = records(text, file)
    header = next(lines, None)
    if header is None:
        raise InputError(file, "no header", "a first line with the names of the columns")
    line, columns = header
    for i, name in enumerate(columns):
        if not name:
            raise InputError(f"{file}: line {line}", f"no name for column {i + 1}", "a name")
        if columns.index(name) != i:
            raise InputError(f"{file}: line {line}", f'two columns "{name}"', "different names")
    rows = Rows()
    rows.columns = columns
    for name in required:
        if name not in columns:
            raise InputError(f"{file}: line 1", f"no column {name}", what)
    for at, fields in lines:
        if len(fields) != len(columns):
            raise InputError(f"{file}: line {at}", f"{len(fields)} fields", f"{len(columns)} as in the header")
        row = Row(zip(columns, fields))
        row.line, row.file = at, file
        rows.append(row)
    return rows


def read_table(file, required=(), what=""):
    try:
        return parse_table(pathlib.Path(file).read_bytes().decode("utf-8", "surrogateescape"), file, required, what)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None


# Errors


def quantile(values, q):
    """Interpolated between the sorted values, as NumPy does by default."""
    values = sorted(values)
    position = q * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


def statistics(errors, count="count"):
    """Of predicted / measured - 1; all zero without errors."""
    if not errors:
        return {count: 0, "mean": 0, "median": 0, "p90": 0, "max": 0, "bias": 0}
    sizes = [abs(error) for error in errors]
    return {count: len(errors), "mean": total(sizes) / len(sizes), "median": quantile(sizes, 0.5), "p90": quantile(sizes, 0.9),
            "max": max(sizes), "bias": total(errors) / len(errors)}


def total(values):
    """Added up in turn: sum() of newer Pythons rounds otherwise."""
    result = 0.0
    for value in values:
        result += value
    return result


# Text


def percent(value, sign=""):
    return f"{100 * value:{sign}.1f} %"


def seconds_text(value):
    """Three digits with a unit: "12.5 us"."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def error_cells(s, count="count"):
    if not s or s[count] == 0:
        return ["0", "", "", "", "", ""]
    return [str(s[count]), percent(s["mean"]), percent(s["median"]), percent(s["p90"]), percent(s["max"]), percent(s["bias"], "+")]


def printable(text):
    return "".join(c if c.isprintable() else "?" for c in text)


def table(align, rows, indent=0, wrap=False):
    """Aligned columns: "l" or "r" each. With `wrap`, what the last one has too much goes on below."""
    rows = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    deepest = min(indent + sum(width + 2 for width in widths[:-1]), 60)
    for row in rows:
        line = "  ".join(cell.ljust(width) if side == "l" else cell.rjust(width) for side, cell, width in zip(align, row, widths))
        line = (" " * indent + line).rstrip()
        while wrap and len(line) > WIDTH and (at := line.rfind(" ", 0, WIDTH + 1)) > deepest:
            lines.append(line[:at].rstrip())
            line = " " * deepest + line[at + 1:]
        lines.append(line)
    return "\n".join(lines) + "\n"


# The program


class Program:
    """shardwright, asked through files in a folder of its own."""

    def __init__(self, path):
        self.path = str(path)

    def run(self, *arguments):
        """Standard output. What the program says of an error is passed on with its exit code."""
        try:
            done = subprocess.run([self.path, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            raise InputError(f"--program: {self.path}: {error.strerror}") from None
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise SystemExit(done.returncode)
        return done.stdout

    def ask(self, command, question, *flags):
        """The answer of a command that reads a file of questions."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "questions.json"
            path.write_text(json.dumps(question), encoding="utf-8")
            return json.loads(self.run(command, path, *flags, "--json"))


def parser(about, table_help):
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
                                    allow_abbrev=False)
    found.add_argument("table", help=table_help)
    found.add_argument("--json", action="store_true", help="the report as JSON")
    found.add_argument("--program", default=os.environ.get("SHARDWRIGHT", ROOT / "build/shardwright"), help="default: build/shardwright")
    return found


def date_in(text):
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", text):
        raise UsageError(f'--date: got "{text}", expected a date such as "2026-11-21"')
    return text


def report(name, version=1, **parts):
    return {"schema": name, "schema_version": version, **parts}


def show(is_json, answer, text):
    sys.stdout.write(json.dumps(answer, indent=2) + "\n" if is_json else text())


def write(path, text):
    """A file as a whole or not at all; "-" is standard output."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        unfinished = f"{path}.{os.getpid()}.tmp"
        pathlib.Path(unfinished).write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        print(f"error: {path}: {error.strerror}", file=sys.stderr)
        raise SystemExit(4) from None


def start(main):
    """Runs a script: errors on one line, with the exit codes of the program."""
    try:
        main()
    except (InputError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, InputError) else 2)
