"""Checks that each promise of docs/security.md names a test that there is, and one of those that CI runs (fast or ci).

A name that the page writes like a test's, such as `cli_wire`, must be one; so must a file's, such as `core/files.h`.
"""

import pathlib
import re
import sys

PAGE = "docs/security.md"
TEST = re.compile(r"`((?:cli|elf|python|schedule|style|sw)(?:_\w+)?)`")
FILE = re.compile(r"`((?:\w+/)+[\w.-]+\.\w+|(?:\w+/)+)`")


def tests_of(root: pathlib.Path) -> dict[str, bool]:
    """{name of a test: whether CI runs it}, from the calls that make tests and give them labels."""
    found: dict[str, bool] = {}
    for path in sorted((root / "tests").rglob("CMakeLists.txt")):
        text = path.read_text(encoding="utf-8")
        loops = {name: words.split() for name, words in re.findall(r"foreach\((\w+) ([^)]*)\)", text)}
        for name, rest in re.findall(r"^ *(?:add_test\(NAME|sw_\w*test\(|sw_test_properties\()\s*([\w${}]+)((?:\([^()]*\)|[^()])*)\)", text, re.M):
            variable = re.search(r"\$\{(\w+)\}", name)
            for word in loops.get(variable[1], []) if variable else [""]:
                test = name.replace("${" + variable[1] + "}", word) if variable else name
                found[test] = found.get(test, False) or re.search(r"\b(fast|ci)\b", rest) is not None
    return found


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text"."""
    tests, findings, column = tests_of(root), [], None
    for number, line in enumerate((root / PAGE).read_text(encoding="utf-8").splitlines(), start=1):
        findings += [f"{PAGE}:{number}: there is no test {name}" for name in TEST.findall(line) if name not in tests]
        findings += [f"{PAGE}:{number}: there is no file {name}" for name in FILE.findall(line) if not (root / name).exists()]
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            column = None
        elif cells[0] == "promise":
            column = cells.index("test")
        elif column is not None and not set(line) <= set("|- "):
            named = TEST.findall(cells[column]) if column < len(cells) else []
            if not any(tests.get(name, False) for name in named):
                findings.append(f"{PAGE}:{number}: no test that CI runs holds this promise")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "promises: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
