"""Scores the test rows of bench/protocol.json and adds the scoring to bench/scorings.csv; writes bench/test_rows.md from that log.

    python3 scripts/score.py PROGRAM            score, log with date and commit, write the page
    python3 scripts/score.py --check            the files are those of the protocol, and the page is that of the log

Every scoring is kept: whoever looks at the test rows while choosing between variants can be seen doing so.
"""

import argparse
import csv
import datetime
import hashlib
import json
import pathlib
import subprocess
import sys

from bench_command import bench_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOCOL = ROOT / "bench/protocol.json"
LOG = ROOT / "bench/scorings.csv"
PAGE = ROOT / "bench/test_rows.md"
COLUMNS = ("date", "commit", "source", "gpu", "rows", "mean", "median", "p90", "bias", "inside_band", "half_width")


def protocol():
    return json.loads(PROTOCOL.read_text(encoding="utf-8"))


def changed_files(rules, root=ROOT):
    """Files whose rows are not those that the protocol names."""
    return [name for name, digest in rules["sha256"].items() if hashlib.sha256((root / name).read_bytes()).hexdigest() != digest]


def overlaps(rules, root=ROOT):
    """Rows that two sets claim, as "set and set: id"; a row belongs to the set that has its source."""
    claimed, twice = {}, []
    for rows in rules["sets"]:
        with open(root / rows["file"], newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if row["id"].rsplit("-", 1)[0] in rows["sources"]:
                    before = claimed.setdefault(row["id"], rows["name"])
                    if before != rows["name"]:
                        twice.append(f"{before} and {rows['name']}: {row['id']}")
    return twice


def scoring(result, date, commit):
    """Lines of the log, from the JSON of `validate --bands`."""
    lines = []
    for group in result["groups"] + [result["pooled"]]:
        step = group["step_time"]
        lines.append({"date": date, "commit": commit, "source": group["source"] or "all", "gpu": group["gpu_class"] or "all",
                      "rows": step["rows"], **{key: f"{step[key]:.4f}" for key in ("mean", "median", "p90", "bias")},
                      "inside_band": f"{group['band_coverage']:.4f}", "half_width": f"{group['band_median']:.4f}"})
    return lines


def log_lines():
    with open(LOG, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def percent(text, sign=""):
    return f"{100 * float(text):{sign}.1f} %"


def page(rules, log):
    """The text of bench/test_rows.md."""
    sets = "\n".join(f"| {s['name']} | `{s['file']}` | {', '.join(s['sources'])} | {s['use']} |" for s in rules["sets"])
    rows = "\n".join(
        f"| {r['date']} | {r['commit']} | {r['source']} | {r['gpu']} | {r['rows']} | {percent(r['mean'])} | {percent(r['median'])} | "
        f"{percent(r['p90'])} | {percent(r['bias'], '+')} | {percent(r['inside_band'])} | {percent(r['half_width'])} |" for r in log)
    return f"""# Rows that are only scored

Written by `scripts/score.py`; nothing in it is edited by hand. `bench/protocol.json` says which rows are for what, with hashes.

| set | file | sources | use |
| --- | --- | --- | --- |
{sets}

## Scorings of the test rows

All of them, oldest first (bench/scorings.csv). Errors are predicted / measured - 1 of step times; mean, median and p90 are of
absolute errors. The band of each prediction should hold 90 % of them.

| date | commit | source | GPU | rows | mean | median | p90 | bias | inside the band | median half-width |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

- *dgxc* is MaxText and PaxML on XLA, up to 2,048 H100: a stack of which no run is known to the profiles. Their remat policies
  (MaxText's `save_qkv_proj`, PaxML's `SAVE_DOT_ONLY`) are taken as torchtitan's per-op rule, which is not what they do.
- *bigscience* is Megatron with DeepSpeed's ZeRO-1 on V100; its memory was read from nvidia-smi and is not scored here.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rules = protocol()
    if (changed := changed_files(rules)) or (changed := overlaps(rules)):
        sys.exit(f"bench/protocol.json: not what it says: {', '.join(changed)}")
    if arguments.check:
        if PAGE.read_text(encoding="utf-8") != page(rules, log_lines()):
            sys.exit("bench/test_rows.md is not that of bench/scorings.csv; run scripts/score.py")
        return
    test = next(s for s in rules["sets"] if s["name"] == "test")
    command = [*bench_command(arguments.program, "validate"), test["file"], "--tier", "A,B", "--bands", "--json"]
    result = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    is_new = not LOG.exists()
    with open(LOG, "a", newline="", encoding="utf-8") as log:
        writer = csv.DictWriter(log, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(scoring(result, datetime.date.today().isoformat(), commit))
    PAGE.write_text(page(rules, log_lines()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {result['pooled']['step_time']['rows']} rows, mean {percent(result['pooled']['step_time']['mean'])}")


if __name__ == "__main__":
    main()
