"""The oldest CMake that the README promises, Debian 12's, must configure the tree: a newer one, first in PATH, hides what it lacks.

With a CUDA toolkit it must do so, too, and compile kernels as C++20, which CMake 3.25 has no name for.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

CMAKE = "/usr/bin/cmake"


def main(root):
    oldest = re.search(r"cmake_minimum_required\(VERSION (\d+\.\d+)", (root / "CMakeLists.txt").read_text())[1]
    found = subprocess.run([CMAKE, "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    if not found.startswith(oldest + "."):
        print(f"SKIPPED: {CMAKE} is {found}, not {oldest}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([CMAKE, "-S", str(root), "-B", folder, "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
                             capture_output=True, text=True)
        if run.returncode != 0 or "CMake Warning" in run.stderr:
            print(f"CMake {found} does not configure the tree without a complaint:\n{run.stderr}")
            return 1
        kernels = [c["command"] for c in json.loads((pathlib.Path(folder) / "compile_commands.json").read_text())
                   if c["file"].endswith(".cu")]
        for command in kernels:
            if "-std=c++20" not in command:
                print(f"kernels are not compiled as C++20: {command}")
                return 1
    print(f"CMake {found} configures the tree; {len(kernels)} CUDA sources as C++20")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
