"""The page's engine gives the native program's answers: random jobs through both, compared byte for byte.

    answers_test.py SHARDWRIGHT [--chromium] [JOBS [SEED]]      under Node, or in the page in Chromium

What may differ is named here: "search_s" is a measured time. Everything else that differs is an error; numbers within 1e-9 of each
other are counted and named by their key, as mathematical functions of two C libraries may round apart.
"""

import json
import math
import pathlib
import random
import sys
import tempfile
import unittest

import web_test_case

PROGRAM = sys.argv.pop(1)
IN_BROWSER = "--chromium" in sys.argv
if IN_BROWSER:
    sys.argv.remove("--chromium")
JOBS = int(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 20
SEED = int(sys.argv.pop(1)) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 1
if IN_BROWSER:
    try:
        import chromium
    except ImportError as missing:
        web_test_case.skip_without(False, f"{missing.name} is not installed")
else:
    web_test_case.skip_without(web_test_case.have_node(), "node is not installed")
web_test_case.skip_unbuilt()

MODELS = ("gpt2", "gpt2-xl", "llama-2-7b", "llama-3-8b", "llama-3.2-1b", "mistral-7b", "qwen2-0.5b", "gemma-2-2b", "opt-1.3b", "pythia-1.4b",
          "bert-base", "mixtral-8x7b", "flan-t5-base", "llama-3-70b")
CLUSTERS = ("dgx-a100", "dgx-h100", "p4d", "dgx-v100", "8x H100", "a100-80 x8, nvlink 300 GB/s, nic 8x200 Gbit/s")
DIALECTS = ("fsdp2", "fsdp1", "ddp", "native", "zero1", "zero2", "zero3")
TARGETS = ("fsdp2", "fsdp1", "accelerate", "deepspeed", "torchtitan", "trainer", "lightning")


def random_plan(chance):
    """Words of `plan` without a search."""
    dialect = chance.choice(DIALECTS)
    words = ["plan", "--json", "--no-search", f"--model={chance.choice(MODELS)}", f"--cluster={chance.choice(CLUSTERS)}", f"--dialect={dialect}",
             f"--nodes={chance.choice((1, 2, 4))}", f"--seq={chance.choice((128, 512))}", f"--micro-batch={chance.choice((1, 2, 3))}"]
    if chance.random() < 0.5:
        words.append(f"--recompute={chance.choice(('full', 'selective', 'selective:3'))}")
    if chance.random() < 0.3:
        words.append(f"--precision={chance.choice(('bf16', 'fp32', 'fp16-mixed'))}")
    if chance.random() < 0.3:
        words.append(f"--accumulation={chance.choice((2, 3))}")
    if chance.random() < 0.2 and dialect in ("fsdp2", "fsdp1"):
        words.append("--wrap=size:1e8")
    if chance.random() < 0.2:
        words.append("--lora-rank=8")
    return words


def random_search(chance):
    return ["plan", "--json", "--threads=1", f"--model={chance.choice(('gpt2', 'llama-3.2-1b', 'qwen2-0.5b'))}",
            f"--cluster={chance.choice(('dgx-a100', 'dgx-h100'))}", f"--nodes={chance.choice((1, 2))}", f"--seq={chance.choice((256, 1024))}",
            "--global-batch=32", f"--dialect={chance.choice(('fsdp2', 'fsdp1'))}"]


def differences(a, b, where=""):
    """(place, relative difference) of every value that differs; inf for what is no number."""
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return [found for key in a for found in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [found for x, y in zip(a, b) for found in differences(x, y, f"{where}[]")]
    if a == b:
        return []
    if isinstance(a, float) and isinstance(b, float):
        return [(where, abs(a - b) / max(abs(a), abs(b)))]
    return [(where, math.inf)]


def without_machine(text):
    """An answer without what it says of the machine: the cores on which the cluster `host` runs."""
    answer = json.loads(text)
    for cluster in answer.get("clusters", []) if isinstance(answer.get("clusters"), list) else []:
        if cluster["name"] == "host":
            cluster.pop("cores", None)
    return answer


class Page:
    """The engine in the worker of the page, which a browser shows."""

    def __init__(self):
        self.driver = chromium.start()
        self.driver.set_script_timeout(600)
        self.driver.get((web_test_case.BUILT / "shardwright.html").as_uri())

    def run(self, *words, files=(), text=""):
        job = {"words": list(words), "input": text, "files": [{"name": name, "content": content} for name, content in files]}
        return self.driver.execute_async_script(
            "const [job, done] = arguments, progress = []; engine.run(job, (told) => progress.push(told))"
            ".then((result) => done({...result, progress}), (error) => done({broken: error.message}));", job)

    def close(self):
        self.driver.quit()


class SameAnswers(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.engine = Page() if IN_BROWSER else web_test_case.Engine()
        cls.addClassCleanup(cls.engine.close)
        cls.apart = {}

    def same(self, words, text="", files=None):
        """Both run it; the native output. `files`: {name: content}; a word "@name" is that file."""
        files = files or {}
        with tempfile.TemporaryDirectory() as scratch:
            paths = {}
            for name, content in files.items():
                path = pathlib.Path(scratch) / name.removesuffix(".json") / name  # as web/engine.js has it
                path.parent.mkdir()
                path.write_text(content, encoding="utf-8")
                paths[f"@{name}"] = str(path)
            code, output, errors = (part.replace(scratch, "/files") if isinstance(part, str) else part for part in
                                    web_test_case.native(PROGRAM, *(paths.get(word, word) for word in words), text=text))
        page = self.engine.run(*words, text=text, files=files.items())
        self.assertNotIn("broken", page, words)
        errors = "".join(line for line in errors.splitlines(True) if not line.startswith("searching "))  # how far it is
        # The program calls its input by another name.
        self.assertEqual(page["errors"].replace("the text that was given", "standard input"), errors, words)
        self.assertEqual(page["code"], code, words)
        if page["output"] != output:
            for place, size in differences(without_machine(output), without_machine(page["output"])):
                if place != ".search_s":
                    self.assertLessEqual(size, 1e-9, f"{words}: {place}")
                    self.apart[place] = max(size, self.apart.get(place, 0))
        return output

    def test_plans(self):
        chance = random.Random(SEED)
        plans, before = 0, None
        for _ in range(JOBS):
            output = self.same(random_plan(chance))
            if output == "":
                continue  # no such plan: both said the same
            plans += 1
            plan = json.dumps(json.loads(output)["plan_file"])
            self.same(["simulate", "--json", "-"], plan)
            command = chance.choice(("emit", "inspect", "report"))
            self.same([command, "--json", "-"] + ([f"--to={chance.choice(TARGETS)}"] if command == "emit" else []), plan)
            if before is not None and chance.random() < 0.3:
                self.same(["diff", "--json", "@before.json", "@after.json"], files={"before.json": before, "after.json": plan})
            before = plan
        self.assertGreater(plans, JOBS // 3)
        print(f"{plans} plans of {JOBS} jobs; numbers that differ by rounding: {self.apart or 'none'}")

    def test_searches(self):
        chance = random.Random(SEED + 1)
        for _ in range(max(2, JOBS * 40 // 300)):
            self.same(random_search(chance))

    def test_estimates(self):
        chance = random.Random(SEED + 2)
        for _ in range(max(2, JOBS // 30)):
            self.same(["estimate", "--json", chance.choice(MODELS), chance.choice(("8xH100", "4xA100-80", "2x4090")), f"--seq={chance.choice((256, 1024))}"])

    def test_other_commands(self):
        job = ["--json", "--model=gpt2", "--cluster=dgx-a100", "--seq=128"]
        self.same(["sweep", *job, "--nodes=1,2", "--micro-batch=1,2"])
        self.same(["baselines", *job])

    def test_a_config_of_each_family(self):
        """A config.json as people have it, of each kind that the zoo holds."""
        zoo = {json.loads(path.read_text(encoding="utf-8")).get("model_type"): path for path in (web_test_case.ROOT / "models/zoo").glob("*.json")}
        self.assertGreater(len(zoo), 10)
        for family, path in sorted(zoo.items(), key=str):
            with self.subTest(family=family):
                files = {"config.json": path.read_text(encoding="utf-8")}
                self.same(["inspect", "--json", "@config.json"], files=files)
                self.same(["plan", "--json", "--no-search", "--model", "@config.json", "--cluster=dgx-h100", "--seq=128"], files=files)

    def test_help_and_errors(self):
        self.same(["plan", "--json", "--model=no-such-model", "--cluster=dgx-h100"])
        self.same(["plan", "--json", "--model=gpt2", "--cluster=dgx-h100", "--seq=0"])
        self.same(["plan", "--modle=gpt2"])
        self.same(["plan", "--help", "--json"])
        self.same(["list", "models", "--json"])
        self.same(["list", "clusters", "--json"])

    def test_progress(self):
        result = self.engine.run(*random_search(random.Random(SEED)))
        self.assertGreater(len(result["progress"]), 1)
        last = result["progress"][-1]
        found = json.loads(result["output"])
        self.assertLessEqual(last["simulated"], found["candidates"]["simulated"])
        self.assertGreater(last["simulated"], 0)


if __name__ == "__main__":
    unittest.main()
