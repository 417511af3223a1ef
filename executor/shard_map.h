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

// How the parameters of a unit become W shards.
enum class ShardLayout : std::uint8_t {
  kRows,  // each parameter is cut into chunks of padded_elements / W (FSDP2: whole rows; zero3)
  kFlat,  // the unit's concatenation is cut into W equal parts (FSDP1, native, zero1 and zero2,
          // DDP with W = 1)
};

// The layout of a program's dialect.
[[nodiscard]] ShardLayout ShardLayoutOf(const Program& program);

// The pieces in shard `shard_index` of `shard_count`, by ascending shard offset. Empty pieces are
// left out. O(parameters of the unit).
[[nodiscard]] std::vector<ShardPiece> ShardPieces(const Model& model, const UnitInfo& unit,
                                                  ShardLayout layout, std::int64_t shard_index,
                                                  std::int64_t shard_count);

}  // namespace shardwright
