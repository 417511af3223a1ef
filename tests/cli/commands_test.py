"""The commands as a user types them: results, exit codes, pipes, determinism."""

import gzip
import json
import os
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, interrupted, main

SMALL = ("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128")


MESH = "expected ranks that share the parameters, and behind commas ep=, tp=, cp= or pp=, such as 64,tp=8 or 64,pp=4x2"
METHODS = "expected gather, ring_gather, ring or ulysses"
SCHEDULES = "expected gpipe, 1f1b, interleaved, looped_bfs, zero_bubble, zbv, dualpipev or even"
ALONE = "expected any alone, which a search tries, or a number such as 4"
INTEGER = "expected an integer in [1, 16777216]"
SHARDS = {  # what is wrong with a value of --shard
    "8,pp=any:even": f' pp: got "any:even", {ALONE}:even',
    "8,tp=any:async": f' tp: got "any:async", {ALONE}:async',
    "8,pp=anyx2": f' pp: got "anyx2", {ALONE}x2',
    "8,tp=8:asynch": ' tp: got "asynch", expected async; did you mean "async"?',
    "8,tp=2:async:async": ' tp: got "2:async:async", expected one word behind the number',
    "8,cp=2:rign": f' cp: got "rign", {METHODS}; did you mean "ring"?',
    "8,pp=2:1F1B": f' pp: got "1F1B", {SCHEDULES}; did you mean "1f1b"?',
    "8,pp=2:1f1b:evn": f' pp: got "evn", {SCHEDULES}; did you mean "even"?',
    "8,pp=2:gpipe:1f1b": ' pp: got "2:gpipe:1f1b", expected one schedule, and even once',
    "8,pp=2:even:even": ' pp: got "2:even:even", expected one schedule, and even once',
    "8,pp=2x2x2": ' pp: got "2x2x2", expected ranks and stages of each, such as 4x2',
    "8,pp=2x0": f' pp: got "0", {INTEGER}',
    "8,tp=": f' tp: got "", {INTEGER}',
    "8,ep=2:x": f' ep: got "2:x", {INTEGER}',
    "8,PP=2": f': got "PP=2", {MESH}; did you mean "pp=2"?',
    "8,pp:2": f': got "pp:2", {MESH}; did you mean "pp=2"?',
    "8, tp=2": f': got " tp=2", {MESH}; did you mean "tp=2"?',
    "8,dp=2": f': got "dp=2", {MESH}',
    "8x2": f': got "8x2", {MESH}',
    "8,": f': got "", {MESH}',
    "8,tp=2,tp=2": ': got "tp=2", expected each kind of ranks once',
}


class House(ShardwrightTestCase):

    def test_flags_do_not_grow(self):
        """A new flag takes the place of another one, or is a row of the table of synonyms. 161 stood on 2026-11-28."""
        commands = json.loads(self.succeed("--help", "--json"))["commands"]
        names = {row["name"] for command in commands for row in (*command["flags"], *command["switches"])}
        self.assertLessEqual(len(names), 161, sorted(names))


class Lists(ShardwrightTestCase):

    def test_models(self):
        listing = json.loads(self.succeed("list", "models", "--json"))
        self.assertEqual((listing["schema"], listing["schema_version"]), ("shardwright-list", 1))
        models = {model["name"]: model for model in listing["models"]}
        self.assertEqual(list(models), sorted(models))
        # Published by Meta in the model card's safetensors index: 8,030,261,248.
        self.assertEqual(models["llama-3-8b"]["parameters"], 8030261248)
        self.assertEqual(models["llama-3-8b"]["type"], "llama")
        table = self.succeed("list", "models").splitlines()
        self.assertEqual(len(table), 1 + len(models))
        self.assertIn("8,030,261,248", next(line for line in table if line.startswith("llama-3-8b ")))

    def test_clusters(self):
        clusters = {c["name"]: c for c in json.loads(self.succeed("list", "clusters", "--json"))["clusters"]}
        # Data sheet: NVLink 900 GB/s in both directions; eight NICs of 400 Gbit/s.
        self.assertEqual(clusters["dgx-h100"]["gpus_per_node"], 8)
        self.assertEqual(clusters["dgx-h100"]["scale_up_bytes_per_s"], 450e9)
        self.assertEqual(clusters["dgx-h100"]["network_bytes_per_s"], 8 * 400e9 / 8)

    def test_others(self):
        for what, key, name in (("gpus", "gpus", "h100-80"), ("kernel-sets", "kernel_sets", "torch-eager"),
                                ("profiles", "profiles", "generic"), ("stacks", "stacks", "torchtitan+compile")):
            entries = json.loads(self.succeed("list", what, "--json"))[key]
            self.assertIn(name, [entry["name"] for entry in entries])
            self.assertEqual(len(self.succeed("list", what).splitlines()), 1 + len(entries))

    def test_stacks_of_a_date_are_those_of_published_tables(self):
        """Each row of `list stacks` is what bench/lab takes a published run of that framework, date and compiler for."""
        sys.path.insert(0, str(TESTS.parent / "bench"))
        from lab import base, jobs, runs
        frameworks = {row["name"]: row["framework"] for row in jobs.STACKS["stacks"] if "name" in row}
        row = {"id": "x", "model_name": "m", "gpu_class": "H100-80GB", "gpu": "H100", "gpus": "1", "parallelism": "single", "attention_kernel": ""}
        before = {}
        for stack in json.loads(self.succeed("list", "stacks", "--json"))["stacks"]:
            name, _, compiled = stack["name"].partition("+")
            date = str(int(stack["before"][:4]) - 1) + "-12" if stack["before"].endswith("-01") or len(stack["before"]) == 4 else (
                f'{stack["before"][:5]}{int(stack["before"][5:]) - 1:02}' if stack["before"] else "2030-01")
            self.assertLess(before.get(stack["name"], ""), date)  # rows of a name are in the order of time
            before[stack["name"]] = date
            run = runs.Run(base.Row({**row, "framework": frameworks[name], "date": date, "compiled": "y" if compiled else "n"}))
            self.assertEqual(jobs.stack_of(run)["kernel_set"], stack["kernel_set"], (stack, date))

    def test_a_stack_of_a_date_is_a_kernel_set(self):
        for word, wanted, attention in (("torchtitan@2024-12", "torch-2024", "flash"), ("torchtitan+compile@2025-11", "torch-compile-2025", "cudnn"),
                                        ("transformers@5.24", "hf-2026", "flash"), ("transformers@4.57.3", "hf-eager", "flash"),
                                        ("transformers@2023-11", "hf-2023", "materialized"), ("deepspeed", "deepspeed", "flash")):
            status, out, err = self.run_program(*SMALL, "--no-search", "--kernel-set", word, "--json")
            kernels = json.loads(out)["plan_file"]["kernel_set"]
            self.assertEqual((status, kernels["name"], kernels["attention"]), (0, wanted, attention), word)
            self.assertEqual(err, "" if word == wanted else f"note: {word} is kernel set {wanted}\n")
        for word, error in (
            ("torchtitan@x", "torchtitan@ and a date such as 2024-12"),
            ("transformers@", "transformers@ and a version such as 5.24, or a date such as 2024-12"),
            ("nanogpt+compile@2025", "nanogpt+compile before 2023-03; no later row of `shardwright list stacks` names it"),
            ("torchtitn@2024", 'a stack of `shardwright list stacks`; did you mean "torchtitan"?'),
        ):
            self.assert_fails(3, f'--kernel-set: got "{word}", expected {error}', *SMALL, "--kernel-set", word)


class Help(ShardwrightTestCase):

    def test_examples_come_first(self):
        for command in ([], ["list"], ["inspect"], ["plan"], ["simulate"]):
            for flag in ("--help", "-h"):
                text = self.succeed(*command, flag)
                self.assertLess(text.index("Examples:"), text.index("Usage: shardwright"))

    def test_version(self):
        self.assertEqual(self.succeed("--version"), "shardwright 0.1.0\n")

    def test_json_holds_the_same_words(self):
        """`--help --json` of a command has the flags, values and texts that its help shows, in whatever order the two words come."""
        whole = json.loads(self.succeed("--help", "--json"))
        self.assertEqual((whole["schema"], whole["schema_version"], whole["version"]), ("shardwright-help", 1, "0.1.0"))
        listed = re.findall(r"^  ([a-z][\w-]*)  ", self.succeed("--help"), re.MULTILINE)
        self.assertEqual([command["name"] for command in whole["commands"]], listed)
        for command in whole["commands"]:
            words = (command["name"], "--json", "--help")
            self.assertEqual(json.loads(self.succeed(*words))["commands"], [command])
            text = " ".join(self.succeed(command["name"], "--help").split())
            self.assertIn(" ".join(command["about"].split()), text)
            for row in command["positionals"]:
                self.assertIn(" ".join(row["help"].split()), text)
            for row in command["flags"]:
                names = sorted((row["name"], *([row["also"]] if "also" in row else [])), key=lambda name: (name.startswith("--"), -len(name)))
                self.assertIn(f"{','.join(names)} {row['value']} {row['help']}", text)
            for row in command["switches"]:
                self.assertIn(f"{row['name']} {row['help']}", text)
            shown = {line.split()[0].split(",")[-1] for line in self.succeed(command["name"], "--help").split("Options:")[1].splitlines()
                     if re.match(r" {2}-", line)}
            told = {row["name"] for row in command["flags"] + command["switches"]}
            self.assertEqual(shown - told - {"--help", "--mem-margin"}, set())

    def test_examples_run(self):
        """Every example of plan's help is a plan that works."""
        text = self.succeed("plan", "--help")
        examples = text[text.index("Examples:"):text.index("Usage:")].replace("\\\n", " ")
        commands = [line.strip() for line in examples.splitlines() if line.strip().startswith("shardwright plan")]
        self.assertGreaterEqual(len(commands), 3)
        import shlex
        for command in commands:
            words = shlex.split(command.split("|")[0])[1:]
            self.assertEqual(self.run_program(*words)[0], 0, command)


class Usage(ShardwrightTestCase):
    """Exit code 2: wrong in itself, whatever files exist."""

    def test_errors(self):
        plan = ("plan", "--model", "gpt2", "--cluster", "dgx-a100")
        for error, arguments in (
            ('unknown command "plann", expected one of those that shardwright --help lists; did you mean "plan"?',
             ("plann", "--model", "gpt2")),
            ('unknown flag "--versoin"; did you mean "--version"?', ("--versoin",)),
            ('unknown flag "--clustr" of shardwright plan; did you mean "--cluster"?',
             ("plan", "--model", "gpt2", "--clustr", "dgx-a100")),
            ('unknown flag "--tp" of shardwright plan; `plan --shard N,tp=T` cuts every layer among T ranks; N times T are all',
             ("plan", "--model", "gpt2", "--tp=2")),
            ('unknown flag "--gpus" of shardwright estimate; the cluster says how many there are: 4xH100',
             ("estimate", "gpt2", "8xH100", "--gpus", "4")),
            ('unknown flag "--trac" of shardwright simulate; did you mean "--trace"?',
             ("simulate", "p.json", "--trac=t.json")),
            ('unexpected argument "gpus" of shardwright list, which takes WHAT; a value with spaces needs quotes', ("list", "models", "gpus")),
            ('unexpected argument "H100" of shardwright estimate, which takes MODEL CLUSTER; a value with spaces needs quotes',
             ("estimate", "mixtral-8x7b", "2x8", "H100")),
            ("list needs one of models, clusters, gpus, kernel-sets, profiles, stacks", ("list",)),
            ('list: got "model", expected models, clusters, gpus, kernel-sets, profiles or stacks; did you mean "models"?',
             ("list", "model")),
            ("inspect needs a file, a folder, a name, or - for standard input", ("inspect",)),
            ("simulate needs a plan file, or - for standard input", ("simulate",)),
            ("--model is required; see shardwright plan --help", ("plan", "--cluster", "dgx-a100")),
            ("--cluster is required; see shardwright plan --help", ("plan", "--model", "gpt2")),
            ('--dialect: got "fsdp3", expected native, fsdp2, fsdp1, ddp, zero1, zero2 or zero3; did you mean "fsdp2"?',
             (*plan, "--dialect", "fsdp3")),
            ('--seq: got "8k", expected an integer in [1, 16777216]; did you mean 8192?', (*plan, "--seq", "8k")),
            ('--micro-batch: got "-1", expected an integer in [1, 16777216]', (*plan, "--micro-batch", "-1")),
            ("--seq: got no value, expected one", (*plan, "--seq")),
            ("--seq: got several values, expected one", (*plan, "--seq", "8", "--seq", "9")),
            ('--tokens: got "0", expected a whole number from 1 to 1e15, such as 5e8',
             ("goodput", "p.json", "--tokens", "0", "--mtbf", "1 h", "--checkpoint-time", "1 s")),
            ('--nodes: got "1000000000000000000000000000000", expected an integer in [1, 16777216]',
             (*plan, "--nodes", "1" + "0" * 30)),
            ('--recompute: got "ful", expected none, full or selective; did you mean "full"?',
             (*plan, "--recompute", "ful")),
            ('--reshard: got "alway", expected always, never, step or a number of ranks; did you mean "always"?',
             (*plan, "--reshard", "alway")),
            ('--optimizer: got "adamx", expected sgd, momentum, adam, adamw, adadelta, lion or adafactor, alone or with '
             ':foreach, fused or for_loop and then :none, muon, muon_distributed or soap; '
             'did you mean "adam"?', (*plan, "--optimizer", "adamx")),
            ('--optimizer: got "adamw:fusd", expected sgd, momentum, adam, adamw, adadelta, lion or adafactor, alone or with '
             ':foreach, fused or for_loop and then :none, muon, muon_distributed or soap; '
             'did you mean "fused"?', (*plan, "--optimizer", "adamw:fusd")),
            ('--optimizer: got "adamw:fused:muno", expected sgd, momentum, adam, adamw, adadelta, lion or adafactor, alone or with '
             ':foreach, fused or for_loop and then :none, muon, muon_distributed or soap; '
             'did you mean "muon"?', (*plan, "--optimizer", "adamw:fused:muno")),
            ('--offload: got "params"; that is parameters, with their gradients and optimizer',
             (*plan, "--offload", "params")),
            ('--precision: got "bf8", expected bf16-mixed, fp16-mixed, fp32, bf16, fp16 or '
             'master/param/reduce such as fp32/bf16/fp32, alone or with +fp8, +fp8-rowwise, +fp8-gathered or +fp8-precomputed, or with +nf4, +nf4_double or +int8 of what is frozen', (*plan, "--precision", "bf8")),
            ('--precision: got "fp32+fp9", expected bf16-mixed, fp16-mixed, fp32, bf16, fp16 or '
             'master/param/reduce such as fp32/bf16/fp32, alone or with +fp8, +fp8-rowwise, +fp8-gathered or +fp8-precomputed, or with +nf4, +nf4_double or +int8 of what is frozen', (*plan, "--precision", "fp32+fp9")),
            ('--bucket: got "25", expected a size such as "80 GiB" or "512 MB"; the unit is missing',
             (*plan, "--dialect", "ddp", "--bucket", "25")),
            ('--memory-margin: got "1", expected a fraction in [0, 1)', (*plan, "--memory-margin", "1")),
            ('--lora-alpha: got "-1", expected a number above 0, at most 1e+06', (*plan, "--lora-alpha", "-1")),
            ('--contention: got "offf", expected on or off; did you mean "off"?',
             ("simulate", "p.json", "--contention", "offf")),
            ('--wrap: got "block", expected root; dialect ddp has no units',
             (*plan, "--dialect", "ddp", "--wrap", "block")),
            *((f"--shard{error}", (*plan, "--shard", words)) for words, error in SHARDS.items()),
        ):
            with self.subTest(arguments=arguments):
                self.assert_fails(2, error, *arguments)

    def test_what_does_not_fit_the_cluster_is_bad_input(self):
        plan = ("plan", "--model", "gpt2", "--cluster", "dgx-a100")
        for error, arguments in (
            ("--shard: got 3, expected a divisor of the 8 ranks", (*plan, "--shard", "3")),
            ("--replicate: got 5, expected a divisor of the 8 ranks", (*plan, "--replicate", "5")),
            ("--shard: got 8, expected a divisor of the 4 that tp and pp leave of the 8 ranks",
             (*plan, "--shard", "8,pp=2")),
            ("--shard: pp: got 3, expected a divisor of the 8 ranks", (*plan, "--shard", "2,pp=3")),
            ("--shard 4 --replicate 4: got a product other than the 8 ranks of the cluster",
             (*plan, "--shard", "4", "--replicate", "4")),
            ("--global-batch: got 12, expected a multiple of 8 ranks x micro-batch 1",
             (*plan, "--global-batch", "12")),
            ("--global-batch: got 16, expected a multiple of 8 ranks x micro-batch 1 x accumulation 4",
             (*plan, "--global-batch", "16", "--accumulation", "4")),
        ):
            with self.subTest(arguments=arguments):
                self.assert_fails(3, error, *arguments)

    def test_what_cannot_be_written_is_known_before_the_work(self):
        """None of the other arguments exists, so that any work would have found that first."""
        no_folder = "none/x.json: cannot write: No such file or directory"
        self.assert_fails(4, no_folder, "plan", "--model", "none", "--cluster", "none", "-o", "none/x.json")
        (self.folder / "runs.csv").write_text("")
        self.assert_fails(4, no_folder, "calibrate", "none", "-o", "none/x.json")

    def test_plan_json_without_a_file_holds_the_plan(self):
        plan = ("plan", "--model", "gpt2", "--cluster", "dgx-a100")
        summary = json.loads(self.succeed(*plan, "--json"))
        self.assertEqual((summary["file"], summary["plan_file"]), ("", json.loads(self.succeed(*plan))))
        self.assertNotIn("plan_file", json.loads(self.succeed(*plan, "--json", "-o", "p.json")))


class Searches(ShardwrightTestCase):
    JOB = ("plan", "--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "4", "--seq", "256", "--global-batch", "8")

    def test_report_and_plan_agree(self):
        report = json.loads(self.succeed(*self.JOB, "--json", "-o", "p.json"))
        for key in ("step_time_s", "lower_bound_s", "proven_gap", "search_s", "candidates", "pareto", "rejected"):
            self.assertIn(key, report)
        self.assertLessEqual(report["lower_bound_s"], report["step_time_s"])
        self.assertAlmostEqual(report["proven_gap"], 1 - report["lower_bound_s"] / report["step_time_s"])
        self.assertEqual(report["shard_size"] * report["replicate_size"], 4)
        simulated = json.loads(self.succeed("simulate", "p.json", "--json"))
        self.assertAlmostEqual(simulated["step_time_s"], report["step_time_s"], places=9)
        times = [point["step_time_s"] for point in report["pareto"]]
        memory = [point["memory_bytes"] for point in report["pareto"]]
        self.assertEqual(times, sorted(times))
        self.assertEqual(memory, sorted(memory, reverse=True))

    def test_without_a_file_the_report_holds_the_plan(self):
        report = json.loads(self.succeed(*self.JOB, "--json", "--threads", "1"))
        plan = self.succeed(*self.JOB, "--threads", "3")
        self.assertEqual(report["plan_file"], json.loads(plan))

    def test_points_of_the_front_are_plans(self):
        report = json.loads(self.succeed(*self.JOB, "--json"))
        self.assertGreater(len(report["pareto"]), 1)
        for point in report["pareto"]:
            plan = json.dumps({**report["plan_file"], "plan": point["plan"]})
            simulated = json.loads(self.succeed("simulate", "-", "--json", stdin=plan))
            memory = simulated["memory"]
            self.assertEqual(simulated["step_time_s"], point["step_time_s"])
            self.assertEqual(memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"], point["memory_bytes"])
        for point in json.loads(self.succeed(*self.JOB, "--json", "-o", "p.json"))["pareto"]:
            self.assertNotIn("plan", point)

    def test_baselines_explanation_and_a_kept_plan(self):
        native = ("--dialect", "native")
        report = json.loads(self.succeed(*self.JOB, *native, "--json", "--explain", "-o", "p.json"))
        rows = {row["name"]: row for row in report["baselines"]}
        alone = json.loads(self.succeed("baselines", *self.JOB[1:], "--json"))["baselines"]
        for row in alone:
            if row["fits"]:
                self.assertEqual(rows[row["name"]]["step_time_s"], row["step_time_s"])
                self.assertLessEqual(report["step_time_s"], row["step_time_s"])
        self.assertGreater(report["step_time_band"], 0)
        explanation = report["explanation"]
        self.assertIn("prefetch", [row["choice"] for row in explanation["alternatives"]])
        self.assertIn("nvlink bandwidth", [row["what"] for row in explanation["binds"]])
        text = self.succeed(*self.JOB, *native, "--explain", "-o", "q.json")
        for words in ("The nearest other choices", "What binds", "What the usual frameworks would do", "torchtitan"):
            self.assertIn(words, text)
        chosen = re.search(r"units ([^,]*),", text)[1]
        self.assertNotIn(("units", chosen), [(row["choice"], row["value"]) for row in explanation["alternatives"]])
        kept = json.loads(self.succeed(*self.JOB, *native, "--json", "--keep", "p.json"))
        self.assertEqual(kept["plan_file"]["plan"], json.loads((self.folder / "p.json").read_text())["plan"])

    def test_cost(self):
        report = json.loads(self.succeed(*self.JOB, "--objective", "cost", "--nodes", "1..4", "--token-budget", "1e9",
                                         "--json", "-o", "p.json"))
        rows = report["node_counts"]
        self.assertEqual([row["nodes"] for row in rows], [1, 2, 4])
        self.assertEqual(rows[2]["reason"], "the global batch is no multiple of its ranks")
        for row in rows[:2]:
            self.assertEqual(row["steps"], -(-10**9 // (8 * 256)))
            self.assertAlmostEqual(row["gpu_hours"], row["steps"] * row["step_time_s"] * row["ranks"] / 3600)
        cheapest = min(rows[:2], key=lambda row: row["gpu_hours"])
        self.assertEqual(report["step_time_s"], cheapest["step_time_s"])
        plan = json.loads((self.folder / "p.json").read_text())
        self.assertEqual(plan["plan"]["shard_size"] * plan["plan"]["replicate_size"], cheapest["ranks"])

    def test_flags_fix_choices(self):
        report = json.loads(self.succeed(*self.JOB, "--search", "--json", "--dialect", "fsdp2", "--shard", "2",
                                         "--micro-batch", "1", "--recompute", "full", "--wrap", "block",
                                         "--offload", "none"))
        plan = report["plan_file"]["plan"]
        self.assertEqual((plan["dialect"], plan["shard_size"], plan["micro_batch"], plan["accumulation"]),
                         ("fsdp2", 2, 1, 2))
        self.assertEqual((len(plan["units"]), len(plan["recompute"])), (13, 12))

    # The limit travels with the plan: what is simulated of it later is what the search found.
    def test_memory_limit(self):
        for flags in (("--mem", "2.6 GiB"), ("--memory-margin", "0.96")):
            report = json.loads(self.succeed(*self.JOB, "--dialect", "fsdp2", *flags, "--json", "-o", "p.json"))
            simulated = json.loads(self.succeed("simulate", "p.json", "--json"))
            memory = simulated["memory"]
            self.assertEqual(simulated["step_time_s"], report["step_time_s"])
            self.assertGreaterEqual(memory["usable_device_bytes"], report["memory_limit_bytes"])
            self.assertLessEqual(memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"],
                                 memory["usable_device_bytes"])
        given = json.loads(self.succeed(*self.JOB, "--mem", "4 GiB", "--json"))
        self.assertEqual(given["memory_limit_bytes"], 4 * 2 ** 30)
        self.assert_fails(2, "--mem: got 100 GiB, expected at most the 79.2 GiB usable on h100-80",
                          *self.JOB, "--mem", "100 GiB")

    def test_nothing_fits(self):
        code, out, err = self.run_program(*self.JOB, "--json", "--mem", "1 GiB", "-o", "p.json")
        self.assertEqual((code, err), (1, ""))
        report = json.loads(out)
        self.assertFalse(report["feasible"])
        self.assertGreater(report["floor"]["memory_bytes"], 2 ** 30)
        self.assertEqual(os.listdir(self.folder), [])

    def test_errors(self):
        for error, arguments in (
            ("--search --no-search: got both, expected one of them", (*self.JOB, "--search", "--no-search")),
            ("--mem: only a search has it; add --search", (*self.JOB, "--wrap", "root", "--mem", "1 GiB")),
            ("--mem --memory-margin: got both, expected one of them",
             (*self.JOB, "--mem", "1 GiB", "--memory-margin", "0.1")),
            ("--explain: only a search has it; add --search", (*self.JOB, "--no-search", "--explain")),
            ("--objective cost needs --token-budget", (*self.JOB, "--objective", "cost", "--nodes", "1..2")),
            ("--objective cost needs --nodes and --global-batch",
             (*self.JOB, "--objective", "cost", "--token-budget", "1e9")),
            ("--token-budget: only --objective cost has it", (*self.JOB, "--token-budget", "1e9")),
            ('--objective: got "speed", expected time, memory, pareto or cost', (*self.JOB, "--objective", "speed")),
        ):
            with self.subTest(arguments=arguments):
                self.assert_fails(2, error, *arguments)


class Plans(ShardwrightTestCase):

    def test_mesh_and_batch_follow(self):
        def plan(*flags):
            document = json.loads(self.succeed(*SMALL, *flags))
            chosen = document["plan"]
            return (chosen["shard_size"], chosen["replicate_size"], chosen["micro_batch"],
                    chosen["accumulation"], document["job"]["global_batch"])
        self.assertEqual(plan(), (4, 1, 1, 1, 4))
        self.assertEqual(plan("--shard", "2"), (2, 2, 1, 1, 4))
        self.assertEqual(plan("--replicate", "4"), (1, 4, 1, 1, 4))
        self.assertEqual(plan("--micro-batch", "2", "--global-batch", "24"), (4, 1, 2, 3, 24))
        self.assertEqual(plan("--accumulation", "5"), (4, 1, 1, 5, 20))
        self.assertEqual(plan("--dialect", "ddp"), (1, 4, 1, 1, 4))

    def test_images_have_no_sequence(self):
        self.assert_fails(3, "--seq: got 128, expected no such flag with vit-b-16, which has no sequences",
                          "plan", "--model", "vit-b-16", "--cluster", "dgx-a100", "--seq", "128")

    def test_summary(self):
        summary = self.succeed(*SMALL, "-o", "p.json")
        self.assertTrue(summary.startswith("gpt2 on 1 x dgx-a100 (4 GPUs), fsdp2\n"))
        self.assertTrue(summary.endswith("Wrote p.json\n"))
        machine = json.loads(self.succeed(*SMALL, "-o", "q.json", "--json"))
        self.assertEqual((machine["ranks"], machine["parameters"]), (4, 124439808))
        self.assertEqual((self.folder / "p.json").read_text(), (self.folder / "q.json").read_text())

    def test_same_input_same_bytes(self):
        first = self.succeed(*SMALL, "--wrap", "torchtitan", "--recompute", "selective")
        self.assertEqual(first, self.succeed(*SMALL, "--wrap", "torchtitan", "--recompute", "selective"))
        runs = {self.succeed("simulate", "-", "--json", stdin=first) for _ in range(3)}
        self.assertEqual(len(runs), 1)
        self.assertEqual(self.succeed("simulate", "-", stdin=first), self.succeed("simulate", "-", stdin=first))

    def test_products_in_fp8(self):
        """Of the precision's name; kept in the plan, told, and refused where nothing multiplies so."""
        plan = ("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--kernel-set", "torch-compile", "--seq", "2048", "--no-search")
        times = {}
        for name, stored in (("bf16-mixed", None), ("fp8", "per_tensor"), ("bf16-mixed+fp8", "per_tensor"), ("bf16+fp8-rowwise", "per_row")):
            self.succeed(*plan, "--precision", name, "-o", "p.json")
            written = json.loads((self.folder / "p.json").read_text())
            self.assertEqual(written["kernel_set"].get("fp8"), stored)
            self.assertEqual(written["job"]["precision"]["master"], "bf16" if name.startswith("bf16+") else "fp32")
            out = self.succeed("simulate", "p.json")
            self.assertEqual(", products in fp8" in out, stored is not None)
            times[name] = json.loads(self.succeed("simulate", "p.json", "--json"))["step_time_s"]
        self.assertLess(times["fp8"], times["bf16-mixed"])
        self.assertEqual(times["fp8"], times["bf16-mixed+fp8"])
        self.succeed(*plan, "--precision", "fp8", "-o", "p.json")
        self.assertIn("torchao.float8.convert_to_float8_training", self.succeed("emit", "p.json", "--to", "fsdp2", "-o", "out/"))
        self.succeed("emit", "p.json", "--to", "torchtitan", "-o", "titan/")
        self.succeed("import-run", "titan/torchtitan.toml", "--cluster", "dgx-h100", "-o", "back.json")
        self.assertEqual(json.loads((self.folder / "back.json").read_text())["kernel_set"]["fp8"], "per_tensor")
        toml = (self.folder / "titan/torchtitan.toml").read_text()
        for old, new, said in (
                ('filter_fqns = ["output"]', 'filter_fqns = ["wk", "output"]',
                 'filter_fqns: got ["wk", "output"], expected ["output"]: all linear layers but the vocabulary\'s'),
                ('recipe_name = "tensorwise"', 'recipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true',
                 'enable_fsdp_float8_all_gather: got true with "rowwise", expected false, or no recipe_name; torchao gathers weights in fp8 '
                 "with one scale per tensor alone")):
            self.assertIn(old, toml)
            (self.folder / "other.toml").write_text(toml.replace(old, new))
            self.assertEqual(self.run_program("import-run", "other.toml", "--cluster", "dgx-h100", "-o", "no.json"),
                             (3, "", f"error: other.toml: quantize.linear.float8.{said}\n"))
        # Weights gathered in fp8, there and back; bytes of gathers are cheaper than bf16.
        self.succeed(*plan, "--precision", "fp8", "-o", "p.json")
        whole = self.succeed("simulate", "p.json", "--json")
        for name in ("gathered", "precomputed"):
            self.succeed(*plan, "--precision", f"fp8-{name}", "-o", "p.json")
            held = json.loads(self.succeed("simulate", "p.json", "--json"))["memory"]["at_peak"]["unsharded_parameter"]
            self.assertLess(held, json.loads(whole)["memory"]["at_peak"]["unsharded_parameter"])
            self.succeed("emit", "p.json", "--to", "torchtitan", "-o", "titan/")
            self.succeed("import-run", "titan/torchtitan.toml", "--cluster", "dgx-h100", "-o", "back.json")
            self.assertEqual(json.loads((self.folder / "back.json").read_text())["kernel_set"]["fp8"], name)
        self.assertIn("fsdp2 alone gathers fp8", self.run_program(*plan, "--precision", "fp8-gathered", "--dialect", "zero3")[2])
        self.assertEqual(self.run_program("plan", "--model", "llama-3-8b", "--cluster", "dgx-a100", "--precision", "fp8"),
                         (3, "", "error: products in fp8: got GPU a100-80, whose data sheet has no fp8 rate, expected one that "
                          "multiplies fp8, or a precision without it\n"))
        # The host rounds to fp8 by itself, whatever GPU a plan is for.
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--kernel-set", "shardwright-host", "--seq", "64",
                     "--no-search", "--precision", "fp8", "-o", "host.json")

    def test_pipes(self):
        plan = self.succeed(*SMALL)
        (self.folder / "p.json").write_text(plan)
        self.assertEqual(self.succeed("simulate", "-", stdin=plan), self.succeed("simulate", "p.json"))
        self.assertEqual(self.succeed("inspect", "-", stdin=plan), self.succeed("inspect", "p.json"))
        # Written out with every flag again, the plan is the same file.
        self.assertEqual(self.succeed(*SMALL, "-o", "-"), plan)

    def test_user_files_are_embedded(self):
        config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
                  "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-06}
        (self.folder / "mine.json").write_text(json.dumps(config))
        plan = self.succeed("plan", "--model", "mine.json", "--seq", "16",
                            "--cluster", "h100-80 x4, nvlink 450 GB/s, nic 4x200 Gbit/s")
        (self.folder / "mine.json").unlink()
        document = json.loads(plan)
        self.assertEqual(document["model"]["json"], config)
        self.assertEqual(document["cluster"]["json"]["format"], "shardwright-cluster")
        self.assertIn("step_time_s", json.loads(self.succeed("simulate", "-", "--json", stdin=plan)))

    def test_documented_example(self):
        text = (TESTS.parent / "docs" / "plan_file.md").read_text(encoding="utf-8")
        example = text.split("```json\n")[1].split("```")[0]
        shown = json.loads(self.succeed("inspect", "-", "--json", stdin=example))
        self.assertEqual([unit["name"] for unit in shown["units"]], ["transformer.h.0", "root"])

    def test_old_hash(self):
        plan = json.loads(self.succeed(*SMALL))
        hash_now = plan["cluster"]["hash"]
        plan["cluster"]["hash"] = "fnv1a64:0000000000000000"
        self.assert_fails(
            3, 'standard input: cluster.hash: got "fnv1a64:0000000000000000", expected '
            f'"{hash_now}"; cluster "dgx-a100" has changed since this plan was made: make it again, or delete '
            "the hash to accept the change", "simulate", "-", stdin=json.dumps(plan))
        del plan["cluster"]["hash"]
        self.succeed("simulate", "-", stdin=json.dumps(plan))


class Inspect(ShardwrightTestCase):

    def test_plan_shows_nested_units(self):
        text = self.succeed("inspect", "-", stdin=self.succeed(*SMALL, "--recompute", "full"))
        # gpt2 by hand: a block has 12 * 768^2 + 13 * 768 = 7,087,872 parameters; what remains for the
        # root is wte 50257 * 768, wpe 1024 * 768 and ln_f 2 * 768.
        self.assertIn("(0-11): 12 x FSDPGPT2Block(  # unit: 7,087,872 parameters, freed after forward; recomputed",
                      text)
        self.assertIn(f"  # unit: {50257 * 768 + 1024 * 768 + 2 * 768:,} parameters, kept after forward", text)
        self.assertIn("(lm_head): Linear(weight [50257, 768] tied to transformer.wte.weight)", text)
        self.assertIn("step:", text)

    def test_program(self):
        plan = self.succeed(*SMALL)
        text = self.succeed("inspect", "-", "--program", stdin=plan)
        self.assertIn("mb0.transformer.h.3.bwd.reduce_scatter", text)
        machine = json.loads(self.succeed("inspect", "-", "--json", stdin=plan))
        self.assertEqual(len(machine["units"]), 13)
        self.assertEqual(machine["units"][0]["elements"], 7087872)

    def test_names_and_files(self):
        self.assertIn("8,030,261,248", self.succeed("inspect", "llama-3-8b"))
        self.assertEqual(json.loads(self.succeed("inspect", "gpt2", "--json"))["parameter_count"], 124439808)
        cluster = json.loads(self.succeed("inspect", "dgx-h100", "--json"))["cluster"]
        (self.folder / "c.json").write_text(json.dumps(cluster))
        self.assertIn("H100-SXM5-80GB", self.succeed("inspect", "c.json"))
        profile = json.loads(self.succeed("inspect", "generic", "--json"))["profile"]
        (self.folder / "f.json").write_text(json.dumps(profile))
        self.assertEqual(json.loads(self.succeed("inspect", "f.json", "--json"))["profile"], profile)
        self.assertIn("NIC", self.succeed("inspect", "h100-80 x8, nvlink 450 GB/s, nic 8x400 Gbit/s").upper())

    def test_trace(self):
        plan = self.succeed(*SMALL)
        (self.folder / "p.json").write_text(plan)
        self.succeed("simulate", "p.json", "--trace", "t.json.gz")
        self.assertTrue(self.succeed("inspect", "p.json", "--trace", "t.json.gz").endswith("agrees with its program\n"))
        checked = json.loads(self.succeed("inspect", "p.json", "--trace", "t.json.gz", "--json"))
        self.assertEqual((checked["kind"], checked["contradictions"]), ("trace", []))
        self.assertGreater(checked["spans"], 100)
        # A reduce-scatter that outlasts what waits for it contradicts the program.
        with gzip.open(self.folder / "t.json.gz", "rt") as file:
            trace = json.load(file)
        slices = [e for e in trace["traceEvents"] if e.get("args", {}).get("op", "").endswith("reduce_scatter")]
        slices[-1]["dur"] += 1e6
        (self.folder / "bad.json").write_text(json.dumps(trace))
        code, out, err = self.run_program("inspect", "p.json", "--trace", "bad.json")
        self.assertEqual((code, err), (1, ""))
        self.assertIn("\ncontradiction: ", out)
        self.assert_fails(3, "t.json.gz: got a trace, expected a trace together with its plan; "
                          "shardwright inspect PLAN --trace t.json.gz", "inspect", "t.json.gz")

    def test_unknown(self):
        self.assert_fails(3, 'inspect: got "lama-3-8b", expected a file, a folder with a config.json, or the name of '
                          'a model, cluster or profile; did you mean "llama-3-8b"?', "inspect", "lama-3-8b")


class Simulate(ShardwrightTestCase):

    def test_one_word_for_one_number(self):
        """Of exposed communication, and of a run that was measured."""
        self.assertEqual(self.succeed("simulate", "-", stdin=self.succeed(*SMALL)).count("exposed communication"), 1)
        flags = {"--model": "gpt2", "--cluster": "dgx-a100", "--seq": "128"}
        runs = [{"id": "timed", "step_time_s": 0.5, "flags": flags}, {"id": "not timed", "flags": flags}]
        (self.folder / "runs.json").write_text(json.dumps({"format": "shardwright-runs", "version": 1, "runs": runs}))
        head, timed, untimed = self.succeed("validate", "runs.json").splitlines()
        self.assertEqual(head.split(), ["run", "step", "measured", "off", "by", "reserved"])
        step = json.loads(self.succeed("validate", "runs.json", "--json"))["runs"][0]["step_time_s"]
        self.assertIn(f"500 ms  -{100 - step / 0.5 * 100:.1f} %", timed)
        self.assertEqual(len(untimed.split()), 6)  # "not timed", a step and bytes, each with a unit

    def test_a_node_without_a_link_to_its_host(self):
        cluster = json.loads((TESTS.parent / "topologies/catalog/dgx-a100.json").read_text())
        for key, names in (("links", ("from", "to")), ("components", ("name",))):
            cluster["node"][key] = [row for row in cluster["node"][key] if all(row[n] in ("gpu", "nvswitch") for n in names)]
        del cluster["fabric"]
        (self.folder / "box.json").write_text(json.dumps(cluster))
        self.succeed("plan", "--no-search", "--model", "gpt2", "--cluster", "box.json", "-o", "p.json")
        self.assert_fails(3, "cluster: node.links: got no link from a GPU to host memory, expected one of type \"pcie\" from gpu to cpu, "
                          'or "pcie 63 GB/s" in a description', "simulate", "p.json")

    def test_keys(self):
        result = json.loads(self.succeed("simulate", "-", "--json", stdin=self.succeed(*SMALL)))
        memory = result["memory"]
        for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_s"):
            self.assertGreater(result[key], 0.0, key)
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "outside_allocator_bytes"):
            self.assertGreater(memory[key], 0, key)
        self.assertEqual(sum(memory["at_peak"].values()), memory["peak_allocated_bytes"])
        self.assertGreaterEqual(memory["peak_reserved_bytes"], memory["peak_allocated_bytes"])
        # 4 bytes per element of the shards: GPT-2's parameters, 50,257 rows of the embedding padded to a
        # multiple of 4. AdamW's states come in the first update: twice as much in later steps.
        shards = (124439808 + 3 * 768) * 4 // 4
        self.assertEqual(memory["initialisation"]["peak_allocated_bytes"], shards)
        self.assertEqual(memory["at_peak"]["optimizer_state"], 2 * shards)
        self.assertEqual(memory["peak_allocated_bytes"], memory["steady_step"]["peak_allocated_bytes"])
        self.assertLess(memory["first_step"]["peak_allocated_bytes"], memory["peak_allocated_bytes"])
        # An arena needs room from first to last use only, allocated counts from alloc to free; the
        # buffers that live all through the run are in both.
        resident = sum(memory["at_peak"][c] for c in ("parameter_shard", "optimizer_state"))
        self.assertGreater(memory["placed_arena_bytes"], resident)
        # By definition: one sample of 128 tokens per rank and step.
        self.assertAlmostEqual(result["tokens_per_s_per_gpu"] * result["step_time_s"], 128.0, places=9)

    def test_llama_70b_on_1024_gpus(self):
        self.succeed("plan", "--model", "llama-3-70b", "--cluster", "dgx-h100", "--nodes", "128", "--seq", "8192",
                     "--micro-batch", "1", "--global-batch", "1024", "--dialect", "fsdp2", "--recompute", "full",
                     "--wrap", "block", "-o", "p.json")
        result = json.loads(self.succeed("simulate", "p.json", "--trace", "t.json.gz", "--json"))
        for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_s"):
            self.assertIsInstance(result[key], float)
        memory = result["memory"]
        self.assertEqual(sum(memory["at_peak"].values()), memory["peak_allocated_bytes"])
        self.assertLess(memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"],
                        memory["usable_device_bytes"])
        # FSDP2 pads each parameter's rows to a multiple of 1,024. All of Llama-3-70B's divide but the
        # 128,256 rows of embedding and head, which become 126 * 1024.
        padding = 2 * (126 * 1024 - 128256) * 8192
        self.assertEqual(memory["at_peak"]["parameter_shard"], (70553706496 + padding) * 4 // 1024)
        self.assertTrue((self.folder / "t.json.gz").exists())
        self.assertLess(result["mfu"], 1.0)

    def test_mfu_is_the_convention(self):
        """6 FLOPs per parameter and token, 12 * layers * hidden * seq per token (PaLM, appendix B)."""
        result = json.loads(self.succeed("simulate", "-", "--json", stdin=self.succeed(*SMALL)))
        # The tied table counts once, as the head.
        flops = 128 * (6 * 124439808 + 12 * 12 * 768 * 128)
        self.assertAlmostEqual(result["mfu"], flops / (result["step_time_s"] * 312e12), delta=1e-4 * result["mfu"])

    def test_traces(self):
        plan = self.succeed(*SMALL)
        report = self.succeed("simulate", "-", "--trace", "t.json", stdin=plan)
        self.assertEqual(report, self.succeed("simulate", "-", stdin=plan))
        trace = json.loads((self.folder / "t.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        self.assertTrue(any("transformer.h.3" in str(name) for name in names))
        self.succeed("simulate", "-", "--trace", "t.json.gz", stdin=plan)
        with gzip.open(self.folder / "t.json.gz", "rt") as file:
            self.assertEqual(json.load(file), trace)
        self.assertEqual(json.loads(self.succeed("simulate", "-", "--trace", "-", stdin=plan)), trace)
        self.succeed("simulate", "-", "--trace", "h.json", "--trace-profile", "hta", stdin=plan)
        # Holistic Trace Analysis needs "rank" at the top, followed by a space.
        self.assertIn('"rank": 0', (self.folder / "h.json").read_text())
        self.assert_fails(4, "missing/t.json: cannot write: No such file or directory",
                          "simulate", "-", "--trace", "missing/t.json", stdin=plan)

    def test_exact_equals_periodic(self):
        plan = self.succeed(*SMALL, "--accumulation", "4")
        self.assertEqual(self.succeed("simulate", "-", "--json", stdin=plan),
                         self.succeed("simulate", "-", "--json", "--exact", stdin=plan))

    def test_contention_only_slows(self):
        plan = self.succeed(*SMALL)
        times = [json.loads(self.succeed("simulate", "-", "--json", "--contention", c, stdin=plan))["step_time_s"]
                 for c in ("off", "on")]
        self.assertLessEqual(times[0], times[1])

    def test_answer_is_no(self):
        plan = self.succeed("plan", "--model", "llama-3-70b", "--cluster", "dgx-a100", "--seq", "512")
        code, out, err = self.run_program("simulate", "-", stdin=plan)
        self.assertEqual((code, err), (1, ""))
        # Before how fast it would be.
        self.assertRegex(out, r"^llama-3-70b on 1 x dgx-a100 \(8 GPUs\), fsdp2\n"
                         r"does not fit: peak allocated [\d.]+ GiB \+ outside the allocator [\d.]+ GiB = "
                         r"[\d.]+ GiB, of [\d.]+ GiB usable on a100-80; the largest part is optimizer_state, [\d.]+ GiB\n"
                         r"kernel set torch-eager, sequence 512, batch 8 = 8 ranks x micro-batch 1 x accumulation 1\n")
        self.assertIn("step time", out)
        self.assertNotIn("to spare", out)
        code, out, err = self.run_program("simulate", "-", "--json", stdin=plan)
        result = json.loads(out)
        self.assertEqual((code, err, result["fits"], len(result["misfits"])), (1, "", False, 1))
        # What the allocator could not get counts as reserved, too.
        self.assertGreaterEqual(result["memory"]["peak_reserved_bytes"], result["memory"]["peak_allocated_bytes"])
        # Shards, gradients and two AdamW states in fp32 alone: 70,553,706,496 * 16 / 8 bytes.
        self.assertGreater(result["memory"]["peak_allocated_bytes"], 70553706496 * 16 // 8)

    def test_how_sure_a_fit_is(self):
        # All memory that a plan needs, and a little more: nothing that is known so well.
        plan = self.succeed(*SMALL)
        memory = json.loads(self.succeed("simulate", "-", "--json", stdin=plan))["memory"]
        need = memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"]
        self.assertRegex(self.succeed("simulate", "-", stdin=plan), r"\nfits: [\d.]+ GiB to spare, and this may be off by [\d.]+ GiB\n$")
        # A margin is left free for that error: it does not count a second time.
        margin = 1 - (need + memory["error_bytes"] / 2) / memory["usable_device_bytes"]
        with_margin = self.succeed(*SMALL, "--memory-margin", str(margin))
        self.assertRegex(self.succeed("simulate", "-", stdin=with_margin), r"\nfits: [\d.]+ GiB to spare below the limit of [\d.]+ "
                                                                            r"GiB, and this may be off by [\d.]+ GiB\n$")
        # As many samples as leave half of that error.
        def need_of(samples):
            plan = self.succeed(*SMALL, "--micro-batch", str(samples))
            memory = json.loads(self.run_program("simulate", "-", "--json", stdin=plan)[1])["memory"]
            return memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"]
        few, many = need_of(16), need_of(32)
        samples = 16 + int(16 * (memory["usable_device_bytes"] - memory["error_bytes"] / 2 - few) / (many - few))
        tight = self.succeed(*SMALL, "--micro-batch", str(samples))
        while self.run_program("simulate", "-", stdin=tight)[0] != 0:
            samples -= 1
            tight = self.succeed(*SMALL, "--micro-batch", str(samples))
        self.assertRegex(self.succeed("simulate", "-", stdin=tight),
                         r"\nclose, may not fit: [\d.]+ [MG]iB to spare, less than the [\d.]+ GiB that this may be off by: it may run out of memory\n$")

    def test_images_are_called_images(self):
        out = self.succeed("simulate", "-", stdin=self.succeed("plan", "--model", "vit-b-16", "--cluster", "dgx-a100"))
        self.assertIn("images/s per GPU", out)
        self.assertNotIn("tokens", out)

    def test_memory_margin(self):
        usable = [json.loads(self.succeed("simulate", "-", "--json", stdin=self.succeed(*SMALL, *flags)))
                  ["memory"]["usable_device_bytes"] for flags in ((), ("--memory-margin", "0.25"))]
        self.assertAlmostEqual(usable[1] / usable[0], 0.75, places=9)


class Environment(ShardwrightTestCase):

    def test_cannot_write(self):
        self.assert_fails(4, "missing/p.json: cannot write: No such file or directory", *SMALL, "-o", "missing/p.json")

    def test_full_disk(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            self.assertEqual(self.run_program("list", "models", stdout=full),
                             (4, None, "error: standard output: cannot write: No space left on device\n"))
        self.assert_fails(4, "/dev/full: cannot write: No space left on device", *SMALL, "-o", "/dev/full")

    def test_interrupt(self):
        for arguments in (("inspect", "-"), ("simulate", "-", "--trace", "t.json")):
            self.assertEqual(interrupted(arguments, self.folder), (130, "", "interrupted\n"))
            self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    main()
