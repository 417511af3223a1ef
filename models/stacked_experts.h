#pragma once

// Who holds the experts of a layer in two tensors [experts, ...], gate and up in one and down in
// the other, instead of a matrix per expert and projection.

#include <string_view>

namespace shardwright {

// True for the stacks of transformers 5; false for dated ones, which had transformers 4 or another
// library's experts, and for our own executor's.
[[nodiscard]] bool StacksExperts(std::string_view kernel_set);

}  // namespace shardwright
