"""Layers that ranks cut, from the command line: words, files, other frameworks, runs of before."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

JOB = ("--model", "llama-3.2-1b", "--cluster", "8xH100", "--seq", "512")
TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 512
[parallelism]
tensor_parallel_degree = {}
{}
[activation_checkpoint]
mode = "none"
"""


class Tensor(ShardwrightTestCase):

    def refused(self, code, text, *words):
        found, _, err = self.run_program(*words)
        self.assertEqual(found, code, (words, err))
        self.assertIn(text, err)

    def plan(self, *words, name="p.json"):
        self.succeed("plan", *JOB, "--no-search", *words, "-o", name)
        return json.loads((self.folder / name).read_text())

    def test_words(self):
        for words, sizes in (("2,tp=4", (2, 4)), ("tp=2", (4, 2)), ("1,tp=8", (1, 8)), ("8,tp=1", (8, 1)), ("2,ep=1,tp=4", (2, 4)), ("tp=4,2", (2, 4))):
            plan = self.plan("--shard", words)["plan"]
            self.assertEqual((plan["shard_size"], plan.get("tensor_size", 1)), sizes)
        for words in ("2,tp=", "2,tp=0", "tp=2,tp=4", "2,qp=2"):
            self.assertEqual(self.run_program("plan", *JOB, "--no-search", "--shard", words)[0], 2, words)

    def test_ranks_that_cut_layers_read_the_same_samples(self):
        made = self.plan("--shard", "tp=4", "--global-batch", "6", "--micro-batch", "1")
        self.assertEqual((made["plan"]["accumulation"], made["job"]["global_batch"]), (3, 6))
        rows = [json.loads(self.succeed("simulate", "p.json", "--json"))]
        self.plan("--shard", "8", "--global-batch", "24", "--micro-batch", "1")
        rows.append(json.loads(self.succeed("simulate", "p.json", "--json")))
        for row, samples in zip(rows, (6, 24)):
            self.assertAlmostEqual(row["tokens_per_s_per_gpu"] * row["step_time_s"] * 8 / (samples * 512), 1, 4)
        self.assertAlmostEqual(rows[0]["mfu"] * rows[0]["step_time_s"] * 4, rows[1]["mfu"] * rows[1]["step_time_s"], 4)

    def test_what_cannot_be_is_said(self):
        for words, text in ((("--shard", "tp=16"), "--shard: tp: got 16"),
                            (("--shard", "tp=3"), "a divisor of the"),
                            (("--shard", "3,tp=2"), "--shard: got 3, expected a divisor of the 4 that tp and pp leave of the 8 ranks"),
                            (("--shard", "tp=2", "--dialect", "fsdp1"), "dialect fsdp2 and torch 2.13 alone"),
                            (("--shard", "tp=2", "--offload", "parameters"), "without offload alone"),
                            (("--shard", "tp=2", "--lora-rank", "8", "--precision", "nf4"), "without quantized weights"),
                            (("--shard", "tp=2", "--kernel-set", "hf-liger"), "torch-eager or torch-compile"),
                            (("--shard", "ep=2,tp=2"), "no experts")):
            self.refused(3, text, "plan", *JOB, "--no-search", *words)
        self.refused(3, "expected a multiple of 4", "plan", *JOB, "--global-batch", "6", "--shard", "tp=2")
        self.refused(3, "--shard: tp x pp: got 16, expected a divisor of the 8 ranks", "plan", *JOB, "--global-batch", "6",
                     "--shard", "tp=8,pp=2")
        made = self.plan("--shard", "tp=2")
        self.refused(3, "that compares answers", "plan", *JOB, "--no-search", "--shard", "tp=2", "--mode", "dpo", "--micro-batch", "2")
        self.refused(3, "--shard: tp: got 16, expected a divisor of the 8 ranks", "plan", "--model", "llama-2-7b", "--cluster", "8xH100",
                     "--shard", "tp=16")
        del made["plan"]["tensor_size"]
        (self.folder / "q.json").write_text(json.dumps(made))
        self.refused(3, "4 ranks", "simulate", "q.json")

    def test_any(self):
        answer = json.loads(self.succeed("plan", *JOB, "--global-batch", "8", "--shard", "tp=any", "--json"))
        self.assertEqual(sorted(row["tensor_size"] for row in answer["dialects"]), [1, 2, 4, 8])
        best = min(answer["dialects"], key=lambda row: row["step_time_s"])
        self.assertEqual((answer["step_time_s"], answer["dialects"][0]), (best["step_time_s"], best))
        self.refused(2, "add --search and --global-batch", "plan", *JOB, "--shard", "tp=any")
        self.refused(2, "tp=any alone", "plan", *JOB, "--global-batch", "8", "--shard", "2,tp=any")
        code, out, _ = self.run_program("plan", *JOB, "--global-batch", "8", "--shard", "tp=any", "--lora-rank", "8", "--json")
        self.assertEqual((code, sorted(row["tensor_size"] for row in json.loads(out)["dialects"])), (0, [1, 2, 4, 8]))
        answer = json.loads(self.succeed("plan", *JOB, "--global-batch", "8", "--shard", "tp=any", "--dialect", "fsdp1,fsdp2", "--json"))
        self.assertEqual(sorted((row["dialect"], row["tensor_size"]) for row in answer["dialects"]),
                         [("fsdp1", 1), *(("fsdp2", size) for size in (1, 2, 4, 8))])

    def test_torchtitan_there_and_back(self):
        for degree, more, text in (("0", "", "tensor_parallel_degree"), ("3", "", "product of 8 ranks"),
                                   ("2", "disable_loss_parallel = true", "disable_loss_parallel"),
                                   ("2", "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1", "one dimension")):
            (self.folder / "t.toml").write_text(TORCHTITAN.format(degree, more))
            self.refused(3, text, "import-run", "t.toml", "--cluster", "8xH100")
        (self.folder / "t.toml").write_text(TORCHTITAN.format(4, ""))
        self.succeed("import-run", "t.toml", "--cluster", "8xH100", "-o", "r.json")
        run = json.loads((self.folder / "r.json").read_text())
        self.assertEqual((run["plan"]["tensor_size"], run["plan"]["shard_size"], run["job"]["global_batch"]), (4, 2, 2))
        self.succeed("emit", "r.json", "--to", "torchtitan", "-o", "out")
        self.assertIn("tensor_parallel_degree = 4", (self.folder / "out/torchtitan.toml").read_text())
        self.refused(3, "--to torchtitan", "emit", "r.json", "--to", "fsdp2")

    def test_transfers_beside_products(self):
        compiled = ("--kernel-set", "torch-compile", "--recompute", "full")
        steps = []
        for words in ("2,tp=4", "2,tp=4:async"):
            made = self.plan("--shard", words, *compiled)
            self.assertEqual(made["plan"].get("tensor_async", False), words.endswith("async"))
            steps.append(json.loads(self.succeed("simulate", "p.json", "--json"))["step_time_s"])
        self.assertLess(steps[1], steps[0])
        self.succeed("emit", "p.json", "--to", "torchtitan", "-o", "async")
        self.assertIn("enable_async_tensor_parallel = true", (self.folder / "async/torchtitan.toml").read_text())
        self.succeed("import-run", "async/torchtitan.toml", "--model", "llama-3.2-1b", "--cluster", "8xH100", "-o", "back.json")
        back = json.loads((self.folder / "back.json").read_text())["plan"]
        self.assertEqual((back["tensor_size"], back["tensor_async"]), (4, True))
        self.refused(3, "a compiled one or megatron-core", "plan", *JOB, "--no-search", "--shard", "2,tp=4:async")
        self.refused(2, "async", "plan", *JOB, "--no-search", "--shard", "2,tp=4:asink")
        made["plan"].update(tensor_size=1, shard_size=8)
        made["job"]["global_batch"] = 8
        (self.folder / "q.json").write_text(json.dumps(made))
        self.refused(3, "plan.tensor_async: got true, expected false where no rank cuts layers", "simulate", "q.json")
        # torchtitan: "Async TP requires 'model' in --compile.components and --compile.enable".
        (self.folder / "t.toml").write_text(TORCHTITAN.format(4, "enable_async_tensor_parallel = true"))
        self.refused(3, "false where the model is not compiled", "import-run", "t.toml", "--cluster", "8xH100")

    def test_no_search_keeps_what_was_gathered(self):
        job = ("--model", "gpt2", "--cluster", "8xH100", "--seq", "512")
        for name, words in (("p.json", ()), ("q.json", ("--reshard", "step"))):
            self.succeed("plan", *job, "--no-search", "--accumulation", "4", *words, "-o", name)
        text = "--reshard step): got true, expected false in a search"
        self.assertIn(" the run", self.succeed("plan", "--from", "q.json", "-o", "r.json"))  # prices the run as it is
        self.refused(3, text, "plan", "--from", "p.json", "--reshard", "step")
        self.refused(3, text, "plan", *job, "--global-batch", "32", "--search", "--reshard", "step")

    def test_loading_is_of_the_whole_model(self):
        """A node holds as much of a state that 8 ranks cut by layers or by parameters."""
        rows = []
        for words in ("8", "2,tp=4"):
            self.plan("--shard", words)
            memory = json.loads(self.succeed("simulate", "p.json", "--json"))["memory"]
            rows.append(memory["to_load_and_save"])
        self.assertEqual(*rows)


if __name__ == "__main__":
    main()
