"""Whether a recording of PyTorch's profiler is taken for a run of the plan that it belongs to, and of no other.

Real jobs of `transformers` are recorded on this machine's cores: several models, batches and lengths, an inference run, FSDP2 and DDP in
two gloo processes, with and without shapes. Then every recording is compared with every plan. Expected: only the job's own plan is taken
for what ran; with any other `compare` says "Not a run of this plan" and `calibrate` writes nothing, both with exit code 1.
"""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError:
    print("torch or transformers is not installed: skipped")
    sys.exit(77)

PROGRAM = sys.argv[1]
LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 32}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# name: (model, samples, tokens, micro-batches, ranks, how)
JOBS = {
    "llama": (LLAMA, 2, 64, 1, 1, "train"),
    "llama-long": (LLAMA, 1, 128, 1, 1, "train"),  # the same products, other attention
    "llama-batch": (LLAMA, 4, 64, 1, 1, "train"),
    "llama-accumulate": (LLAMA, 2, 64, 2, 1, "train"),
    "llama-deep": ({**LLAMA, "num_hidden_layers": 4}, 2, 64, 1, 1, "train"),
    "llama-wide": ({**LLAMA, "hidden_size": 96, "num_attention_heads": 6}, 2, 64, 1, 1, "train"),
    "llama-vocabulary": ({**LLAMA, "vocab_size": 768}, 2, 64, 1, 1, "train"),
    "llama-inference": (LLAMA, 2, 64, 1, 1, "infer"),
    "qwen": (QWEN, 2, 64, 1, 1, "train"),
    "gpt2": (GPT2, 2, 64, 1, 1, "train"),
    "llama-fsdp2": (LLAMA, 2, 64, 1, 2, "fsdp2"),
    "llama-ddp": (LLAMA, 2, 64, 1, 2, "ddp"),
}
# Recorded without shapes these are told apart by numbers alone; each name is a job above.
WITHOUT_SHAPES = ("llama", "llama-inference", "llama-deep")


def step(model, job, optimizer):
    config, samples, tokens, micro_batches, _, how = job
    for _ in range(micro_batches):
        ids = torch.randint(0, config["vocab_size"], (samples, tokens))
        if how == "infer":
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if how != "infer":
        optimizer.step()
        optimizer.zero_grad()


def wrapped(model, how):
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model) if how == "ddp" else model


def record(folder, name, job, rank=0, shapes=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job[0]))
    model.eval() if job[5] == "infer" else model.train()
    model = wrapped(model, job[5])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes,
                 schedule=schedule(wait=0, warmup=2, active=2, repeat=1)) as profiler:
        for _ in range(4):
            step(model, job, optimizer)
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"{name}-{rank}.json.gz"))


def record_rank(folder, name, job, rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}-rendezvous", rank=rank, world_size=job[4])
    record(folder, name, job, rank)
    dist.destroy_process_group()


def record_all(folder):
    context = multiprocessing.get_context("fork")
    for name, job in JOBS.items():
        if job[4] == 1:
            record(folder, name, job)
            if name in WITHOUT_SHAPES:
                record(folder, f"{name}-shapeless", job, shapes=False)
            continue
        processes = [context.Process(target=record_rank, args=(folder, name, job, rank)) for rank in range(job[4])]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0


def run(folder, *arguments):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode in (0, 1), (arguments, done.returncode, done.stdout, done.stderr)
    return done.returncode, done.stdout


def plan(folder, name, job):
    config, samples, tokens, micro_batches, ranks, how = job
    (folder / f"{name}-config.json").write_text(json.dumps(config))
    dialect = how if how in ("fsdp2", "ddp") else "ddp"
    code, out = run(folder, "plan", "--model", f"{name}-config.json", "--cluster", "host", "--gpus", str(ranks), "--seq", str(tokens),
                    "--micro-batch", str(samples), "--accumulation", str(micro_batches), "--dialect", dialect, "--precision", "fp32",
                    "--kernel-set", "hf-eager", "--clip", "off", "--no-search", "--mode", "forward" if how == "infer" else "train",
                    "-o", f"{name}.json")
    assert code == 0, out


def check_pair(folder, planned, recorded, traces):
    """Returns the lowest score of a right pair, the highest of a wrong one."""
    right = planned == recorded.removesuffix("-shapeless")
    code, out = run(folder, "compare", f"{planned}.json", *traces, "--json")
    match = json.loads(out)["match"]
    scores = {group["name"]: round(group["score"], 3) for group in match["groups"]}
    assert match["is_run"] == right, (planned, recorded, match)
    assert code == (0 if right else 1), (planned, recorded, out)
    if right or planned == "gpt2":  # what people see
        text = run(folder, "compare", f"{planned}.json", *traces)[1]
        verdict = text.splitlines()[0]
        assert verdict == ("A run of this plan" if right else "Not a run of this plan"), (planned, recorded, text)
    code, out = run(folder, "calibrate", *traces, "--plan", f"{planned}.json", "-o", "profile.json", "--even-if-worse")
    assert code == (0 if right else 1), (planned, recorded, out)
    assert (folder / "profile.json").exists() == right
    (folder / "profile.json").unlink(missing_ok=True)
    if not right:
        assert " is not a run of the plan.\n" in out, out
        assert any(group["missing"] or group["too_many"] for group in match["groups"]), match
    return right, min(scores.values()), scores


def is_hidden_by_missing_shapes(planned, recorded):
    """Without sizes a job is not told from another one with as many products and attention calls."""
    if not recorded.endswith("-shapeless"):
        return False
    def numbers(name):
        config, _, _, micro_batches, ranks, how = JOBS[name]
        return config["model_type"] == "gpt2", config.get("num_hidden_layers", 3), micro_batches, ranks, how
    return planned != recorded.removesuffix("-shapeless") and numbers(planned) == numbers(recorded.removesuffix("-shapeless"))


with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    record_all(folder)
    for name, job in JOBS.items():
        plan(folder, name, job)
    recordings = sorted({path.name.rsplit("-", 1)[0] for path in folder.glob("*.json.gz")})
    worst_right, best_wrong, pairs = 1.0, 0.0, 0
    for recorded in recordings:
        traces = sorted(str(path.name) for path in folder.glob(f"{recorded}-[0-9].json.gz"))
        for planned in JOBS:
            if is_hidden_by_missing_shapes(planned, recorded):
                continue
            right, score, scores = check_pair(folder, planned, recorded, traces)
            pairs += 1
            if right:
                worst_right = min(worst_right, score)
            else:
                best_wrong = max(best_wrong, score)
    print(f"{pairs} pairs; the worst right one {worst_right:.3f}, the best wrong one {best_wrong:.3f}")
print("passed")
