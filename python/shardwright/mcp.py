"""A server of the Model Context Protocol: an assistant asks the commands of Shardwright that answer questions.

    shardwright-mcp FOLDER
    python -P -m shardwright.mcp FOLDER

It speaks on standard input and output (pip install 'shardwright[mcp]'). Each tool is a command; its arguments are the command's flags with "_"
for "-", from the table behind `--help --json`. Commands run in FOLDER. Outputs must lie in FOLDER; anything else that writes is no tool.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Optional

from . import _program

# Commands that answer a question. They write only where a flag says so.
ANSWERS = ("estimate", "plan", "simulate", "sweep", "goodput", "baselines", "diff", "check", "judge", "compare", "advise", "hang",
           "emit", "import-run", "report", "inspect", "inspect-trace", "topo", "list", "doctor")
# The others, each with the reason why an assistant does not get it.
WITHHELD = {
    "run": "trains", "eval": "runs a model", "checkpoint": "writes weights", "export": "runs the user's Python code",
    "calibrate": "measures this machine", "validate": "is for tables of published runs",
    "price": "is for tables of published kernels", "page": "writes a page for a browser",
}
INSTRUCTIONS = """Shardwright predicts memory and time of FSDP training, and plans it. Ask `estimate` first: it takes a model and a cluster.
`plan` with `output` writes plan.json, which simulate, emit, report and judge take. Say the band with each time: "1.05 s +- 15 %".
Predictions are no measurements. An answer of "does not fit" is an answer, not an error."""


# Switches and flags of every command that are no arguments: the answer is always JSON, and the limits on the size of files stay.
COMMON = ("--json", "--budget")


class Refused(Exception):
    """A wrong argument, in the words that the program uses."""


def commands() -> dict[str, Any]:
    """The program's commands by name, as `--help --json` has them."""
    table = subprocess.run([_program.find(), "--help", "--json"], stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    found = json.loads(table)["commands"]
    for command in found:
        for kind in ("flags", "switches"):
            command[kind] = [row for row in command[kind] if row["name"] not in COMMON]
    return {command["name"]: command for command in found}


def key_of(row: Mapping[str, Any]) -> str:
    return row["name"].lstrip("-").replace("-", "_").lower()


def schema(command: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of the tool may hold."""
    properties: dict[str, Any] = {}
    for row in command["positionals"]:
        text = {"type": "string"}
        properties[key_of(row)] = {**({"type": "array", "items": text} if row["list"] else text), "description": row["help"]}
    for row in command["flags"]:
        properties[key_of(row)] = {"type": ["string", "number"], "description": f"{row['value']}: {row['help']}"}
    for row in command["switches"]:
        properties[key_of(row)] = {"type": "boolean", "description": row["help"]}
    required = [key_of(row) for row in command["positionals"] if row["required"]]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text_of(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(text_of(name, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Refused(f"{name}: got {json.dumps(value)}, expected a text or a number")
    if "\0" in str(value):
        raise Refused(f"{name}: got a text with a NUL character, expected one without")
    return str(value)


def inside(folder: pathlib.Path, name: str, value: str) -> str:
    """The output's name, if what it leads to lies in the folder. "-" is the answer itself."""
    if value != "-" and not (folder / value).resolve().is_relative_to(folder):
        raise Refused(f'{name}: got "{value}", expected a path inside {folder}, the folder that this server may write to')
    return value


def positional_words(row: Mapping[str, Any], value: Any) -> list[str]:
    values = value if row["list"] and isinstance(value, list) else [value]
    words = [text_of(row["name"], item) for item in values]
    for word in words:
        if word.startswith("-"):  # it would be a flag, which could name an output
            raise Refused(f'{row["name"]}: got "{word}", expected {row["help"]}')
    return words


def words_of(command: Mapping[str, Any], arguments: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """The command line of a call. Raises Refused for an argument that is no text, or that names an output elsewhere."""
    given = dict(arguments)
    words = [command["name"], "--json"]
    for row in command["flags"]:
        value = given.pop(key_of(row), None)
        if value is not None:
            text = text_of(row["name"], value)
            words.append(f"{row['name']}={inside(folder, row['name'], text) if row['file'] == 'write' else text}")
    for row in command["switches"]:
        value = given.pop(key_of(row), False)
        if not isinstance(value, bool):
            raise Refused(f"{row['name']}: got {json.dumps(value)}, expected true or false")
        words += [row["name"]] * value
    for row in command["positionals"]:
        value = given.pop(key_of(row), None)
        words += [] if value is None else positional_words(row, value)
    if given:
        raise Refused(unknown(command, str(next(iter(given)))))
    return words


def unknown(command: Mapping[str, Any], key: str) -> str:
    """What the program says of a flag that it does not have, with its suggestion. The flag is all that the program gets."""
    flag = "--" + key.replace("_", "-")
    said = ""
    if flag.replace("-", "").isalnum():
        done = subprocess.run([_program.find(), command["name"], f"{flag}=1"], stdin=subprocess.DEVNULL, capture_output=True)
        said = done.stderr.decode("utf-8", "replace").strip().removeprefix("error: ") if done.returncode == 2 else ""
    return said or f"{command['name']}: got an argument {json.dumps(key)}, expected one of {', '.join(schema(command)['properties'])}"


def server(folder: pathlib.Path) -> Any:
    """The server of the SDK, with a tool per answering command."""
    import anyio
    from mcp import types
    from mcp.server.lowlevel import Server

    table = commands()
    program = _program.find()
    folder = folder.resolve()

    def said(text: str, is_error: bool, notes: str = "") -> types.CallToolResult:
        content = [types.TextContent(type="text", text=part) for part in (text, notes) if part]
        return types.CallToolResult(content=content, is_error=is_error)

    async def on_list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name=name, description=table[name]["about"], input_schema=schema(table[name]))
                                            for name in ANSWERS])

    async def on_call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in ANSWERS:
            why = f": it {WITHHELD[params.name]}" if params.name in WITHHELD else ""
            return said(f"error: {params.name} is no tool here{why}; tools: {', '.join(ANSWERS)}", True)
        try:
            words = words_of(table[params.name], params.arguments or {}, folder)
        except Refused as refused:
            return said(f"error: {refused}", True)
        done = await anyio.run_process([program, *words], cwd=folder, stdin=subprocess.DEVNULL, check=False)
        notes = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode not in (0, 1):  # 1: the answer is no
            return said(notes or f"error: the program ended with code {done.returncode}", True)
        return said(done.stdout.decode("utf-8", "replace"), False, notes)

    version = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True).stdout.split()[-1]
    return Server("shardwright", version=version, instructions=INSTRUCTIONS, on_list_tools=on_list_tools, on_call_tool=on_call_tool)


async def serve(folder: pathlib.Path) -> None:
    from mcp.server.stdio import stdio_server

    made = server(folder)
    async with stdio_server() as (read, write):
        await made.run(read, write, made.create_initialization_options())


def main(arguments: Optional[list[str]] = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: shardwright-mcp FOLDER (the folder in which commands run, and the only one where they may write)", file=sys.stderr)
        return 2
    folder = pathlib.Path(words[0])
    if not folder.is_dir():
        print(f"error: {folder}: no such folder", file=sys.stderr)
        return 4
    try:
        import anyio
        import mcp  # noqa: F401
    except ImportError:
        print("error: the package mcp is missing; pip install 'shardwright[mcp]'", file=sys.stderr)
        return 4
    anyio.run(serve, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
