"""Pipelines from the command line: torchtitan's settings there and back."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 16
seq_len = 1024
[parallelism]
pipeline_parallel_degree = 4
{}
[activation_checkpoint]
mode = "none"
"""
CLUSTER = ("--cluster", "dgx-h100", "--nodes", "2")


class Pipelines(ShardwrightTestCase):

    def read(self, more, name="r.json"):
        (self.folder / "t.toml").write_text(TORCHTITAN.format(more))
        self.succeed("import-run", "t.toml", *CLUSTER, "-o", name)
        return json.loads((self.folder / name).read_text())

    def test_torchtitan_reads_stages_as_its_pipeline_llm_counts_them(self):
        # 32 layers, embedding and head: 34. 16 GPUs, 4 of them for one stage's shards.
        for more, schedule, stages, micro_batch in (
                ("", "1f1b", 1, 1),
                ('pipeline_parallel_schedule = "GPipe"\npipeline_parallel_microbatch_size = 4', "gpipe", 1, 4),
                ('pipeline_parallel_schedule = "Interleaved1F1B"', "interleaved", 2, 1),
                ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 3', "interleaved", 3, 1),
                ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 2\n'
                 "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0", "interleaved", 4, 1),
                ('pipeline_parallel_schedule = "InterleavedZeroBubble"', "zero_bubble", 2, 1),
                ('pipeline_parallel_schedule = "ZBVZeroBubble"', "zbv", 2, 1),
                ('pipeline_parallel_schedule = "DualPipeV"', "dualpipev", 2, 1),
                ('pipeline_parallel_schedule = "LoopedBFS"\ntensor_parallel_degree = 2', "looped_bfs", 2, 1)):
            with self.subTest(more=more):
                made = self.read(more)
                plan = made["plan"]
                self.assertEqual((plan["pipeline_size"], plan["pipeline_schedule"], plan.get("pipeline_stages", 1)), (4, schedule, stages))
                self.assertEqual(plan.get("pipeline_edge_layers", 1), 0 if "less" in more else 1)
                shard = 2 if "tensor" in more else 4
                self.assertEqual((plan["shard_size"], plan["micro_batch"], plan["accumulation"]), (shard, micro_batch, 16 // micro_batch))
                self.assertEqual((made["job"]["global_batch"], plan["sync"]), (16 * shard, "last"))
                self.assertEqual({unit["reshard"] for unit in plan["units"]}, {"never"})  # torchtitan's default under stages
                self.succeed("emit", "r.json", "--to", "torchtitan", "-o", "out.toml")
                self.succeed("import-run", "out.toml", *CLUSTER, "-o", "back.json")
                self.assertEqual(json.loads((self.folder / "back.json").read_text())["plan"], plan)

    def test_what_is_taken_for_something_simpler_is_said(self):
        more = 'tensor_parallel_degree = 2\n[compile]\nenable = true\ncomponents = ["loss"]'
        (self.folder / "t.toml").write_text(TORCHTITAN.format(more))
        out = self.succeed("import-run", "t.toml", *CLUSTER, "-o", "r.json")
        self.assertRegex(out, "compile.components +as nothing compiled, the loss neither")

    def test_even_blocks_and_a_first_block_that_runs_again(self):
        # 32 blocks over 8 stages: 4 each, so the first stage's memory is not that of 3 blocks and the embedding.
        job = ("plan", *CLUSTER, "--model", "llama-2-7b", "--seq", "1024", "--micro-batch", "1", "--accumulation", "16", "--recompute", "full",
               "--kernel-set", "megatron-core", "-o", "even.json")
        for words, edge in (("4,pp=4x2:even", 0), ("4,pp=4x2", 1), ("4,pp=4x2:looped_bfs:even", 0)):
            self.succeed(*job, "--shard", words)
            plan = json.loads((self.folder / "even.json").read_text())["plan"]
            self.assertEqual(plan.get("pipeline_edge_layers", 1), edge)
        code, _, err = self.run_program(*job, "--shard", "4,pp=4:evn")
        self.assertEqual(code, 2)
        self.assertIn("evn", err)

    def test_weights_apart_fill_the_bubble(self):
        job = ("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "1024", "--no-search", "--micro-batch", "1",
               "--accumulation", "8", "-o", "p.json")
        eager = ("--kernel-set", "torch-eager")
        bubbles = {}
        for words in ("", ":zero_bubble", ":zbv", ":dualpipev"):
            self.succeed(*job, *eager, "--recompute", "none", "--shard", f"4,pp=4x2{words}")
            bubbles[words] = json.loads(self.succeed("simulate", "p.json", "--json"))["bubble_fraction"]
        for words in (":zero_bubble", ":zbv", ":dualpipev"):
            self.assertLess(bubbles[words], bubbles[""])
        for words, text in ((("--recompute", "none", "--kernel-set", "torch-compile"), "torch refuses for compiled modules"),
                            ((*eager, "--recompute", "full"), "with whole backward passes where they recompute")):
            code, _, err = self.run_program(*job, *words, "--shard", "4,pp=4x2:zbv")
            self.assertEqual(code, 3)
            self.assertIn(text, err)

    def test_a_search_takes_weights_apart(self):
        for words in (":zero_bubble", ":zbv"):
            self.succeed("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "1024", "--global-batch", "32", "--kernel-set", "torch-eager",
                         "--shard", f"pp=4x2{words}", "-o", "s.json")
            plan = json.loads((self.folder / "s.json").read_text())["plan"]
            self.assertEqual(plan["pipeline_schedule"], words[1:])
            self.assertEqual(plan["recompute"], [])

    def test_trace(self):
        self.succeed("plan", "--model", "llama-2-7b", "--cluster", "dgx-h100", "--seq", "256", "--shard", "2,pp=4", "--accumulation", "8",
                     "-o", "p.json")
        step = json.loads(self.succeed("simulate", "p.json", "--trace", "t.json", "--json"))["step_time_s"]
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        self.assertEqual([e["args"]["name"] for e in events if e["name"] == "process_name"],
                         [f"rank {rank} (simulated)" for rank in (0, 2, 4, 6)])
        ops = [e for e in events if "op" in e.get("args", {}) and e["args"].get("step") == 3 and e["args"]["op"].startswith("mb")]
        for rank in (0, 2, 4, 6):  # 1F1B by its definition: that many micro-batches forward before the first one backward
            turns = []
            for e in sorted((e for e in ops if e["pid"] == rank and e["cat"] == "kernel"), key=lambda e: e["ts"]):
                if "ncclDevKernel" not in e["name"]:
                    turn = (int(e["args"]["op"].split(".")[0][2:]), e["args"]["op"].split(".")[-1].split("#")[0])
                    turns += [turn] if turn not in turns and turn[1] in ("fwd", "bwd") else []
            ahead = 4 - rank // 2
            expected = [(i, "fwd") for i in range(ahead)]
            for i in range(8):
                expected += [(i, "bwd")] + [(i + ahead, "fwd")] * (i + ahead < 8)
            self.assertEqual(turns, expected)
        sends = {e["args"]["op"]: e for e in ops if e["pid"] == 0 and e["name"].startswith("ncclDevKernel_SendRecv")}
        others = {e["args"]["op"]: e for e in ops if e["pid"] == 2 and e["name"].startswith("ncclDevKernel_SendRecv")}
        self.assertEqual(sends["mb0.fwd.send"]["ts"], others["mb0.fwd.receive"]["ts"])  # they meet
        self.assertLess(max(e["ts"] + e["dur"] for e in ops) - min(e["ts"] for e in ops), 1e6 * step * 1.01)
        self.assertEqual(len({(e["id"], e["ph"]) for e in events if e["ph"] in "sf"}), sum(e["ph"] in "sf" for e in events))

    def test_any_splits_backward_passes_where_that_is_known(self):
        (self.folder / "decoder.json").write_text(json.dumps({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False}))
        whole = {(1, 1, "1f1b"), (2, 1, "1f1b"), (2, 2, "interleaved")}
        split = {(2, 1, "zero_bubble"), (2, 2, "zero_bubble"), (2, 2, "zbv"), (2, 2, "dualpipev")}
        for kernels, expected in (("torch-eager", whole | split), ("torch-compile", whole)):
            code, out, err = self.run_program("plan", "--model", "./decoder.json", "--cluster", "1xH100, nodes 2, nic 1x1 Gbit/s", "--seq", "256", "--global-batch", "8",
                                              "--micro-batch", "1", "--kernel-set", kernels, "--shard", "pp=any", "--search", "--json", "-o",
                                              "any.json")
            self.assertEqual(code, 0, err)
            self.assertNotIn("note: not", err)
            self.assertEqual({(d["pipeline_size"], d["pipeline_stages"], d["pipeline_schedule"]) for d in json.loads(out)["dialects"]}, expected)

        # Where the links are fast, no stages and no bubble to save are best: nothing is split.
        code, out, err = self.run_program("plan", "--model", "./decoder.json", "--cluster", "2xH100", "--seq", "256", "--global-batch", "8",
                                          "--kernel-set", "torch-eager", "--shard", "pp=any", "--search", "--json", "-o", "any.json")
        self.assertEqual({d["pipeline_schedule"] for d in json.loads(out)["dialects"]}, {"1f1b", "interleaved"})

    def test_any_says_why_there_are_none(self):
        job = ("plan", "--cluster", "8xH100", "--seq", "1024", "--global-batch", "64", "--shard", "pp=any", "-o", "any.json")
        code, _, err = self.run_program(*job, "--model", "llama-3.2-1b")  # tied
        self.assertEqual(code, 0)
        self.assertIn("note: no pipelines: ", err)
        code, _, err = self.run_program(*job, "--model", "llama-2-7b", "--dialect", "native")
        self.assertEqual(code, 2)
        self.assertIn("got --dialect native, expected fsdp2", err)

    def test_what_cannot_be_is_said(self):
        for more, text in (('pipeline_parallel_schedule = "ZB"', "expected GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV"),
                           ('pipeline_parallel_schedule = "ZBVZeroBubble"\npipeline_parallel_layers_per_stage = 3', "pipeline_stages: got 3, expected 2 under zbv and dualpipev"),
                           ("pipeline_parallel_microbatch_size = 3", "a divisor of local_batch_size 16"),
                           ("pipeline_parallel_layers_per_stage = 0", "expected an integer in [1, "),
                           ("pipeline_parallel_layers_per_stage = 4", "one stage for each of 4 ranks"),
                           ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 9', "several stages"),
                           ("data_parallel_shard_degree = 8", "pipeline degree 4, expected a product of 16 ranks"),
                           ("pipeline_parallel_first_stage_less_layers = 2", "that of the first stage (2), 0 or 1 for both"),
                           ("pipeline_parallel_last_stage_less_layers = 0", "that of the first stage (1), 0 or 1 for both")):
            with self.subTest(more=more):
                (self.folder / "t.toml").write_text(TORCHTITAN.format(more))
                code, _, err = self.run_program("import-run", "t.toml", *CLUSTER)
                self.assertEqual(code, 3)
                self.assertIn(text, err)
        self.read("context_parallel_degree = 2")  # a ring; 0.3 gathers
        self.succeed("emit", "r.json", "--to", "torchtitan", "-o", "ring.toml")
        self.read('context_parallel_degree = 2\ncontext_parallel_rotate_method = "none"')
        code, _, err = self.run_program("emit", "r.json", "--to", "torchtitan", "-o", "out")
        self.assertEqual(code, 3)
        self.assertIn("beside stages in a ring alone", err)
        self.read("")
        code, _, err = self.run_program("emit", "r.json", "--to", "fsdp2", "-o", "out")
        self.assertEqual(code, 3)
        self.assertIn("--to torchtitan, which has stages", err)


if __name__ == "__main__":
    main()
