"""Checks that the product prints through core/printable.h only, so that no name of a stranger reaches a terminal as it is."""

import pathlib
import re
import sys

import source_tree

USE = re.compile(r"\bstd(err|out)\b|\bSTD(ERR|OUT)_FILENO\b|\bstd::c(out|err|log)\b|(?<![\w])v?printf\(|\bf?puts\(|\bputchar\(|\bperror\(")
# What each file may use, and why.
ALLOWED = {
    "core/printable.cc": {"stderr"},  # the gate
    "core/write_file.cc": {"stdout"},  # the other gate
    "cli/export_command.cc": {"STDOUT_FILENO", "STDERR_FILENO"},  # to silence a child
    "cli/plan_search.cc": {"STDERR_FILENO"},  # what a signal handler may say
    "cli/search_progress.cc": {"STDERR_FILENO"},  # whether it is a terminal
    "cli/stop_signals.cc": {"STDERR_FILENO"},  # constant texts in signal handlers
    "cli/terminal.cc": {"STDOUT_FILENO", "stdout", "fputs("},  # likewise, and the colours
}


def code_of(line: str) -> str:
    """Without texts and comments."""
    return re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files."""
    findings = []
    for path in source_tree.cpp_files(root):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] not in source_tree.PRODUCT_FOLDERS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for match in USE.finditer(code_of(line)):
                if match[0] not in ALLOWED.get(name, ()):
                    findings.append(f"{name}:{number}: {match[0].rstrip('(')} goes past the gate in core/printable.h")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "printing: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
