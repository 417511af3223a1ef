"""Checks that no file names an absolute path of some developer's machine, which no user would have."""

import pathlib
import re
import sys

import source_tree

# Written in two pieces each, so that this file passes its own check. The look-behind lets relative paths pass.
NAMES = ("wo" "rk", "tm" "p", "ro" "ot", "ho" "me")
MACHINE_PATH = re.compile(r"(?<![\w.*)}\]-])/(" + "|".join(NAMES) + r")(?![\w-])")


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files. Binary files are not read."""
    findings = []
    for path in source_tree.all_files(root):
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1):
            match = MACHINE_PATH.search(line)
            if match is not None:
                findings.append(f"{path.relative_to(root).as_posix()}:{number}: names the machine path {match[0]}")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "paths: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
