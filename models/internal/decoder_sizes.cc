#include "models/internal/decoder_sizes.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

// Sliding windows per layer. `layer_types` in the config wins over the row's pattern.
std::vector<std::int64_t> ReadWindows(const HfConfig& config, const DecoderRow& row,
                                      std::int64_t layers) {
  std::vector<std::int64_t> windows(static_cast<std::size_t>(layers), 0);
  if (!row.window || (!row.window->enabled_key.empty() && !config.Flag(row.window->enabled_key))) {
    return windows;
  }
  const std::int64_t window =
      config.OptionalInt(row.window->key, 1, ModelLimits::kTokens).value_or(0);
  std::int64_t every = row.window->global_every;
  if (!row.window->global_every_key.empty()) {
    every = config.OptionalInt(row.window->global_every_key, 0, ModelLimits::kLayers).value_or(0);
  }
  const std::optional<JsonValue> types = config.Find("layer_types");
  if (types && types->size() != windows.size()) {
    throw InputError(types->path().str(), std::to_string(types->size()) + " layer types",
                     std::to_string(layers) + ", one per layer");
  }
  for (std::size_t i = 0; i < windows.size(); ++i) {
    bool is_global = every > 0 && (static_cast<std::int64_t>(i) + 1) % every == 0;
    if (types) {
      is_global = (*types)[i].AsChoice({"full_attention", "sliding_attention"}) == 0;
    }
    windows[i] = is_global ? 0 : window;
  }
  return windows;
}

std::vector<bool> ReadSparseLayers(const HfConfig& config, const MoeRow& row, std::int64_t layers) {
  std::vector<bool> is_sparse(static_cast<std::size_t>(layers), true);
  if (!row.dense_first_key.empty()) {
    const std::int64_t dense = config.Int(row.dense_first_key, 0, ModelLimits::kLayers);
    std::fill_n(is_sparse.begin(), std::min(dense, layers), false);
  }
  if (!row.sparse_step_key.empty()) {
    const std::int64_t step = config.Int(row.sparse_step_key, 1, ModelLimits::kLayers);
    for (std::int64_t i = 0; i < layers; ++i) {
      is_sparse[static_cast<std::size_t>(i)] = (i + 1) % step == 0;
    }
  }
  if (!row.dense_layers_key.empty()) {
    const std::optional<JsonValue> dense = config.Find(row.dense_layers_key);
    for (std::size_t i = 0; dense && i < dense->size(); ++i) {
      is_sparse[static_cast<std::size_t>((*dense)[i].AsInt(0, layers - 1))] = false;
    }
  }
  return is_sparse;
}

MoeSizes ReadMoeSizes(const HfConfig& config, const MoeRow& row, std::int64_t layers) {
  MoeSizes moe;
  moe.experts = config.Int("num_local_experts", 1, ModelLimits::kExperts);
  moe.experts_per_token = config.Int("num_experts_per_tok", 1, moe.experts);
  moe.intermediate = config.Int(row.intermediate_key, 1, ModelLimits::kFeatures);
  if (!row.shared_key.empty()) {
    moe.shared = config.OptionalInt(row.shared_key, 0, ModelLimits::kExperts).value_or(0);
  }
  moe.is_sparse = ReadSparseLayers(config, row, layers);
  moe.normalizes = row.normalizes;
  if (config.Find("routed_scaling_factor")) {
    moe.factor = config.Positive("routed_scaling_factor", 1.0);
  }
  moe.groups = config.OptionalInt("n_group", 1, moe.experts).value_or(1);
  if (moe.groups > 1) {
    moe.groups_per_token = config.Int("topk_group", 1, moe.groups);
    (void)DivideEvenly(config, "num_local_experts", moe.experts, "n_group", moe.groups);
  }
  // Refused here, before a parameter is made for every matrix of every expert.
  if (layers * moe.experts * 3 > ModelLimits::kParameters) {
    throw InputError(
        config.Where("num_local_experts"),
        std::to_string(moe.experts) + " experts in each of " + std::to_string(layers) + " layers",
        "at most " + std::to_string(ModelLimits::kParameters) + " expert matrices in all");
  }
  return moe;
}

// What numbers depend on and shapes do not. Requires the sizes of the heads.
void ReadNumbers(const HfConfig& config, const DecoderRow& row, DecoderSizes& s) {
  s.epsilon = config.Positive("rms_norm_eps", 1e-6);
  if (config.Find("final_logit_softcapping")) {
    s.soft_cap = config.Positive("final_logit_softcapping", 1.0);
  }
  if (config.Find("attn_logit_softcapping")) {
    s.attention_soft_cap = config.Positive("attn_logit_softcapping", 1.0);
  }
  if (config.Find("query_pre_attn_scalar")) {
    s.attention_factor = 1.0 / std::sqrt(config.Positive("query_pre_attn_scalar", 1.0));
  }
  const std::int64_t rotated = s.latent ? s.latent->rope_dim
                               : row.rotary_share_key.empty()
                                   ? s.head_dim
                                   : ReadRotaryDim(config, row.rotary_share_key, 1.0, s.head_dim);
  s.angles = ReadRopeAngles(config, "rope_theta", rotated);
  s.angles.interleaved = config.Flag("rope_interleave");
  s.window_angles = s.angles;
  if (config.Find("rope_local_base_freq")) {
    s.window_angles = {.dim = s.angles.dim, .theta = config.Positive("rope_local_base_freq", 1e4)};
  }
}

LatentSizes ReadLatentSizes(const HfConfig& config) {
  return {.query_rank = config.OptionalInt("q_lora_rank", 1, ModelLimits::kFeatures).value_or(0),
          .key_value_rank = config.Int("kv_lora_rank", 1, ModelLimits::kFeatures),
          .plain_dim = config.Int("qk_nope_head_dim", 1, kLargestHeadDim),
          .rope_dim = config.Int("qk_rope_head_dim", 1, kLargestHeadDim),
          .bias = config.Flag("attention_bias")};
}

}  // namespace

DecoderSizes ReadDecoderSizes(const BuildInput& input, const DecoderRow& row) {
  const HfConfig& config = input.config;
  DecoderSizes s;
  s.common = ReadCommonSizes(config);
  s.padding_row = ReadPaddingRow(config, s.common.vocabulary);
  s.intermediate = config.Int("intermediate_size", 1, ModelLimits::kFeatures);
  s.activation = config.ActivationOf(row.activation_key);
  s.attention_dropout = config.Probability("attention_dropout");
  if (!row.residual_dropout_key.empty()) {
    s.residual_dropout = config.Probability(row.residual_dropout_key);
  }
  s.tokens = ChooseSequenceLength(
      input, config.Int("max_position_embeddings", 1, ModelLimits::kTokens), Positions::kRelative);
  if (row.latent_attention) {
    s.latent = ReadLatentSizes(config);
    s.kv_heads = s.common.heads;
    s.head_dim = s.latent->plain_dim + s.latent->rope_dim;
    s.value_dim = config.Int("v_head_dim", 1, kLargestHeadDim);
  } else {
    s.kv_heads =
        config.OptionalInt("num_key_value_heads", 1, s.common.heads).value_or(s.common.heads);
    (void)DivideEvenly(config, "num_attention_heads", s.common.heads, "num_key_value_heads",
                       s.kv_heads);
    const std::optional<std::int64_t> head_dim = config.OptionalInt("head_dim", 1, kLargestHeadDim);
    s.head_dim = head_dim ? *head_dim
                          : DivideEvenly(config, "hidden_size", s.common.hidden,
                                         "num_attention_heads", s.common.heads);
    s.value_dim = s.head_dim;
  }
  ReadNumbers(config, row, s);
  s.windows = ReadWindows(config, row, s.common.layers);
  if (row.moe) {
    s.moe = ReadMoeSizes(config, *row.moe, s.common.layers);
  }
  return s;
}

}  // namespace shardwright
