"""Configurations that people bring, by family: published hyper-parameters from the model cards, and the same family in small.

`FAMILIES` maps a model_type to (task, small sizes, {name: published values}); values that equal the class default of transformers
are left out. The task is the word that `shardwright export --task` takes, "" where the exporter finds the class itself.
"""

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TINY, "num_key_value_heads": 2}
SHORT = {**TINY, "max_position_embeddings": 130, "pad_token_id": 1}
MOE = {**GROUPED, "moe_intermediate_size": 48}
TOWER = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}

FAMILIES = {
    "llama": ("", GROUPED, {
        "TinyLlama-1.1B": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                           "num_attention_heads": 32, "num_key_value_heads": 4},
        "SmolLM2-135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                         "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        "Yi-34B": {"vocab_size": 64000, "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60,
                   "num_attention_heads": 56, "num_key_value_heads": 8}}),
    "mistral": ("", GROUPED, {
        "Mistral-Nemo-12B": {"vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
                             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None}}),
    "qwen2": ("", GROUPED, {
        "Qwen2.5-Coder-3B": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                             "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}}),
    "bloom": ("", {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, {
        "bloom-560m": {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        "bloom-7b1": {"vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32}}),
    "falcon": ("", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, {
        "falcon-7b": {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
                      "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False},
        "falcon-40b": {"vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
                       "new_decoder_architecture": True, "bias": False, "alibi": False},
        "falcon-rw-1b": {"vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "alibi": True,
                         "bias": True, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}}),
    "gpt_oss": ("", {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, {
        "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32, "vocab_size": 201088, "hidden_size": 2880,
                        "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8}}),
    "llama4_text": ("", {**GROUPED, "head_dim": 16, "intermediate_size_mlp": 112, "num_local_experts": 4, "interleave_moe_layer_step": 1}, {
        "Llama-4-Scout-text": {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                               "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                               "num_local_experts": 16, "interleave_moe_layer_step": 1}}),
    "deepseek_v2": ("", {**MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
                         "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                         "qk_rope_head_dim": 8, "v_head_dim": 16}, {
        "DeepSeek-V2-Lite": {"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                             "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
                             "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
                             "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}}),
    "deepseek_v3": ("", {**MOE, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
                         "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
                         "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1}, {
        "Moonlight-16B-A3B": {"vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
                              "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
                              "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
                              "kv_lora_rank": 512, "n_group": 1, "topk_group": 1}}),
    "nemotron": ("", GROUPED, {
        "Minitron-8B": {"vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
                        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}}),
    "qwen2_moe": ("", {**MOE, "shared_expert_intermediate_size": 80, "num_experts": 8, "num_experts_per_tok": 2}, {
        "Qwen1.5-MoE-A2.7B": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                              "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
                              "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4}}),
    "stablelm": ("", GROUPED, {
        "stablelm-3b-4e1t": {"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
                             "num_attention_heads": 32, "num_key_value_heads": 32},
        "stablelm-2-1.6b": {"vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                            "num_attention_heads": 32, "num_key_value_heads": 32, "use_qkv_bias": True}}),
    "roberta": ("masked-lm", SHORT, {
        "roberta-base": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}}),
    "xlm-roberta": ("masked-lm", SHORT, {
        "xlm-roberta-large": {"vocab_size": 250002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                              "intermediate_size": 4096, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}}),
    "camembert": ("masked-lm", SHORT, {
        "camembert-base": {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}}),
    "electra": ("masked-lm", {**SHORT, "embedding_size": 32}, {
        "electra-base": {"vocab_size": 30522, "embedding_size": 768, "hidden_size": 768, "num_hidden_layers": 12,
                         "num_attention_heads": 12, "intermediate_size": 3072},
        "electra-small": {"vocab_size": 30522, "embedding_size": 128, "hidden_size": 256, "num_hidden_layers": 12,
                          "num_attention_heads": 4, "intermediate_size": 1024}}),
    "distilbert": ("masked-lm", {"vocab_size": 256, "dim": 64, "hidden_dim": 176, "n_layers": 2, "n_heads": 4,
                                 "max_position_embeddings": 130}, {
        "distilbert-base-uncased": {"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}}),
    "albert": ("masked-lm", {**SHORT, "embedding_size": 32}, {
        "albert-base-v2": {"vocab_size": 30000, "embedding_size": 128, "hidden_size": 768, "num_hidden_layers": 12,
                           "num_attention_heads": 12, "intermediate_size": 3072}}),
    "modernbert": ("masked-lm", {**TINY, "pad_token_id": 1, "num_hidden_layers": 4, "local_attention": 32}, {
        "ModernBERT-base": {"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
                            "num_attention_heads": 12}}),
    "deberta-v2": ("masked-lm", {**SHORT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32,
                                 "norm_rel_ebd": "layer_norm", "share_att_key": True}, {
        "deberta-v3-base": {"vocab_size": 128100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                            "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 0,
                            "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                            "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}}),
    "gptj": ("", {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}, {
        "gpt-j-6b": {"vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "n_positions": 2048}}),
    "gpt_bigcode": ("", {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, {
        "starcoderbase": {"vocab_size": 49152, "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_positions": 8192, "n_inner": 24576}}),
    "gpt_neo": ("", {"vocab_size": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                     "max_position_embeddings": 128}, {
        "gpt-neo-125m": {"vocab_size": 50257, "hidden_size": 768, "num_layers": 12, "num_heads": 12,
                         "attention_types": [[["global", "local"], 6]]}}),
    "mpt": ("", {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, {
        "mpt-7b": {"vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048, "no_bias": True,
                   "learned_pos_emb": True}}),
    "phi": ("", TINY, {
        "phi-2": {"vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "partial_rotary_factor": 0.4}}),
    "starcoder2": ("", GROUPED, {
        "starcoder2-3b": {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
                          "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096}}),
    "cohere": ("", GROUPED, {
        "c4ai-command-r-v01": {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
                               "num_attention_heads": 64, "num_key_value_heads": 64}}),
    "cohere2": ("", GROUPED, {
        "c4ai-command-r7b": {"vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096}}),
    "olmo": ("", GROUPED, {
        "OLMo-1B": {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                    "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}}),
    "olmo2": ("", GROUPED, {
        "OLMo-2-7B": {"vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 32}}),
    "olmoe": ("", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2}, {
        "OLMoE-1B-7B": {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
                        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}}),
    "granite": ("", GROUPED, {
        "granite-3.1-2b": {"vocab_size": 49155, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
                           "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
                           "attention_multiplier": 0.015625}}),
    "granitemoe": ("", {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}, {
        "granite-3.1-1b-a400m": {"vocab_size": 49155, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24,
                                 "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 32,
                                 "num_experts_per_tok": 8, "tie_word_embeddings": True}}),
    "glm": ("", {**GROUPED, "head_dim": 16, "pad_token_id": 0}, {
        "glm-4-9b-chat-hf": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                             "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}}),
    "glm4": ("", {**GROUPED, "head_dim": 16, "pad_token_id": 0}, {
        "GLM-4-9B-0414": {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
                          "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}}),
    "smollm3": ("", {**GROUPED, "pad_token_id": 0}, {
        "SmolLM3-3B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                       "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}}),
    "phimoe": ("", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, {
        "Phi-3.5-MoE": {"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
                        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
                        "attention_bias": True, "lm_head_bias": True}}),
    "seed_oss": ("", {**GROUPED, "head_dim": 16}, {
        "Seed-OSS-36B": {"vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
                         "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128}}),
    "mt5": ("seq2seq-lm", {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 176, "num_layers": 2, "num_heads": 4}, {
        "mt5-base": {"vocab_size": 250112, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}}),
    "bart": ("seq2seq-lm", {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                            "decoder_attention_heads": 4, "encoder_ffn_dim": 176, "decoder_ffn_dim": 176,
                            "max_position_embeddings": 128}, {
        "bart-base": {"vocab_size": 50265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
                      "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}}),
    "whisper": ("speech-seq2seq", {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                                   "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 176,
                                   "decoder_ffn_dim": 176, "max_source_positions": 64, "max_target_positions": 128,
                                   "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
                                   "decoder_start_token_id": 0}, {
        "whisper-small": {"vocab_size": 51865, "d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
                          "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
                          "decoder_ffn_dim": 3072}}),
    "clip": ("contrastive", {"text_config": {**TOWER, "vocab_size": 256, "max_position_embeddings": 77},
                             "vision_config": {**TOWER, "image_size": 32, "patch_size": 8}, "projection_dim": 32}, {
        "clip-vit-large-patch14": {
            "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                            "vocab_size": 49408, "max_position_embeddings": 77},
            "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                              "image_size": 224, "patch_size": 14},
            "projection_dim": 768}}),
    "siglip": ("contrastive", {"text_config": {**TOWER, "vocab_size": 256, "max_position_embeddings": 64},
                               "vision_config": {**TOWER, "image_size": 32, "patch_size": 8}}, {
        "siglip-base-patch16-224": {"text_config": {"vocab_size": 32000}, "vision_config": {"image_size": 224, "patch_size": 16}}}),
    "vit": ("image", {**TOWER, "image_size": 32, "patch_size": 8}, {
        "vit-base-patch16-384": {"image_size": 384}}),
    "deit": ("image", {**TOWER, "image_size": 32, "patch_size": 8}, {"deit-base-patch16-224": {}}),
    "dinov2": ("image", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}, {
        "dinov2-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 518, "patch_size": 14}}),
    "swin": ("image", {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, {
        "swin-tiny": {"image_size": 224, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}}),
    "convnext": ("image", {"image_size": 32, "hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2}, {"convnext-tiny": {"image_size": 224}}),
    "resnet": ("image", {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]}, {"resnet-50": {}}),
    "qwen2_vl": ("", {"text_config": GROUPED, "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}}, {
        "Qwen2-VL-2B": {"text_config": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                                        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
                        "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536},
                        "tie_word_embeddings": True}}),
    "qwen2_5_vl": ("", {"text_config": GROUPED, "vision_config": {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48,
                                                                  "out_hidden_size": 64, "fullatt_block_indexes": [1]}}, {
        "Qwen2.5-VL-7B": {"text_config": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                                          "num_attention_heads": 28, "num_key_value_heads": 4},
                          "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
                                            "out_hidden_size": 3584}}}),
    "mamba": ("", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, {
        "mamba-130m": {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}}),
    "mamba2": ("", {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16,
                    "n_groups": 2, "chunk_size": 16}, {
        "mamba2-130m": {"vocab_size": 50288, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 128, "num_heads": 24,
                        "head_dim": 64, "n_groups": 1, "tie_word_embeddings": True}}),
    "jamba": ("", {**GROUPED, "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8}, {
        "AI21-Jamba-Mini": {"vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2}}),
    "arcee": ("", GROUPED, {"AFM-4.5B": {"num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128004}}),
    "cwm": ("", {**GROUPED, "head_dim": 16}, {"cwm": {}}),
    "internlm3": ("", {**GROUPED, "head_dim": 16}, {"internlm3-8b": {}}),
    "iquestcoder": ("", {**GROUPED, "head_dim": 16}, {"IQuest-Coder-40B": {}}),
    "helium": ("", {**GROUPED, "head_dim": 16, "pad_token_id": 3}, {"helium-1-2b": {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 64000}}),
    "olmo3": ("", GROUPED, {"Olmo-3-7B": {"vocab_size": 100278}, "Olmo-3-32B": {"vocab_size": 100278, "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}}),
    "flex_olmo": ("", {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 1}, {"FlexOlmo-7x7B": {}}),
    "exaone4": ("", {**GROUPED, "num_hidden_layers": 4}, {"EXAONE-4.0-32B": {"hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}}),
    "glm4_moe": ("", {**MOE, "n_routed_experts": 8, "num_experts_per_tok": 2, "use_qk_norm": True}, {
        "GLM-4.5-Air": {"head_dim": 128}, "GLM-4.5": {"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
        "n_routed_experts": 160, "use_qk_norm": True, "head_dim": 128, "first_k_dense_replace": 3, "attention_bias": True}}),
    "solar_open": ("", {key: value for key, value in MOE.items() if key != "intermediate_size"} | {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2},
        {"Solar-Open-100B": {}}),
    "dots1": ("", {**MOE, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}, {
        "dots.llm1": {"hidden_size": 4096, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}}),
    "minimax_m2": ("", {**GROUPED, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}, {"MiniMax-M2": {}}),
    "hy_v3": ("", {**MOE, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}, {"hy-v3": {}}),
    "hyperclovax": ("", {**GROUPED, "residual_multiplier": 0.5, "logits_scaling": 8.0}, {}),
    "jais2": ("", GROUPED, {"Jais-2-8B": {}}),
    "ernie4_5": ("", {**GROUPED, "head_dim": 16}, {"ERNIE-4.5-0.3B": {}}),
    "ministral3": ("", {**GROUPED, "head_dim": 16, "pad_token_id": 11}, {"Ministral-3-8B": {}}),
    "ministral": ("", {**GROUPED, "head_dim": 16}, {"Ministral-8B": {"vocab_size": 131072, "intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}}),
    "exaone_moe": ("", {**MOE, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}, {}),
    "hunyuan_v1_dense": ("", {**GROUPED, "head_dim": 16}, {"Hunyuan-7B": {"vocab_size": 128167, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}}),
    "youtu": ("", {**TINY, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}, {"Youtu-LLM-2B": {}}),
    "glm4_moe_lite": ("", {**MOE, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}, {"GLM-4.7-Flash": {}}),
    "qwen3_next": ("", {**MOE, "num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}, {"Qwen3-Next-80B-A3B": {}}),
    "qwen3_5_text": ("", {**GROUPED, "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16}, {}),
    "glm_moe_dsa": ("", {**MOE, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}, {"GLM-5": {}}),
}
