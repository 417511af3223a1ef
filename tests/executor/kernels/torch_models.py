"""Losses and gradients of small models in PyTorch and Transformers, which torch_models_test.cc compares with.

    python3 tests/executor/kernels/torch_models.py --write   # rewrites tests/data/executor/torch_models.json
    python3 tests/executor/kernels/torch_models.py           # checks that file against the installed packages

Weights, ids and images come from one formula that both sides evaluate exactly, so the file holds results only.
PyTorch computes in fp64, so that its results are the exact ones for our fp32 kernels.
"""

import json
import pathlib
import sys

try:
    import torch
    import torch.nn.functional as F
    import transformers
    from torch import nn
except ImportError:
    print("torch or transformers is not installed: skipped")
    sys.exit(77)

FILE = pathlib.Path(__file__).resolve().parents[2] / "data" / "executor" / "torch_models.json"
BATCH = 2


def mix(text):
    """FNV-1a of the text, 32 bits."""
    h = 0x811C9DC5
    for c in text.encode():
        h = (h ^ c) * 0x01000193 & 0xFFFFFFFF
    return h


def integer(name, i):
    """A number below 2^16 that depends on the name and the index."""
    h = (mix(name) + i * 0x9E3779B9) & 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return (h ^ h >> 16) >> 16


def weight(name, i):
    """In [-0.5, 0.5), a multiple of 2^-16; norms and the like are shifted by the caller."""
    return (integer(name, i) - 32768) / 65536


def tensor(name, shape):
    n = 1
    for s in shape:
        n *= s
    return torch.tensor([weight(name, i) for i in range(n)], dtype=torch.float64).reshape(shape)


def ids(name, n, limit):
    return torch.tensor([integer(name, i) % limit for i in range(n)])


def experts_of(name, shape, config):
    """Our parameter names, one per matrix of an expert, that a fused parameter of Transformers is made of."""
    base = name.rsplit(".", 1)[0]
    mixtral = config["model_type"] == "mixtral"
    if mixtral:
        base = base.replace(".mlp.", ".block_sparse_moe.")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for e in range(shape[0]):
        if name.endswith("gate_up_proj"):
            half = shape[1] // 2
            yield f"{base}.{e}.{names[0]}.weight", (e, slice(0, half))
            yield f"{base}.{e}.{names[1]}.weight", (e, slice(half, None))
        else:
            yield f"{base}.{e}.{names[2]}.weight", (e,)


# Transformers 5 renamed ViT's modules; checkpoints and our models have the old names.
VIT_NAMES = {"vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query",
             "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
             "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}


def our_parameters(model, config):
    """Pairs of our name and the view of Transformers' parameter that it is."""
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for ours, index in experts_of(name, parameter.shape, config):
                yield ours, parameter, index
        else:
            if config["model_type"] == "vit":
                for new, old in VIT_NAMES.items():
                    name = name.replace(new, old)
            if config["model_type"] == "gpt_neox":
                name = name.replace("lm_head", "embed_out")  # its name in checkpoints
            if config["model_type"] == "mixtral":
                name = name.replace(".mlp.", ".block_sparse_moe.")
            yield name, parameter, ()


def fill(model, config):
    with torch.no_grad():
        for name, parameter, index in our_parameters(model, config):
            target = parameter[index] if index else parameter
            target.copy_(tensor(name, target.shape))


def gradients(model, config):
    result = {}
    for name, parameter, index in our_parameters(model, config):
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        result[name] = (grad[index] if index else grad).flatten().tolist()
    return result


LLAMA = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "attention_dropout": 0.0,
         "pad_token_id": None}
DECODERS = {
    # Looking a padding row up gives it no gradient; a tied head does.
    "llama": dict(LLAMA, model_type="llama", tie_word_embeddings=True, pad_token_id=2),
    "llama3_rope": dict(LLAMA, model_type="llama", head_dim=8, rope_theta=50.0, attention_bias=True, mlp_bias=True,
                        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
    "mistral_window": dict(LLAMA, model_type="mistral", sliding_window=3),
    "qwen2": dict(LLAMA, model_type="qwen2", pad_token_id=-1),
    "qwen3": dict(LLAMA, model_type="qwen3", head_dim=6),
    "gemma": dict(LLAMA, model_type="gemma", head_dim=6, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": dict(LLAMA, model_type="gemma2", head_dim=6, sliding_window=3, query_pre_attn_scalar=10,
                   attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    "gemma3": dict(LLAMA, model_type="gemma3_text", head_dim=6, sliding_window=3, sliding_window_pattern=2,
                   query_pre_attn_scalar=10),
    "mixtral": dict(LLAMA, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(LLAMA, model_type="qwen3_moe", head_dim=6, num_experts=4, num_experts_per_tok=2,
                      moe_intermediate_size=5, norm_topk_prob=False),
    "deepseek_v3": dict(LLAMA, model_type="deepseek_v3", num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1,
                        num_experts_per_tok=2, moe_intermediate_size=5, first_k_dense_replace=1, q_lora_rank=6,
                        kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3, n_group=2, topk_group=1),
    "phi3": dict(LLAMA, model_type="phi3", sliding_window=3, pad_token_id=2),
    "phi3_partial_rope": dict(LLAMA, model_type="phi3", hidden_size=16, tie_word_embeddings=True,
                              partial_rotary_factor=0.5),
    "gpt2": {"model_type": "gpt2", "vocab_size": 13, "n_positions": 9, "n_embd": 8, "n_layer": 2, "n_head": 2,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"model_type": "gpt_neox", "vocab_size": 13, "hidden_size": 16, "intermediate_size": 12,
                 "num_hidden_layers": 2, "num_attention_heads": 2, "rotary_pct": 0.5, "max_position_embeddings": 64,
                 "tie_word_embeddings": False},
    "opt": {"model_type": "opt", "vocab_size": 13, "hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 9, "dropout": 0.0, "word_embed_proj_dim": 8,
            "pad_token_id": None},
}
TOKENS = 7


def run_decoder(name, config):
    hf = transformers.AutoConfig.for_model(**config)
    hf._attn_implementation = "eager"
    hf._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf).double().eval()
    fill(model, config)
    tokens = ids("tokens", BATCH * TOKENS, 13).reshape(BATCH, TOKENS)
    labels = ids("labels", BATCH * TOKENS, 13)
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    loss = F.cross_entropy(logits.reshape(-1, 13), labels)
    loss.backward()
    return loss, gradients(model, config)


def run_t5(config):
    hf = transformers.T5Config(**{k: v for k, v in config.items() if k != "model_type"})
    hf._attn_implementation = "eager"
    model = transformers.T5ForConditionalGeneration(hf).double().eval()
    if not config["tie_word_embeddings"]:  # Transformers 5 ties them all the same, checkpoints of T5 1.1 do not
        model.lm_head = nn.Linear(config["d_model"], 13, bias=False).double()
    fill(model, config)
    shape = (BATCH, TOKENS)
    logits = model(input_ids=ids("tokens", BATCH * TOKENS, 13).reshape(shape),
                   decoder_input_ids=ids("decoder", BATCH * TOKENS, 13).reshape(shape), use_cache=False).logits
    loss = F.cross_entropy(logits.reshape(-1, 13), ids("labels", BATCH * TOKENS, 13))
    loss.backward()
    return loss, gradients(model, config)


def run_bert(config):
    hf = transformers.BertConfig(**{k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    hf._attn_implementation = "eager"
    shape = (BATCH, TOKENS)
    inputs = {"input_ids": ids("tokens", BATCH * TOKENS, 13).reshape(shape),
              "token_type_ids": ids("types", BATCH * TOKENS, 2).reshape(shape)}
    if config["architectures"] == ["BertForMaskedLM"]:
        model = transformers.BertForMaskedLM(hf).double().eval()
        fill(model, config)
        loss = F.cross_entropy(model(**inputs).logits.reshape(-1, 13), ids("labels", BATCH * TOKENS, 13))
    else:
        model = transformers.BertForSequenceClassification(hf).double().eval()
        fill(model, config)
        loss = F.cross_entropy(model(**inputs).logits, ids("labels", BATCH, config["num_labels"]))
    loss.backward()
    return loss, gradients(model, config)


def run_vit(config):
    hf = transformers.ViTConfig(**{k: v for k, v in config.items() if k not in ("model_type", "architectures")})
    hf._attn_implementation = "eager"
    model = transformers.ViTForImageClassification(hf).double().eval()
    fill(model, config)
    image = tensor("features", (BATCH, 3, 8, 8))
    loss = F.cross_entropy(model(pixel_values=image).logits, ids("labels", BATCH, config["num_labels"]))
    loss.backward()
    return loss, gradients(model, config)


class ConvNet(nn.Module):
    """The layers of the tutorial's MNIST net and of a RegNet block, on small images."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 2, 1)
        self.excite = nn.Conv2d(2, 6, 1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        scale = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        x = x * torch.sigmoid(self.excite(scale))
        x = F.max_pool2d(x, 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def convnet_config():
    def module(name, cls, **params):
        return {"name": name, "class": cls, "params": [{"name": k, "shape": v} for k, v in params.items()]}

    return {
        "format": "shardwright-model", "version": 1, "class": "ConvNet",
        "inputs": {"image": {"shape": [3, 8, 8]}, "label": {"ids": 1}},
        "modules": [
            module("conv1", "Conv2d", weight=[4, 3, 3, 3], bias=[4]),
            dict(module("norm1", "BatchNorm2d", weight=[4], bias=[4]), buffers=9),
            module("conv2", "Conv2d", weight=[6, 2, 3, 3]),
            dict(module("norm2", "BatchNorm2d", weight=[6], bias=[6]), buffers=13),
            module("squeeze", "Conv2d", weight=[2, 6, 1, 1], bias=[2]),
            module("excite", "Conv2d", weight=[6, 2, 1, 1], bias=[6]),
            module("fc", "Linear", weight=[5, 24], bias=[5])],
        "ops": [
            {"op": "conv2d", "module": "conv1", "padding": 1, "inputs": ["image"], "output": "a"},
            {"op": "batch_norm", "module": "norm1", "inputs": ["a"], "output": "b"},
            {"op": "activation", "function": "relu", "inputs": ["b"], "output": "c"},
            {"op": "conv2d", "module": "conv2", "stride": 2, "padding": 1, "groups": 2, "inputs": ["c"], "output": "d"},
            {"op": "batch_norm", "module": "norm2", "inputs": ["d"], "output": "e"},
            {"op": "activation", "function": "relu", "inputs": ["e"], "output": "f"},
            {"op": "avg_pool", "global": True, "inputs": ["f"], "output": "g"},
            {"op": "conv2d", "module": "squeeze", "inputs": ["g"], "output": "h"},
            {"op": "activation", "function": "relu", "inputs": ["h"], "output": "i"},
            {"op": "conv2d", "module": "excite", "inputs": ["i"], "output": "j"},
            {"op": "activation", "function": "sigmoid", "inputs": ["j"], "output": "k"},
            {"op": "mul", "inputs": ["f", "k"], "output": "l"},
            {"op": "max_pool", "kernel": 2, "inputs": ["l"], "output": "m"},
            {"op": "flatten", "inputs": ["m"], "output": "n"},
            {"op": "linear", "module": "fc", "inputs": ["n"], "output": "o"},
            {"op": "log_softmax", "inputs": ["o"], "output": "p"},
            {"op": "nll_loss", "inputs": ["p", "label"], "output": "loss"}]}


def run_convnet():
    model = ConvNet().double().train()
    config = {"model_type": "convnet"}
    fill(model, config)
    loss = F.nll_loss(model(tensor("features", (BATCH, 3, 8, 8))), ids("labels", BATCH, 5))
    loss.backward()
    return loss, gradients(model, config)


BERT = {"model_type": "bert", "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 12, "max_position_embeddings": 9, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "pad_token_id": None}


def cases():
    for name, config in DECODERS.items():
        yield name, config, TOKENS, lambda name=name, config=config: run_decoder(name, config)
    for name, more in {"t5": {"feed_forward_proj": "relu"},
                       "t5_gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}.items():
        config = {"model_type": "t5", "vocab_size": 13, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 2,
                  "num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
                  "dropout_rate": 0.0, "n_positions": 64, "tie_word_embeddings": True, **more}
        yield name, config, TOKENS, lambda config=config: run_t5(config)
    for name, more in {"bert_mlm": {"architectures": ["BertForMaskedLM"]},
                       "bert_classifier": {"architectures": ["BertForSequenceClassification"], "num_labels": 3,
                                           "pad_token_id": 10}}.items():
        config = {**BERT, **more}
        yield name, config, TOKENS, lambda config=config: run_bert(config)
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 8,
           "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "hidden_dropout_prob": 0.0,
           "attention_probs_dropout_prob": 0.0, "image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 3}
    yield "vit", vit, 0, lambda: run_vit(vit)
    yield "convnet", convnet_config(), 0, run_convnet


def compute():
    result = []
    for name, config, tokens, run in cases():
        loss, grads = run()
        result.append({"name": name, "config": config, "tokens": tokens, "loss": loss.item(),
                       "grads": {k: [float(f"{g:.6g}") for g in v] for k, v in grads.items()}})
        print(f"{name}: loss {loss.item():.6f}, {len(grads)} parameters")
    return {"_source": f"torch {torch.__version__}, transformers {transformers.__version__}, fp64, written by "
                       "tests/executor/kernels/torch_models.py", "batch": BATCH, "models": result}


def close(a, b):
    return abs(a - b) <= 1e-7 + 1e-6 * abs(b)


def main():
    torch.manual_seed(0)
    computed = compute()
    if "--write" in sys.argv[1:]:
        lines = [json.dumps(m, separators=(",", ":")) for m in computed.pop("models")]
        text = json.dumps(computed)[:-1] + ', "models": [\n' + ",\n".join(lines) + "\n]}\n"
        FILE.write_text(text)
        return 0
    stored = json.loads(FILE.read_text())
    for a, b in zip(computed["models"], stored["models"], strict=True):
        assert a["name"] == b["name"] and close(a["loss"], b["loss"]), (a["name"], a["loss"], b["loss"])
        for fqn, grads in a["grads"].items():
            assert all(map(close, grads, b["grads"][fqn])), (a["name"], fqn)
    print("equal to the stored numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
