"""Checks the #include lines: folder order, spelling from the repository root, and who may see which library."""

import pathlib
import re
import sys

import source_tree

INCLUDE = re.compile(r'^\s*#\s*include\s*(?P<open>[<"])(?P<name>[^>"]+)[>"]')
CUDA_HEADER = re.compile(r"^(cuda|cublas|cudnn|nccl|nvtx)")


def check_line(relative: pathlib.PurePosixPath, quoted: bool, name: str) -> str | None:
    """What is wrong with one include, or None."""
    folder = relative.parts[0]
    target = name.split("/")[0]
    is_product = folder in source_tree.ALLOWED_INCLUDES
    if not quoted:
        if name == "nlohmann/json.hpp" and relative.suffix != ".cc":
            return "nlohmann/json.hpp may be included by .cc files only, since it is slow to compile"
        if CUDA_HEADER.match(name) and not relative.as_posix().removeprefix("tests/").startswith("executor/cuda/"):
            return f"{name}: CUDA and NCCL headers may be included in executor/cuda/ and its tests only"
        return None
    if target not in (*source_tree.ALLOWED_INCLUDES, "tests", "bench") or "/" not in name:
        return f'"{name}" is not a path from the repository root'
    if is_product and target != folder and target not in source_tree.ALLOWED_INCLUDES[folder]:
        allowed = ", ".join(source_tree.ALLOWED_INCLUDES[folder]) or "no other folder"
        return f"folder {folder} may not include {target}; it may include {allowed}"
    return None


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files."""
    findings = []
    for path in source_tree.cpp_files(root):
        relative = pathlib.PurePosixPath(path.relative_to(root).as_posix())
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.suffix in (".h", ".cuh") and "#pragma once" not in lines:
            findings.append(f"{relative}:1: a header needs #pragma once")
        for number, line in enumerate(lines, start=1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            problem = check_line(relative, match["open"] == '"', match["name"])
            if problem is not None:
                findings.append(f"{relative}:{number}: {problem}")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "includes: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
