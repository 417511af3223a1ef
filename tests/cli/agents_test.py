"""What assistants and a repository's CI get: AGENTS.md, SKILL.md and llms.txt are current, action.yml and the hook of pre-commit work."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import TESTS, ShardwrightTestCase, main

ROOT = TESTS.parent
BUDGET = '[job.small]\nflags = ["--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128"]\nmemory = "{limit}"\n'


class Agents(ShardwrightTestCase):

    def test_pages_are_current(self):
        done = subprocess.run([sys.executable, ROOT / "scripts/agents.py", "--check", shardwright_test_case.PROGRAM], text=True, capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_what_they_say_to_type_exists(self):
        table = {command["name"]: command for command in json.loads(self.succeed("--help", "--json"))["commands"]}
        typed = re.findall(r"`shardwright ([^`]*)`", (ROOT / "SKILL.md").read_text())
        self.assertGreater(len(typed), 12)
        for line in typed:
            name, *words = shlex.split(line)
            if name != "COMMAND":
                flags = {row["name"] for row in (*table[name]["flags"], *table[name]["switches"])} | {"-o"}
                self.assertLessEqual({word for word in words if re.match("--?[a-z]", word)}, flags, line)

    def test_every_command_is_listed(self):
        names = re.findall(r"^  ([a-z][\w-]*)  ", self.succeed("--help"), re.MULTILINE)
        self.assertGreater(len(names), 27)
        for page in ("AGENTS.md", "llms.txt"):
            self.assertEqual(re.findall(r"^- `([\w-]+)`: ", (ROOT / page).read_text(), re.MULTILINE), names)


class Checks(ShardwrightTestCase):
    """The steps as a runner starts them: bash, the inputs in the environment."""

    def start(self, command, **environment):
        path = f"{pathlib.Path(shardwright_test_case.PROGRAM).resolve().parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(["bash", "-e", "-o", "pipefail", "-c", command], cwd=self.folder, env={**os.environ, "PATH": path, **environment},
                              text=True, capture_output=True)

    def write(self, limit, name="budget.toml"):
        (self.folder / name).write_text(BUDGET.format(limit=limit))

    def action(self, **inputs):
        """The last step of action.yml; inputs that are not given have their defaults."""
        text = (ROOT / "action.yml").read_text()
        step = text.split("    - ")[-1]
        values = {name: inputs.get(name, re.search(rf'^  {name}:\n.*\n    default: "?([^"\n]*)', text, re.MULTILINE)[1])
                  for name in re.findall(r"inputs\.(\w+) ", step)}
        self.assertEqual(set(values), {"budget", "last"})
        names = dict(re.findall(r"(\w+): \$\{\{ inputs\.(\w+) \}\}", step))
        command = re.search(r"run: (.*)", step)[1]
        self.assertNotIn("${{", command)  # an input in a command line would be code
        return self.start(command, **{variable: values[name] for variable, name in names.items()})

    def test_action(self):
        self.write("70 GiB")
        self.assertEqual(self.action().returncode, 0)
        self.write("1 MiB")
        done = self.action()
        self.assertEqual(done.returncode, 1)
        self.assertIn("::error", done.stdout)
        self.write("70 GiB", "a b.toml")
        self.succeed("check", "a b.toml", "--save", "last one.json")
        self.assertEqual(self.action(budget="a b.toml", last="last one.json").returncode, 0)
        self.assertEqual(self.action(budget="--save=x.json").returncode, 3)  # a name, no flag
        self.assertFalse((self.folder / "x.json").exists())

    def test_hook(self):
        text = (ROOT / ".pre-commit-hooks.yaml").read_text()
        entry, arguments, files = (re.search(rf"^  {key}: (.*)$", text, re.MULTILINE)[1] for key in ("entry", "args", "files"))
        command = f"{entry} {arguments.strip('[]').replace(',', '')}"
        self.assertTrue(re.search(files, "budget.toml") and re.search(files, "model/config.json") and not re.search(files, "a.py"))
        self.write("70 GiB")
        self.succeed("check", "budget.toml", "--save", "budget.json")
        self.assertEqual(self.start(command).returncode, 0)
        self.write("1 MiB")
        self.assertEqual(self.start(command).returncode, 1)


if __name__ == "__main__":
    main()
