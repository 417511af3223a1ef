"""Mutants of schedule/, simulator/, planner/ and executor/, drawn at random, and how many of them the tests find.

    python3 tests/mutation/mutation.py [--seed 26] [--count 220] [--folder build-mutation] [--only 3,7] [--again]

Draws lines with equal chances and on each one of its sites (sites.py says which there are), copies the tree into the folder with all
mutants compiled in, drops those that do not compile, runs every test once to learn which case reaches which mutant, and then each
mutant against the cases that reach it, until one fails, ends by a signal or takes five times as long as usual. Own folder's tests come
first, the program's Python tests last. Results are kept in FOLDER/results.json; --again runs only those that survived before, and
what changed in tests/. Ends with 1 where fewer than --least percent were killed.
"""

import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import sites
import switched_tree

FOLDERS = ("schedule", "simulator", "planner", "executor")
# What needs a GPU or MPI.
WITHOUT = ("executor/cuda/", "executor/mpi/")
# doctest programs whose cases are run one by one, with the folder they belong to. sw_durations_test compares times, so another program
# beside it would fail it.
PROGRAMS = {
    "sw_schedule_test": "schedule", "sw_lower_random_test": "schedule", "sw_schedule_verify_test": "schedule",
    "sw_simulator_test": "simulator", "sw_simulate_test": "simulator", "sw_caching_allocator_steady_test": "simulator",
    "sw_planner_test": "planner", "sw_planner_search_test": "planner",
    "sw_host_kernels_test": "executor", "sw_training_test": "executor", "sw_runtime_test": "executor",
    "sw_runtime_random_test": "executor", "sw_adversary_test": "executor", "sw_memory_hook_test": "executor",
    "sw_analysis_test": "", "sw_compare_test": "", "sw_calibrate_test": "", "sw_sweep_test": "", "sw_report_test": "",
    "sw_cli_test": "",
}
# ctest's names of Python scripts that run the program; whole.
SCRIPTS = re.compile(r"cli_(emit|commands|what_if|bad_files|exit_codes|comfort|calibrate|strangers|kernels|measured_files|run_folder|"
                     r"processes|checkpoint|import_resolved|estimate|check)$|executor_torch_finetune$|analysis_pinned_predictions$")
TARGETS = ["shardwright", *PROGRAMS]
LIBRARIES = ["sw_schedule", "sw_simulator", "sw_host_kernels", "sw_executor", "sw_planner", "sw_importers"]
QUICK = 0.5  # seconds; quicker cases of a program run together, and before all slower ones
PATIENCE, GRACE = 5, 20  # times the usual time, and seconds of the processor; a wall clock may show four times that
MEMORY = 6 << 30  # bytes of one process
SETTINGS = ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DSHARDWRIGHT_CUDA=OFF", "-DSHARDWRIGHT_PYTHON=OFF", "-DSHARDWRIGHT_BENCH=OFF",
            # Reading past a vector's end is a failure. A reference to a temporary would be wrong without the mutant, too.
            "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_ASSERTIONS -Werror=return-local-addr -Werror=vla -Wno-narrowing"]

Mutant = collections.namedtuple("Mutant", "number file site")
# The folder whose tests it holds, the usual seconds, the command, and what to call it.
Stage = collections.namedtuple("Stage", "folder seconds command name is_slow")


def sources():
    names = subprocess.run(["git", "ls-files", *(f"{folder}/*.cc" for folder in FOLDERS)], cwd=switched_tree.REPOSITORY,
                           capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if not name.startswith(WITHOUT)]


def draw(seed, count):
    """Mutants in the order drawn; no two overlap."""
    rng = random.Random(seed)
    lines, sites_of = [], {}
    for name in sources():
        text = (switched_tree.REPOSITORY / name).read_text(encoding="utf-8")
        lines += [(name, line) for line in sites.code_lines(text)]
        for site in sites.find(text, f"{seed} {name}"):
            sites_of.setdefault((name, site.line), []).append(site)
    drawn, taken = [], collections.defaultdict(list)
    while len(drawn) < count:
        name, line = rng.choice(lines)
        choices = sites_of.get((name, line))
        site = rng.choice(choices) if choices else None
        if site and not any(site.start < other.end and other.start < site.end for other in taken[name]):
            taken[name].append(site)
            drawn.append(Mutant(len(drawn) + 1, name, site))
    return drawn


def instrument(folder, files, mutants):
    """Writes these sources with these mutants; returns for each file (first line, last line, number) of each."""
    placed = {}
    for name in files:
        text = (switched_tree.REPOSITORY / name).read_text(encoding="utf-8")
        mine = sorted((mutant for mutant in mutants if mutant.file == name), key=lambda mutant: mutant.site.start)
        # One line more, at the top.
        result, position, placed[name] = '#include "tests/mutation/switch.h"\n', 0, []
        for mutant in mine:
            result += text[position:mutant.site.start]
            first = result.count("\n") + 1
            result += mutant.site.text.replace("@", str(mutant.number))
            placed[name].append((first, result.count("\n") + 1, mutant.number))
            position = mutant.site.end
        switched_tree.write(folder / name, (result + text[position:]).encode())
    return placed


def not_compiled(output, placed):
    """Numbers of the mutants at which the compiler complains."""
    bad = set()
    for name, line in re.findall(r"^(?:In file included from )?(\S+?\.cc):(\d+)(?::\d+)?: (?:error|fatal error|note|  required)", output, re.M):
        name = next((own for own in placed if name.endswith("/" + own) or name == own), None)
        if name:
            bad |= {number for first, last, number in placed[name] if first <= int(line) <= last}
    return bad


def build(folder, targets, jobs):
    return subprocess.run(["ninja", "-C", "build", f"-j{jobs}", "-k0", *targets], cwd=folder, capture_output=True, text=True, check=False)


def prepare(folder, options):
    """Copies, plants and builds; returns the mutants that compile, `count` of them."""
    drawn = draw(options.seed, options.count * 3 // 2)
    chosen = list(drawn)
    switched_tree.copy_tree(folder, {mutant.file for mutant in drawn} | {"tests/doctest_main.cc"})
    main = (switched_tree.REPOSITORY / "tests" / "doctest_main.cc").read_bytes()
    listener = b"#include <doctest/doctest.h>\n#include \"tests/mutation/listener.h\""
    switched_tree.write(folder / "tests" / "doctest_main.cc", main.replace(b"#include <doctest/doctest.h>", listener))
    # Numbers mean the same only while draw and sources stay.
    digest = hashlib.sha256(repr(drawn).encode()).hexdigest()
    path = folder / "dropped.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    bad = set(kept["dropped"]) if kept.get("digest") == digest else set()
    if kept.get("digest") != digest:
        (folder / "results.json").unlink(missing_ok=True)
    while True:
        chosen = [mutant for mutant in drawn if mutant.number not in bad]
        placed = instrument(folder, {mutant.file for mutant in drawn}, chosen)
        if not (folder / "build" / "build.ninja").is_file():
            # PyTorch and other packages that scripts compare with.
            venv = switched_tree.REPOSITORY / "build" / "venv"
            if venv.is_dir():
                (folder / "build").mkdir()
                (folder / "build" / "venv").symlink_to(venv.resolve())
            switched_tree.configure(folder, *SETTINGS)
        result = build(folder, LIBRARIES, options.jobs)
        if result.returncode == 0:
            break
        (folder / "build.log").write_text(result.stdout + result.stderr)
        found = not_compiled(result.stdout, placed)
        print(f"do not compile: {sorted(found)}", flush=True)
        if not found - bad:
            sys.exit(f"does not compile, and no mutant is at fault: {folder}/build.log")
        bad |= found
        path.write_text(json.dumps({"digest": digest, "dropped": sorted(bad)}))
    result = build(folder, TARGETS, options.jobs)
    if result.returncode:
        (folder / "build.log").write_text(result.stdout + result.stderr)
        sys.exit(f"does not compile: {folder}/build.log")
    if len(chosen) < options.count:
        sys.exit(f"only {len(chosen)} mutants compile")
    return chosen[:options.count]


def run(command, folder, seconds, **environment):
    """The exit code, or how it ended otherwise."""
    scratch = tempfile.mkdtemp(prefix="mutant")
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process = subprocess.Popen(command, cwd=folder / "tests", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               preexec_fn=limit, start_new_session=True, env={**os.environ, "TMPDIR": scratch, **environment})
    try:
        output, _ = process.communicate(timeout=4 * seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return "time-out", ""
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def commands(folder):
    """Name, folder and command of each test."""
    listed = subprocess.run(["ctest", "--show-only=json-v1"], cwd=folder / "build", capture_output=True, text=True, check=True).stdout
    for test in json.loads(listed)["tests"]:
        if test["name"] in PROGRAMS:
            yield test["name"], PROGRAMS[test["name"]], test["command"]
        elif SCRIPTS.match(test["name"]):
            yield test["name"], "", test["command"]


def trace(folder, test):
    """[name, seconds, mutants reached] of each case of a program, or of a script as a whole; kept until something is built anew."""
    name, _, command = test
    path, kept = folder / "trace" / name, folder / "trace" / (name + ".json")
    parts = [folder / "build" / "shardwright", *(pathlib.Path(part) for part in command)]
    if kept.is_file() and kept.stat().st_mtime > max(part.stat().st_mtime for part in parts if part.is_file()):
        return json.loads(kept.read_text())
    for old in (path, path.with_name(name + ".bytes")):
        old.unlink(missing_ok=True)
    start = time.monotonic()
    code, output = run(command, folder, 1800, SW_MUTANT_TRACE=str(path), SW_MUTANT="0")
    seconds = time.monotonic() - start
    if code not in (0, 77):
        (folder / "trace" / (name + ".log")).write_text(output)
        print(f"left out, since it fails without a mutant ({code}): {name}", flush=True)
        return []
    if name in PROGRAMS:
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [[case, float(spent), [int(number) for number in reached.split()]] for case, spent, reached in rows]
    else:
        reached = path.with_name(name + ".bytes")
        rows = [["", seconds, [i for i, byte in enumerate(reached.read_bytes()) if byte] if reached.is_file() else []]]
    kept.write_text(json.dumps(rows))
    return rows


def stages(tests, traced, mutant):
    """What is run, in this order: the own folder's tests before others, after all quick ones the slow ones."""
    result = []
    for name, folder, command in tests:
        cases = [case for case in traced[name] if mutant.number in case[2]]
        for part in ([case for case in cases if case[1] <= QUICK], *([case] for case in cases if case[1] > QUICK)):
            if part:
                chosen = ",".join(case.replace("\\", "\\\\").replace(",", "\\,") for case, _, _ in part)
                only = [f"--test-case={chosen}", "--abort-after=1"] if name in PROGRAMS else []
                result.append(Stage(folder, sum(case[1] for case in part), command + only, name, part[0][1] > QUICK))
    own = mutant.file.split("/")[0]
    return sorted(result, key=lambda stage: (stage.is_slow, stage.name not in PROGRAMS, stage.folder != own, stage.seconds))


def judge(folder, tests, traced, mutant, within):
    """What found it; empty: nothing, None: no test reaches it. What takes longer than `within` is left out."""
    planned = stages(tests, traced, mutant)
    for stage in planned:
        if stage.is_slow and stage.seconds > within:
            continue
        code, output = run(stage.command, folder, PATIENCE * stage.seconds + GRACE, SW_MUTANT=str(mutant.number))
        if code not in (0, 77):
            case = re.search(r"TEST CASE: *(.*)", output) or re.search(r"^(?:FAIL|ERROR): *(\S+)", output, re.M)
            return f"{stage.name}: {case.group(1).strip() if case else f'ends with {code}'}"
    return "" if planned else None


def report(mutants, results):
    killed = [mutant for mutant in mutants if results.get(str(mutant.number))]
    for mutant in mutants:
        if not results.get(str(mutant.number)):
            what = re.sub(r"\s+", " ", mutant.site.what)
            reached = "" if results.get(str(mutant.number)) == "" else " (reached by no test)"
            print(f"| {mutant.number} | {mutant.file}:{mutant.site.line} | {what}{reached} |")
    print(f"killed {len(killed)} of {len(mutants)}: {100 * len(killed) / len(mutants):.1f} %")
    for folder in FOLDERS:
        mine = [mutant for mutant in mutants if mutant.file.startswith(folder + "/")]
        print(f"  {folder}: {sum(mutant in killed for mutant in mine)} of {len(mine)}")
    return 100 * len(killed) / len(mutants)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=26)
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--folder", type=pathlib.Path, default=switched_tree.REPOSITORY / "build-mutation")
    parser.add_argument("--only", help="numbers of mutants")
    parser.add_argument("--again", action="store_true", help="only those that survived before")
    parser.add_argument("--within", type=float, default=1e9, help="seconds; slower test cases are left out")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.0, help="percent that must be killed")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    mutants = prepare(folder, options)
    print(f"{len(mutants)} mutants are compiled in", flush=True)
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() and (options.only or options.again) else {}
    if options.only:
        chosen = [mutant for mutant in mutants if mutant.number in {int(number) for number in options.only.split(",")}]
    else:
        chosen = [mutant for mutant in mutants if not results.get(str(mutant.number))]
    tests = list(commands(folder))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        traced = dict(zip([test[0] for test in tests], pool.map(lambda test: trace(folder, test), tests)))
        print(f"traced {sum(len(cases) for cases in traced.values())} cases", flush=True)
        pending = {pool.submit(judge, folder, tests, traced, mutant, options.within): mutant for mutant in chosen}
        for done in concurrent.futures.as_completed(pending):
            mutant = pending[done]
            results[str(mutant.number)] = done.result()
            print(f"{mutant.number}\t{mutant.file}:{mutant.site.line}\t{done.result() or 'SURVIVES'}", flush=True)
            path.write_text(json.dumps(results))
    return 0 if report(mutants, results) >= options.least else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
