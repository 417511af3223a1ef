#include "executor/internal/contents.h"

#include <map>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {

ParamId StorageOf(const Model& model, ParamId param) {
  const ParamId tied = model.params[param.value].tied_to;
  return tied.valid() ? tied : param;
}

Contents UnitLayouts::Shard(UnitId unit, std::int64_t shard, DType dtype) const {
  return {dtype, ShardPieces(model_, Info(unit), shard, Info(unit).shards)};
}

Contents UnitLayouts::Gathered(UnitId unit, DType dtype) const {
  Contents all{dtype, {}};
  for (std::int64_t r = 0; r < Info(unit).shards; ++r) {
    for (ShardPiece piece : Shard(unit, r, dtype).pieces) {
      piece.shard_offset += r * Info(unit).shard_elements;
      all.pieces.push_back(piece);
    }
  }
  return all;
}

Contents UnitLayouts::Unsharded(UnitId unit, DType dtype) const {
  Contents c{dtype, {}};
  for (const ParamSlot& slot : Info(unit).params) {
    c.pieces.push_back(
        {slot.param, 0, model_.params[slot.param.value].Elements(), slot.unsharded_offset});
  }
  return c;
}

Contents UnitLayouts::FullGradient(UnitId unit, std::int64_t elements, DType dtype) const {
  const std::int64_t shard_elements = elements / Info(unit).shards;
  Contents all{dtype, {}};
  for (std::int64_t r = 0; r < Info(unit).shards; ++r) {
    for (ShardPiece piece : GradientShard(unit, r, elements, dtype).pieces) {
      piece.shard_offset += r * shard_elements;
      all.pieces.push_back(piece);
    }
  }
  return all;
}

Contents UnitLayouts::GradientShard(UnitId unit, std::int64_t shard, std::int64_t elements,
                                    DType dtype) const {
  const UnitInfo& info = Info(unit);
  Contents kept{dtype, {}};
  if (elements == info.shard_elements * info.shards) {
    for (const ShardPiece& piece : Shard(unit, shard, dtype).pieces) {
      if (IsTrainable(piece.param)) {
        kept.pieces.push_back(piece);
      }
    }
    return kept;
  }
  // Row chunks of the trainable parameters alone, in the order of the shard.
  SW_CHECK(info.layout == ShardLayout::kRows,
           "unit " + info.name + ": gradients of another layout");
  UnitInfo trainable;
  trainable.name = info.name;
  trainable.layout = info.layout;
  for (ParamSlot slot : info.params) {
    if (IsTrainable(slot.param)) {
      slot.shard_offset = trainable.shard_elements;
      trainable.shard_elements += slot.padded_elements / Info(unit).shards;
      trainable.params.push_back(slot);
    }
  }
  SW_CHECK(trainable.shard_elements * info.shards == elements,
           "unit " + info.name + ": a reduction of " + std::to_string(elements) + " elements");
  kept.pieces = ShardPieces(model_, trainable, shard, info.shards);
  return kept;
}

Contents UnitLayouts::OfOp(const ModelOp& op, bool trainable_only, DType dtype) const {
  Contents c{dtype, {}};
  std::int64_t offset = 0;
  for (const ParamId p : op.params) {
    if (trainable_only && !IsTrainable(p)) {
      continue;
    }
    const std::int64_t n = model_.params[p.value].Elements();
    c.pieces.push_back({StorageOf(model_, p), 0, n, offset});
    offset += n;
  }
  return c;
}

Contents Slice(const Contents& contents, std::int64_t begin, std::int64_t end) {
  Contents slice{contents.dtype, {}};
  for (const ShardPiece& piece : contents.pieces) {
    const std::int64_t first = std::max(piece.shard_offset, begin);
    const std::int64_t last = std::min(piece.shard_offset + piece.count, end);
    if (first < last) {
      slice.pieces.push_back({piece.param, piece.param_begin + first - piece.shard_offset,
                              last - first, first - begin});
    }
  }
  return slice;
}

void Append(const Contents& more, Contents& contents) {
  for (ShardPiece piece : more.pieces) {
    const bool is_there = IsIn(contents.pieces, piece.param, &ShardPiece::param);
    if (!is_there) {
      piece.shard_offset = contents.pieces.empty()
                               ? 0
                               : contents.pieces.back().shard_offset + contents.pieces.back().count;
      contents.pieces.push_back(piece);
    }
  }
}

std::vector<CopyRun> MatchingRuns(const Contents& from, const std::byte* from_data,
                                  const Contents& to, std::byte* to_data, bool accumulate) {
  std::multimap<ParamId, const ShardPiece*> sources;
  for (const ShardPiece& piece : from.pieces) {
    sources.emplace(piece.param, &piece);
  }
  std::vector<CopyRun> runs;
  for (const ShardPiece& target : to.pieces) {
    const auto [begin, end] = sources.equal_range(target.param);
    for (auto it = begin; it != end; ++it) {
      const ShardPiece& source = *it->second;
      const std::int64_t first = std::max(source.param_begin, target.param_begin);
      const std::int64_t last =
          std::min(source.param_begin + source.count, target.param_begin + target.count);
      if (first >= last) {
        continue;
      }
      CopyRun run;
      run.from =
          from_data + (source.shard_offset + first - source.param_begin) * SizeOf(from.dtype);
      run.to = to_data + (target.shard_offset + first - target.param_begin) * SizeOf(to.dtype);
      run.count = last - first;
      run.from_dtype = from.dtype;
      run.to_dtype = to.dtype;
      run.accumulate = accumulate;
      runs.push_back(run);
    }
  }
  return runs;
}

std::vector<ByteRange> Uncovered(std::span<const CopyRun> runs, std::byte* data,
                                 std::int64_t elements, DType dtype) {
  std::vector<std::pair<std::int64_t, std::int64_t>> covered;  // byte ranges
  for (const CopyRun& run : runs) {
    covered.emplace_back(run.to - data, run.to - data + run.count * SizeOf(dtype));
  }
  SortAll(covered);
  std::vector<ByteRange> gaps;
  std::int64_t at = 0;
  covered.emplace_back(elements * SizeOf(dtype), elements * SizeOf(dtype));
  for (const auto& [begin, end] : covered) {
    if (begin > at) {
      gaps.push_back({data + at, begin - at});
    }
    at = std::max(at, end);
  }
  return gaps;
}

}  // namespace shardwright
