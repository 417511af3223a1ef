"""Bad input files: one clear line each, exit code 3, nothing on standard output, no file written."""

import copy
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import ShardwrightTestCase, main

PLAN = ("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128")
LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4}


def set_at(document, path, value):
    """Sets what a path such as ("plan", "units", 0, "reshard") leads to; None deletes it."""
    *above, last = path
    for key in above:
        document = document[key]
    if value is None:
        del document[last]
    else:
        document[last] = value


class BadPlans(ShardwrightTestCase):

    def test_errors(self):
        good = json.loads(self.succeed(*PLAN))
        for path, value, error in (
            # Unknown keys, at every level.
            (("plam",), {}, 'got unknown key "plam", expected one of "format", "version", "imported_from", "model", "kernel_set", '
             '"cluster", "profile", "job", "plan"; did you mean "plan"?'),
            (("plan", "units", 3, "reshrad"), "always", 'plan.units[3]: got unknown key "reshrad", expected one of '
             '"name", "modules", "reshard", "gap", "full_precision", "forward_prefetch", "backward_prefetch"; did you mean "reshard"?'),
            # Missing fields.
            (("plan",), None, 'got no key "plan", expected one'),
            (("plan", "units"), None, 'plan: got no key "units", expected one'),
            (("job", "sequence_length"), None, 'job: got no key "sequence_length", expected one'),
            # Other files and versions.
            (("format",), "shardwright-cluster", 'format: got "shardwright-cluster", expected "shardwright-plan"; did '
             'you mean "shardwright-plan"?'),
            (("version",), 2, "version: got 2, expected version 1; a newer Shardwright wrote this file"),
            # Wrong types, units and ranges.
            (("plan", "bucket"), 25, 'plan.bucket: got 25, expected a size such as "80 GiB" or "512 MB"'),
            (("plan", "bucket"), "25 MB/s", 'plan.bucket: got "25 MB/s", expected a size such as "80 GiB" or "512 MB"; '
             'did you mean "MB"?'),
            (("plan", "micro_batch"), -1, "plan.micro_batch: got -1, expected an integer from 1 to 16777216"),
            (("plan", "micro_batch"), 1e30, "plan.micro_batch: got 1e+30, expected an integer from 1 to 16777216"),
            (("plan", "micro_batch"), "1", 'plan.micro_batch: got "1", expected an integer from 1 to 16777216'),
            (("plan", "dialect"), "fsdp", 'plan.dialect: got "fsdp", expected one of "native", "fsdp2", "fsdp1", '
             '"ddp", "zero1", "zero2", "zero3"; did you mean "fsdp2"?'),
            (("plan", "dialect"), "fairscale", 'plan.dialect: got "fairscale", expected one of "native", "fsdp2", "fsdp1", '
             '"ddp", "zero1", "zero2", "zero3"'),
            (("plan", "units", 0, "reshard"), True,
             'plan.units[0].reshard: got true, expected "always", "never" or a number of ranks'),
            (("plan", "units", 0, "modules"), "transformer.h.0",
             'plan.units[0].modules: got "transformer.h.0", expected a list of strings'),
            (("job", "memory_margin"), 1.5, "job.memory_margin: got 1.5, expected a fraction in [0, 1)"),
            # What does not fit together.
            (("plan", "units", 0, "modules", 0), "transformer.h.o", 'plan.units[0].modules[0]: got "transformer.h.o", '
             'expected the FQN of a module; did you mean "transformer.h.0"?'),
            (("plan", "units", 0, "modules", 0), "lm_head", 'plan.units: got tied parameters '
             '"transformer.wte.weight" in unit "root" and "lm_head.weight" in unit "transformer.h.0", expected both '
             "in one unit; list both modules in one unit, or leave both to the root"),
            (("plan", "units", 0, "reshard"), 3,
             "plan.units[0].reshard: got 3, expected a divisor of shard_size 4"),
            (("plan", "shard_size"), 8, "plan: got 8 ranks x micro_batch 1 x accumulation 1, expected the job's "
             "global_batch 4"),
            (("plan", "in_flight"), 3, "plan.in_flight: got an option of dialect native in a plan of dialect fsdp2, "
             "expected its default"),
            (("cluster", "nodes"), 2, None),
            (("model", "name"), "gpt3", 'model.name: got "gpt3", expected the name of a zoo model, or a model under '
             '"json"; did you mean "gpt2"?'),
            (("kernel_set", "name"), "torch-eagre", 'kernel_set.name: got "torch-eagre"'),
            (("profile", "name"), "generics", 'profile.name: got "generics", expected a profile that ships; did you '
             'mean "generic"?'),
            (("cluster", "name"), "dgx-a10", 'cluster.name: got "dgx-a10", expected a cluster of the catalog; did you '
             'mean "dgx-a100"?'),
        ):
            with self.subTest(path=path, value=value):
                bad = copy.deepcopy(good)
                set_at(bad, path, value)
                if path == ("cluster", "nodes"):
                    del bad["cluster"]["hash"]
                    error = "plan: got shard_size 4 x replicate_size 1 = 4 ranks, expected 8, the GPUs of 2 x dgx-a100"
                (self.folder / "p.json").write_text(json.dumps(bad))
                for command in (("simulate", "p.json", "--trace", "t.json"), ("inspect", "p.json")):
                    if path == ("format",) and command[0] == "inspect":
                        continue  # inspect reads clusters too
                    if path[0] == "kernel_set":
                        code, out, err = self.run_program(*command)
                        self.assertEqual((code, out, err.count("\n")), (3, "", 1))
                        self.assertIn(error, err)
                    else:
                        self.assert_fails(3, "p.json: " + error, *command)

    def test_an_option_that_is_gone_is_passed_over(self):
        self.succeed(*PLAN, "-o", "p.json")
        plan = json.loads((self.folder / "p.json").read_text())
        before = self.succeed("simulate", "p.json", "--json")
        plan["plan"]["reduce_scatter_bucket"] = "25 MiB"  # of the dialect fairscale, in earlier files of all dialects
        (self.folder / "p.json").write_text(json.dumps(plan))
        self.assertEqual(self.succeed("simulate", "p.json", "--json"), before)

    def test_syntax(self):
        text = self.succeed(*PLAN)
        for bad, error in (
            ("", ":1:1: got end of input"),
            (text[:200], None),
            (text.replace('"version": 1', '"version": 1, "version": 1'), ' got the key "version" a second time'),
            (text + "x", None),
            ("[" * 300, None),
            ("\xff", None),
        ):
            with self.subTest(bad=bad[:20]):
                code, out, err = self.run_program("simulate", "-", stdin=bad)
                self.assertEqual((code, out, err.count("\n")), (3, "", 1))
                self.assertTrue(err.startswith("error: standard input"), err)
                self.assertIn(error or "", err)

    def test_any_value_anywhere(self):
        """Every leaf of a plan replaced by odd values: an answer or one clear line, never a crash."""
        good = json.loads(self.succeed(*PLAN, "--wrap", "root", "--dialect", "native"))
        leaves = []

        def collect(node, path):
            if isinstance(node, (dict, list)) and node:
                for key in node if isinstance(node, dict) else range(len(node)):
                    collect(node[key], (*path, key))
            else:
                leaves.append(path)
        collect(good, ())
        self.assertGreater(len(leaves), 40)
        for path in leaves:
            for value in (-1, 0, 1.5, 1e30, "", "x", [], [[]], {}, True, [""], 2**53):
                bad = copy.deepcopy(good)
                set_at(bad, path, value)
                code, out, err = self.run_program("simulate", "-", "--json", stdin=json.dumps(bad))
                with self.subTest(path=path, value=value):
                    self.assertIn(code, (0, 1, 3))
                    self.assertEqual((out == "", err.count("\n"), err.startswith("error: standard input")),
                                     (code == 3, int(code == 3), code == 3), err)

    def test_missing_file(self):
        code, out, err = self.run_program("simulate", "p.json")
        self.assertEqual((code, out, err.count("\n")), (3, "", 1))
        self.assertIn("p.json", err)


class BadModels(ShardwrightTestCase):

    def check(self, config, error):
        (self.folder / "m.json").write_text(config if isinstance(config, str) else json.dumps(config))
        self.assert_fails(3, error, "plan", "--model", "m.json", "--cluster", "dgx-a100", "-o", "p.json")

    def test_errors(self):
        self.check({**LLAMA, "num_hidden_layers": 10**30},
                   "m.json: num_hidden_layers: got 1e+30, expected an integer from 1 to 10000")
        self.check({"model_type": "deepseek_v3", "n_routed_experts": 7, "n_group": 1},  # the class has 8 per token
                   "m.json: num_experts_per_tok: got its default 8, expected an integer from 1 to 7")
        self.check({**LLAMA, "hidden_size": -32}, "m.json: hidden_size: got -32, expected an integer from 1 to 4194304")
        self.check({**LLAMA, "model_type": "lama"},
                   'm.json: model_type: got "lama", expected one of 81 known types, or '
                   'the model.json that "shardwright export m.json --seq 2048 -o model.json" writes (of images: --image 224); did you '
                   'mean "llama"?')
        self.check(json.dumps(LLAMA)[:40], "m.json:1:41: got end of input, expected '}'")

    def test_cycle(self):
        linear = {"op": "linear", "module": "a", "params": ["a.weight"]}
        self.check({"format": "shardwright-model", "version": 1, "inputs": {"x": {"shape": [1, 8]}},
                    "modules": [{"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [8, 8]}]}],
                    "ops": [{**linear, "inputs": ["z"], "output": "y"}, {**linear, "inputs": ["y"], "output": "z"}]},
                   'm.json: ops: got a cycle through ops "linear -> y", "linear -> z", expected a graph without cycles')

    def test_names(self):
        self.assert_fails(3, 'model: got "gpt22", expected a zoo name (shardwright list models), a config.json, a '
                          'folder with one, or a model.json; did you mean "gpt2"?',
                          "plan", "--model", "gpt22", "--cluster", "dgx-a100")
        self.assert_fails(3, 'model: got "acme/Large-9B", which is no file here but looks like a hub id, '
                          "expected a local file or a zoo name; download its configuration with: hf "
                          "download acme/Large-9B config.json --local-dir Large-9B",
                          "plan", "--model", "acme/Large-9B", "--cluster", "dgx-a100")

    def test_tied_weights_split_across_units(self):
        (self.folder / "units.json").write_text('[{"modules": ["lm_head"]}]')
        self.assert_fails(3, 'plan: units: got tied parameters "transformer.wte.weight" in unit "root" and '
                          '"lm_head.weight" in unit "lm_head", expected both in one unit; list both modules in one '
                          "unit, or leave both to the root", *PLAN, "--wrap", "units.json")
        (self.folder / "units.json").write_text('[{"module": ["lm_head"]}]')
        self.assert_fails(3, 'units.json: [0]: got unknown key "module", expected one of "name", "modules", "reshard", '
                          '"gap", "full_precision", "forward_prefetch", "backward_prefetch"; did you mean "modules"?',
                          *PLAN, "--wrap", "units.json")


class BadClusters(ShardwrightTestCase):

    def test_errors(self):
        for cluster, error in (
            ("dgx-h10", 'cluster: got "dgx-h10", expected a name from `shardwright list clusters`, a .json file (also with a card of your own) or a '
             'description such as "h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s"; did you mean "dgx-h100"?'),
            ("8xH100 64GB", None),
            ("8xGaudi2", None),
            ("c.json", None),
            ("h100-80 x8, nvlink 450, nic 4x200 Gbit/s", None),
            ("h100-80 x8, nvlink 450 GiB, nic 4x200 Gbit/s", None),
        ):
            with self.subTest(cluster=cluster):
                code, out, err = self.run_program("plan", "--model", "gpt2", "--cluster", cluster)
                self.assertEqual((code, out, err.count("\n")), (3, "", 1))
                self.assertEqual(err, f"error: {error}\n" if error else err)


if __name__ == "__main__":
    main()
