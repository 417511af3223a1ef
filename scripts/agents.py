#!/usr/bin/env python3
"""Writes AGENTS.md, SKILL.md and llms.txt from `--help --json` and the titles of docs/: agents.py [--check] PROGRAM.

--check changes nothing and exits with 1 where a file is not current.
"""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
MADE = "`scripts/agents.py PROGRAM` writes this file."
# Question, the command that answers it, and how to read the answer.
QUESTIONS = [
    ("Does it fit, and how fast is it?", "estimate", "line 1 is the verdict; line 2 has tokens/s per GPU with its band"),
    ("Which plan is the fastest that fits?", "plan", "`proven_gap` says how far the plan may be from the best one"),
    ("Where do memory and time of a plan go?", "simulate", "`memory.peak_reserved_bytes` is what PyTorch's allocator takes"),
    ("Which batch, sequence or number of nodes?", "sweep", "one row per combination; `misfit` says by how much a row does not fit"),
    ("What would the usual frameworks do?", "baselines", "one row per framework with its defaults"),
    ("How do I set this plan in my framework?", "emit", "the answer lists what the framework cannot be told"),
    ("I have settings files: what do they do?", "import-run", "`assumed` lists what the files did not say"),
    ("Is my run as fast as it should be?", "judge", "causes are ranked; each was simulated"),
    ("Why is my run slow?", "advise", "changes by gain over effort, from a trace of a few steps"),
    ("Prediction and measurement differ: where?", "compare", "the gap, op by op"),
    ("My job hangs: which rank?", "hang", "rank, unit and phase of each finding"),
    ("Two plans: why is one faster?", "diff", "choices that differ, then where the time differs"),
    ("Would this change break our limits?", "check", "exit code 1 and the line of the model that did it"),
    ("How long is a whole run with failures?", "goodput", "useful share of the time, and how often to save"),
]
CLAIMS = [
    "A prediction is not a measurement. Say \"predicted\", and repeat the band: \"1.05 s +- 15 %\".",
    "Say whose runs the profile was fitted to: the line `profile` of the answer has it.",
    "No figure of several GPUs of our own executor is measured. Do not claim one.",
    "FSDP (with expert, tensor or context parallelism), ZeRO and DDP are planned. Pipeline parallelism is planned, simulated, and run on the CPU.",
    "\"Does not fit\" is an answer (exit code 1). Codes 2 and 3 mean that the question was wrong: read the message, it says what was "
    "expected.",
    "A note or warning on standard error changes the meaning of the answer. Repeat it.",
]


def table(program):
    text = subprocess.run([program, "--help", "--json"], capture_output=True, text=True, check=True).stdout
    return {command["name"]: command for command in json.loads(text)["commands"]}


def summary(command):
    return re.split(r"(?<=[.])\s", command["about"].split("\n\n")[0].replace("\n", " "))[0]


def example(command):
    """The first example of the help, in one line."""
    lines = command["about"].split("Examples:\n", 1)[1]
    return re.search(r"shardwright (?:[^\n]*\\\n)*[^\n]*", lines)[0].replace("\\\n", "")


def one_line(text):
    return " ".join(text.split())


def filled(text, mark="- "):
    return textwrap.fill(text, 100, initial_indent=mark, subsequent_indent=" " * len(mark), break_long_words=False, break_on_hyphens=False)


def questions(commands):
    rows = ["| question | command | how to read the answer |", "|---|---|---|"]
    return "\n".join(rows + [f"| {asked} | `{one_line(example(commands[name]))}` | {read} |" for asked, name, read in QUESTIONS])


def reference(commands):
    return "\n".join(filled(f"`{name}`: {summary(command)}") for name, command in commands.items())


def skill(commands):
    return f"""---
name: shardwright
description: Predicts memory and step time of FSDP, ZeRO and DDP training, finds the fastest plan that fits, and explains slow runs.
---

# Shardwright

Ask it before a GPU is rented: does the model fit, how long is a step, which settings are best.
Nothing is trained and no GPU is needed. `estimate` takes under a second of CPU; a search takes
seconds. {MADE}

## What to ask

{questions(commands)}

Every command takes `--json`. `shardwright COMMAND --help --json` lists its flags. With the package's
extra `mcp`, `shardwright-mcp FOLDER` serves these commands as tools.

## How to read answers

- Exit code 0: yes. 1: the answer is no, such as a plan that does not fit. 2: wrong usage. 3: bad input.
  4: the machine lacks something. 5: a run failed. 70: a fault of Shardwright.
- Memory is per GPU in GiB of 2^30 bytes. *Allocated* is what tensors take; *reserved* is what the
  allocator holds, and what runs out.
- The line `next` of `estimate` is the command that searches further and writes the plan.

## What not to claim

{chr(10).join(map(filled, CLAIMS))}
"""


def agents(commands):
    return f"""# For agents

`SKILL.md` says how to *use* Shardwright; this file says how to *change* it.
{MADE}

## Commands

```sh
scripts/test.sh                                  # packages, build, fast tests
cmake --preset release && ninja -C build NAME    # one target
ctest --preset fast                              # tests for each change
ctest --test-dir build -R style                  # layout, includes, lengths, pages
.ci/run                                          # all that a change must pass
```

## Rules

- `CONTRIBUTING.md` says where each rule is and how to add a model, a GPU, a dialect or a flag.
- A folder includes only folders above it in CONTRIBUTING's table. `tests/style/includes.py` checks it.
- Bad input is an error with file, field, what was found and what was expected. Tests compare whole texts.
- Expected values come from a hand computation, a closed form, brute force, PyTorch or a published
  figure; never from our own output.
- Print no figure that you did not measure. Measurements go to `bench/log/`, with command and date.
- README, `docs/` and `--help` stay true in each commit. Pages are plain: subject, verb, object.

## Commands of the program

{reference(commands)}
"""


def page_line(path):
    title = re.search(r"^# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)[1]
    return f"- [{title}](docs/{path.name})"


def llms(commands):
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("index.md", "gallery.md", "notebooks.md")]
    return f"""# Shardwright

> Plans, simulates and runs Fully Sharded Data Parallel (FSDP) training: whether a model fits on some
> GPUs, how long a step takes, which plan is the fastest that fits, and why a run is slow.

{MADE}

- [SKILL.md](SKILL.md): what to ask, how to read answers, what not to claim
- [AGENTS.md](AGENTS.md): how to build, test and change the project
- [README.md](README.md): what it is, with a first answer

## Commands

{reference(commands)}

## Pages

{chr(10).join(map(page_line, pages))}
"""


def made(program):
    commands = table(program)
    return {"AGENTS.md": agents(commands), "SKILL.md": skill(commands), "llms.txt": llms(commands)}


def main(arguments):
    check = arguments[:1] == ["--check"]
    stale = [name for name, text in made(arguments[-1]).items()
             if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text]
    if check:
        for name in stale:
            print(f"{name} is not current; run scripts/agents.py PROGRAM")
        return int(bool(stale))
    for name, text in made(arguments[-1]).items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
