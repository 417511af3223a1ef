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

}  // namespace shardwright
