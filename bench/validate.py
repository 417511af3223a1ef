#!/usr/bin/env python3
"""Predicts published training runs and reports the errors.

    bench/validate.py bench/published/measured_runs.csv
    bench/validate.py bench/published/measured_runs.csv --oom bench/published/oom_runs.csv --json
    bench/validate.py runs.csv --tier A,B --profile my-profile.json

The columns of a table are described in bench/published/README.md, the keys of the report in bench/README.md.
"""

from lab import base, runs, validation


def main():
    parser = base.parser(__doc__, "table of measured runs (CSV)")
    parser.add_argument("--oom", help="table of runs that fit or ran out of memory")
    parser.add_argument("--profile", default="auto", help="profile for all rows (default auto: by GPU and kernel set)")
    parser.add_argument("--profiles", help="folder of profiles to choose from (default: the shipped ones)")
    parser.add_argument("--tier", default="A", help="rows to use, by their column tier (default A; rows without one count)")
    parser.add_argument("--bands", action="store_true", help="also the uncertainty of every step time, by the spreads of the profile")
    parser.add_argument("--unknown", action="store_true", help="no framework is known by name: each is priced by the nearest stack")
    arguments = parser.parse_args()
    program = base.Program(arguments.program)
    measured = runs.read_runs(arguments.table)
    outcomes = runs.read_runs(arguments.oom) if arguments.oom else None
    how = {"tiers": arguments.tier.split(","), "profile": arguments.profile, "profiles": arguments.profiles, "bands": arguments.bands,
           "unknown": arguments.unknown}
    if outcomes is not None:
        outcomes = validation.predict(program, validation.with_throughput(outcomes, measured), **{**how, "bands": False})
    rows = validation.predict(program, measured, **how)
    answer = validation.validation_report(rows, outcomes)
    base.show(arguments.json, answer, lambda: validation.validation_text(answer, rows, outcomes))


base.start(main)
