#pragma once

// One row of models/model_types.json for a Llama-like decoder: everything in which such decoders
// differ. A new one needs a row, no code.

#include <cstdint>
#include <optional>
#include <string>

#include "core/json.h"
#include "models/internal/hf_config.h"

namespace shardwright {

// Mixture-of-experts layers.
struct MoeRow {
  std::string module = "mlp";    // name of the block in the layer
  std::string block_class;       // suffix after the class prefix, "SparseMoeBlock"
  std::string intermediate_key;  // config key of one expert's intermediate size
  std::string gate_name;         // names of an expert's three matrices
  std::string up_name;
  std::string down_name;
  bool up_last = false;          // registration order gate, down, up (Mixtral's w1, w2, w3)
  bool router_first = true;      // the router is registered before the experts
  std::string shared_key;        // config key: shared experts per layer; empty: none
  std::string dense_first_key;   // config key: the first layers that are dense; empty: none
  std::string sparse_step_key;   // config key: every n-th layer is sparse; empty: all
  std::string dense_layers_key;  // config key: list of dense layers; empty: none
  bool correction_bias = false;  // the router keeps a buffer of one number per expert
  bool sigmoid = false;          // scores are sigmoids instead of a softmax
  // The chosen weights sum to 1: always, or when the config key norm_topk_prob says so.
  bool normalizes = true;
};

// Sliding-window attention.
struct WindowRow {
  std::string key;                // config key of the window in tokens
  std::string enabled_key;        // config key of a switch; empty: on whenever the window is set
  std::string global_every_key;   // config key: every n-th layer is global; empty: see below
  std::int64_t global_every = 0;  // the same fixed by the class; 0: no layer is global
};

struct DecoderRow {
  std::string class_prefix;  // "Llama": LlamaDecoderLayer, LlamaRMSNorm, ...
  bool qkv_bias = false;     // from the row, or from the config key the row names
  bool output_bias = false;
  bool mlp_bias = false;
  bool packed_projections = false;  // q, k, v are one matrix, and gate and up (Phi-3)
  bool qk_norm = false;             // RMS norms of head size on q and k
  // The rotation concatenates what it turned and what it did not, heads before tokens (Phi-3).
  bool concatenated_rotation = false;
  bool sandwich_norms = false;      // four norms per layer (Gemma 2 and 3)
  bool scaled_embedding = false;    // embeddings times sqrt(hidden) (Gemma)
  bool latent_attention = false;    // DeepSeek's low-rank q and kv
  double norm_weight_offset = 0.0;  // norms multiply by weight + 1 (Gemma)
  std::string activation_key = "hidden_act";
  std::string residual_dropout_key;  // config key: probability before residual sums; empty: none
  std::string rotary_share_key;      // config key: share of a head that is rotated; empty: all
  std::optional<WindowRow> window;
  std::optional<MoeRow> moe;
};

// Reads the row strictly: an unknown key is an error. Biases given as a config key are looked up.
[[nodiscard]] DecoderRow ReadDecoderRow(const JsonValue& row, const HfConfig& config);

}  // namespace shardwright
