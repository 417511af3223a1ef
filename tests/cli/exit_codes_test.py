"""The table of exit codes in docs/cli.md, over all commands and flags that --help lists."""

import json
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, main

JOB = ("--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--seq", "128")
# Words with which each command begins its work; no file called none exists.
WORDS = {
    "list": ("models",), "estimate": ("gpt2", "8xH100"),
    "inspect": ("none.json",), "plan": JOB, "simulate": ("none.json",), "sweep": JOB,
    "goodput": ("none.json", "--tokens", "1e9", "--mtbf", "1 h", "--checkpoint-time", "1 s"), "baselines": JOB,
    "emit": ("none.json", "--to", "accelerate"), "import-run": ("none.toml", "--cluster", "dgx-a100"),
    "export": ("none.json", "--seq", "128"),
    "run": ("none.json",), "eval": ("none.json", "--checkpoint", "none", "--data", "random"),
    "checkpoint": ("inspect", "none"), "compare": ("none.json", "none.gz"), "advise": ("none.gz", "--plan", "none.json"),
    "validate": ("none.json",),
    "price": ("none.json",), "calibrate": ("none.gz", "-o", "new.json"),
    "report": ("none.json",), "diff": ("none.json", "none.json"), "check": ("none.toml",), "hang": ("none_0",), "judge": ("none.log", "--plan", "none.json"),
    "doctor": (), "inspect-trace": ("none",), "topo": ("import", "none"),
    "page": (),
}
VALUES = ("N", "X", "SIZE", "TIME", "RATE", "SIGMA", "R:FACTOR", "LEVEL:FACTOR", "PERCENT", "YYYY-MM-DD")
OUTPUTS = {"plan": "-o", "simulate": "--trace", "sweep": "--csv", "emit": "--as-emitted", "import-run": "-o", "export": "-o",
           "advise": "-o", "calibrate": "-o", "report": "-o", "topo": "-o", "page": "-o"}


def without(words, flag):
    """`words` but for a flag and its value."""
    if flag not in words:
        return list(words)
    at = words.index(flag)
    return [*words[:at], *words[at + 2:]]


class ExitCodes(ShardwrightTestCase):

    def fail_quietly(self, *arguments):
        """The exit code of a run that must say one line and leave nothing."""
        before = sorted(os.listdir(self.folder))
        code, out, err = self.run_program(*arguments)
        self.assertEqual((out, err.count("\n"), err[:7]), ("", 1, "error: "), (arguments, err))
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        return code, err

    def flags_of(self, command):
        return re.findall(r"^  (?:-\w,)?(--[a-z-]+) (\S+)$|^  (?:-\w,)?(--[a-z-]+) (\S+) ",
                          self.succeed(command, "--help").split("Options:")[1], re.MULTILINE)

    def test_all_commands_are_here(self):
        listed = re.findall(r"^  ([a-z][\w-]*)  ", self.succeed("--help"), re.MULTILINE)
        self.assertEqual(sorted(listed), sorted(WORDS))

    def test_what_no_file_can_make_right_is_2(self):
        for command, words in WORDS.items():
            self.assertEqual(self.fail_quietly(command, *words, "--no-such-flag")[0], 2, command)
            for found in self.flags_of(command):
                flag, value = found[:2] if found[0] else found[2:]
                is_choice = "|" in value and "FILE" not in value and "NAME" not in value
                with self.subTest(command=command, flag=flag):
                    given = without(words, flag)
                    self.assertEqual(self.fail_quietly(command, *given, flag, "")[0], 2)
                    if value in VALUES or is_choice:
                        self.assertEqual(self.fail_quietly(command, *given, flag, "no such value")[0], 2)

    def test_what_is_named_and_missing_is_3(self):
        for command, words in WORDS.items():
            if any(word.startswith("none") for word in words):
                self.assertEqual(self.fail_quietly(command, *words)[0], 3, command)

    def test_what_does_not_fit_what_is_named_is_3_everywhere(self):
        for code, *words in ((3, "--model", "gpt22"), (3, "--cluster", "dgx-a10"), (3, "--gpus", "9"),
                             (3, "--kernel-set", "torch-eagr"), (3, "--profile", "genric"), (3, "--global-batch", "7"),
                             (3, "--shard", "3"), (3, "--wrap", "none.json"), (3, "--frozen", "nothing.*"),
                             (2, "--wrap", "blok"), (2, "--dialect", "fsdp3"), (2, "--precision", "bf8")):
            for command in ("plan", "sweep", "baselines"):
                if words[0] in [flag for found in self.flags_of(command) for flag in found]:
                    with self.subTest(command=command, words=words):
                        self.assertEqual(self.fail_quietly(command, *without(JOB, words[0]), *words)[0], code)

    def test_what_cannot_be_written_is_4(self):
        for command, flag in OUTPUTS.items():
            words = without(WORDS[command], flag)
            code, err = self.fail_quietly(command, *words, flag, "nowhere/x.json")
            self.assertEqual((code, err), (4, "error: nowhere/x.json: cannot write: No such file or directory\n"))

    def test_an_input_is_not_overwritten(self):
        (self.folder / "in.json").write_text("{}")
        (self.folder / "link.json").symlink_to("in.json")
        os.link(self.folder / "in.json", self.folder / "twin.json")
        for command, flag in (*OUTPUTS.items(), ("emit", "-o"), ("run", "--trace")):
            if command == "page":
                continue  # it reads nothing
            words = [word.replace("none.", "in.json.") for word in without(WORDS[command], flag)]
            words = ["in.json" if word.startswith(("in.json", "none")) else word for word in words]
            if "in.json" not in words:
                words = [*without(words, "--cluster"), "--cluster", "in.json"]
            for output in ("in.json", "./in.json", "link.json", "twin.json"):
                code, err = self.fail_quietly(command, *words, flag, output)
                self.assertEqual(code, 2, err)
                self.assertRegex(err, rf'--[a-z-]+ "{re.escape(output)}" would overwrite .* "in.json"')
        _, err = self.fail_quietly("run", "p.json", "--data", "text:in.json", "--trace", "in.json")
        self.assertEqual(err, 'error: --trace "in.json" would overwrite --data "text:in.json"\n')
        (self.folder / "p.json").write_text(self.succeed("plan", *JOB))
        _, err = self.fail_quietly("emit", "p.json", "--to", "accelerate", "-o", "x", "--as-emitted", "./x")
        self.assertEqual(err, 'error: --as-emitted "./x" would overwrite --output "x"\n')
        self.assertEqual((self.folder / "in.json").read_text(), "{}")


class Networks(ShardwrightTestCase):

    def test_a_misspelt_network(self):
        for command in ("plan", "sweep", "baselines"):
            self.assert_fails(3, 'h100-80 x8, nic 8x400 Gbit/s, network rocee, nodes 2: network: got "rocee", expected '
                              'a row of the profile\'s transports; did you mean "roce"?', command, "--model", "gpt2",
                              "--cluster", "h100-80 x8, nic 8x400 Gbit/s, network rocee, nodes 2")


class AllOrNothing(ShardwrightTestCase):

    def test_emit(self):
        """The second file has no place; the first one is not left behind, nor is a new folder."""
        (self.folder / "p.json").write_text(self.succeed("plan", *JOB))
        (self.folder / "out" / "shardwright_plan.py").mkdir(parents=True)
        before = sorted(os.listdir(self.folder / "out"))
        code, out, err = self.run_program("emit", "p.json", "--to", "fsdp2", "-o", "out/")
        self.assertEqual((code, out, err.count("\n")), (4, "", 1), err)
        self.assertEqual(sorted(os.listdir(self.folder / "out")), before)
        code, out, err = self.run_program("emit", "p.json", "--to", "fsdp2", "-o", "new/folder/",
                                          "--as-emitted", "/dev/full")
        self.assertEqual((code, out), (4, ""), err)
        self.assertFalse((self.folder / "new").exists())


if __name__ == "__main__":
    main()
