"""Bytes of packed optimizer states, quantized weights and adapters: ours and those of the libraries themselves.

    python3 tests/schedule/torch_formats.py SHARDWRIGHT

Twelve small checkpoints on the CPU. Their linear layers but the head become bitsandbytes' (4 bits, 4 bits with double
quantisation, 8 bits), PEFT puts adapters on them, with whole modules and DoRA beside them, and bitsandbytes, torchao and
Transformers (Adafactor) make their states of every parameter. What they keep
is summed by category and equals what `simulate` says of the plan, but for what every state shares: tables and step counters.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

try:
    import bitsandbytes
    import peft
    import torch
    import torchao.optim
    import transformers
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

WIDTHS = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**WIDTHS, "intermediate_size": 352, "num_key_value_heads": 2}
CHECKPOINTS = {
    "llama": DECODER,
    "llama, tied": {**DECODER, "tie_word_embeddings": True},
    "llama, odd widths": {**DECODER, "hidden_size": 120, "intermediate_size": 330, "head_dim": 30},
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": {**DECODER, "head_dim": 32},
    "gemma": {**DECODER, "head_dim": 32},
    "gpt_neox": {**WIDTHS, "intermediate_size": 352, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "opt": {**WIDTHS, "ffn_dim": 352, "word_embed_proj_dim": 128, "dropout": 0.0},
    "phi3": {**DECODER, "pad_token_id": 0},
    "olmo2": DECODER,
    "llama, wide": {**DECODER, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 1},
}
OURS = {"gpt_neox": ["embed_in", "embed_out"]}  # as before version 5
RANK = 8


def planned(program, folder, name, keys, *flags, job=None):
    """Bytes by category of a plan on one GPU, whose job has these fields, too."""
    model, plan = folder / "config.json", folder / "plan.json"
    model.write_text(json.dumps({"model_type": name.split(",")[0], **keys}))
    made = subprocess.run([program, "plan", "--model", str(model), "--cluster", "dgx-a100", "--nodes", "1", "--gpus", "1", "--seq", "64",
                           "--dialect", "ddp", "--clip", "off", *flags, "-o", str(plan)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    document = json.loads(plan.read_text())
    document["job"] |= job or {}
    plan.write_text(json.dumps(document))
    said = subprocess.run([program, "simulate", str(plan), "--json"], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["memory"]["at_peak"]


def loaded(name, keys, dtype):
    config = transformers.AutoConfig.for_model(name.split(",")[0], **keys)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def bitsandbytes_states(model, kind):
    """As the Trainer makes the optimizer: embeddings in 32 bits."""
    optimizer = kind(model.parameters())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    total = 0
    for i, p in enumerate(model.parameters()):
        if id(p) in embeddings:
            optimizer.mng.index2config[(0, i)] = {**optimizer.get_config(0, i, optimizer.param_groups[0]), "optim_bits": 32}
        optimizer.init_state(optimizer.param_groups[0], p, 0, i)
        total += sum(size(value) for key, value in optimizer.state[p].items() if torch.is_tensor(value) and "qmap" not in key)
    optimizer.mng.index2config.clear()
    return total


def adafactor_states(model):
    optimizer = transformers.optimization.Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return sum(size(value) for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value) and value.dim() > 0)


def torchao_states(model, kind):
    optimizer = kind(model.parameters())
    total = 0
    for p in model.parameters():
        for signed in (True, False):
            state = optimizer._new_buffer(p, signed)
            total += size(state.codes) + size(state.scale) if hasattr(state, "codes") else size(state)
    return total


def quantized(model, form):
    """The model with the library's layers in place of its linear ones, but the head."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if not isinstance(child, torch.nn.Linear) or child is head:
                continue
            wide, narrow, bias = child.in_features, child.out_features, child.bias is not None
            if form == "int8":
                layer = bitsandbytes.nn.Linear8bitLt(wide, narrow, bias=bias, has_fp16_weights=False)
            else:
                layer = bitsandbytes.nn.Linear4bit(wide, narrow, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4",
                                                   compress_statistics=form == "nf4_double", quant_storage=torch.bfloat16)
            layer.load_state_dict(child.state_dict())
            if bias:
                layer.bias.data = layer.bias.data.to(torch.bfloat16)
            setattr(module, key, layer.to("cpu"))
    return model


def scales(model):
    total = 0
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            total += size(module.weight.SCB)
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            total += size(state.absmax) + size(state.code)
            total += size(state.state2.absmax) + size(state.offset) if state.state2 else 0
    return total


def with_adapters(model, **more):
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM", **more)
    return peft.get_peft_model(model, config)


def agree(what, ours, theirs):
    good = ours == theirs
    print(f"{what}: {ours} bytes, the library {theirs}{'' if good else '   <<<'}")
    return good


def check_states(program, folder, name, keys):
    model = loaded(name, keys, torch.float32)
    flags = ("--precision", "fp32")
    good = True
    for word, theirs in (("adamw_bnb_8bit", bitsandbytes_states(model, bitsandbytes.optim.AdamW8bit)),
                         ("lion_8bit", bitsandbytes_states(model, bitsandbytes.optim.Lion8bit)), ("adafactor", adafactor_states(model)),
                         ("adamw_torch_8bit", torchao_states(model, torchao.optim.AdamW8bit)),
                         ("adamw_torch_4bit", torchao_states(model, torchao.optim.AdamW4bit))):
        ours = planned(program, folder, name, keys, *flags, "--optimizer", word)["optimizer_state"]
        good &= agree(f"{name}, {word}", ours, theirs)
    return good


def check_base(program, folder, name, keys, form, whole):
    model = with_adapters(quantized(loaded(name, keys, torch.bfloat16), form))
    flags = ("--precision", f"bf16-mixed+{form}", "--lora-rank", str(RANK), "--lora-targets", "all-linear")
    ours = planned(program, folder, name, keys, *flags)
    good = agree(f"{name}, {form}, weights", ours["parameter_shard"], sum(map(size, model.parameters())))
    return good & agree(f"{name}, {form}, scales", ours["model_buffer"] - whole.get("model_buffer", 0), scales(model))


def check_beside(program, folder, name, keys):
    """Whole modules and DoRA: all parameters, and AdamW's states of those that learn, in fp32."""
    good = True
    model = loaded(name, keys, torch.float32)
    ends = [next(key for key, module in model.named_modules() if module is layer).rpartition(".")[2]
            for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    for what, theirs, ours in (("whole modules", {"modules_to_save": ends}, {"lora_saved": OURS.get(name, ends)}),
                               ("DoRA", {"use_dora": True}, {"lora_magnitudes": True})):
        adapted = with_adapters(loaded(name, keys, torch.float32), **theirs)
        bytes_of = planned(program, folder, name, keys, "--precision", "fp32", "--lora-rank", str(RANK), "--lora-targets", "all-linear", job=ours)
        good &= agree(f"{name}, {what}, weights", bytes_of["parameter_shard"], sum(map(size, adapted.parameters())))
        learning = sum(size(p) for p in adapted.parameters() if p.requires_grad)
        good &= agree(f"{name}, {what}, states", bytes_of["optimizer_state"], 2 * learning)
    return good


def main(arguments):
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for checkpoint, keys in CHECKPOINTS.items():
            good &= check_states(arguments[0], folder, checkpoint, keys)
            good &= check_beside(arguments[0], folder, checkpoint, keys)
            whole = planned(arguments[0], folder, checkpoint, keys)  # buffers without scales
            for form in ("nf4", "nf4_double", "int8"):
                good &= check_base(arguments[0], folder, checkpoint, keys, form, whole)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
