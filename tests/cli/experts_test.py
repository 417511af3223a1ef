"""Experts that ranks share out, from the command line: words, files, other frameworks, runs of before."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

JOB = ("--model", "qwen3-30b-a3b", "--cluster", "8xH100", "--seq", "512")
TORCHTITAN = """[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 1
seq_len = 512
[parallelism]
expert_parallel_degree = {}
[activation_checkpoint]
mode = "none"
"""


class Experts(ShardwrightTestCase):

    def refused(self, code, text, *words):
        found, _, err = self.run_program(*words)
        self.assertEqual(found, code, words)
        self.assertIn(text, err)

    def plan(self, *words, name="p.json"):
        self.succeed("plan", *JOB, "--no-search", *words, "-o", name)
        return json.loads((self.folder / name).read_text())["plan"]

    def test_words(self):
        for words, sizes in (("8,ep=4", (8, 4)), ("ep=2", (8, 2)), ("8", (8, 1)), ("4,ep=4", (4, 4)), ("ep=4,8", (8, 4))):
            extra = ("--replicate", "2") if sizes[0] == 4 else ()
            plan = self.plan("--shard", words, *extra)
            self.assertEqual((plan["shard_size"], plan.get("expert_size", 1)), sizes)
        for words in ("8,", "8,4,ep=2", ",ep=4", "ep=", "8,ep=0", "ep=2,ep=4"):
            self.assertEqual(self.run_program("plan", *JOB, "--no-search", "--shard", words)[0], 2, words)

    def test_what_cannot_be_is_said(self):
        for words, text in ((("--shard", "ep=16"), "a divisor of shard_size 8"),
                            (("--shard", "8,ep=4", "--dialect", "fsdp1"), "dialect fsdp2 alone"),
                            (("--shard", "8,ep=4", "--offload", "parameters"), "without offloaded parameters"),
                            (("--shard", "8,ep=4", "--frozen", "*.experts.100.*"), "not both trained or both frozen")):
            self.refused(3, text, "plan", *JOB, "--no-search", *words)
        self.refused(3, "a divisor of the 8 ranks", "plan", *JOB, "--global-batch", "16", "--shard", "ep=16")

    def test_torchtitan_there_and_back(self):
        for degree in ("0", "-1", "3"):
            (self.folder / "t.toml").write_text(TORCHTITAN.format(degree))
            self.refused(3, "expert_parallel_degree", "import-run", "t.toml", "--cluster", "8xH100")
        (self.folder / "t.toml").write_text(TORCHTITAN.format(4))
        self.succeed("import-run", "t.toml", "--cluster", "8xH100", "-o", "r.json")
        run = json.loads((self.folder / "r.json").read_text())["plan"]
        self.assertEqual(run["expert_size"], 4)
        self.succeed("emit", "r.json", "--to", "torchtitan", "-o", "out")
        text = (self.folder / "out/torchtitan.toml").read_text()
        self.assertIn("expert_parallel_degree = 4", text)
        self.assertIn('flavor = "30B-A3B"', text)
        self.refused(3, "--to torchtitan", "emit", "r.json", "--to", "fsdp2")

    def test_frozen_parts_are_emitted_with_shared_out_experts(self):
        """What torchtitan trains is the whole model, its experts shared out as before: about as long, not twice as long."""
        self.plan("--shard", "8,ep=4", "--frozen", "*embed_tokens*")
        answer = json.loads(self.succeed("emit", "p.json", "--to", "torchtitan", "--json"))
        planned, emitted = answer["planned"]["step_time_s"], answer["as_emitted"]["step_time_s"]
        self.assertLess(abs(emitted / planned - 1), 0.1)

    def test_loading_is_of_the_whole_model(self):
        rows = []
        for words in ("8", "8,ep=4"):
            self.plan("--shard", words)
            memory = json.loads(self.succeed("simulate", "p.json", "--json"))["memory"]
            rows.append([row["host_peak_bytes_per_node"] for row in memory["to_load_and_save"] if "whole" in row["what"]])
        self.assertEqual(*rows)

    def test_a_run_of_before_keeps_its_experts(self):
        self.plan("--shard", "8,ep=4", "--recompute", "full", name="run.json")
        for words in (("--shard", "8,ep=2"), ("--dialect", "native")):
            self.refused(2, "the run of --from", "plan", "--from", "run.json", *words, "-o", "q.json")


if __name__ == "__main__":
    main()
