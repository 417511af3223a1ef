// What DeepSpeed's ZeRO does otherwise than the dialects with units: gradients of single parameters
// share a bucket in the order in which they became ready, and the weights that the model computes
// with lie beside the masters. Rules: docs/lowering.md, sections zero1, zero2 and zero3.

#include <algorithm>
#include <string>

#include "core/error.h"
#include "executor/internal/binder.h"

namespace shardwright {
namespace {

// Appends `more`, moved behind `offset` elements.
void Append(Contents& contents, const Contents& more, std::int64_t offset) {
  for (ShardPiece piece : more.pieces) {
    piece.shard_offset += offset;
    contents.pieces.push_back(piece);
  }
}

// Elements up to the end of the last piece.
std::int64_t EndOf(const Contents& contents) {
  std::int64_t end = 0;
  for (const ShardPiece& piece : contents.pieces) {
    end = std::max(end, piece.shard_offset + piece.count);
  }
  return end;
}

void AppendRuns(CopyCall& copy, const std::vector<CopyRun>& runs) {
  copy.runs.insert(copy.runs.end(), runs.begin(), runs.end());
}

}  // namespace

std::optional<Call> Binder::BindZeroOp(const OpView& v) {
  switch (v.shape->code) {
    case OpCode::kInitialize:
      if (v.outputs.empty()) {
        return std::monostate();  // the update that allocates the states changes nothing
      }
      return v.op->subject == kNoSubject ? std::nullopt : std::optional(BindZeroInitialize(v));
    case OpCode::kBucketCopy:
      return BindZeroBucketCopy(v);
    case OpCode::kCast:
      return BindZeroCast(v);
    case OpCode::kGatherCopyIn:
      return is_zero3_ ? std::optional(BindZeroGatherCopyIn(v)) : std::nullopt;
    case OpCode::kReduceCopyIn:
      return is_zero3_ ? std::optional(BindZeroReduceCopyIn(v)) : std::nullopt;
    case OpCode::kGradStore:
      return BindZeroStore(v);
    case OpCode::kGradScale:
      return BindZeroScale(v);
    case OpCode::kAllGather:
      return is_zero12_ ? std::optional(BindZeroWeightGather(v)) : std::nullopt;
    case OpCode::kAllReduce: {
      if (v.op->phase != Phase::kBackward) {
        return std::nullopt;
      }
      Call call = BindCollective(v);
      std::get<CollectiveCall>(call).divisor = ZeroDivisor(v.shape->code);
      return call;
    }
    case OpCode::kReduceScatter:
      return BindZeroScatter(v);
    default:
      return std::nullopt;
  }
}

// The weights in the compute dtype come first, then, for units with something to train, masters.
Call Binder::BindZeroInitialize(const OpView& v) {
  const UnitId unit = v.unit();
  const bool is_copy = !copies_[unit.value].valid();
  const BufferId to = v.outputs.front().buffer;
  InitializeCall call;
  call.unit = unit;
  call.data = At(to);
  call.dtype = is_copy ? in_.job.precision.param : in_.job.precision.master;
  call.elements = ElementsOf(to, call.dtype);
  Contents contents = is_copy && is_zero12_ ? layouts_.Unsharded(unit, call.dtype)
                                            : layouts_.Shard(unit, shard_index_, call.dtype);
  call.pieces = contents.pieces;
  Set(to, std::move(contents));
  (is_copy ? copies_ : shards_)[unit.value] = to;
  return call;
}

// What the sources hold, one behind the other.
Contents Binder::InOrder(std::span<const Access> from, DType dtype) const {
  Contents all{dtype, {}};
  std::int64_t offset = 0;
  for (const Access& access : from) {
    const Contents& source = ContentsOf(access.buffer);
    Append(all, source, offset);
    offset += EndOf(source);
  }
  return all;
}

// Gradients go behind what the bucket holds since its last reduction.
Call Binder::BindZeroBucketCopy(const OpView& v) {
  const BufferId bucket = v.outputs.front().buffer;
  const DType p = in_.job.precision.param;
  const bool is_empty = !IsKnown(bucket) || zero_.emptied.erase(bucket) > 0;
  Contents held = is_empty ? Contents{p, {}} : ContentsOf(bucket);
  const Contents added = InOrder(v.inputs, p);
  const std::int64_t offset = EndOf(held);
  SW_CHECK(offset + EndOf(added) <= ElementsOf(bucket, p), "a bucket overflows");
  Append(held, added, offset);
  Set(bucket, std::move(held));
  CopyCall copy;
  for (const Access& access : v.inputs) {
    AppendRuns(copy, MatchingRuns(ContentsOf(access.buffer), At(access.buffer), ContentsOf(bucket),
                                  At(bucket), false));
  }
  return copy;
}

// Buckets into the dtype of the reduction and back; after the update masters into weights, unit by
// unit.
Call Binder::BindZeroCast(const OpView& v) {
  CopyCall copy;
  if (v.op->phase == Phase::kOptimizer) {
    SW_CHECK(v.inputs.size() == v.outputs.size(), "as many casts as masters");
    for (std::size_t i = 0; i < v.inputs.size(); ++i) {
      const BufferId from = v.inputs[i].buffer, to = v.outputs[i].buffer;
      AppendRuns(copy, MatchingRuns(ContentsOf(from), At(from), ContentsOf(to), At(to), false));
    }
    return copy;
  }
  const BufferId to = v.outputs.front().buffer;
  const bool is_back = IsKnown(to) && v.inputs.size() == 1 &&
                       ContentsOf(to).pieces == ContentsOf(v.inputs.front().buffer).pieces;
  if (!is_back) {
    Set(to, InOrder(v.inputs, in_.job.precision.reduce));
  }
  for (const Access& access : v.inputs) {
    AppendRuns(copy, MatchingRuns(ContentsOf(access.buffer), At(access.buffer), ContentsOf(to),
                                  At(to), false));
    if (is_zero3_) {
      zero_.emptied.insert(access.buffer);
    }
  }
  return copy;
}

// zero3: this rank's slice of a flat gather is the partitions of its units, one behind the other.
Call Binder::BindZeroGatherCopyIn(const OpView& v) {
  const DType p = in_.job.precision.param;
  const BufferId flat = v.outputs.front().buffer;
  const std::int64_t slice = ElementsOf(flat, p) / program_.shard_size;
  Contents contents{p, {}};
  std::int64_t offset = 0;
  for (const Access& access : v.inputs) {
    const auto arrived = zero_.arrived.find(access.buffer);
    const auto owner = std::find(copies_.begin(), copies_.end(),
                                 arrived != zero_.arrived.end() ? arrived->second : access.buffer);
    SW_CHECK(owner != copies_.end(), "a gather of something else than weights");
    const UnitId unit(static_cast<std::size_t>(owner - copies_.begin()));
    for (std::int64_t r = 0; r < program_.shard_size; ++r) {
      Append(contents, layouts_.Shard(unit, r, p), r * slice + offset);
    }
    offset += program_.units[unit.value].shard_elements;
  }
  Set(flat, std::move(contents));
  const std::int64_t begin = shard_index_ * slice;
  const Contents mine = Slice(ContentsOf(flat), begin, begin + slice);
  std::byte* data = At(flat) + begin * SizeOf(p);
  CopyCall copy;
  for (const Access& access : v.inputs) {
    AppendRuns(copy, MatchingRuns(ContentsOf(access.buffer), At(access.buffer), mine, data, false));
  }
  copy.zeros = Uncovered(copy.runs, data, slice, p);
  return copy;
}

// zero3: each gradient is cut into W chunks; row r of the target has chunk r of each.
Call Binder::BindZeroReduceCopyIn(const OpView& v) {
  const DType r = in_.job.precision.reduce;
  const BufferId to = v.outputs.front().buffer;
  const std::int64_t ranks = program_.shard_size, row = ElementsOf(to, r) / ranks;
  Contents contents{r, {}};
  std::int64_t offset = 0;
  zero_.reduced.clear();
  for (const ShardPiece& whole : InOrder(v.inputs, r).pieces) {
    const std::int64_t chunk = CeilDiv(whole.count, ranks);
    for (std::int64_t i = 0; i < ranks; ++i) {
      const std::int64_t begin = std::min(i * chunk, whole.count);
      const std::int64_t end = std::min(begin + chunk, whole.count);
      if (begin < end) {
        contents.pieces.push_back({whole.param, begin, end - begin, i * row + offset});
      }
    }
    offset += chunk;
    const UnitId unit = UnitOf(whole.param);
    if (std::find(zero_.reduced.begin(), zero_.reduced.end(), unit) == zero_.reduced.end()) {
      zero_.reduced.push_back(unit);
    }
  }
  SW_CHECK(offset == row, "a reduction's rows do not hold its gradients' chunks");
  Set(to, std::move(contents));
  for (const Access& access : v.inputs) {
    zero_.emptied.insert(access.buffer);
  }
  return Matched(v.inputs, to, false);
}

// This rank's trainable elements of a unit, in the layout of its partition.
Contents Binder::ZeroGradients(UnitId unit, BufferId buffer) const {
  const std::int64_t shard = program_.units[unit.value].shard_elements;
  return layouts_.GradientShard(unit, shard_index_, shard * program_.shard_size,
                                WidthOf(buffer, shard));
}

// In backward what a reduction left goes into the partitions of its units; before the update those
// become gradients of the master dtype, unit by unit.
Call Binder::BindZeroStore(const OpView& v) {
  CopyCall copy;
  const bool in_backward = v.op->phase == Phase::kBackward;
  const bool scatters = is_zero3_ && !zero_.reduced.empty();  // several units in one op
  for (std::size_t i = 0; i < v.outputs.size(); ++i) {
    const BufferId from = v.inputs[in_backward ? 0 : i].buffer;
    const Access& target = v.outputs[i];
    if (!in_backward) {
      Set(target.buffer, {in_.job.precision.master, ContentsOf(from).pieces});
    } else if (target.mode == AccessMode::kWrite) {
      SW_CHECK(!scatters || zero_.reduced.size() == v.outputs.size(),
               "a reduction's units and outputs differ");
      Set(target.buffer, ZeroGradients(scatters ? zero_.reduced[i] : v.unit(), target.buffer));
    }
    AppendRuns(copy, MatchingRuns(ContentsOf(from), At(from), ContentsOf(target.buffer),
                                  At(target.buffer), target.mode == AccessMode::kReadWrite));
    if (in_backward && !scatters) {
      zero_.emptied.insert(from);
    }
  }
  return copy;
}

// DeepSpeed divides by the number of ranks before it sums. Here a power of two is divided off
// before and the rest behind the sum, so that sums of fp32 have the bits of every other dialect.
Call Binder::BindZeroScale(const OpView& v) {
  const BufferId buffer = v.inputs.front().buffer;
  if (!IsKnown(buffer)) {  // a bucket that nothing was copied into yet is reduced, too
    Set(buffer, {in_.job.precision.param, {}});
  }
  const DType dtype = ContentsOf(buffer).dtype;
  DivideCall call;
  call.divisor = PreDivide(ranks_);
  call.ranges.push_back({At(buffer), v.shape->bytes.value / SizeOf(dtype), dtype});
  return call;
}

Call Binder::BindZeroScatter(const OpView& v) {
  const BufferId from = v.inputs.front().buffer, to = v.outputs.front().buffer;
  CollectiveCall call;
  call.code = v.shape->code;
  call.group = v.shape->group;
  call.dtype = v.shape->dtype;
  call.elements = v.shape->bytes.value / SizeOf(call.dtype);
  call.send = At(from);
  call.receive = At(to);
  call.divisor = ZeroDivisor(call.code);
  // Row r of the input is what rank r receives.
  const std::int64_t row = call.elements / program_.shard_size;
  Set(to, Slice(ContentsOf(from), shard_index_ * row, (shard_index_ + 1) * row));
  return call;
}

double Binder::ZeroDivisor(OpCode code) const {
  const bool scatter = code == OpCode::kReduceScatter;
  const bool is_last = !scatter || program_.replicate_size == 1;
  return is_last ? static_cast<double>(ranks_) / PreDivide(ranks_) : 1.0;
}

// zero1, zero2: the next elements of every rank's partition, each part at its place among the whole
// weights.
Call Binder::BindZeroWeightGather(const OpView& v) {
  const BufferId whole = v.outputs.front().buffer;
  const DType p = in_.job.precision.param;
  const std::int64_t shard = program_.units[v.op->subject].shard_elements;
  CollectiveCall call;
  call.code = OpCode::kAllGather;
  call.group = v.shape->group;
  call.dtype = p;
  call.elements = v.shape->bytes.value / SizeOf(p);
  std::int64_t& begin = zero_.gathered[v.unit()];
  call.receive = At(whole) + begin * SizeOf(p);
  call.send = call.receive + shard_index_ * shard * SizeOf(p);
  const std::int64_t part = call.elements / program_.shard_size;
  call.receive_stride = part == shard ? 0 : shard * SizeOf(p);
  begin += part;
  return call;
}

}  // namespace shardwright
