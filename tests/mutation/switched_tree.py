"""A copy of the tree with faults in it, one of which the environment switches on, so that one build serves them all."""

import pathlib
import shutil
import subprocess

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent


def write(path, data):
    """Leaves a file alone that says this already, so that it is not built again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != data:
        path.write_bytes(data)


def copy_tree(folder, without=frozenset()):
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=REPOSITORY,
                           capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if name not in without and (REPOSITORY / name).is_file():
            write(folder / name, (REPOSITORY / name).read_bytes())
            shutil.copymode(REPOSITORY / name, folder / name)


def configure(folder, *settings):
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    subprocess.run(["cmake", "--preset", "release", "-Wno-dev", *launcher, *settings], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)
