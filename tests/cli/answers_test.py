"""Answers of a search that a user can run and believe: their target, their memory, and Ctrl-C."""

import json
import pathlib
import signal
import subprocess
import time
import unittest

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

JOB = ("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "4", "--seq", "256", "--global-batch", "8")
# With native half a minute on any machine of today.
LONG = ("plan", "--model", "deepseek-v3", "--cluster", "dgx-h100", "--nodes", "512", "--seq", "4096", "--global-batch", "1048576",
        "--threads", "1")


class Targets(ShardwrightTestCase):

    def test_who_asks_for_nothing_gets_a_plan_for_pytorch(self):
        report = json.loads(self.succeed(*JOB, "--json", "-o", "p.json"))
        self.assertEqual(report["dialect"], "fsdp2")
        self.assertEqual(json.loads((self.folder / "p.json").read_text())["plan"]["dialect"], "fsdp2")
        # What our own schedule would gain with the same choices, by its own simulation.
        plan = json.loads((self.folder / "p.json").read_text())
        plan["plan"]["dialect"] = "native"
        for unit in plan["plan"]["units"]:
            unit["forward_prefetch"] = unit["backward_prefetch"] = []
        times = []
        for in_flight in (2, 4):
            plan["plan"]["in_flight"] = in_flight
            (self.folder / "n.json").write_text(json.dumps(plan))
            times.append(json.loads(self.succeed("simulate", "n.json", "--json"))["step_time_s"])
        self.assertAlmostEqual(report["native_step_time_s"], min(times), places=9)
        self.assertIn("under Shardwright's own schedule", self.succeed(*JOB, "-o", "p.json"))
        asked = json.loads(self.succeed(*JOB, "--dialect", "fsdp2", "--json"))
        self.assertNotIn("native_step_time_s", asked)

    def test_the_best_of_several_dialects(self):
        each = {d: json.loads(self.succeed(*JOB, "--dialect", d, "--json"))["step_time_s"] for d in ("ddp", "fsdp2")}
        both = json.loads(self.succeed(*JOB, "--dialect", "ddp,fsdp2", "--json"))
        self.assertEqual({row["dialect"]: row["step_time_s"] for row in both["dialects"]}, each)
        self.assertEqual(both["step_time_s"], min(each.values()))
        self.assertEqual(both["dialect"], min(each, key=each.get))
        text = self.succeed(*JOB, "--dialect", "ddp,fsdp2", "-o", "p.json")
        self.assertRegex(text.splitlines()[1], rf"^{both['dialect']} is best: [\d.]+ \w+; \w+ [\d.]+ \w+, [\d.]+ % slower$")
        self.assertEqual(json.loads((self.folder / "p.json").read_text())["plan"]["dialect"], both["dialect"])
        code, out, err = self.run_program(*JOB, "--dialect", "ddp,fsdp2", "--micro-batch", "1", "-o", "p.json")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("--dialect: a search compares several; add --search and --global-batch", err)

    # All but the adapters is frozen, and native reduced whole blocks: 1.62 s where DDP takes 1.36 s. With the modules that
    # learn in units of their own it reduces 2.1 GB, not 12.6 GB; DDP reduces the adapters alone, but is another dialect.
    def test_adapters_on_a_slow_network(self):
        job = ("plan", "--model", "llama-2-7b", "--cluster", "l40s x4, nic 2x100 Gbit/s, nodes 6", "--seq", "2048", "--lora-rank", "16",
               "--lora-targets", "q_proj,v_proj", "--precision", "bf16", "--global-batch", "96", "--json")
        native = json.loads(self.succeed(*job, "--dialect", "native", "-o", "p.json"))
        baselines = {row["name"]: row for row in native["baselines"] if row["fits"]}
        self.assertLess(native["step_time_s"], 1.12 * baselines["ddp"]["step_time_s"])
        both = json.loads(self.succeed(*job, "--dialect", "native,ddp", "-o", "p.json"))
        for name, row in baselines.items():
            self.assertLessEqual(both["step_time_s"], row["step_time_s"], name)

    def test_emit_says_no_where_it_does_not_fit_as_emitted(self):
        job = ("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "1", "--seq", "1024", "--micro-batch", "16",
               "--dialect", "native", "--offload")
        needs = []
        for offload in ("activations", "none"):
            self.succeed(*job, offload, "-o", "p.json")
            memory = json.loads(self.succeed("simulate", "p.json", "--json"))["memory"]
            needs.append(memory["peak_allocated_bytes"] + memory["outside_allocator_bytes"])
        self.assertLess(1.3 * needs[0], needs[1])
        margin = 1 - 1.15 * needs[0] / memory["usable_device_bytes"]
        self.succeed(*job, "activations", "--memory-margin", str(margin), "-o", "p.json")
        code, out, _ = self.run_program("emit", "p.json", "--to", "fsdp2", "-o", "run/")
        self.assertEqual(code, 1)
        self.assertIn("As emitted it does not fit", out)


class Inputs(ShardwrightTestCase):

    def test_the_nearest_batch_for_a_list_of_nodes(self):
        # Of 36, 40, 44 and 48 nodes of 8 GPUs: 1,056 = 3 x 352 is 32 from 1,024, 1,152 = 4 x 288 is 128 from it.
        self.assert_fails(3, "--nodes: none of them divides the global batch of 1024 over its GPUs; --global-batch 1056 "
                             "would do for 44 nodes", "plan", "--model", "gpt2", "--cluster", "dgx-h100", "--nodes",
                          "36,40,44,48", "--global-batch", "1024", "--objective", "cost", "--token-budget", "1e9")

    def test_threads_without_a_search_are_no_fault(self):
        self.succeed(*JOB, "--wrap", "block", "--threads", "2", "-o", "p.json")

    def test_nothing_left_to_train(self):
        self.assert_fails(3, "plan: frozen: got every parameter, expected some that are trained, or mode forward",
                          *JOB, "--frozen", "*")


class Memory(ShardwrightTestCase):

    def test_a_margin_for_the_error_of_the_prediction(self):
        report = json.loads(self.succeed(*JOB, "--json", "-o", "p.json"))
        self.assertGreater(report["memory_margin"], 0.02)
        self.assertLess(report["memory_margin"], 0.05)
        self.assertIn("for the error of this prediction", self.succeed(*JOB, "--explain", "-o", "p.json"))
        everything = json.loads(self.succeed(*JOB, "--mem-margin", "0", "--json"))
        self.assertEqual(everything["memory_margin"], 0)
        usable = json.loads(self.succeed("simulate", "p.json", "--json", ))["memory"]["usable_device_bytes"]
        self.assertAlmostEqual(everything["memory_limit_bytes"] * (1 - report["memory_margin"]), usable, delta=2)

    # What a table says a GPU must have is what `simulate` says of the plan.
    def test_one_definition_in_all_tables(self):
        report = json.loads(self.succeed(*JOB, "--json", "-o", "p.json"))
        memory = json.loads(self.succeed("simulate", "p.json", "--json"))["memory"]
        needs = memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"]
        self.assertEqual(report["memory_bytes"], needs)
        chosen = [row for row in report["pareto"] if row["step_time_s"] == report["step_time_s"]]
        self.assertIn(needs, [row["memory_bytes"] for row in chosen])
        for row in report["pareto"]:
            self.assertEqual(row["step_time_s"] < report["step_time_s"], "why_not" in row)


class Interrupts(ShardwrightTestCase):

    def start(self, *arguments):
        process = subprocess.Popen([shardwright_test_case.PROGRAM, *arguments], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, cwd=self.folder)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def test_ctrl_c_ends_a_search_within_a_second(self):
        for wait, times in ((0.3, 1), (2, 1), (1, 2)):
            with self.subTest(wait=wait, times=times):
                process = self.start(*LONG, "--dialect", "native", "-o", "p.json")
                time.sleep(wait)
                begin = time.monotonic()
                for _ in range(times):
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.05)
                out, err = process.communicate(timeout=30)
                self.assertLess(time.monotonic() - begin, 3)  # 1 s, and a busy machine
                self.assertNotIn("No plan fits", out)
                # Before the program has its handler the signal itself ends it.
                self.assertIn(process.returncode, (0, 130, -signal.SIGINT))
                if process.returncode == -signal.SIGINT:
                    self.assertEqual((out, err), ("", ""))
                elif process.returncode == 130:
                    self.assertEqual(out, "")
                    self.assertRegex(err.splitlines()[-1], "^interrupted")
                    self.assertFalse(pathlib.Path(self.folder, "p.json").exists())
                else:
                    self.assertIn("stopped early", out)

    def test_of_searches_that_had_not_begun_nothing_is_said(self):
        process = self.start(*LONG, "--dialect", "native,ddp", "--json", "-o", "p.json")
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        if process.returncode == 130:  # a busy machine: nothing was found yet
            self.assertEqual(out, "")
        else:
            self.assertEqual((process.returncode, [row["dialect"] for row in json.loads(out)["dialects"]]), (0, ["native"]), err)

    def test_a_long_search_says_that_it_lives(self):
        process = self.start(*LONG, "--dialect", "native", "-o", "p.json")
        self.assertRegex(process.stderr.readline(), r"^searching for 10 s: .+")


if __name__ == "__main__":
    main()
