#pragma once

// How the choices of jobs and plans are spelled in files and flags. The i-th name belongs to the
// enumerator with value i. plan_parts.json has the other names.

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "schedule/plan_parts.h"

namespace shardwright {

using NameList = std::span<const std::string_view>;

inline constexpr std::array<std::string_view, 7> kTrainsByNames = {
    "own", "dpo", "dpo_precomputed", "orpo", "reward", "kto", "grpo"};
inline constexpr std::array<std::string_view, 3> kTorchNames = {"2.13", "2.8", "2.6"};
inline constexpr std::array<std::string_view, kContextMethodCount> kContextMethodNames = {
    "gather", "ring_gather", "ring", "ulysses"};
inline constexpr std::array<std::string_view, 6> kAttentionNames = {
    "flash", "materialized", "cudnn", "flash3", "triton", "ck"};
// Dtypes that parameters, compute and reductions can have: the first values of DType.
inline constexpr std::array<std::string_view, 3> kTrainingDTypeNames = {"fp32", "bf16", "fp16"};

// The name of an enumerator.
template <class E>
[[nodiscard]] constexpr std::string_view NameIn(NameList names, E value) {
  return names[static_cast<std::size_t>(value)];
}

}  // namespace shardwright
