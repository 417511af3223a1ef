#pragma once

// LoRA, and the quantized base below it, as scripts around the Trainer say them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "planner/importers/run_settings.h"

namespace shardwright {

// The names that a script has for PEFT's settings, and what it takes where its file is silent.
struct AdapterKeys {
  std::string_view rank, alpha, dropout, targets, all_linear, rslora, dora, saved, double_quant;
  std::int64_t default_rank = 0;  // 0: the file has to say it
  double default_alpha = 0.0;     // 0: twice the rank
  double default_dropout = 0.0;
  bool default_double_quant = false;
};
[[nodiscard]] const AdapterKeys& AxolotlAdapters();
[[nodiscard]] const AdapterKeys& TrlAdapters();
[[nodiscard]] const AdapterKeys& LlamaFactoryAdapters();
[[nodiscard]] const AdapterKeys& PeftAdapters();  // of adapter_config.json

// The adapters of a file whose script trains some. `base`: how its weights are kept where they are
// not quantized. Throws InputError for what cannot be predicted.
[[nodiscard]] Adapters ReadAdapters(const JsonValue& root, const AdapterKeys& keys,
                                    FrozenFormat base);

// Throws InputError for quantized weights that all learn, or none.
void RefuseQuantized(const JsonValue& root);

// PEFT's pattern of module names as globs: "layers.[\d]+.(mlp|self_attn).(up|q)_proj" is four of
// them. Alternatives, optional groups, numbers, .* and \. are understood. Empty: something else is
// in it, or it stands for more than 4,096 globs. O(globs * length).
[[nodiscard]] std::vector<std::string> GlobsOfPattern(std::string_view pattern);

}  // namespace shardwright
