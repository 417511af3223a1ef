#!/usr/bin/env python3
"""Writes the site: the pages of docs/, references of commands and package, the gallery's reports, the notebooks; then builds it.

    python3 scripts/site.py SHARDWRIGHT FOLDER_OF_THE_PACKAGE [--source-only]

mkdocs (tests/requirements.txt) builds build/site/html from build/site/source; a link or a page that is missing ends it.
"""

import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site" / "source"
# Title and flags of `plan`.
GALLERY = [
    ("Llama-3-8B on one node of H100", ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "8192", "--micro-batch", "1",
                                        "--recompute", "full", "--wrap", "block")),
    ("Llama-3-70B on eight nodes of H100, searched", ("--model", "llama-3-70b", "--cluster", "dgx-h100", "--nodes", "8", "--seq", "8192",
                                                      "--global-batch", "64")),
    ("GPT-2 on two A100 in one node: too small for what it costs to talk", ("--model", "gpt2", "--cluster", "dgx-a100", "--gpus", "2",
                                                                            "--seq", "1024", "--micro-batch", "4", "--wrap", "block")),
]


def run(program, *words, stdin=None):
    return subprocess.run([program, *words], input=stdin, capture_output=True, text=True, check=True).stdout


def pages():
    """docs/ as it is; what a page links outside of it is named instead."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    for page in SOURCE.glob("*.md"):
        page.write_text(re.sub(r"\[[^\]]+\]\(\.\./([^)]+)\)", r"`\1`", page.read_text(encoding="utf-8")), encoding="utf-8")


def commands(program, names):
    """What --help says of each."""
    text = "# Commands and their flags\n\nWritten from the program's own help; [cli.md](../cli.md) says what they print.\n"
    for name in names:
        text += f"\n## {name}\n\n```text\n{run(program, name, '--help').rstrip()}\n```\n"
    return text


def described(name, thing):
    documentation = inspect.getdoc(thing) or ""
    if inspect.isclass(thing):
        fields = [f"{field}: {kind}" for field, kind in getattr(thing, "__annotations__", {}).items() if not field.startswith("_")]
        methods = [f"{n}{inspect.signature(m)}" for n, m in vars(thing).items() if inspect.isfunction(m) and not n.startswith("_")]
        if documentation.startswith(f"{thing.__name__}("):  # what dataclasses say when nobody does
            documentation = ""
        body = "\n".join([*fields, *methods])
        return f"## {name}\n\n" + (f"{documentation}\n\n" if documentation else "") + (f"```text\n{body}\n```\n" if body else "")
    signature = str(inspect.signature(thing)) if callable(thing) else ""
    return f"## {name}\n\n```text\n{name}{signature}\n\n{documentation}\n```\n"


def package():
    import shardwright
    import shardwright.log
    text = "# The package\n\nWritten from the package's own signatures and texts; [library.md](../library.md) shows how they go together.\n"
    names = [name for name in shardwright.__all__ if name not in ("__version__", "commands")]
    for name in names:
        text += "\n" + described(f"shardwright.{name}", getattr(shardwright, name))
    for name in ("scalars", "to_tensorboard", "to_mlflow"):
        text += "\n" + described(f"shardwright.log.{name}", getattr(shardwright.log, name))
    return text + "\n`shardwright.commands` has a function for every command: [commands.md](commands.md).\n"


def gallery(program):
    (SOURCE / "gallery").mkdir()
    rows = ["| plan | step | memory per GPU | exposed communication |", "|---|---|---|---|"]
    for number, (title, flags) in enumerate(GALLERY, 1):
        plan = run(program, "plan", *flags)
        said = json.loads(run(program, "simulate", "-", "--json", stdin=plan))
        report = SOURCE / "gallery" / f"{number}.html"
        report.write_text(run(program, "report", "-", "-o", "-", stdin=plan), encoding="utf-8")
        rows.append(f"| [{title}](gallery/{number}.html) | {said['step_time_s']:.3f} s | "
                    f"{said['memory']['peak_allocated_bytes'] / 2**30:.1f} GiB | {said['exposed_comm_s']:.3f} s |")
    fill("gallery.md", "gallery", rows)


def notebooks():
    """A page of each: its cells, without what they print."""
    rows = []
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = ["".join(cell["source"]) if cell["cell_type"] == "markdown" else "```python\n" + "".join(cell["source"]) + "\n```"
                for cell in cells]
        text[0] = "#" + text[0]  # one title a page
        rows += [f"[{path.name}](notebooks/{path.name})", "", *text, ""]
    fill("notebooks.md", "notebooks", rows)


def fill(page, mark, lines):
    path = SOURCE / page
    text = path.read_text(encoding="utf-8")
    assert f"<!-- {mark} -->" in text
    path.write_text(text.replace(f"<!-- {mark} -->", "\n".join(lines)), encoding="utf-8")


def main(program, folder, *flags):
    sys.path.insert(0, str(pathlib.Path(folder).resolve()))
    program = str(pathlib.Path(program).resolve())
    pages()
    (SOURCE / "reference").mkdir()
    names = [command["name"] for command in json.loads(run(program, "--help", "--json"))["commands"]]
    (SOURCE / "reference" / "commands.md").write_text(commands(program, names), encoding="utf-8")
    (SOURCE / "reference" / "python.md").write_text(package(), encoding="utf-8")
    gallery(program)
    notebooks()
    if "--source-only" not in flags:
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", ROOT / "mkdocs.yml"], check=True,
                       env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        print(f"Wrote {ROOT / 'build' / 'site' / 'html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
