#pragma once

// The sizes of a Llama-like decoder, read from a config and checked.

#include <cstdint>
#include <optional>
#include <vector>

#include "models/internal/decoder_row.h"
#include "models/internal/hf_config.h"
#include "models/model.h"

namespace shardwright {

inline constexpr std::int64_t kLargestHeadDim = std::int64_t{1} << 16;  // that a file may name

// Low-rank attention sizes of DeepSeek-V2 and V3.
struct LatentSizes {
  std::int64_t query_rank = 0;  // 0: queries are projected directly
  std::int64_t key_value_rank = 0;
  std::int64_t plain_dim = 0;  // head size without positions
  std::int64_t rope_dim = 0;   // head size with positions, one key for all heads
  bool bias = false;           // attention_bias: on the two down-projections
};

struct MoeSizes {
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  std::int64_t intermediate = 0;
  std::int64_t shared = 0;      // shared experts per layer
  std::vector<bool> is_sparse;  // per layer
  // Routing: experts come from `groups_per_token` of `groups` equal groups (0: from all of them).
  std::int64_t groups = 1;
  std::int64_t groups_per_token = 0;
  bool normalizes = true;  // the chosen weights sum to 1
  double factor = 0.0;     // and are multiplied by this; 0: by 1
};

struct DecoderSizes {
  CommonSizes common;
  std::int64_t tokens = 0;
  std::int64_t padding_row = -1;  // of the embedding
  std::int64_t intermediate = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  double attention_dropout = 0.0;
  double residual_dropout = 0.0;
  double attention_factor = 0.0;    // of the scores; 0: 1 / sqrt(head_dim)
  double attention_soft_cap = 0.0;  // of the scores; 0: none
  std::optional<double> soft_cap;   // of the logits
  double epsilon = 1e-6;            // of the norms
  RopeAngles angles = {};
  RopeAngles window_angles = {};  // of layers with a window
  WrittenActivation activation;
  std::vector<std::int64_t> windows;  // per layer; 0: full attention
  std::optional<LatentSizes> latent;
  std::optional<MoeSizes> moe;
};

[[nodiscard]] DecoderSizes ReadDecoderSizes(const BuildInput& input, const DecoderRow& row);

}  // namespace shardwright
