"""Runs of pipelines: threads, processes and MPI's, checkpoints under other stages, a killed rank, refusals."""

import json
import pathlib
import re
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from ends_test import Run
from shardwright_test_case import main
from training_test_case import Patience, TrainingTestCase

DECODER = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 16, "tie_word_embeddings": False}
# What --shard says, how many ranks that takes, and which dialect.
MESHES = {"1": (1, "fsdp2"), "1,pp=2": (2, "fsdp2"), "1,pp=4:gpipe": (4, "fsdp2"), "2,pp=2x2": (4, "fsdp2"),
          "1,pp=4x2:looped_bfs": (4, "fsdp2"), "1,tp=2,pp=2": (4, "fsdp2"), "2,cp=2,pp=2:gpipe": (4, "fsdp2"), "ddp": (4, "ddp"),
          "1,pp=4x2:zero_bubble": (4, "fsdp2"), "2,pp=2x2:zbv": (4, "fsdp2"), "1,tp=2,pp=2x2:dualpipev": (4, "fsdp2")}


class PipelinesRun(TrainingTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "decoder.json").write_text(json.dumps(DECODER))

    def decoder(self, shard, name="p.json", batch=8):
        ranks, dialect = MESHES[shard]
        mesh = ("--replicate", "2", "--shard", "1,pp=2") if dialect == "ddp" else ("--shard", shard)
        accumulation = batch // (2 if shard[:4] in ("2,pp", "ddp") else 1)
        return self.plan(name, ranks, *mesh, "--dialect", dialect, "--micro-batch", "1", "--accumulation", str(accumulation),
                         model="./decoder.json")

    def test_losses_are_those_of_one_rank(self):
        expected = self.losses(self.train(self.decoder("1"), "--steps", "5"))
        self.assertEqual(len(set(expected)), 5)
        for shard in MESHES:
            self.assert_near(self.losses(self.train(self.decoder(shard), "--steps", "5")), expected, shard)

    def test_processes_have_the_bits_of_threads(self):
        for shard in ("1,pp=2", "2,pp=2x2", "1,pp=4x2:looped_bfs", "1,tp=2,pp=2", "1,pp=4x2:zero_bubble", "2,pp=2x2:zbv",
                      "1,tp=2,pp=2x2:dualpipev"):
            plan = self.decoder(shard)
            steps = self.train(plan, "--steps", "3", "--checkpoint", "threads" + shard)
            ends = self.processes(MESHES[shard][0], "run", plan, "--data", "random:100", "--steps", "3", "--json", "--checkpoint",
                                  "processes" + shard)
            self.assertEqual({end[2] for end in ends}, {0}, ends)
            self.assertEqual(self.losses(json.loads(ends[0][0])["steps"]), self.losses(steps))
            self.assertEqual(self.export("processes" + shard), self.export("threads" + shard))

    def test_checkpoints_under_other_stages(self):
        """Names are the whole model's: what any stages save, any others go on from, or none; weights of a file likewise."""
        whole = self.losses(self.train(self.decoder("1"), "--steps", "4"))
        for first in ("1", "1,pp=2", "2,pp=2x2", "2,pp=2x2:zbv"):
            self.train(self.decoder(first), "--steps", "2", "--checkpoint", "c" + first)
            shapes = {name: entry[:2] for name, entry in self.export("c" + first).items()}
            self.assertEqual(shapes["model.layers.5.mlp.down_proj.weight"], ("F32", [32, 24]))
            self.assertEqual(shapes["lm_head.weight"], ("F32", [64, 32]))
            for then in ("1", "1,pp=2", "1,pp=4:gpipe", "1,tp=2,pp=2", "1,tp=2,pp=2x2:dualpipev"):
                subprocess.run(["cp", "-r", "c" + first, "d"], cwd=self.folder, check=True)
                steps = self.train(self.decoder(then), "--steps", "4", "--checkpoint", "d", "--resume")
                self.assert_near(self.losses(steps), whole[2:], f"{first}, then {then}")
                self.assertEqual({name: entry[:2] for name, entry in self.export("d").items()}, shapes)
                subprocess.run(["rm", "-r", "d"], cwd=self.folder, check=True)
        self.export("c1,pp=2", "first.safetensors")
        given = ("--steps", "1", "--init", "first.safetensors")
        expected = self.losses(self.train(self.decoder("1"), *given))
        for shard in ("1,pp=2", "2,pp=2x2"):
            self.assert_near(self.losses(self.train(self.decoder(shard), *given)), expected, shard)

    def test_a_killed_stage_ends_all_and_another_pipeline_goes_on(self):
        whole = self.losses(self.train(self.decoder("1"), "--steps", "12"))
        plan = self.decoder("1,pp=4:gpipe")
        for victim in (1, 3):
            folder = f"c{victim}"
            run = Run(self.folder, (plan, "--data", "random:100", "--steps", "100000", "--checkpoint", folder, "--every", "1"),
                      shardwright_test_case.PROGRAM)
            self.addCleanup(run.kill)
            run.wait_for_steps(3)
            run.ranks[victim].send_signal(signal.SIGKILL)
            codes = run.finish(Patience(5))
            self.assertEqual(codes, [-signal.SIGKILL if rank == victim else 5 for rank in range(4)], run.err)
            for rank in range(4):
                if rank != victim:
                    self.assertRegex(run.error(rank), rf"rank {victim}\b")
            newest = max(path.parent.name for path in (self.folder / folder).glob("step-*/manifest.json"))
            done = int(re.search(r"\d+", newest)[0])
            steps = self.train(self.decoder("2,pp=2x2", "other.json"), "--steps", str(done + 2), "--checkpoint", folder, "--resume")
            self.assertEqual(len(steps), 2)
            if done + 2 <= 12:
                self.assert_near(self.losses(steps), whole[done:done + 2], folder)

    def test_summed_losses_of_an_epoch(self):
        """A sample's loss is counted once, however many ranks know it."""
        (self.folder / "t.json").write_text(json.dumps({"format": "shardwright-training", "version": 1, "loss_reduction": "sum",
                                                        "optimizer": {"learning_rate": 1e-6}}))
        found = {}
        for shard in ("1", "2,pp=2x2", "1,tp=2,pp=2", "2,cp=2,pp=2:gpipe", "2,pp=2x2:zbv"):
            code, out, err = self.run_program("run", self.decoder(shard), "--data", "random:32", "--epochs", "1", "--training", "t.json",
                                              "--json")
            self.assertEqual(code, 0, err)
            found[shard] = json.loads(out)["epochs"][0]["train_loss"]
            self.assertAlmostEqual(found[shard] / found["1"], 1, delta=1e-6, msg=shard)
        self.assertGreater(found["1"], 16 * 4)  # 16 words, each about as likely as 63 others

    def test_mpi(self):
        if subprocess.run(["which", "mpirun"], stdout=subprocess.DEVNULL).returncode != 0:
            self.skipTest("no mpirun")
        plan = self.decoder("1,pp=4x2:looped_bfs")
        expected = self.losses(self.train(plan, "--steps", "3"))
        run = subprocess.run(["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", "4",
                              shardwright_test_case.PROGRAM, "run", plan, "--data", "random:100", "--steps", "3", "--json"],
                             cwd=self.folder, capture_output=True, text=True, timeout=300)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(self.losses(json.loads(run.stdout)["steps"]), expected)

    def test_what_cannot_be_run_is_said(self):
        def refused(code, text, *words):
            found, _, err = self.run_program(*words)
            self.assertEqual(found, code, err)
            self.assertIn(text, err)

        plan = self.decoder("1,pp=2")
        run = ("run", plan, "--data", "random:100", "--steps", "1")
        for flags in (("--trace", "t.json"), ("--test-data", "random:100"), ("--emulate-network",)):
            refused(2, f"{flags[0]}: not known of plans with a pipeline so far", *run, *flags)
        refused(3, "plan: pipeline_size: got 2, expected 1, since pipelines run on the host device only", *run, "--device", "cuda",
                "--loopback", "2")
        refused(3, "1: pipelines are known to plan, simulate, inspect, emit and run so far", "eval", plan, "--data", "random:100",
                "--checkpoint", "c")
        (self.folder / "decoder.json").write_text(json.dumps(dict(DECODER, model_type="seed_oss", attention_dropout=0.1)))
        refused(3, "plan: pipeline_size: got a pipeline of layers with dropout, expected 1", "run", self.decoder("1,pp=2"), "--data",
                "random:100", "--steps", "1")


if __name__ == "__main__":
    main()
