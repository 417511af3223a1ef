#!/usr/bin/env python3
"""Brings the outputs that pages quote up to date: quote.py [--check] PROGRAM PAGE...

A block that begins with "```text" and "$ shardwright ..." shows that command and what it prints: all
of it, or the first lines where the block ends with "...". A block that begins with "```json NAME" is
a file that the commands read. --check changes nothing and exits with 1 where a page is not current.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

QUOTE = re.compile(r"(?<=^```text\n)(\$ shardwright [^\n]*)\n(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)
DATA = re.compile(r"^```json (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = 2  # lines of a quotation that ends with "..."


def printed(program, command, folder):
    path = os.pathsep.join([str(pathlib.Path(program).resolve().parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=dict(os.environ, PATH=path), text=True, capture_output=True)
    if done.returncode not in (0, 1) or done.stderr:  # 1: the answer is no
        sys.exit(f"{command}: exit code {done.returncode}, {done.stderr}")
    return done.stdout


def current(program, page):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in DATA.findall(page):
            pathlib.Path(folder, name).write_text(text)

        def quote(match):
            text = printed(program, match[1][2:], folder)
            if match[2].endswith("...\n"):
                text = "".join(text.splitlines(keepends=True)[:SHOWN]) + "...\n"
            return f"{match[1]}\n{text}"

        return QUOTE.sub(quote, page)


def main(arguments):
    check = arguments[:1] == ["--check"]
    program, *pages = arguments[check:]
    stale = False
    for name in pages:
        page = pathlib.Path(name)
        old = page.read_text()
        new = current(program, old)
        stale |= new != old
        if check and new != old:
            for before, after in zip(old.splitlines(), new.splitlines()):
                if before != after:
                    print(f"{name}: quotes\n  {before}\nbut printed is\n  {after}")
        elif new != old:
            page.write_text(new)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
