"""Installs Shardwright into empty folders, from the build tree and from its packages, and uses it from there."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import elf

CMAKE, BUILD, ROOT = (pathlib.Path(argument) for argument in sys.argv[1:4])
PLAN = ["plan", "--model", "gpt2", "--cluster", "dgx-h100", "--wrap", "block", "-o", "plan.json"]


def run(*command, folder, env=None):
    done = subprocess.run([str(word) for word in command], cwd=folder, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Scratch(unittest.TestCase):

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        # Asked before anything is packed: .ci/run builds the page beside the tests.
        self.has_page = (BUILD / "web/shardwright.html").exists()

    def check_program(self, program: pathlib.Path) -> None:
        """It says what the build tree says, with nothing in its environment."""
        for arguments in (["list", "models", "--json"], ["list", "clusters", "--json"], PLAN, ["simulate", "plan.json", "--json"]):
            installed = run(program, *arguments, folder=self.folder, env={})
            self.assertEqual(installed, run(BUILD / "shardwright", *arguments, folder=self.folder, env={}))
        self.assertTrue((self.folder / "plan.json").is_file())
        if self.has_page and program.parent.name == "bin":
            run(program, "page", "-o", "page.html", folder=self.folder, env={})
            self.assertEqual((self.folder / "page.html").read_bytes(), (BUILD / "web/shardwright.html").read_bytes())


class Runtime(Scratch):

    def setUp(self) -> None:
        super().setUp()
        self.prefix = self.folder / "prefix"
        run(CMAKE, "--install", BUILD, "--prefix", self.prefix, "--component", "runtime", folder=self.folder)

    def test_the_program_needs_no_other_file(self) -> None:
        alone = self.folder / "alone"
        shutil.copy(self.prefix / "bin" / "shardwright", alone)
        shutil.rmtree(self.prefix)
        self.check_program(alone)

    def test_files(self) -> None:
        files = {path.relative_to(self.prefix).as_posix() for path in self.prefix.rglob("*") if path.is_file()}
        pages = {name for name in files if name.endswith(".1")}
        commands = re.findall(r"^  ([a-z][\w-]*)  ", run(self.prefix / "bin" / "shardwright", "--help", folder=self.folder), re.MULTILINE)
        self.assertEqual(pages, {"share/man/man1/shardwright.1", *(f"share/man/man1/shardwright-{name}.1" for name in commands)})
        # Built only where there is an MPI.
        module = {"lib/shardwright/shardwright_mpi.so"} if (BUILD / "shardwright_mpi.so").exists() else set()
        # Likewise the planner's page, by scripts/web.sh.
        web = {"share/shardwright/shardwright.html"} if self.has_page else set()
        self.assertEqual(files - pages, {*module, *web, "bin/shardwright", "share/doc/shardwright/copyright",
                                         "share/bash-completion/completions/shardwright", "share/zsh/site-functions/_shardwright",
                                         "share/fish/vendor_completions.d/shardwright.fish",
                                         "share/shardwright/tools/export_model.py",
                                         *(f"share/shardwright/tools/{tool.relative_to(ROOT / 'tools').as_posix()}"
                                           for tool in (ROOT / "tools" / "model_export").glob("*.py"))})

    def test_no_data_folder_of_the_source_tree_is_named(self) -> None:
        binary = (self.prefix / "bin" / "shardwright").read_bytes()
        for folder in ("models/zoo", "topologies/catalog", "topologies/profiles"):
            self.assertTrue((ROOT / folder).is_dir(), folder)
            self.assertNotIn(str(ROOT / folder).encode(), binary)


class Library(Scratch):
    """Another project builds examples/ with what was installed, and nothing of the source tree."""

    def setUp(self) -> None:
        super().setUp()
        self.prefix = self.folder / "prefix"
        run(CMAKE, "--install", BUILD, "--prefix", self.prefix, folder=self.folder)

    def test_consumers(self) -> None:
        shutil.copytree(ROOT / "examples", self.folder / "examples")
        build = self.folder / "build"
        run(CMAKE, "-S", "examples", "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", folder=self.folder)
        run(CMAKE, "--build", build, folder=self.folder)
        text = run(build / "embed_planner", folder=self.folder, env={})
        self.assertRegex(text, r"^gpt2: step \d+\.\d+ ms, at most ")
        for path in (self.prefix / "lib").rglob("*.cmake"):
            self.assertNotIn(str(ROOT), path.read_text())
        self.check_pkg_config(text)

    def check_pkg_config(self, expected: str) -> None:
        """The same program, built with the flags that pkg-config prints."""
        if shutil.which("pkg-config") is None:
            self.skipTest("pkg-config is not installed")
        description = next(self.prefix.rglob("shardwright.pc"))
        environment = {"PATH": "/usr/bin:/bin", "PKG_CONFIG_PATH": str(description.parent)}
        # The object file that CMake made; it is the linking that is asked here.
        compiled = next((self.folder / "build").rglob("embed_planner.cc.o"))
        libraries = run("pkg-config", "--libs", "shardwright", folder=self.folder, env=environment).split()
        flags = run("pkg-config", "--cflags", "shardwright", folder=self.folder, env=environment).split()
        run("g++", *flags, "-fsyntax-only", "-include", "core/units.h", "-x", "c++", "/dev/null", folder=self.folder)
        run("g++", compiled, *libraries, "-o", "by_hand", folder=self.folder)
        self.assertEqual(run(self.folder / "by_hand", folder=self.folder, env={}), expected)


class Packages(Scratch):

    def test_packages(self) -> None:
        if shutil.which("dpkg-shlibdeps") is None:
            self.skipTest("dpkg-dev is not installed")
        run(CMAKE.parent / "cpack", "--config", BUILD / "CPackConfig.cmake", "-B", self.folder, folder=self.folder)
        debs = {path.name.split("_")[0]: path for path in self.folder.glob("*.deb")}
        module = list((BUILD / "python" / "shardwright").glob("_native*.so"))
        self.assertEqual(sorted(debs), [*(["python3-shardwright"] if module else []), "shardwright", "shardwright-dev"])
        depends = run("dpkg-deb", "--field", debs["shardwright"], "Depends", folder=self.folder)
        self.assertIn("libc6", depends)
        self.assertNotIn("openblas", depends)
        self.assertEqual(run("dpkg-deb", "--field", debs["shardwright"], "Recommends", folder=self.folder), "libopenblas0\n")
        run("dpkg-deb", "--extract", debs["shardwright"], "deb", folder=self.folder)
        self.check_program(self.folder / "deb" / "usr" / "bin" / "shardwright")
        run("dpkg-deb", "--extract", debs["shardwright-dev"], "dev", folder=self.folder)
        self.assertTrue(list((self.folder / "dev").rglob("shardwrightConfig.cmake")))
        self.assertTrue(list((self.folder / "dev").rglob("planner/search.h")))
        if module:
            self.check_python(debs["python3-shardwright"])
        self.assertEqual([fault for file in elf.elf_files(self.folder) for fault in elf.faults(file)], [])
        archive = next(self.folder.glob("*runtime.tar.gz"))
        (self.folder / "tar").mkdir()
        run("tar", "-xf", archive, "-C", "tar", folder=self.folder)
        self.check_program(next((self.folder / "tar").rglob("bin/shardwright")))

    def check_python(self, deb: pathlib.Path) -> None:
        self.assertRegex(run("dpkg-deb", "--field", deb, "Depends", folder=self.folder), r"python3 \(>= 3\.10\).*libc6")
        run("dpkg-deb", "--extract", deb, "python", folder=self.folder)
        packages = self.folder / "python" / "usr" / "lib" / "python3" / "dist-packages"
        code = "import shardwright; print(shardwright.plan(model='gpt2', cluster='dgx-h100', wrap='block')['model'])"
        self.assertIn("gpt2", run(sys.executable, "-c", code, folder=self.folder, env={"PYTHONPATH": str(packages)}))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
