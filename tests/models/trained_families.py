"""The families that are fine-tuned most, for trained_families_test.py: a published configuration of each, from memory like the order
of downloads that chose them, at its full width and with few layers (all layers of a family are alike, or repeat after LAYERS)."""

from families import FAMILIES as OTHERS

LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
BERT = {"vocab_size": 30522}


def published(family, name):
    task, _, models = OTHERS[family]
    return task, name, models[name]


# family -> (task, the published model, its sizes)
TRAINED = {
    "llama": ("", "Llama-3.1-8B", {**LLAMA, "max_position_embeddings": 131072}),
    "qwen2": ("", "Qwen2.5-7B", {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                                 "num_key_value_heads": 4}),
    "qwen3": ("", "Qwen3-8B", {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                               "num_key_value_heads": 8, "head_dim": 128}),
    "mistral": ("", "Mistral-7B-v0.3", {**LLAMA, "vocab_size": 32768, "sliding_window": None}),
    "gemma2": ("", "gemma-2-2b", {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
                                  "num_key_value_heads": 4, "head_dim": 256}),
    "gemma3_text": ("", "gemma-3-1b", {"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
                                       "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}),
    "phi3": ("", "Phi-3-mini-4k", {}),
    "gpt2": ("", "gpt2-xl", {"n_embd": 1600, "n_head": 25, "n_positions": 2048}),
    "gpt_neox": ("", "pythia-1.4b", {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}),
    "opt": ("", "opt-1.3b", {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32, "word_embed_proj_dim": 2048}),
    "bloom": published("bloom", "bloom-560m"),
    "falcon": published("falcon", "falcon-7b"),
    "gptj": published("gptj", "gpt-j-6b"),
    "starcoder2": published("starcoder2", "starcoder2-3b"),
    "mixtral": ("", "Mixtral-8x7B", {**LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": ("", "Qwen3-30B-A3B", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                                        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                                        "moe_intermediate_size": 768, "norm_topk_prob": True}),
    "bert": ("masked-lm", "bert-base-uncased", BERT),
    "roberta": published("roberta", "roberta-base"),
    "xlm-roberta": published("xlm-roberta", "xlm-roberta-large"),
    "distilbert": published("distilbert", "distilbert-base-uncased"),
    "deberta-v2": published("deberta-v2", "deberta-v3-base"),
    "modernbert": published("modernbert", "ModernBERT-base"),
    "t5": ("seq2seq-lm", "t5-base", {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12}),
    "vit": ("image", "vit-base-patch16-224", {}),
    "clip": published("clip", "clip-vit-large-patch14"),
}
# Global attention in every sixth layer of Gemma 3, every third of ModernBERT; other lists of layers repeat after two.
LAYERS = {"gemma3_text": 6, "modernbert": 3}
KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
OWN_KEYS = {"bloom": "n_layer", "gptj": "n_layer", "gpt2": "n_layer", "distilbert": "n_layers", "t5": "num_layers"}
LENGTHS = (512, 256, 128)
# Within Gemma 3's window, beyond which other ops make its masks; at the tokens of CLIP's texts; ViT has its one image size.
OWN_LENGTHS = {"gemma3_text": (384, 256, 128), "clip": (77, 64, 32), "vit": (0,)}


def sizes(family):
    """Task, name and the sizes with few layers."""
    task, name, values = TRAINED[family]
    layers = LAYERS.get(family, 2)

    def cut(some):
        return {key: cut(value) if isinstance(value, dict) else layers if key in KEYS else value for key, value in some.items()}

    values = cut(values)
    if family != "clip":
        values[OWN_KEYS.get(family, "num_hidden_layers")] = layers
    return task, name, values
