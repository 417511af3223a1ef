// Buffers in which gradients of several parameters or units share a reduction: what they hold is
// what the ops have put there since the reduction before.

#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/internal/binder.h"

namespace shardwright {
namespace {

// Elements up to the end of the last piece.
std::int64_t EndOf(const Contents& contents) {
  std::int64_t end = 0;
  for (const ShardPiece& piece : contents.pieces) {
    end = std::max(end, piece.shard_offset + piece.count);
  }
  return end;
}

}  // namespace

// What the sources hold, one behind the other.
Contents Binder::InOrder(std::span<const Access> from, DType dtype) const {
  Contents all{dtype, {}};
  std::int64_t offset = 0;
  for (const Access& access : from) {
    const BufferId buffer = access.buffer;
    AppendMoved(ContentsOf(buffer), offset, all);
    offset +=
        BufferOf(buffer).holds == Holds::kMixed ? EndOf(ContentsOf(buffer)) : ElementsOf(buffer);
  }
  return all;
}

// Gradients go behind what the bucket holds since its last reduction, or come out of it. A copy of
// fewer bytes than it accesses is of the last of those: an op's gradients may lie in two buckets.
Call Binder::BindBucketCopy(const OpView& v) {
  const BufferId to = v.outputs.front().buffer;
  if (BufferOf(to).holds == Holds::kRows) {
    return BindRowBucket(v);
  }
  if (BufferOf(to).holds != Holds::kMixed) {
    return MatchedAll(v);
  }
  Contents held = emptied_.erase(to) > 0 ? Contents{BufferOf(to).dtype, {}} : ContentsOf(to);
  Contents more = InOrder(v.inputs, held.dtype);
  const Access& from = v.inputs.front();
  const std::int64_t count = v.shape->bytes.value / SizeOf(held.dtype);
  if (v.inputs.size() == 1 && count < ElementsOf(from.buffer)) {
    const std::int64_t end = from.bytes.value / SizeOf(BufferOf(from.buffer).dtype);
    more = Slice(more, end - count, end);
  }
  AppendMoved(more, EndOf(held), held);
  SW_CHECK(EndOf(held) <= ElementsOf(to), "a bucket overflows");
  Set(to, std::move(held));
  return Matched(v.inputs, to, false);
}

// Each gradient is cut into W chunks; row r of the target has chunk r of each.
Call Binder::BindRowsOfChunks(const OpView& v) {
  const BufferId to = v.outputs.front().buffer;
  const std::int64_t ranks = program_.shard_size, row = ElementsOf(to) / ranks;
  Contents contents{BufferOf(to).dtype, {}};
  std::int64_t offset = 0;
  for (const ShardPiece& whole : InOrder(v.inputs, contents.dtype).pieces) {
    const std::int64_t chunk = CeilDiv(whole.count, ranks);
    for (std::int64_t i = 0; i < ranks; ++i) {
      const std::int64_t begin = std::min(i * chunk, whole.count);
      const std::int64_t end = std::min(begin + chunk, whole.count);
      if (begin < end) {
        contents.pieces.push_back({whole.param, begin, end - begin, i * row + offset});
      }
    }
    offset += chunk;
  }
  SW_CHECK(offset == row, "a reduction's rows do not hold its gradients' chunks");
  Set(to, std::move(contents));
  return MatchedAll(v);
}

// The gradient's chunk r goes into row r, behind the chunks of the units before.
Call Binder::BindRowBucket(const OpView& v) {
  const BufferId from = v.inputs.front().buffer;
  const BufferId bucket = v.outputs.front().buffer;
  const std::int64_t width = SizeOf(BufferOf(bucket).dtype);
  const std::int64_t row = BufferOf(bucket).size.value / program_.shard_size;
  const std::int64_t chunk = program_.units[v.op->subject].shard_elements * width;
  const std::int64_t used = Summed<std::int64_t>(rows_[bucket], [&](const UnitId u) {
    return program_.units[u.value].shard_elements * width;
  });
  CopyCall copy;
  for (std::int64_t r = 0; r < program_.shard_size; ++r) {
    copy.runs.push_back(RawRun(At(from) + r * chunk, At(bucket) + r * row + used, chunk));
  }
  rows_[bucket].push_back(v.unit());
  return copy;
}

// The used part of every row, row behind row.
Call Binder::BindRowsTogether(const OpView& v) {
  const BufferId bucket = v.inputs.front().buffer;
  const BufferId to = v.outputs.front().buffer;
  const std::int64_t row = BufferOf(bucket).size.value / program_.shard_size;
  const std::int64_t used = BufferOf(to).size.value / program_.shard_size;
  CopyCall copy;
  for (std::int64_t r = 0; r < program_.shard_size; ++r) {
    copy.runs.push_back(RawRun(At(bucket) + r * row, At(to) + r * used, used));
  }
  rows_[to] = std::exchange(rows_[bucket], {});
  rows_.erase(bucket);
  return copy;
}

Call Binder::BindRowScatter(const OpView& v, CollectiveCall call) {
  const std::vector<UnitId> units = rows_.at(v.inputs.front().buffer);
  rows_.erase(v.inputs.front().buffer);
  SW_CHECK(units.size() == v.outputs.size(), "a bucket's units and outputs differ");
  for (std::size_t i = 0; i < units.size(); ++i) {
    const UnitInfo& unit = program_.units[units[i].value];
    call.parts.push_back({At(v.outputs[i].buffer), unit.shard_elements, call.dtype});
  }
  return call;
}

}  // namespace shardwright
