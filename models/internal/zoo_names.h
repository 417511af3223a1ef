#pragma once

#include <span>
#include <string>
#include <string_view>

namespace shardwright::internal {

// The one of the zoo's `names` that a model's name on the Hugging Face hub stands for, as people
// write it: "meta-llama/Llama-3.1-8B-Instruct" is llama-3.1-8b, whose configuration has the same
// sizes. Empty: none.
[[nodiscard]] std::string ZooNameOf(std::string_view spelled, std::span<const std::string> names);

}  // namespace shardwright::internal
