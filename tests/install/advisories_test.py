"""scripts/advisories.py: nothing that is pinned, or installed to be linked into the wheel, has an advisory that we know of."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv[1])
SCRIPT = ROOT / "scripts/advisories.py"
sys.path.insert(0, str(SCRIPT.parent))
import advisories


def run(*arguments):
    return subprocess.run([sys.executable, "-B", SCRIPT, *arguments], text=True, capture_output=True, check=False)


class Advisories(unittest.TestCase):
    def test_what_is_pinned(self) -> None:
        done = run("--pinned", *(ROOT / "tests").glob("requirements*.txt"), ROOT / "scripts/wheel-tools.txt", ROOT / "scripts/deep.sh")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_what_scripts_install_has_a_version(self) -> None:
        for script in sorted((ROOT / "scripts").glob("*.sh")):
            text = script.read_text(encoding="utf-8").replace("\\\n", " ")
            for words in re.findall(r"^.*pip\"? install (.*)$", text, re.MULTILINE):
                words = re.sub(r"(-r|--target) \S+|--upgrade|--quiet|--\S+", "", words).split()
                self.assertEqual([word for word in words if "==" not in word], [], script.name)

    def test_the_tools_have_hashes(self) -> None:
        lines = [line for line in (ROOT / "scripts/wheel-tools.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        self.assertEqual([line for line in lines if not re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)], [])
        self.assertIn("--require-hashes", (ROOT / "scripts/build-wheel.sh").read_text(encoding="utf-8"))

    def test_an_old_version_is_found(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "versions.txt"
            file.write_text("numpy==2.4.6\ntorch==2.5.1+cpu\n", encoding="utf-8")
            done = run("--pinned", file)
            self.assertEqual((done.returncode, done.stderr), (1, "torch 2.5.1+cpu: CVE-2025-32434 (torch.load(weights_only=True) runs code), "
                                                                 "fixed in 2.6.0\n"))
            file.write_text("sqlite3 3.40.1-2 abc\nzlib 1:1.2.13.dfsg-1 abc\n", encoding="utf-8")
            done = run("--debian", file)
            self.assertEqual([line.split(":")[0] for line in done.stderr.splitlines()], ["sqlite3 3.40.1-2"] * 2)

    def test_versions_are_numbers_not_texts(self) -> None:
        self.assertEqual(advisories.affected("pypi", [("torch", "2.13.0"), ("Pillow", "9.5.0")]),
                         ["Pillow 9.5.0: CVE-2024-28219 (overflow in colour transforms), fixed in 10.3.0"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
