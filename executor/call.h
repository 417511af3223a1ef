#pragma once

// What one op of a program does on one rank, with every byte it touches resolved. The binder
// (executor/binding.h) makes these records once; a device runs them step after step. Nothing here
// knows of dialects: units, layouts and padding are gone, runs of elements are left.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "core/units.h"
#include "executor/model_op.h"
#include "executor/optimizer.h"
#include "schedule/program.h"

namespace shardwright {

// `count` elements from one place to another, cast on the way; every sum is made in fp32.
struct CopyRun {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::int64_t count = 0;
  DType from_dtype = DType::kFp32;
  DType to_dtype = DType::kFp32;
  bool accumulate = false;  // add to what is there
};
struct ByteRange {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};
// Elements of one dtype at one place.
struct ElementRange {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::kFp32;
};
// Casts, copies into and out of communication buffers, sums of gradients, copies between host and
// device memory. Zeros first, then the runs in order.
struct CopyCall {
  std::vector<ByteRange> zeros;
  std::vector<CopyRun> runs;
  bool loads_inputs = false;               // a micro-batch comes from the host's input buffer
  std::vector<ElementRange> divided = {};  // by `divisor`, behind the runs
  double divisor = 1.0;
};

// Parts of an all-to-all of rows. Member k gets as many rows as the numbers [k * experts,
// (k + 1) * experts) at `sent` add up to; as many come from it as those at `came` do. The numbers
// are those of the step at hand, which the host knows when the op is issued.
struct RowParts {
  const std::int64_t* sent = nullptr;
  const std::int64_t* came = nullptr;
  std::int64_t experts = 1;  // numbers of each member
  std::int64_t row_bytes = 0;
  std::int64_t send_room = 0, receive_room = 0;  // bytes
};

// A collective over a full array of `elements`, a multiple of the group's size.
// all-gather: `send` is this rank's part, which may stand inside `receive`, where parts begin every
// `receive_stride` bytes (0: one behind the other); reduce-scatter: `send`
// is the full array, `receive` this rank's part; all-reduce: `receive` is the full array, in place.
// Reductions sum in fp32 in rank order, then divide by `divisor` once, then round to `dtype`.
// all-to-all: part k of `send` goes to member k, whose part comes as part k of `receive`; equal
// parts, or those that `rows` tells.
struct CollectiveCall {
  OpCode code = OpCode::kAllGather;
  GroupId group;
  DType dtype = DType::kFp32;
  std::int64_t elements = 0;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
  std::int64_t receive_stride = 0;
  double divisor = 1.0;
  std::vector<ByteRange> zeros;  // padding that nobody writes; of this rank, before it sends
  std::optional<RowParts> rows = {};
};

// Part `i` of `n` elements among `size` members; all-reduces need not divide evenly.
[[nodiscard]] inline std::int64_t PartBegin(std::int64_t n, std::int64_t size, std::int64_t i) {
  return n / size * i + std::min(i, n % size);
}

// data[i] /= divisor.
struct DivideCall {
  std::vector<ElementRange> ranges;
  double divisor = 1.0;
};

// One model op in one phase.
struct ModelCall {
  ModelOpCall call;
  bool is_backward = false;
  const float* loss = nullptr;  // forward of the loss: what the step reports
  std::uint32_t micro_batch = 0;
};

// First values of a unit's shard (`unit` valid) or of all non-parameter buffers.
struct InitializeCall {
  UnitId unit;
  std::int64_t part = 0;           // of the experts, that this rank has
  std::vector<ShardPiece> pieces;  // of whole parameters (InWhole)
  std::int64_t elements = 0;
  DType dtype = DType::kFp32;
  std::byte* data = nullptr;
};

// The sum of squares of the gradients, as one fp32 number. Gradients are divided first, by the
// number of accumulated micro-batches and by the loss scale; not `in_place`: only their norm is.
struct NormCall {
  std::vector<ElementRange> gradients;
  double divisor = 1.0;
  std::byte* norm = nullptr;
  bool in_place = true;
  std::vector<ElementRange> copies = {};  // likewise divided; another rank counts them
};
// Multiplies the gradients by min(1, max_norm / (sqrt(*norm) + 1e-6)), where `divides` after the
// division that the norm left out. The sums of squares of other parts are added to `norm` first.
struct ClipCall {
  std::vector<ElementRange> gradients;
  std::byte* norm = nullptr;
  std::vector<const std::byte*> other_norms = {};
  double divisor = 1.0;
  bool divides = false;
  bool decides = true;  // the step's first one: whether gradients overflowed
};

// The optimizer's update of some shards. `divisor` as in NormCall; 1 behind one.
struct UpdateCall {
  std::vector<OptimizerCall> shards;                // `ranges`, learning rate and step left open
  std::vector<std::vector<OptimizerRange>> ranges;  // by shard
  std::vector<ElementRange> gradients;
  double divisor = 1.0;
  // An update on the host clips by itself: the squares are summed over this group of host threads,
  // unless it is none.
  bool clips = false;
  GroupId clip_group;
  CopyCall casts;  // behind an update on the host, also where an overflow skipped it
};

using Call = std::variant<std::monostate, CopyCall, CollectiveCall, DivideCall, ModelCall,
                          InitializeCall, NormCall, ClipCall, UpdateCall>;

// Dynamic loss scaling of one rank, for fp16 runs: the norm of the gradients, which all
// ranks share, says whether they overflowed. Only works of the compute stream (with the optimizer
// on the host: what the host waits for) touch it, so it needs no lock.
struct ScalingState {
  bool is_on = false;
  LossScaler scaler;
  bool skips = false;        // the gradients of the step at hand overflowed
  double applied = 1.0;      // the scale of the gradients at hand, once `skips` is known
  std::int64_t skipped = 0;  // steps without an update, so far
};

// What changes from step to step. Fixed before the step's first op is issued; outlives its last.
struct StepContext {
  std::uint32_t step = 0;
  std::int64_t update = 1;  // optimizer steps of this run, this one included
  double learning_rate = 0.0;
  std::vector<float> losses;  // by micro-batch; written by the device
  // Sum of the squares of all gradients before they are clipped, where they are, on the host
  // device.
  std::optional<float> squared_norm;
  ScalingState* scaling = nullptr;

  // What each loss is multiplied by, and each gradient divided by once more than its divisor says:
  // a loop in PyTorch divides a micro-batch's loss by their number before it scales it.
  [[nodiscard]] double LossScale() const {
    const bool is_on = scaling != nullptr && scaling->is_on;
    return is_on ? scaling->scaler.scale / static_cast<double>(losses.size()) : 1.0;
  }
};

}  // namespace shardwright
