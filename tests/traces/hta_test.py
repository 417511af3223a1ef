"""Holistic Trace Analysis itself opens our traces and sees what `simulate` reports.

Expected values: HTA's own temporal breakdown and overlap against `time.kernels` of `simulate --json` for the same plan, which
counts the same things on picoseconds; the trace has whole microseconds.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    from hta.trace_analysis import TraceAnalysis
except ImportError:
    print("HolisticTraceAnalysis is not installed: skipped")
    sys.exit(77)

PROGRAM = sys.argv[1]
# All ends are rounded to microseconds, so that the hundreds of shorter gaps between small kernels close or open; zero3, whose persistent
# parameters come back one by one, has the most of them.
TOLERANCE_US = 30
TOLERANCE_SHARE = 0.0012  # of thousands of small kernels: the profile has whole microseconds
TOLERANCE_PERCENT = 0.03  # of that; HTA rounds to 0.01
TOLERANCE_MANY = 0.2  # the same where kernels are thousands and short

PLANS = [
    ("fsdp2", ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "8192", "--recompute", "full"]),
    ("fsdp2 hsdp", ["--model", "qwen3-0.6b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "4096", "--shard", "8"]),
    ("fsdp1", ["--model", "llama-2-7b", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "2048", "--dialect", "fsdp1"]),
    ("ddp", ["--model", "gpt2", "--cluster", "dgx-a100", "--seq", "1024", "--dialect", "ddp"]),
    ("zero3", ["--model", "gpt2-xl", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "1024", "--dialect", "zero3"]),
    ("fsdp1, accumulation", ["--model", "gpt2-xl", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "1024", "--dialect", "fsdp1",
                             "--accumulation", "2"]),
    # Copies to and from the host, and idle time.
    ("native, offload", ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "4096", "--dialect",
                         "native", "--offload", "optimizer"]),
]


def run(*arguments):
    result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout


def check(name, flags):
    with tempfile.TemporaryDirectory() as folder:
        plan = str(pathlib.Path(folder) / "plan.json")
        traces = pathlib.Path(folder) / "traces"
        traces.mkdir()
        run("plan", *flags, "-o", plan)
        report = json.loads(run("simulate", plan, "--json", "--trace", str(traces / "rank_0.json"), "--trace-profile",
                                "hta"))
        kernels = report["time"]["kernels"]
        analysis = TraceAnalysis(trace_dir=str(traces))
        breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        for part in ("kernel_time", "compute_time", "non_compute_time", "idle_time"):
            expected, found = kernels[part + "_s"] * 1e6, breakdown[part + "(us)"]
            print(f"{name}: {part} {found:.0f} us by HTA, {expected:.0f} us by simulate")
            assert abs(found - expected) < max(TOLERANCE_US, TOLERANCE_SHARE * 1e6 * kernels["kernel_time_s"]), (name, part)
        expected = 100 * kernels["comp_comm_overlap"]
        found = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
        print(f"{name}: overlap {found:.2f} % by HTA, {expected:.2f} % by simulate")
        assert abs(found - expected) < (TOLERANCE_MANY if name == "zero3" else TOLERANCE_PERCENT), name


for plan_name, plan_flags in PLANS:
    check(plan_name, plan_flags)
