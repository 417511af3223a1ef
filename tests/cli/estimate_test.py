"""The front door: one command, an answer in two lines."""

import json
import shlex

from shardwright_test_case import TESTS, ShardwrightTestCase, main

SMALL = ("estimate", "gpt2", "4xA100-80", "--seq", "512")
NUMBER = r"[\d,.]+"


class Answers(ShardwrightTestCase):

    def test_text(self):
        text = self.succeed(*SMALL, "--tokens", "3e9")
        lines = text.splitlines()
        self.assertRegex(lines[0], r"^gpt2 on 4 x a100-80: fits, with micro-batch \d+ with(out| every block| \d+ of 12 blocks|"
                                   r" parts of) ?\w*")
        self.assertRegex(lines[1], rf"^{NUMBER} tokens/s per GPU \+- {NUMBER} %; 3e9 tokens take {NUMBER} (h|min|s|days), {NUMBER} "
                                   rf"GPU-hours$")
        self.assertEqual(lines[2], "")
        self.assertEqual([line.split()[0] for line in lines[3:]], ["memory", "step", "MFU", "sharding", "profile", "next"])
        self.assertIn("a100-80-torch: fitted to 16 runs on this GPU, none with torch-eager; error on models left out 7 %", text)

    def test_no_line_is_wider_than_120_columns(self):
        for stack in ("torch-eager", "torch-compile-2024"):
            for gpu in ("A100-80", "H100", "H200"):
                text = self.succeed("estimate", "gpt2", "4x" + gpu, "--seq", "512", "--kernel-set", stack)
                self.assertEqual([line for line in text.splitlines() if len(line) > 120 and not line.startswith("  next")], [])

    def test_numbers_agree_with_each_other_and_with_plan(self):
        report = json.loads(self.succeed(*SMALL, "--json"))
        ranks = 4
        samples = report["micro_batch"] * report["accumulation"]
        self.assertEqual(report["global_batch"], ranks * samples)
        self.assertAlmostEqual(report["tokens_per_s_per_gpu"], samples * 512 / report["step_time_s"], delta=1e-6 * 1e9)
        self.assertAlmostEqual(report["total_s"], 1e9 / (ranks * report["tokens_per_s_per_gpu"]), delta=1e-3)
        self.assertAlmostEqual(report["gpu_hours"], report["total_s"] * ranks / 3600, delta=1e-6)
        self.assertLessEqual(report["memory_bytes"], report["memory_limit_bytes"])
        # The command that it names searches on from there.
        words = shlex.split(report["next"])
        self.assertEqual(words[:2], ["shardwright", "plan"])
        plan = json.loads(self.succeed(*words[1:], "--json"))
        self.assertEqual(plan["global_batch"], report["global_batch"])
        self.assertLessEqual(plan["step_time_s"], 1.02 * report["step_time_s"])
        simulated = json.loads(self.succeed("simulate", "plan.json", "--json"))
        self.assertEqual((simulated["confidence"], simulated["profile"]), (report["confidence"], report["profile"]))

    def test_the_readme_shows_what_is_printed(self):
        block = (TESTS.parent / "README.md").read_text().split("```text\n$ shardwright ", 1)[1].split("```", 1)[0]
        command, shown = block.split("\n", 1)
        self.assertEqual(self.succeed(*shlex.split(command)), shown)

    def test_a_global_batch_is_kept(self):
        report = json.loads(self.succeed(*SMALL, "--global-batch", "48", "--json"))
        self.assertEqual(report["micro_batch"] * report["accumulation"] * 4, 48)

    def test_lora_has_targets_and_a_bf16_base(self):
        report = json.loads(self.succeed("estimate", "llama-3.2-1b", "1xRTX-4090", "--lora-rank", "8", "--seq", "512", "--json"))
        self.assertEqual(report["assumed"], ["precision: bf16, weights and adapters; --precision",
                                             "adapters: on q_proj,v_proj; --lora-targets"])
        self.assertIn("--precision bf16 --lora-targets q_proj,v_proj", report["next"])
        # No run of an RTX 4090 is behind the profile, and the band says so.
        self.assertGreaterEqual(report["band"], 0.25)
        self.assertEqual(report["confidence"], "ada-torch-eager: no run of torch-eager on rtx-4090 is known")
        gpt2 = json.loads(self.succeed("estimate", "gpt2", "1xA100-80", "--lora-rank", "8", "--seq", "512", "--json"))
        self.assertIn("adapters: on c_attn; --lora-targets", gpt2["assumed"])

    def test_a_network_that_nobody_names(self):
        two = json.loads(self.succeed("estimate", "gpt2", "2x8 H100", "--seq", "512", "--json"))
        self.assertEqual((two["nodes"], two["ranks"]), (2, 16))
        self.assertEqual(two["assumed"], ['network: 400 Gbit/s per GPU; a cluster such as "2x8 H100, nic 8x400 Gbit/s" says it'])
        named = json.loads(self.succeed("estimate", "gpt2", "2x8 H100, nic 8x400 Gbit/s", "--seq", "512", "--json"))
        self.assertEqual(named["assumed"], [])
        self.assertEqual(named["step_time_s"], two["step_time_s"])

    def test_what_to_change(self):
        # fp32 weights, gradients and Adam's states of 8.03e9 parameters are 16 bytes each: 128.5 GB, of 128 GB on the host.
        code, out, err = self.run_program("estimate", "llama-3-8b", "rtx-4090-1x", "--seq", "2048")
        self.assertEqual((code, err), (1, ""))
        lines = out.splitlines()
        self.assertRegex(lines[0], rf"^llama-3-8b on 1 x rtx-4090-1x \(1 x rtx-4090\): does not fit, {NUMBER} MiB too much of the "
                                   r"nodes' host memory even with the least memory found$")
        self.assertEqual(lines[1], "It fits with --precision bf16, or --lora-rank 16")
        for change in (("--precision", "bf16"), ("--lora-rank", "16")):
            self.succeed("estimate", "llama-3-8b", "rtx-4090-1x", "--seq", "2048", *change)

    def test_host_memory_that_nobody_names(self):
        report = json.loads(self.succeed("estimate", "llama-3-8b", "1xRTX-4090", "--seq", "2048", "--json"))
        self.assertRegex(report["assumed"][0], rf'^host memory: the {NUMBER} GiB per node that this takes; a cluster such as "..., host '
                                               r'1 TiB" says it$')

    def test_no_plan_on_the_edge(self):
        # With micro-batch 2 the best plan fits only by retries of the allocator.
        report = json.loads(self.succeed("estimate", "llama-3-70b", "4xA100-80", "--lora-rank", "16", "--seq", "2048", "--json"))
        self.assertEqual(report["allocator_retries_per_step"], 0)

    def test_a_deadline(self):
        job = ("estimate", "gpt2", "8xA100-80", "--seq", "512", "--tokens", "1e12")
        times = {}
        for nodes in (1, 2, 3, 4, 5):
            times[nodes] = json.loads(self.succeed(*job, "--nodes", str(nodes), "--json"))["total_s"]
        deadline = (times[3] + times[4]) / 2  # three nodes are late, four are not
        asked = (*job, "--deadline", f"{deadline:.0f} s")
        report = json.loads(self.succeed(*asked, "--json"))
        self.assertEqual((report["nodes"], report["fewer_nodes"]), (4, 3))
        self.assertEqual((report["total_s"], report["fewer_total_s"]), (times[4], times[3]))
        self.assertAlmostEqual(report["deadline_s"], deadline, delta=0.5)
        self.assertIn(" --nodes 4 ", report["next"])
        self.assertRegex(self.succeed(*asked), rf"\n  deadline  {NUMBER} (days|h); 3 nodes take {NUMBER} (days|h)\n")
        # Only numbers that divide the batch: not 5.
        job = (*job, "--global-batch", "3072")
        four = json.loads(self.succeed(*job, "--nodes", "4", "--json"))["total_s"]
        batch = json.loads(self.succeed(*job, "--deadline", f"{0.99 * four:.0f} s", "--json"))
        self.assertEqual((batch["global_batch"], batch["nodes"], batch["fewer_nodes"]), (3072, 6, 4))

    def test_a_deadline_that_nothing_meets(self):
        job = ("estimate", "gpt2", "8xA100-80", "--seq", "512", "--tokens", "1e15", "--global-batch", "16")
        code, out, _ = self.run_program(*job, "--deadline", "1 s")
        self.assertEqual(code, 1)
        self.assertRegex(out, rf"^No number of nodes up to 2 ends 1e15 tokens in 1 s: the fastest, 2, takes {NUMBER}(e\+\d+)? days\n$")
        code, out, _ = self.run_program(*job, "--deadline", "1 s", "--json")
        report = json.loads(out)
        self.assertEqual((code, report["fits"], report["nodes"], report["deadline_s"]), (1, True, 2, 1.0))
        code, out, err = self.run_program(*job, "--deadline", "1 s", "--nodes", "2")
        self.assertEqual((code, out), (2, ""))
        self.assertIn("--deadline asks how many nodes are needed, and --nodes says how many", err)

    def test_errors(self):
        for error, arguments in (
                ("estimate needs a model, such as llama-3-8b", ()),
                ("estimate needs a cluster, such as 8xH100", ("gpt2",)),
                ('--tokens: got "0", expected a whole number from 1 to 1e15, such as 5e8', ("gpt2", "8xH100", "--tokens", "0"))):
            code, out, err = self.run_program("estimate", *arguments)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(error, err)
        self.assert_fails(3, '--global-batch: got 7, expected a multiple of 4 ranks x micro-batch 1', *SMALL, "--global-batch", "7")
        code, _, err = self.run_program("estimate", "gpt2", "8xH1000")
        self.assertEqual(code, 3)
        self.assertRegex(err, r'^error: cluster: got "8xH1000", expected a name from')
        code, _, err = self.run_program("estimate", "gpt-3", "8xH100")
        self.assertEqual(code, 3)
        self.assertRegex(err, r'^error: .*got "gpt-3", expected')


if __name__ == "__main__":
    main()
