"""Predicted against measured step times on this machine's cores, of jobs that calibration has not seen.

    python3 bench/host_accuracy.py build/shardwright [--every N] [--first K] [--steps 8] [--only TEXT] [--json FILE]

GPT-2, Llama and a ConvNet, each of three sizes, on 1, 2, 4 and 8 ranks, held to 1, 2 and all cores with taskset, with gradient clipping on and off, and
with an emulated network. A profile is made of other jobs of the same kind, once: transformers by `calibrate --device host`, ConvNets by `calibrate` on the
traces of one of another size, with one rank and with as many as the transformers had. `--every N` takes one row of N. Compared is the median step of a run, its first two left out.
On a machine that does other things a run takes longer than its computing: `busy` is what the run would take if it had its cores, its CPU time over as
many cores as it can use, under what it took: 1.0 when idle. Rows above 1.25 are reported and not scored.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile


def gpt2(width, layers, heads, vocabulary=2000):
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 256, "vocab_size": vocabulary,
            "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def llama(width, layers, heads, vocabulary=2000):
    return {"model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2,
            "intermediate_size": width * 8 // 3 // 32 * 32, "max_position_embeddings": 256, "vocab_size": vocabulary,
            "architectures": ["LlamaForCausalLM"]}


def convnet(channels, features):
    """PyTorch's MNIST ConvNet with other widths."""
    flat = 2 * channels * 12 * 12

    def module(name, kind, *shape):
        params = [{"name": "weight", "shape": list(shape)}, {"name": "bias", "shape": [shape[0]]}]
        return {"name": name, "class": kind, "params": params}

    def op(kind, inputs, output, **attributes):
        return {"op": kind, **attributes, "inputs": inputs, "output": output}

    return {"format": "shardwright-model", "version": 1, "class": "Net",
            "inputs": {"image": {"shape": [1, 28, 28]}, "label": {"ids": 1}},
            "modules": [module("conv1", "Conv2d", channels, 1, 3, 3), module("conv2", "Conv2d", 2 * channels, channels, 3, 3),
                        module("fc1", "Linear", features, flat), module("fc2", "Linear", 10, features)],
            "ops": [op("conv2d", ["image"], "x1", module="conv1"), op("activation", ["x1"], "x2", name="relu_1", function="relu"),
                    op("conv2d", ["x2"], "x3", module="conv2"), op("activation", ["x3"], "x4", name="relu_2", function="relu"),
                    op("max_pool", ["x4"], "x5", kernel=2), op("flatten", ["x5"], "x6"), op("linear", ["x6"], "x7", module="fc1"),
                    op("activation", ["x7"], "x8", name="relu_3", function="relu"), op("linear", ["x8"], "logits", module="fc2"),
                    op("log_softmax", ["logits"], "scores"), op("nll_loss", ["scores", "label"], "loss", name="loss")]}


# name, config, flags
MODELS = [
    ("gpt2 128x4", gpt2(128, 4, 4), ["--seq", "128", "--micro-batch", "2", "--dialect", "native"]),
    ("gpt2 320x6", gpt2(320, 6, 5), ["--seq", "128", "--micro-batch", "1", "--dialect", "fsdp2"]),
    ("gpt2 512x6", gpt2(512, 6, 8), ["--seq", "192", "--micro-batch", "1", "--dialect", "native"]),
    ("llama 256x4", llama(256, 4, 4), ["--seq", "128", "--micro-batch", "2", "--dialect", "fsdp2"]),
    ("llama 384x6", llama(384, 6, 6), ["--seq", "192", "--micro-batch", "1", "--dialect", "native"]),
    ("llama 512x4", llama(512, 4, 8, 8000), ["--seq", "128", "--micro-batch", "1", "--dialect", "fsdp1"]),
    ("convnet 16", convnet(16, 64), ["--micro-batch", "32", "--dialect", "native"]),
    ("convnet 32", convnet(32, 128), ["--micro-batch", "16", "--dialect", "fsdp2"]),
    ("convnet 48", convnet(48, 256), ["--micro-batch", "16", "--dialect", "native"]),
]
LEARNED_CONVNET = (convnet(24, 96), ["--micro-batch", "24", "--dialect", "native"])
BUSY = 1.25


def rows_of():
    """(model index, ranks, cores, clips, emulates): every model, rank count and core count, the rest in turns."""
    cores = len(os.sched_getaffinity(0))
    turn = 0
    for model in range(len(MODELS)):
        for ranks in (1, 2, 4, 8):
            for held in sorted({1, min(2, cores), cores}):
                yield model, ranks, held, turn % 2 == 0, turn % 5 == 4 and ranks > 1
                turn += 1


def children_cpu():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Bench:

    def __init__(self, flags, folder):
        self.flags = flags
        self.program = str(pathlib.Path(flags.program).resolve())
        self.folder = folder
        self.all = sorted(os.sched_getaffinity(0))

    def run(self, cores, *arguments):
        done = subprocess.run(["taskset", "-c", ",".join(map(str, self.all[:cores])), self.program, *arguments], cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def plan(self, cores, config, ranks, profile, flags):
        (self.folder / "model.json").write_text(json.dumps(config))
        self.run(cores, "plan", "--model", "./model.json", "--cluster", "host", "--gpus", str(ranks), "--kernel-set", "shardwright-host",
                 "--precision", "fp32", "--wrap", "block" if "model_type" in config else "root", *profile, *flags, "-o", "plan.json")

    def learn(self):
        cores = len(self.all)
        self.run(cores, "calibrate", "--device", "host", "--even-if-worse", "-o", "transformers.json")
        for ranks in (1, min(4, cores)):
            self.plan(cores, LEARNED_CONVNET[0], ranks, [], LEARNED_CONVNET[1])
            self.run(cores, "run", "plan.json", "--steps", str(self.flags.steps), "--trace", f"trace{ranks}.json")
        traces = sorted({"trace1.json", f"trace{min(4, cores)}.json"})
        self.run(cores, "calibrate", *traces, "--profile", "transformers.json", "--even-if-worse", "-o", "convnets.json")
        for kind in ("transformers", "convnets"):
            profile = json.loads((self.folder / f"{kind}.json").read_text())
            number = profile["overlap"].get("busy_cores", {"value": 0})
            print(f"{kind}: an op takes {number['value']:.1%} longer for each other core that is busy")

    def row(self, model, ranks, cores, clips, emulates):
        title, config, flags = MODELS[model]
        profile = "transformers.json" if "model_type" in config else "convnets.json"
        self.plan(cores, config, ranks, ["--profile", profile], [*flags, "--clip", "on" if clips else "off"])
        predicted = json.loads(self.run(cores, "simulate", "plan.json", "--json"))["step_time_s"]
        cpu = children_cpu()
        out = self.run(cores, "run", "plan.json", "--steps", str(self.flags.steps), "--json", *(["--emulate-network"] if emulates else []))
        ends = [step["end_s"] for step in json.loads(out)["steps"]]
        busy = ends[-1] * min(ranks, cores) / (children_cpu() - cpu)
        measured = statistics.median([b - a for a, b in zip(ends, ends[1:])][1:])
        return {"model": title, "ranks": ranks, "cores": cores, "clips": clips, "emulates_network": emulates, "flags": flags,
                "predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1, "busy": busy}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="rows of models whose name has this in it")
    parser.add_argument("--json")
    flags = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(flags, pathlib.Path(name))
        bench.learn()
        print(f"{'job':14s} {'ranks':>5s} {'cores':>5s} {'clip':>4s} {'net':>3s} {'predicted':>10s} {'measured':>10s} {'error':>7s} {'busy':>5s}")
        for index, row in enumerate(rows_of()):
            if index % flags.every != flags.first or flags.only not in MODELS[row[0]][0]:
                continue
            rows.append(bench.row(*row))
            r = rows[-1]
            print(f"{r['model']:14s} {r['ranks']:5d} {r['cores']:5d} {'yes' if r['clips'] else 'no':>4s} {'yes' if r['emulates_network'] else 'no':>3s} "
                  f"{r['predicted_s'] * 1e3:7.1f} ms {r['measured_s'] * 1e3:7.1f} ms {r['error']:+7.1%} {r['busy']:5.2f}", flush=True)
    scored = [row for row in rows if row["busy"] <= BUSY]
    for what, some in [("scored", scored), ("all", rows)]:
        for limit, chosen in [("all", some), ("one rank", [r for r in some if r["ranks"] == 1]),
                              ("cores for all ranks", [r for r in some if 1 < r["ranks"] <= r["cores"]]),
                              ("fewer cores than ranks", [r for r in some if r["ranks"] > r["cores"]])]:
            if chosen:
                errors = [abs(r["error"]) for r in chosen]
                print(f"{what:6s} {limit:22s} {len(chosen):3d} rows: median |error| {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    print(f"{len(scored)} of {len(rows)} rows scored; load {os.getloadavg()[0]:.1f}")
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
