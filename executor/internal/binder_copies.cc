// Ops that move parameters and gradients between layouts, and collectives.

#include <string>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/internal/binder.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

std::int64_t TotalCount(std::span<const CopyRun> runs) {
  return Summed<std::int64_t>(runs, &CopyRun::count);
}
std::int64_t TotalCount(const Contents& contents) {
  return Summed<std::int64_t>(contents.pieces, &ShardPiece::count);
}

}  // namespace

void AppendCopy(const CopyCall& more, CopyCall& copy) {
  copy.runs.insert(copy.runs.end(), more.runs.begin(), more.runs.end());
  copy.zeros.insert(copy.zeros.end(), more.zeros.begin(), more.zeros.end());
}

void AppendMoved(const Contents& more, std::int64_t offset, Contents& contents) {
  for (ShardPiece piece : more.pieces) {
    piece.shard_offset += offset;
    contents.pieces.push_back(piece);
  }
}

CollectiveCall CollectiveOf(const OpShape& shape) {
  CollectiveCall call;
  call.code = shape.code;
  call.group = shape.group;
  call.dtype = shape.dtype;
  call.elements = shape.bytes.value / SizeOf(shape.dtype);
  return call;
}

CopyRun RawRun(const std::byte* from, std::byte* to, std::int64_t bytes) {
  CopyRun run;
  run.from = from;
  run.to = to;
  run.count = bytes;
  run.from_dtype = run.to_dtype = DType::kUint8;
  return run;
}

// What `from` holds of the elements of `to`. Nothing may get lost on the way, unless a rank takes
// its part of what was reduced, a bucket what goes behind what it has, or an op's gradients what
// one of their buckets has.
CopyCall Binder::Matched(std::span<const Access> from, BufferId to, bool accumulate) const {
  CopyCall copy;
  const Contents& target = ContentsOf(to);
  const Holds into = BufferOf(to).holds;
  bool is_part = into == Holds::kMixed && !accumulate;
  std::int64_t source_count = 0;
  for (const Access& access : from) {
    const Contents& source = ContentsOf(access.buffer);
    AppendCopy({{}, MatchingRuns(source, At(access.buffer), target, At(to), accumulate)}, copy);
    source_count += TotalCount(source);
    const Holds out_of = BufferOf(access.buffer).holds;
    is_part = is_part || (into == Holds::kTensors && out_of == Holds::kMixed) ||
              (into == Holds::kShard &&
               (out_of == Holds::kMixed || out_of == Holds::kTensors || out_of == Holds::kRows));
  }
  if (!is_part) {
    const std::int64_t count = TotalCount(copy.runs);
    SW_CHECK(count == source_count || count == TotalCount(target),
             "a copy into buffer " + std::to_string(to.value) + " loses elements");
    if (!accumulate) {
      copy.zeros = Uncovered(copy.runs, At(to), ElementsOf(to), target.dtype);
    }
  }
  return copy;
}

// Each output from the input at its place or, where their numbers differ, from all inputs.
CopyCall Binder::MatchedAll(const OpView& v) {
  CopyCall copy;
  const bool is_pairwise = v.inputs.size() == v.outputs.size();
  for (std::size_t i = 0; i < v.outputs.size(); ++i) {
    const Access& to = v.outputs[i];
    const std::span<const Access> from =
        is_pairwise ? std::span(v.inputs).subspan(i, 1) : std::span(v.inputs);
    const bool accumulate = to.mode == AccessMode::kReadWrite;
    if (BufferOf(to.buffer).holds == Holds::kMixed && !accumulate) {
      Set(to.buffer, InOrder(from, BufferOf(to.buffer).dtype));
    }
    AppendCopy(Matched(from, to.buffer, accumulate), copy);
  }
  for (const Access& access : v.inputs) {
    emptied_.insert(access.buffer);  // where it is a bucket
  }
  return copy;
}

// Divides what the op copies where nothing is reduced: each output, whole.
CopyCall Binder::Divided(CopyCall copy, const OpView& v) const {
  copy.divisor = v.shape->divisor;
  for (std::size_t i = 0; i < v.outputs.size() && copy.divisor != 1.0; ++i) {
    const Access& to = v.outputs[i];
    copy.divided.push_back({At(to.buffer), ElementsOf(to.buffer), BufferOf(to.buffer).dtype});
  }
  return copy;
}

// Slices of the unsharded buffer, gathered by a smaller group, give that buffer again.
CopyCall Binder::SliceCopy(BufferId whole, BufferId slice, bool into) const {
  const std::int64_t bytes = BufferOf(slice).size.value;
  const std::int64_t index = shard_index_ % (BufferOf(whole).size.value / bytes);
  std::byte* const mine = At(whole) + index * bytes;
  CopyCall copy;
  copy.runs.push_back(into ? RawRun(At(slice), mine, bytes) : RawRun(mine, At(slice), bytes));
  return copy;
}

// This rank's shard, or shards one behind the other, into its slice of what is gathered.
Call Binder::BindGatherCopyIn(const OpView& v) {
  const BufferId to = v.outputs.front().buffer;
  if (BufferOf(v.inputs.front().buffer).holds == Holds::kSlice) {
    return SliceCopy(to, v.inputs.front().buffer, true);
  }
  std::int64_t slice = program_.units[v.op->subject].shard_elements;
  if (BufferOf(to).holds == Holds::kMixed) {
    slice = ElementsOf(to) / program_.shard_size;
    GatherUnits(v.inputs, slice, to);
  }
  const std::int64_t shard = ShardOf(v.unit());
  const Contents mine = Slice(ContentsOf(to), shard * slice, (shard + 1) * slice);
  std::byte* data = At(to) + shard * slice * SizeOf(mine.dtype);
  CopyCall copy;
  for (const Access& access : v.inputs) {
    AppendCopy({{}, MatchingRuns(ContentsOf(access.buffer), At(access.buffer), mine, data, false)},
               copy);
  }
  copy.zeros = Uncovered(copy.runs, data, slice, mine.dtype);
  return copy;
}

void Binder::GatherUnits(std::span<const Access> shards, std::int64_t slice, BufferId to) {
  Contents contents{BufferOf(to).dtype, {}};
  std::int64_t offset = 0;
  for (const Access& access : shards) {
    const UnitId unit(BufferOf(access.buffer).subject);
    for (std::int64_t r = 0; r < program_.shard_size; ++r) {
      AppendMoved(layouts_.Shard(unit, r, contents.dtype), r * slice + offset, contents);
    }
    offset += program_.units[unit.value].shard_elements;
  }
  Set(to, std::move(contents));
}

Call Binder::BindReshardClone(const OpView& v) {
  return SliceCopy(v.inputs.front().buffer, v.outputs.front().buffer, false);
}

// Per-op gradients into the input of a reduction, or into one flat gradient.
Call Binder::BindGradientCopy(const OpView& v) {
  const BufferId to = v.outputs.front().buffer;
  if (BufferOf(to).holds == Holds::kRows) {
    return BindRowsOfChunks(v);
  }
  return Matched(v.inputs, to, false);
}

Call Binder::BindTransfer(const OpView& v) {
  if (v.inputs.size() > 1) {  // no other transfer has two
    return BindCounts(v);
  }
  CopyCall copy;
  const BufferId from = v.inputs.front().buffer;
  const std::byte* source = At(from);
  if (BufferOf(from).category == Category::kInput && BufferOf(from).on_host) {
    host_inputs_ = from;
    copy.loads_inputs = true;
  }
  const std::vector<View> inputs = copy.loads_inputs ? InputViews() : std::vector<View>();
  for (const Access& access : v.outputs) {
    if (copy.loads_inputs) {
      source = static_cast<const std::byte*>(inputs[access.index].data);
    }
    const std::int64_t bytes = BufferOf(access.buffer).size.value;
    copy.runs.push_back(RawRun(source, At(access.buffer), bytes));
    source += bytes;
    if (BufferOf(from).category == Category::kOptimizerState && BufferOf(from).on_host) {
      StagePiece(v.unit(), from, access.buffer);
    }
  }
  return copy;
}

Call Binder::BindCollective(const OpView& v) {
  const OpShape& shape = *v.shape;
  if (!v.inputs.empty() && BufferOf(v.inputs.front().buffer).holds == Holds::kUses) {
    throw InputError("plan: find_unused_parameters, static_graph",
                     "DDP's map of parameters with a gradient",
                     "neither of the two, where no parameter is without one");
  }
  CollectiveCall call = CollectiveOf(shape);
  call.divisor = shape.divisor;
  if (IsTransfer(shape.code) || shape.code == OpCode::kPermute) {
    call.send = v.inputs.empty() ? nullptr : At(v.inputs.front().buffer);
    call.receive = v.outputs.empty() ? nullptr : At(v.outputs.front().buffer);
    return call;
  }
  switch (shape.code) {
    case OpCode::kAllGather:
      call.receive = At(v.outputs.front().buffer);
      if (v.inputs.empty()) {
        GatherInPlace(v, call);
      } else {
        call.send = At(v.inputs.front().buffer);
      }
      return call;
    case OpCode::kReduceScatter: {
      const BufferId from = v.inputs.front().buffer;
      const BufferId to = v.outputs.front().buffer;
      call.send = At(from);
      call.receive = At(to);
      call.zeros = NeverWritten(from);
      if (BufferOf(to).holds == Holds::kMixed) {  // row r is what rank r receives
        const std::int64_t row = call.elements / program_.shard_size;
        Set(to, Slice(ContentsOf(from), shard_index_ * row, (shard_index_ + 1) * row));
      }
      return call;
    }
    default: {  // of fewer bytes than it touches: the last of those
      const Access& in = v.inputs.front();
      call.receive = At(in.buffer) + (in.bytes - shape.bytes).value;
      call.send = call.receive;
      return call;
    }
  }
}

// This rank's part stands in the buffer already. Parts smaller than shards are the next elements of
// every rank's shard, each at its place among the whole weights.
void Binder::GatherInPlace(const OpView& v, CollectiveCall& call) {
  const BufferId to = v.outputs.front().buffer;
  const Group& group = program_.groups[call.group.value];
  const std::int64_t width = SizeOf(call.dtype), part = call.elements / group.size;
  const std::int64_t shard = program_.units[v.op->subject].shard_elements;
  std::int64_t stride = part;
  if (BufferOf(to).holds == Holds::kUnit && part < shard) {
    std::int64_t& begin = gathered_[v.unit()];
    call.receive += begin * width;
    call.receive_stride = shard * width;
    begin += part;
    stride = shard;
  }
  call.send = call.receive + PlaceInGroup(group, rank_).index * stride * width;
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
  return in_place ? Uncovered(runs, At(buffer), ElementsOf(buffer), contents.dtype)
                  : std::vector<ByteRange>{};
}

Call Binder::BindGradScale(const OpView& v) {
  const BufferId buffer = v.inputs.front().buffer;
  const DType dtype = BufferOf(buffer).dtype;
  DivideCall call;
  call.divisor = v.shape->divisor;
  call.ranges.push_back({At(buffer), v.shape->bytes.value / SizeOf(dtype), dtype});
  return call;
}

Call Binder::BindAccumulate(const OpView& v) {
  const Access& target = v.outputs.front();
  if (!IsKnown(v.inputs.front().buffer)) {
    return RawSum(v);
  }
  if (target.mode == AccessMode::kWrite) {  // DDP: a fresh gradient becomes .grad
    return Matched(v.inputs, target.buffer, false);
  }
  // What only the later of two ops that share a weight has goes behind what is there. Gradients of
  // frozen weights, which FSDP1 has, too, are nowhere.
  Contents contents = ContentsOf(target.buffer);
  const std::byte* end = At(target.buffer);
  if (!contents.pieces.empty()) {
    const ShardPiece& last = contents.pieces.back();
    end += (last.shard_offset + last.count) * SizeOf(contents.dtype);
  }
  Append(ContentsOf(v.inputs.front().buffer), contents);
  Set(target.buffer, std::move(contents));
  CopyCall call = Matched(v.inputs, target.buffer, true);
  for (CopyRun& run : call.runs) {
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
