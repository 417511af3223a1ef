"""Writes sboms/shardwright.cdx.json (CycloneDX 1.6) into a wheel's .dist-info: the libraries linked into it, and what built it.

    python3 scripts/sbom.py SOURCES.txt TOOLS.txt UNPACKED/NAME.dist-info

SOURCES.txt has lines NAME VERSION SHA256 of Debian's source packages; TOOLS.txt is scripts/wheel-tools.txt. Headers that are
compiled in (nlohmann-json3, CLI11, Boost, toml++) have the versions of Debian's installed packages.
"""

import json
import pathlib
import re
import subprocess
import sys

HEADERS = ("nlohmann-json3-dev", "libcli11-dev", "libboost1.74-dev", "libtomlplusplus-dev")


def component(purl: str, name: str, version: str, scope: str, sha256: str = "") -> dict:
    row = {"type": "library", "name": name, "version": version, "purl": f"pkg:{purl}/{name}@{version}", "scope": scope}
    return {**row, "hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else row


def main() -> None:
    sources, tools, info = (pathlib.Path(argument) for argument in sys.argv[1:4])
    components = [component("deb/debian", *line.split()[:2], "required", line.split()[2]) for line in sources.read_text().splitlines()]
    for package in HEADERS:
        version = subprocess.run(["dpkg-query", "-W", "-f=${Version}", package], check=True, capture_output=True, text=True).stdout
        components.append(component("deb/debian", package, version, "required"))
    for name, version, sha256 in re.findall(r"^(\S+)==(\S+) --hash=sha256:(\S+)", tools.read_text(), re.MULTILINE):
        components.append(component("pypi", name, version, "excluded", sha256))
    name, version = info.name.removesuffix(".dist-info").split("-")
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
                "metadata": {"component": {"type": "application", "name": name, "version": version}}, "components": components}
    (info / "sboms").mkdir(exist_ok=True)
    (info / "sboms/shardwright.cdx.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
