"""shardwright.log: the scalars of a run, read back by TensorBoard's and MLflow's own packages."""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM, FOLDER = os.path.abspath(sys.argv.pop(1)), sys.argv.pop(1)
sys.path.insert(0, FOLDER)
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
try:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(77)

import shardwright
from shardwright import log

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIGITS = ROOT / "tests" / "data" / "digits"


class Log(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.folder = pathlib.Path(cls.scratch.name)
        plan = cls.folder / "plan.json"
        shardwright.commands.plan(model="mnist-convnet", cluster="h100-80 x2, nvlink 450 GB/s", kernel_set="shardwright-host", dialect="fsdp1",
                                  wrap="size:100", optimizer="sgd", clip="off", precision="fp32", micro_batch=64, output=plan)
        cls.run_result = shardwright.commands.run(plan, epochs=2, data=DIGITS / "train-images-idx3-ubyte.gz",
                                           test_data=DIGITS / "t10k-images-idx3-ubyte.gz")
        cls.file = cls.folder / "run.json"
        cls.file.write_text(json.dumps(cls.run_result))
        os.utime(cls.file, (1_700_000_000, 1_700_000_000))

    def command(self, *words, stdin=None):
        return subprocess.run([sys.executable, "-m", "shardwright.log", *map(str, words)], input=stdin, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": FOLDER}, check=False)

    def test_tensorboard(self):
        done = self.command(self.file, "--tensorboard", self.folder / "logs")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        read = EventAccumulator(str(self.folder / "logs"), size_guidance={"scalars": 0}).Reload()
        self.assertEqual(set(read.Tags()["scalars"]), {"train/loss", "train/learning_rate", "train/step_time_s", "epoch/train_loss", "epoch/loss",
                                                       "epoch/accuracy"})
        steps = self.run_result["steps"]
        self.assertGreater(len(steps), 4)
        events = read.Scalars("train/loss")
        self.assertEqual([event.step for event in events], [row["step"] for row in steps])
        for event, row in zip(events, steps):
            self.assertAlmostEqual(event.value, row["loss"], delta=1e-6 * abs(row["loss"]))
            self.assertAlmostEqual(event.wall_time, 1_700_000_000 - steps[-1]["end_s"] + row["end_s"], delta=1e-5)
        last = self.run_result["epochs"][-1]
        self.assertAlmostEqual(read.Scalars("epoch/accuracy")[-1].value, last["test_correct"] / last["test_count"], places=6)
        self.assertAlmostEqual(sum(event.value for event in read.Scalars("train/step_time_s")), steps[-1]["end_s"], places=3)

    def test_mlflow(self):
        uri = f"file://{self.folder}/mlruns"  # the one store that mlflow-skinny has beside servers
        done = self.command("-", "--mlflow", uri, "--name", "digits", stdin=self.file.read_text())
        self.assertEqual(done.returncode, 0, done.stderr)
        run_id = done.stdout.split()[2]
        client = MlflowClient(tracking_uri=uri)
        run = client.get_run(run_id)
        self.assertEqual((run.info.status, run.info.run_name, run.data.params), ("FINISHED", "digits", {"device": "host", "ranks": "2"}))
        history = client.get_metric_history(run_id, "train/loss")
        self.assertEqual([(metric.step, metric.value) for metric in history], [(row["step"], row["loss"]) for row in self.run_result["steps"]])
        again = log.to_mlflow({**self.run_result, "interrupted": True}, uri)  # into the experiment that is there
        self.assertEqual(client.get_run(again).info.status, "KILLED")
        self.assertEqual(client.get_run(again).info.experiment_id, run.info.experiment_id)

    def test_what_is_no_number(self):
        run = {"schema": "shardwright-run", "steps": [{"step": 0, "loss": None, "end_s": 1.5}]}
        loss, time = log.scalars(run)
        self.assertTrue(math.isnan(loss.value))
        self.assertEqual(time, ("train/step_time_s", 0, 1.5, 1.5))

    def test_errors(self):
        for words, code, text in (((self.file,), 2, "error: expected --tensorboard FOLDER, --mlflow URI or both\n"),
                                  (("none.json", "--tensorboard", "x"), 3, "error: none.json: No such file or directory\n"),
                                  ((ROOT / "scripts" / "tiny-gpt.json", "--tensorboard", "x"), 3,
                                   f"error: {ROOT}/scripts/tiny-gpt.json: expected what run --json prints, with \"schema\": \"shardwright-run\"\n"),
                                  ((self.file, "--tensorboard", "/dev/null/x"), 4, None),
                                  ((self.file, "--mlflow", "nothing://x"), 4, None)):
            done = self.command(*words)
            self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
            self.assertTrue(done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 if text is None else done.stderr == text, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
