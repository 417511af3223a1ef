"""The files of the repository, for the checks in this folder, without need of git."""

import pathlib
from collections.abc import Iterator

# The folders of the product, each with the folders it may include besides itself: those to its left in
# core -> models, topologies -> schedule -> traces -> simulator, executor -> planner -> analysis -> cli -> python, web.
ALLOWED_INCLUDES: dict[str, tuple[str, ...]] = {
    "core": (),
    "models": ("core",),
    "topologies": ("core",),
    "schedule": ("core", "models", "topologies"),
    "traces": ("core", "models", "topologies", "schedule"),
    "simulator": ("core", "models", "topologies", "schedule", "traces"),
    "executor": ("core", "models", "topologies", "schedule", "traces"),
    "planner": ("core", "models", "topologies", "schedule", "traces", "simulator", "executor"),
    "analysis": ("core", "models", "topologies", "schedule", "traces", "simulator", "executor", "planner"),
    "cli": ("core", "models", "topologies", "schedule", "traces", "simulator", "executor", "planner", "analysis"),
    "python": ("core", "models", "topologies", "schedule", "traces", "simulator", "executor", "planner", "analysis", "cli"),
    "web": ("core", "models", "topologies", "schedule", "traces", "simulator", "executor", "planner", "analysis", "cli"),
}
PRODUCT_FOLDERS = tuple(ALLOWED_INCLUDES)
CPP_SUFFIXES = (".h", ".cc", ".cu", ".cuh")


def all_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every file of the working tree, sorted, without build trees, git's own files and what the demo writes."""
    for entry in sorted(root.iterdir()):
        if entry.name in (".git", "demo") or entry.name == "build" or entry.name.startswith("build-"):
            continue
        if entry.is_dir():
            yield from sorted(p for p in entry.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        elif entry.is_file():
            yield entry


def cpp_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The C++ and CUDA files of the product, the tests and the benchmarks, sorted."""
    for folder in sorted((*PRODUCT_FOLDERS, "tests", "bench")):
        if (root / folder).is_dir():
            yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in CPP_SUFFIXES and p.is_file())
