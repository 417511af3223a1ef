"""The Python module answers as the program does: the same JSON, and the same words where something is wrong."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
sys.path.insert(0, sys.argv.pop(1))

import shardwright

JOB = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 4, "seq": 256}
FLAGS = ("--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "4", "--seq", "256")


class Module(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def program(self, *arguments, stdin=None):
        return subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)

    def printed(self, *arguments, stdin=None):
        done = self.program(*arguments, "--json", stdin=stdin)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def test_plan_simulate_emit(self):
        planned = shardwright.plan(**JOB, recompute="full")
        self.assertEqual(planned, self.printed("plan", *FLAGS, "--recompute", "full"))
        file = json.dumps(planned["plan_file"])
        self.assertEqual(shardwright.simulate(planned), self.printed("simulate", "-", stdin=file))
        self.assertEqual(shardwright.simulate(planned["plan_file"], contention="off", exact=True, slow_rank=None),
                         self.printed("simulate", "-", "--contention", "off", "--exact", stdin=file))
        emitted = shardwright.emit(planned, to="accelerate")
        self.assertEqual(emitted, self.printed("emit", "-", "--to", "accelerate", stdin=file))
        self.assertIn("fsdp_version", emitted["files"][0]["text"])

    def test_files(self):
        plan = self.folder / "plan.json"
        self.assertEqual(shardwright.plan(**JOB, output=plan)["file"], str(plan))
        self.assertEqual(shardwright.simulate(plan), self.printed("simulate", plan))
        self.assertEqual(shardwright.emit(str(plan), to="fsdp2", output=self.folder / "run")["is_exact"], True)
        self.assertTrue((self.folder / "run" / "shardwright_fsdp2.py").is_file())

    def test_search(self):
        found = shardwright.plan(**JOB, global_batch=8)
        self.assertLessEqual(found["lower_bound_s"], found["step_time_s"])
        simulated = shardwright.simulate(found)
        self.assertEqual(simulated["step_time_s"], found["step_time_s"])
        nothing = shardwright.plan(**JOB, global_batch=8, mem="1 GiB")
        self.assertFalse(nothing["feasible"])
        self.assertNotIn("plan_file", nothing)

    def assert_raises_as(self, kind, call, *arguments):
        with self.assertRaises(kind) as caught:
            call()
        self.assertIsInstance(caught.exception, shardwright.Error)
        self.assertEqual(self.program(*arguments).stderr, f"error: {caught.exception}\n")

    def test_errors(self):
        self.assert_raises_as(shardwright.UsageError, lambda: shardwright.plan(**JOB, wrapp="block"), "plan", *FLAGS,
                              "--wrapp", "block")
        self.assert_raises_as(shardwright.InputError, lambda: shardwright.plan(model="gpt3", cluster="dgx-h100"), "plan",
                              "--model", "gpt3", "--cluster", "dgx-h100")
        self.assert_raises_as(shardwright.InputError, lambda: shardwright.simulate("absent.json"), "simulate", "absent.json")
        self.assert_raises_as(shardwright.UsageError, lambda: shardwright.emit("absent.json"), "emit", "absent.json")
        with self.assertRaisesRegex(shardwright.UsageError, "plan: these keywords print text"):
            shardwright.plan(help=True)


if __name__ == "__main__":
    unittest.main()
