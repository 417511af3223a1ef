"""What `scripts/gpu_check.sh pack` carries to a machine with a GPU runs in a bare folder, up to the driver that is missing.

The folder has the C and C++ run-time libraries and the package, nothing else, and is the programs' root.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).parent
EVERYWHERE = r"/(?:libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so"


@unittest.skipUnless((BUILD / "libshardwright_cuda.so").exists(), "built without nvcc")
@unittest.skipUnless(os.geteuid() == 0, "chroot is root's")
class Pack(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        subprocess.run([ROOT / "scripts/gpu_check.sh", "pack", "--build", BUILD, "--out", self.root / "carry"], check=True,
                       stdout=subprocess.DEVNULL)
        (self.root / "tmp").mkdir()
        programs = [path for path in (self.root / "carry").rglob("*") if path.is_file()]
        listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
        for path in set(re.findall(r"(/\S+) \(0x", listed)):
            if re.search(EVERYWHERE, path):
                target = self.root / path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)

    def run_bare(self, *words):
        return subprocess.run(["/usr/sbin/chroot", self.root, *words], capture_output=True, text=True, check=False, cwd=self.root,
                              env={"LD_LIBRARY_PATH": "/carry:/carry/lib"})

    def test_up_to_the_driver(self):
        done = self.run_bare("/carry/shardwright", "doctor", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        device = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["CUDA device"]
        self.assertEqual((device["works"], device["found"]),
                         (False, "device cuda: this machine has no NVIDIA driver (libcuda.so.1 was not found)"))
        for program in ("sw_cuda_gpu_test", "cuda_kernels_bench"):
            done = self.run_bare(f"/carry/{program}")
            self.assertEqual(done.returncode, 77, done.stderr)
            self.assertIn("device cuda: this machine has no NVIDIA driver", done.stdout + done.stderr)

    def test_is_small(self):
        blas = re.compile(r"lib(openblas|gfortran|quadmath)")  # build-gpu/ multiplies on the host without them
        size = sum(path.stat().st_size for path in (self.root / "carry").rglob("*") if not blas.match(path.name))
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
        size += sum((ROOT / name).stat().st_size for name in listed.split("\0") if name)
        self.assertLess(size, 64 * 2**20)  # may travel to a machine that is lent


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
