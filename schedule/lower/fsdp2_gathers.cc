// How FSDP2 gathers units, waits for what was gathered, and frees it.
//
// Example: two layers A and B, each U = 5.0 MiB gathered in bf16, 2.5 MiB per rank in fp32.
// Forward:
//
//   copy_in   cast A's shard: 1.25 MiB of scratch, freed at once; copy it into A's slice of 5.0 MiB
//   gather    all-gather of A in place
//   compute   copy A out to 5.0 MiB of parameters; the 5.0 MiB gather buffer is parked
//   copy_in   cast and copy B; gather: all-gather of B
//   both      wait for A's copy-out; only now A's parked buffer is freed
//   compute   copy B out
//
// So forward holds up to two gather buffers. Freed right away, A's buffer would make both gather
// streams wait for A's copy-out before B's gather begins. Parked (all_gather_state in torch), it
// lets B's gather overlap A's copy-out. Backward waits and frees at once, which costs less memory
// and that overlap.
//
// The memory of the copy-out is why fsdp2 takes 2 U where native takes U per gathered unit.

#include <utility>

#include "schedule/lower/fsdp2_rules.h"

namespace shardwright {

void Fsdp2Rules::Prefetch(const std::vector<std::string>& names, Phase phase) {
  for (const std::string& name : names) {
    hooks_.See(UnitNamed(name), HookCall::kRecord);
    Unshard(UnitNamed(name), phase);
  }
}

// Issues the gather, if the unit is neither there nor on its way. The stages: copy from the host if
// parameters are offloaded, cast and copy into the slice, all-gather. After `reshard` to a group
// the source is the kept part, and the all-gather runs over the group only.
void Fsdp2Rules::Unshard(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  if (c.pending || At(u).unsharded.valid() || !HasParams(u) || !IsOfStage(u)) {
    return;
  }
  c.pending = true;
  if (Info(u).shards == 1) {
    return;  // no collective; the copy-out reads the shard itself
  }
  hooks_.See(u, HookCall::kRecord);
  hooks_.See(u, HookCall::kCopyIn);
  BufferId source = At(u).shard;
  BufferId staged;
  if (plan_.offload.parameters && !c.clone.valid()) {
    staged = NewStaged(u, Stream::kCopyIn);
    e_.AddTransfer(OpCode::kCopyH2d, Stream::kCopyIn, {phase, u.value}, MasterShard(u), source,
                   staged);
    source = staged;
  }
  CopyIn(u, source, phase);
  if (staged.valid()) {
    e_.body->Free(staged);
  }
  const GroupId group = c.clone.valid() ? e_.AddShardPart(PlanOf(u).reshard.group) : ShardGroup(u);
  const OpId copied = e_.body->last();
  c.gathered = e_.AddCollective(
      Collective(OpCode::kAllGather, Stream::kGather, group, Unsharded(u), GatherDType(u)),
      {phase, u.value}, {{c.gather_out, AccessMode::kReadWrite, Role::kOutput}});
  e_.After(copied);
}

// Casts the shards (fused with the copy unless parameters are offloaded) into this rank's slice.
void Fsdp2Rules::CopyIn(UnitId u, BufferId source, Phase phase) {
  Comm& c = comm_[u.value];
  BufferId cast;
  const bool from_clone = c.clone.valid();
  const Bytes slice = from_clone ? Unsharded(u) / PlanOf(u).reshard.group : GatherShard(u);
  std::vector<Kernel> kernels;
  const BufferId scratch = CastToFp8(u, source, phase, kernels);
  const Bytes read = CastsGather(u) && !from_clone ? CastShard(u, job_.precision.master) : Bytes(0);
  const Bytes written = read > Bytes(0) ? CastShard(u, PrecisionOf(u).param) : Bytes(0);
  if (written + Bytes(Fp8Shard(u)) > Bytes(0)) {
    cast = e_.Alloc(written + Bytes(Fp8Shard(u)), Category::kAllGather, Stream::kCopyIn);
  }
  c.gather_out = AllocGatherOut(u, phase);
  if (written > Bytes(0)) {
    kernels.push_back({.kind = KernelClass::kCopy, .read = read, .written = written});
  }
  kernels.push_back({.kind = KernelClass::kCopy, .read = slice, .written = slice});
  OpShape shape;
  shape.code = OpCode::kGatherCopyIn;
  shape.stream = Stream::kCopyIn;
  shape.dtype = PrecisionOf(u).param;
  shape.bytes = slice;
  e_.Add(shape, kernels, phase, u.value,
         {{from_clone ? c.clone : source, AccessMode::kRead, Role::kInput},
          {c.gather_out, AccessMode::kWrite, Role::kOutput},
          {cast, AccessMode::kWrite, Role::kWorkspace},
          {scratch, AccessMode::kWrite, Role::kWorkspace, 1}});
  if (from_clone) {
    e_.After(c.cloned);
  }
  for (const BufferId buffer : {cast, scratch}) {
    if (buffer.valid()) {
      e_.body->Free(buffer);
    }
  }
}

// The shard on the device, where parameters are offloaded.
BufferId Fsdp2Rules::NewStaged(UnitId u, Stream owner) {
  return Hold(e_.Alloc(MasterShard(u), Category::kAllGather, owner), u, Holds::kShard,
              job_.precision.master);
}

// Forward only, a buffer that lives on into the next pass is the same one in every pass.
BufferId Fsdp2Rules::AllocGatherOut(UnitId u, Phase phase) {
  const BufferId kept = comm_[u.value].kept_out;
  if (!kept.valid()) {
    // Slices of what was copied out of shards give that again.
    const Holds holds = comm_[u.value].clone.valid() ? Holds::kUnit : Holds::kShards;
    return Hold(e_.Alloc(Unsharded(u), Category::kAllGather, Stream::kCopyIn), u, holds,
                PrecisionOf(u).param);
  }
  if (parked_ == kept) {
    Unpark(phase);
  }
  e_.body->Alloc(kept);
  return kept;
}

// Both gather streams wait for the parked buffer's copy-out; then it may go.
void Fsdp2Rules::Unpark(Phase phase) {
  if (parked_.valid()) {
    ReleaseGatherOut(parked_, parked_copied_, phase);
    parked_ = BufferId();
  }
}

void Fsdp2Rules::ReleaseGatherOut(BufferId buffer, OpId copied_out, Phase phase) {
  e_.AddWait(Stream::kCopyIn, {copied_out}, phase, kNoSubject);
  e_.AddWait(Stream::kGather, {copied_out}, phase, kNoSubject);
  e_.body->Free(buffer);
}

// The copy-out on compute, behind the gather. With one rank per shard there is no gather: the
// copy-out reads the shard, cast on the way. In backward the gather buffer goes at once, in forward
// it is parked until the next unit's gather has been issued.
void Fsdp2Rules::WaitForUnshard(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  if (!c.pending) {
    return;
  }
  c.pending = false;
  if (phase != Phase::kBackward) {
    Unpark(phase);
  }
  if (c.is_carried) {
    e_.AddSlotWait(Stream::kCompute, kPendingSlot, phase, u.value);
    c.is_carried = false;
  }
  At(u).unsharded = AllocUnsharded(u);
  const bool whole = Info(u).shards == 1;
  if (!whole) {
    hooks_.See(u, HookCall::kRecord);
    hooks_.See(u, HookCall::kCopyOut);
  }
  BufferId source = whole ? At(u).shard : c.gather_out;
  const bool staged = whole && plan_.offload.parameters;
  if (staged) {
    source = NewStaged(u, Stream::kCompute);
    e_.AddTransfer(OpCode::kCopyH2d, Stream::kCompute, {phase, u.value}, MasterShard(u),
                   At(u).shard, source);
  }
  const OpId copied = e_.AddCopy(OpCode::kGatherCopyOut, Stream::kCompute, {phase, u.value},
                                 whole ? MasterShard(u) : Unsharded(u), Unsharded(u),
                                 {{source, AccessMode::kRead, Role::kInput},
                                  {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
  if (staged) {
    e_.body->Free(source);
  }
  if (whole) {
    return;
  }
  e_.After(c.gathered);
  if (phase != Phase::kBackward) {
    parked_ = c.gather_out;
    parked_copied_ = copied;
  } else {
    ReleaseGatherOut(c.gather_out, copied, phase);
  }
  FreeClone(u);
}

void Fsdp2Rules::FreeClone(UnitId u) {
  Comm& c = comm_[u.value];
  if (c.clone.valid()) {
    e_.body->Free(c.clone);
    c.clone = BufferId();
  }
}

// Sharded again without a gather that was waited for: torch forgets the clone, and holds it until
// the next one takes its place (to_sharded_post_forward of _fsdp_param.py).
void Fsdp2Rules::LeaveClone(UnitId u) {
  Comm& c = comm_[u.value];
  if (c.clone.valid()) {
    c.stale = std::exchange(c.clone, BufferId());
  }
}

// A clone that no backward gathered from lives on into the next step.
void Fsdp2Rules::NoteClone(UnitId u) {
  Comm& c = comm_[u.value];
  if (!c.stale.valid() || !last_micro_batch_) {
    return;
  }
  still_gathered_.resize(unit_count());
  still_gathered_[u.value] = true;
  if (!IsCarried(u)) {
    e_.body->Free(c.stale);  // this lowering is begun anew
    c.stale = BufferId();
  }
}

BufferId Fsdp2Rules::AllocUnsharded(UnitId u) {
  if (IsCarried(u) && carried_buffer_[u.value].valid()) {
    e_.body->Alloc(carried_buffer_[u.value]);
    return carried_buffer_[u.value];
  }
  Buffer buffer;
  buffer.size = Unsharded(u);
  buffer.category = Category::kUnshardedParameter;
  buffer.pieces = At(u).unsharded_pieces;
  const BufferId id = Hold(e_.body->NewBuffer(buffer), u, Holds::kUnit, PrecisionOf(u).param);
  const bool stays = job_.mode == JobMode::kForward && StaysInForward(u);
  e_.body->Alloc(id, stays ? PointKind::kAllocOnce : PointKind::kAlloc);
  if (IsCarried(u)) {
    carried_buffer_[u.value] = id;
  }
  return id;
}

// Example: reshard to groups of 2 of 8 ranks, U = 8 MiB. A clone of 8 / 2 = 4 MiB stays on each
// rank, and backward gathers 8 MiB over 2 ranks instead of 8.
void Fsdp2Rules::ReshardUnit(UnitId u, Phase phase) {
  const Reshard& reshard = PlanOf(u).reshard;
  if (reshard.kind == Reshard::Kind::kToGroup) {
    Comm& c = comm_[u.value];
    const Bytes part = Unsharded(u) / reshard.group;
    if (c.stale.valid()) {
      e_.body->Free(c.stale);
      c.stale = BufferId();
    }
    if ((job_.mode == JobMode::kForward || IsCarried(u)) && c.kept.valid()) {
      e_.body->Alloc(c.kept);  // the same from pass to pass
      c.clone = c.kept;
    } else {
      c.clone = Hold(e_.Alloc(part, Category::kUnshardedParameter, Stream::kCompute), u,
                     Holds::kSlice, PrecisionOf(u).param);
      c.kept = c.clone;
    }
    c.cloned = e_.AddCopy(OpCode::kReshardClone, Stream::kCompute, {phase, u.value}, part, part,
                          {{At(u).unsharded, AccessMode::kRead, Role::kInput},
                           {c.clone, AccessMode::kWrite, Role::kOutput}});
  }
  FreeUnsharded(u);
}

void Fsdp2Rules::FreeUnsharded(UnitId u) {
  if (At(u).unsharded.valid()) {
    e_.body->Free(At(u).unsharded);
    At(u).unsharded = BufferId();
  }
}

// A gather that no pass waited for is dropped at the end of backward, without a copy-out
// (finalize_backward). Compute waits for it, since its buffer is freed.
void Fsdp2Rules::DropPending(UnitId u) {
  Comm& c = comm_[u.value];
  if (!c.pending) {
    return;
  }
  c.pending = false;
  if (Info(u).shards > 1) {
    e_.AddWait(Stream::kCompute, {c.gathered}, Phase::kBackward, u.value);
    e_.body->Free(c.gather_out);
  }
}

}  // namespace shardwright
