"""Compares pinned versions with the advisories that we know of (scripts/advisories.json). Exit code 1 names each that is affected.

    python3 scripts/advisories.py --pinned REQUIREMENTS.txt...   lines NAME==VERSION
    python3 scripts/advisories.py --debian SOURCES.txt           lines NAME VERSION HASH, as scripts/build-wheel.sh writes them
"""

import json
import pathlib
import re
import subprocess
import sys

ADVISORIES = json.loads(pathlib.Path(__file__).with_name("advisories.json").read_text(encoding="utf-8"))
PINNED = re.compile(r"""(?:^|[\s"])([A-Za-z0-9._-]+)==(\d[^\s;"]*)""", re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a PyPI version: "2.13.0+cpu" is (2, 13, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))


def older_on_debian(version: str, fixed: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "lt", fixed], check=False).returncode == 0


def affected(kind: str, versions: list[tuple[str, str]]) -> list[str]:
    """One line for each advisory of `kind` ("debian" or "pypi") that a version stands before."""
    older = older_on_debian if kind == "debian" else lambda version, fixed: release(version) < release(fixed)
    return [f"{name} {version}: {row['id']} ({row['what']}), fixed in {row['fixed']}"
            for name, version in versions for row in ADVISORIES[kind]
            if row["package"] == name.lower() and older(version, row["fixed"])]


def main() -> int:
    kind = {"--pinned": "pypi", "--debian": "debian"}[sys.argv[1]]
    texts = [pathlib.Path(file).read_text(encoding="utf-8") for file in sys.argv[2:]]
    findings = [finding for text in texts for finding in
                affected(kind, PINNED.findall(text) if kind == "pypi" else [tuple(line.split()[:2]) for line in text.splitlines()])]
    print("\n".join(findings), end="\n" if findings else "", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
