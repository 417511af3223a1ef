"""The pictures of the report in the README show the report that the program writes today."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import report_pictures as script


class Pictures(unittest.TestCase):

    def test_they_are_current(self):
        self.assertEqual(script.stale(PROGRAM), [], "run scripts/report_pictures.py")

    def test_a_digest_is_read_back(self):
        plain = script.SIGNATURE + script.chunk(b"IHDR", bytes(13)) + script.chunk(b"IEND", b"")
        marked = script.with_digest(plain, "ab" * 32)
        self.assertEqual(script.digest_in(marked), "ab" * 32)
        self.assertEqual(marked.replace(script.chunk(b"tEXt", script.KEY + b"ab" * 32), b""), plain)
        self.assertIsNone(script.digest_in(plain))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
