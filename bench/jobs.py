#!/usr/bin/env python3
"""Turns rows of a table of published training runs into jobs: FOLDER/runs.json, which `shardwright validate`, `fit` and `calibrate` read,
with the files of models and plans that it names.

    bench/jobs.py bench/published/measured_runs.csv -o jobs/
    shardwright calibrate jobs/runs.json -o mine.json

Each run holds the flags that `shardwright plan` would take. Where a stack does what no flag says, a plan file takes their place.
Rows that cannot be told as jobs are listed on standard error.
"""

import json
import pathlib
import sys

from lab import base, jobs, runs


def main():
    parser = base.parser(__doc__, "table of measured runs (CSV)")
    parser.add_argument("-o", "--output", required=True, help="folder")
    parser.add_argument("--tier", default="A", help="rows to use, by their column tier (default A; rows without one count)")
    parser.add_argument("--profile", default="auto", help="profile for all rows (default auto: by GPU and kernel set)")
    parser.add_argument("--profiles", help="folder of profiles to choose from (default: the shipped ones)")
    arguments = parser.parse_args()
    program = base.Program(arguments.program)
    names = jobs.Names(program)
    tiers = arguments.tier.split(",")
    found = [jobs.job_of(run, names, arguments.profile) for run in runs.read_runs(arguments.table) if not run.tier or run.tier in tiers]
    for job in found:
        if job.skipped:
            print(f"{job.run.id}: {job.skipped}", file=sys.stderr)
    folder = pathlib.Path(arguments.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listed = jobs.listed(program, found, jobs.Files(folder), ["--profiles", arguments.profiles] if arguments.profiles else [],
                         arguments.profiles)
    base.write(folder / "runs.json", json.dumps(jobs.run_list(listed), indent=2) + "\n")


base.start(main)
