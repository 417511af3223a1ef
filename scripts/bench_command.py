"""How scripts call those of bench/ that know the published tables."""

import pathlib
import sys

BENCH = pathlib.Path(__file__).resolve().parent.parent / "bench"


def bench_command(program, name):
    """The words of bench/<name>.py, which asks this program."""
    return [sys.executable, "-B", str(BENCH / (name.replace("-", "_") + ".py")), "--program", str(program)]
