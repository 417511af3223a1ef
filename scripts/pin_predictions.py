"""bench/published/predictions.csv: what is predicted today for every published row, so that a change of it is seen in review.

    python3 scripts/pin_predictions.py PROGRAM [--check]

The page in the browser shows the rows of the profile that it uses.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from bench_command import bench_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINNED = ROOT / "bench/published/predictions.csv"
HEAD = "id,profile,measured_s,predicted_s\n"


def text_of(rows):
    """Rows of `validate --json` with a measured and a predicted step time; five digits, since compilers round differently."""
    return HEAD + "".join(f"{row['id']},{row['profile']},{row['measured']:.5g},{row['predicted']:.5g}\n"
                          for row in sorted(rows, key=lambda row: row["id"]) if row.get("measured") and row.get("predicted"))


def predicted(program):
    command = [*bench_command(program, "validate"), "bench/published/measured_runs.csv", "--json"]
    return text_of(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)["rows"])


def changes(old, new):
    """Lines that are in one of the two only, as a diff shows them."""
    before, after = old.splitlines(), new.splitlines()
    return [f"- {line}" for line in before if line not in set(after)] + [f"+ {line}" for line in after if line not in set(before)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    now = predicted(str(pathlib.Path(arguments.program).resolve()))
    if arguments.check:
        if found := changes(PINNED.read_text(encoding="utf-8"), now):
            sys.exit("\n".join(found) + "\nbench/published/predictions.csv: predictions have changed; where that is meant, run "
                     f"scripts/pin_predictions.py {arguments.program}")
    else:
        PINNED.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
