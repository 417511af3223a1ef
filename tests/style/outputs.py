"""Checks that files are written and Python is started in the few places that know how (docs/security.md).

C++: core/staged_file.cc makes the files that users name; Python: tools/model_export/outside.py; interpreters get -I.
"""

import pathlib
import re
import sys

import source_tree

RULES = [  # what is looked for, in files of these endings, but for these files; why
    (re.compile(r"\bofstream\b|\bfopen\([^)]*\"[wa]|\bO_CREAT\b|\bmkstemp|\btmpfile\("), (".cc", ".h", ".cu"),
     {"core/staged_file.cc": "the one writer", "executor/checkpoint/output_file.cc": "in a folder of its own, O_EXCL",
      "executor/checkpoint/run_folder.cc": "a lock, whose content is checked"}, "writes past core/staged_file.h"),
    (re.compile(r"\bpopen\(|\bposix_spawnp?\(|\bsystem\(|\bexecv[pe]*\("), (".cc", ".h", ".cu"),
     {"cli/export_command.cc": "Python, with -I", "cli/probe.cc": "nvidia-smi", "cli/run_processes.cc": "itself"},
     "starts a program"),
    (re.compile(r"\bopen\([^)]*[\"'][wax]b?\+?[\"']|\.write_(text|bytes)\(|\bos\.(replace|rename)\(|\.rename\(|\.replace\([^,()]*\)"), (".py",),
     {"tools/model_export/outside.py": "the one writer", "python/write_commands.py": "runs when the package is built",
      "python/shardwright/shell.py": "writes pages and completions when packages are built", "web/assemble.py": "runs when the page is built"},
     "writes past tools/model_export/outside.py"),
    (re.compile(r"\bpickle\.loads?\(|\bUnpickler\b|\btorch\.load\(|\bFileSystemReader\b|\byaml\.load\(|\bmarshal\b|\bshelve\b"), (".py",), {},
     "may run what a file says"),
    (re.compile(r"sys\.path\.insert\([^)]*cwd|sys\.path\[:0\]"), (".py",), {}, "looks for modules in the current folder first"),
]
# Where a writer's block makes the file: the path is that of replacing().
IN_BLOCKS = re.compile(r"\bopen\(unfinished, |\bpath\.write_text\(text, ")
FOLDERS = (*source_tree.PRODUCT_FOLDERS, "tools")


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text", in the order of the files."""
    findings = []
    for folder in sorted(FOLDERS):
        for path in sorted((root / folder).rglob("*")) if (root / folder).is_dir() else ():
            name = path.relative_to(root).as_posix()
            rules = [rule for rule in RULES if path.suffix in rule[1] and name not in rule[2]]
            if not rules or not path.is_file():
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                code = line.split("//" if path.suffix != ".py" else "  #")[0]
                for use, _, _, why in rules:
                    found = use.search(code)
                    if found and not IN_BLOCKS.search(code):
                        findings.append(f"{name}:{number}: {found[0].rstrip('(')} {why}")
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "outputs: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
