"""What makes the program pleasant: completion, manual pages, diff, doctor, colours."""

import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

PLAN = ("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128")


class ShellTestCase(ShardwrightTestCase):

    def call(self, *words):
        shell = shardwright_test_case.TESTS.parent / "python" / "shardwright" / "shell.py"
        return subprocess.run([sys.executable, "-B", shell, "--program", shardwright_test_case.PROGRAM, *words], cwd=self.folder, text=True,
                              capture_output=True, check=False)

    def shell(self, *words):
        done = self.call(*words)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout


class Completion(ShellTestCase):

    def complete(self, *words):
        """What bash offers for the last word."""
        program = pathlib.Path(shardwright_test_case.PROGRAM)
        (self.folder / "script").write_text(self.shell("bash"))
        line = " ".join(f"'{word}'" for word in words)
        script = f'source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shardwright; printf "%s\\n" "${{COMPREPLY[@]}}"'
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", script], cwd=self.folder, env=environment, text=True, capture_output=True, check=True)
        return done.stdout.split()

    def test_bash(self):
        self.assertEqual(self.complete("shardwright", "calib"), ["calibrate"])
        self.assertEqual(self.complete("shardwright", "simulate", "--conte"), ["--contention"])
        self.assertEqual(self.complete("shardwright", "simulate", "--contention", "o"), ["on", "off"])
        self.assertIn("llama-3-8b", self.complete("shardwright", "plan", "--model", "llama-3"))
        (self.folder / "myplan.json").write_text("")
        self.assertEqual(self.complete("shardwright", "simulate", "mypl"), ["myplan.json"])

    def test_every_shell_knows_every_command(self):
        commands = re.findall(r"^  ([a-z][\w-]*)  ", self.succeed("--help"), re.MULTILINE)
        self.assertGreater(len(commands), 10)
        for shell in ("bash", "zsh", "fish"):
            script = self.shell(shell)
            for command in commands:
                self.assertRegex(script, rf"\b{command}\b")


class Manual(ShellTestCase):

    def test_pages(self):
        for words in ((), ("plan",), ("report",), ("check",)):
            page = self.shell("man", *words)
            self.assertTrue(page.startswith(".TH SHARDWRIGHT"))
            for line in page.splitlines():
                if line.startswith((".", "'")):
                    self.assertRegex(line, r"^\.(TH|SH|TP|nf|fi)\b")
        # Every flag of the help is in the manual.
        flags = set(re.findall(r"^  (--[a-z-]+)", self.succeed("plan", "--help"), re.MULTILINE))
        page = self.shell("man", "plan").replace("\\-", "-")
        self.assertGreater(len(flags), 20)
        for flag in flags:
            self.assertIn(f"\\fB{flag}", page)

    def test_unknown_command(self):
        done = self.call("man", "plann")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn('man: got "plann", expected one of estimate, plan, ', done.stderr)

    def test_all_are_written(self):
        self.assertEqual(self.call("write", "pages", "completions").returncode, 0)
        commands = re.findall(r"^  ([a-z][\w-]*)  ", self.succeed("--help"), re.MULTILINE)
        self.assertEqual({path.name for path in (self.folder / "pages").iterdir()},
                         {"shardwright.1", *(f"shardwright-{name}.1" for name in commands)})
        self.assertEqual((self.folder / "completions" / "fish").read_text(), self.shell("fish"))


class Diff(ShardwrightTestCase):

    def test_diff(self):
        first, second = self.succeed(*PLAN), self.succeed(*PLAN, "--reshard", "never", "--recompute", "full")
        (self.folder / "a.json").write_text(first)
        (self.folder / "b.json").write_text(second)
        self.assertRegex(self.succeed("diff", "a.json", "a.json"), "^before  .*\nafter   .*\n\nThe plans are equal.\n")
        text = self.succeed("diff", "a.json", "-", stdin=second)
        self.assertRegex(text, r"plan\.units\[transformer\.h\.0\]\.reshard +always +-> never +and 11 alike\n")
        report = json.loads(self.succeed("diff", "a.json", "b.json", "--json"))
        changes = {change["field"]: change for change in report["changes"]}
        self.assertEqual(changes["plan.units[transformer.h.0].reshard"]["alike"], 12)
        self.assertEqual(changes["plan.recompute[transformer.h.0].kind"]["before"], "")
        for side, name in (("before", "a.json"), ("after", "b.json")):
            simulated = json.loads(self.succeed("simulate", name, "--json"))
            self.assertEqual(report[side]["step_time_s"], simulated["step_time_s"])
            self.assertEqual(report[side]["peak_allocated_bytes"], simulated["memory"]["peak_allocated_bytes"])
        self.assert_fails(2, "diff: only one of the two plans can be standard input", "diff", "-", "-")


class Doctor(ShardwrightTestCase):

    def test_doctor(self):
        checks = {check["name"]: check for check in json.loads(self.succeed("doctor", "--json"))["checks"]}
        self.assertTrue(checks["program"]["works"])
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        self.assertAlmostEqual(float(checks["memory"]["found"].split()[0]), memory, delta=memory * 0.01)
        self.assertEqual(checks["this folder"]["found"], "can be written")
        self.assertEqual(len(self.succeed("doctor").splitlines()), 1 + len(checks))


class Terminal(ShardwrightTestCase):

    def on_terminal(self, *arguments, **environment):
        """What the program prints on a terminal."""
        try:
            ours, theirs = pty.openpty()
        except OSError as error:  # a chroot without /dev/pts
            self.skipTest(str(error))
        process = subprocess.Popen([shardwright_test_case.PROGRAM, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=theirs,
                                   stderr=subprocess.DEVNULL, env={"TERM": "xterm", "LANG": "C.UTF-8", **environment})
        os.close(theirs)
        text = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            text += block
        process.wait(timeout=60)
        os.close(ours)
        return text.decode()

    def test_plan_without_a_place_for_it(self):
        shown = self.on_terminal(*PLAN).replace("\r\n", "\n")
        self.assertRegex(shown, r"^gpt2 on 1 x dgx-a100")
        self.assertTrue(shown.endswith("Not written: -o FILE writes the plan, -o - shows it\n"))
        self.assertEqual(self.on_terminal(*PLAN, "-o", "-").replace("\r\n", "\n"), self.succeed(*PLAN))

    def test_colours(self):
        (self.folder / "plan.json").write_text(self.succeed(*PLAN))
        piped = self.succeed("simulate", "plan.json")
        self.assertNotIn("\x1b", piped)
        shown = self.on_terminal("simulate", "plan.json")
        self.assertIn("\x1b[32mfits", shown)
        self.assertEqual(re.sub("\x1b\\[[0-9]*m", "", shown).replace("\r\n", "\n"), piped)
        for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            self.assertNotIn("\x1b", self.on_terminal("simulate", "plan.json", **variables))


class Names(ShardwrightTestCase):

    def test_a_described_cluster_is_called_what_it_is(self):
        for cluster, title in (("a100-80 x4, nvlink 300 GB/s", "4 x a100-80"), ("2x8 H100, nic 8x400 Gbit/s", "16 x h100-80, 2 nodes"),
                               ("dgx-a100", "1 x dgx-a100 (8 GPUs)")):
            self.succeed("plan", "--model", "gpt2", "--cluster", cluster, "--seq", "128", "--micro-batch", "1", "-o", "plan.json")
            self.assertEqual(self.succeed("simulate", "plan.json").splitlines()[0], f"gpt2 on {title}, fsdp2")

    def test_reports_and_comparisons_predict_what_simulate_does(self):
        """Also where the allocator has too little room and retries."""
        for micro_batch in (3, 4):
            self.succeed("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "2048", "--micro-batch", str(micro_batch), "-o",
                         "plan.json")
            said = json.loads(self.succeed("simulate", "plan.json", "--exact", "--trace", "sim.json", "--json"))
            report = json.loads(self.succeed("report", "plan.json", "--json"))
            self.assertEqual(report["prediction"], said)
            self.assertEqual(report["figures"]["step_time_s"], said["step_time_s"])
            step = json.loads(self.succeed("compare", "plan.json", "sim.json", "--json"))["step_time"]
            self.assertAlmostEqual(step["simulated_s"], said["step_time_s"], delta=1e-9)
            self.assertEqual(said["memory"]["steady_step"]["allocator_retries"] > 0, micro_batch == 4)

    def test_the_address_of_the_page(self):
        self.succeed("plan", "--model", "gpt2", "--cluster", "dgx-a100", "--seq", "128", "--micro-batch", "1", "-o", "plan.json")
        for address in ("https://example.org/plan/", "http://localhost:8000", "file:///srv/page.html", "page.html", "../page.html?a:b"):
            report = json.loads(self.succeed("report", "plan.json", "--page", address, "--json"))
            self.assertEqual(report["page"], address)
        for address in ("javascript:alert(1)", "data:text/html,x", "JavaScript:x"):
            self.assert_fails(2, f'--page: got "{address}", expected an address that begins with https:, http: or file:, or a relative one',
                              "report", "plan.json", "--page", address, "-o", "other.html")
        self.assertFalse((self.folder / "other.html").exists())


if __name__ == "__main__":
    main()
