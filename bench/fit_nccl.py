#!/usr/bin/env python3
"""Fits the network numbers of a profile to published collective sweeps.

    bench/fit_nccl.py bench/published/nccl_measured.csv --left-out
    bench/fit_nccl.py sweep.csv --extends h100-torch-eager --date 2026-11-21 -o mine.json

Only all-gathers and reduce-scatters of 64 KiB to 16 GiB are used; with --all-reduce, the all-reduces and all-to-alls of all sizes,
over the shipped numbers of gathers.
"""

from lab import base, nccl, nccl_fit


def numbers_json(numbers):
    return [{"name": nccl_fit.name_of(number), **{key: number[key] for key in ("fabric", "transport", "protocol", "field")},
             "unit": "s" if number["is_time"] else "", **{key: number[key] for key in ("value", "lower", "upper")}} for number in numbers]


def text_of(fit):
    def shown(number, key):
        return base.seconds_text(number[key]) if number["is_time"] else f"{number[key]:.3f}"
    numbers = [["number", "found", "lowest", "highest"],
               *([nccl_fit.name_of(n), shown(n, "value"), shown(n, "lower"), shown(n, "upper")] for n in fit["numbers"])]
    errors = [["fitted rows", "mean", "median", "p90", "worst", "bias"], base.error_cells(fit["errors"])]
    return (f"{len(fit['numbers'])} numbers, {fit['evaluations']} evaluations.\n\n" + base.table("lrrr", numbers) + "\n"
            + base.table("rrrrrr", errors) + nccl.left_out_text(fit["left_out"]))


def main():
    parser = base.parser(__doc__, "table of collective times (CSV)")
    parser.add_argument("-o", "--output", help="write a profile with the fitted numbers")
    parser.add_argument("--extends", default="generic", help="profile whose other numbers it has (default generic)")
    parser.add_argument("--date", help="when the sweep was measured or read, YYYY-MM-DD; required with --output")
    parser.add_argument("--all-reduce", action="store_true", help="fit what all-reduces and all-to-alls add to gathers")
    parser.add_argument("--left-out", action="store_true",
                        help="also fit with each fabric left out in turn, and predict it from its link rates")
    arguments = parser.parse_args()
    date = base.date_in(arguments.date) if arguments.date else None
    if arguments.output and not date:
        raise base.UsageError("--date is required with --output")
    program = base.Program(arguments.program)
    fit = (nccl_fit.fit_all_reduce(program, arguments.table) if arguments.all_reduce
           else nccl_fit.fit_network(program, arguments.table, arguments.left_out))
    if arguments.output:
        write = {"extends": arguments.extends, "source": f"bench/fit_nccl.py {arguments.table}", "date": date,
                 "numbers": nccl_fit.for_program(fit["numbers"])}
        base.write(arguments.output, program.ask("price", {"write": write})["written"])
        if arguments.output == "-":
            return
    answer = base.report("shardwright-network-fit", numbers=numbers_json(fit["numbers"]), errors=fit["errors"])
    if fit["left_out"]:
        answer["left_out"] = fit["left_out"]
    base.show(arguments.json, answer, lambda: text_of(fit))


base.start(main)
