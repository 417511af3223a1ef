"""A real FSDP2 run under PyTorch's profiler, compared with our simulation of it.

Two gloo ranks train a tiny Llama of transformers for three steps of two micro-batches. Expected: every collective of the trace is
one of the program's `fsdp2` schedule, in unit, phase, micro-batch and size, and the program has no other. The times are those of this
machine, so only their sums are checked; `calibrate` then brings the simulation of the same plan nearer to the measured step.
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
    from torch.profiler import ProfilerActivity, profile, schedule
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("torch or transformers is not installed: skipped")
    sys.exit(77)

PROGRAM = sys.argv[1]
RANKS = 2
LAYERS = 3
MICRO_BATCHES = 2
CONFIG = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": False, "hidden_act": "silu"}


def train(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True,
                 schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as profiler:
        for _ in range(3):
            for _ in range(MICRO_BATCHES):
                tokens = torch.randint(0, CONFIG["vocab_size"], (2, 64))
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json" + (".gz" if rank == 0 else ""))
    dist.destroy_process_group()


def run(*arguments, code=0):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def record(folder):
    # Forked, so that torch is imported once.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=train, args=(rank, folder)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def check(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    plan = str(folder / "plan.json")
    flags = ["--model", str(folder / "config.json"), "--cluster", "host", "--gpus", str(RANKS), "--seq", "64", "--dialect",
             "fsdp2", "--accumulation", str(MICRO_BATCHES), "--micro-batch", "2", "--precision", "fp32", "--kernel-set",
             "hf-eager", "--clip", "off"]
    run("plan", *flags, "-o", plan)
    traces = [str(folder / "rank0.json.gz"), str(folder / "rank1.json")]
    compared = json.loads(run("compare", plan, *traces, "--json"))
    print(f"step {compared['step_time']}, {compared['matched']} of {compared['spans']} collectives")
    # Per micro-batch: the layers are gathered for forward and backward but the root once, whose parameters stay; the last
    # layer, too, is gathered again. Each unit is reduced once.
    gathers = MICRO_BATCHES * (2 * LAYERS + 1)
    reductions = MICRO_BATCHES * (LAYERS + 1)
    assert compared["findings"] == [], compared["findings"]
    assert compared["ranks"] == RANKS and compared["measured_steps"] == RANKS, compared
    assert compared["matched"] == compared["spans"] == RANKS * (gathers + reductions), compared
    counts = {row["name"]: row["ops"] for row in compared["classes"]}
    assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers, reductions), counts
    parts = sum(part["measured_s"] for part in compared["parts"])
    assert abs(parts - compared["step_time"]["measured_s"]) < 1e-9 * parts
    units = {(row["unit"], row["phase"], row["micro_batch"]) for row in compared["segments"] if row["measured_s"] > 0}
    for unit in ["root"] + [f"model.layers.{i}" for i in range(LAYERS)]:
        for phase in ("fwd", "bwd"):
            for micro_batch in range(MICRO_BATCHES):
                assert (unit, phase, micro_batch) in units, (unit, phase, micro_batch, units)
    assert compared["memory"]["measured_peak_bytes"] > 0

    # The report says the same of the same files.
    report = json.loads(run("report", plan, *traces, "--json"))
    for key in ("parts", "segments"):
        assert report["comparison"][key] == compared[key], (key, report["comparison"][key], compared[key])
    assert report["comparison"]["measured_step_s"] == compared["step_time"]["measured_s"]
    run("report", plan, *traces, "-o", str(folder / "report.html"))
    page = (folder / "report.html").read_text()
    spans = RANKS * (gathers + reductions)
    assert f'"matched":{spans}' in page and f'"spans":{spans}' in page
    assert report["comparison"]["findings"] == []

    calibrated = json.loads(run("calibrate", *traces, "--plan", plan, "-o", str(folder / "mine.json"), "--json"))["runs"][0]
    print(f"calibrated: {calibrated}")
    assert abs(calibrated["after_s"] - calibrated["measured_s"]) < abs(calibrated["before_s"] - calibrated["measured_s"])

    # A plan that is not the one that ran: other sizes, other collectives.
    other = str(folder / "other.json")
    run("plan", *flags, "--reshard", "never", "-o", other)
    findings = json.loads(run("compare", other, *traces, "--json", code=1))["findings"]
    assert any(finding.startswith("not a run of this plan: ") and "collectives and 6 others" in finding for finding in findings), findings


with tempfile.TemporaryDirectory() as name:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    record(name)
    check(pathlib.Path(name))
print("passed")
