"""Prints the sources of the product in a compile_commands.json, sorted, relative to the repository root.

Left out: tests and benchmarks (doctest's macros trip several rules) and generated files.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
    commands = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    sources = set()
    for command in commands:
        file = pathlib.Path(command["directory"], command["file"]).resolve()
        if not file.is_relative_to(ROOT):
            continue
        relative = file.relative_to(ROOT)
        if relative.parts[0] in ("tests", "bench") or relative.parts[0].startswith("build"):
            continue
        sources.add(relative.as_posix())
    print("\n".join(sorted(sources)))


if __name__ == "__main__":
    main()
