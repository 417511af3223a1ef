"""Checks that no file has more than 1000 lines, no function more than 70, and no line of a page's text more than 100 columns.

The sources are formatted by clang-format (formatted.py), which is what makes this simple reading right: in a
namespace nothing is indented, so a function opens on a line that starts in the first column and closes on the
first later line that is exactly a brace in that column. Functions inside classes are left to clang-tidy.

long_functions.txt lists the functions that are longer than the limit today, with their lengths. An entry may
only shrink, and one that is no longer needed fails the check: the list is a debt, not a permission.
"""

import pathlib
import re
import sys

import source_tree

MAX_FILE_LINES = 1000
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100
RAW_STRING = re.compile(r'R"([^(\s]*)\(.*?\)\1"', re.DOTALL)
NAMESPACE = re.compile(r'^(inline )?(namespace\b|extern "C")')
TYPE = re.compile(r"^(template\s*<.*>\s*)?(struct|class|enum|union)\b")


def functions(text: str) -> list[tuple[str, int, int]]:
    """(name, first line, body lines) of each function at namespace scope; lines count from 1."""
    # A raw string may hold a brace in the first column; only its line breaks matter here.
    text = RAW_STRING.sub(lambda match: '""' + "\n" * match[0].count("\n"), text)
    found: list[tuple[str, int, int]] = []
    signature: list[str] = []
    block_start = 0  # Line of the opening brace of the block that is being skipped, 0 outside of one.
    for number, line in enumerate(text.splitlines(), start=1):
        if block_start:
            if line.startswith("}"):
                declaration = " ".join(part.strip() for part in signature)
                if "(" in declaration and not TYPE.match(declaration) and not declaration.endswith(("= {", "{{")):
                    first = block_start - len(signature) + 1
                    found.append((name_of(declaration), first, number - block_start - 1))
                block_start = 0
                signature = []
            continue
        if not line or line.startswith(("#", "//", "}")) or NAMESPACE.match(line):
            signature = []
            continue
        signature.append(line)
        if line.endswith("{"):
            block_start = number
        elif line.endswith((";", "}")):
            signature = []
    return found


def name_of(declaration: str) -> str:
    """The name before the first parenthesis; of a doctest case the whole macro call."""
    if declaration.startswith("TEST_CASE"):
        return declaration.rstrip("{ ")
    before = declaration.split("(")[0].split()
    return before[-1].lstrip("*&") if before else declaration


def read_known(path: pathlib.Path) -> dict[str, int]:
    """Entries "file: function: lines" as {"file: function": lines}."""
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            key, _, length = text.rpartition(":")
            known[key] = int(length)
    return known


def wide_lines(text: str) -> list[tuple[int, int]]:
    """(line, columns) of a page's text that is too wide: not of tables, code, or one word that cannot be broken."""
    found = []
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = line.strip()[:3]
        if mark in ("```", "~~~"):
            fence = "" if mark == fence else fence or mark
        is_text = not fence and not line.lstrip().startswith(("|", "<", "!", "#")) and not line.startswith("    ")
        if is_text and len(line) > MAX_COLUMNS and len(line.split()) > 1:
            found.append((number, len(line)))
    return found


def check_pages(root: pathlib.Path) -> list[str]:
    """The same findings of the pages that people write."""
    pages = [*sorted((root / "docs").glob("*.md")), *(root / name for name in ("CONTRIBUTING.md", "README.md"))]
    return [f"{page.relative_to(root).as_posix()}:{line}: {columns} columns, expected at most {MAX_COLUMNS}"
            for page in pages if page.exists() for line, columns in wide_lines(page.read_text(encoding="utf-8"))]


def check(root: pathlib.Path, known: dict[str, int]) -> list[str]:
    """All findings as "file:line: text", in the order of the files, then stale entries of `known`."""
    findings = []
    used = set()
    for path in source_tree.cpp_files(root):
        relative = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        line_count = len(text.splitlines())
        if line_count > MAX_FILE_LINES:
            findings.append(f"{relative}:1: {line_count} lines in a file, expected at most {MAX_FILE_LINES}")
        for name, line, length in functions(text):
            key = f"{relative}: {name}"
            limit = known.get(key, MAX_FUNCTION_LINES)
            if length > MAX_FUNCTION_LINES:
                used.add(key)
            if length > limit:
                findings.append(f"{relative}:{line}: {name} has {length} lines, expected at most {limit}")
            elif length < limit and key in used and key in known:
                findings.append(f"long_functions.txt: {key} has shrunk to {length} lines; lower the entry")
    for key in sorted(known.keys() - used):
        findings.append(f"long_functions.txt: {key} is no longer too long; remove the entry")
    return findings


def main() -> int:
    known = read_known(pathlib.Path(__file__).with_name("long_functions.txt"))
    root = pathlib.Path(sys.argv[1])
    findings = check(root, known) + check_pages(root)
    print("\n".join(findings) if findings else "lengths: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
