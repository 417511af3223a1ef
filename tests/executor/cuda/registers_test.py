"""What each kernel of libshardwright_cuda.so takes of a multiprocessor, against registers.txt.

    python3 registers_test.py LIBRARY [--write]

Registers a thread, bytes of its stack (arrays that did not fit into registers, and spills) and of shared memory, as `cuobjdump`
reads them from the library, by kernel and architecture. A kernel that takes more than the table says fails; so does one that is
not in it, and a row whose kernel is gone. `--write` makes the table anew: look at what changed. Exit code 77 without cuobjdump.
"""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

TABLE = pathlib.Path(__file__).with_name("registers.txt")
# Another version of ptxas allocates otherwise; what is lost to a mistake is far more.
SLACK = 8
HEAD = """# registers / bytes of stack / bytes of shared memory, by architecture. registers_test.py --write
"""


def cuobjdump():
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else []:
        found = found or next(map(str, pathlib.Path(place).glob("*/bin/cuobjdump")), None)
    return found


def usage(program, library):
    """{(kernel, architecture): (registers, stack, shared)}"""
    text = subprocess.run([program, "--dump-resource-usage", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    text = subprocess.run(["c++filt"], check=True, input=text, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    architecture = kernel = None
    for line in text.splitlines():
        if line.startswith("arch = "):
            architecture = line.removeprefix("arch = ")
        elif match := re.search(r"Function .*Entry<shardwright::gpu::(.*)>\(", line):
            kernel = match.group(1)
        elif kernel and (match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)):
            registers, stack, shared, local = map(int, match.groups())
            found[kernel, architecture] = (registers, stack + local, shared)
            kernel = None
    return found


def read_table():
    rows = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    architectures = rows[0][1:]
    return {(row[0], architecture): tuple(map(int, cell.split("/")))
            for row in rows[1:] for architecture, cell in zip(architectures, row[1:], strict=True)}


def write_table(found):
    architectures = sorted({architecture for _, architecture in found}, key=lambda name: int(name.removeprefix("sm_")))
    kernels = sorted({kernel for kernel, _ in found})
    width = max(map(len, kernels))
    lines = [f"{'kernel':{width}s}" + "".join(f"{architecture:>16s}" for architecture in architectures)]
    for kernel in kernels:
        cells = ["/".join(map(str, found[kernel, architecture])) for architecture in architectures]
        lines.append(f"{kernel:{width}s}" + "".join(f"{cell:>16s}" for cell in cells))
    TABLE.write_text(HEAD + "\n".join(lines) + "\n")


def complaints(found, table):
    for key in sorted(found.keys() | table.keys()):
        where = f"{key[0]} for {key[1]}"
        if key not in table:
            yield f"{where}: not in {TABLE.name}"
        elif key not in found:
            yield f"{where}: in {TABLE.name} and not in the library"
        else:
            for what, slack, got, limit in zip(("registers", "bytes of stack", "bytes of shared memory"), (SLACK, 0, 0),
                                               found[key], table[key]):
                if got > limit + slack:
                    yield f"{where}: got {got} {what}, expected at most {limit}"


def main():
    library = sys.argv[1]
    program = cuobjdump()
    if program is None or not pathlib.Path(library).exists():
        print("no cuobjdump or no library: skipped")
        return 77
    found = usage(program, library)
    if "--write" in sys.argv:
        write_table(found)
        return 0
    bad = list(complaints(found, read_table()))
    print("\n".join(bad))
    print(f"{len(found)} kernels and architectures, {len(bad)} complaints")
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
