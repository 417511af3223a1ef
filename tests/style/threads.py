"""Checks that core/threads.h alone starts threads, so that one that the system does not give is an error to tell."""

import pathlib
import re
import sys

import source_tree

# A thread that is made: a temporary, a variable with arguments, or an element of a list that the file declares.
MADE = re.compile(r"\bstd::async\b|\bpthread_create\b|\bstd::j?thread\s*(\w+\s*)?[({](?![)}])")
LIST = re.compile(r"\bstd::vector<std::j?thread>\s+(\w+)")
GATE = "core/threads.h"


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files."""
    findings = []
    for path in source_tree.cpp_files(root):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in source_tree.PRODUCT_FOLDERS or name == GATE:
            continue
        text = path.read_text(encoding="utf-8")
        lists = set(LIST.findall(text))
        for number, line in enumerate(text.splitlines(), start=1):
            code = line.split("//")[0]
            grows = any(f"{threads}.emplace_back(" in code for threads in lists)
            if MADE.search(code) or grows:
                findings.append(f"{name}:{number}: starts a thread past the gate in {GATE}")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "threads: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
