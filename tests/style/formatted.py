"""Checks that clang-format 14 would change no C++ file. Exits with 77, a skip, where it is not installed."""

import pathlib
import shutil
import subprocess
import sys

import source_tree

SKIP = 77


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    tool = shutil.which("clang-format-14")
    if tool is None:
        print("[SKIPPED] clang-format-14 is not installed (scripts/install-deps.sh --ci)")
        return SKIP
    files = [path.relative_to(root).as_posix() for path in source_tree.cpp_files(root)]
    command = [tool, "--style=file", "--dry-run", "-Werror", *files]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode == 0 and not result.stderr:
        print(f"format: {len(files)} files ok")
        return 0
    unformatted = sorted({line.split(":")[0] for line in result.stderr.splitlines() if "error:" in line})
    if not unformatted:
        print(result.stderr)
    for file in unformatted:
        print(f"{file}: not formatted; run clang-format-14 -i {file}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
