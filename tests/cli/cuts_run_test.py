"""Runs whose ranks cut layers or tokens: threads and processes, traces, checkpoints under other meshes, refusals."""

import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import main
from training_test_case import TrainingTestCase

DECODER = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 4, "intermediate_size": 24, "attention_bias": True, "max_position_embeddings": 16}
# What --shard says, and how many ranks that takes.
MESHES = {"1": 1, "2": 2, "2,tp=2": 4, "1,tp=4": 4, "2,cp=2": 2, "4,cp=4": 4, "4,cp=2:ulysses": 4, "2,cp=2:ring": 2,
          "4,cp=4:ring": 4, "4,cp=4:ring_gather": 4}


class CutsRun(TrainingTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "decoder.json").write_text(json.dumps(DECODER))

    def decoder(self, shard, *flags):
        return self.plan("p.json", MESHES[shard], "--shard", shard, "--global-batch", "4", *flags, model="./decoder.json")

    def refused(self, text, *words):
        code, _, err = self.run_program(*words)
        self.assertEqual(code, 3, err)
        self.assertIn(text, err)

    def test_losses_are_those_of_one_rank(self):
        expected = self.losses(self.train(self.decoder("1"), "--steps", "6"))
        self.assertEqual(len(set(expected)), 6)
        for shard in MESHES:
            self.assert_near(self.losses(self.train(self.decoder(shard), "--steps", "6")), expected, shard)

    def test_processes_and_traces(self):
        """The bits of threads; each span joins the simulated one by its op."""
        for shard in ("2,tp=2", "4,cp=2:ulysses", "4,cp=4:ring", "4,cp=4:ring_gather"):
            plan = self.decoder(shard)
            steps = self.train(plan, "--steps", "3", "--trace", "t.json", "--checkpoint", "threads" + shard)
            ends = self.processes(4, "run", plan, "--data", "random:100", "--steps", "3", "--json", "--checkpoint", "processes" + shard)
            self.assertEqual([end[2] for end in ends], [0, 0, 0, 0], ends)
            self.assertEqual(self.losses(json.loads(ends[0][0])["steps"]), self.losses(steps))
            self.assertEqual(self.export("processes" + shard), self.export("threads" + shard))
            found = json.loads(self.succeed("compare", plan, "t.json", "--json"))
            self.assertEqual((found["matched"], found["findings"]), (found["spans"], []))
            self.assertGreater(found["matched"], 0)

    def test_checkpoints_under_other_meshes(self):
        """Names and places are the whole model's: what any mesh saves, any other goes on from."""
        whole = self.losses(self.train(self.decoder("1"), "--steps", "5"))
        for first in ("1", "2,tp=2", "1,tp=4", "2,cp=2"):
            self.train(self.decoder(first), "--steps", "2", "--checkpoint", "c" + first)
            shapes = {name: entry[:2] for name, entry in self.export("c" + first).items()}
            self.assertEqual(shapes["model.layers.1.mlp.down_proj.weight"], ("F32", [32, 24]))
            for then in ("1", "2,tp=2", "1,tp=4", "4,cp=2:ulysses"):
                subprocess.run(["cp", "-r", "c" + first, "d"], cwd=self.folder, check=True)
                steps = self.train(self.decoder(then), "--steps", "5", "--checkpoint", "d", "--resume")
                self.assert_near(self.losses(steps), whole[2:], f"{first}, then {then}")
                self.assertEqual({name: entry[:2] for name, entry in self.export("d").items()}, shapes)
                subprocess.run(["rm", "-r", "d"], cwd=self.folder, check=True)

    def test_first_weights_of_a_file(self):
        """An export holds whole tensors; ranks take their slices, of rows and of columns."""
        self.train(self.decoder("1"), "--steps", "2", "--checkpoint", "c")
        self.export("c", "first.safetensors")
        expected = self.losses(self.train(self.decoder("1"), "--steps", "1", "--init", "first.safetensors"))
        for shard in ("2,tp=2", "1,tp=4", "4,cp=4"):
            self.assert_near(self.losses(self.train(self.decoder(shard), "--steps", "1", "--init", "first.safetensors")), expected, shard)

    def test_evaluation(self):
        """Losses and right answers of a text, whoever has the words or the tokens."""
        (self.folder / "digits").write_text("".join(str(n * n) for n in range(400)))
        flags = ("--data", "text:digits", "--test-data", "text:digits", "--steps", "20", "--eval-every", "10", "--json")
        found = {}
        for shard in ("1", "2,tp=2", "1,tp=4", "2,cp=2"):
            code, out, err = self.run_program("run", self.decoder(shard), *flags)
            self.assertEqual(code, 0, err)
            found[shard] = json.loads(out)["tests"]
            self.assertGreater(found[shard][-1]["test_correct"], 100)
            for name in ("step", "test_correct", "test_count"):
                self.assertEqual([test[name] for test in found[shard]], [test[name] for test in found["1"]], (shard, name))
            self.assert_near([test["test_loss"] for test in found[shard]], [test["test_loss"] for test in found["1"]], shard)

    def test_what_cannot_be_run_is_said(self):
        self.refused("kernel set: got \"shardwright-cuda-plain\", expected the host's or one of PyTorch's", "plan", "--model",
                     "./decoder.json", "--seq", "16", "--cluster", "2xH100", "--kernel-set", "shardwright-cuda-plain", "--no-search",
                     "--shard", "2,cp=2:ring")
        (self.folder / "decoder.json").write_text(json.dumps(dict(DECODER, model_type="seed_oss", attention_dropout=0.1)))
        self.refused("plan: context_size: got 2, expected 1, since the host has no dropout of a part of the tokens or heads",
                     "run", self.decoder("2,cp=2"), "--data", "random:100", "--steps", "1")


if __name__ == "__main__":
    main()
