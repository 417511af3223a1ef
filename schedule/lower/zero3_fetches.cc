// How stage 3 requests parameters, waits for them and releases them.
//
// Example: a Llama of 6,269,440 parameters, prefetch_bucket 50 million elements. In the first pass
// each module is gathered when it is called and released behind it. In all later passes the call of
// the embedding requests the 6,266,880 elements of all weights at once: one all-gather of
// 12,533,760 bytes into a flat buffer, and one copy-out per weight. The norms (512 elements each)
// persist and are there already.

#include <utility>

#include "core/ranges.h"
#include "schedule/lower/zero3_rules.h"

namespace shardwright {
namespace {

constexpr std::size_t kMostEvents = 2;  // fetches and reductions that the host runs ahead

}  // namespace

bool Zero3Rules::Persists(UnitId u) const {
  const auto& params = Info(u).params;
  return AllOf(params, [&](const ParamSlot& slot) {
    return e_.in.model.params[slot.param.value].Elements() <= plan_.zero.persistence_threshold;
  });
}

// Gathers the module's absent parameters at once, in the order of their ids, waits for them, and
// then requests ahead along the recorded order.
void Zero3Rules::FetchModule(ModuleId module, Phase phase) {
  std::vector<UnitId> units;
  for (const UnitId u : units_of_[module.value]) {
    if (HasParams(u)) {
      units.push_back(u);
    }
  }
  if (InPlace()) {
    return;
  }
  std::vector<UnitId> away;
  for (const UnitId u : units) {
    AddOnce(calls_[u.value].active, module);
    if (IsAway(u)) {
      order_.AddAvailable(Info(u).elements);
      away.push_back(u);
    }
  }
  GatherTogether(std::move(away), phase);
  for (const UnitId u : units) {
    if (fetch_of_[u.value] != kNoFetch) {
      Wait(u, phase);
    }
  }
  if (!units.empty()) {
    WaitForCopies(phase, units.front());
  }
  // A module of several names has its hooks once for each (_register_deepspeed_module).
  for (std::size_t n = 0; n < names_[module.value]; ++n) {
    GatherTogether(order_.Fetch(units, [&](UnitId x) { return IsAway(x) ? Info(x).elements : 0; }),
                   phase);
  }
}

void Zero3Rules::GatherTogether(std::vector<UnitId> units, Phase phase) {
  SortAll(units, [&](UnitId x, UnitId y) {
    return Info(x).params.front().param < Info(y).params.front().param;
  });
  if (!units.empty()) {
    Gather(units, phase);
  }
}

void Zero3Rules::ReleaseModule(ModuleId module) {
  for (const UnitId u : units_of_[module.value]) {
    std::vector<ModuleId>& active = calls_[u.value].active;
    active.erase(std::remove(active.begin(), active.end(), module), active.end());
    if (InPlace() || !HasParams(u)) {
      continue;
    }
    const bool keeps = order_.IsComplete() && (Persists(u) || IsUsedSoon(module, u));
    if (!keeps && active.empty() && !IsAway(u)) {
      Release(u);
    }
  }
}

bool Zero3Rules::IsUsedSoon(ModuleId module, UnitId u) {
  const auto [found, is_new] = used_soon_.try_emplace({module, u, order_.NextCall()}, false);
  if (is_new) {
    found->second = order_.IsUsedSoon(u, [&](UnitId x) { return Info(x).elements; });
  }
  return found->second;
}

void Zero3Rules::Release(UnitId u) {
  order_.AddAvailable(-Info(u).elements);
  FreeUnsharded(u);
}

// After its backward a module also lets go what ran again beneath it. That goes even if it is used
// again soon, but not if it persists, in the first pass, too.
void Zero3Rules::ReleaseBackward(ModuleId module) {
  const auto open = FindIn(backward_, module, &Backward::module);
  std::vector<UnitId> recomputed;
  if (open != backward_.end()) {
    recomputed = std::move(open->recomputed);
    backward_.erase(open);
  }
  ReleaseModule(module);
  for (const UnitId u : recomputed) {
    std::erase(calls_[u.value].active, module);
    if (calls_[u.value].active.empty() && !Persists(u) && !IsAway(u)) {
      Release(u);
    }
  }
}

// release_backward_leftovers: what no hook has released goes when backward is over, unless it
// persists, in the first pass, too.
void Zero3Rules::ReleaseLeftovers() {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    std::vector<ModuleId>& active = calls_[u].active;
    if (!active.empty() && !Persists(UnitId(u)) && !IsAway(UnitId(u))) {
      Release(UnitId(u));
    }
    active.clear();
  }
  backward_.clear();
}

void Zero3Rules::Gather(const std::vector<UnitId>& units, Phase phase) {
  Fetch fetch;
  fetch.units = units;
  fetch.left = units.size();
  const bool direct = !plan_.zero.before_deepspeed_0_6 && units.size() == 1 &&
                      Info(units.front()).params.size() == 1;
  Bytes full{0};
  for (const UnitId u : units) {
    full += Unsharded(u);
  }
  std::vector<BufferId> parts;  // where the partitions are read
  for (const UnitId u : units) {
    parts.push_back(plan_.offload.parameters ? FromHost(u, phase, direct) : low_[u.value]);
  }
  const Emitter::Where where{phase, units.front().value};
  if (!direct) {
    fetch.flat = NewFlat(units, full, phase);
    CopyIn(parts, full / plan_.shard_size, fetch.flat, where);
  } else if (IsAway(units.front())) {
    NewUnsharded(units.front(), phase);
  }
  fetch.gathered = copy_tail_;
  if (plan_.shard_size > 1) {
    const OpId before = copy_tail_;
    fetch.gathered = e_.AddCollective(
        Collective(OpCode::kAllGather, Stream::kGather, shard_group_, full, job_.precision.param),
        where, {});
    if (direct) {
      e_.body->Use(parts.front(), AccessMode::kRead, Role::kInput);
      e_.body->Use(At(units.front()).unsharded, AccessMode::kWrite, Role::kOutput);
    } else {
      e_.body->Use(fetch.flat, AccessMode::kReadWrite, Role::kOutput);
    }
    // NCCL's stream waits for what the calling stream was given.
    e_.After(Overlaps() ? before : LastComputeBefore(fetch.gathered));
  }
  for (const BufferId part : parts) {
    if (plan_.offload.parameters && part != At(units.front()).unsharded) {
      e_.body->Free(part, direct ? StreamBit(Stream::kGather) : std::uint16_t{0});
    }
  }
  for (const UnitId u : units) {
    fetch_of_[u.value] = static_cast<std::uint32_t>(fetches_.size());
  }
  fetches_.push_back(fetch);
}

// The flat buffer of a request: its units' parameters one behind the other. Before 0.6 the host
// waited until the device was done, and the copies' targets were allocated first.
BufferId Zero3Rules::NewFlat(const std::vector<UnitId>& units, Bytes full, Phase phase) {
  if (plan_.zero.before_deepspeed_0_6) {
    const OpId over = e_.LastCompute();
    e_.AddHostWait({&over, 1}, phase, units.front().value);
    for (const UnitId u : units) {
      NewUnsharded(u, phase);
    }
    return NewGathered(full);
  }
  const BufferId flat = NewGathered(full);
  for (const UnitId u : units) {
    At(u).unsharded = flat;  // stands for "on its way" until it is copied out
  }
  return flat;
}

BufferId Zero3Rules::NewGathered(Bytes full) {
  return e_.Hold(e_.Alloc(full, Category::kAllGather, storage_), Holds::kMixed, kNoSubject,
                 job_.precision.param);
}

OpId Zero3Rules::LastComputeBefore(OpId op) const {
  OpId last(op.value - 1);
  while (e_.StreamOf(last) != Stream::kCompute) {
    last = OpId(last.value - 1);
  }
  return last;
}

// The unit's partition, copied to the device; one rank's `direct`ly to where it is computed with.
BufferId Zero3Rules::FromHost(UnitId u, Phase phase, bool direct) {
  BufferId part;
  if (direct && plan_.shard_size == 1) {
    NewUnsharded(u, phase);
    part = At(u).unsharded;
  } else {
    part = HoldShard(e_.Alloc(GatherShard(u), Category::kAllGather, copy_), u);
  }
  copy_tail_ = e_.AddTransfer(OpCode::kCopyH2d, copy_, {phase, u.value}, GatherShard(u),
                              low_[u.value], part);
  return part;
}

// The units' partitions, one behind the other, into this rank's slice of the flat buffer.
void Zero3Rules::CopyIn(std::span<const BufferId> parts, Bytes slice, BufferId flat,
                        Emitter::Where where) {
  e_.AddCopy(OpCode::kGatherCopyIn, copy_, where, slice, slice,
             {{flat, AccessMode::kWrite, Role::kOutput}});
  std::uint16_t index = 0;
  for (const BufferId part : parts) {
    e_.body->Use(part, AccessMode::kRead, Role::kInput, index++);
  }
  copy_tail_ = e_.body->last();
}

void Zero3Rules::NewUnsharded(UnitId u, Phase phase) {
  const bool stays = order_.IsComplete() && !RunsPolicyBefore(job_);
  if (persistent_[u.value].valid() && (stays || phase == Phase::kOptimizer)) {
    At(u).unsharded = persistent_[u.value];
    e_.body->Alloc(At(u).unsharded);
  } else {
    At(u).unsharded = Hold(e_.Alloc(Unsharded(u), Category::kUnshardedParameter, storage_), u,
                           Holds::kUnit, job_.precision.param);
  }
}

void Zero3Rules::Wait(UnitId u, Phase phase) {
  Fetch& fetch = fetches_[fetch_of_[u.value]];
  fetch_of_[u.value] = kNoFetch;
  LimitHost(fetch_events_, phase, u);
  if (!fetch.complete) {
    fetch.complete = true;
    if (fetch.flat.valid()) {
      CopyOut(fetch, phase);
    } else if (plan_.shard_size > 1) {
      e_.AddWait(copy_, {fetch.gathered}, phase, u.value);
      copy_tail_ = e_.body->last();
    }
  }
  fetch_events_.push_back(copy_tail_);
  if (--fetch.left == 0 && fetch.flat.valid()) {
    e_.body->Free(fetch.flat, storage_ == copy_ ? std::uint16_t{0} : StreamBit(copy_));
  }
}

void Zero3Rules::CopyOut(const Fetch& fetch, Phase phase) {
  std::uint16_t index = 0;
  for (const UnitId u : fetch.units) {
    if (At(u).unsharded == fetch.flat) {
      NewUnsharded(u, phase);
    }
    e_.AddCopy(OpCode::kGatherCopyOut, copy_, {phase, u.value}, Unsharded(u), Unsharded(u),
               {{fetch.flat, AccessMode::kRead, Role::kInput, index++},
                {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
    e_.After(fetch.gathered);
    copy_tail_ = e_.body->last();
  }
}

// Compute waits for all that the gather stream was given so far.
void Zero3Rules::WaitForCopies(Phase phase, UnitId u) {
  if (copy_tail_ != seen_tail_) {
    seen_tail_ = copy_tail_;
    e_.AddWait(Stream::kCompute, {copy_tail_}, phase, u.value);
  }
}

// With more than two events outstanding the host waits for the oldest.
void Zero3Rules::LimitHost(std::deque<OpId>& events, Phase phase, UnitId u) {
  if (events.size() > kMostEvents) {
    const OpId oldest = events.front();
    events.pop_front();
    e_.AddHostWait({&oldest, 1}, phase, u.value);
  }
}

void Zero3Rules::FreeUnsharded(UnitId u) {
  if (IsAway(u)) {
    return;
  }
  if (fetch_of_[u.value] != kNoFetch) {
    Wait(u, Phase::kBackward);
    WaitForCopies(Phase::kBackward, u);
  }
  e_.body->Free(At(u).unsharded, StreamBit(Stream::kCompute));
  At(u).unsharded = BufferId();
}

// Releases gathers that no call has waited for.
void Zero3Rules::EndPass(Phase phase) {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    const bool is_over = phase == Phase::kForward && (first_step_ || !Persists(UnitId(u)));
    if (fetch_of_[u] != kNoFetch || is_over) {
      FreeUnsharded(UnitId(u));
    }
  }
  order_.EndPass();
}

// Small parameters are gathered after the update and then stay; the host waits for it.
void Zero3Rules::GatherPersistent() {
  std::vector<UnitId> units;
  for (std::uint32_t u = 0; u < unit_count() && !InPlace(); ++u) {
    if (persistent_[u].valid() && IsAway(UnitId(u))) {
      units.push_back(UnitId(u));
    }
  }
  if (units.empty()) {
    return;
  }
  if (Overlaps()) {
    e_.AddWait(copy_, {e_.LastCompute()}, Phase::kOptimizer, kNoSubject);
    copy_tail_ = e_.body->last();
  }
  if (plan_.zero.before_deepspeed_0_6) {
    Gather(units, Phase::kOptimizer);
  } else {  // _allgather_params_coalesced, which sends one after the other
    for (const UnitId u : units) {
      Gather({u}, Phase::kOptimizer);
    }
  }
  for (const UnitId u : units) {
    Wait(u, Phase::kOptimizer);
  }
  WaitForCopies(Phase::kOptimizer, units.front());
  const OpId over = e_.LastCompute();
  e_.AddHostWait({&over, 1}, Phase::kOptimizer, kNoSubject);
}

}  // namespace shardwright
