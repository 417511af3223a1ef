"""The digits in tests/data/digits are what scripts/digits_to_idx.py makes of scikit-learn's."""

import gzip
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def main():
    if importlib.util.find_spec("sklearn") is None:
        print("scikit-learn is not installed: skipped")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-B", str(ROOT / "scripts" / "digits_to_idx.py"), folder], check=True)
        made = sorted(pathlib.Path(folder).iterdir())
        wrong = [path.name for path in made
                 if gzip.decompress((ROOT / "tests/data/digits" / f"{path.name}.gz").read_bytes()) != path.read_bytes()]
    print(f"{len(made)} files, differing: {wrong}")
    return 0 if len(made) == 4 and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
