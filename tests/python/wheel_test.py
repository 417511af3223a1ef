"""scripts/build-wheel.sh, and what it writes: installed from the file into empty environments of every Python that is here.

Takes half an hour of two cores when nothing is compiled yet.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT, PROGRAM = (pathlib.Path(argument) for argument in sys.argv[1:3])
sys.path.insert(0, str(ROOT / "tests" / "install"))
import elf

# The first lines of docs/index.md, and how long import and all of it take from a cold start.
QUICK_START = """
import time
begin = time.perf_counter()
import shardwright
imported = time.perf_counter()
plan = shardwright.plan(model="qwen3-8b", cluster="8xH100", seq=4096)
print(plan.fits, plan.step_time > 0, imported - begin, time.perf_counter() - begin)
"""
QUESTION = ("import shardwright; plan = shardwright.plan(model='qwen3-8b', cluster='8xH100', seq=4096, global_batch=64);"
            "print(plan.fits, plan.memory.peak < plan.memory.usable)")


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def pythons():
    """Every Python of this machine that is 3.10 or later, by version."""
    found = {}
    for folder in {*os.environ["PATH"].split(os.pathsep), *map(str, pathlib.Path.home().glob(".pyenv/versions/*/bin"))}:
        for path in pathlib.Path(folder).glob("python3.*"):
            match = re.fullmatch(r"python3\.(\d+)", path.name)
            if match and int(match[1]) >= 10 and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                found.setdefault(int(match[1]), path)
    return [found[version] for version in sorted(found)]


def bare_root(root):
    """A folder with a Python as it was built, the C library, a shell, and nothing else. Returns the interpreter's path in it."""
    prefix, version = pathlib.Path(sys.base_prefix), f"python3.{sys.version_info.minor}"
    interpreter, library = prefix / "bin" / version, prefix / "lib" / version
    shutil.copytree(library, root / library.relative_to("/"), ignore=shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__"))
    (root / library.relative_to("/") / "site-packages").mkdir()
    needed = {interpreter, pathlib.Path("/bin/dash"), *(pathlib.Path(line) for line in run("dpkg", "-L", "libc6").split() if ".so" in line)}
    for binary in (interpreter, *library.glob("lib-dynload/*.so")):
        needed.update(pathlib.Path(path) for path in re.findall(r"(/\S+\.so\S*)", run("ldd", binary)))
    for file in needed:
        if file.is_file():
            to = root / file.relative_to("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, to)
    (root / "tmp").mkdir(exist_ok=True)
    return interpreter


class Wheel(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        run(ROOT / "scripts" / "build-wheel.sh", cwd=ROOT)
        cls.version = run(PROGRAM, "--version").split()[1]
        cls.wheel = ROOT / "dist" / f"shardwright-{cls.version}-cp310-abi3-manylinux_2_28_x86_64.whl"
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.folder = pathlib.Path(cls.scratch.name)

    def test_files(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
            archive.extractall(self.folder / "unpacked")
        self.assertIn("shardwright/py.typed", names)
        self.assertIn(f"shardwright-{self.version}.data/scripts/shardwright", names)
        listed = json.loads((self.folder / "unpacked" / f"shardwright-{self.version}.dist-info/sboms/shardwright.cdx.json").read_text())
        linked = {row["name"] for row in listed["components"] if row["scope"] == "required" and row["version"]}
        self.assertLessEqual({"sqlite3", "openssl", "zlib", "pugixml", "yaml-cpp", "nlopt", "nlohmann-json3-dev"}, linked)
        binaries = list(elf.elf_files(self.folder / "unpacked"))
        self.assertEqual(sorted(path.name for path in binaries), ["_native.abi3.so", "shardwright"])
        for binary in binaries:
            self.assertEqual(elf.faults(binary), [])
            libraries = {name for tag, name in elf.entries(binary) if tag == "NEEDED"}
            self.assertLessEqual(libraries, {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"})
            symbols = run("readelf", "--dyn-syms", "--wide", binary)
            newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"@GLIBC_([0-9.]+)", symbols))
            self.assertLessEqual(newest, (2, 28))

    def test_installed(self):
        expected = run(PROGRAM, "plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "4096", "--recompute", "full", "--json")
        for python in pythons():
            with self.subTest(python=python.name):
                environment = self.folder / python.name
                run(python, "-m", "venv", environment)
                run(environment / "bin" / "pip", "install", "--no-index", self.wheel)
                clean = {"PATH": str(environment / "bin")}
                self.assertEqual(run(environment / "bin" / "python", "-I", "-c", QUESTION, env=clean), "True True\n")
                program = environment / "bin" / "shardwright"
                self.assertEqual(run(program, "plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "4096", "--recompute",
                                     "full", "--json", env={}), expected)
                self.assertEqual(run(environment / "bin" / "python", "-I", "-c", "import shardwright; print(shardwright.__version__)",
                                     env=clean), self.version + "\n")
        self.assertGreaterEqual(len(pythons()), 1)

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("chroot"), "chroot is for root")
    def test_in_a_bare_root(self):
        root = self.folder / "root"
        interpreter = bare_root(root)
        shutil.copy(self.wheel, root)
        inside = (shutil.which("chroot"), root, interpreter, "-I")
        run(*inside, "-m", "ensurepip", env={})
        run(*inside, "-m", "pip", "install", "--no-index", "--no-cache-dir", f"/{self.wheel.name}", env={})
        (root / "ask.py").write_text(QUICK_START)
        answers = [run(*inside, "/ask.py", env={}).split() for _ in range(5)]
        self.assertEqual({tuple(answer[:2]) for answer in answers}, {("True", "True")})
        imported, whole = (min(float(answer[i]) for answer in answers) for i in (2, 3))
        print(f"in a bare root: import {imported:.3f} s, Qwen3-8B on 8 H100 {whole:.3f} s")
        self.assertLess(imported, 0.2)
        self.assertLess(whole, 3)

    def test_training_with_the_extra(self):
        environment = self.folder / "run"
        run(sys.executable, "-m", "venv", environment)
        run(environment / "bin" / "pip", "install", "--quiet", f"shardwright[run] @ {self.wheel.as_uri()}")
        plan = json.loads(run(environment / "bin" / "shardwright", "plan", "--model", ROOT / "scripts" / "tiny-gpt.json", "--cluster", "host",
                              "--gpus", "2", "--seq", "32", "--precision", "fp32", "-o", self.folder / "tiny.json", "--json"))
        self.assertEqual(plan["ranks"], 2)
        code = (f"import shardwright; print(shardwright.commands.run({str(self.folder / 'tiny.json')!r}, steps=2, "
                f"data={str(ROOT / 'README.md')!r})['steps'] is not None)")
        self.assertEqual(run(environment / "bin" / "python", "-I", "-c", code), "True\n")

    def test_sdist(self):
        """It holds what its own build reads; scripts/deep.sh builds it."""
        shutil.unpack_archive(ROOT / "dist" / f"shardwright-{self.version}.tar.gz", self.folder / "sdist")
        source = self.folder / "sdist" / f"shardwright-{self.version}"
        run("cmake", "-S", source, "-B", self.folder / "sdist-build", "-G", "Ninja", "-DSKBUILD=2", "-DSHARDWRIGHT_WHEEL=ON",
            "-DSHARDWRIGHT_TESTS=OFF", "-DSHARDWRIGHT_BENCH=OFF", "-DSHARDWRIGHT_CUDA=OFF")
        run("ninja", "-C", self.folder / "sdist-build", "-n", "shardwright", "shardwright_package")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
