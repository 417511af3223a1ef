"""Published fine-tuning runs with adapters on few bits: does each fit as its authors found, and with which peak?

    bench/qlora.py build/shardwright [bench/published/qlora_runs.csv]

Prints a row for each run: the outcome, ours beside it, and peaks in GiB (PyTorch's reserved memory where the source says it).
Exits with 1 if a run's outcome differs. The letter that begins the flags stands for what all runs of a source share.
"""

import csv
import json
import pathlib
import subprocess
import sys
import tempfile

MLP = "gate_proj,up_proj,down_proj"
SHARED = {
    # train.py: rank 64 on all but o_proj, everything in bf16, NF4 with double quantisation, every layer recomputed.
    "A": f"--dialect fsdp2 --wrap block --kernel-set hf-eager --precision bf16+nf4_double --lora-rank 64 --lora-targets q_proj,k_proj,v_proj,{MLP} "
         "--recompute full",
    # examples/sft/run_peft_qlora_fsdp.sh
    "B": "--dialect fsdp2 --wrap block --kernel-set hf-eager --precision bf16+nf4_double --lora-rank 8 --lora-targets all-linear --recompute full",
    # SFTTrainer on a T4, which has no flash attention; the form follows the letter.
    "C": "--dialect ddp --kernel-set hf-eager --attention materialized --lora-rank 64 --lora-targets q_proj,v_proj --micro-batch 1 "
         "--accumulation 4 --precision fp16-mixed+",
    # qlora.py: rank 64 on all linear layers, pages for the states, every layer recomputed.
    "D": "--dialect ddp --kernel-set hf-eager --precision bf16-mixed+nf4_double --lora-rank 64 --lora-targets all-linear --recompute full "
         "--optimizer paged_adamw_32bit",
    # 8B_lora_single_device: rank 8 on q_proj, v_proj, o_proj and the MLP, head and loss in 8 chunks.
    "E": f"--dialect ddp --kernel-set torch-compile --lora-rank 8 --lora-targets q_proj,v_proj,o_proj,{MLP} --recompute full --loss-chunks 8",
}
# No zoo model: 01-ai/Yi-34B's config.json.
CONFIGS = {"yi-34b": {"model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60, "num_attention_heads": 56,
                      "num_key_value_heads": 8, "vocab_size": 64000}}
GIB = 1 << 30


def words(row):
    """The flags of a run."""
    letter, _, rest = row["flags"].partition(" ")
    shared = SHARED[letter]
    return (shared + rest if shared.endswith("+") else f"{shared} {rest}").split()


def predict(program, row, folder):
    """Whether the run fits, and PyTorch's reserved memory in GiB."""
    model = row["model"]
    if model in CONFIGS:
        model = folder / "config.json"
        model.write_text(json.dumps(CONFIGS[row["model"]]))
    plan = folder / "plan.json"
    command = [program, "plan", "--model", str(model), "--cluster", row["cluster"], *words(row), "-o", str(plan)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    said = subprocess.run([program, "simulate", str(plan), "--json"], capture_output=True, text=True, check=False)
    memory = json.loads(said.stdout)["memory"]
    needs = memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"]
    return needs <= memory["usable_device_bytes"], memory["peak_reserved_bytes"] / GIB


def main(arguments):
    program = str(pathlib.Path(arguments[0]).resolve())
    path = pathlib.Path(arguments[1]) if len(arguments) > 1 else pathlib.Path(__file__).parent / "published" / "qlora_runs.csv"
    agree, runs, errors = 0, 0, []
    print("| run | published | predicted | peak, GiB | predicted, GiB |\n|---|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name, path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            fits, peak = predict(program, row, pathlib.Path(name))
            ours = "fits" if fits else "oom"
            runs += 1
            agree += ours == row["outcome"]
            if row["peak_GiB"]:
                errors.append(abs(peak / float(row["peak_GiB"]) - 1))
            print(f"| {row['id']}: {row['model']}, {row['cluster']} | {row['outcome']} | {ours} | {row['peak_GiB']} | {peak:.1f} |")
    print(f"\n{agree} of {runs} as published; peaks: {len(errors)}, mean error {100 * sum(errors) / len(errors):.0f} %")
    return 0 if agree == runs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
