"""Predicted against measured step times on this machine's cores, of models and plans that calibration has not seen.

    python3 bench/host_accuracy.py build/shardwright [--ranks 2] [--steps 8] [--json FILE]

Calibrates (`calibrate --device host`, small GPT-2s under `native`), then plans, simulates and runs other models, widths, dialects, batches and
recomputation, with one thread per rank and as many ranks as cores at most. Compared is the median step of a run, its first one left out.
On a machine that does other things, a run takes longer than its computing: `busy` is wall time times ranks over CPU time, 1.0 when idle. Rows above 1.1, of
several ranks, which wait for each other, above 1.25, are reported and not scored.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile


def gpt2(width, layers, heads, tokens, vocabulary=2000):
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": tokens, "vocab_size": vocabulary,
            "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def llama(width, layers, heads, tokens, vocabulary=2000):
    return {"model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            "intermediate_size": width * 8 // 3 // 32 * 32, "max_position_embeddings": tokens, "vocab_size": vocabulary,
            "architectures": ["LlamaForCausalLM"]}


# name, config, tokens, flags
CASES = [
    ("gpt2 192x4", gpt2(192, 4, 6, 128), 128, ["--dialect", "fsdp2", "--micro-batch", "2"]),
    ("gpt2 320x6", gpt2(320, 6, 5, 128), 128, ["--dialect", "native", "--micro-batch", "1"]),
    ("gpt2 320x6 recomputed", gpt2(320, 6, 5, 128), 128, ["--dialect", "fsdp1", "--micro-batch", "2", "--recompute", "full"]),
    ("gpt2 512x4, 2 micro-batches", gpt2(512, 4, 8, 256), 256, ["--dialect", "fsdp2", "--micro-batch", "1", "--accumulation", "2"]),
    ("llama 256x4", llama(256, 4, 4, 128), 128, ["--dialect", "fsdp2", "--micro-batch", "2"]),
    ("llama 384x6", llama(384, 6, 6, 192), 192, ["--dialect", "ddp", "--micro-batch", "1"]),
    ("llama 256x8, large vocabulary", llama(256, 8, 4, 128, 8000), 128, ["--dialect", "native", "--micro-batch", "2"]),
    ("llama 512x3", llama(512, 3, 8, 256), 256, ["--dialect", "zero3", "--micro-batch", "1"]),
]


def children_cpu():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=min(os.cpu_count(), 4))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json")
    flags = parser.parse_args()
    program = str(pathlib.Path(flags.program).resolve())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def run(*arguments):
            done = subprocess.run([program, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(arguments)}\n{done.stderr}")
            return done.stdout

        run("calibrate", "--device", "host", "--ranks", str(flags.ranks), "-o", "mine.json")
        print(f"{'plan':40s} {'ranks':>5s} {'predicted':>10s} {'measured':>10s} {'error':>7s} {'busy':>5s}")
        for title, config, tokens, choices in CASES:
            (folder / "config.json").write_text(json.dumps(config))
            for ranks in sorted({1, flags.ranks}):
                if ranks == 1 and "zero3" in choices:
                    continue
                run("plan", "--model", "./config.json", "--cluster", "host", "--gpus", str(ranks), "--kernel-set", "shardwright-host", "--precision",
                    "fp32", "--seq", str(tokens), "--wrap", "block" if "ddp" not in choices else "root", "--profile", "mine.json", *choices, "-o",
                    "plan.json")
                predicted = json.loads(run("simulate", "plan.json", "--json"))["step_time_s"]
                cpu = children_cpu()
                ends = [step["end_s"] for step in json.loads(run("run", "plan.json", "--steps", str(flags.steps), "--json"))["steps"]]
                busy = ends[-1] * ranks / (children_cpu() - cpu)
                measured = statistics.median(b - a for a, b in zip(ends, ends[1:]))
                error = predicted / measured - 1
                rows.append({"plan": title, "ranks": ranks, "choices": choices, "predicted_s": predicted, "measured_s": measured, "error": error,
                             "busy": busy})
                print(f"{title:40s} {ranks:5d} {predicted * 1e3:8.1f} ms {measured * 1e3:8.1f} ms {error:+7.1%} {busy:5.2f}", flush=True)
    scored = [abs(row["error"]) for row in rows if row["busy"] <= (1.1 if row["ranks"] == 1 else 1.25)]
    verdict = f"median |error| {statistics.median(scored):.1%}" if scored else "this machine is busy"
    print(f"{len(scored)} of {len(rows)} rows scored: {verdict}; load {os.getloadavg()[0]:.1f}")
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows, "scored": len(scored)}, indent=1))


if __name__ == "__main__":
    main()
