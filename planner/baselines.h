#pragma once

// The plans that users have without planning: what the usual frameworks do when they are asked for
// nothing in particular. Each is predicted like any other plan.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "planner/evaluate.h"
#include "schedule/plan.h"
#include "schedule/problem.h"

namespace shardwright {

enum class Baseline : std::uint8_t {
  // FullyShardedDataParallel(module) with size_based_auto_wrap_policy and its 1e8 parameters.
  kFsdp1Size,
  // The same with transformer_auto_wrap_policy over the model's blocks.
  kFsdp1Transformer,
  // fully_shard as torchtitan applies it: embedding, blocks, [norm, head], root. Adam is fused.
  kTorchtitan,
  // As `accelerate config` (1.15) proposes for FSDP: version 2, reshard after forward, wrapped by
  // block, no checkpointing. It accumulates without reducing (sync_each_batch is off).
  kAccelerate,
  // DeepSpeed 0.19's ZeRO-3 with the numbers of its code.
  kZero3,
  // DistributedDataParallel(module): buckets of 1 MiB, then 25 MiB.
  kDdp,
};
inline constexpr std::array<Baseline, 6> kBaselines = {
    Baseline::kFsdp1Size,  Baseline::kFsdp1Transformer,
    Baseline::kTorchtitan, Baseline::kAccelerate,
    Baseline::kZero3,      Baseline::kDdp,
};
// "fsdp1-size", "fsdp1-transformer", "torchtitan", "accelerate", "zero3", "ddp".
[[nodiscard]] std::string_view NameOf(Baseline baseline);

// The choices that such users still make themselves.
struct UserChoice {
  std::int64_t micro_batch = 1;
  std::int64_t accumulation = 1;
  std::optional<RecomputeKind> recompute;  // of every block; kSelective keeps every second linear

  bool operator==(const UserChoice&) const = default;
};
// "none", "full" or "selective".
[[nodiscard]] std::string_view RecomputeName(const UserChoice& choice);

// The whole plan. Throws InputError where the framework's rule cannot be applied, as to a model
// without blocks.
[[nodiscard]] Plan BaselinePlan(Baseline baseline, const Model& model, std::int64_t ranks,
                                const UserChoice& choice);

// The choices that users try before they give up, for `samples` per rank and step. Micro-batches
// are powers of two that divide the samples, each without and with recomputation of the blocks.
// torchtitan also has selective recomputation, its default. Jobs that only run forward take all
// samples at once. Example: 4 samples make 1 x 4, 2 x 2 and 4 x 1, so 6 choices, and 9 of
// torchtitan.
[[nodiscard]] std::vector<UserChoice> UserChoices(Baseline baseline, JobMode mode,
                                                  std::int64_t samples);

struct BaselineResult {
  Baseline baseline = Baseline::kDdp;
  UserChoice choice;
  Plan plan;
  bool fuses_adam = false;         // in place of the job's loop over lists
  std::optional<Outcome> outcome;  // none: the rule cannot be applied
  std::string refusal;             // why there is no such plan that fits; empty: there is

  [[nodiscard]] bool Fits() const { return refusal.empty(); }
};

// Each baseline with the fastest choice that fits, or the one that misses by least. With `choice`
// set nothing else is tried, and the global batch is its own; `memory_limit` as in EvaluateOptions.
// `threads`: 0: what the machine has; the result does not depend on it. Throws InputError when the
// job's global batch is no multiple of the ranks. Once `stop` is set, what was not looked at yet
// has no outcome.
[[nodiscard]] std::vector<BaselineResult> EvaluateBaselines(
    Problem problem, std::optional<UserChoice> choice = {}, Bytes memory_limit = Bytes(0),
    int threads = 0, const std::atomic<bool>* stop = nullptr);

}  // namespace shardwright
