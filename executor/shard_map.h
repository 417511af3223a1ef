#pragma once

// Which elements of which parameters one rank's shard holds. Initialisation, the optimizer's
// parameter groups and checkpoints all need this one table.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "models/model.h"
#include "schedule/program.h"

namespace shardwright {

// Elements [param_begin, param_begin + count) of a parameter in row-major order, which lie at
// [shard_offset, shard_offset + count) of the unit's shard. Everything else in a shard is padding.
struct ShardPiece {
  ParamId param;
  std::int64_t param_begin = 0;
  std::int64_t count = 0;
  std::int64_t shard_offset = 0;

  bool operator==(const ShardPiece&) const = default;
};

// The pieces in shard `shard_index` of `shard_count`, by ascending shard offset. Empty pieces are
// left out. O(parameters of the unit).
[[nodiscard]] std::vector<ShardPiece> ShardPieces(const Model& model, const UnitInfo& unit,
                                                  std::int64_t shard_index,
                                                  std::int64_t shard_count);

// The stage of a rank in its pipeline; 0 without one.
[[nodiscard]] std::size_t StageOf(const Program& program, Rank rank);

// Which part of the layers a rank has, where ranks cut them, or of the experts, where ranks share
// them out; otherwise 0.
[[nodiscard]] std::int64_t PartOf(const Program& program, Rank rank);

// The same pieces with `param_begin` in the whole parameter, of which the rank has part `part`:
// those of parameters that are cut by columns become one piece a row.
[[nodiscard]] std::vector<ShardPiece> InWhole(const Model& model,
                                              std::span<const ShardPiece> pieces,
                                              std::int64_t part);

}  // namespace shardwright
