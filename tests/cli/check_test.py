"""The gate of a repository's CI: what is over a limit or more than at the last record is found, and its cause named."""

import json
import os
import random

from shardwright_test_case import ShardwrightTestCase, main

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
          "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
FLAGS = {"--model": "./config.json", "--cluster": "dgx-h100", "--seq": "512", "--micro-batch": "8", "--recompute": "full"}
DEEP = "SHARDWRIGHT_DEEP" in os.environ

# What raises memory, and the section of the plan file that did it.
GROWTHS = (
    (lambda draw, config, flags: config.update(hidden_size=512 + 64 * draw.randint(4, 12)), "model.json.hidden_size: 512 -> "),
    (lambda draw, config, flags: config.update(num_hidden_layers=4 + draw.randint(4, 20)), "model.json.num_hidden_layers: 4 -> "),
    (lambda draw, config, flags: config.update(vocab_size=1000 * draw.randint(8, 60)), "model.json.vocab_size: 1000 -> "),
    (lambda draw, config, flags: config.update(intermediate_size=1024 * draw.randint(4, 12)), "model.json.intermediate_size: 1024 -> "),
    (lambda draw, config, flags: flags.pop("--recompute"), "plan.recompute[model.layers.0]."),
    (lambda draw, config, flags: flags.update({"--seq": str(512 * draw.randint(2, 8))}), "job.sequence_length: 512 -> "),
    (lambda draw, config, flags: flags.update({"--precision": "fp32"}), "job.precision."),
)
# What changes no figure.
NEUTRAL = (
    lambda draw, config, flags: config.update(rms_norm_eps=draw.choice([1e-6, 2e-5])),
    lambda draw, config, flags: config.update(rope_theta=float(draw.randint(10_000, 900_000))),
    lambda draw, config, flags: config.update(bos_token_id=draw.randint(0, 900)),
    lambda draw, config, flags: config.update(dict(reversed(list(config.items())))),
    lambda draw, config, flags: flags.update({"--shard": "8"}),
)


class Gate(ShardwrightTestCase):

    def write(self, limits="", config=None, flags=None):
        (self.folder / "config.json").write_text(json.dumps(config or CONFIG))
        words = [word for pair in (flags or FLAGS).items() for word in pair]
        (self.folder / "budget.toml").write_text(f"tolerance = \"1 %\"\n\n[job.pretrain]\nflags = {json.dumps(words)}\n{limits}\n")

    def check(self, *arguments):
        code, out, err = self.run_program("check", "budget.toml", *arguments, "--json")
        self.assertEqual(err, "")
        return code, json.loads(out)

    def test_figures_are_those_of_simulate(self):
        self.write()
        code, report = self.check()
        self.assertEqual((code, report["ok"], report["breaches"]), (0, True, []))
        (self.folder / "plan.json").write_text("")
        self.succeed("plan", *[word for pair in FLAGS.items() for word in pair], "-o", "plan.json")
        alone = json.loads(self.succeed("simulate", "plan.json", "--json"))
        job = report["jobs"][0]
        self.assertEqual(job["memory"], alone["memory"]["peak_reserved_bytes"] + alone["memory"]["outside_allocator_bytes"])
        self.assertEqual(job["step_time"], alone["step_time_s"])
        self.assertAlmostEqual(job["exposed"], alone["exposed_comm_s"] / alone["step_time_s"])
        self.assertAlmostEqual(job["gpu_hours_per_1e9_tokens"], 1e9 / alone["tokens_per_s_per_gpu"] / 3600)
        # A plan file is the same job.
        (self.folder / "budget.toml").write_text('[job.pretrain]\nplan = "plan.json"\n')
        self.assertEqual(self.check()[1]["jobs"], report["jobs"])

    def test_limits(self):
        self.write('memory = "1 GiB"\nstep_time = "1 ms"\nexposed = "0.1 %"\ngpu_hours_per_1e9_tokens = 0.01')
        code, report = self.check()
        self.assertEqual(code, 1)
        self.assertEqual([breach["what"].split(":")[0] for breach in report["breaches"]],
                         ["memory", "step_time", "exposed", "gpu_hours_per_1e9_tokens"])
        code, out, err = self.run_program("check", "budget.toml", "--github")
        self.assertEqual((code, err), (1, ""))
        self.assertRegex(out.splitlines()[0], r"^::error file=budget.toml,line=3,title=pretrain::memory: [\d.]+ GiB, at most 1 GiB$")
        self.write('memory = "70 GiB"\nstep_time = "1 s"\nexposed = "99 %"\ngpu_hours_per_1e9_tokens = 10')
        self.assertEqual(self.check()[0], 0)

    def test_what_does_not_fit(self):
        self.write(config=CONFIG | {"hidden_size": 16384, "num_hidden_layers": 128, "intermediate_size": 65536})
        code, report = self.check()
        self.assertEqual((code, report["jobs"][0]["fits"]), (1, False))

    def test_every_growth_is_found_and_nothing_else(self):
        self.write()
        self.succeed("check", "budget.toml", "--save", "last.json")
        draw = random.Random(5)
        for i in range(100 if DEEP else 14):
            config, flags = dict(CONFIG), dict(FLAGS)
            grow, cause = GROWTHS[i % len(GROWTHS)]
            grow(draw, config, flags)
            self.write(config=config, flags=flags)
            code, report = self.check("--last", "last.json")
            self.assertEqual(code, 1, cause)
            memory = [breach for breach in report["breaches"] if breach["what"].startswith("memory")]
            self.assertEqual(len(memory), 1, report)
            self.assertTrue(memory[0]["cause"].startswith(cause), memory)
        for i in range(100 if DEEP else 10):
            config, flags = dict(CONFIG), dict(FLAGS)
            NEUTRAL[i % len(NEUTRAL)](draw, config, flags)
            self.write(config=config, flags=flags)
            self.assertEqual(self.check("--last", "last.json")[0], 0, (config, flags))

    def test_what_is_exposed_grows_in_points_of_the_step(self):
        self.write()
        self.succeed("check", "budget.toml", "--save", "last.json")
        text = (self.folder / "last.json").read_text()
        exposed = self.check()[1]["jobs"][0]["exposed"]
        for points, code in ((0.004, 0), (0.015, 1)):  # the tolerance is 1 %
            record = json.loads(text)
            record["jobs"]["pretrain"]["exposed"] = exposed - points
            (self.folder / "last.json").write_text(json.dumps(record))
            self.assertEqual(self.check("--last", "last.json")[0], code, points)

    def test_a_broken_limit_leaves_the_record(self):
        self.write('memory = "1 GiB"')
        code, _, err = self.run_program("check", "budget.toml", "--save", "now.json")
        self.assertEqual((code, err), (1, ""))
        self.write()
        self.assertEqual(self.check("--last", "now.json")[0], 0)

    def test_names_do_not_end_an_annotation(self):
        self.write()
        text = (self.folder / "budget.toml").read_text().replace("[job.pretrain]", '[job."a,b::c%0A"]')
        (self.folder / "budget.toml").write_text(text + 'memory = "1 GiB"\n')
        code, out, err = self.run_program("check", "budget.toml", "--github")
        self.assertEqual((code, err, len(out.splitlines())), (1, "", 1))
        self.assertIn(",line=3,title=a%2Cb%3A%3Ac%250A::memory: ", out)

    def test_errors(self):
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        for text, error in (
                ('[job.a]\nplans = "x"\n', 'budget.toml: job.a: got unknown key "plans", expected one of "plan", "flags", "memory", "step_time", "exposed", '
                                          '"gpu_hours_per_1e9_tokens"; did you mean "plan"?'),
                ("[job.a]\n", 'budget.toml: job.a: got {}, expected either plan = "FILE" or flags = ["--model", ...]'),
                ('[job.a]\nflags = ["--modle", "gpt2"]\n', 'budget.toml: job.a.flags[0]: got "--modle", expected a flag of shardwright plan '
                                                          'with a value; did you mean "--model"?'),
                ('[job.a]\nflags = ["--model", "gpt2", "-o", "x"]\n', 'budget.toml: job.a.flags[2]: got "-o", expected a flag of'),
                ('[job.a]\nflags = ["--model"]\n', 'budget.toml: job.a.flags[0]: got "--model", expected a value behind it'),
                (f'[job.a]\nflags = {json.dumps([word for pair in FLAGS.items() for word in pair])}\ngpu_hours_per_1e9_tokens = -1\n',
                 "budget.toml: job.a.gpu_hours_per_1e9_tokens: got -1, expected a number above 0"),
                ('tolerance = "5"\n[job.a]\nplan = "x"\n', 'budget.toml: tolerance: got "5", expected a share such as "5 %", at most 100 %')):
            (self.folder / "budget.toml").write_text(text)
            code, out, err = self.run_program("check", "budget.toml")
            self.assertEqual((code, out), (3, ""), err)
            self.assertIn(error, err)
        self.write()
        (self.folder / "last.json").write_text('{"schema": "other", "schema_version": 1, "jobs": {}}')
        self.assert_fails(3, 'last.json: schema: got "other", expected "shardwright-check-record", as check --save writes it',
                          "check", "budget.toml", "--last", "last.json")
        self.assert_fails(2, "check needs a budget file", "check")


if __name__ == "__main__":
    main()
