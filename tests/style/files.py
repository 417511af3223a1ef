"""Checks that foreign files are opened through core/files.h, that no call of std::filesystem can throw, and that no regular expression
and no unchecked access meets foreign text."""

import pathlib
import re
import sys

import source_tree

# A name of a stranger may be a pipe that nobody writes to: opening it elsewhere waits for ever.
OPENS = re.compile(r"\bstd::(basic_)?i?fstream\b|<fstream>|\b(f|fd|fre)open\(|(?<!\w)::open(at)?\(|\bO_RD(ONLY|WR)\b|\bsqlite3_open\w*\(")
MAY_OPEN = {
    "core/files.cc": "the door",
    "core/budget.cc": "the kernel's own files",
    "core/cores.cc": "the kernel's own files",
    "core/staged_file.cc": "outputs",
    "cli/device_calibration.cc": "the kernel's own files",
    "cli/export_command.cc": "/dev/null for a child",
    "cli/probe.cc": "the kernel's own files",
    "executor/checkpoint/output_file.cc": "outputs",
    "executor/checkpoint/run_folder.cc": "a lock, which is written",
    "executor/cuda/product_choices.cc": "an output",
    "traces/nsight.cc": "SQLite, behind DetectMeasured, which opens it through the door",
}
# std::regex recurses once for each character.
REGEX = re.compile(r"<regex>|\bstd::w?(regex|smatch|cmatch)\b")
# These throw unless they are given a std::error_code as their last argument; iterators throw when they are advanced.
CALLS = ("absolute|canonical|copy|copy_file|create_(directory|directories|symlink|hard_link)|current_path|equivalent|exists|file_size|"
         "hard_link_count|is_(directory|empty|regular_file|symlink|fifo|socket|other|block_file|character_file)|last_write_time|permissions|"
         "proximate|read_symlink|relative|remove|remove_all|rename|resize_file|space|status|symlink_status|temp_directory_path|"
         "weakly_canonical")
FILESYSTEM = re.compile(rf"\b(?:std::filesystem|fs)::({CALLS})\(")
ITERATOR = re.compile(r"\b(recursive_)?directory_(iterator|entry)\b")
ERROR_CODES = ("error", "ignored", "problem")  # what they are called
# In files that know nlohmann's documents: at() throws what no guard knows. Containers of ours may have it.
AT = re.compile(r"(\w+)(?:\(\w*\))?\.at\(")
OF_OURS = {
    "schedule/plan_file.cc": "the one place: JsonValue has found both keys",
    "models/internal/template.cc": "templates, which are built in",
    "analysis/fit_gate.cc": "our own report of two plans",
}
OUR_CONTAINERS = ("lists", "text", "tried", "modules", "unit_of", "by_name", "tensors", "own", "tensors_", "programs_")


def arguments_of(text: str, begin: int) -> list[str]:
    """Of the call whose bracket opens before `begin`."""
    depth, parts, last = 0, [], begin
    for at in range(begin, len(text)):
        if text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            if depth == 0:
                return [part.strip() for part in (*parts, text[last:at])]
            depth -= 1
        elif text[at] == "," and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    return []


def without_texts(text: str) -> str:
    """Comments and what stands in quotes, blanked."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    return re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text)


def findings_of(name: str, text: str) -> list[tuple[int, str]]:
    """(place, what is wrong)."""
    code = without_texts(text)
    found = []
    if name not in MAY_OPEN:
        found += [(m.start(), f"{m[0]} opens a file past InputFile of core/files.h") for m in OPENS.finditer(code)]
    found += [(m.start(), f"{m[0]} recurses on foreign text") for m in REGEX.finditer(code)]
    if name != "core/files.cc":
        found += [(m.start(), f"{m[0]} throws when it is advanced; EntriesOf of core/files.h does not") for m in ITERATOR.finditer(code)]
    for m in FILESYSTEM.finditer(code):
        if arguments_of(code, m.end())[-1:] not in [[word] for word in ERROR_CODES]:
            found.append((m.start(), f"{m[1]} throws without a std::error_code ({', '.join(ERROR_CODES)}) as its last argument"))
    if "#include <nlohmann/" in text and name not in OF_OURS:
        found += [(m.start(), f"{m[1]}.at( throws what is no InputError; JsonValue of core/json.h does") for m in AT.finditer(code)
                  if m[1] not in OUR_CONTAINERS and not re.match("k[A-Z]", m[1])]
    return sorted(found)


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files."""
    lines = []
    for path in source_tree.cpp_files(root):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] in source_tree.PRODUCT_FOLDERS:
            text = path.read_text(encoding="utf-8")
            lines += [f"{name}:{1 + text.count(chr(10), 0, at)}: {what}" for at, what in findings_of(name, text)]
    return lines


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "files: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
