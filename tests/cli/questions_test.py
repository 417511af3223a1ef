"""Runs every command of docs/questions.md and looks for what the page says to look at."""

import pathlib
import shlex
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from shardwright_test_case import TESTS, ShardwrightTestCase, main

MARK = "# look at:"


class Questions(ShardwrightTestCase):

    def test_every_command(self):
        page = (TESTS.parent / "docs" / "questions.md").read_text()
        blocks = [block.split("```")[0] for block in page.split("```sh\n")[1:]]
        lines = [line for block in blocks for line in block.splitlines()]
        # Every question has its commands.
        self.assertEqual(page.count("**"), 2 * 20)
        self.assertGreater(len(lines), 25)
        for line in lines:
            command, _, key = line.partition(MARK)
            words = shlex.split(command)
            self.assertEqual(words[0], "shardwright", line)
            code, out, err = self.run_program(*words[1:])
            self.assertEqual((code, err), (0, ""), line)
            self.assertIn(key.strip(), out, line)


if __name__ == "__main__":
    main()
