#include "models/internal/decoder_row.h"

#include <string_view>

namespace shardwright {
namespace {

std::string TextOr(const JsonValue& row, std::string_view key, std::string fallback) {
  const std::optional<JsonValue> value = row.Find(key);
  return value ? value->AsString() : std::move(fallback);
}

bool FlagOr(const JsonValue& row, std::string_view key, bool fallback) {
  const std::optional<JsonValue> value = row.Find(key);
  return value ? value->AsBool() : fallback;
}

// true, false, or the name of the config key that decides.
bool Switch(const JsonValue& row, std::string_view key, const HfConfig& config) {
  const std::optional<JsonValue> value = row.Find(key);
  if (!value) {
    return false;
  }
  if (value->IsString()) {
    return config.Flag(value->AsString());
  }
  if (!value->IsBool()) {
    throw value->Error("true, false or the name of a config key");
  }
  return value->AsBool();
}

MoeRow ReadMoeRow(const JsonValue& row, const HfConfig& config) {
  row.AllowOnly({"module", "block_class", "intermediate_key", "gate_name", "up_name", "down_name",
                 "up_last", "router_first", "shared_key", "dense_first_key", "sparse_step_key",
                 "dense_layers_key", "correction_bias", "sigmoid", "normalizes"});
  return {.module = TextOr(row, "module", "mlp"),
          .block_class = row.At("block_class").AsString(),
          .intermediate_key = row.At("intermediate_key").AsString(),
          .gate_name = TextOr(row, "gate_name", "gate_proj"),
          .up_name = TextOr(row, "up_name", "up_proj"),
          .down_name = TextOr(row, "down_name", "down_proj"),
          .up_last = FlagOr(row, "up_last", false),
          .router_first = FlagOr(row, "router_first", true),
          .shared_key = TextOr(row, "shared_key", ""),
          .dense_first_key = TextOr(row, "dense_first_key", ""),
          .sparse_step_key = TextOr(row, "sparse_step_key", ""),
          .dense_layers_key = TextOr(row, "dense_layers_key", ""),
          .correction_bias = FlagOr(row, "correction_bias", false),
          .sigmoid = FlagOr(row, "sigmoid", false),
          .normalizes = !row.Find("normalizes") || Switch(row, "normalizes", config)};
}

WindowRow ReadWindowRow(const JsonValue& row) {
  row.AllowOnly({"key", "enabled_key", "global_every_key", "global_every"});
  const std::optional<JsonValue> every = row.Find("global_every");
  return {.key = row.At("key").AsString(),
          .enabled_key = TextOr(row, "enabled_key", ""),
          .global_every_key = TextOr(row, "global_every_key", ""),
          .global_every = every ? every->AsInt(0, ModelLimits::kLayers) : 0};
}

}  // namespace

DecoderRow ReadDecoderRow(const JsonValue& row, const HfConfig& config) {
  row.AllowOnly({"builder", "defaults", "class_prefix", "qkv_bias", "output_bias", "mlp_bias",
                 "packed_projections", "qk_norm", "sandwich_norms", "scaled_embedding",
                 "latent_attention", "norm_plus_one", "activation_key", "residual_dropout_key",
                 "rotary_share_key", "concatenated_rotation", "window", "moe"});
  DecoderRow result;
  result.class_prefix = row.At("class_prefix").AsString();
  result.qkv_bias = Switch(row, "qkv_bias", config);
  result.output_bias = Switch(row, "output_bias", config);
  result.mlp_bias = Switch(row, "mlp_bias", config);
  result.packed_projections = FlagOr(row, "packed_projections", false);
  result.qk_norm = FlagOr(row, "qk_norm", false);
  result.concatenated_rotation = FlagOr(row, "concatenated_rotation", false);
  result.sandwich_norms = FlagOr(row, "sandwich_norms", false);
  result.scaled_embedding = FlagOr(row, "scaled_embedding", false);
  result.latent_attention = FlagOr(row, "latent_attention", false);
  result.norm_weight_offset = FlagOr(row, "norm_plus_one", false) ? 1.0 : 0.0;
  result.activation_key = TextOr(row, "activation_key", "hidden_act");
  result.residual_dropout_key = TextOr(row, "residual_dropout_key", "");
  result.rotary_share_key = TextOr(row, "rotary_share_key", "");
  if (const std::optional<JsonValue> window = row.Find("window")) {
    result.window = ReadWindowRow(*window);
  }
  if (const std::optional<JsonValue> moe = row.Find("moe")) {
    result.moe = ReadMoeRow(*moe, config);
  }
  return result;
}

}  // namespace shardwright
