"""Names that control a terminal, end a string or begin a command: what is printed shows them, what is emitted means them.

10,000 random ones, as modules of models and in cluster and plan files.
"""

import ast
import json
import pathlib
import random
import sys
import unicodedata

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

try:
    import tomllib

    import yaml
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase

# What a terminal, a shell, a quote, a comment or a page would obey. A module's name has no dot and a repeat's no braces.
HOSTILE = ("\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\x90q", "\x07", "\x08", "\r", "\n", "\t", "\x7f", "\x80", "\x85", "\x9f", "\u061c",
           "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202e", "\u2066", "\u2069", "\ufffe", "\uffff", "\ufeff", "\nFORGED", "\n- FORGED: 1",
           "\n[FORGED]\n", '"', "'", '"""', "'''", "\\", "\\n", "\\u0041", "\\x41", "`id`", "$(id)", "${HOME}", "; rm x", "&&", "|", "#", "<!--",
           "</script>", "<b>", "%s", "%n", "!tag", "&a", "*a", "- ", "? ", ": ", "=", ",", "é", "測", "🙂", "no", "null", "1e5", " ")
PLAIN = "abcdefgXYZ0129_"
TARGETS = ("fsdp2", "fsdp1", "accelerate", "trainer", "deepspeed", "torchtitan", "lightning", "slurm", "torchrun")
NAMES_OF_A_MODEL = 500
MODELS = 20


def hostile_name(rng):
    parts = [rng.choice(HOSTILE) if rng.random() < 0.6 else "".join(rng.choices(PLAIN, k=rng.randint(1, 4)))
             for _ in range(rng.randint(1, 5))]
    return "".join(parts).replace(".", "").replace("{", "")


def hostile_names(rng, count):
    names = set()
    while len(names) < count:
        names.add(hostile_name(rng) + f"{len(names)}")
    return sorted(names)


def model_of(names, class_name):
    """A chain of linear modules with these names."""
    modules = [{"name": name, "class": class_name, "params": [{"name": "weight", "shape": [8, 8]}]} for name in names]
    ops = [{"op": "embedding", "module": "embed", "inputs": ["ids"], "output": "x0"}]
    ops += [{"op": "linear", "module": f"blocks.{name}", "inputs": [f"x{i}"], "output": f"x{i + 1}"} for i, name in enumerate(names)]
    ops += [{"op": "linear", "module": "head", "inputs": [f"x{len(names)}"], "output": "logits"},
            {"op": "cross_entropy", "name": "loss", "inputs": ["logits", "labels"], "output": "loss"}]
    return {"format": "shardwright-model", "version": 1, "class": "Net", "block_class": class_name, "sequence_length": 8,
            "inputs": {"ids": {"ids": "sequence_length"}, "labels": {"ids": "sequence_length"}},
            "modules": [{"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [16, 8]}]},
                        {"name": "blocks", "class": "ModuleList", "modules": modules},
                        {"name": "head", "class": "Linear", "params": [{"name": "weight", "shape": [16, 8]}]}],
            "ops": ops}


def controls(text):
    """What a terminal would obey, but for newlines and tabs."""
    return [c for c in text if (unicodedata.category(c) in ("Cc", "Zl", "Zp") and c not in "\n\t")
            or unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI") or c in "\u061c\u200e\u200f"]


def strings_in(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
    elif isinstance(value, str):
        yield value


class Names(ShardwrightTestCase):

    def show(self, *arguments, codes=(0, 1)):
        """What a command prints, which must be fit for a terminal."""
        code, out, err = self.run_program(*arguments)
        self.assertIn(code, codes, err[:500])
        for text in (out, err):
            self.assertEqual(controls(text), [], arguments)
            if "--json" not in arguments and arguments != ("report", "plan.json"):  # a page has lines of its own
                self.assertEqual([line for line in text.splitlines() if line.lstrip("-[ ").startswith("FORGED")], [], arguments)
        return out

    def read(self, path):
        """The data of an emitted file, by a parser of its format."""
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix == ".py":
            return [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return None

    def hostile_plan(self, rng, wrap="module"):
        names = hostile_names(rng, NAMES_OF_A_MODEL)
        class_name = hostile_name(rng)
        (self.folder / "model.json").write_text(json.dumps(model_of(names, class_name)))
        self.show("plan", "--model", "model.json", "--cluster", "dgx-h100", "--gpus", "4", "--wrap", wrap, "--recompute", "none", "-o",
                  "plan.json")
        plan = json.loads((self.folder / "plan.json").read_text())
        for part, key in (("cluster", "name"), ("cluster", "description")):
            if key in plan.get(part, {}).get("json", {}):
                plan[part]["json"][key] = hostile_name(rng)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        return names, class_name

    def test_emitters(self):
        for seed in range(MODELS):
            rng = random.Random(seed)
            names, class_name = self.hostile_plan(rng, rng.choice(("module", "block")))
            for target in TARGETS:
                with self.subTest(seed=seed, target=target):
                    code, out, err = self.run_program("emit", "plan.json", "--to", target, "-o", f"{target}/", "--json")
                    self.assertEqual(controls(out + err), [])
                    if code != 0:  # what this target cannot express
                        self.assertEqual(code, 3, err)
                        continue
                    for file in json.loads(out)["files"]:
                        data = self.read(self.folder / file["path"])
                        if file["path"].endswith(".json") and target in ("fsdp2", "fsdp1"):
                            self.check_units(data, names)
                        self.assertEqual([s for s in strings_in(data) if s.lstrip("-[ ").startswith("FORGED")], [])
                        if target == "accelerate":
                            self.assertEqual(data["fsdp_config"].get("fsdp_transformer_layer_cls_to_wrap", class_name), class_name)

    def check_units(self, data, names):
        """The data of the wrapping names the modules as the model does."""
        told = {module.removeprefix("blocks.") for unit in data["units"] for module in unit["modules"]}
        self.assertLessEqual(set(names), told)

    def test_commands(self):
        rng = random.Random(1)
        self.hostile_plan(rng)
        for arguments in (["inspect", "model.json"], ["inspect", "plan.json"], ["inspect", "plan.json", "--program"],
                          ["simulate", "plan.json"], ["simulate", "plan.json", "--exact"],
                          ["simulate", "plan.json", "--trace", "trace.json"],
                          ["report", "plan.json", "-o", "page.html"], ["report", "plan.json"], ["diff", "plan.json", "plan.json"],
                          ["goodput", "plan.json", "--tokens", "1e9", "--mtbf", "1000 h", "--checkpoint-time", "1 min"],
                          ["emit", "plan.json", "--to", "fsdp2", "-o", "out/"], ["emit", "plan.json", "--to", "accelerate"],
                          ["emit", "plan.json", "--to", "deepspeed"], ["plan", "--model", "model.json", "--cluster", "dgx-h100"],
                          ["inspect", "plan.json", "--trace", "trace.json"], ["compare", "trace.json", "trace.json"]):
            for json_flag in ([], ["--json"]):
                if json_flag and ("--program" in arguments or "page.html" in arguments):
                    continue
                with self.subTest(arguments=arguments + json_flag):
                    out = self.show(*arguments, *json_flag)
                    if json_flag:
                        json.loads(out)

    def test_errors(self):
        """Each text of an error is one line."""
        rng = random.Random(2)
        for _ in range(200):
            name = hostile_name(rng).replace("/", "")
            (self.folder / "bad.json").write_text(json.dumps({"format": "shardwright-model", "version": 1, name: 1}))
            (self.folder / "twice.json").write_text("{" + f"{json.dumps(name)}: 1, {json.dumps(name)}: 2" + "}")
            for arguments in (["plan", "--model", name + "x", "--cluster", "dgx-h100"], ["plan", "--model", "gpt2", "--cluster", name + "x"],
                              ["inspect", "bad.json"], ["inspect", "twice.json"], ["simulate", "twice.json"], ["plan", f"--{name}"],
                              [name + "x"], ["inspect", "x" + name + ".json"], ["plan", "--model", "gpt2", "--wrap", name + "x"]):
                code, out, err = self.run_program(*arguments)
                self.assertIn(code, (2, 3), arguments)
                self.assertEqual((out, err.count("\n"), controls(err)), ("", 1, []), arguments)


if __name__ == "__main__":
    shardwright_test_case.main()
