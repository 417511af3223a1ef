"""The words that people type: flags and values of other programs have a way on, and commands take the same words."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

SYNONYMS = pathlib.Path(__file__).resolve().parent.parent.parent / "cli" / "synonyms.json"
PLAN = ("plan", "--model", "gpt2", "--cluster", "dgx-a100")
ESTIMATE = ("estimate", "gpt2", "4xA100-80", "--seq", "512")


class Words(ShardwrightTestCase):

    def fails(self, *arguments):
        code, out, err = self.run_program(*arguments)
        self.assertEqual((code, out, err.count("\n")), (2, "", 1), (arguments, err))
        return err

    def test_every_synonym_is_told(self):
        """Each flag and value of the table, in a command that takes such a job: the answer is what the table says."""
        table = json.loads(SYNONYMS.read_text())
        known = {row["name"] for command in json.loads(self.succeed("--help", "--json"))["commands"] if command["name"] == "plan"
                 for row in command["flags"]}
        told = 0
        for row in (row for row in table["flags"] if "say" in row):
            for word in row["words"].split():
                if word not in known:
                    self.assertIn(row["say"], self.fails(*PLAN, word, "4"))
                    told += 1
        self.assertGreater(told, 100)
        for row in table["values"]:
            self.assertIn(row["flag"], known)
            if "means" in row:
                continue
            for word in row["words"].split():
                self.assertIn(f'{row["flag"]}: got "{word}"; {row["say"]}', self.fails(*PLAN, row["flag"], word))

    def test_words_with_a_meaning(self):
        """They stand for flags and values of ours; what is said of one of those counts more."""
        def job(*words):
            code, out, err = self.run_program("plan", "--model", "llama-3.2-1b", "--cluster", "1xRTX-4090", "--seq", "512", *words, "-o", "-")
            self.assertEqual((code, "".join(line for line in err.splitlines(keepends=True) if not line.startswith("note: adapters on "))), (0, ""))
            return json.loads(out)["job"]
        long = ("--lora-rank", "16", "--lora-targets", "all-linear", "--precision", "nf4_double")
        self.assertEqual(job("--qlora"), job(*long))
        self.assertEqual(job("--qlora", "--lora-rank", "8")["lora_rank"], 8)
        self.assertEqual(job("--qlora")["frozen_format"], "nf4_double")
        both = job("--qlora", "--precision", "bf16")  # of what is computed: the base stays in 4 bits
        self.assertEqual((both["frozen_format"], both["precision"]["master"]), ("nf4_double", "bf16"))
        self.assertEqual(job("--qlora", "--precision", "nf4")["frozen_format"], "nf4")
        self.assertIn('--precision: got "fp8+nf4_double"', self.fails(*PLAN, "--qlora", "--precision", "fp8"))  # no base in silence
        self.assertEqual(job("--lora")["lora_targets"], ["q_proj", "v_proj"])
        self.assertEqual(job("--optimizer", "adamw8bit")["optimizer"]["states"], "bnb_8bit")
        self.assertEqual(job("--qlora", "--lora-targets", "all")["lora_targets"],
                         ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])

    def test_no_value_of_ours_is_a_synonym(self):
        """What a flag takes must not be refused by the table."""
        for flag, values in (("--optimizer", "sgd momentum adam adamw adadelta"), ("--recompute", "none full selective"),
                             ("--precision", "bf16-mixed fp16-mixed fp32 bf16 fp16 fp8"), ("--offload", "none parameters"),
                             ("--attention", "flash materialized cudnn"), ("--dialect", "fsdp2 fsdp1 ddp zero1 zero2 zero3 native")):
            for value in values.split():
                code, _, err = self.run_program(*PLAN, flag, value)
                self.assertNotIn(f'got "{value}";', err)

    def test_underscores(self):
        self.assertIn("--micro-batch N", self.fails(*ESTIMATE, "--per_device_train_batch_size", "4"))

    def test_thousands(self):
        self.assertIn("did you mean 32768?", self.fails(*PLAN, "--seq", "32k"))

    def test_gpus_of_several_nodes(self):
        self.assert_fails(3, "cluster dgx-a100: got 16 GPUs of each node, expected 1 to 8; so many GPUs are --nodes 2", *PLAN, "--gpus", "16")

    def test_a_model_for_a_plan(self):
        for command in (("simulate",), ("report",), ("emit", "--to", "fsdp2")):
            self.assertIn('"llama-3-8b" is a model, and a plan is needed: shardwright plan --model llama-3-8b --cluster',
                          self.fails(command[0], "llama-3-8b", *command[1:]))

    def test_help(self):
        self.assertEqual(self.succeed("help", "estimate"), self.succeed("estimate", "--help"))
        self.assertEqual(self.succeed(), self.succeed("--help"))
        self.assertEqual(self.succeed("help"), self.succeed("--help"))

    def test_lora_targets(self):
        """PEFT adapts c_attn of GPT-2: plan takes what estimate takes, and says so."""
        code, out, err = self.run_program(*PLAN, "--lora-rank", "8")
        self.assertEqual((code, err), (0, "note: adapters on c_attn; --lora-targets\n"))
        self.assertEqual(json.loads(out)["job"]["lora_targets"], ["c_attn"])

    def test_estimate_takes_choices(self):
        answer = json.loads(self.succeed(*ESTIMATE, "--micro-batch", "2", "--offload", "none", "--attention", "materialized", "--price", "2.5",
                                         "--json"))
        self.assertEqual(answer["micro_batch"], 2)
        self.assertAlmostEqual(answer["cost"], 2.5 * answer["gpu_hours"], delta=1e-9 * answer["cost"])
        text = self.succeed(*ESTIMATE, "--micro-batch", "2", "--price", "2.5")
        self.assertRegex(text, r"GPU-hours, [\d.,]+ at 2.5 per GPU-hour\n")
        self.assertRegex(text, r"next .* --micro-batch 2 --search --global-batch 8 -o plan.json")
        offloaded = self.succeed(*ESTIMATE, "--offload", "parameters")
        self.assertIn("parameters", offloaded.splitlines()[0])

    def test_a_gpu_of_several_sizes_is_said(self):
        code, _, err = self.run_program("estimate", "gpt2", "2xA100", "--seq", "512")
        self.assertEqual((code, err), (0, "note: GPU: a100-80 of a100-80, a100-40, a100-pcie-80, a100-pcie-40, which it may be; "
                                       "--cluster names it\n"))


if __name__ == "__main__":
    shardwright_test_case.main()
