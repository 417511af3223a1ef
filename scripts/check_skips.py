"""Compares the skipped tests of ctest runs with the list of skips that are expected.

Usage: check_skips.py EXPECTED JUNIT...

EXPECTED holds one test name per line; `#` starts a comment. JUNIT is what `ctest --output-junit` wrote. Both an
unexpected skip and an expected one that did not happen fail: the first hides a check, the second means that the
list is out of date.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def read_expected(path: pathlib.Path) -> set[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.split("#")[0].strip() for line in lines} - {""}


def read_skipped(path: pathlib.Path) -> tuple[set[str], int]:
    """The tests that did not run for whatever reason, and the number of all tests."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    skipped = {case.get("name", "") for case in cases if case.get("status") not in ("run", "fail")}
    return skipped, len(cases)


def differences(expected: set[str], skipped: set[str]) -> list[str]:
    unexpected = [f"skipped, but not expected: {name}" for name in sorted(skipped - expected)]
    return unexpected + [f"expected to be skipped, but it ran: {name}" for name in sorted(expected - skipped)]


def main() -> int:
    if len(sys.argv) < 3:
        print("usage: check_skips.py EXPECTED JUNIT...", file=sys.stderr)
        return 2
    skipped: set[str] = set()
    count = 0
    for name in sys.argv[2:]:
        more, tests = read_skipped(pathlib.Path(name))
        skipped |= more
        count += tests
    findings = differences(read_expected(pathlib.Path(sys.argv[1])), skipped)
    if count == 0:
        findings.append("no test ran at all")
    for finding in findings:
        print(f"{sys.argv[1]}: {finding}")
    if findings:
        return 1
    print(f"skipped tests: {len(skipped)} of {count}, as {sys.argv[1]} says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
