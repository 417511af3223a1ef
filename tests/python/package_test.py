"""The Python package as it is installed, in an interpreter that has nothing else: starts fast, answers fast, is typed."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

CMAKE, BUILD = (pathlib.Path(argument) for argument in sys.argv[1:3])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "install"))
import elf


class Package(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.scratch.cleanup)
        prefix = pathlib.Path(cls.scratch.name)
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", prefix, "--component", "python"], check=True, capture_output=True)
        cls.packages = prefix / "lib" / "python3" / "dist-packages"

    def python(self, code):
        """What the code prints; -S: no package of this machine is seen."""
        done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(self.packages)}, cwd=self.scratch.name,
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_files(self):
        files = {path.relative_to(self.packages / "shardwright").as_posix() for path in self.packages.rglob("*") if path.is_file()}
        for name in ("__init__.py", "_native.abi3.so", "commands.py", "py.typed", "_apply/shardwright_fsdp2.py", "_export/export_model.py",
                     "_export/model_export/trace.py"):
            self.assertIn(name, files)
        self.assertEqual([fault for file in elf.elf_files(self.packages) for fault in elf.faults(file)], [])

    def test_the_limited_api_is_all_that_the_module_uses(self):
        """Names that begin with an underscore, but for four of the stable ABI, are of one version of Python."""
        symbols = subprocess.run(["readelf", "--dyn-syms", "--wide", self.packages / "shardwright" / "_native.abi3.so"], text=True,
                                 capture_output=True, check=True).stdout
        undefined = {line.split()[-1] for line in symbols.splitlines() if " UND " in line}
        self.assertIn("PyModule_Create2", undefined)
        self.assertEqual({name for name in undefined if name.startswith("_Py")} -
                         {"_Py_Dealloc", "_Py_NoneStruct", "_PyArg_ParseTuple_SizeT", "_Py_BuildValue_SizeT"}, set())
        exported = {line.split()[-1] for line in symbols.splitlines() if " GLOBAL " in line and " UND " not in line}
        self.assertEqual(exported, {"PyInit__native"})

    def test_import_is_fast_and_needs_no_torch(self):
        code = ("import time; start = time.process_time(); import shardwright; took = time.process_time() - start; import sys;"
                "print(took, 'torch' in sys.modules, 'numpy' in sys.modules, 'pandas' in sys.modules)")
        self.python(code)  # writes the byte code
        took, *others = min((self.python(code).split() for _ in range(5)), key=lambda row: float(row[0]))
        self.assertLess(float(took), 0.2)
        self.assertEqual(others, ["False"] * 3)

    def test_a_fit_answer_from_a_cold_start(self):
        code = ("import shardwright; plan = shardwright.plan(model='qwen3-8b', cluster='8xH100', seq=4096);"
                "import json, time; print(json.dumps([plan.fits, plan.step_time, plan.memory.peak, plan.memory.usable, time.process_time()]))")
        fits, step_time, peak, usable, processor_time = json.loads(self.python(code))
        self.assertTrue(fits)
        self.assertGreater(step_time, 0)
        self.assertLess(peak, usable)
        self.assertLess(processor_time, 3)  # of all threads; a busy machine does not lengthen it

    def test_what_needs_torch_says_so(self):
        self.assertEqual(self.python("import shardwright\ntry:\n  shardwright.describe\nexcept ImportError as error:\n  print(error)"),
                         "No module named 'torch'\n")
        self.assertEqual(self.python("import shardwright; print({'describe', 'apply', 'record'} <= set(dir(shardwright)))"), "True\n")

    def test_every_function_is_annotated(self):
        code = ("import inspect, shardwright.commands as c\n"
                "for name, f in vars(c).items():\n"
                "  if inspect.isfunction(f) and f.__module__ == c.__name__:\n"
                "    s = inspect.signature(f)\n"
                "    assert s.return_annotation == 'dict[str, Any]', name\n"
                "    assert all(p.annotation is not p.empty for p in s.parameters.values()), name\n"
                "    print(name)")
        self.assertGreaterEqual(len(self.python(code).split()), 28)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
