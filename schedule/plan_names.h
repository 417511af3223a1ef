#pragma once

// How the choices of jobs and plans are spelled in files and flags. The i-th name belongs to the
// enumerator with value i.

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace shardwright {

using NameList = std::span<const std::string_view>;

inline constexpr std::array<std::string_view, 2> kJobModeNames = {"train", "forward"};
inline constexpr std::array<std::string_view, 7> kTrainsByNames = {
    "own", "dpo", "dpo_precomputed", "orpo", "reward", "kto", "grpo"};
inline constexpr std::array<std::string_view, 7> kOptimizerNames = {
    "sgd", "momentum", "adam", "adamw", "adadelta", "lion", "adafactor"};
inline constexpr std::array<std::string_view, 3> kOptimizerImplNames = {"foreach", "fused",
                                                                        "for_loop"};
inline constexpr std::array<std::string_view, 4> kMatrixRuleNames = {"none", "muon",
                                                                     "muon_distributed", "soap"};
inline constexpr std::array<std::string_view, 7> kStateFormatNames = {
    "master", "bnb_8bit", "bnb_8bit_paged", "bnb_32bit_paged", "ao_8bit", "ao_4bit", "fp32"};
inline constexpr std::array<std::string_view, 5> kFrozenFormatNames = {"master", "param", "int8",
                                                                       "nf4", "nf4_double"};
inline constexpr std::array<std::string_view, 7> kDialectNames = {"native", "fsdp2", "fsdp1", "ddp",
                                                                  "zero1",  "zero2", "zero3"};
inline constexpr std::array<std::string_view, 3> kTorchNames = {"2.13", "2.8", "2.6"};
inline constexpr std::array<std::string_view, 2> kReshardNames = {
    "always", "never"};  // or a number: kToGroup
inline constexpr std::array<std::string_view, 2> kGapNames = {"hold", "regather"};
inline constexpr std::array<std::string_view, 2> kRecomputeNames = {"full", "selective"};
inline constexpr std::array<std::string_view, kContextMethodCount> kContextMethodNames = {
    "gather", "ring_gather", "ring", "ulysses"};
inline constexpr std::array<std::string_view, 3> kBackwardPrefetchNames = {"pre", "post", "none"};
inline constexpr std::array<std::string_view, 3> kSyncNames = {"every", "last", "replicate_last"};
inline constexpr std::array<std::string_view, 2> kTransfersNames = {"at_once", "in_turn"};
inline constexpr std::array<std::string_view, 3> kGradientReductionNames = {"default", "all_reduce",
                                                                            "reduce_scatter"};
inline constexpr std::array<std::string_view, 3> kOverlapNames = {"default", "on", "off"};
inline constexpr std::array<std::string_view, 3> kFp8Names = {"none", "per_tensor", "per_row"};
inline constexpr std::array<std::string_view, 6> kAttentionNames = {
    "flash", "materialized", "cudnn", "flash3", "triton", "ck"};
inline constexpr std::array<std::string_view, 2> kMoeDispatchNames = {"dense", "grouped"};
// Dtypes that parameters, compute and reductions can have: the first values of DType.
inline constexpr std::array<std::string_view, 3> kTrainingDTypeNames = {"fp32", "bf16", "fp16"};

// The name of an enumerator.
template <class E>
[[nodiscard]] constexpr std::string_view NameIn(NameList names, E value) {
  return names[static_cast<std::size_t>(value)];
}

}  // namespace shardwright
