"""Whole training steps of a GPT-2 on one rank: shardwright beside PyTorch, eager and compiled, in turns.

    python3 bench/host_step_torch.py build/shardwright [--layers 12] [--tokens 512] [--rounds 2] [--steps 3] [--no-compile]
                                                      [--threads 1] [--width 768] [--heads 12] [--vocabulary 50257]

Forward, backward, clipping and AdamW of one sample in fp32 without dropout, as many threads each. Printed are tokens per second of CPU time and of wall time,
the best step of each; only CPU time means something beside other work. PyTorch's model is written with its fused operators
(scaled_dot_product_attention, cross_entropy, fused AdamW), not Transformers' slower ones.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.width, self.heads = width, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        tokens = x.shape[1]
        q, k, v = (t.view(1, tokens, self.heads, self.width // self.heads).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(self.width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, tokens, self.width)
        x = x + self.c_proj(y)
        return x + self.down(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.tokens, sizes.width)
        self.h = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(self, ids, labels):
        x = self.wte(ids) + self.wpe.weight
        for layer in self.h:
            x = layer(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.view(-1))


class Torch:
    def __init__(self, sizes, compiled):
        model = Gpt(sizes)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.model = torch.compile(model) if compiled else model
        self.ids = torch.randint(sizes.vocabulary, (1, sizes.tokens))
        self.step()  # allocations, compilation

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.ids, self.ids).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def measure(self, steps):
        times = []
        for _ in range(steps):
            cpu, wall = time.process_time(), time.perf_counter()
            self.step()
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
        return times


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def plan(program, folder, sizes):
    config = {"model_type": "gpt2", "vocab_size": sizes.vocabulary, "n_positions": sizes.tokens, "n_embd": sizes.width, "n_layer": sizes.layers,
              "n_head": sizes.heads, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([program, "plan", "--model", "./config.json", "--cluster", "h100-80 x1", "--kernel-set", "shardwright-host", "--dialect",
                    "native", "--precision", "fp32", "--seq", str(sizes.tokens), "--micro-batch", "1", "-o", "plan.json"],
                   cwd=folder, check=True, stdout=subprocess.DEVNULL)


def measure_ours(program, folder, steps, threads):
    """The first step warms up; a progress line ends each."""
    run = subprocess.Popen([program, "run", "plan.json", "--steps", str(steps + 1), "--threads", str(threads)], cwd=folder, stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))
    ends = [(cpu_seconds(run.pid), time.perf_counter()) for line in run.stderr if line.startswith("step ")]
    if run.wait() != 0 or len(ends) != steps + 1:
        raise SystemExit("shardwright run failed")
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends, ends[1:])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for name, default in (("layers", 12), ("tokens", 512), ("rounds", 2), ("steps", 3), ("threads", 1), ("width", 768), ("heads", 12),
                          ("vocabulary", 50257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-compile", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(1)
    program = str(pathlib.Path(flags.program).resolve())
    times = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        plan(program, folder, flags)
        measures = {"shardwright": lambda: measure_ours(program, folder, flags.steps, flags.threads)}
        eager = Torch(flags, False)
        measures["torch eager"] = lambda: eager.measure(flags.steps)
        if not flags.no_compile:
            compiled = Torch(flags, True)
            measures["torch.compile"] = lambda: compiled.measure(flags.steps)
        for _ in range(flags.rounds):
            for side, measure in measures.items():
                times.setdefault(side, []).extend(measure())
    best = {side: [min(t[k] for t in of) for k in (0, 1)] for side, of in times.items()}
    print(f"GPT-2, {flags.layers} layers of {flags.width}, {flags.tokens} tokens, {flags.threads} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for side, (cpu, wall) in best.items():
        print(f"{side:14s} {cpu:7.2f} s CPU {wall:7.2f} s wall  {flags.tokens / cpu:7.1f} tokens/CPU s  {flags.tokens / wall:7.1f} tokens/s  "
              f"CPU ratio {cpu / best['shardwright'][0]:.2f}  wall ratio {wall / best['shardwright'][1]:.2f}  steps "
              + " ".join(f"{t[1]:.3f}" for t in times[side]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
