"""Training steps on this machine's cores: shardwright beside PyTorch eager and beside FSDP2 over gloo, in turns.

    python3 bench/host_speed.py build/shardwright [--turns 7] [--steps 4] [--ranks CORES] [--dialect native] [--only TEXT] [--json FILE]

GPT-2 of 10 and 50 million parameters, a Llama of 19 and PyTorch's MNIST ConvNet; forward, backward, clipping and AdamW in fp32 without dropout. Each
way runs in processes of its own, once a turn; of a turn counts the median step, its first left out, and printed are medians over the turns.

- one rank: its ops on all cores, beside eager with as many threads
- N ranks of a thread each with a sample each, beside eager with all cores and N samples, and beside FSDP2 in N processes of one thread

Ours run the schedule of --dialect (native: shards are used where they lie).

PyTorch's models are written with its fused operators (scaled_dot_product_attention, rms_norm, fused AdamW).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import host_accuracy

# name, config, samples a rank, flags of plan
JOBS = [
    ("gpt2 10M", host_accuracy.gpt2(384, 4, 6, 8192) | {"n_positions": 512}, 1, ["--seq", "512", "--wrap", "block"]),
    ("gpt2 50M", host_accuracy.gpt2(512, 12, 8, 24000) | {"n_positions": 512}, 1, ["--seq", "512", "--wrap", "block"]),
    ("llama 19M", host_accuracy.llama(512, 4, 8, 8000) | {"max_position_embeddings": 512}, 1, ["--seq", "512", "--wrap", "block"]),
    ("convnet", host_accuracy.convnet(32, 128), 64, ["--wrap", "root"]),
]


# PyTorch's side: this file as a worker process.


def gpt2(config):
    import torch.nn.functional as F
    from torch import nn
    width, heads = config["n_embd"], config["n_head"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, tokens, _ = x.shape
            q, k, v = (t.view(batch, tokens, heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(width, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
            x = x + self.c_proj(y)
            return x + self.down(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(config["vocab_size"], width), nn.Embedding(config["n_positions"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(config["n_layer"]))
            self.ln_f = nn.LayerNorm(width)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1), ids.flatten())

    return Gpt()


def llama(config):
    import torch
    import torch.nn.functional as F
    from torch import nn
    width, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, inner = width // heads, config["intermediate_size"]
    angles = torch.outer(torch.arange(config["max_position_embeddings"]), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    cos, sin = (f(torch.cat([angles, angles], dim=1)) for f in (torch.cos, torch.sin))

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos[:x.shape[2]] + torch.cat([-b, a], dim=-1) * sin[:x.shape[2]]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
            self.q, self.k, self.v = (nn.Linear(width, n * dim, bias=False) for n in (heads, kv, kv))
            self.o = nn.Linear(width, width, bias=False)
            self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((width, inner), (width, inner), (inner, width)))

        def forward(self, x):
            batch, tokens, _ = x.shape
            h = self.n1(x)
            q, k, v = (p(h).view(batch, tokens, -1, dim).transpose(1, 2) for p in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, width))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(config["vocab_size"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(config["num_hidden_layers"]))
            self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, config["vocab_size"], bias=False)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())

    return Llama()


def convnet(config):
    import torch.nn.functional as F
    from torch import nn
    shapes = {m["name"]: m["params"][0]["shape"] for m in config["modules"]}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv2d(shapes[n][1], shapes[n][0], 3) for n in ("conv1", "conv2"))
            self.fc1, self.fc2 = (nn.Linear(shapes[n][1], shapes[n][0]) for n in ("fc1", "fc2"))
            self.blocks = []

        def forward(self, images):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2).flatten(1)
            scores = F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)
            return F.nll_loss(scores, scores.new_zeros(len(images), dtype=int))

    return Net()


def worker(config, samples, tokens, steps, threads):
    """A process of PyTorch's: with RANK in the environment one of FSDP2's. Prints how long each step took."""
    import torch
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    build = {"gpt2": gpt2, "llama": llama}.get(config.get("model_type"), convnet)
    model = build(config)
    if "RANK" in os.environ:
        from torch.distributed.fsdp import fully_shard
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randn(samples, 1, 28, 28) if build is convnet else torch.randint(config["vocab_size"], (samples, tokens))
    times = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(data).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(times[1:]), flush=True)
    os._exit(0)  # threads of gloo may abort the process at Python's end


# Ours, and the turns.


class Bench:

    def __init__(self, flags, folder):
        self.flags, self.folder = flags, folder
        self.program = str(pathlib.Path(flags.program).resolve())
        self.cores = len(os.sched_getaffinity(0))

    def ours(self, config, samples, plan_flags, ranks):
        (self.folder / "model.json").write_text(json.dumps(config))
        self.call(["plan", "--model", "./model.json", "--cluster", "host", "--gpus", str(ranks), "--kernel-set", "shardwright-host", "--precision", "fp32",
                   "--dialect", self.flags.dialect, "--micro-batch", str(samples), "-o", "plan.json", *plan_flags])
        threads = self.cores if ranks == 1 else 1
        ends = [step["end_s"] for step in json.loads(self.call(["run", "plan.json", "--steps", str(self.flags.steps + 1), "--threads", str(threads), "--json"]))["steps"]]
        return statistics.median(b - a for a, b in zip(ends, ends[1:]))

    def call(self, words):
        done = subprocess.run([self.program, *words], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
        return done.stdout

    def torch(self, config, samples, plan_flags, processes, threads):
        tokens = int(plan_flags[1]) if plan_flags[0] == "--seq" else 0
        words = [sys.executable, __file__, "--worker", json.dumps([config, samples, tokens, self.flags.steps, threads])]
        started = []
        for rank in range(processes):
            own = dict(os.environ, OMP_NUM_THREADS=str(threads))
            if processes > 1:
                own |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
            started.append(subprocess.Popen(words, env=own, stdout=subprocess.PIPE, text=True))
        texts = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("PyTorch's process failed")
        return statistics.median(json.loads(texts[0]))

    def row(self, name, config, samples, plan_flags):
        ranks = self.flags.ranks or self.cores
        ways = {
            "ours_1": lambda: self.ours(config, samples, plan_flags, 1),
            "eager_1": lambda: self.torch(config, samples, plan_flags, 1, self.cores),
            "ours_n": lambda: self.ours(config, samples, plan_flags, ranks),
            "eager_n": lambda: self.torch(config, samples * ranks, plan_flags, 1, self.cores),
            "fsdp2_n": lambda: self.torch(config, samples, plan_flags, ranks, 1),
        }
        turns = {way: [] for way in ways}
        for _ in range(self.flags.turns):
            for way, measure in ways.items():
                turns[way].append(measure())
        return {"job": name, "ranks": ranks, "cores": self.cores, "turns_s": turns} | {way: statistics.median(of) for way, of in turns.items()}


def main():
    if sys.argv[1] == "--worker":
        worker(*json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for name, default in (("turns", 7), ("steps", 4), ("ranks", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dialect", default="native")
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--json")
    flags = parser.parse_args()
    rows = []
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; PyTorch's time over ours")
    print(f"{'job':10s} {'1 rank':>9s} {'eager':>9s} {'ratio':>6s}   {'N':>2s} {'N ranks':>9s} {'eager':>9s} {'ratio':>6s} {'FSDP2':>9s} {'ratio':>6s}")
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(flags, pathlib.Path(name))
        for job in JOBS:
            if flags.only not in job[0]:
                continue
            r = bench.row(*job)
            rows.append(r)
            print(f"{r['job']:10s} {r['ours_1'] * 1e3:6.1f} ms {r['eager_1'] * 1e3:6.1f} ms {r['eager_1'] / r['ours_1']:6.2f}   {r['ranks']:2d} "
                  f"{r['ours_n'] * 1e3:6.1f} ms {r['eager_n'] * 1e3:6.1f} ms {r['eager_n'] / r['ours_n']:6.2f} "
                  f"{r['fsdp2_n'] * 1e3:6.1f} ms {r['fsdp2_n'] / r['ours_n']:6.2f}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
