#pragma once

// LoRA, and the quantized base below it, as scripts around the Trainer say them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "planner/importers/run_settings.h"

namespace shardwright {

// The adapters of a file whose script trains some. `script` names the table of setting_keys.json
// ("adapters") with the script's own words and defaults for PEFT's settings; `base` is how its
// weights are kept where they are not quantized. Throws InputError for what cannot be predicted.
[[nodiscard]] Adapters ReadAdapters(const JsonValue& root, std::string_view script,
                                    FrozenFormat base);

// Of a list, or of a text with commas between them.
[[nodiscard]] std::vector<std::string> NamesIn(const JsonValue& value);

// Throws InputError for quantized weights that all learn, or none.
void RefuseQuantized(const JsonValue& root);

// PEFT's pattern of module names as globs: "layers.[\d]+.(mlp|self_attn).(up|q)_proj" is four of
// them. Alternatives, optional groups, numbers, .* and \. are understood. Empty: something else is
// in it, or it stands for more than 4,096 globs. O(globs * length).
[[nodiscard]] std::vector<std::string> GlobsOfPattern(std::string_view pattern);

}  // namespace shardwright
