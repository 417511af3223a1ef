"""Runs every command of docs/questions.md: what is quoted is what is printed and answers in two lines,
and of the other questions there is what the page says to look at."""

import pathlib
import re
import shlex
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import TESTS, ShardwrightTestCase, main

MARK = "# look at:"
PAGE = TESTS.parent / "docs" / "questions.md"
ROOT = TESTS.parent

# A verdict, and a number with its unit.
VERDICT = r": fits (at the edge )?with micro-batch \d|: does not fit, |^does not fit: |^\w+ is best: "
NUMBER = r"[\d,.]+ (tokens/s|[KMGT]iB|s|ms)\b|It fits with "


class Questions(ShardwrightTestCase):

    def test_every_command(self):
        page = PAGE.read_text()
        blocks = [block.split("```")[0] for block in page.split("```sh\n")[1:]]
        lines = [line for block in blocks for line in block.splitlines()]
        # Every question has its commands.
        self.assertEqual(page.count("**"), 2 * (12 + 65))
        self.assertGreater(len(lines), 50)
        said = {}  # of commands that write nothing and stand more than once
        for line in lines:
            command, _, key = line.partition(MARK)
            words = shlex.split(command)
            self.assertEqual(words[0], "shardwright", line)
            once = command.strip()
            if once not in said or "-o" in words:
                said[once] = self.run_program(*words[1:])
            code, out, err = said[once]
            self.assertEqual((code, err), (0, ""), line)
            self.assertIn(key.strip(), out, line)

    def test_what_is_quoted_is_printed(self):
        done = subprocess.run([sys.executable, ROOT / "scripts" / "quote.py", "--check", shardwright_test_case.PROGRAM, PAGE],
                              text=True, capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_two_lines_are_an_answer(self):
        quotes = re.findall(r"^```text\n(\$ [^\n]*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        self.assertEqual(len(quotes), 12)
        for command, shown in quotes:
            with self.subTest(command=command):
                lines = shown.splitlines()
                self.assertEqual((len(lines), lines[-1]), (3, "..."))
                answer = "\n".join(lines[:2])
                self.assertRegex(answer, re.compile(VERDICT, re.MULTILINE))
                self.assertRegex(answer, NUMBER)


if __name__ == "__main__":
    main()
