"""Llamas whose layers or tokens ranks cut, trained by shardwright and, uncut, by PyTorch: equal losses.

    python3 tests/executor/torch_cuts.py SHARDWRIGHT

Clipping, a head tied to the embedding or not, biases, fewer heads of keys than of queries; 10 steps.
"""

import json
import pathlib
import sys
import tempfile

from torch_gpt import ROOT, agree, train_here, train_in_torch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, LENGTH, RATE = 10, 32, 3e-3
CONFIG = {"vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
          "intermediate_size": 80, "max_position_embeddings": 64, "rope_theta": 500.0}
# GPUs, --shard, and what the model has.
SETTINGS = [
    (1, "1", {}),
    (4, "2,tp=2", {}),
    (4, "1,tp=4", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    (2, "2,cp=2", {"attention_bias": True}),
    (4, "4,cp=4", {"tie_word_embeddings": True}),
    (4, "4,cp=2:ulysses", {}),
]


def compare(program, gpus, shard, changes):
    print(f"{gpus} GPUs, --shard {shard}, {changes}")
    config = CONFIG | changes
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
        (folder / "text").write_bytes(text)
        ours = train_here(program, folder, STEPS, LENGTH, RATE,
                          ("--cluster", f"h100-80 x{gpus}, nvlink 450 GB/s", "--shard", shard, "--micro-batch", "2", "--no-search"))
        theirs = train_in_torch(LlamaForCausalLM(LlamaConfig(**config)), folder, STEPS, LENGTH, text, RATE)
    return agree(ours, theirs) and len(ours) == STEPS and ours[-1] <= 0.95 * ours[0]


def main(arguments):
    torch.set_num_threads(1)
    program = str(pathlib.Path(arguments[0]).resolve())
    results = [compare(program, *setting) for setting in SETTINGS]
    if not all(results):
        print("FAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
