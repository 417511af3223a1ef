#!/usr/bin/env python3
"""Predicts published collective sweeps (nccl-tests) and reports the errors.

    bench/validate_nccl.py bench/published/nccl_measured.csv
    bench/validate_nccl.py bench/published/nccl_measured.csv --left-out
    bench/validate_nccl.py bench/published/nccl_measured.csv --scale bench/published/nccl_simai_ratio.csv
    bench/validate_nccl.py sweep.csv --profile my-profile.json --json

The columns of a table are described in bench/published/README.md, the keys of the report in bench/README.md.
"""

from lab import base, nccl, nccl_fit


def main():
    parser = base.parser(__doc__, "table of collective times (CSV)")
    parser.add_argument("--profile", default="", help="profile for all rows (default: by GPU)")
    parser.add_argument("--scale", help="table of efficiencies over many nodes, compared as well")
    parser.add_argument("--left-out", action="store_true",
                        help="also fit with each fabric left out in turn, and predict it from its link rates")
    arguments = parser.parse_args()
    program = base.Program(arguments.program)
    rows = nccl.read_sweep(arguments.table)
    nccl.Sweep(program, rows, arguments.profile)
    answer = base.report("shardwright-collective-validation", **nccl.sweep_report(rows))
    if arguments.left_out and (left_out := nccl_fit.fit_network(program, arguments.table, True)["left_out"]):
        answer["left_out"] = left_out
    if arguments.scale:
        answer["scale"] = nccl.scale_report(program, arguments.scale)
    answer["rows"] = nccl.rows_json(rows)
    base.show(arguments.json, answer, lambda: nccl.sweep_text(answer, len(rows)))


base.start(main)
