#include "models/stacked_experts.h"

#include <array>

#include "core/ranges.h"

namespace shardwright {

bool StacksExperts(std::string_view kernel_set) {
  constexpr std::array<std::string_view, 9> kStacks = {
      "torch-eager", "torch-compile", "deepspeed", "hf-eager",     "hf-2026",
      "hf-trainer",  "hf-foak",       "hf-liger",  "hf-liger-full"};
  return IsIn(kStacks, kernel_set);
}

}  // namespace shardwright
