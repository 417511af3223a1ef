"""The engine of the page has every file that its files need: a header of traces, analysis or cli that one of them includes is of a file that
is listed in web/CMakeLists.txt, or of one that web/without.cc stands for. Needs no Emscripten, whose build is not part of the CI tests."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("traces", "analysis", "cli")


def listed(text):
    """{folder/name} of the three lists."""
    return {f"{folder}/{name}" for folder in FOLDERS for name in re.search(rf"set\({folder} ([^)]*)\)", text)[1].split()}


def needed(sources):
    """{header: who includes it}, of headers beside which a .cc stands."""
    found = {}
    for source in sorted(sources):
        for part in (".cc", ".h"):
            path = ROOT / (source + part)
            for include in re.findall(r'#include "((?:traces|analysis|cli)/[^"]+)\.h"', path.read_text(encoding="utf-8")) if path.exists() else ():
                if (ROOT / f"{include}.cc").exists():
                    found.setdefault(include, source)
    return found


def stood_for():
    return set(re.findall(r'#include "([^"]+)\.h"', (ROOT / "web/without.cc").read_text(encoding="utf-8")))


class Sources(unittest.TestCase):

    def test_every_needed_file_is_listed(self):
        text = (ROOT / "web/CMakeLists.txt").read_text(encoding="utf-8")
        there = listed(text)
        self.assertEqual({name: by for name, by in needed(there).items() if name not in there | stood_for()}, {})

    def test_a_missing_file_is_seen(self):
        there = listed((ROOT / "web/CMakeLists.txt").read_text(encoding="utf-8")) - {"analysis/mfu_waterfall"}
        self.assertIn("analysis/mfu_waterfall", set(needed(there)) - there - stood_for())


if __name__ == "__main__":
    unittest.main()
