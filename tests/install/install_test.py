"""Installs the program into an empty folder and uses it from there: it must be one file that needs no other."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

CMAKE, BUILD, ROOT = (pathlib.Path(argument) for argument in sys.argv[1:4])
PLAN = ["plan", "--model", "gpt2", "--cluster", "dgx-h100", "--wrap", "block", "-o", "plan.json"]


class Install(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.prefix = pathlib.Path(scratch.name)
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", self.prefix], check=True, capture_output=True)
        self.program = self.prefix / "bin" / "shardwright"

    def run_in_prefix(self, program: pathlib.Path, *arguments: str) -> str:
        return subprocess.run([program, *arguments], cwd=self.prefix, env={}, text=True, check=True,
                              capture_output=True).stdout

    def test_one_file_is_installed(self) -> None:
        files = [path.relative_to(self.prefix).as_posix() for path in self.prefix.rglob("*") if path.is_file()]
        self.assertEqual(files, ["bin/shardwright"])

    def test_it_says_what_the_build_tree_says(self) -> None:
        for arguments in (["list", "models", "--json"], ["list", "clusters", "--json"], PLAN,
                          ["simulate", "plan.json", "--json"]):
            installed = self.run_in_prefix(self.program, *arguments)
            self.assertEqual(installed, self.run_in_prefix(BUILD / "shardwright", *arguments))
        self.assertTrue((self.prefix / "plan.json").is_file())

    def test_no_data_folder_of_the_source_tree_is_named(self) -> None:
        binary = self.program.read_bytes()
        for folder in ("models/zoo", "topologies/catalog", "topologies/profiles"):
            self.assertTrue((ROOT / folder).is_dir(), folder)
            self.assertNotIn(str(ROOT / folder).encode(), binary)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
