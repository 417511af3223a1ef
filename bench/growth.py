"""How costs grow with what a user makes larger: CPU seconds of one run of the program each, and the exponents between sizes.

    bench/growth.py build/shardwright [--only NAME,...] [--out TABLE.md]

Exits with 1 where a limit is broken. CPU seconds are those of the program's own process and its threads, so other load on the machine
changes them little; exponents are between the smallest and the largest size, less what the program takes for nothing at all.
"""

import argparse
import copy
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

LAYERS = [1000, 3000, 10000]
MICRO_BATCHES = [64, 256, 1024]
BATCHES = [128, 1024, 65536]
STEPS = [500, 2000, 8000]
RANKS = 64

TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu"}


class Growth:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.rows, self.broken = [], []
        self.nothing = self.run("list", "gpus")[0]

    def run(self, *arguments, codes=(0,)):
        """CPU seconds, MB at most and wall seconds of one run, and what it printed."""
        begin = time.monotonic()
        with open(self.folder / "out", "w+b") as out, open(self.folder / "err", "w+b") as err:
            child = subprocess.Popen([self.program, *arguments], cwd=self.folder, stdout=out, stderr=err)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in codes:
            sys.exit(f"{' '.join(arguments)}: exit code {child.returncode}: {(self.folder / 'err').read_text()[-1000:]}")
        return (usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, time.monotonic() - begin,
                (self.folder / "out").read_text())

    def row(self, name, sizes, seconds, result, is_kept):
        self.rows.append((name, ", ".join(f"{s:,}" for s in sizes), ", ".join(f"{s:.2f}" for s in seconds), result))
        if not is_kept:
            self.broken.append(f"{name}: {result}")
        print(" | ".join(self.rows[-1]), flush=True)

    def exponent(self, name, sizes, seconds, limit):
        first, last = (max(s - self.nothing, 0.01) for s in (seconds[0], seconds[-1]))
        exponent = math.log(last / first) / math.log(sizes[-1] / sizes[0])
        self.row(name, sizes, seconds, f"exponent {exponent:.2f}, limit {limit}", exponent <= limit)

    # What grows.

    def micro_batches(self):
        seconds, memory = [], 0
        for count in MICRO_BATCHES:
            self.run("plan", "--model", "llama-2-70b", "--cluster", "dgx-h100", "--nodes", "8", "--seq", "4096", "--micro-batch", "1",
                     "--dialect", "fsdp2", "--recompute", "full", "--wrap", "block", "--accumulation", str(count), "-o", "plan.json")
            cpu, memory, _, told = self.run("simulate", "plan.json", "--json", codes=(0, 1))
            seconds.append(cpu)
            if count == MICRO_BATCHES[0]:
                exact = self.run("simulate", "plan.json", "--json", "--exact", codes=(0, 1))[3]
                self.row("simulate against simulate --exact", [count], [cpu], "equal" if exact == told else "they differ",
                         exact == told)
        self.row("simulate, micro-batches of 70B", MICRO_BATCHES, seconds, f"{memory:.0f} MB, limits 1 s and 300 MB",
                 seconds[-1] <= 1 and memory <= 300)

    def layers(self):
        for recompute in ("none", "full"):
            for fits, nodes in (("fits", 128), ("does not fit", 1)):
                seconds = []
                for count in LAYERS:
                    model = {**TINY, "num_hidden_layers": count, "hidden_size": 256 if fits == "fits" else 1024,
                             "intermediate_size": 704 if fits == "fits" else 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
                    (self.folder / "model.json").write_text(json.dumps(model))
                    self.run("plan", "--model", "model.json", "--cluster", "dgx-h100", "--nodes", str(nodes), "--seq", "128" if
                             fits == "fits" else "4096", "--micro-batch", "1" if fits == "fits" else "8", "--dialect", "fsdp2",
                             "--recompute", recompute, "--wrap", "block", "-o", "plan.json")
                    cpu, _, _, text = self.run("simulate", "plan.json", codes=(0, 1))
                    if ("does not fit" in text) != (fits != "fits"):
                        sys.exit(f"growth.py: {count} layers, recompute {recompute}: expected that it {fits}")
                    seconds.append(cpu)
                self.exponent(f"simulate, layers, recompute {recompute}, {fits}", LAYERS, seconds, 1.1)

    def batch(self):
        for model, nodes in (("llama-2-70b", 8), ("llama-3-8b", 2)):
            seconds = [self.run("plan", "--model", model, "--cluster", "dgx-h100", "--nodes", str(nodes), "--seq", "4096",
                                "--global-batch", str(batch), "-o", "plan.json")[0] for batch in BATCHES]
            ratio = seconds[-1] / seconds[0]
            # More micro-batches are more plans to look at, and each is told from five of them, where two are simulated as they are.
            self.row(f"plan, samples of a step of {model}", BATCHES, seconds, f"{ratio:.1f} times the first, limit 15, goal 1.5",
                     ratio <= 15)

    @staticmethod
    def named(events):
        """With the names that PyTorch's kernels have; a product's backward is two."""
        result = []
        for event in events:
            op = event.get("args", {}).get("op", "")
            part = op.rsplit(".", 2)[-2] if op.count(".") > 1 else ""
            if event.get("cat") != "kernel" or op.endswith("accumulate_grad"):
                result.append(event)
            elif part.endswith("_proj") or part == "lm_head":
                half = {**event, "name": "sm90_xmma_gemm_bf16", "dur": event["dur"] / 2}
                is_backward = op.endswith(".bwd")
                result += [half, {**half, "ts": half["ts"] + half["dur"]}] if is_backward else [{**half, "dur": event["dur"]}]
            elif part == "attn":
                result.append({**event, "name": "flash_bwd_kernel" if op.endswith(".bwd") else "flash_fwd_kernel"})
            elif op.startswith("mb") and not event["name"].startswith("nccl"):
                result.append({**event, "name": "elementwise_kernel"})
            else:
                result.append(event)
        return result

    def recording(self, trace, steps, rank, path):
        """A recording as PyTorch's profiler writes it: the simulated step over and over."""
        marks = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
        period = marks[-1]["dur"] + 1
        head = {k: v for k, v in trace.items() if k not in ("shardwright", "traceEvents")}
        head["distributedInfo"] = {**head["distributedInfo"], "rank": rank}
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            events = self.named(trace["traceEvents"])
            for step in range(steps):
                for event in events:
                    if event["ph"] == "M":
                        continue
                    event = copy.copy(event)
                    event["ts"] += step * period
                    if event["name"].startswith("ProfilerStep#"):
                        event["name"] = f"ProfilerStep#{step + 1}"
                    elif "correlation" in event.get("args", {}):
                        event["args"] = {**event["args"], "correlation": event["args"]["correlation"] + step * 100000}
                    file.write(json.dumps(event) + ",\n")
            file.write('{"ph": "M", "name": "end", "pid": 0, "tid": 0, "ts": 0}]}\n')

    def plan_of_ranks(self):
        (self.folder / "tiny.json").write_text(json.dumps(TINY))
        self.run("plan", "--model", "tiny.json", "--cluster", "dgx-h100", "--nodes", str(RANKS // 8), "--seq", "64", "--micro-batch",
                 "1", "--dialect", "fsdp2", "-o", "plan.json")
        self.run("simulate", "plan.json", "--trace", "sim.json", "--trace-profile", "hta")
        return json.loads((self.folder / "sim.json").read_text())

    def steps(self):
        trace, seconds = self.plan_of_ranks(), []
        for steps in STEPS:
            self.recording(trace, steps, 0, self.folder / "recording.json")
            seconds.append(self.run("compare", "plan.json", "recording.json", codes=(0, 1))[0])
        self.exponent("compare, steps of a recording", STEPS, seconds, 1.1)
        (self.folder / "recording.json").unlink()

    def ranks(self):
        trace = self.plan_of_ranks()
        (self.folder / "traces").mkdir()
        for rank in range(RANKS):
            self.recording(trace, 200, rank, self.folder / "traces" / f"rank{rank}.json")
        one = self.run("compare", "plan.json", "traces/rank0.json", codes=(0, 1))[0]
        cpu, _, wall, _ = self.run("compare", "plan.json", "traces", codes=(0, 1))
        self.row("compare, ranks in a folder", [1, RANKS], [one, cpu], f"{wall:.2f} s of wall time, {cpu / wall:.1f} cores, linear",
                 cpu <= 1.5 * RANKS * one)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("program")
    parser.add_argument("--only", help="of micro_batches, layers, batch, steps, ranks")
    parser.add_argument("--out", help="write the table here, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        growth = Growth(os.path.abspath(arguments.program), pathlib.Path(folder))
        names = arguments.only.split(",") if arguments.only else ["micro_batches", "layers", "batch", "steps", "ranks"]
        for name in names:
            getattr(growth, name)()
    table = "| what | sizes | CPU seconds | growth |\n|---|---|---|---|\n" + "".join(f"| {' | '.join(row)} |\n" for row in growth.rows)
    print("\n" + table, end="")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(table)
    for line in growth.broken:
        print("growth.py: broken: " + line, file=sys.stderr)
    return 1 if growth.broken else 0


if __name__ == "__main__":
    sys.exit(main())
