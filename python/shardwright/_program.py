"""Command lines that the program runs itself: those whose ranks are processes, which it starts as further copies of itself."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from . import _errors

COMMANDS = frozenset({"calibrate", "eval", "run"})
_ERRORS = {2: _errors.UsageError, 3: _errors.InputError, 4: _errors.MachineError, 5: _errors.RunError, 70: _errors.InternalError}


def find() -> str:
    """The program that came with this package: of a wheel, of an installed prefix, of a build folder; else the one on PATH."""
    folders = pathlib.Path(__file__).resolve().parents
    for place in (pathlib.Path(sysconfig.get_path("scripts")), *(prefix / "bin" for prefix in folders[4:5]), *folders[2:3]):
        if os.access(place / "shardwright", os.X_OK) and (place / "shardwright").is_file():
            return str(place / "shardwright")
    found = shutil.which("shardwright")
    if found is None:
        raise _errors.MachineError("the program shardwright is neither beside this package nor on PATH; it runs the ranks of a plan")
    return found


def run(words: list[str], stdin: str) -> tuple[int, bytes]:
    """The exit code, 0 or 1, and what the command prints. Progress goes to standard error, errors are raised."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(stdin.encode("utf-8", "surrogatepass"))
        given.seek(0)
        error = ""
        with subprocess.Popen([find(), *words], stdin=given, stdout=printed, stderr=subprocess.PIPE) as process:
            for raw in process.stderr:
                line = raw.decode("utf-8", "replace")
                if line.startswith("error: "):
                    error = line.removeprefix("error: ").rstrip("\n")
                else:
                    sys.stderr.write(line)
        code = process.returncode
        printed.seek(0)
        text = printed.read()
    if code in (0, 1) and not error:
        return code, text
    raise _ERRORS.get(code, _errors.RunError)(error or f"the program ended with code {code}")
