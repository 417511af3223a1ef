"""Runs every command of docs/tutorial.md, in its order, and checks what the text says of them."""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import TESTS, ShardwrightTestCase, main


class Tutorial(ShardwrightTestCase):

    def test_every_command(self):
        text = (TESTS.parent / "docs" / "tutorial.md").read_text()
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        self.assertGreaterEqual(len(blocks), 6)
        program = pathlib.Path(shardwright_test_case.PROGRAM)
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        outputs = []
        for block in blocks:
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", block], cwd=self.folder, env=environment, text=True,
                                  capture_output=True, timeout=500, check=False)
            self.assertEqual(done.returncode, 0, f"{block}{done.stdout}{done.stderr}")
            outputs.append(done.stdout)
        self.assertIn("plan.units[model.layers.0].reshard", outputs[1])
        # Keeping the parameters takes memory and no more time.
        figures = json.loads(self.succeed("diff", "h100.json", "kept.json", "--json"))
        self.assertGreaterEqual(figures["after"]["peak_allocated_bytes"], figures["before"]["peak_allocated_bytes"])
        self.assertLessEqual(figures["after"]["step_time_s"], figures["before"]["step_time_s"] * 1.001)
        for page in ("h100.html", "cpu.html"):
            self.assertTrue((self.folder / page).read_text().startswith("<!DOCTYPE html>"))
        # Calibrated, the simulation is nearer to the run than before, or near: the shipped profile may fit this machine.
        gaps = []
        for plan in ("cpu.json", "better.json"):
            report = json.loads(self.run_program("compare", plan, "run.json.gz", "--plan", plan, "--json")[1])
            gaps.append(abs(report["step_time"]["gap"]))
        self.assertLess(gaps[1], max(gaps[0], 0.25))


if __name__ == "__main__":
    main()
