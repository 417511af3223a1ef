"""What programs and shared objects say to the system's loader: it must never look into the current folder."""

import pathlib
import re
import subprocess
from collections.abc import Iterator

ET_EXEC, ET_DYN = 2, 3


def elf_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Programs and shared objects below `folder`, sorted. Links are not followed."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and "CMakeFiles" not in path.parts:
            with path.open("rb") as file:
                head = file.read(18)
            if head[:4] == b"\x7fELF" and int.from_bytes(head[16:18], "little") in (ET_EXEC, ET_DYN):
                yield path


def entries(path: pathlib.Path) -> list[tuple[str, str]]:
    """("NEEDED", "libc.so.6"), ("RUNPATH", "/opt/lib:"), ..."""
    text = subprocess.run(["readelf", "--dynamic", "--wide", path], text=True, capture_output=True, check=True).stdout
    return re.findall(r"\((NEEDED|RPATH|RUNPATH|AUDIT|DEPAUDIT|FILTER|AUXILIARY)\).*?\[(.*)\]", text)


def faults(path: pathlib.Path) -> list[str]:
    """What is wrong with one file, in words."""
    found = []
    for tag, value in entries(path):
        if tag in ("RPATH", "RUNPATH"):
            found += [f"{path}: {tag} \"{value}\" has the element \"{element}\", expected an absolute path or $ORIGIN"
                      for element in value.split(":") if not re.match(r"/|\$ORIGIN(/|$)", element)]
        elif "/" in value and not value.startswith("/"):
            found.append(f"{path}: {tag} \"{value}\" is a path from the current folder")
    return found
