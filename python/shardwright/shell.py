"""Completion scripts for shells and manual pages, made from `shardwright --help --json`: what they offer is what there is.

    source <(python -m shardwright.shell bash)
    python -m shardwright.shell zsh > "${fpath[1]}/_shardwright"
    python -m shardwright.shell fish > ~/.config/fish/completions/shardwright.fish
    python -m shardwright.shell man plan | man -l -

Installed packages bring the completions and pages along (`python shell.py write PAGES COMPLETIONS` makes them).
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

LISTS = {"--model": "models", "--cluster": "clusters", "--kernel-set": "kernel-sets", "--profile": "profiles"}


class Table:
    """The commands with what they take."""

    def __init__(self, program):
        self.program = program
        found = json.loads(self.run("--help", "--json"))
        self.version, self.commands = found["version"], found["commands"]
        for command in self.commands:
            command["switches"].append({"name": "--help", "help": "examples and flags"})

    def run(self, *words):
        return subprocess.run([self.program, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def first_line(about):
    return about.split("\n")[0]


def lister(flag):
    """What lists the words that a flag takes, as a shell command; empty: nothing does."""
    return f"shardwright list {LISTS[flag]} 2>/dev/null | awk 'NR > 1 {{print $1}}'" if flag in LISTS else ""


def choices(row):
    """"on|off" -> "on off"; empty where a value is no choice between words."""
    return row["value"].replace("|", " ") if "|" in row["value"] else ""


def quoted(text):
    """For use between single quotes."""
    return text.replace("'", "'\\''")


# Completion

BASH = """# Completion of shardwright for bash.
_shardwright() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W '--help --version {commands}' -- "$word"))
    return
  fi
  case "$command $before" in
{values}  esac
  if [[ -z $words && $word == -* ]]; then
    case $command in
{flags}    esac
  fi
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _shardwright shardwright
"""


def bash(table):
    flags, values = "", ""
    for command in table.commands:
        name = command["name"]
        words = " ".join(row["name"] for row in (*command["switches"], *command["flags"]))
        flags += f"    {name}) words='{words}' ;;\n"
        for row in command["flags"]:
            words = f"$({lister(row['name'])})" if row["name"] in LISTS else choices(row)
            if words:
                values += f"    '{name} {row['name']}') words=\"{words}\" ;;\n"
    return BASH.format(commands=" ".join(command["name"] for command in table.commands), flags=flags, values=values)


ZSH = """#compdef shardwright
_shardwright() {{
  local -a commands=(
{commands}  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
{cases}  esac
}}
if [[ $funcstack[1] == _shardwright ]]; then
  _shardwright "$@"
elif (( $+functions[compdef] )); then
  compdef _shardwright shardwright
fi
"""


def zsh_help(text):
    """Inside a specification of _arguments."""
    return quoted(re.sub(r"([\\\[\]:])", r"\\\1", text))


def zsh(table):
    commands, cases = "", ""
    for command in table.commands:
        commands += f"    '{command['name']}:{zsh_help(first_line(command['about']))}'\n"
        rows = [f"'{row['name']}[{zsh_help(row['help'])}]'" for row in command["switches"]]
        for row in command["flags"]:
            words = f"($({quoted(lister(row['name']))}))" if row["name"] in LISTS else f"({choices(row)})" if choices(row) else "_files"
            rows.append(f"'{row['name']}[{zsh_help(row['help'])}]:value:{words}'")
        cases += f"    {command['name']})\n      _arguments " + " \\\n        ".join([*rows, "'*:file:_files' ;;\n"])
    return ZSH.format(commands=commands, cases=cases)


def fish(table):
    lines = ["# Completion of shardwright for fish."]
    for command in table.commands:
        lines.append(f"complete -c shardwright -f -n __fish_use_subcommand -a {command['name']} -d '{quoted(first_line(command['about']))}'")
        start = f"complete -c shardwright -n '__fish_seen_subcommand_from {command['name']}' -l "
        lines += [f"{start}{row['name'][2:]} -d '{quoted(row['help'])}'" for row in command["switches"]]
        for row in command["flags"]:
            words = f"({lister(row['name'])})" if row["name"] in LISTS else choices(row)
            lines.append(f"{start}{row['name'][2:]} -r" + (f" -f -a '{quoted(words)}'" if words else "") + f" -d '{quoted(row['help'])}'")
    return "\n".join(lines) + "\n"


# Manual pages


def troff(text):
    """No escapes, no requests, no hyphens that become dashes."""
    return re.sub(r"^(?=[.'])", r"\\&", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)


def header(name, about, version):
    return (f'.TH {name.upper()} 1 "" "shardwright {version}" "Shardwright"\n.SH NAME\n'
            f"{troff(name)} \\- {troff(first_line(about).removesuffix('.'))}\n")


def description(about):
    """What follows the first line: examples and remarks, as they are."""
    rest = about.partition("\n\n")[2].rstrip("\n")
    return f".SH DESCRIPTION\n.nf\n{troff(rest)}\n.fi\n" if rest else ""


def entry(name, value, text):
    return f".TP\n\\fB{troff(name)}\\fR" + (f" \\fI{troff(value)}\\fR" if value else "") + f"\n{troff(text)}\n"


def command_page(table, command):
    words = []
    for row in command["positionals"]:
        word = f"\\fI{troff(row['name'])}\\fR" + ("..." if row["list"] else "")
        words.append(word if row["required"] else f"[{word}]")
    rows = [(row["name"], "", row["help"]) for row in (*command["positionals"], *command["switches"])]
    rows += [(",".join(filter(None, (row["name"], row.get("also")))), row["value"], row["help"]) for row in command["flags"]]
    return (header("shardwright-" + command["name"], command["about"], table.version)
            + " ".join([f".SH SYNOPSIS\n\\fBshardwright {troff(command['name'])}\\fR [\\fIflags\\fR]", *words]) + "\n"
            + description(command["about"]) + ".SH OPTIONS\n" + "".join(entry(*row) for row in rows)
            + ".SH SEE ALSO\n\\fBshardwright\\fR(1)\n")


def program_page(table):
    about = table.run("--help").split("Usage: ")[0]
    return (header("shardwright", about, table.version)
            + ".SH SYNOPSIS\n\\fBshardwright\\fR \\fIcommand\\fR [\\fIflags\\fR] [\\fIarguments\\fR]\n" + description(about) + ".SH COMMANDS\n"
            + "".join(entry(command["name"], "", first_line(command["about"])) for command in table.commands) + ".SH SEE ALSO\n"
            + ",\n".join(f"\\fBshardwright\\-{troff(command['name'])}\\fR(1)" for command in table.commands) + "\n")


def page(table, name):
    found = next((command for command in table.commands if command["name"] == name), None)
    if name and not found:
        sys.exit(f'error: man: got "{name}", expected one of {", ".join(command["name"] for command in table.commands)}')
    return command_page(table, found) if found else program_page(table)


COMPLETIONS = {"bash": bash, "zsh": zsh, "fish": fish}


def write(table, pages, completions):
    for folder in (pages, completions):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for old in pathlib.Path(pages).glob("shardwright*.1"):  # of commands that are gone
        old.unlink()
    for shell, script in COMPLETIONS.items():
        (pathlib.Path(completions) / shell).write_text(script(table), encoding="utf-8")
    for name in ("", *(command["name"] for command in table.commands)):
        (pathlib.Path(pages) / ("-".join(filter(None, ("shardwright", name))) + ".1")).write_text(page(table, name), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(prog="python -m shardwright.shell", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*COMPLETIONS, "man", "write"))
    parser.add_argument("words", nargs="*", help="man: the command that the page is about; write: the folders")
    parser.add_argument("--program", default="shardwright", help="default: shardwright")
    arguments = parser.parse_args()
    table = Table(arguments.program)
    if arguments.what == "write":
        write(table, *arguments.words)
    elif arguments.what == "man":
        sys.stdout.write(page(table, " ".join(arguments.words)))
    else:
        sys.stdout.write(COMPLETIONS[arguments.what](table))


if __name__ == "__main__":
    main()
