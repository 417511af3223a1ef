"""Checks that the house does not grow: C++ code lines of each folder outside tests stay within house.txt.

A code line is neither blank nor a comment alone. The limits add up to at most CEILING: a folder gets room only from another one,
in a commit that says why. Prints the table with the room that is left. Comments, tests, data and Python are free.
"""

import pathlib
import sys

import source_tree

CEILING = 114_164


def code_lines(text: str) -> int:
    """Lines that are neither blank nor begin a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.lstrip().startswith("//"))


def count(root: pathlib.Path) -> dict[str, int]:
    """Code lines of the C++ files of each folder at the root, without tests."""
    lines: dict[str, int] = {}
    for path in source_tree.all_files(root):
        folder = path.relative_to(root).parts[0]
        if path.suffix in source_tree.CPP_SUFFIXES and folder != "tests":
            lines[folder] = lines.get(folder, 0) + code_lines(path.read_text(encoding="utf-8"))
    return lines


def read_limits(text: str) -> dict[str, int]:
    """Lines "folder limit", with comments behind #."""
    rows = [line.split("#")[0].split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if row}


def check(root: pathlib.Path, limits: dict[str, int]) -> list[str]:
    findings = []
    if sum(limits.values()) > CEILING:
        findings.append(f"house.txt: the limits add up to {sum(limits.values())}, expected at most {CEILING}")
    counted = count(root)
    for folder, lines in sorted(counted.items()):
        if folder not in limits:
            findings.append(f"house.txt: no limit for {folder}, which has {lines} code lines")
        elif lines > limits[folder]:
            findings.append(f"{folder}: {lines} code lines, expected at most {limits[folder]} (tests/style/house.txt)")
    findings += [f"house.txt: no C++ file in {folder}; remove the entry" for folder in sorted(limits.keys() - counted.keys())]
    return findings


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    limits = read_limits(pathlib.Path(__file__).with_name("house.txt").read_text(encoding="utf-8"))
    findings = check(root, limits)
    for folder, lines in sorted(count(root).items()):
        print(f"{folder:12} {lines:7} of {limits.get(folder, 0):7}")
    print(f"{'sum':12} {sum(count(root).values()):7} of {CEILING:7}")
    print("\n".join(findings) if findings else "house: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
