"""Command lines of the program, run in this process where they can be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Union

from . import _errors, _native, _program

Value = Union[str, bytes, int, float, bool, "os.PathLike[str]", "list[Any]", "tuple[Any, ...]", None]
"""Of a flag: True is a switch, None and False are not given, a list is its items joined by commas."""

PlanLike = Union[str, bytes, "os.PathLike[str]", "Mapping[str, Any]"]
"""A plan: a file, or a mapping such as what plan() returns or json.load() reads."""


class Done(NamedTuple):
    code: int  # 0, or 1 where the answer is no
    text: bytes


def run(words: list[str], stdin: str = "", source: str = "the plan that was given") -> Done:
    """What the command prints. Raises what it says on standard error."""
    if words[0] in _program.COMMANDS:
        return Done(*_program.run(words, stdin))
    encoded = [os.fsencode(word) for word in ["shardwright", *words]]
    code, kind, text = _native.run(encoded, stdin.encode("utf-8", "surrogatepass"), source.encode())
    if kind:
        raise getattr(_errors, kind)(text.decode("utf-8", "replace"))
    return Done(code, text)


def without_nul(name: str, text: str) -> str:
    """A command line ends its words with a NUL."""
    if "\0" in text:
        raise _errors.UsageError(f"{name}: got a text with a NUL character, expected one without")
    return text


def text_of(flag: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(text_of(flag, item) for item in value)
    if isinstance(value, (bytes, os.PathLike)):
        value = os.fsdecode(value)
    return without_nul(flag, str(value))


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Keywords as words: "global_batch" is --global-batch."""
    words = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        flag = without_nul("a keyword", "--" + key.replace("_", "-"))
        words.append(flag if value is True else f"{flag}={text_of(flag, value)}")
    return words


def printed_json(command: str, words: list[str], flags: Mapping[str, Any], stdin: str = "") -> dict[str, Any]:
    """What `shardwright COMMAND ... --json` prints, as a dictionary."""
    done = run([command, "--json", *flag_words(flags), *words], stdin)
    # --help is a table of flags, and a plan without --json goes to standard output by itself.
    if flags.get("help") or not done.text.startswith(b"{"):
        raise _errors.UsageError(f"{command}: these keywords print text, expected those of a result")
    return json.loads(done.text)


def as_dictionary(value: Any) -> Any:
    """What json.dumps cannot write by itself."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a plan holds a value of type {type(value).__name__}, expected what JSON has")


def plan_words(plan: PlanLike) -> tuple[list[str], str]:
    """The argument that names the plan, and what is on standard input."""
    if not isinstance(plan, Mapping):
        return [without_nul("the plan", os.fsdecode(plan))], ""
    return ["-"], json.dumps(plan.get("plan_file", plan), default=as_dictionary)


def call(command: str, positionals: list[Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Of the functions in commands.py. Of a first argument that is a plan a mapping may stand for the file."""
    words: list[str] = []
    stdin = ""
    for value in positionals:
        if value is None:
            continue
        if isinstance(value, Mapping):
            one, stdin = plan_words(value)
            words += one
        else:
            words.append(without_nul("the plan" if not words else "an argument", os.fsdecode(value)))
    return printed_json(command, words, flags, stdin)
