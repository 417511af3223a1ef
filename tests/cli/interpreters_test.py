"""No code out of the current folder: it holds a module under every name of the standard library and of what `export` imports.

    python3 tests/cli/interpreters_test.py SHARDWRIGHT

Every command of `--help --json` runs there, and `export`, which starts Python, in all of its forms. Each planted module leaves a line in
a file when it is imported.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

try:
    import torch  # noqa: F401
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

import untouched_test
from shardwright_test_case import TESTS, ShardwrightTestCase, main
from training_test_case import TINY

TOOLS = TESTS.parent / "tools"
# Beside the standard modules: what Python looks for by itself, what the tool imports, and what PyTorch and Transformers try to import.
OTHERS = ("sitecustomize", "usercustomize", "torch", "numpy", "transformers", "torchvision", "safetensors", "huggingface_hub", "triton",
          "flash_attn", "apex", "tensorflow", "jax", "regex", "tqdm", "packaging", "requests", "yaml", "filelock", "typing_extensions",
          "model_export", "export_model", "outside", "__main__")
NET = """
import collections, dataclasses, json, random, string
import torch
from sibling import Block
assert "planted" not in json.__doc__

def build():
    print("what a model prints")
    return Block()
"""
SIBLING = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()
"""


def without_torchao(text):
    """transformers imports torchao where it is installed, which says what it lacks here."""
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"Failed to load .*torchao|W\d{4} .*/_pytree\.py", line))


class Interpreters(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        outside = tempfile.TemporaryDirectory()
        self.addCleanup(outside.cleanup)
        self.outside = pathlib.Path(outside.name)
        self.mark = self.outside / "mark"
        plant = f"'planted'\nopen({str(self.mark)!r}, 'a').write(__name__ + ' ' + __file__ + chr(10))\n"
        for i, name in enumerate(sorted({*sys.stdlib_module_names, *OTHERS})):
            (self.folder / f"{name}.py").write_text(plant)
            if i % 2:  # a package comes before a module
                (self.folder / name).mkdir(exist_ok=True)
                (self.folder / name / "__init__.py").write_text(plant)
        for name in ("python", "python3", "bin/python", "bin/python3", "nvidia-smi", "sh"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(f"#!/bin/sh\necho {name} >> {self.mark}\nexit 1\n")
            (self.folder / name).chmod(0o755)
        (self.folder / "pyvenv.cfg").write_text(f"home = {self.folder}\n")
        (self.folder / "x.pth").write_text(f"import os; open({str(self.mark)!r}, 'a')\n")
        (self.folder / "config.json").write_text(json.dumps(TINY))

    def assert_nothing_ran(self, what):
        self.assertFalse(self.mark.exists(), (what, self.mark.exists() and self.mark.read_text()))

    def export(self, *words, **environment):
        self.mark.unlink(missing_ok=True)
        environment = {**{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}, **environment}
        done = subprocess.run([untouched_test.shardwright_test_case.PROGRAM, "export", *words, "--python", sys.executable, "--json"],
                              cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=500)
        return done.returncode, done.stdout, without_torchao(done.stderr)

    def test_the_plants_work(self):
        """Python started as `export` did before; else this test would show nothing."""
        subprocess.run([sys.executable, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"],
                       cwd=self.folder, capture_output=True, check=False)
        self.assertTrue(self.mark.exists())

    def test_every_command(self):
        plan = self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "2", "--seq", "128", "--no-search")
        (self.folder / "plan.json").write_text(plan)
        for name, row in untouched_test.commands().items():
            places = [place["name"] for place in (*row["positionals"], *row["flags"]) if place["file"] == "read"]
            for place in places[:1] or [""]:
                words = untouched_test.Untouched.words(name, row, place, "plan.json", self.outside)
                self.run_program(*[word for word in words if word])
                self.assert_nothing_ran(words)
        for words in (("topo", "probe"), ("doctor",), ("estimate", "gpt2", "here")):
            self.run_program(*words)
            self.assert_nothing_ran(words)

    def test_a_configuration(self):
        for environment in ({}, {"PYTHONPATH": ""}, {"PYTHONPATH": ":.::bin:"}, {"PYTHONSTARTUP": "os.py", "PYTHONHOME": ""}):
            code, _, err = self.export("config.json", "--seq", "16", "-o", "model.json", **environment)
            self.assert_nothing_ran(environment)
            self.assertEqual((code, err), (0, ""))
            self.assertEqual(json.loads((self.folder / "model.json").read_text())["format"], "shardwright-model")

    def test_a_module_of_the_folder_runs_because_it_was_named(self):
        (self.folder / "net.py").write_text(NET)
        (self.folder / "sibling.py").write_text(SIBLING)
        shutil.rmtree(self.folder / "triton", ignore_errors=True)  # which PyTorch looks for when it runs, and this one is empty
        (self.folder / "triton.py").unlink()
        code, out, err = self.export("net:build", "--input", "x=8x8", "-o", "model.json")
        self.assertEqual((code, err), (0, "what a model prints\n"))
        self.assertEqual(json.loads(out)["parameter_count"], 72)
        # What PyTorch imports when it is used may be missing, and found behind the named module; no standard module is.
        ran = self.mark.read_text().split() if self.mark.exists() else []
        self.assertEqual({name for name in ran[::2] if name in sys.stdlib_module_names}, set())
        self.assertEqual({name for name in ran[::2] if name in ("torch", "numpy", "transformers")}, set())

    def test_a_link_in_the_place_of_the_default_output(self):
        victim = self.outside / "victim"
        victim.write_text("mine")
        (self.folder / "model.json").symlink_to(victim)
        code, _, err = self.export("config.json", "--seq", "16")
        self.assertEqual((code, err), (4, "error: model.json: cannot write: it is a link, folder or device, expected a file or nothing; "
                                          "remove it, or name another folder\n"))
        self.assertEqual(victim.read_text(), "mine")
        (self.folder / "model.json").unlink()
        code, out, _ = self.export("config.json", "--seq", "16", "-o", "-")
        self.assertEqual((code, json.loads(out)["format"]), (0, "shardwright-model"))
        self.assertEqual(self.export("config.json", "--seq", "16", "-o", "config.json")[0], 2)

    def test_an_installed_module_is_not_the_folders(self):
        code, _, err = self.export("torch.nn:Identity", "--input", "x=8x8", "-o", "model.json")
        self.assert_nothing_ran(err)
        self.assertEqual(code, 0)
        self.assertNotIn("No module", err)

    def test_packages_of_the_user(self):
        """What PYTHONPATH names as an absolute folder is searched; standard modules are not looked for there."""
        packages = self.outside / "packages"
        packages.mkdir()
        (packages / "theirnet.py").write_text(SIBLING)
        for name in ("random", "json"):
            shutil.copy(self.folder / f"{name}.py", packages)
        code, _, err = self.export("theirnet:Block", "--input", "x=8x8", "-o", "model.json", PYTHONPATH=f":{packages}")
        self.assertEqual((code, err), (0, ""))
        self.assert_nothing_ran("PYTHONPATH")

    def test_the_site_of_the_user(self):
        """Of a Python that is no virtual environment, as without -I."""
        home = self.outside / "home"
        code = ("import sys, os; sys.path.insert(0, os.environ['TOOLS']); from model_export import outside; outside.search_packages();"
                "import theirs, json; print(theirs.NAME, 'planted' in (json.__doc__ or ''))")
        python = os.path.realpath(sys.executable)
        environment = {"PATH": os.environ["PATH"], "PYTHONUSERBASE": str(home), "TOOLS": str(TOOLS)}
        folder = pathlib.Path(subprocess.run([python, "-c", "import site; print(site.getusersitepackages())"], capture_output=True, text=True,
                                             env=environment, cwd=self.outside, check=True).stdout.strip())
        folder.mkdir(parents=True)
        (folder / "theirs.py").write_text("NAME = 'theirs'\n")
        shutil.copy(self.folder / "json.py", folder)
        for more, expected in (({}, "theirs False\n"), ({"PYTHONNOUSERSITE": "1"}, "")):
            done = subprocess.run([python, "-I", "-c", code], env={**environment, **more}, cwd=self.folder, capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.stdout, expected, done.stderr)
        self.assert_nothing_ran("site")

    def test_the_tool_by_itself(self):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        done = subprocess.run([sys.executable, str(TOOLS / "export_model.py"), "--config", "config.json", "--seq", "16", "-o", "-"],
                              cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, without_torchao(done.stderr)), (0, ""))
        self.assertEqual(json.loads(done.stdout)["format"], "shardwright-model")
        self.assert_nothing_ran("tool")


if __name__ == "__main__":
    main()
