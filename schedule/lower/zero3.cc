// What fetches, releases and updates; zero3_reductions.cc reduces.

#include <algorithm>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/zero3_rules.h"

namespace shardwright {
namespace {

constexpr std::size_t kMostEvents = 2;  // fetches and reductions that the host runs ahead

}  // namespace

Zero3Rules::Zero3Rules(Emitter& emitter, const UnitSpans& spans,
                       const std::vector<ResolvedUnit>& units)
    : ZeroRules(emitter, spans, units),
      low_(units.size()),
      low_on_host_(units.size()),
      stored_(units.size()),
      persistent_(units.size()),
      fetch_of_(units.size(), kNoFetch),
      order_(plan_.zero, units.size()) {
  copy_ = Overlaps() ? Stream::kCopyIn : Stream::kCompute;
  storage_ = IsOld() ? Stream::kGather : copy_;
  reduce_ = Overlaps() ? Stream::kReduce : Stream::kCompute;
  if (!ScattersGradients(plan_)) {
    AddWorldGroup();
  }
}

void Zero3Rules::BeginStep(bool first) {
  StepRules::BeginStep(first);
  if (flat_tensors_ == 0) {
    FlattenPartitions();
  }
  copy_tail_ = seen_tail_ = last_reduce_ = OpId();
  fetch_events_.clear();
  reduce_events_.clear();
  fetches_.clear();
}

void Zero3Rules::BeginMicroBatch(bool first, bool last) {
  StepRules::BeginMicroBatch(first, last);
  std::fill(stored_.begin(), stored_.end(), 0);
  order_.BeginPass();
}

void Zero3Rules::PreForward(UnitId u, Phase phase) {
  if (!InPlace()) {
    BeginGathers(phase);
  }
  FetchModule(u, phase);
}

void Zero3Rules::EndForward() {
  if (job_.mode == JobMode::kForward) {
    EndPass(Phase::kForward);
  } else if (IsOld()) {
    NewBucket();
  }
}

// The epilogue reduces what is left and synchronises the host with the reductions.
void Zero3Rules::EndBackward() {
  Flush();
  FreeReduced();
  if (IsOld() && bucket_.valid()) {
    e_.body->Free(bucket_, StreamBit(reduce_));
    bucket_ = BufferId();
  }
  if (last_reduce_.valid()) {
    e_.AddHostWait({&last_reduce_, 1}, Phase::kBackward, kNoSubject);
  }
  EndPass(Phase::kBackward);
}

void Zero3Rules::EndStep() {
  if (job_.mode == JobMode::kTrain) {
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      FreeUnsharded(UnitId(u));
    }
    Update();
  }
  if (job_.mode == JobMode::kTrain || first_step_) {
    GatherPersistent();
  }
}

UnitInfo Zero3Rules::Layout(const ResolvedUnit& unit) const {
  return LayoutPerParameterFlat(e_.in.model, unit, plan_.shard_size);
}

std::int64_t Zero3Rules::GradElements(const UnitInfo& unit) const {
  return TrainablePaddedElements(e_.in.model, unit) > 0 ? unit.padded_elements : 0;
}

// Partitions of the weights in the compute dtype; in training, of the masters and gradients, too,
// and the bucket, which is as large as it may get from the beginning. Before 0.6 the bucket was
// made for each backward pass (backward), and partitions of gradients for each step.
void Zero3Rules::InitUnit(UnitId u) {
  if (HasParams(u)) {
    low_[u.value] = plan_.offload.parameters
                        ? e_.AllocOnHost(GatherShard(u), Category::kParameterShard)
                        : e_.Alloc(GatherShard(u), Category::kParameterShard, Stream::kCompute);
    e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0),
               GatherShard(u), {{low_[u.value], AccessMode::kWrite, Role::kOutput}});
    Buffer b;
    b.size = Unsharded(u);
    b.category = Category::kUnshardedParameter;
    b.owner = storage_;
    persistent_[u.value] = Persists(u) && !InPlace() ? e_.body->NewBuffer(b) : BufferId();
  }
  if (job_.mode == JobMode::kForward || !IsTrainable(u)) {
    return;
  }
  ZeroRules::InitUnit(u);
  if (UpdatesOnHost()) {
    low_on_host_[u.value] = plan_.offload.parameters
                                ? low_[u.value]
                                : e_.AllocOnHost(GatherShard(u), Category::kParameterShard);
  } else if (!IsOld()) {
    low_grads_[u.value] = e_.Alloc(GatherShard(u), Category::kShardedGradient, Stream::kCompute);
  }
  if (!IsOld() && !bucket_.valid()) {
    NewBucket();
  }
}

void Zero3Rules::NewBucket() {
  if (plan_.zero.contiguous_gradients) {
    bucket_ = e_.Alloc(InParam(plan_.zero.reduce_bucket), Category::kReduceScatter,
                       Stream::kCompute, plan_.zero.whole_bucket);
  }
}

std::int64_t Zero3Rules::LargestUpdate() const {
  std::int64_t largest = 0, elements = 0;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    elements += IsTrainable(UnitId(u)) ? Info(UnitId(u)).shard_elements : 0;
    largest = std::max(largest, elements);
    elements = elements >= plan_.zero.sub_group ? 0 : elements;
  }
  return largest;
}

void Zero3Rules::Flatten(std::span<const BufferId> buffers) {
  ++flat_tensors_;
  for (const BufferId id : buffers) {
    if (id.valid() && !e_.program.buffers[id.value].on_host) {
      e_.program.buffers[id.value].flat = flat_tensors_;
    }
  }
}

// Of what every unit has one of, the buffers of a sub-group lie one behind the other.
void Zero3Rules::FlattenSubGroups(std::span<const BufferId> buffers) {
  std::int64_t elements = 0;
  std::size_t begin = 0;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    elements += Info(UnitId(u)).shard_elements;
    if (elements >= plan_.zero.sub_group || u + 1 == unit_count()) {
      Flatten(buffers.subspan(begin, u + 1 - begin));
      begin = u + 1;
      elements = 0;
    }
  }
}

// Weights, masters, gradients and each state (_create_fp16_partitions_with_defragmentation).
void Zero3Rules::FlattenPartitions() {
  const auto states = static_cast<std::size_t>(StateCount(job_.optimizer.kind));
  std::vector<BufferId> masters(unit_count());
  std::vector<std::vector<BufferId>> kinds(states, masters);
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    const UnitState& state = At(UnitId(u));
    masters[u] = state.shard;
    for (std::size_t k = 0; k < state.states.size(); ++k) {
      kinds[k][u] = state.states[k];
    }
  }
  FlattenSubGroups(low_);
  FlattenSubGroups(masters);
  FlattenSubGroups(low_grads_);
  for (const std::vector<BufferId>& kind : kinds) {
    FlattenSubGroups(kind);
  }
}

bool Zero3Rules::Persists(UnitId u) const {
  const auto& params = Info(u).params;
  return std::all_of(params.begin(), params.end(), [&](const ParamSlot& slot) {
    return e_.in.model.params[slot.param.value].Elements() <= plan_.zero.persistence_threshold;
  });
}

void Zero3Rules::FetchModule(UnitId u, Phase phase) {
  if (InPlace() || !HasParams(u)) {
    return;
  }
  if (IsAway(u)) {
    order_.AddAvailable(Info(u).elements);
    Gather({u}, phase);
  }
  if (fetch_of_[u.value] != kNoFetch) {
    Wait(u, phase);
  }
  WaitForCopies(phase, u);
  std::vector<UnitId> ahead =
      order_.Fetch(u, [&](UnitId x) { return IsAway(x) ? Info(x).elements : 0; });
  if (!ahead.empty()) {
    std::sort(ahead.begin(), ahead.end(), [&](UnitId x, UnitId y) {
      return Info(x).params.front().param < Info(y).params.front().param;
    });
    Gather(ahead, phase);
  }
}

void Zero3Rules::ReleaseModule(UnitId u) {
  if (InPlace() || !HasParams(u) || IsAway(u)) {
    return;
  }
  const bool keeps =
      order_.IsComplete() &&
      (Persists(u) || order_.IsUsedSoon(u, [&](UnitId x) { return Info(x).elements; }));
  if (!keeps) {
    order_.AddAvailable(-Info(u).elements);
    FreeUnsharded(u);
  }
}

void Zero3Rules::Gather(const std::vector<UnitId>& units, Phase phase) {
  Fetch fetch;
  fetch.units = units;
  fetch.left = units.size();
  const bool direct = !IsOld() && units.size() == 1 && Info(units.front()).params.size() == 1;
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
    if (IsOld()) {
      const OpId over = e_.LastCompute();
      e_.AddHostWait({&over, 1}, phase, units.front().value);
      for (const UnitId u : units) {
        NewUnsharded(u);
      }
    }
    fetch.flat = e_.Alloc(full, Category::kAllGather, storage_);
    CopyIn(parts, full / plan_.shard_size, fetch.flat, where);
    for (const UnitId u : units) {
      if (IsAway(u)) {
        At(u).unsharded = fetch.flat;  // stands for "on its way" until it is copied out
      }
    }
  } else if (IsAway(units.front())) {
    NewUnsharded(units.front());
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
      e_.body->Free(part, direct ? StreamBit(Stream::kGather) : std::uint8_t{0});
    }
  }
  for (const UnitId u : units) {
    fetch_of_[u.value] = static_cast<std::uint32_t>(fetches_.size());
  }
  fetches_.push_back(fetch);
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
    NewUnsharded(u);
    part = At(u).unsharded;
  } else {
    part = e_.Alloc(GatherShard(u), Category::kAllGather, copy_);
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

void Zero3Rules::NewUnsharded(UnitId u) {
  if (persistent_[u.value].valid() && order_.IsComplete()) {
    At(u).unsharded = persistent_[u.value];
    e_.body->Alloc(At(u).unsharded);
  } else {
    At(u).unsharded = e_.Alloc(Unsharded(u), Category::kUnshardedParameter, storage_);
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
    e_.body->Free(fetch.flat, storage_ == copy_ ? std::uint8_t{0} : StreamBit(copy_));
  }
}

void Zero3Rules::CopyOut(const Fetch& fetch, Phase phase) {
  std::uint16_t index = 0;
  for (const UnitId u : fetch.units) {
    if (At(u).unsharded == fetch.flat) {
      NewUnsharded(u);
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

// What is still on its way at the end of a pass is released.
void Zero3Rules::EndPass(Phase phase) {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    const bool is_over = phase == Phase::kForward && (first_step_ || !Persists(UnitId(u)));
    if (fetch_of_[u] != kNoFetch || is_over) {
      FreeUnsharded(UnitId(u));
    }
  }
  order_.EndPass();
}

void Zero3Rules::Update() {
  std::vector<UnitId> all;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (low_grads_[u].valid() || At(UnitId(u)).host_grad.valid()) {
      all.push_back(UnitId(u));
    }
  }
  if (all.empty()) {
    return;
  }
  if (UpdatesOnHost()) {
    UpdateOnHost(all);
    return;
  }
  const BufferId norm = TakesGradNorm(job_) ? AddNorm(all) : BufferId();
  std::int64_t elements = 0;
  std::vector<UnitId> group;
  for (const UnitId u : all) {
    group.push_back(u);
    elements += Info(u).shard_elements;
    if (elements >= plan_.zero.sub_group || u == all.back()) {
      UpdateGroup(group, norm);
      group.clear();
      elements = 0;
    }
  }
  if (norm.valid()) {
    e_.body->Free(norm);
  }
}

void Zero3Rules::UpdateGroup(const std::vector<UnitId>& units, BufferId norm) {
  CastGrads(units);
  std::vector<BufferId> grads;
  for (const UnitId u : units) {
    grads.push_back(At(u).sharded_grad);
    if (IsOld()) {
      e_.body->Free(low_grads_[u.value], StreamBit(Stream::kCompute));
      low_grads_[u.value] = BufferId();
    }
  }
  Flatten(grads);
  ClipGrads(units, norm);
  AddFlatOptimizer(units);
  Bytes read{0}, written{0};
  for (const UnitId u : units) {
    read += MasterShard(u);
    written += GatherShard(u);
  }
  e_.AddCopy(OpCode::kCast, Stream::kCompute, {Phase::kOptimizer, units.front().value}, read,
             written, {});
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(At(u).shard, AccessMode::kRead, Role::kInput, index);
    e_.body->Use(low_[u.value], AccessMode::kWrite, Role::kOutput, index++);
  }
  FreeShardedGrads(units);
}

// All at once: sub-groups bound temporaries of the device. The host casts what it has updated;
// partitions that live on the device are copied there.
void Zero3Rules::UpdateOnHost(const std::vector<UnitId>& units) {
  WaitForHostGrads(Phase::kOptimizer);
  std::vector<BufferId> casts;
  for (const UnitId u : units) {
    casts.push_back(low_on_host_[u.value]);
  }
  AddHostOptimizer(units, casts);
  for (const UnitId u : units) {
    if (!plan_.offload.parameters) {
      e_.AddTransfer(OpCode::kCopyH2d, Stream::kCompute, {Phase::kOptimizer, u.value},
                     GatherShard(u), low_on_host_[u.value], low_[u.value]);
    }
  }
  FreeShardedGrads(units);
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
  Gather(units, Phase::kOptimizer);
  for (const UnitId u : units) {
    Wait(u, Phase::kOptimizer);
  }
  WaitForCopies(Phase::kOptimizer, units.front());
  const OpId over = e_.LastCompute();
  e_.AddHostWait({&over, 1}, Phase::kOptimizer, kNoSubject);
}

std::unique_ptr<StepRules> MakeZero3(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Zero3Rules>(emitter, spans, units);
}

}  // namespace shardwright
