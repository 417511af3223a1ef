#!/usr/bin/env python3
"""Fits the numbers of profiles to published training runs, as `shardwright fit` does to a list of runs.

    bench/fit.py bench/published/measured_runs.csv --source llmfoundry
    bench/fit.py runs.csv --date 2026-11-21 -o profiles/

All other flags are those of `shardwright fit`: --numbers, --own, --one-per-gpu, --leave-out, --profiles, --date and --output.
"""

import subprocess
import sys

from lab import base, jobs, runs


def wanted(measured, sources, gpu_classes):
    return [run for run in measured if (not sources or run.source() in sources)
            and (not gpu_classes or any(part in run.gpu_class for part in gpu_classes))]


def list_of(program, measured, tiers):
    """The list of runs for the program."""
    names, files = jobs.Names(program), jobs.Files()
    found = []
    for run in measured:
        if (not run.tier or run.tier in tiers) and run.step_time_s > 0:
            job = jobs.job_of(run, names)
            job.has_tensor_lists = job.has_one_communicator = False  # fits start from profiles of their own
            found.append(job)
    listed = jobs.listed(program, found, files)
    return files, jobs.run_list(listed, skipped=len(measured) - len(listed))


def main():
    parser = base.parser(__doc__, "table of measured runs (CSV)")
    parser.add_argument("--source", help="fit rows of these sources only (ids up to the first '-')")
    parser.add_argument("--gpu-class", help="of these GPUs only: parts of the column gpu_class, such as A100,H100")
    parser.add_argument("--tier", default="A", help="rows to use, by their column tier (default A; rows without one count)")
    arguments, flags = parser.parse_known_args()
    program = base.Program(arguments.program)
    measured = wanted(runs.read_runs(arguments.table), arguments.source and arguments.source.split(","),
                      arguments.gpu_class and arguments.gpu_class.split(","))
    files, question = list_of(program, measured, arguments.tier.split(","))
    words = [(name, value) for name, value in (("--source", arguments.source), ("--gpu-class", arguments.gpu_class)) if value]
    path = files.path({**question, "name": arguments.table + "".join(f" {name} {value}" for name, value in words)})
    done = subprocess.run([program.path, "fit", path, *flags, *(["--json"] if arguments.json else [])], check=False)
    sys.exit(done.returncode)


base.start(main)
