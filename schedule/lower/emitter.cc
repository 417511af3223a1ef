// Writes single ops into the body of the program at hand. Each function adds one op with its
// kernels and the buffers it touches, and returns the op's id.
//
// Example: AddCopy for 1 MiB of fp32 gradients that become bf16 adds one kernel that reads 1 MiB
// and writes 0.5 MiB. The op's `bytes` are those written: 0.5 MiB.
//
// An op's id is (code, phase, subject, micro-batch, occurrence). The occurrence counts ops that
// agree in the four others: the second `all_gather` of unit 3 in the backward of micro-batch 0 has
// occurrence 1. Traces are matched by these ids, so the order of calls here decides them.

#include "schedule/lower/emitter.h"

#include <bit>

#include "core/error.h"

namespace shardwright {

void Emitter::Begin(Body& target) {
  current_ = &target;
  builder_.emplace(program, target);
  body = &*builder_;
  occurrences_.Clear();
}

void Emitter::End() {
  body->Finish();
  body = nullptr;
}

std::uint16_t Emitter::NextOccurrence(OpCode code, Phase phase, std::uint32_t subject) {
  const std::uint64_t key = (static_cast<std::uint64_t>(subject) << 32) |
                            (static_cast<std::uint64_t>(micro_batch) << 16) |
                            (static_cast<std::uint64_t>(phase) << 8) |
                            static_cast<std::uint64_t>(code);
  const std::uint32_t before = occurrences_.Next(key);
  if (before >= kMostAlike) {
    throw InputError("plan",
                     "more than " + std::to_string(kMostAlike) + ' ' +
                         std::string(InfoOf(code).name) + " ops of one unit",
                     "larger buckets or pieces");
  }
  return static_cast<std::uint16_t>(before);
}

OpId Emitter::Add(const OpShape& shape, std::span<const Kernel> kernels, Phase phase,
                  std::uint32_t subject, std::initializer_list<Touch> touches) {
  BodyBuilder::OpArgs args;
  args.shape = shapes_.Intern(shape, kernels);
  args.phase = phase;
  args.subject = subject;
  args.micro_batch = micro_batch;
  args.occurrence = NextOccurrence(shape.code, phase, subject);
  const OpId op = body->Add(args);
  for (const Touch& t : touches) {
    if (t.buffer.valid()) {
      body->Use(t.buffer, t.mode, t.role, t.index);
    }
  }
  return op;
}

OpId Emitter::AddCopy(OpCode code, Stream stream, Where where, Bytes read, Bytes written,
                      std::initializer_list<Touch> touches, double divisor) {
  Kernel kernel;
  kernel.kind = KernelClass::kCopy;
  kernel.read = read;
  kernel.written = written;
  OpShape shape;
  shape.code = code;
  shape.stream = stream;
  shape.bytes = written;
  shape.divisor = divisor;
  return Add(shape, {&kernel, 1}, where.phase, where.subject, touches);
}

// Gathers and reductions of units are issued from Python hooks; native has none.
OpId Emitter::AddCollective(OpShape shape, Where where, std::initializer_list<Touch> touches) {
  if (in.plan.dialect != Dialect::kNative &&
      (shape.code == OpCode::kAllGather || shape.code == OpCode::kReduceScatter)) {
    shape.issue = Issue::kHook;
  }
  return Add(shape, {}, where.phase, where.subject, touches);
}

OpId Emitter::AddTransfer(OpCode code, Stream stream, Where where, Bytes bytes, BufferId from,
                          BufferId to) {
  OpShape shape;
  shape.code = code;
  shape.stream = stream;
  shape.bytes = bytes;
  return Add(shape, {}, where.phase, where.subject,
             {{from, AccessMode::kRead, Role::kInput}, {to, AccessMode::kWrite, Role::kOutput}});
}

// A wait of one stream for ops of other streams is what cudaStreamWaitEvent does. Ops of the same
// stream need none, since a stream runs in order. If no op is left to wait for, nothing is written.
void Emitter::AddWait(Stream stream, std::initializer_list<OpId> ops, Phase phase,
                      std::uint32_t subject) {
  bool needed = false;
  for (const OpId op : ops) {
    needed = needed || (op.valid() && StreamOf(op) != stream);
  }
  if (!needed) {
    return;
  }
  OpShape shape;
  shape.code = OpCode::kStreamWait;
  shape.stream = stream;
  Add(shape, {}, phase, subject, {});
  for (const OpId op : ops) {
    After(op);
  }
}

void Emitter::AddSlotWait(Stream stream, std::uint32_t slot, Phase phase, std::uint32_t subject) {
  OpShape shape;
  shape.code = OpCode::kStreamWait;
  shape.stream = stream;
  Add(shape, {}, phase, subject, {});
  body->AfterSlot(slot);
}

OpId Emitter::AddHostWait(std::span<const OpId> ops, Phase phase, std::uint32_t subject) {
  OpShape shape;
  shape.code = OpCode::kHostWait;
  shape.stream = Stream::kHost;
  const OpId wait = Add(shape, {}, phase, subject, {});
  for (const OpId op : ops) {
    After(op);
  }
  return wait;
}

// Example: 8 ranks as 2 replicas of 4 shards. Axis kShard gives "shard" of size 4 and stride 1,
// axis kReplicate gives "replicate" of size 2 and stride 4, and both give "world" of size 8.
GroupId Emitter::AddGroup(std::initializer_list<Axis> axes, const std::string& name) {
  const GroupShape shape = mesh.Of(axes);
  const bool is_shard = *axes.begin() == Axis::kShard;
  const std::string usual = axes.size() > 1 ? "world" : is_shard ? "shard" : "replicate";
  return Find({name.empty() ? usual : name, shape.size, shape.stride});
}

GroupId Emitter::AddShardPart(std::int64_t size) {
  return Find({"reshard" + std::to_string(size), size, mesh.StrideOf(Axis::kShard)});
}

GroupId Emitter::AddExperts() {
  const GroupShape shape = mesh.Experts();
  return Find({"ep", shape.size, shape.stride});
}

GroupId Emitter::AddSameExperts() {
  const GroupShape shape = mesh.SameExperts();
  return Find({"efsdp", shape.size, shape.stride});
}

GroupId Emitter::AddContext() {
  const GroupShape shape = mesh.Context();
  return Find({"cp", shape.size, shape.stride});
}

GroupId Emitter::AddPipeline(const std::string& name) {
  Mesh whole = mesh;
  whole.pipeline = in.stage->pipeline.ranks;
  return Find({name, whole.Pipeline().size, whole.Pipeline().stride});
}

GroupId Emitter::Find(Group group) {
  for (std::size_t i = 0; i < program.groups.size(); ++i) {
    if (program.groups[i].name == group.name) {
      return GroupId(i);
    }
  }
  program.groups.push_back(std::move(group));
  return GroupId(program.groups.size() - 1);
}

BufferId Emitter::Alloc(Bytes size, Category category, Stream owner, bool zero_filled) {
  return body->NewAllocated(
      {.size = size, .category = category, .owner = owner, .zero_filled = zero_filled});
}

BufferId Emitter::AllocPieces(Bytes size, PieceRange pieces, Category category, Stream owner) {
  return body->NewAllocated({.size = size, .category = category, .owner = owner, .pieces = pieces});
}

BufferId Emitter::AllocOnHost(Bytes size, Category category, std::span<const Bytes> blocks) {
  return body->NewAllocated({.size = size,
                             .category = category,
                             .owner = Stream::kHost,
                             .on_host = true,
                             .pieces = blocks.empty() ? PieceRange() : InternPieces(blocks)});
}

// Example: a block of 5 MiB takes 8 MiB. If the job limits rounding (pinned_max_round_mib) to 4
// MiB, it takes 5 MiB. Native locks one arena, so its blocks are not rounded.
Bytes Emitter::Pinned(Bytes block) const {
  const Bytes most = std::int64_t{in.job.allocator.pinned_max_round_mib} * kMiB;
  const bool is_whole = in.plan.dialect == Dialect::kNative || (most > Bytes(0) && block > most);
  return is_whole || block == Bytes(0)
             ? block
             : Bytes(std::bit_ceil(static_cast<std::uint64_t>(block.value)));
}

BufferId Emitter::Hold(BufferId buffer, Holds holds, std::uint32_t subject, DType dtype) {
  Buffer& b = program.buffers[buffer.value];
  b.holds = holds;
  b.subject = subject;
  b.dtype = dtype;
  return buffer;
}

Stream Emitter::StreamOf(OpId op) const {
  return program.ShapeOf(current_->ops[op.value]).stream;
}

// Walks back from the last op, so the cost is the number of ops of other streams since then.
OpId Emitter::LastCompute() const {
  OpId op = body->last();
  while (op.valid() && StreamOf(op) != Stream::kCompute) {
    op = op.value == 0 ? OpId() : OpId(op.value - 1);
  }
  return op;
}

// Example: 8 ranks give 4 before the sum and 2 behind it; 6 ranks give 4 and 1.5; 1 rank gives 1
// and 1. The first factor is always a power of two.
DivideFactors FactorsFor(std::int64_t ranks) {
  std::int64_t f = 1;
  while (ranks % f == 0 &&
         static_cast<double>(ranks) / static_cast<double>(f) > static_cast<double>(f)) {
    f *= 2;
  }
  return {static_cast<double>(f), static_cast<double>(ranks) / static_cast<double>(f)};
}

}  // namespace shardwright
