"""Writes shardwright/commands.py: a typed function for each command, from the tables that the command line is made from.

    python3 write_commands.py FOLDER_OF_THE_PACKAGE    # where _native is
"""

import importlib.util
import json
import keyword
import pathlib
import sys
import textwrap

HEAD = '''"""Every command of the program as a function: keywords are its flags with "_" for "-", the answer is what --json prints.

True is a switch, None and False are not given, a list is its items joined by commas. A plan is a file or a mapping (what plan()
returned, or a plan file that was loaded). Failures are shardwright.Error and its kinds. Generated when Shardwright is built.
"""

from __future__ import annotations

from typing import Any

from ._run import PlanLike, Value, call
'''


def native(folder):
    path = next(folder.glob("_native*.so"))
    spec = importlib.util.spec_from_file_location("_native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def identifier(name):
    name = name.lstrip("-").replace("-", "_").lower()
    return name + "_" if keyword.iskeyword(name) else name


def docstring(command, rows):
    first = command["about"].split("\n\n")[0].replace("\n", " ")
    lines = [first, "", "Keywords:"] if rows else [first]
    for name, help_text in rows:
        lines += textwrap.wrap(f"{name}: {help_text}", 120, initial_indent="  ", subsequent_indent="      ")
    return "".join(f"    {line}".rstrip() + "\n" for line in lines).replace("\\", "\\\\").replace('"""', "'''").strip()


def filled(before, items, after, indent):
    """The items with commas between them, in lines of at most 120 columns that break between items only."""
    text = before + ", ".join(item.replace(" ", "\0") for item in items)
    lines = textwrap.wrap(text.replace(before, before.replace(" ", "\0"), 1) + after.replace(" ", "\0"), 120, initial_indent=indent,
                          subsequent_indent=indent + " " * 8, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def function(command):
    positionals = command["positionals"]
    rows = [(identifier(p["name"]), p["help"]) for p in positionals]
    words, parameters = [], []
    for row in positionals:
        name = identifier(row["name"])
        kind = "PlanLike" if row["file"] == "read" else "Value"
        if row["list"]:
            parameters.append(f"*{name}: {kind}")
            words.append(f"*{name}")
        else:
            parameters.append(f"{name}: {kind}" + ("" if row["required"] else " | None = None"))
            words.append(name)
    flags = [(row["name"], "Value", row["help"]) for row in command["flags"] if row["name"] != "--budget"]
    flags += [(row["name"], "bool", row["help"]) for row in command["switches"] if row["name"] != "--json"]  # it is always given
    if flags:
        if not any(p.startswith("*") for p in parameters):
            parameters.append("*")
        parameters += [f"{identifier(name)}: {kind} = {'False' if kind == 'bool' else 'None'}" for name, kind, _ in flags]
        rows += [(identifier(name), text) for name, _, text in flags]
    given = [f'"{name[2:]}": {identifier(name)}' for name, _, _ in flags]
    signature = filled(f"def {identifier(command['name'])}(", parameters, ") -> dict[str, Any]:", "")
    body = filled(f'return call("{command["name"]}", [{", ".join(words)}], {{', given, "})", "    ")
    return f'{signature}\n    """{docstring(command, rows)}\n    """\n{body}\n'


def main():
    folder = pathlib.Path(sys.argv[1])
    _code, _kind, text = native(folder).run([b"shardwright", b"--help", b"--json"], b"", b"")
    functions = [function(command) for command in json.loads(text)["commands"]]
    text = HEAD + "".join("\n\n" + one for one in functions)
    (folder / "commands.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
