"""Checks that each target links the libraries whose headers its sources include, directly or through headers of ours.

On Debian every library's headers lie in /usr/include, so a build there does not notice a missing one. The wheel has each
library in a folder of its own (scripts/build-wheel.sh): a target that does not link nlohmann_json finds no nlohmann/json.hpp.
A header's library must be in the target's DEPS or PRIVATE_DEPS, or in the DEPS of a library of ours that it links.
"""

import pathlib
import re
import sys

import includes
import source_tree

# Header, or folder of headers, and the CMake target that brings it.
LIBRARY_OF = {
    "nlohmann/": "nlohmann_json::nlohmann_json",
    "CLI/": "CLI11::CLI11",
    "boost/": "Boost::headers",
    "pugixml.hpp": "pugixml::pugixml",
    "yaml-cpp/": "yaml-cpp",
    "toml++/": "tomlplusplus::tomlplusplus",
    "sqlite3.h": "SQLite3::SQLite3",
    "openssl/": "OpenSSL::Crypto",
    "zlib.h": "ZLIB::ZLIB",
    "doctest/": "sw_doctest_main",
    "benchmark/": "benchmark::benchmark",
}
LINKED_BY_FUNCTION = {"sw_test": ["sw_doctest_main"], "sw_bench": ["benchmark::benchmark"]}
DECLARATION = re.compile(r"^\s*(sw_library|sw_executable|sw_test|sw_bench)\((\w+)([^)]*)\)", re.MULTILINE)
KEYWORDS = ("SOURCES", "HEADERS", "DEPS", "PRIVATE_DEPS", "LABELS", "TIMEOUT")


class Target:
    def __init__(self, function: str, folder: pathlib.Path, words: list[str]) -> None:
        lists: dict[str, list[str]] = {keyword: [] for keyword in KEYWORDS}
        keyword = "LABELS"
        for word in words:
            if word in KEYWORDS:
                keyword = word
            else:
                lists[keyword].append(word)
        self.sources = [folder / name for name in lists["SOURCES"] + lists["HEADERS"]]
        self.public = lists["DEPS"]
        self.private = lists["PRIVATE_DEPS"] + LINKED_BY_FUNCTION.get(function, [])


def targets(root: pathlib.Path) -> dict[str, Target]:
    found = {}
    for path in source_tree.all_files(root):
        if path.name == "CMakeLists.txt":
            text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
            for function, name, body in DECLARATION.findall(text):
                found[name] = Target(function, path.parent, body.split())
    return found


def linked(name: str, known: dict[str, Target]) -> set[str]:
    """The target's libraries, and those that they bring along."""
    reached: set[str] = set()
    waiting = [*known[name].public, *known[name].private]
    while waiting:
        library = waiting.pop()
        if library not in reached:
            reached.add(library)
            waiting += known[library].public if library in known else []
    return reached


def included(source: pathlib.Path, root: pathlib.Path, memory: dict[pathlib.Path, list[tuple[bool, str]]]) -> dict[str, str]:
    """Headers of libraries that a source sees, each with the file that includes it."""
    found: dict[str, str] = {}
    seen = {source}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in memory:
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            matches = [includes.INCLUDE.match(line) for line in lines]
            memory[path] = [(match["open"] == '"', match["name"]) for match in matches if match]
        for quoted, name in memory[path]:
            if not quoted:
                found.setdefault(name, path.relative_to(root).as_posix())
            elif root / name not in seen:
                seen.add(root / name)
                waiting.append(root / name)
    return found


def check(root: pathlib.Path) -> list[str]:
    """All findings, one per target and library."""
    known = targets(root)
    memory: dict[pathlib.Path, list[tuple[bool, str]]] = {}
    findings = {}
    for name, target in known.items():
        libraries = linked(name, known)
        for source in target.sources:
            for header, file in included(source, root, memory).items():
                library = next((library for start, library in LIBRARY_OF.items() if header.startswith(start)), None)
                if library and library not in libraries:
                    where = source.relative_to(root).as_posix()
                    through = "" if file == where else f" through {file}"
                    findings.setdefault((name, library), f"{where}: target {name} includes {header}{through} "
                                                         f"and does not link {library}")
    return list(findings.values())


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]).resolve())
    print("\n".join(findings) if findings else "links: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
