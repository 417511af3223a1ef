"""Published runs whose ranks cut layers, share out experts or are the stages of a pipeline, also several each (vpp): steps and peaks, ours beside them.

    bench/meshes.py build/shardwright [--kernel-set NAME] [--csv bench/published/mesh_runs.csv]

Most runs are Megatron's, whose optimizer is sharded: FSDP2 that keeps what it gathered until the last micro-batch moves the same bytes. fp16 of A100s is taken for bf16, layers cut without sequence parallelism for those with it, which move the same bytes too; tokens go
round a ring. A model is as its source cuts it, its layers as even as they can be. Prints a row for each run, then the mean error of each source and precision. Nothing is fitted to
these rows. A blank in ac_mode: the source does not say what was recomputed, and nothing is here.
"""

import argparse
import collections
import csv
import json
import pathlib
import re
import subprocess
import tempfile

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "num_hidden_layers": 4, "num_attention_heads": 128,
         "num_key_value_heads": 16, "intermediate_size": 53248, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": False,
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
DEEPSEEK = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 4,
            "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
            "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "n_group": 8,
            "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "scoring_func": "softmax",
            "norm_topk_prob": False}
PROXY = {**LLAMA, "num_key_value_heads": 8}
MODELS = {"Llama3-405B (4-layer cut, 16 kv heads)": LLAMA, "DeepSeek-V2 (4-layer cut)": DEEPSEEK, "Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V3": "deepseek-v3",
          "Qwen3-235B-A22B": "qwen3-235b-a22b", "Llama3-70B": "llama-3-70b", "Llama3.1-405B": "llama-3.1-405b",
          "Llama3.1-405B (7-layer proxy)": {**PROXY, "num_hidden_layers": 7}, "Llama3.1-405B (21-layer proxy)": {**PROXY, "num_hidden_layers": 21}}
CLUSTERS = {("B200-180GB", 8): ["8xB200"], ("H100-80GB-SXM", 16): ["8xH100, nodes 2, nic 8x400 Gbit/s"],
            ("GB200", 256): ["gb200-nvl72", "--nodes", "4", "--gpus", "64"]}
JEAN_ZAY = "a100-80 x8, nvlink 300 GB/s, nic 4x100 Gbit/s"


WORDS = {"cp": ":ring", "pp": ":even"}  # Megatron's; NeMo's recipes have ub_tp_comm_overlap: true


def cluster_of(row):
    machine = JEAN_ZAY if "DeepSpeed" in row["framework"] else {"H": "dgx-h100", "A": "dgx-a100"}.get(row["gpu"][0])
    return CLUSTERS.get((row["gpu"], int(row["gpus"]))) or [machine, "--nodes", str(int(row["gpus"]) // 8)]


def model_of(name):
    gpt = re.fullmatch(r"GPT, (\d+) layers of (\d+), (\d+) heads, vocabulary (\d+)", name)
    if not gpt:
        return MODELS[name]
    layers, width, heads, words = map(int, gpt.groups())
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": words, "n_embd": width, "n_layer": layers, "n_head": heads,
            "n_positions": 2048, "tie_word_embeddings": False}  # the last stage has a copy


def mesh_of(row, before, between):
    """",ep=8,pp=4x2": each axis of more than one rank."""
    sizes = {axis: row[axis] + (f"x{row['vpp']}" if axis == "pp" and row["vpp"] != "1" else "") for axis in ("ep", "tp", "pp", "cp")}
    words = {**WORDS, **({"tp": ":async"} if row["framework"].startswith("NeMo (") else {})}
    return "".join(f"{before}{axis}{between}{size}{words.get(axis, '')}" for axis, size in sizes.items() if size != "1")


def kept_by_deepspeed(row, stage):
    """Bytes of a stage that FSDP2 beside sequence parallelism does not have: inputs of checkpointed layers, whole on every rank, of each micro-batch in flight
    (of which ours has 1 / tp), and the stage's 16-bit gradients, which last beside BF16_Optimizer's sums in fp32 until its next backward (pipe/engine.py)."""
    if "DeepSpeed" not in row["framework"]:
        return 0
    layers, width, _, words = map(int, re.findall(r"\d+", row["model_name"]))
    tensor, stages = int(row["tp"]), int(row["pp"])
    is_end = stage in (0, stages - 1)
    mine = (layers + 2) / stages - is_end  # embedding and head count as a layer each
    inputs = mine * min(stages - stage, int(row["grad_accum"])) * 2 * int(row["micro_batch"]) * int(row["seq_len"]) * width
    return inputs * (tensor - 1) / tensor + 2 * (mine * 12 * width**2 + is_end * words * width) / tensor


def predict(program, row, kernel_set, folder):
    """Seconds of a step and GiB allocated at most."""
    model = model_of(row["model_name"])
    if isinstance(model, dict):
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        model = folder / "config.json"
    stages, steps = int(row["pp"]), int(row["grad_accum"])
    shard = f"{int(row['gpus']) // int(row['tp']) // stages}{mesh_of(row, ',', '=')}"
    command = [program, "plan", "--no-search", "--model", model, "--cluster", *cluster_of(row), "--seq", row["seq_len"],
               "--micro-batch", row["micro_batch"], "--accumulation", str(steps), "--shard", shard, "--reshard", "step" if steps > 1 and stages == 1 else "never", "--recompute", row["ac_mode"] or "none",
               *(("--sync", "last") if steps > 1 else ()), *(("--kernel-set", kernel_set or row["kernel_set"]) if kernel_set or row["kernel_set"] else ()), "-o", folder / "plan.json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        return None, done.stderr.strip().splitlines()[-1]
    done = subprocess.run([program, "simulate", folder / "plan.json", "--json"], check=False, capture_output=True, text=True)  # 1: does not fit
    answer = json.loads(done.stdout)
    if stages == 1:
        return answer["step_time_s"], answer["memory"]["peak_allocated_bytes"] / 2**30
    peak = max(stage["peak_bytes"] + kept_by_deepspeed(row, number) for number, stage in enumerate(answer["stages"]))
    return answer["step_time_s"], peak / 2**30


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--kernel-set", default="")
    parser.add_argument("--csv", type=pathlib.Path, default=pathlib.Path(__file__).parent / "published/mesh_runs.csv")
    arguments = parser.parse_args()
    errors = collections.defaultdict(list)
    print("| run | mesh | measured | ours | error | peak GiB | ours |\n|---|---|---:|---:|---:|---:|---:|")
    with arguments.csv.open(encoding="utf-8") as text, tempfile.TemporaryDirectory() as folder:
        for row in csv.DictReader(text):
            seconds, peak = predict(arguments.program.resolve(), row, arguments.kernel_set, pathlib.Path(folder))
            if seconds is None:
                print(f"| {row['id']} | {mesh_of(row, ' ', ' ').strip()} | {float(row['step_time_s']):.3f} s | {peak} | | | |", flush=True)
                continue
            error = seconds / float(row["step_time_s"]) - 1
            mesh = mesh_of(row, " ", " ").strip()
            kind = f"{row['framework'].split(' (')[0].split(' @')[0]}, {row['compute_dtype']}, {'+'.join(mesh.split()[::2])}"
            errors[kind].append((abs(error), abs(peak / float(row["peak_mem_GiB"]) - 1) if row["peak_mem_GiB"] else None))
            print(f"| {row['id']} | {mesh} | {float(row['step_time_s']):.3f} s | {seconds:.3f} s | {100 * error:+.1f} % | {row['peak_mem_GiB']} | {peak:.1f} |")
    for kind, list_of in errors.items():
        peaks = [peak for _, peak in list_of if peak is not None]
        mean = 100 * sum(error for error, _ in list_of) / len(list_of)
        memory = f", peaks {100 * sum(peaks) / len(peaks):.1f} %" if peaks else ""
        print(f"{kind}: {len(list_of)} runs, steps {mean:.1f} %{memory}")


if __name__ == "__main__":
    main()
