"""The calls of scripts/gpu_check.sh on emulated GPUs: the same table however often they were cut off.

The first argument is the program in its build folder. With SHARDWRIGHT_DEEP all calls and ten kills instead of A, B and two.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(sys.argv[1])
CALLS, KILLS = (("A", "B", "C", "D"), 10) if os.environ.get("SHARDWRIGHT_DEEP") else (("A", "B"), 2)


def start(out, *flags):
    return subprocess.Popen([ROOT / "scripts/gpu_check.sh", *CALLS, "--emulated", "--build", PROGRAM.parent, "--out", out,
                             *flags], stdout=subprocess.DEVNULL, start_new_session=True)


def table(out):
    """Rows without what differs from run to run: times and rates."""
    rows = json.loads((out / "results.json").read_text())["rows"]
    return [(row["step"], row["name"], row["verdict"]) for row in rows]


def files(out):
    return sorted(path.name for path in out.iterdir() if path.is_file())


@unittest.skipUnless((PROGRAM.parent / "emulated").exists(), "built without tests of the CUDA device")
class GpuCheck(unittest.TestCase):
    def test_cut_off_at_any_moment_and_resumed(self):
        with tempfile.TemporaryDirectory() as folder:
            whole, cut = pathlib.Path(folder, "whole"), pathlib.Path(folder, "cut")
            begin = time.monotonic()
            self.assertEqual(start(whole).wait(), 0, (whole / "table.txt").read_text())
            seconds = time.monotonic() - begin
            self.assertNotIn("FAILED", (whole / "table.txt").read_text())
            chance = random.Random(7)
            for _ in range(KILLS):
                process = start(cut, "--resume")
                time.sleep(chance.uniform(0, seconds / 2))
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if (cut / "results.json").exists():
                    found = table(cut)  # whole at any moment, and a part of the other's
                    self.assertEqual([row for row in found if row not in table(whole)], [])
            self.assertEqual(start(cut, "--resume").wait(), 0)
            self.assertEqual(table(cut), table(whole))
            self.assertEqual(files(cut), files(whole))

    def test_mistakes(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([ROOT / "scripts/gpu_check.sh", "A", "--emulated", "--build", folder, "--out", folder],
                                  capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr),
                             (4, f"gpu_check: --emulated needs a build with its tests: {folder} has no emulated/\n"))
            done = subprocess.run([ROOT / "scripts/gpu_check.sh", "E"], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
