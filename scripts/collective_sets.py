#!/usr/bin/env python3
"""Which rows of bench/published/nccl_measured.csv numbers are fitted to, which variants are chosen by, and which are only scored.

    scripts/collective_sets.py SET [OUTPUT]    the rows of SET (fit, validation or test) as a table of the same form
    scripts/collective_sets.py --count         rows per fabric, collective, set and report
    scripts/collective_sets.py --check         the table and the split are those of bench/protocol_collectives.json
    scripts/collective_sets.py --pin           writes their hashes there

The rule looks at where a row comes from and at its size, never at its time. A report is what one source (repository or page) says
of one system. A cell is a fabric (GPU generation inside a node, network between nodes; EFA by its generation) and a collective.
Reports of fewer than ten rows of a cell are too few to fit to: test. The others of a cell, in the order of the SHA-256 of
"source|system": one is for fit, of two the second is for test, of three or more the second is for validation and the third for
test, the rest for fit. A cell with a single report is split by size: of four successive sizes the first and the third are for
fit, the second for validation, the fourth for test.
"""

import collections
import csv
import hashlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench/published/nccl_measured.csv"
PROTOCOL = ROOT / "bench/protocol_collectives.json"
SETS = ("fit", "validation", "test")
FEWEST_ROWS = 10
GENERATIONS = (("GB200", "blackwell"), ("B200", "blackwell"), ("B300", "blackwell"), ("H100", "hopper"), ("H200", "hopper"),
               ("A100", "ampere"), ("V100", "volta"), ("MI300X", "cdna3"), ("MI355X", "cdna4"))
NETWORKS = ("TCPXO", "TCPX", "EFAv2", "EFAv3", "EFAv4", "EFA", "RoCE", "IB", "InfiniBand", "loopback")


def source_of(row):
    """Repository or page, as SweepRow.short_source of bench/lab/nccl.py."""
    text = row["source"]
    if text.startswith("github.com/"):
        return "/".join(text.removeprefix("github.com/").split("/")[:2])
    return text.split(" section")[0]


def fabric_of(row):
    if row["nodes"] == "1" or "one NVLink domain" in row["network"]:
        return next((name for part, name in GENERATIONS if part in row["gpu"]), "other") + " node"
    name = next((network for network in NETWORKS if network in row["network"]), "other")
    return "ib" if name == "InfiniBand" else name.lower()


def sets_of(rows):
    """The set of every row, in their order."""
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for i, row in enumerate(rows):
        cells[fabric_of(row), row["op"]][f"{source_of(row)}|{row['system']}"].append(i)
    chosen = [""] * len(rows)
    for reports in cells.values():
        large = sorted((r for r in reports if len(reports[r]) >= FEWEST_ROWS), key=lambda r: hashlib.sha256(r.encode()).hexdigest())
        for report, lines in reports.items():
            if report not in large:
                names = ["test"] * len(lines)
            elif len(large) == 1:
                sizes = sorted({int(rows[i]["bytes"] or 0) for i in lines})
                names = [("fit", "validation", "fit", "test")[sizes.index(int(rows[i]["bytes"] or 0)) % 4] for i in lines]
            else:
                order = ("fit", "test") if len(large) == 2 else ("fit", "validation", "test")
                place = large.index(report)
                names = [order[place] if place < len(order) else "fit"] * len(lines)
            for i, name in zip(lines, names):
                chosen[i] = name
    return chosen


def read_table():
    with open(TABLE, newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        return reader.fieldnames, list(reader)


def hashes(chosen):
    return {"table": hashlib.sha256(TABLE.read_bytes()).hexdigest(), "sets": hashlib.sha256("\n".join(chosen).encode()).hexdigest()}


def main(arguments):
    columns, rows = read_table()
    chosen = sets_of(rows)
    if arguments == ["--pin"]:
        about = ("Sets of bench/published/nccl_measured.csv; scripts/collective_sets.py has the rule and checks the hashes: of the table, "
                 "and of the name of each row's set, one a line.")
        PROTOCOL.write_text(json.dumps({"about": about, "fixed": "2026-11-28", "sha256": hashes(chosen)}, indent=2) + "\n",
                            encoding="utf-8")
    elif arguments == ["--check"]:
        if json.loads(PROTOCOL.read_text(encoding="utf-8"))["sha256"] != hashes(chosen):
            sys.exit("bench/protocol_collectives.json: the table or its split is another; scripts/collective_sets.py --pin")
    elif arguments == ["--count"]:
        keys = [(fabric_of(r), r["op"], s, f"{source_of(r)}|{r['system']}") for r, s in zip(rows, chosen)]
        for key, count in sorted(collections.Counter(keys).items()):
            print(count, *key, sep="\t")
    elif arguments and arguments[0] in SETS:
        with open(arguments[1], "w", newline="", encoding="utf-8") if len(arguments) > 1 else sys.stdout as output:
            writer = csv.DictWriter(output, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row, name in zip(rows, chosen) if name == arguments[0])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
