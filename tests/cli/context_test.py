"""Tokens that ranks cut, from the command line: words, files, other frameworks, the search."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

JOB = ("--model", "llama-3.2-1b", "--cluster", "8xH100", "--seq", "4096")
TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
context_parallel_degree = {}
{}
[activation_checkpoint]
mode = "none"
"""


class Context(ShardwrightTestCase):

    def refused(self, code, text, *words):
        found, _, err = self.run_program(*words)
        self.assertEqual(found, code, (words, err))
        self.assertIn(text, err)

    def plan(self, *words, name="p.json"):
        self.succeed("plan", *JOB, "--no-search", *words, "-o", name)
        return json.loads((self.folder / name).read_text())

    def test_words(self):
        for words, sizes in (("8,cp=4", (8, 4)), ("cp=2", (8, 2)), ("4,cp=4", (4, 4)), ("8,cp=1", (8, 1)), ("8,ep=1,tp=1,cp=8", (8, 8)),
                             ("cp=4,8", (8, 4)), ("cp=2,tp=2", (4, 2))):
            plan = self.plan("--shard", words)["plan"]
            self.assertEqual((plan["shard_size"], plan.get("context_size", 1)), sizes)
        for words in ("2,cp=", "2,cp=0", "cp=2,cp=4", "2,4,cp=2", "cp=2:ring:gather", "pp=2x2x2", "pp=2:gpipe:1f1b", "pp=2x"):
            self.assertEqual(self.run_program("plan", *JOB, "--no-search", "--shard", words)[0], 2, words)

    def test_ranks_that_cut_tokens_read_the_same_samples(self):
        made = self.plan("--shard", "cp=4", "--global-batch", "6", "--micro-batch", "1")
        self.assertEqual((made["plan"]["accumulation"], made["job"]["global_batch"]), (3, 6))
        rows = [json.loads(self.succeed("simulate", "p.json", "--json"))]
        self.plan("--shard", "8", "--global-batch", "24", "--micro-batch", "1")
        rows.append(json.loads(self.succeed("simulate", "p.json", "--json")))
        for row, samples in zip(rows, (6, 24)):
            self.assertAlmostEqual(row["tokens_per_s_per_gpu"] * row["step_time_s"] * 8 / (samples * 4096), 1, 4)
        self.assertAlmostEqual(rows[0]["mfu"] * rows[0]["step_time_s"] * 4, rows[1]["mfu"] * rows[1]["step_time_s"], 4)
        self.assertLess(rows[0]["memory"]["peak_allocated_bytes"], rows[1]["memory"]["peak_allocated_bytes"])

    def test_what_cannot_be_is_said(self):
        for words, text in ((("--shard", "cp=16"), "--shard: cp: got 16"),
                            (("--shard", "cp=3"), "--shard: cp: got 3"),
                            (("--shard", "2,cp=4"), "a divisor of shard_size 2"),
                            (("--shard", "cp=2", "--dialect", "fsdp1"), "dialect fsdp2 and torch 2.13 alone"),
                            (("--shard", "cp=2", "--mode", "dpo", "--micro-batch", "2"), "that compares answers is not cut by tokens")):
            self.refused(3, text, "plan", *JOB, "--no-search", *words)
        self.refused(3, "a divisor of half of the 4098 tokens", "plan", *JOB[:-1], "4098", "--no-search", "--shard", "cp=2")
        self.refused(3, "expected a multiple of 4", "plan", *JOB, "--global-batch", "6", "--shard", "cp=2")
        self.plan("--shard", "cp=2")

    def test_any(self):
        answer = json.loads(self.succeed("plan", *JOB, "--global-batch", "4", "--shard", "cp=any", "--json"))
        self.assertEqual(sorted(row["context_size"] for row in answer["dialects"]), [2, 4, 8])
        best = min(answer["dialects"], key=lambda row: row["step_time_s"])
        self.assertEqual((answer["step_time_s"], answer["dialects"][0]), (best["step_time_s"], best))
        self.refused(2, "add --search and --global-batch", "plan", *JOB, "--shard", "cp=any")
        self.refused(2, "cp=any alone", "plan", *JOB, "--global-batch", "8", "--shard", "2,cp=any")
        self.refused(2, 'got "tp=any,cp=2", expected any in its last word alone', "plan", *JOB, "--global-batch", "8", "--shard", "tp=any,cp=2")
        for word in ("cp=any", "tp=any"):
            self.refused(2, "got --dialect native, expected fsdp2", "plan", *JOB, "--global-batch", "8", "--shard", word, "--dialect", "native")

    def test_torchtitan_there_and_back(self):
        for degree, more, text in (("0", "", "context_parallel_degree"), ("3", "", "product of 8 ranks"),
                                   ("2", "data_parallel_shard_degree = 8", "product of 8 ranks")):
            (self.folder / "t.toml").write_text(TORCHTITAN.format(degree, more))
            self.refused(3, text, "import-run", "t.toml", "--cluster", "8xH100")
        (self.folder / "t.toml").write_text(TORCHTITAN.format(4, "data_parallel_replicate_degree = 2"))
        self.refused(3, "without replicas alone", "import-run", "t.toml", "--cluster", "8xH100")
        # 0.2.2's config/job_config.py: context_parallel_rotate_method is "allgather" by default.
        for more, method in (("", "ring_gather"), ("data_parallel_shard_degree = 2", "ring_gather"),
                             ('context_parallel_rotate_method = "allgather"', "ring_gather"),
                             ('context_parallel_rotate_method = "alltoall"', "ring")):
            (self.folder / "t.toml").write_text(TORCHTITAN.format(4, more))
            self.succeed("import-run", "t.toml", "--cluster", "8xH100", "-o", "r.json")
            run = json.loads((self.folder / "r.json").read_text())
            self.assertEqual((run["plan"]["context_size"], run["plan"]["shard_size"], run["job"]["global_batch"]), (4, 8, 2))
            self.assertEqual(run["plan"]["context_method"], method)
            self.succeed("emit", "r.json", "--to", "torchtitan", "-o", "out.toml")
            text = (self.folder / "out.toml").read_text()
            name = "alltoall" if method == "ring" else "allgather"
            for line in ("context_parallel_degree = 4", "data_parallel_shard_degree = 2", f'context_parallel_rotate_method = "{name}"'):
                self.assertIn(line, text)
        (self.folder / "t.toml").write_text(TORCHTITAN.format(2, "tensor_parallel_degree = 2\ncontext_parallel_rotate_method = \"alltoall\""))
        self.succeed("import-run", "t.toml", "--cluster", "8xH100", "-o", "r.json")
        plan = json.loads((self.folder / "r.json").read_text())["plan"]
        self.assertEqual((plan["context_size"], plan["tensor_size"], plan["shard_size"]), (2, 2, 4))
        (self.folder / "t.toml").write_text(TORCHTITAN.format(4, 'context_parallel_rotate_method = "ring"'))
        self.refused(3, 'got "ring", expected "allgather" or "alltoall"', "import-run", "t.toml", "--cluster", "8xH100")
        self.plan("--shard", "4,cp=4", name="g.json")  # a gather with replicas: 0.3
        self.succeed("emit", "g.json", "--to", "torchtitan", "-o", "g.py")
        self.assertIn("config.parallelism.context_parallel_degree = 4", (self.folder / "g.py").read_text())
        self.refused(3, "--to torchtitan", "emit", "r.json", "--to", "fsdp2")

    def test_a_ring(self):
        """Its transfers run beside compute, and it keeps no keys and values of other ranks."""
        rows = []
        for words in ("cp=4", "cp=4:ring", "cp=4:ring_gather"):
            self.plan("--shard", words)
            rows.append(json.loads(self.succeed("simulate", "p.json", "--json")))
        self.assertLess(rows[1]["memory"]["peak_allocated_bytes"], rows[0]["memory"]["peak_allocated_bytes"])
        self.assertGreater(rows[1]["step_time_s"], 0.5 * rows[0]["step_time_s"])
        for words, text in ((("--shard", "4,cp=4:ring"), "without replicas alone"),
                            (("--shard", "cp=4:ring", "--attention", "materialized"), "a fused one")):
            self.refused(3, text, "plan", *JOB, "--no-search", *words)
        self.refused(2, "gather, ring_gather, ring or ulysses", "plan", *JOB, "--no-search", "--shard", "cp=4:megatron")
        self.plan("--shard", "cp=4:ulysses")
        self.succeed("simulate", "p.json", "--json")
        self.refused(3, "cuts tokens, but not for heads", "emit", "p.json", "--to", "torchtitan")
        self.assertNotIn("context_method", self.plan("--shard", "cp=1:ring")["plan"])


if __name__ == "__main__":
    main()
