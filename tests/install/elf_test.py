"""No program, module or test of the build tree, and nothing that is installed, takes libraries from the current folder.

A file there with a library's name would run its code as soon as somebody uses the program in a folder from elsewhere.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import elf

CMAKE, BUILD, ROOT = (pathlib.Path(argument) for argument in sys.argv[1:4])


class Elf(unittest.TestCase):

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def check_folder(self, folder: pathlib.Path) -> list[str]:
        """Names of what was looked at."""
        files = list(elf.elf_files(folder))
        self.assertEqual([fault for file in files for fault in elf.faults(file)], [])
        return [file.name for file in files]

    def test_build_tree(self) -> None:
        self.assertIn("shardwright", self.check_folder(BUILD))

    def test_installed(self) -> None:
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", self.folder], check=True, capture_output=True)
        names = self.check_folder(self.folder)
        self.assertIn("shardwright", names)
        for module in (*BUILD.glob("shardwright_mpi.so"), *(BUILD / "python" / "shardwright").glob("*.so")):
            self.assertIn(module.name, names)

    def test_libraries_of_the_current_folder_are_not_loaded(self) -> None:
        for tag, name in elf.entries(BUILD / "shardwright"):
            if tag == "NEEDED":
                (self.folder / name).write_text("no library")
        for name in ("libopenblas.so.0", "libshardwright_cuda.so", "shardwright_mpi.so"):
            (self.folder / name).write_text("no library")
        for command in (["list", "models"], ["--version"]):
            done = subprocess.run([BUILD / "shardwright", *command], cwd=self.folder, text=True, capture_output=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_bad_paths_are_found(self) -> None:
        compiler = shutil.which("cc") or shutil.which("g++")
        self.assertIsNotNone(compiler)
        (self.folder / "empty.c").write_text("void nothing(void) {}\n")
        for name, path, is_bad in (("trailing", "/opt/lib:", True), ("relative", "lib", True), ("middle", "/opt/lib::/usr/lib", True),
                                   ("like", "$ORIGINAL/lib", True), ("good", "$ORIGIN/../lib:/opt/lib", False)):
            module = self.folder / f"{name}.so"
            subprocess.run([compiler, "-shared", "-fPIC", "empty.c", "-o", module, f"-Wl,-rpath,{path}"], cwd=self.folder, check=True)
            self.assertEqual(bool(elf.faults(module)), is_bad, elf.faults(module))

    def test_one_place_opens_libraries(self) -> None:
        """core/library.cc, which refuses paths from the current folder."""
        callers = [path.relative_to(ROOT).as_posix()
                   for folder in ("core", "models", "topologies", "schedule", "traces", "simulator", "executor", "planner", "analysis",
                                  "cli", "python")
                   for path in sorted((ROOT / folder).rglob("*.cc")) if "dlopen(" in path.read_text()]
        self.assertEqual(callers, ["core/library.cc"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
