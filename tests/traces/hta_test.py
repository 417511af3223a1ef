"""Holistic Trace Analysis itself opens our traces and sees what `simulate` reports.

Expected values: HTA's own breakdown against the JSON of `simulate` for the same plan. HTA rounds every slice to whole
microseconds and counts communication as exposed when no compute kernel runs beside it anywhere in the step; `simulate` counts
the time for which the compute stream waits for communication. The two agree within the tolerance given below.
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
# Of the step: rounding to microseconds and the different reading of "exposed" stay below.
TOLERANCE = 0.01

PLANS = [
    ("llama-3-8b fsdp2", ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "2", "--seq", "8192",
                          "--recompute", "full"]),
    ("llama-2-7b fsdp1", ["--model", "llama-2-7b", "--cluster", "dgx-a100", "--nodes", "2", "--seq", "2048",
                          "--dialect", "fsdp1"]),
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
        analysis = TraceAnalysis(trace_dir=str(traces))
        breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
        busy = report["time"]["busy_s"]
        step = report["step_time_s"]
        computed = breakdown["compute_time(us)"] * 1e-6
        exposed = breakdown["non_compute_time(us)"] * 1e-6
        print(f"{name}: step {step:.6f} s, compute {computed:.6f} s by HTA, {busy['compute']:.6f} s by simulate")
        assert abs(computed - busy["compute"]) < TOLERANCE * step, (computed, busy["compute"])
        assert abs(exposed - report["exposed_comm_s"]) < TOLERANCE * step, (exposed, report["exposed_comm_s"])
        communication = sum(busy[s] for s in ("gather", "reduce", "replicate"))
        hidden = (1 - exposed / communication) * 100
        assert abs(hidden - overlap["comp_comm_overlap_pctg"]) < 2, (hidden, overlap["comp_comm_overlap_pctg"])
        print(f"  exposed {exposed:.6f} s by HTA, {report['exposed_comm_s']:.6f} s by simulate; overlap "
              f"{overlap['comp_comm_overlap_pctg']:.1f} % by HTA, {hidden:.1f} % from the streams")


for plan_name, plan_flags in PLANS:
    check(plan_name, plan_flags)
