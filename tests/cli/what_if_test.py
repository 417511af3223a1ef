"""sweep, goodput, and simulate with stragglers, as a user types them."""

import csv
import io
import json
import pathlib
import shlex
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

JOB = ("--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128")


def examples(text):
    """The commands that a help text shows."""
    lines = text[text.index("Examples:"):text.index("Usage:")].replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip().startswith("shardwright ")]


class From(ShardwrightTestCase):

    def test_a_plan_that_cannot_be_lowered_as_emitted_is_passed_over(self):
        # Accelerate checkpoints what it wraps; here that is "model", whose input is ids, and the Trainer's checkpoint is re-entrant.
        llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
                 "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192}
        fsdp = {"version": 1, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100000000, "use_orig_params": False,
                "reshard_after_forward": "shard_grad_op"}
        run = {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "fsdp": True, "fsdp_config": fsdp}
        (self.folder / "config.json").write_text(json.dumps(llama))
        (self.folder / "run.json").write_text(json.dumps(run))
        self.succeed("import-run", "run.json", "--model", ".", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "2048", "-o", "plan.json")
        self.succeed("plan", "--from", "plan.json", "-o", "best.json")

    def test_what_would_be_faster_than_a_run(self):
        # A wasteful run: everything recomputed and 8 passes of one sample, where memory is plenty.
        run = ("plan", *JOB, "--kernel-set", "torch-compile", "--precision", "bf16", "--optimizer", "sgd:fused", "--dialect", "fsdp1",
               "--micro-batch", "1", "--accumulation", "8", "--recompute", "full", "--limit-all-gathers", "off")
        self.succeed(*run, "-o", "run.json")
        before = json.loads((self.folder / "run.json").read_text())
        found = json.loads(self.succeed("plan", "--from", "run.json", "-o", "best.json", "--json"))
        after = json.loads((self.folder / "best.json").read_text())
        # Only choices differ.
        for key in ("model", "kernel_set", "cluster", "profile"):
            self.assertEqual(before[key], after[key], key)
        job = {key: value for key, value in before["job"].items() if key != "memory_margin"}
        self.assertEqual({key: after["job"][key] for key in job}, job)
        self.assertEqual(after["plan"]["dialect"], "fsdp1")
        times = [json.loads(self.succeed("simulate", name, "--json"))["step_time_s"] for name in ("run.json", "best.json")]
        self.assertLess(times[1], 0.9 * times[0])
        self.assertEqual([found["from_run"][side]["step_time_s"] for side in ("before", "after")], times)
        self.assertIn({"field": "plan.accumulation", "before": "8", "after": str(after["plan"]["accumulation"]), "alike": 1},
                      found["from_run"]["changes"])
        self.assertTrue(found["from_run"]["why"])
        text = self.succeed("plan", "--from", "run.json", "-o", "best.json")
        self.assertRegex(text, r"^Faster than the run: .* -> .* a step \(-[\d.]+ %\)\n")
        self.assertIn("where the time differs", text)
        # A second time there is nothing to gain.
        self.assertTrue(self.succeed("plan", "--from", "best.json", "-o", "again.json").startswith("Nothing that was found is faster"))

    def test_typed_flags_override(self):
        self.succeed("plan", *JOB, "--micro-batch", "1", "--accumulation", "8", "-o", "run.json")
        self.succeed("plan", "--from", "run.json", "--kernel-set", "torch-compile", "--dialect", "ddp", "--micro-batch", "2", "-o", "other.json")
        other = json.loads((self.folder / "other.json").read_text())
        self.assertEqual((other["plan"]["dialect"], other["plan"]["micro_batch"], other["job"]["global_batch"]), ("ddp", 2, 64))
        self.assertIn("torch-compile", json.dumps(other["kernel_set"]))
        self.assert_fails(2, "--seq: the run of --from says it; without --from every flag counts",
                          "plan", "--from", "run.json", "--seq", "64")
        self.assert_fails(2, "--no-search: --from searches", "plan", "--from", "run.json", "--no-search")
        self.assert_fails(2, "--objective cost: the run of --from has one number of nodes",
                          "plan", "--from", "run.json", "--objective", "cost")


    def test_the_target_is_the_framework_of_the_run(self):
        # Each in its own framework: what is promised is what its settings say, and never slower than the run.
        fsdp = ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\n"
                "num_processes: 8\nfsdp_config:\n  fsdp_version: {}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
                "  fsdp_activation_checkpointing: true\n")
        runs = {"accelerate": ("v1.yaml", fsdp.format(1)), "accelerate-2": ("v2.yaml", fsdp.format(2)),
                "trainer": ("t.yaml", "output_dir: o\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n"
                                      "gradient_checkpointing: true\nfsdp: full_shard auto_wrap\n"),
                "deepspeed": ("d.json", json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
                                                    "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})),
                "torchtitan": ("t.toml", "[training]\nlocal_batch_size = 1\nglobal_batch_size = 64\nseq_len = 128\n")}
        for name, (file, text) in runs.items():
            with self.subTest(name):
                target = name.split("-")[0]
                (self.folder / file).write_text(text)
                flags = ("--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128")
                self.succeed("import-run", file, *flags, "-o", "run.json")
                self.assertEqual(json.loads((self.folder / "run.json").read_text())["imported_from"], target)
                said = self.succeed("plan", "--from", "run.json", "-o", "best.json")
                command = said.splitlines()[-1].split(": ")[1]
                self.assertEqual(command, f"shardwright emit best.json --to {target} -o run/")
                step = [json.loads(self.succeed("simulate", plan, "--json"))["step_time_s"] for plan in ("run.json", "best.json")]
                self.assertLessEqual(step[1], 1.001 * step[0])
                emitted = json.loads(self.succeed(*shlex.split(command)[1:-2], "--json"))
                self.assertEqual(emitted["is_exact"], True, emitted["losses"])
                found = json.loads(self.succeed("plan", "--from", "run.json", "-o", "again.json", "--json"))
                self.assertEqual(found["from_run"]["emit"], command.replace("best", "again"))
                # Another dialect is asked for: anything that it can do.
                other = self.succeed("plan", "--from", "run.json", "--dialect", "fsdp2", "-o", "other.json")
                self.assertNotIn("shardwright emit", other)

    def test_a_note_of_no_target(self):
        self.succeed("plan", *JOB, "--micro-batch", "1", "-o", "run.json")
        plan = json.loads((self.folder / "run.json").read_text())
        (self.folder / "run.json").write_text(json.dumps({**plan, "imported_from": "acelerate"}))
        code, _, error = self.run_program("plan", "--from", "run.json")
        self.assertEqual(code, 3)
        self.assertIn('imported_from: got "acelerate", expected one of "fsdp2", ', error)


class Sweep(ShardwrightTestCase):

    def test_rows_are_plans(self):
        sweep = json.loads(self.succeed("sweep", *JOB, "--nodes", "1,2", "--micro-batch", "1..4", "--shard", "8",
                                        "--json"))
        self.assertEqual((sweep["schema"], sweep["schema_version"]), ("shardwright-sweep", 1))
        self.assertEqual([(row["nodes"], row["micro_batch"]) for row in sweep["rows"]],
                         [(nodes, micro) for nodes in (1, 2) for micro in (1, 2, 4)])
        row = sweep["rows"][4]
        self.succeed("plan", *JOB, "--nodes", "2", "--micro-batch", "2", "--shard", "8", "-o", "plan.json")
        alone = json.loads(self.succeed("simulate", "plan.json", "--json"))
        for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_s"):
            self.assertEqual(row[key], alone[key], key)
        self.assertEqual(row["device_bytes"],
                         alone["memory"]["peak_reserved_bytes"] + alone["memory"]["outside_allocator_bytes"])

    def test_what_fits_only_just(self):
        arguments = ("sweep", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "8192", "--recompute", "selective", "--micro-batch")
        one, two = json.loads(self.succeed(*arguments, "1,2", "--json"))["rows"]
        usable = 79.17 * 2**30  # the GPU's, to two digits
        self.assertGreater(two["tokens_per_s_per_gpu"], one["tokens_per_s_per_gpu"])
        self.assertTrue(one["fits"] and two["fits"])
        self.assertTrue(usable - two["device_bytes"] < two["memory_error_bytes"] < usable - one["device_bytes"])
        lines = self.succeed(*arguments, "1,2").splitlines()
        self.assertRegex(lines[2], r"GiB  fits by \d+ MiB, which may be off by [\d.]+ GiB$")
        self.assertRegex(lines[1], r" GiB *$")
        self.assertIn("most tokens/s:    1 node, micro-batch 1,", lines[5])
        self.assertIn("most tokens/s:    1 node, micro-batch 2,", self.succeed(*arguments, "2"))

    def test_images_are_no_tokens(self):
        arguments = ("sweep", "--model", "vit-b-16", "--cluster", "dgx-a100", "--micro-batch", "8,16")
        text = self.succeed(*arguments)
        self.assertEqual(text.splitlines()[0].split(), "nodes GPUs micro shard step time images/s/GPU MFU GPUh/1e9 exposed device misfit".split())
        self.assertNotIn("token", text)
        self.assertNotIn("sequence", text)
        self.assertRegex(text, r"\nfewest GPU-hours: 1 node, micro-batch \d+, shard 8\nmost images/s:    1 node, ")
        self.assertEqual(json.loads(self.succeed(*arguments, "--json"))["counts"], "images")
        self.assertEqual(json.loads(self.succeed("sweep", *JOB, "--json"))["counts"], "tokens")

    def test_csv_equals_json(self):
        arguments = ("sweep", *JOB, "--nodes", "2", "--shard", "3,8,16", "--bandwidth", "0.5,1")
        rows = json.loads(self.succeed(*arguments, "--csv", "sweep.csv", "--json"))["rows"]
        table = list(csv.DictReader(io.StringIO((self.folder / "sweep.csv").read_text())))
        self.assertEqual(len(table), 6)
        for row, line in zip(rows, table):
            if row["shard_size"] == 3:
                self.assertEqual(row["error"], "--shard: got 3, expected a divisor of the 16 ranks")
                self.assertEqual(line["reason"], row["error"])
            else:
                self.assertEqual(float(line["step_time_s"]), row["step_time_s"])
                self.assertEqual(line["fits"], "true")
        # With half of the network's bandwidth a step over two nodes takes longer.
        self.assertGreater(rows[4]["step_time_s"], rows[5]["step_time_s"])

    def test_meshes(self):
        job = ("--model", "llama-2-7b", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "512", "--global-batch", "32")
        arguments = ("sweep", *job, "--shard", "2,tp=1..2,pp=2")
        rows = json.loads(self.succeed(*arguments, "--json"))["rows"]
        self.assertEqual([row["mesh"] for row in rows], ["tp=1,pp=2", "tp=2,pp=2"])
        for row in rows:  # the plan's own prediction
            self.succeed("plan", *job, "--no-search", "--shard", "2," + row["mesh"], "-o", "m.json")
            told = json.loads(self.succeed("simulate", "m.json", "--json"))
            self.assertEqual(row["step_time_s"], told["step_time_s"])
        self.assertRegex(self.succeed(*arguments), r"most tokens/s: .*, shard 2, tp=\d,pp=2\n")
        self.assert_fails(2, '--shard: got "tp=2", expected each kind of ranks once', "sweep", *job, "--shard", "tp=2,tp=2..4")

    def test_what_does_not_fit(self):
        # 13.0e9 parameters x 16 bytes / 2 GPUs are 104 GB.
        code, out, err = self.run_program("sweep", "--model", "llama-2-13b", "--cluster", "dgx-a100", "--gpus", "2",
                                          "--micro-batch", "1,8")
        self.assertEqual((code, err), (1, ""))
        self.assertEqual(out.count("over by "), 2)
        self.assertIn("Nothing fits.", out)

    def test_errors(self):
        self.assert_fails(2, '--nodes: got "4..1", expected a range from the smaller to the larger number',
                          "sweep", *JOB, "--nodes", "4..1")
        self.assert_fails(3, '--bandwidth: got "nvlnk", expected a level of cluster dgx-a100: nvlink, pcie, network, '
                          'unit; did you mean "nvlink"?', "sweep", *JOB, "--bandwidth", "nvlnk:2")
        self.assert_fails(3, "--shard: got 3, expected a divisor of the 8 ranks", "sweep", *JOB, "--shard", "3")
        self.assert_fails(2, '--nodes: got "36,40", expected one number; several need --objective cost',
                          "plan", *JOB, "--nodes", "36,40", "--global-batch", "512")
        self.assert_fails(2, "--json and --csv - both want standard output", "sweep", *JOB, "--csv", "-", "--json")
        self.assert_fails(2, "the lists have more than 100000 combinations", "sweep", *JOB, "--nodes", "1..1000:1",
                          "--micro-batch", "1..1000:1")

    def test_examples_run(self):
        commands = examples(self.succeed("sweep", "--help"))
        self.assertEqual(len(commands), 3)
        for command in commands:
            self.assertEqual(self.run_program(*command)[0], 0, command)


class Stragglers(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        self.succeed("plan", *JOB, "--gpus", "4", "-o", "plan.json")

    def simulate(self, *flags):
        return json.loads(self.succeed("simulate", "plan.json", "--json", *flags))

    def test_distribution(self):
        plain = self.simulate()
        self.assertNotIn("step_distribution", plain)
        noisy = self.simulate("--jitter", "0.05", "--samples", "50", "--seed", "3")
        self.assertEqual(noisy["step_time_s"], plain["step_time_s"])
        steps = noisy["step_distribution"]
        self.assertEqual((steps["samples"], steps["followed_ranks"]), (50, 4))
        # The step of ranks that are all alike is the simulated one.
        self.assertAlmostEqual(steps["nominal_s"] / plain["step_time_s"], 1, places=5)
        self.assertLessEqual(steps["min_s"], steps["p50_s"])
        self.assertLessEqual(steps["p50_s"], steps["p90_s"])
        self.assertLessEqual(steps["p90_s"], steps["p99_s"])
        self.assertEqual(noisy, self.simulate("--jitter", "0.05", "--samples", "50", "--seed", "3"))
        self.assertNotEqual(noisy, self.simulate("--jitter", "0.05", "--samples", "50", "--seed", "4"))

    def test_slow_ranks_and_links(self):
        one = self.simulate("--slow-rank", "2:2", "--samples", "3")["step_distribution"]
        self.assertEqual(one["min_s"], one["max_s"])
        self.assertGreater(one["mean_s"], one["nominal_s"])
        # A rank that waits for the slow one waits longer than the slow one waits for anybody.
        self.assertGreater(one["waiting_s"], 0)
        fast = self.simulate()
        self.assertGreater(self.simulate("--slow-link", "nvlink:4")["exposed_comm_s"], fast["exposed_comm_s"])
        self.assertEqual(self.simulate("--slow-link", "network:4"), fast)  # one node has no use for it
        self.assertIn("p99", self.succeed("simulate", "plan.json", "--slow-rank", "0..1:1.5,3:2", "--samples", "2"))

    def test_errors(self):
        for code, flags, error in (
            (2, ("--jitter", "2"), '--jitter: got "2", expected a number in [0, 1], such as 0.02'),
            (2, ("--slow-rank", "3"),
             '--slow-rank: got "3", expected ranks and factors, such as 3:1.5 or 8..15:1.2'),
            (2, ("--slow-rank", "1:2,0..1:3"), '--slow-rank: got "1:2,0..1:3", expected every rank once'),
            (2, ("--slow-link", "network"),
             '--slow-link: got "network", expected a level and a factor, such as network:2'),
            (2, ("--samples", "3"), "--samples needs --jitter, --rank-jitter or --slow-rank"),
            (3, ("--slow-rank", "4:2"), "slow rank: got 4, expected a rank from 0 to 3"),
            (3, ("--slow-link", "infiniband:2"), '--slow-link: got "infiniband", expected a level of cluster dgx-a100: '
             'nvlink, pcie, network, unit'),
        ):
            self.assert_fails(code, error, "simulate", "plan.json", *flags)


class Baselines(ShardwrightTestCase):

    def test_each_is_a_plan(self):
        table = json.loads(self.succeed("baselines", *JOB, "--global-batch", "16", "--json"))["baselines"]
        rows = {row["name"]: row for row in table}
        self.assertEqual(list(rows), ["fsdp1-size", "fsdp1-transformer", "torchtitan", "accelerate", "zero3", "ddp"])
        # transformer.wte is tied to lm_head, which the size policy leaves to the root.
        self.assertIn("tied parameters", rows["fsdp1-size"]["reason"])
        ddp = rows["ddp"]
        self.succeed("plan", *JOB, "--dialect", "ddp", "--micro-batch", str(ddp["micro_batch"]), "--accumulation",
                     str(ddp["accumulation"]), "--recompute", ddp["recompute"], "-o", "ddp.json")
        alone = json.loads(self.succeed("simulate", "ddp.json", "--json"))
        self.assertEqual(ddp["step_time_s"], alone["step_time_s"])
        self.assert_fails(3, "global batch: got 12, expected a multiple of the 8 ranks",
                          "baselines", *JOB, "--global-batch", "12")


class Goodput(ShardwrightTestCase):

    def test_run(self):
        self.succeed("plan", *JOB, "--nodes", "4", "-o", "plan.json")
        flags = ("--tokens", "1e10", "--mtbf", "10000 h", "--checkpoint-time", "60 s")
        run = json.loads(self.succeed("goodput", "plan.json", *flags, "--json"))
        step = json.loads(self.succeed("simulate", "plan.json", "--json"))["step_time_s"]
        self.assertEqual(run["step_time_s"], step)
        self.assertEqual(run["steps"], -(-10**10 // (32 * 128)))  # ceil(tokens / tokens of a step)
        self.assertAlmostEqual(run["work_s"], run["steps"] * step)
        self.assertAlmostEqual(run["job_mtbf_s"], 10000 * 3600 / 4)
        self.assertAlmostEqual(run["expected_s"], run["work_s"] + run["checkpointing_s"] + run["lost_s"], places=3)
        # The best interval is best.
        for other in ("1 s", "10 min", "1 h", "3 h"):
            worse = json.loads(self.succeed("goodput", "plan.json", *flags, "--checkpoint-interval", other, "--json"))
            self.assertGreaterEqual(worse["expected_s"], run["expected_s"])
        self.assertIn("goodput", self.succeed("goodput", "plan.json", *flags, "--restart-time", "0 s"))

    def test_errors(self):
        self.succeed("plan", *JOB, "-o", "plan.json")
        needed = ("--tokens", "1e9", "--mtbf", "1 h", "--checkpoint-time")
        self.assert_fails(2, "--checkpoint-time is required; see shardwright goodput --help",
                          "goodput", "plan.json", *needed[:-1])
        self.assert_fails(2, '--checkpoint-time: got "5", expected a time in ms, s, min, h or days, such as "90 s"',
                          "goodput", "plan.json", *needed, "5")
        self.assert_fails(2, '--mtbf: got "0 s", expected a time above 0 in ms, s, min, h or days, such as "90 s"',
                          "goodput", "plan.json", "--tokens", "1", "--mtbf", "0 s", "--checkpoint-time", "1 s")
        self.assert_fails(3, "--mtbf: got 1 ms, expected nodes that run long enough for a checkpoint to be reached",
                          "goodput", "plan.json", "--tokens", "1e9", "--mtbf", "1 ms", "--checkpoint-time", "1 s")


if __name__ == "__main__":
    main()
