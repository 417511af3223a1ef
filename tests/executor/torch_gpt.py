"""A GPT-2 trained on text by shardwright and by PyTorch: same first weights, same samples, equal losses.

    python3 tests/executor/torch_gpt.py SHARDWRIGHT [--large] [--steps N]

Trains a tiny model for 20 steps and one of 10 million parameters for 5; with --large the latter alone, for 20.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Both sides compute in fp32 and differ in the order of their sums: a loss, a sum of hundreds of terms, has a relative
# error of a few units of 2^-24 = 6e-8 (measured: 1e-7), and every update hands such errors on to the next step.
BOUND_PER_STEP = 2e-6


def configuration(large):
    sizes = {"n_positions": 64, "n_embd": 320, "n_layer": 8, "n_head": 8} if large else \
            {"n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return {"model_type": "gpt2", "vocab_size": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **sizes}


def peak_rate(large):
    """Small enough for a loss without spikes, behind which rounding differences would grow without bound."""
    return 3e-4 if large else 3e-3


def options(rate):
    return {"format": "shardwright-training", "version": 1, "shuffle": False,
            "optimizer": {"learning_rate": rate, "weight_decay": 0.1 if rate else 0.0, "beta2": 0.95},
            "schedule": {"kind": "cosine", "warmup": 3, "total": 100, "final_fraction": 0.1}}


def train_here(program, folder, steps, length, rate, flags=("--cluster", "h100-80 x2, nvlink 450 GB/s", "--micro-batch", "2", "--recompute", "full")):
    """The losses of shardwright under a plan with these flags, with the first weights left in folder/first.safetensors."""
    def run(*arguments):
        return subprocess.run([program, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True).stdout

    run("plan", "--model", "./config.json", "--kernel-set", "shardwright-host", "--precision", "fp32", "--seq", str(length),
        "--global-batch", "8", *flags, "-o", "plan.json")
    for name, value in (("still.json", 0.0), ("options.json", rate)):
        (folder / name).write_text(json.dumps(options(value)))
    # A step without learning rate leaves the weights where they begin.
    run("run", "plan.json", "--steps", "1", "--data", "text:text", "--training", "still.json", "--checkpoint", "first")
    run("checkpoint", "export", "first", "-o", "first.safetensors")
    report = json.loads(run("run", "plan.json", "--steps", str(steps), "--data", "text:text", "--training",
                            "options.json", "--json"))
    return [step["loss"] for step in report["steps"]]


def learning_rate(peak, step):
    """docs/training.md: linear warm-up over 3 steps, then a cosine to a tenth at step 100."""
    if step < 3:
        return peak * (step + 1) / 4
    half_wave = (1 + torch.cos(torch.tensor((step - 3) / 97 * torch.pi, dtype=torch.float64)).item()) / 2
    return peak * (0.1 + 0.9 * half_wave)


def train_in_torch(model, folder, steps, length, text, rate):
    unknown = model.load_state_dict(load_file(folder / "first.safetensors"), strict=False)
    assert unknown.missing_keys in ([], ["lm_head.weight"]) and not unknown.unexpected_keys, unknown
    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=0.0, betas=(0.9, 0.95))
    ids = torch.tensor(list(text))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(rate, step)
        starts = [(step * 8 + i) * length for i in range(8)]
        inputs = torch.stack([ids[s:s + length] for s in starts])
        labels = torch.stack([ids[s + 1:s + length + 1] for s in starts])
        optimizer.zero_grad()
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(program, large, steps):
    """Whether both sides' losses agree, and fall."""
    config = configuration(large)
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "text").write_bytes(text)
        ours = train_here(program, folder, steps, config["n_positions"], peak_rate(large))
        model = GPT2LMHeadModel(GPT2Config(**{k: v for k, v in config.items() if k != "model_type"}))
        theirs = train_in_torch(model, folder, steps, config["n_positions"], text, peak_rate(large))
    return agree(ours, theirs) and len(ours) == steps and ours[-1] <= 0.9 * ours[0]


def agree(ours, theirs):
    worst = 0.0
    for step, (a, b) in enumerate(zip(ours, theirs)):
        distance = abs(a - b) / b
        worst = max(worst, distance / (step + 1))
        print(f"step {step + 1:3d}  shardwright {a:.6f}  torch {b:.6f}  relative distance {distance:.1e}")
    print(f"largest relative distance per step: {worst:.1e}, bound {BOUND_PER_STEP:.0e}")
    return worst <= BOUND_PER_STEP


def main(arguments):
    torch.set_num_threads(1)
    program = str(pathlib.Path(arguments[0]).resolve())
    steps = int(arguments[arguments.index("--steps") + 1]) if "--steps" in arguments else 20
    runs = [(True, steps)] if "--large" in arguments else [(False, steps), (True, 5)]
    results = [compare(program, large, count) for large, count in runs]
    if not all(results):
        print("FAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
