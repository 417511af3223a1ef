"""The collectives of a simulated program, beside those that a framework issued (torch_pool.Recorder)."""

import json
import re

KINDS = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce", "all_to_all": "all_to_all"}
DTYPES = {"Float": "fp32", "BFloat16": "bf16", "Half": "fp16", "Int": "int32", "Long": "torch.int64", "Byte": "torch.uint8",
          "Float8_e4m3fn": "torch.float8_e4m3fn"}


def collectives_of(trace, categories=(), beside_update=False):
    """Those of a trace that `simulate --exact --trace` wrote (Shardwright.collectives)."""
    steps = {}
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted(((e["ts"], tuple(e["args"].get(category, 0) for category in categories)) for e in events
                     if e["ph"] == "C" and e["name"] == "memory"), key=lambda row: row[0])
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "kernel":
            steps.setdefault(args["step"], [])  # also if nothing is sent in it
        if "Collective name" in args and event["cat"] == "kernel":
            row = (KINDS[args["Collective name"]], args["Process Group Name"], args["In msg nelems"],
                   args["Out msg nelems"], DTYPES[args["dtype"]])
            if categories:
                row += next((sizes for ts, sizes in reversed(memory) if ts <= args["issue_begin_us"]), (0,) * len(categories))
            steps.setdefault(args["step"], []).append((args["correlation"], row))
            if beside_update and args["step"] > 0 and re.search(r"(^|\.)opt\.", args["op"]):
                steps[args["step"]].pop()
    ordered = [[row for _, row in sorted(steps[step])] for step in sorted(steps)]
    return [ordered[0], ordered[-1]] if ordered else [[], []]


def first_difference(ours, theirs):
    """Where two lists of collectives part, in a few lines; empty when they are equal."""
    for i in range(max(len(ours), len(theirs))):
        a = ours[i] if i < len(ours) else None
        b = theirs[i] if i < len(theirs) else None
        if a != b:
            return f"collective {i} of {len(ours)} in ours, {len(theirs)} in torch: ours {a}, torch's {b}"
    return ""
