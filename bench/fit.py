#!/usr/bin/env python3
"""Fits the numbers of profiles to measured training runs.

    bench/fit.py bench/published/measured_runs.csv --source llmfoundry
    bench/fit.py runs.csv --date 2026-11-21 -o profiles/

Runs on one chip (A100 of 40 and of 80 GB) by one framework share all numbers but two. Every model is also left out in turn and predicted
by numbers that never saw it (in a group with one model: every number of GPUs).
"""

from lab import base, fit, jobs, runs


def wanted(measured, sources, gpu_classes):
    return [run for run in measured if (not sources or run.source() in sources)
            and (not gpu_classes or any(part in run.gpu_class for part in gpu_classes))]


def list_of(program, measured, tiers):
    """The runs for the program, and how many rows are left out."""
    names, files = jobs.Names(program), jobs.Files()
    found = []
    for run in measured:
        if (not run.tier or run.tier in tiers) and run.step_time_s > 0:
            job = jobs.job_of(run, names)
            job.has_tensor_lists = False  # fits start from profiles of their own
            found.append(job)
    listed = jobs.listed(program, found, files)
    return files, listed, len(measured) - len(listed)


def names_in(flag, text, most):
    found = [name for name in (text or "").split(",") if name]
    if len(found) > most:
        raise base.UsageError(f"{flag}: got {len(found)}, expected at most {most}")
    return found


def parsed():
    parser = base.parser(__doc__, "table of measured runs (CSV)")
    parser.add_argument("--source", help="fit rows of these sources only (ids up to the first '-')")
    parser.add_argument("--gpu-class", help="of these GPUs only: parts of the column gpu_class, such as A100,H100")
    parser.add_argument("--tier", default="A", help="rows to use, by their column tier (default A; rows without one count)")
    parser.add_argument("--output", "-o", help="write the profile of the fitted stack; a folder (with a / at its end) for several")
    parser.add_argument("--date", help="when the runs were measured or read, YYYY-MM-DD; required with --output")
    parser.add_argument("--leave-out", choices=("model", "size", "source", "none"), default="model",
                        help="what is left out in turn: models (default); models of a source that has others; sources")
    parser.add_argument("--profiles", help="folder of profiles to choose from (default: the shipped ones)")
    parser.add_argument("--numbers", help="numbers to fit, at most 8, such as compute.gemm.bf16,host.step")
    parser.add_argument("--own", help="those of them that each stack has for itself, at most 2")
    parser.add_argument("--one-per-gpu", action="store_true",
                        help="one profile per GPU type for all kernel sets of a framework, which then differ by their kernels alone")
    arguments = parser.parse_args()
    arguments.numbers = names_in("--numbers", arguments.numbers, 8) or list(fit.DEFAULT_NUMBERS)
    own = names_in("--own", arguments.own, 2)
    for number in own:
        if number not in arguments.numbers:
            raise base.UsageError(f'--own: got "{number}", expected a number that is fitted')
    arguments.own = own or [arguments.numbers[0], "compute.elementwise"]
    if arguments.output and not arguments.date:
        raise base.UsageError("--date is required with --output")
    if arguments.date:
        base.date_in(arguments.date)
    return arguments


def write(arguments, found):
    words = [(name, value) for name, value in (("--source", arguments.source), ("--gpu-class", arguments.gpu_class)) if value]
    source = "shardwright fit " + arguments.table + "".join(f" {name} {value}" for name, value in words)
    if not arguments.output.endswith("/") and len(found["stacks"]) > 1:
        raise base.UsageError("--output: several stacks were fitted; give a folder, with a / at its end")
    for stack in found["stacks"]:
        file = f"{arguments.output}{stack['gpu']}-{stack['kernel_set']}.json" if arguments.output.endswith("/") else arguments.output
        base.write(file, fit.profile_of(stack, source, arguments.date))


def main():
    arguments = parsed()
    program = base.Program(arguments.program)
    measured = wanted(runs.read_runs(arguments.table), arguments.source and arguments.source.split(","),
                      arguments.gpu_class and arguments.gpu_class.split(","))
    files, listed, skipped = list_of(program, measured, arguments.tier.split(","))
    path = files.path(jobs.run_list(listed, repeat=True))
    with fit.Simulations(program.path, path, ["--profiles", arguments.profiles] if arguments.profiles else []) as simulations:
        found = fit.fit_runs(simulations, listed, arguments.numbers, arguments.own, arguments.one_per_gpu, arguments.leave_out, skipped)
    if arguments.output:
        write(arguments, found)
    if arguments.output != "-":
        base.show(arguments.json, fit.report_of(found), lambda: fit.text_of(found))


base.start(main)
