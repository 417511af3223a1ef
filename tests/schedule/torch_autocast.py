"""Bytes that autograd keeps where autocast runs a model whose parameters are in fp32: ours and those of Transformers.

    python3 tests/schedule/torch_autocast.py SHARDWRIGHT

Small models of Transformers run forward on the CPU under autocast in bf16, with parameters in fp32, in bf16, and in bf16 but for
embeddings, head and norms (axolotl's). Hooks of autograd sum what is kept but parameters. What fp32 adds to bf16 equals what it adds to
our plans, in activations and in copies of weights. Buckets of DDP over parameters of both dtypes equal those of torch's own function.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

WIDTHS = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
DECODER = {**WIDTHS, "intermediate_size": 352, "num_key_value_heads": 2}
CHECKPOINTS = {
    "llama": {**DECODER, "tie_word_embeddings": False},
    "mistral": {**DECODER, "sliding_window": None},
    "qwen2": DECODER,
    "qwen3": {**DECODER, "head_dim": 32},
    "gemma": {**DECODER, "head_dim": 32},
    "phi3": {**DECODER, "pad_token_id": 0},
    "olmo2": DECODER,
    "opt": {**WIDTHS, "ffn_dim": 352, "word_embed_proj_dim": 128, "dropout": 0.0},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {**WIDTHS, "intermediate_size": 352, "hidden_dropout": 0.0, "attention_dropout": 0.0, "use_parallel_residual": False},
}
TOKENS = 1024
UPCAST = ["*norm*", "*embed_tokens*", "*lm_head*", "*embed_in*", "*embed_out*"]


def is_upcast(name):
    return any(part.strip("*") in name for part in UPCAST)


def model_of(kind, keys, dtypes):
    """The model with parameters in these dtypes: fp32, bf16 or both."""
    config = transformers.AutoConfig.for_model(kind, **keys)
    config._attn_implementation = "sdpa"
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.train()
    if dtypes != "fp32":
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                p.data = p.data.to(torch.float32 if dtypes == "both" and is_upcast(name) else torch.bfloat16)
    return model


def kept(kind, keys, dtypes):
    """Bytes kept by autograd at the end of forward: activations, and copies of weights."""
    torch.manual_seed(0)
    model = model_of(kind, keys, dtypes)
    shapes = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.t().shape if p.dim() == 2 else p.shape)}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Numbers and angles of rotary embeddings are constants; on the CPU a layer norm keeps its statistics in its input's dtype.
        is_left_out = (tensor.dim() == 4 and tensor.shape[:2] == (1, 1)) or tensor.shape[-1:] in ((), (1,))
        if not is_left_out and storage.data_ptr() not in own and storage.data_ptr() not in seen:
            is_weight = tensor.dim() == 2 and tuple(tensor.shape) in shapes
            seen[storage.data_ptr()] = (storage.nbytes(), is_weight)
            alive.append(tensor)
        return tensor

    ids = torch.randint(0, keys["vocab_size"], (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    del loss
    return sum(n for n, weight in seen.values() if not weight), sum(n for n, weight in seen.values() if weight)


def cast_biases(kind, keys):
    """Casts of biases are in the cache of autocast until forward ends, and in our plans until backward."""
    layers = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    linear = (m for m in model_of(kind, keys, "bf16").modules() if isinstance(m, layers) and m.bias is not None)
    return sum(2 * m.bias.numel() for m in linear)


def planned(program, folder, kind, keys, dtypes):
    """The same of our plan, at its peak: the end of forward, since the model is small beside its tokens."""
    config, plan = folder / "config.json", folder / "plan.json"
    config.write_text(json.dumps({"model_type": kind, **keys}))
    precision = "fp32/bf16/fp32" if dtypes == "fp32" else "bf16"
    done = subprocess.run([program, "plan", "--model", config, "--cluster", "dgx-a100", "--nodes", "1", "--gpus", "1", "--seq", str(TOKENS),
                           "--dialect", "ddp", "--kernel-set", "hf-eager", "--precision", precision, "--no-search", "-o", plan],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if dtypes == "both":
        document = json.loads(plan.read_text())
        document["job"]["fp32_masters"] = UPCAST[:1] + (UPCAST[3:] if kind == "gpt_neox" else UPCAST[1:3])  # as before version 5
        plan.write_text(json.dumps(document))
    said = subprocess.run([program, "simulate", plan, "--json"], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    memory = json.loads(said.stdout)["memory"]["at_peak"]
    return memory["activation"], memory.get("unsharded_parameter", 0)


def compare_kept(program, folder):
    wrong = 0
    for kind, keys in CHECKPOINTS.items():
        bf16, ours_bf16 = kept(kind, keys, "bf16"), planned(program, folder, kind, keys, "bf16")
        for dtypes in ("fp32", "both") if kind not in ("gpt2", "opt") else ("fp32",):  # none of theirs is upcast whole
            theirs = [a - b for a, b in zip(kept(kind, keys, dtypes), bf16)]
            ours = [a - b for a, b in zip(planned(program, folder, kind, keys, dtypes), ours_bf16)]
            ours[1] -= cast_biases(kind, keys) if dtypes == "fp32" else 0
            is_equal = theirs == ours
            wrong += not is_equal
            print(f"{kind}, {dtypes}: autograd keeps {theirs[0]} bytes more and {theirs[1]} of weights, we {ours[0]} and {ours[1]}"
                  + ("" if is_equal else " WRONG"))
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(min(1, compare_kept(sys.argv[1], pathlib.Path(name))))
