// Ops that move parameters and gradients between layouts, and collectives.

#include <string>

#include "core/error.h"
#include "executor/internal/binder.h"

namespace shardwright {
namespace {

std::int64_t TotalCount(std::span<const CopyRun> runs) {
  std::int64_t n = 0;
  for (const CopyRun& run : runs) {
    n += run.count;
  }
  return n;
}
std::int64_t TotalCount(const Contents& contents) {
  std::int64_t n = 0;
  for (const ShardPiece& piece : contents.pieces) {
    n += piece.count;
  }
  return n;
}

CopyRun RawRun(const std::byte* from, std::byte* to, std::int64_t bytes) {
  CopyRun run;
  run.from = from;
  run.to = to;
  run.count = bytes;
  run.from_dtype = run.to_dtype = DType::kUint8;
  return run;
}

}  // namespace

double PreDivide(std::int64_t ranks) {
  std::int64_t f = 1;
  while (ranks % f == 0 &&
         static_cast<double>(ranks) / static_cast<double>(f) > static_cast<double>(f)) {
    f *= 2;
  }
  return static_cast<double>(f);
}

// What `from` holds of the elements of `to`. Nothing may get lost on the way.
Call Binder::Matched(std::span<const Access> from, BufferId to, bool accumulate) const {
  CopyCall copy;
  std::int64_t source_count = 0;
  for (const Access& access : from) {
    const Contents& source = ContentsOf(access.buffer);
    const std::vector<CopyRun> runs =
        MatchingRuns(source, At(access.buffer), ContentsOf(to), At(to), accumulate);
    source_count += TotalCount(source);
    copy.runs.insert(copy.runs.end(), runs.begin(), runs.end());
  }
  SW_CHECK(
      TotalCount(copy.runs) == source_count || TotalCount(copy.runs) == TotalCount(ContentsOf(to)),
      "a copy into buffer " + std::to_string(to.value) + " loses elements");
  if (!accumulate) {
    const Contents& target = ContentsOf(to);
    copy.zeros = Uncovered(copy.runs, At(to), ElementsOf(to, target.dtype), target.dtype);
  }
  return copy;
}

Call Binder::BindCast(const Body& body, OpId op, const OpView& v) {
  const BufferId from = v.inputs.front().buffer;
  const BufferId to = v.outputs.front().buffer;
  const Category category = BufferOf(to).category;
  const DType p = PrecisionOf(v.unit()).param;
  if (category == Category::kUnshardedParameter && v.shape->stream == Stream::kCompute) {
    // Autocast: the parameters of the model op that reads the cast next.
    for (std::uint32_t i = op.value + 1; i < body.size(); ++i) {
      for (const Access& access : body.AccessesOf(OpId(i))) {
        if (access.buffer == to && access.role == Role::kParameter && !IsKnown(to)) {
          Set(to, layouts_.OfOp(in_.model.ops[body.ops[i].subject], false, p));
        }
      }
    }
  } else if (category == Category::kUnshardedParameter) {
    Set(to, layouts_.Unsharded(v.unit(), p));
  } else {
    Contents same = ContentsOf(from);
    same.dtype = category == Category::kAllGather ? p : PrecisionOf(v.unit()).reduce;
    Set(to, std::move(same));
  }
  return Matched(v.inputs, to, false);
}

Call Binder::BindGatherCopyIn(const OpView& v) {
  const DType p = PrecisionOf(v.unit()).param;
  const BufferId from = v.inputs.front().buffer;
  const BufferId to = v.outputs.front().buffer;
  const std::int64_t width = SizeOf(p);
  CopyCall copy;
  if (clones_.contains(from)) {
    // Slices of the unsharded buffer, gathered by a smaller group, give that buffer again.
    Set(to, layouts_.Unsharded(v.unit(), p));
    const std::int64_t bytes = BufferOf(from).size.value;
    const std::int64_t index = shard_index_ % (BufferOf(to).size.value / bytes);
    copy.runs.push_back(RawRun(At(from), At(to) + index * bytes, bytes));
    return copy;
  }
  Set(to, ShardLayoutOf(program_) == ShardLayout::kRows ? layouts_.Gathered(v.unit(), p)
                                                        : layouts_.Unsharded(v.unit(), p));
  const std::int64_t shard = program_.units[v.op->subject].shard_elements;
  const Contents mine = Slice(ContentsOf(to), shard_index_ * shard, (shard_index_ + 1) * shard);
  std::byte* data = At(to) + shard_index_ * shard * width;
  copy.runs = MatchingRuns(ContentsOf(from), At(from), mine, data, false);
  copy.zeros = Uncovered(copy.runs, data, shard, p);
  return copy;
}

Call Binder::BindGatherCopyOut(const OpView& v) {
  const BufferId to = v.outputs.front().buffer;
  Set(to, layouts_.Unsharded(v.unit(), PrecisionOf(v.unit()).param));
  return Matched(v.inputs, to, false);
}

Call Binder::BindReshardClone(const OpView& v) {
  const BufferId from = v.inputs.front().buffer;
  const BufferId to = v.outputs.front().buffer;
  const std::int64_t bytes = BufferOf(to).size.value;
  const std::int64_t index = shard_index_ % (BufferOf(from).size.value / bytes);
  clones_.insert(to);
  CopyCall copy;
  copy.runs.push_back(RawRun(At(from) + index * bytes, At(to), bytes));
  return copy;
}

// Per-op gradients into the input of a reduction, or into one flat gradient.
Call Binder::BindGradientCopy(const OpView& v) {
  if (rows_.contains(v.inputs.front().buffer)) {
    return BindRowsTogether(v);
  }
  const BufferId to = v.outputs.front().buffer;
  const Precision precision = PrecisionOf(v.unit());
  const DType dtype = v.shape->code == OpCode::kConcatGrad ? precision.param : precision.reduce;
  Set(to, layouts_.FullGradient(v.unit(), ElementsOf(to, dtype), dtype));
  return Matched(v.inputs, to, false);
}

Call Binder::BindGradStore(const OpView& v) {
  const Access& target = v.outputs.front();
  const bool accumulate = target.mode == AccessMode::kReadWrite;
  if (!accumulate) {
    Contents contents;
    std::int64_t offset = 0;
    for (const Access& access : v.inputs) {
      const Contents& source = ContentsOf(access.buffer);
      for (ShardPiece piece : source.pieces) {
        piece.shard_offset += offset;
        contents.pieces.push_back(piece);
      }
      offset += ElementsOf(access.buffer, source.dtype);
    }
    contents.dtype = WidthOf(target.buffer, offset);
    Set(target.buffer, std::move(contents));
  }
  for (const Access& access : v.inputs) {
    if (reduced_.contains(access.buffer)) {
      reduced_.insert(target.buffer);
    }
  }
  return Matched(v.inputs, target.buffer, accumulate);
}

// The gradient's chunk r goes into row r, behind the chunks of the units before.
Call Binder::BindRowBucket(const OpView& v) {
  const BufferId from = v.inputs.front().buffer;
  const BufferId bucket = v.outputs.front().buffer;
  const std::int64_t width = SizeOf(in_.job.precision.reduce);
  const std::int64_t row = BufferOf(bucket).size.value / program_.shard_size;
  const std::int64_t chunk = program_.units[v.op->subject].shard_elements * width;
  std::int64_t used = 0;
  for (const UnitId u : rows_[bucket]) {
    used += program_.units[u.value].shard_elements * width;
  }
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
  rows_[to] = rows_[bucket];
  rows_.erase(bucket);
  return copy;
}

Call Binder::BindRowScatter(const OpView& v, CollectiveCall call) {
  const std::vector<UnitId> units = rows_.at(v.inputs.front().buffer);
  rows_.erase(v.inputs.front().buffer);
  SW_CHECK(units.size() == v.outputs.size(), "a bucket's units and outputs differ");
  call.send = At(v.inputs.front().buffer);
  for (std::size_t i = 0; i < units.size(); ++i) {
    const BufferId out = v.outputs[i].buffer;
    const UnitInfo& unit = program_.units[units[i].value];
    call.parts.push_back({At(out), unit.shard_elements, call.dtype});
    Set(out, layouts_.GradientShard(units[i], shard_index_, unit.padded_elements, call.dtype));
    reduced_.insert(out);
  }
  return call;
}

Call Binder::BindBucketCopy(const OpView& v) {
  if (program_.dialect == "fairscale") {
    return BindRowBucket(v);
  }
  CopyCall copy;
  const bool into = BufferOf(v.outputs.front().buffer).category == Category::kReduceScatter;
  const BufferId bucket = into ? v.outputs.front().buffer : v.inputs.front().buffer;
  const auto shares = buckets_.find(bucket);
  SW_CHECK(shares != buckets_.end(), "a bucket that nobody empties");
  for (const Access& access : into ? v.inputs : v.outputs) {
    const auto share = shares->second.find(access.buffer);
    SW_CHECK(share != shares->second.end(), "a gradient with no place in its bucket");
    std::byte* in_bucket = At(bucket) + share->second;
    std::byte* gradient = At(access.buffer);
    const std::int64_t bytes = BufferOf(access.buffer).size.value;
    copy.runs.push_back(into ? RawRun(gradient, in_bucket, bytes)
                             : RawRun(in_bucket, gradient, bytes));
  }
  return copy;
}

Call Binder::BindTransfer(const OpView& v) {
  CopyCall copy;
  const BufferId from = v.inputs.front().buffer;
  const std::byte* source = At(from);
  if (BufferOf(from).category == Category::kInput && BufferOf(from).on_host) {
    host_inputs_ = from;
    copy.loads_inputs = true;
  }
  for (const Access& access : v.outputs) {
    const std::int64_t bytes = BufferOf(access.buffer).size.value;
    copy.runs.push_back(RawRun(source, At(access.buffer), bytes));
    source += bytes;
    if (IsKnown(from)) {
      Set(access.buffer, ContentsOf(from));
      if (std::find(copies_.begin(), copies_.end(), from) != copies_.end()) {
        zero_.arrived[access.buffer] = from;
      }
    } else if (BufferOf(from).category == Category::kOptimizerState && BufferOf(from).on_host) {
      StagePiece(v.unit(), from, access.buffer);
    }
  }
  return copy;
}

Call Binder::BindCollective(const OpView& v) {
  const OpShape& shape = *v.shape;
  const Group& group = program_.groups[shape.group.value];
  const std::int64_t index = PlaceInGroup(group, rank_).index;
  const bool is_gradient = v.op->phase == Phase::kBackward;
  CollectiveCall call;
  call.code = shape.code;
  call.group = shape.group;
  call.dtype = shape.dtype;
  call.elements = shape.bytes.value / SizeOf(shape.dtype);
  switch (shape.code) {
    case OpCode::kAllGather: {
      const BufferId to = v.outputs.front().buffer;
      call.receive = At(to);
      if (v.inputs.empty()) {
        call.send = At(to) + index * (shape.bytes.value / group.size);
      } else {
        call.send = At(v.inputs.front().buffer);
        Set(to, layouts_.Unsharded(v.unit(), shape.dtype));
      }
      return call;
    }
    case OpCode::kReduceScatter: {
      call.divisor = scales_explicitly_ ? 1.0 : static_cast<double>(group.size);
      if (rows_.contains(v.inputs.front().buffer)) {
        return BindRowScatter(v, std::move(call));
      }
      const BufferId from = v.inputs.front().buffer;
      const BufferId to = v.outputs.front().buffer;
      call.send = At(from);
      call.receive = At(to);
      Set(to, layouts_.GradientShard(v.unit(), shard_index_, call.elements, shape.dtype));
      reduced_.insert(to);
      call.zeros = NeverWritten(from);
      return call;
    }
    default: {
      const BufferId buffer = v.inputs.front().buffer;
      call.receive = At(buffer);
      call.send = At(buffer);
      call.divisor = scales_explicitly_ || !is_gradient ? 1.0 : static_cast<double>(group.size);
      reduced_.insert(buffer);
      return call;
    }
  }
}

// Weight gradients written straight into the reduction's input leave its padding, and parameters
// that backward never reached, untouched.
std::vector<ByteRange> Binder::NeverWritten(BufferId buffer) const {
  std::vector<CopyRun> runs;
  bool in_place = false;
  const Contents& contents = ContentsOf(buffer);
  for (const ShardPiece& piece : contents.pieces) {
    if (written_.contains({buffer, piece.param})) {
      in_place = true;
      CopyRun run;
      run.to = At(buffer) + piece.shard_offset * SizeOf(contents.dtype);
      run.count = piece.count;
      runs.push_back(run);
    }
  }
  return in_place ? Uncovered(runs, At(buffer), ElementsOf(buffer, contents.dtype), contents.dtype)
                  : std::vector<ByteRange>{};
}

Call Binder::BindGradScale(const OpView& v) {
  const BufferId buffer = v.inputs.front().buffer;
  const std::pair<std::uint32_t, std::uint16_t> key{v.op->subject, v.op->micro_batch};
  DivideCall call;
  const double ranks = static_cast<double>(ranks_);
  if (!reduced_.contains(buffer)) {
    call.divisor = PreDivide(ranks_);
    scaled_.insert(key);
  } else {
    call.divisor = scaled_.contains(key) ? ranks / PreDivide(ranks_) : ranks;
  }
  const DType dtype = ContentsOf(buffer).dtype;
  call.ranges.push_back({At(buffer), v.shape->bytes.value / SizeOf(dtype), dtype});
  return call;
}

Call Binder::BindAccumulate(const OpView& v) {
  const Access& target = v.outputs.front();
  if (!IsKnown(v.inputs.front().buffer)) {
    return RawSum(v);
  }
  if (target.mode == AccessMode::kWrite) {  // DDP: a fresh gradient becomes .grad
    Contents contents = ContentsOf(v.inputs.front().buffer);
    contents.dtype = in_.job.precision.master;
    Set(target.buffer, std::move(contents));
  }
  if (target.mode == AccessMode::kWrite) {
    return Matched(v.inputs, target.buffer, false);
  }
  // What only the later of two ops that share a weight has goes behind what is there.
  Contents contents = ContentsOf(target.buffer);
  const ShardPiece& last = contents.pieces.back();
  const std::byte* const end =
      At(target.buffer) + (last.shard_offset + last.count) * SizeOf(contents.dtype);
  Append(ContentsOf(v.inputs.front().buffer), contents);
  Set(target.buffer, std::move(contents));
  Call call = Matched(v.inputs, target.buffer, true);
  for (CopyRun& run : std::get<CopyCall>(call).runs) {
    run.accumulate = run.to < end;
  }
  return call;
}

// Sums of activation gradients: out += a, or out = a, then out += b.
Call Binder::RawSum(const OpView& v) const {
  const DType p = in_.job.precision.param;
  CopyCall copy;
  bool accumulate = v.outputs.front().mode == AccessMode::kReadWrite;
  for (const Access& access : v.inputs) {
    CopyRun run;
    run.from = At(access.buffer);
    run.to = At(v.outputs.front().buffer);
    run.count = v.shape->bytes.value / SizeOf(p);
    run.from_dtype = run.to_dtype = p;
    run.accumulate = accumulate;
    copy.runs.push_back(run);
    accumulate = true;
  }
  return copy;
}

}  // namespace shardwright
