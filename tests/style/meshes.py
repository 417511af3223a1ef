"""Checks that topologies/mesh.h alone divides ranks and multiplies sizes of a mesh: C++ files outside tests ask a Mesh.

A new axis (tensor, context, pipeline) then changes that one file. Dividing elements or bytes among shards is no division of ranks.
"""

import pathlib
import re
import sys

import source_tree

OWNER = "topologies/mesh.h"
# Files that divide a number of ranks for another reason, with it and with how often they do.
EXCEPTIONS = {
    "cli/device_calibration.cc": (1, "GPUs per node of the machine at hand"),
    "schedule/lower/emitter.cc": (3, "torch's factors of a mean, powers of two"),
    "simulator/costs/nccl_choice.cc": (1, "NCCL's members of a communicator per node"),
    "topologies/groups.cc": (3, "counts the groups in a node's window of ranks, without a rank at hand"),
}
SIZE = r"\b(?:\w+_)?(?:shard|replicate)(?:_size)?\b"
OBJECT = r"[*(]*(?:\w+(?:\.|->))*"
RULES = {
    "multiplies sizes of a mesh": rf"{SIZE}\)?\s*\*\s*{OBJECT}{SIZE}(?!\()",
    "divides a size of a mesh": r"\b\w*(?:shard|replicate)_size\s*[/%](?!\s*\d)",
    "divides a rank or a number of ranks": r"(?<![/%] )\b(?:rank_?|ranks_?|(?!per_)\w+_ranks?|rank_count|world|world_size|RankCount)\b(?:\.value)?(?:\(\))?\)*\s*[/%](?!\s*\d)",
    "takes a remainder by a size of a mesh": rf"%\s*{OBJECT}{SIZE}",
    "divides by the stride of a group": r"[/%]\s*(?:\w*group\w*|shape|planned)(?:\.|->)stride\b",
    "multiplies size and stride of a group": r"\bsize\s*\*\s*(?:\w+(?:\.|->))*stride\b|\bstride\s*\*\s*(?:\w+(?:\.|->))*size\b",
    "makes a group by hand": r'"(?:shard|replicate|world)[\w.]*",\s*(?:\w+(?:\.|->))*(?:shard_size|replicate_size|ranks)\s*,',
}
PATTERN = re.compile("|".join(f"(?P<r{i}>{rule})" for i, rule in enumerate(RULES.values())))
COMMENT = re.compile(r"//[^\n]*")


def hits_in(text: str) -> list[tuple[int, str]]:
    """(line, what it does) of each place that a Mesh should do."""
    names, text = list(RULES), COMMENT.sub("", text)
    return [(text.count("\n", 0, m.start()) + 1, names[int((m.lastgroup or "r0")[1:])]) for m in PATTERN.finditer(text)]


def check(root: pathlib.Path) -> list[str]:
    """All findings as "file:line: text"."""
    findings = []
    for path in source_tree.cpp_files(root):
        name = path.relative_to(root).as_posix()
        if name.startswith("tests/") or name == OWNER:
            continue
        hits = hits_in(path.read_text(encoding="utf-8"))
        if len(hits) > EXCEPTIONS.get(name, (0, ""))[0]:
            findings += [f"{name}:{line}: {what}, which {OWNER} does for all" for line, what in hits]
    return findings


def main() -> int:
    findings = check(pathlib.Path(sys.argv[1]))
    print("\n".join(findings) if findings else "meshes: ok")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
