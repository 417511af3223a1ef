#!/usr/bin/env python3
"""What planning gains over what the usual frameworks do: each zoo model on five clusters.

    scripts/planning_gains.py [--program build/shardwright] [--models GLOB] [--dialects native,fsdp2]

Runs `shardwright plan --json` once for each model, cluster and dialect, keeps the results in build/planning_gains.jsonl
(delete it to start anew), and writes the table between the marks in docs/planning.md. Exits with 1 if a plan is slower
than a baseline of the comparison: for native all of them, for another dialect those of frameworks that speak it.
"""

import argparse
import fnmatch
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = (("dgx-a100", 1), ("dgx-h100", 32), ("p4d", 8), ("pcie-8x4090", 1), ("a100-80 x8, nic 100 Gbit/s", 4))
GPUS_PER_NODE = 8  # of all of them
SAMPLES_PER_GPU = 2
BASELINES_OF = {"fsdp2": ("torchtitan", "accelerate"), "fsdp1": ("fsdp1-size", "fsdp1-transformer"),
                "ddp": ("ddp",), "zero3": ("zero3",)}
BEGIN, END = "<!-- gains: begin -->\n", "<!-- gains: end -->\n"


def run(program, model, cluster, nodes, dialect):
    """The numbers of one search; None for a job that cannot be made."""
    command = [program, "plan", "--search", "--json", "-o", "/dev/null", "--threads", "1", "--model", model, "--cluster",
               cluster, "--nodes", str(nodes), "--global-batch", str(SAMPLES_PER_GPU * GPUS_PER_NODE * nodes),
               "--dialect", dialect]
    if dialect == "fsdp1":
        command += ["--use-orig-params", "off"]  # as the baselines have it
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        return {"error": done.stderr.strip()}
    report = json.loads(done.stdout)
    names = BASELINES_OF.get(dialect)
    times = {row["name"]: row["step_time_s"] for row in report["baselines"]
             if row["fits"] and (names is None or row["name"] in names)}
    return {"step_time_s": report.get("step_time_s"), "gap": report.get("proven_gap"), "search_s": report["search_s"],
            "baselines": times}


def read_cache(path):
    cache = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            cache[tuple(row["key"])] = row["result"]
    return cache


def cell(result):
    """The gain over the fastest baseline that fits, in percent."""
    if result is None:
        return ""  # not run
    if "error" in result or (result["step_time_s"] is None and not result["baselines"]):
        return "-"
    if result["step_time_s"] is None:
        return "LOST"
    if not result["baselines"]:
        return "only"
    return f"{100 * (min(result['baselines'].values()) / result['step_time_s'] - 1):.1f}"


def table(models, dialects, cache):
    lines = ["| model | " + " | ".join(f"{nodes} x {name}" for name, nodes in CLUSTERS) + " |",
             "| --- |" + " ---: |" * len(CLUSTERS)]
    for model in models:
        if not any((model, name, nodes, d) in cache for name, nodes in CLUSTERS for d in dialects):
            continue
        cells = [" / ".join(cell(cache.get((model, name, nodes, d))) for d in dialects) for name, nodes in CLUSTERS]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n\n"
    for d in dialects:
        for name, nodes in CLUSTERS:
            rows = [cache[key] for key in cache if key[1:] == (name, nodes, d) and key[0] in models]
            gains = sorted(float(cell(r)) for r in rows if cell(r) not in ("-", "LOST", "only"))
            only = sum(cell(r) == "only" for r in rows)
            if gains:
                text += (f"- {d}, {nodes} x {name}: {len(gains)} models, gain {gains[0]:.1f} to {gains[-1]:.1f} %, "
                         f"median {statistics.median(gains):.1f} %; {only} more fit only when planned.\n")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build" / "shardwright"))
    parser.add_argument("--models", default="*")
    parser.add_argument("--dialects", default="native,fsdp2")
    parser.add_argument("--table-only", action="store_true", help="of what was run before")
    arguments = parser.parse_args()
    dialects = arguments.dialects.split(",")
    models = sorted(p.stem for p in (ROOT / "models" / "zoo").glob("*.json") if fnmatch.fnmatch(p.stem, arguments.models))
    path = ROOT / "build" / "planning_gains.jsonl"
    cache = read_cache(path)
    jobs = [(m, name, nodes, d) for d in dialects for m in models for name, nodes in CLUSTERS]
    with path.open("a", encoding="utf-8") as file:
        for key in jobs:
            if key not in cache and not arguments.table_only:
                cache[key] = run(arguments.program, *key)
                file.write(json.dumps({"key": key, "result": cache[key]}) + "\n")
                file.flush()
    page = ROOT / "docs" / "planning.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + table(models, dialects, cache) + END + rest.split(END)[1], encoding="utf-8")
    slower = [(key, cache[key]) for key in jobs if key in cache
              if cell(cache[key]) == "LOST" or cell(cache[key])[:1] == "-" and cell(cache[key]) != "-"]
    for key, result in slower:
        print("slower than a baseline:", *key, json.dumps(result), file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
