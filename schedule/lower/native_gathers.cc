// Gathers of the native dialect: when they begin, what they wait for, what is freed.
//
// Example: forward enters A with in_flight 2 and the order root, A, B. Gather(A) finds A there or
// on its way, WaitForGather lets compute wait, and PrefetchAfter gathers the next unit, B. With
// in_flight 3 it would gather B and the unit behind it. Memory grows with each: in_flight * U at
// most, plus the units kept for good.
//
// A gather's buffer may take the bytes of a unit freed before (native's arena reuses bytes at fixed
// offsets). So the first copy into it waits for the last op that read a freed unit,
// `last_read_of_freed_`. Without this wait a gather would overwrite parameters that compute still
// reads.

#include <string>

#include "core/ranges.h"
#include "schedule/lower/native_rules.h"

namespace shardwright {

bool NativeRules::HasBackwardAhead(UnitId u) {
  return !At(u).backward_done && spans_.backward_first[u.value] != kNoRegion;
}

std::vector<bool> NativeRules::FindReadAgain() const {
  std::vector<bool> result(unit_count(), false);
  for (std::size_t i = 0; i < e_.in.model.ops.size(); ++i) {
    const ModelOpFacts& facts = e_.a.ops[i];
    for (const ParamId param : e_.in.model.ops[i].params) {
      const bool reads = facts.reruns || (facts.has_backward && facts.input_grads != 0);
      const std::uint32_t u = spans_.unit_of_param[param.value].value;
      result[u] = result[u] || reads;
    }
  }
  return result;
}

void NativeRules::FindOrders() {
  written_.resize(unit_count());
  forward_order_.clear();
  backward_order_.clear();
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (HasParams(UnitId(u)) && !spans_.spans[u].empty()) {
      forward_order_.push_back(UnitId(u));
      if (spans_.backward_first[u] != kNoRegion) {
        backward_order_.push_back(UnitId(u));
      }
    }
  }
  StableSort(forward_order_, [&](UnitId x, UnitId y) {
    return spans_.spans[x.value].front().first < spans_.spans[y.value].front().first;
  });
  StableSort(backward_order_, [&](UnitId x, UnitId y) {
    return spans_.backward_first[x.value] > spans_.backward_first[y.value];
  });
}

void NativeRules::Prefetch(UnitId u, Phase phase) {
  pass_ = phase;
  if (!TakesTurns()) {
    Gather(u, phase);
  } else if (!IsIn(waiting_gathers_, u)) {
    waiting_gathers_.push_back(u);
  }
}

void NativeRules::PrefetchAfter(UnitId u, const std::vector<UnitId>& order,
                                const std::vector<std::string>& names, Phase phase) {
  if (!names.empty()) {
    for (const std::string& name : names) {
      Prefetch(UnitNamed(name), phase);
    }
    return;
  }
  const auto place = [&](UnitId x) {
    return phase == Phase::kBackward ? -std::int64_t{spans_.backward_first[x.value]}
                                     : std::int64_t{spans_.spans[x.value].front().first};
  };
  const auto first =
      std::lower_bound(order.begin(), order.end(), place(u),
                       [&](UnitId x, std::int64_t place_of_u) { return place(x) < place_of_u; });
  const auto at = std::find(first, order.end(), u);
  std::int64_t ahead = plan_.in_flight - 1;
  for (auto it = at; it != order.end() && ahead > 0; ++it) {
    if (it != at) {
      Prefetch(*it, phase);
      --ahead;
    }
  }
}

bool NativeRules::BeginTransfer() {
  if (!waiting_reductions_.empty()) {
    const UnitId u = waiting_reductions_.front();
    waiting_reductions_.pop_front();
    Reduce(u);
    return true;
  }
  return BeginGather();
}

bool NativeRules::BeginGather() {
  while (!waiting_gathers_.empty()) {
    if (Gather(waiting_gathers_.front(), pass_, e_.LastCompute())) {
      return true;
    }
  }
  return false;
}

void NativeRules::BeginTransfers() {
  while (BeginTransfer()) {
  }
}

void NativeRules::TakeTurn() {
  if (TakesTurns()) {
    const OpId collective = e_.body->last();
    e_.After(last_collective_);
    last_collective_ = collective;
  }
}

// `needless`: in backward a unit without backward ahead, or whose parameters backward does not
// read. An embedding's backward needs gradients and ids only, so it is not gathered again.
bool NativeRules::Gather(UnitId u, Phase phase, OpId not_before) {
  std::erase(waiting_gathers_, u);
  if (IsInPlace(u)) {
    return false;
  }
  Comm& c = comm_[u.value];
  const bool needless =
      phase == Phase::kBackward && (!HasBackwardAhead(u) || !is_read_again_[u.value]);
  if (c.pending || At(u).unsharded.valid() || !HasParams(u) || needless) {
    return false;
  }
  c.pending = true;
  // Copies wait until the buffer whose bytes this one may take is no longer read.
  if (first_gather_) {
    e_.AddSlotWait(Stream::kCopyIn, FreedSlot(), phase, u.value);
    first_gather_ = false;
  }
  e_.AddWait(Stream::kCopyIn, {last_read_of_freed_, not_before}, phase, u.value);
  last_read_of_freed_ = OpId();
  At(u).unsharded = Hold(e_.Alloc(Unsharded(u), Category::kUnshardedParameter, Stream::kCopyIn), u,
                         Holds::kUnit, PrecisionOf(u).param);
  const bool small = c.part.valid();
  CopyIn(u, phase);
  c.gathered = e_.body->last();
  if (plan_.shard_size > 1) {
    const GroupId group =
        small ? e_.AddShardPart(plan_.units[u.value].reshard.group) : gather_group_;
    const OpId copied = c.gathered;
    c.gathered = e_.AddCollective(
        Collective(OpCode::kAllGather, Stream::kGather, group, Unsharded(u), PrecisionOf(u).param),
        {phase, u.value}, {{At(u).unsharded, AccessMode::kReadWrite, Role::kOutput}});
    e_.After(copied);
    TakeTurn();
  }
  return true;
}

void NativeRules::CopyIn(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  const bool small = c.part.valid();
  const Bytes slice = small ? Unsharded(u) / plan_.units[u.value].reshard.group : GatherShard(u);
  if (plan_.offload.parameters && !small) {
    const BufferId staged = Hold(e_.Alloc(MasterShard(u), Category::kAllGather, Stream::kCopyIn), u,
                                 Holds::kShard, job_.precision.master);
    e_.AddTransfer(OpCode::kCopyH2d, Stream::kCopyIn, {phase, u.value}, MasterShard(u), At(u).shard,
                   staged);
    WaitForUpdate(c, u);
    e_.AddCopy(OpCode::kGatherCopyIn, Stream::kCopyIn, {phase, u.value}, MasterShard(u), slice,
               {{staged, AccessMode::kRead, Role::kInput},
                {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
    e_.body->Free(staged);
    return;
  }
  e_.AddCopy(OpCode::kGatherCopyIn, Stream::kCopyIn, {phase, u.value},
             small ? slice : MasterShard(u), slice,
             {{small ? c.part : At(u).shard, AccessMode::kRead, Role::kInput},
              {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
  if (small) {
    e_.After(c.part_made);
  } else {
    WaitForUpdate(c, u);
  }
}

void NativeRules::WaitForUpdate(Comm& c, UnitId u) {
  if (c.updated_before) {
    e_.body->AfterSlot(SlotOf(u));
    c.updated_before = false;
  }
}

void NativeRules::WaitForGather(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  if (IsInPlace(u) && c.updated_before) {
    e_.AddSlotWait(Stream::kCompute, SlotOf(u), phase, u.value);
    c.updated_before = false;
  }
  if (c.pending) {
    c.pending = false;
    e_.AddWait(Stream::kCompute, {c.gathered}, phase, u.value);
    if (c.part.valid()) {
      e_.body->Free(c.part);
      c.part = BufferId();
    }
  }
}

void NativeRules::FreeUnsharded(UnitId u) {
  if (!At(u).unsharded.valid()) {
    return;
  }
  WaitForGather(u, Phase::kBackward);
  last_read_of_freed_ = e_.LastCompute();
  e_.body->Free(At(u).unsharded);
  At(u).unsharded = BufferId();
}

void NativeRules::CarryFreed() {
  if (last_read_of_freed_.valid()) {
    e_.body->SetCarry(FreedSlot(), last_read_of_freed_);
  }
}

void NativeRules::FreeAll() {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    FreeUnsharded(UnitId(u));
  }
}

// Example: reshard to groups of 2, U = 8 MiB: 4 MiB stay, and backward gathers over 2 ranks.
void NativeRules::KeepPart(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  const Bytes part = Unsharded(u) / plan_.units[u.value].reshard.group;
  c.part = Hold(e_.Alloc(part, Category::kUnshardedParameter, Stream::kCompute), u, Holds::kSlice,
                PrecisionOf(u).param);
  c.part_made = e_.AddCopy(OpCode::kReshardClone, Stream::kCompute, {phase, u.value}, part, part,
                           {{At(u).unsharded, AccessMode::kRead, Role::kInput},
                            {c.part, AccessMode::kWrite, Role::kOutput}});
  FreeUnsharded(u);
}

}  // namespace shardwright
