"""Runs whose ranks share out experts: ranks as threads and as processes, checkpoints under other sizes, kills, traces."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import main
from training_test_case import TrainingTestCase

MIXTURE = {"model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 1, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
           "max_position_embeddings": 16}


class ExpertsRun(TrainingTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "mixture.json").write_text(json.dumps(MIXTURE))

    def mixture(self, name, shard, *flags):
        ranks = int(shard.split(",")[0])
        return self.plan(name, ranks, "--shard", shard, "--micro-batch", "1", *flags, model="./mixture.json")

    def test_processes_and_traces(self):
        """The bits of threads; each span joins the simulated one by its op."""
        plan = self.mixture("p.json", "4,ep=2", "--global-batch", "8")
        steps = self.train(plan, "--steps", "3", "--trace", "t.json", "--checkpoint", "threads")
        ends = self.processes(4, "run", plan, "--data", "random:100", "--steps", "3", "--json", "--checkpoint", "processes")
        self.assertEqual([end[2] for end in ends], [0, 0, 0, 0], ends)
        self.assertEqual([step["loss"] for step in json.loads(ends[0][0])["steps"]], [step["loss"] for step in steps])
        self.assertEqual(self.export("processes"), self.export("threads"))
        found = json.loads(self.succeed("compare", plan, "t.json", "--json"))
        self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))
        self.assertGreater(found["matched"], 0)

    def test_checkpoints_under_other_sizes(self):
        """Names and offsets are the whole model's: any number of ranks goes on from what any other has saved."""
        weights, losses = {}, {}
        self.train(self.mixture("first.json", "4,ep=2", "--global-batch", "4"), "--steps", "2", "--checkpoint", "c")
        names = set(self.export("c"))
        self.assertIn("model.layers.1.mlp.experts.gate_up_proj", names)
        for shard in ("4,ep=2", "4,ep=4", "4", "2,ep=2"):
            plan = self.mixture("next.json", shard, "--global-batch", "4")
            folder = "d" + shard.replace(",", "")
            subprocess.run(["cp", "-r", "c", folder], cwd=self.folder, check=True)
            losses[shard] = [step["loss"] for step in self.train(plan, "--checkpoint", folder, "--resume", "--steps", "4")]
            weights[shard] = self.export(folder)
        for shard, found in losses.items():
            self.assertEqual(len(found), 2)
            for loss, expected in zip(found, losses["4"]):
                self.assertAlmostEqual(loss, expected, delta=1e-5, msg=shard)
            self.assertEqual({name: entry[:2] for name, entry in weights[shard].items()},
                             {name: entry[:2] for name, entry in weights["4"].items()})

    def test_killed_at_any_moment_a_run_resumes_to_the_same_weights(self):
        plan = self.mixture("p.json", "2,ep=2", "--global-batch", "4")
        self.train(plan, "--steps", "40", "--checkpoint", "whole")
        moments = random.Random(5)
        run = ("run", plan, "--data", "random:100", "--checkpoint", "c", "--every", "1", "--resume", "--steps", "40")
        kills = 0
        for _ in range(40 if "SHARDWRIGHT_DEEP" in os.environ else 4):
            process = subprocess.Popen([shardwright_test_case.PROGRAM, *run], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       cwd=self.folder)
            time.sleep(moments.uniform(0.05, 0.4))
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.assertGreater(kills, 0)
        code, _, err = self.run_program(*run)
        self.assertEqual(code, 0, err)
        self.assertEqual(self.export("c/step-00000040"), self.export("whole"))

    def test_what_cannot_be_run_is_said(self):
        (self.folder / "mixture.json").write_text(json.dumps(dict(MIXTURE, model_type="olmoe", num_experts=4)))
        plan = self.mixture("p.json", "2,ep=2", "--global-batch", "4")
        code, _, err = self.run_program("run", plan, "--data", "random:100", "--steps", "1")
        self.assertEqual(code, 3)
        self.assertIn("one weight for all experts", err)


if __name__ == "__main__":
    main()
