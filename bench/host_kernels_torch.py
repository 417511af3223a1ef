"""The ops of bench/host_kernels_bench.cc in PyTorch's CPU kernels: milliseconds of CPU time on one thread.

    python3 bench/host_kernels_torch.py                        # PyTorch alone
    python3 bench/host_kernels_torch.py build/bench/host_kernels_bench   # both, in turns, with ratios
"""

import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

T, H, V = 1024, 768, 50257
REPEATS = 5


def leaf(*shape):
    return (torch.randn(*shape) * 0.1).requires_grad_()


def linear(i, o):
    x, w, b = leaf(T, i), leaf(o, i), leaf(o)
    return lambda: F.linear(x, w, b), (x, w, b)


def attention():
    qkv = leaf(1, T, 3 * H)

    def run():
        q, k, v = (t.view(1, T, 12, 64).transpose(1, 2) for t in qkv.split(H, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, T, H)

    return run, (qkv,)


def norm():
    x, w, b = leaf(T, H), leaf(H), leaf(H)
    return lambda: F.layer_norm(x, (H,), w, b), (x, w, b)


def gelu():
    x = leaf(T, 4 * H)
    return lambda: F.gelu(x, approximate="tanh"), (x,)


def add():
    x, y = leaf(T, H), leaf(T, H)
    return lambda: x + y, (x, y)


def cross_entropy():
    x, labels = leaf(T, V), torch.arange(T) * 7919 % V
    return lambda: F.cross_entropy(x, labels), (x,)


def embedding():
    w, ids = leaf(V, H), torch.arange(T) * 7919 % V
    return lambda: F.embedding(ids, w), (w,)


def conv():
    x, w, b = leaf(16, 32, 28, 28), leaf(64, 32, 3, 3), leaf(64)
    return lambda: F.conv2d(x, w, b, padding=1), (x, w, b)


OPS = {"qkv": lambda: linear(H, 3 * H), "projection": lambda: linear(H, H), "up": lambda: linear(H, 4 * H),
       "down": lambda: linear(4 * H, H), "attention": attention, "layer_norm": norm, "gelu": gelu, "add": add,
       "head": lambda: linear(H, V), "cross_entropy": cross_entropy, "embedding": embedding, "conv": conv}


def measure(name, backward):
    run, leaves = OPS[name]()
    grad = torch.randn_like(run().detach())
    times = []
    for _ in range(REPEATS + 1):
        start = time.process_time()
        result = run()
        if backward:
            torch.autograd.grad(result, leaves, grad)
        times.append(time.process_time() - start)
    return min(times[1:]) * 1e3


def ours(program, name):
    out = subprocess.run([program, f"--benchmark_filter=^{name}$", "--benchmark_format=json",
                          f"--benchmark_repetitions={REPEATS}", "--benchmark_min_time=0.01"],
                         check=True, capture_output=True, text=True).stdout
    return min(r["cpu_time"] for r in json.loads(out)["benchmarks"] if r["run_type"] == "iteration")


def main():
    torch.set_num_threads(1)
    print(f"{'op':24}{'torch ms':>10}{'ours ms':>10}{'torch/ours':>12}   torch {torch.__version__}")
    for name in OPS:
        for backward in (False, True):
            label = name + ("/both" if backward else "/forward")
            theirs = measure(name, backward)
            if len(sys.argv) > 1:
                own = ours(sys.argv[1], label)
                print(f"{label:24}{theirs:10.2f}{own:10.2f}{theirs / own:12.2f}", flush=True)
            else:
                print(f"{label:24}{theirs:10.2f}", flush=True)


if __name__ == "__main__":
    main()
