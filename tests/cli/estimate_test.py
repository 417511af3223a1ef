"""The front door: one command, an answer in two lines."""

import json
import os
import re
import shlex
import unittest

from shardwright_test_case import TESTS, ShardwrightTestCase, main

SMALL = ("estimate", "gpt2", "4xA100-80", "--seq", "512")
NUMBER = r"[\d,.]+"


class Answers(ShardwrightTestCase):

    def test_text(self):
        text = self.succeed(*SMALL, "--tokens", "3e9")
        lines = text.splitlines()
        self.assertRegex(lines[0], r"^gpt2 on 4 x a100-80: fits with micro-batch \d+; (nothing|every block|\d+ of 12 blocks) "
                                   r"recomputed(, \d+)?( in part)?$")
        self.assertRegex(lines[1], rf"^{NUMBER} tokens/s per GPU \+- {NUMBER} %; 3e9 tokens take {NUMBER} (h|min|s|days), {NUMBER} "
                                   rf"GPU-hours$")
        self.assertEqual(lines[2], "")
        self.assertEqual([line.split()[0] for line in lines[3:]], ["memory", "step", "MFU", "sharding", "how", "AdamW", "next"])
        self.assertRegex(text, r"how sure  8 of 10 such runs are within [\d.]+ %; 16 runs on a100-80 are known, "
                               r"torch-eager on other GPUs only\n")

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

    def test_phases_of_grpo(self):
        flags = ("--mode", "grpo,completion=256,beta=0.1,updates=2,engine=0.5", "--seq", "512", "--global-batch", "64")
        report = json.loads(self.succeed("estimate", "gpt2", "4xA100-80", *flags, "--json"))
        phases = report["phases"]
        generating = phases["weights_s"] + phases["generation_s"] + phases["log_probabilities_s"]
        self.assertEqual((phases["generations_per_step"], phases["samples"]), (0.5, 16))
        self.assertAlmostEqual(report["step_time_s"], phases["learning_s"] + generating / 2, delta=1e-9)
        self.assertAlmostEqual(report["tokens_per_s_per_gpu"], 16 * 512 / report["step_time_s"], delta=1)
        off = (phases["generation_most_s"] - phases["generation_least_s"]) / 4
        self.assertGreater(report["band"] * report["step_time_s"], off)
        text = self.succeed("estimate", "gpt2", "4xA100-80", *flags)
        for row in ("generation", "engine", "weights to engine", "log-probabilities", "learning", "generations per step"):
            self.assertIn(f"\n  {row} ", text)
        # The plan has the program of the last two; simulate tells them all.
        words = shlex.split(report["next"])[1:]
        self.succeed(*words)
        simulated = json.loads(self.succeed("simulate", "plan.json", "--json"))["phases"]
        self.assertEqual(simulated["generation_s"], phases["generation_s"])
        self.assertIn("A step with its generation: ", self.succeed("simulate", "plan.json"))
        told = json.loads(self.succeed("estimate", "gpt2", "4xA100-80", "--mode", "grpo,engine=apart,seconds=7", "--global-batch", "64", "--json"))
        self.assertEqual((told["phases"]["generation_s"], told["phases"]["engine_bytes"]), (7, 0))
        self.assertIn(" %, without its generation; ", self.succeed("estimate", "gpt2", "4xA100-80", "--mode", "grpo,engine=apart", "--global-batch", "64"))
        for words in ("sft", "dpo,sleep", "grpo,groups=8", "grpo,engine=1", "grpo,completion"):
            code, _, err = self.run_program("estimate", "gpt2", "4xA100-80", "--mode", words)
            self.assertEqual((code, err.startswith("error: --mode")), (2, True), err)

    def test_a_global_batch_is_kept(self):
        report = json.loads(self.succeed(*SMALL, "--global-batch", "48", "--json"))
        self.assertEqual(report["micro_batch"] * report["accumulation"] * 4, 48)

    def test_lora_has_targets_and_a_bf16_base(self):
        report = json.loads(self.succeed("estimate", "llama-3.2-1b", "1xRTX-4090", "--lora-rank", "8", "--seq", "512", "--json"))
        self.assertEqual(report["assumed"], ["precision: bf16, weights and adapters; --precision",
                                             "adapters: on q_proj,v_proj; --lora-targets"])
        self.assertIn("--precision bf16 --lora-targets q_proj,v_proj", report["next"])
        # No run of an RTX 4090 is behind the profile, and the band says so; where nothing of the chip is known, much more.
        bands = json.loads((TESTS.parent / "analysis/bands.json").read_text())["kinds"]
        self.assertAlmostEqual(report["band"], bands["half rate"]["half_width"], delta=0.001)
        unknown = json.loads(self.succeed("estimate", "llama-3.2-1b", "mi250x x1", "--seq", "512", "--json"))
        self.assertGreater(unknown["band"], 0.9)
        self.assertEqual(report["confidence"], "no run of torch-eager on rtx-4090 is known")
        gpt2 = json.loads(self.succeed("estimate", "gpt2", "1xA100-80", "--lora-rank", "8", "--seq", "512", "--json"))
        self.assertIn("adapters: on c_attn; --lora-targets", gpt2["assumed"])

    def test_a_card_of_the_users_own_is_no_known_chip(self):
        """Also where it bears the architecture, and the name, of one whose runs are known."""
        page = (TESTS.parent / "docs/questions.md").read_text()
        box = json.loads(page.split("```json my-box.json\n")[1].split("```")[0])
        chip = json.loads((TESTS.parent / "analysis/bands.json").read_text())["kinds"]["chip"]["half_width"]
        for name in ("gpu-next", "h100-80"):
            box["gpu"]["name"] = name
            (self.folder / "box.json").write_text(json.dumps(box))
            report = json.loads(self.succeed("estimate", "gpt2", "box.json", "--seq", "512", "--json"))
            self.assertGreaterEqual(report["band"], chip)
            self.assertIn(f"no run of torch-eager on your own {name} is known", report["confidence"])

    def test_a_sliding_window_is_told(self):
        """Of Gemma 3's 48 layers every sixth sees all tokens (its config.json); of a sample as short as the window nothing is said."""
        for length, is_told in ((2048, True), (1024, False)):
            out = self.run_program("estimate", "gemma-3-12b", "8xH100", "--seq", str(length))[1]
            self.assertEqual("attention  sliding window of 1,024 tokens in 40 of 48 layers\n" in out, is_told)
            self.assertEqual("sliding" in out, is_told)

    def test_gpus_without_bf16(self):
        """They multiply fp16, at several times the rate of fp32; who asks for bf16 is told."""
        report = json.loads(self.succeed("estimate", "gpt2", "4xT4", "--seq", "512", "--json"))
        self.assertEqual(report["assumed"], ["precision: fp16-mixed, since t4 multiplies no bf16; --precision"])
        lora = json.loads(self.succeed("estimate", "gpt2", "Tesla T4", "--seq", "512", "--lora-rank", "8", "--json"))
        self.assertEqual(lora["assumed"][0], "precision: fp16, weights and adapters, since t4 multiplies no bf16; --precision")
        self.assertIn(" --precision fp16", self.succeed("estimate", "gpt2", "Tesla T4", "--seq", "512", "--lora-rank", "8"))
        code, out, err = self.run_program("estimate", "gpt2", "4xT4", "--seq", "512", "--precision", "bf16-mixed", "--json")
        self.assertEqual((code, err), (0, "warning: t4 has no matrix units for the compute dtype; fp32 rates are used\n"))
        self.assertGreater(report["tokens_per_s_per_gpu"], 2 * json.loads(out)["tokens_per_s_per_gpu"])
        self.succeed("plan", "--model", "gpt2", "--cluster", "4xT4", "--seq", "512", "--no-search", "-o", "p.json")
        self.assertEqual(json.loads((self.folder / "p.json").read_text())["job"]["precision"],
                         {"master": "fp32", "param": "fp16", "reduce": "fp32"})

    def test_more_gpus_than_a_node_has(self):
        report = json.loads(self.succeed("estimate", "gpt2", "64xH100", "--seq", "512", "--json"))
        self.assertEqual(report["assumed"], ['network: 400 Gbit/s per GPU; a cluster such as "64xH100, nic 8x400 Gbit/s" says it'])
        self.assertEqual((report["ranks"], report["nodes"]), (64, 8))
        self.assertIn(" 64 x h100-80, 8 nodes: fits", self.succeed("estimate", "gpt2", "64xH100", "--seq", "512"))

    def test_a_model_by_its_name_on_the_hub(self):
        code, out, err = self.run_program("estimate", "Qwen/Qwen3-0.6B", "8xH100", "--seq", "512", "--json")
        self.assertEqual((code, err), (0, "warning: model Qwen/Qwen3-0.6B is taken as qwen3-0.6b of the zoo\n"))
        self.assertEqual(json.loads(out), json.loads(self.succeed("estimate", "qwen3-0.6b", "8xH100", "--seq", "512", "--json"))
                         | {"next": json.loads(out)["next"]})

    def test_the_form_of_adamw(self):
        """PyTorch's loop over lists holds a second copy of the 4 bytes of each of a rank's parameters; the fused kernel does not."""
        rows = [json.loads(self.succeed("estimate", "qwen3-32b", "8xH100", "--json", *more)) for more in ((), ("--optimizer", "adamw:fused"))]
        self.assertIn(" on the host", self.succeed("estimate", "qwen3-32b", "8xH100").splitlines()[0])
        self.assertRegex(rows[0]["optimizer"], r"^foreach, as torch\.optim has it \(--optimizer\); adamw:fused takes less memory: [\d,]+ tokens/s, "
                                               r".*; nothing on the host$")
        self.assertEqual(rows[1]["optimizer"], "")
        # What offloads is named and not chosen within its band.
        self.assertGreater(rows[1]["offload_tokens_per_s_per_gpu"], rows[1]["tokens_per_s_per_gpu"])
        self.assertNotIn(" on the host", self.succeed("estimate", "qwen3-32b", "8xH100", "--optimizer", "adamw:fused").splitlines()[0])

    def test_no_offloading_is_no_other_question_where_nothing_is_offloaded(self):
        words = ("estimate", "qwen3-32b", "8xH100", "--memory-margin", "0", "--json")
        free, fixed = (json.loads(self.succeed(*words, *more)) for more in ((), ("--offload", "none")))
        self.assertEqual({**free, "next": "", "optimizer": ""}, {**fixed, "next": "", "optimizer": ""})

    def test_the_experts_of_a_mixture(self):
        words = ("mixtral-8x7b", "dgx-h100", "--nodes", "8")
        report = json.loads(self.succeed("estimate", *words, "--json"))
        self.assertRegex(report["experts"], r"^[\d,]+ tokens/s per GPU where 8 ranks share them out; plan --search --shard 64,ep=any finds how many$")
        self.assertEqual(json.loads(self.succeed(*SMALL, "--json"))["experts"], "")

    def test_a_network_that_nobody_names(self):
        two = json.loads(self.succeed("estimate", "gpt2", "2x8 H100", "--seq", "512", "--json"))
        self.assertEqual((two["nodes"], two["ranks"]), (2, 16))
        self.assertEqual(two["assumed"], ['network: 400 Gbit/s per GPU; a cluster such as "2x8 H100, nic 8x400 Gbit/s" says it'])
        named = json.loads(self.succeed("estimate", "gpt2", "2x8 H100, nic 8x400 Gbit/s", "--seq", "512", "--json"))
        self.assertEqual(named["assumed"], [])
        self.assertEqual(named["step_time_s"], two["step_time_s"])

    def test_what_to_change(self):
        # fp32 weights, gradients and Adam's states of 8.03e9 parameters are 16 bytes each: 128.5 GB, of 128 GB on the host, and blocks
        # are page-locked in powers of two.
        code, out, err = self.run_program("estimate", "llama-3-8b", "rtx-4090-1x", "--seq", "2048")
        self.assertEqual((code, err), (1, ""))
        lines = out.splitlines()
        self.assertRegex(lines[0], rf"^llama-3-8b on 1 x rtx-4090-1x \(1 x rtx-4090\): does not fit, {NUMBER} GiB too much of the "
                                   r"nodes' host memory even with the least memory found$")
        self.assertEqual(lines[1], "It fits with --precision bf16, or --lora-rank 16")
        for change in (("--precision", "bf16"), ("--lora-rank", "16")):
            self.succeed("estimate", "llama-3-8b", "rtx-4090-1x", "--seq", "2048", *change)

    def test_host_memory_that_nobody_names(self):
        report = json.loads(self.succeed("estimate", "llama-3-8b", "2x4090", "--seq", "2048", "--json"))
        self.assertEqual(report["assumed"], ["host memory per node: 128 GiB (twice its GPUs', at least 64 GiB each); a cluster such as "
                                             '"..., host 1 TiB" says it'])
        self.assertIn("--cluster '2x4090, host 128 GiB'", report["next"])
        # 16 bytes of each of 405.9e9 parameters are 5.9 TiB, and twice 8 x 80 GiB are 1.25 TiB. PyTorch pins the gradients' and
        # states' blocks in powers of two, which is more.
        code, out, _ = self.run_program("estimate", "llama-3.1-405b", "8xH100")
        self.assertEqual(code, 1)
        self.assertIn("5.21 TiB too much of the nodes' host memory", out.splitlines()[0])
        self.assertIn("host memory per node: 1.25 TiB (twice its GPUs', at least 64 GiB each)", out)
        change = re.match(r"It fits with (--nodes 8 --global-batch 64), ", out.splitlines()[1])[1]
        self.succeed("estimate", "llama-3.1-405b", "8xH100", *change.split())
        # What needs none does not hear of it.
        usual = json.loads(self.succeed("estimate", "llama-3-8b", "8xH100", "--json"))
        self.assertEqual(usual["assumed"], [])
        self.assertIn("--cluster 8xH100 ", usual["next"])

    def test_plans_that_only_the_allocator_refuses(self):
        # The fastest plans with micro-batch 2 fit, but not in the allocator's pieces; slower ones take less.
        one, two, free = (json.loads(self.succeed("estimate", "llama-3-70b", "8xH100", "--json", *batch))
                          for batch in (("--global-batch", "8"), ("--global-batch", "16"), ()))
        self.assertLess(1.5 * one["tokens_per_s_per_gpu"], two["tokens_per_s_per_gpu"])
        self.assertLess(2 * two["tokens_per_s_per_gpu"], free["tokens_per_s_per_gpu"])

    def test_experts_that_more_gpus_do_not_divide(self):
        # 140.6e9 parameters take 16 bytes each, 2.05 TiB; the 8 experts of a layer are no smaller on 16 GPUs.
        for nodes in (1, 2):
            code, out, err = self.run_program("estimate", "mixtral-8x22b", "8xH100", "--nodes", str(nodes))
            self.assertEqual((code, "--nodes" in out), (1, False))
            self.assertIn(f"warning: fully_shard cuts the 8 experts of a layer, one tensor, over {nodes * 16} ranks: ", err)

    def test_a_run_of_years(self):
        text = self.succeed("estimate", "gpt2", "8xA100-80", "--seq", "512", "--tokens", "1e15")
        hours = int(re.search(r"([\d,]+) GPU-hours", text)[1].replace(",", "")) / 8
        self.assertAlmostEqual(float(re.search(r"take ([\d.]+) years", text)[1]), hours / 24 / 365.25, delta=0.01 * hours / 24 / 365.25)

    def test_a_loss_in_chunks(self):
        # Logits of 131,072 tokens are 31 GiB in bf16, and those in fp32 and their gradient twice as much each.
        job = ("estimate", "llama-3.1-8b", "8xH100", "--seq", "131072")
        code, out, err = self.run_program(*job)
        self.assertEqual((code, err, out.splitlines()[1]), (1, "", "It fits with --loss-chunks 16"))
        self.assertIn(" --loss-chunks 16 ", json.loads(self.succeed(*job, "--loss-chunks", "16", "--json"))["next"])
        self.assertEqual(self.run_program("estimate", "gemma-2-9b", "8xH100", "--loss-chunks", "4"),
                         (2, "", "error: --loss-chunks: gemma-2-9b has no linear layer right before a cross-entropy\n"))

    def test_no_plan_on_the_edge(self):
        # With micro-batch 2 the best plan fits only by retries of the allocator.
        report = json.loads(self.succeed("estimate", "llama-3-70b", "4xA100-80", "--lora-rank", "16", "--seq", "2048", "--json"))
        self.assertEqual(report["allocator_retries_per_step"], 0)

    def test_a_deadline(self):
        job = ("estimate", "gpt2", "8xA100-80", "--seq", "512", "--tokens", "1e12")
        times, slow = {}, {}
        for nodes in (1, 2, 3, 4, 5):
            one = json.loads(self.succeed(*job, "--nodes", str(nodes), "--json"))
            times[nodes], slow[nodes] = one["total_s"], one["total_s"] * (1 + one["band"])
        # Three nodes end in time by the middle of the band, but late by its slow end.
        deadline = (max(times[3], slow[4]) + slow[3]) / 2
        asked = (*job, "--deadline", f"{deadline:.0f} s")
        report = json.loads(self.succeed(*asked, "--json"))
        self.assertEqual((report["nodes"], report["fewer_nodes"]), (4, 3))
        self.assertEqual(report["total_s"], times[4])
        self.assertAlmostEqual(report["fewer_total_s"], slow[3], delta=1e-9 * slow[3])
        self.assertAlmostEqual(report["deadline_s"], deadline, delta=0.5)
        self.assertIn(" --nodes 4 ", report["next"])
        self.assertRegex(self.succeed(*asked), rf"\n  deadline  {NUMBER} (days|h), by the slow end of the band and without failures \(goodput\); 3 nodes")
        # Only numbers that divide the batch: not 5.
        job = (*job, "--global-batch", "3072")
        one = json.loads(self.succeed(*job, "--nodes", "4", "--json"))
        four = one["total_s"] * (1 + one["band"])
        batch = json.loads(self.succeed(*job, "--deadline", f"{0.99 * four:.0f} s", "--json"))
        self.assertEqual((batch["global_batch"], batch["nodes"], batch["fewer_nodes"]), (3072, 6, 4))

    @unittest.skipUnless("SHARDWRIGHT_DEEP" in os.environ, "deep: docs/questions.md asks two of them")
    def test_solve(self):
        """The value found fits without retries and the next one of its grid does not, as asked for each by itself."""
        def fits(*job):
            for batch in ((), () if "--micro-batch" in job else ("--micro-batch", "1")):
                code, out, err = self.run_program(*job, *batch, "--json")
                self.assertIn(code, (0, 1), err)
                report = json.loads(out)
                if report["fits"] and report["allocator_retries_per_step"] == 0:
                    return True
            return False

        for asked, job, words in (("seq", ("llama-3.2-1b", "4090"), "longest sequence that fits"),
                                  ("micro-batch", ("gpt2", "2x4090", "--kernel-set", "torchtune@2025"), "largest micro-batch that fits")):
            _, out, err = self.run_program("estimate", *job, "--solve", asked, "--json")
            self.assertEqual(err.count("note: "), job.count("--kernel-set"))  # not for each that was tried
            solved = json.loads(out)["solved"]
            self.assertTrue(solved.startswith(words + ": "), solved)
            found, beyond = (int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d(?= does not|;)", solved))
            self.assertTrue(found < beyond <= found * 1.126, solved)
            self.assertTrue(fits("estimate", *job, f"--{asked}", str(found)))
            self.assertFalse(fits("estimate", *job, f"--{asked}", str(beyond)))
        # 3.2e9 parameters take 16 bytes each: they fit 24 GB only on the host, and that is said.
        solved = json.loads(self.succeed("estimate", "llama-3.2-3b", "4090", "--solve", "seq", "--json"))["solved"]
        self.assertTrue(solved.endswith("; with nothing on the host: none (--offload none)"), solved)
        # Nodes of one GPU: each number asked for by itself.
        job = ("estimate", "llama-3-8b", "1xA100-40", "--offload", "none")
        fewest = next(nodes for nodes in range(1, 20) if fits(*job, "--nodes", str(nodes)))
        self.assertGreater(fewest * 38, 8.03e9 * 16 / 2**30)  # parameters, gradients and two moments in fp32
        solved = json.loads(self.succeed(*job, "--solve", "gpus", "--json"))
        self.assertEqual(solved["allocator_retries_per_step"], 0)
        self.assertEqual((solved["ranks"], solved["solved"].split(" (")[0]),
                         (fewest, f"fewest GPUs that hold the job: {fewest}; {fewest - 1} do not, or only with retries of the allocator"))
        # Part of a node: the command that searches on says so, and runs.
        solved = json.loads(self.succeed("estimate", "gpt2", "8xH100", "--solve", "gpus", "--json"))
        self.assertEqual((solved["ranks"], solved["solved"].split(" (")[0]), (1, "fewest GPUs that hold the job: 1"))
        self.assertIn(" --gpus 1 ", solved["next"])
        self.succeed("plan", "--no-search", *solved["next"].split()[2:])
        self.assertEqual(self.run_program("estimate", "gpt2", "8xH100", "--solve", "seq", "--seq", "512"),
                         (2, "", "error: --solve seq and --seq cannot both be given\n"))

    def test_a_deadline_that_nothing_meets(self):
        job = ("estimate", "gpt2", "8xA100-80", "--seq", "512", "--tokens", "1e15", "--global-batch", "16")
        code, out, _ = self.run_program(*job, "--deadline", "1 s")
        self.assertEqual(code, 1)
        self.assertRegex(out, rf"^No number of nodes up to 2 ends 1e15 tokens in 1 s: the fastest, 2, takes {NUMBER} years\n$")
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
