#include "models/stacked_experts.h"

#include <algorithm>
#include <array>

namespace shardwright {

bool StacksExperts(std::string_view kernel_set) {
  constexpr std::array<std::string_view, 9> kStacks = {
      "torch-eager", "torch-compile", "deepspeed", "hf-eager",     "hf-2026",
      "hf-trainer",  "hf-foak",       "hf-liger",  "hf-liger-full"};
  return std::find(kStacks.begin(), kStacks.end(), kernel_set) != kStacks.end();
}

}  // namespace shardwright
