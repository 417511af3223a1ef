#include "executor/shard_map.h"

#include <algorithm>

#include "core/error.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// Along the dimension that CutTensor divides, here.
struct Section {
  std::int64_t begin = 0, length = 0;
};

// The one that has `index`.
Section SectionAt(const Parameter& param, std::int64_t index) {
  Section section{0, param.shape[param.tensor_dimension]};
  for (const std::int64_t length : param.tensor_sections) {
    section.length = length;
    if (index < section.begin + length) {
      break;
    }
    section.begin += length;
  }
  return section;
}

}  // namespace

std::vector<ShardPiece> ShardPieces(const Model& model, const UnitInfo& unit,
                                    std::int64_t shard_index, std::int64_t shard_count) {
  SW_CHECK(shard_index >= 0 && shard_index < shard_count, std::to_string(shard_index));
  std::vector<ShardPiece> pieces;
  const std::int64_t shard_begin = shard_index * unit.shard_elements;
  for (const ParamSlot& slot : unit.params) {
    const std::int64_t elements = model.params[slot.param.value].Elements();
    ShardPiece piece{.param = slot.param, .shard_offset = slot.shard_offset};
    std::int64_t end = 0;
    if (unit.layout == ShardLayout::kRows) {
      const std::int64_t chunk = slot.padded_elements / shard_count;
      piece.param_begin = std::min(shard_index * chunk, elements);
      end = std::min(piece.param_begin + chunk, elements);
    } else {
      piece.param_begin =
          std::clamp<std::int64_t>(shard_begin - slot.unsharded_offset, 0, elements);
      end = std::clamp<std::int64_t>(shard_begin + unit.shard_elements - slot.unsharded_offset, 0,
                                     elements);
      piece.shard_offset = slot.unsharded_offset + piece.param_begin - shard_begin;
    }
    piece.count = end - piece.param_begin;
    if (piece.count > 0) {
      pieces.push_back(piece);
    }
  }
  return pieces;
}

std::size_t StageOf(const Program& program, Rank rank) {
  return static_cast<std::size_t>(PlaceInGroup(MeshOf(program).Pipeline(), rank).index);
}

std::int64_t PartOf(const Program& program, Rank rank) {
  const Mesh mesh = MeshOf(program);
  return PlaceInGroup(mesh.tensor > 1 ? mesh.Of({Axis::kTensor}) : mesh.Experts(), rank).index;
}

std::vector<ShardPiece> InWhole(const Model& model, std::span<const ShardPiece> pieces,
                                std::int64_t part) {
  std::vector<ShardPiece> whole;
  for (const ShardPiece& piece : pieces) {
    const Parameter& param = model.params[piece.param.value];
    if (param.tensor_parts == 1) {
      whole.push_back(piece);
      continue;
    }
    // A rank's elements are those of one or all rows; a row is cut in sections.
    const std::int64_t row =
        param.tensor_dimension == 0 ? param.Elements() : param.Elements() / param.shape.front();
    const std::int64_t unit = row / param.shape[param.tensor_dimension];
    const std::int64_t end = piece.param_begin + piece.count;
    for (std::int64_t at = piece.param_begin; at < end;) {
      const Section section = SectionAt(param, at % row / unit);
      const std::int64_t begin = at / row * row + section.begin * unit;
      ShardPiece& next = whole.emplace_back(piece);
      next.param_begin = begin * param.tensor_parts + part * section.length * unit + (at - begin);
      next.shard_offset += at - piece.param_begin;
      next.count = std::min(end, begin + section.length * unit) - at;
      at += next.count;
    }
  }
  return whole;
}

}  // namespace shardwright
