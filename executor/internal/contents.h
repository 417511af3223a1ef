#pragma once

// Which elements of which parameters (or of their gradients) a buffer holds, and where. The binder
// follows buffers through a program by this: an op that moves data from one layout to another is
// nothing but the runs in which the two overlap.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "executor/call.h"
#include "executor/shard_map.h"
#include "models/model.h"
#include "schedule/program.h"

namespace shardwright {

// `shard_offset` of a piece is its place in the buffer, in elements.
struct Contents {
  DType dtype = DType::kFp32;
  std::vector<ShardPiece> pieces;
};

// The parameter whose storage this one is.
[[nodiscard]] ParamId StorageOf(const Model& model, ParamId param);

// Where the elements of one unit lie in its buffers, under the unit's layout.
class UnitLayouts {
 public:
  UnitLayouts(const Model& model, const Program& program) : model_(model), program_(program) {}

  // Resident shard, and what is cast from it.
  [[nodiscard]] Contents Shard(UnitId unit, std::int64_t shard, DType dtype) const;
  // Shards one behind the other: what a gather of all ranks gives.
  [[nodiscard]] Contents Gathered(UnitId unit, DType dtype) const;
  // The parameters as kernels read them.
  [[nodiscard]] Contents Unsharded(UnitId unit, DType dtype) const;
  // Input and output of a reduction of `elements` gradient elements over all shards. Either all
  // parameters have room, or the trainable ones alone.
  [[nodiscard]] Contents FullGradient(UnitId unit, std::int64_t elements, DType dtype) const;
  [[nodiscard]] Contents GradientShard(UnitId unit, std::int64_t shard, std::int64_t elements,
                                       DType dtype) const;
  // The gradients of an op's trainable parameters, or all its parameters, back to back.
  [[nodiscard]] Contents OfOp(const ModelOp& op, bool trainable_only, DType dtype) const;

 private:
  [[nodiscard]] bool IsTrainable(ParamId p) const { return model_.params[p.value].trainable; }
  [[nodiscard]] const UnitInfo& Info(UnitId u) const { return program_.units[u.value]; }

  const Model& model_;
  const Program& program_;
};

// The pieces of `contents` inside elements [begin, end), moved so that `begin` is at 0.
[[nodiscard]] Contents Slice(const Contents& contents, std::int64_t begin, std::int64_t end);

// The parameters that `contents` lacks, behind those that it has; both without gaps.
void Append(const Contents& more, Contents& contents);

// Runs that fill `to` (at `to_data`) from what `from` (at `from_data`) has of it.
// O(pieces of both + runs) as long as pieces of one parameter are few.
[[nodiscard]] std::vector<CopyRun> MatchingRuns(const Contents& from, const std::byte* from_data,
                                                const Contents& to, std::byte* to_data,
                                                bool accumulate);

// What the runs leave of the elements [0, elements) of a buffer.
[[nodiscard]] std::vector<ByteRange> Uncovered(std::span<const CopyRun> runs, std::byte* data,
                                               std::int64_t elements, DType dtype);

}  // namespace shardwright
