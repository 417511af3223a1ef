#pragma once

// Lays out the parameters of one unit under each dialect's padding rules.
//
// Example: a weight of 10 x 4 over 4 ranks under FSDP2. Each rank has ceil(10 / 4) = 3 rows, 12
// elements; the last rank's are row 9 and two rows of padding. The gathered buffer has 48 elements.

#include <cstdint>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

// Parameters of the model that a framework holds as one tensor (models/stacked_experts.h).
struct ParamStacks {
  struct Stack {
    ParamId first;              // by which the tensor goes
    std::int64_t rows = 0;      // its first dimension: the experts
    std::int64_t elements = 0;  // of all of its parameters
  };
  std::vector<Stack> stacks;
  std::vector<std::uint32_t> stack_of;  // per parameter, or kNone; empty: there are no stacks

  static constexpr std::uint32_t kNone = 0xffffffffu;

  [[nodiscard]] const Stack* Of(ParamId param) const {
    return stack_of.empty() || stack_of[param.value] == kNone ? nullptr
                                                              : &stacks[stack_of[param.value]];
  }
};

// Per kExperts op with a parameter per matrix: all gates and ups, and all downs. O(ops + params).
[[nodiscard]] ParamStacks StackExperts(const Model& model);

// FSDP2: each parameter sharded on dim 0 into ceil(d0 / W) rows per rank; every rank stores the
// padded chunk. Rank-major gather buffer. A stack is one parameter, whose rows are its experts, and
// goes by its first one. Source: PyTorch _fsdp_param.py.
[[nodiscard]] UnitInfo LayoutPerParameter(const Model& model, const ResolvedUnit& unit,
                                          std::int64_t shard_size, const ParamStacks& stacks = {});

// FSDP1: one flat parameter, pre-order. With use_orig_params each parameter starts at a multiple of
// 16 bytes of the compute dtype, and the end is padded to a multiple of W inside the flat
// parameter. Without it shards are chunks of ceil(n / W). Source: PyTorch _flat_param.py.
[[nodiscard]] UnitInfo LayoutFlat(const Model& model, const ResolvedUnit& unit,
                                  std::int64_t shard_size, bool use_orig_params, DType compute);

// Native: like FSDP1's flat parameter with 256-byte alignment of each parameter (in the compute
// dtype) and of each shard, so that gathers land in the views.
[[nodiscard]] UnitInfo LayoutNative(const Model& model, const ResolvedUnit& unit,
                                    std::int64_t shard_size, DType compute);

// Elements of one rank's shard of `elements` under the native rules.
[[nodiscard]] std::int64_t NativeShardElements(std::int64_t elements, std::int64_t shard_size,
                                               DType compute);

// ZeRO-1 and ZeRO-2: one flat buffer, trainable parameters first and padded to a multiple of 2 W,
// so that every rank's partition begins at 4 bytes; frozen ones, which every rank holds, behind
// them. Shards are partitions of the trainable part. Source: DeepSpeed stage_1_and_2.py.
[[nodiscard]] UnitInfo LayoutPartitioned(const Model& model, const ResolvedUnit& unit,
                                         std::int64_t shard_size);

// ZeRO-3: each parameter on its own, flattened and padded to a multiple of W. Rank-major gather
// buffer. Source: DeepSpeed partition_parameters.py.
[[nodiscard]] UnitInfo LayoutPerParameterFlat(const Model& model, const ResolvedUnit& unit,
                                              std::int64_t shard_size);

// DDP: no padding, no sharding; W = 1.
[[nodiscard]] UnitInfo LayoutWhole(const Model& model, const ResolvedUnit& unit);

// The trainable elements of each parameter in the fullest shard of a flat layout (the first one if
// several are); parameters without any left out. O(params * log params).
[[nodiscard]] std::vector<std::int64_t> FullestFlatShard(const Model& model, const UnitInfo& unit);

// A quantized weight of `elements` elements in rows of `row_elements`: what is gathered, and the
// scales, which every rank keeps.
struct QuantizedSize {
  Bytes packed{0};
  Bytes scales{0};
};
[[nodiscard]] QuantizedSize SizeOfQuantized(FrozenFormat format, std::int64_t elements,
                                            std::int64_t row_elements);

// Sum of the trainable parameters' padded elements.
[[nodiscard]] std::int64_t TrainablePaddedElements(const Model& model, const UnitInfo& unit);

}  // namespace shardwright
