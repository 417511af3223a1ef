"""Writes the table of errors on single kernels into bench/log/kernels.md from bench/kernels.csv, which bench/accuracy.md's picture is made from, too.

    python3 scripts/kernels_table.py [--check]

bench/kernels.csv has a row per chip, library and op: rows left out of fits by a hash of their shape, mean absolute error and bias of
predicted / measured - 1 before the last changes and now, and the goal of the accuracy issue. --check changes nothing and exits with 1 where the
page is not current.
"""

import csv
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench/kernels.csv"
PAGE = ROOT / "bench/log/kernels.md"
HEADER = "| chip, library | op | left out | before | now | goal |\n| --- | --- | ---: | ---: | ---: | ---: |\n"


def read():
    with open(TABLE, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def errors(mean, bias):
    return f"{100 * float(mean):.1f} %" + (f" ({100 * float(bias):+.1f})" if bias else "")


def line(row):
    before, now = errors(row["mean_before"], row["bias_before"]), errors(row["mean"], row["bias"])
    goal = f" {100 * float(row['goal']):.0f} %" if row["goal"] else ""
    return f"| {row['chip']}, {row['library']} | {row['op']} | {row['rows']} | {before} | {'the same' if now == before else now} |{goal} |\n"


def current(page):
    """The page with its table made anew: from the header to the next empty line."""
    start = page.index(HEADER)
    return page[:start] + HEADER + "".join(map(line, read())) + page[page.index("\n\n", start) + 1:]


def main(arguments):
    page = PAGE.read_text(encoding="utf-8")
    new = current(page)
    if "--check" in arguments:
        if new != page:
            print(f"{PAGE}: its table of kernels is not that of {TABLE}; run scripts/kernels_table.py")
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
