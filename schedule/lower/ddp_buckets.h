#pragma once

// Tells which gradients of a DDP program share a reduction: docs/lowering.md, section ddp.
//
// Example: gradients of 0.5, 0.6, 20, 10 and 3 MiB become ready in this order; the caps are 1 MiB
// and 25 MiB. The buckets are {0.5, 0.6}, {20, 10} and {3}: each is closed when it reaches its cap.

#include <cstdint>
#include <limits>
#include <vector>

#include "models/model.h"
#include "schedule/lower.h"
#include "schedule/lower/analysis.h"

namespace shardwright {

// Bytes [begin, end) of the gradients of an op, or of all ops whose first parameter is `storage`.
struct BucketPart {
  ParamId storage;
  Bytes begin, end;
};

struct BucketPlan {
  std::vector<BucketPart> parts;
  Bytes size{0};  // with zeros for parameters without a gradient
  DType dtype = DType::kFp32;
};

enum class BucketOrder : std::uint8_t {
  kReady,       // in which backward makes gradients; behind them parameters without one
  kRegistered,  // of parameters in the model; the last bucket is reduced first
};

inline constexpr Bytes kNoCap{std::numeric_limits<std::int64_t>::max()};

// Gradients in order, cut where a bucket has reached its cap: the first bucket `first`, all others
// `rest`. It may pass the cap by a tensor. O(parameters of ops).
[[nodiscard]] std::vector<BucketPlan> PlanBuckets(const LowerInput& in, const ModelAnalysis& a,
                                                  BucketOrder order, Bytes first, Bytes rest);

// The op's parameters in the order in which autograd has their gradients; `casts`: under autocast,
// or with another linear layer that has no node behind one gradient only.
[[nodiscard]] std::vector<ParamId> AsReady(const Model& model, const ModelOp& op, bool casts);

// Throws InputError: a reduction begins when every gradient of its bucket is there.
void CheckAllReachTheLoss(const Model& model, const ModelAnalysis& a);

}  // namespace shardwright
