// Stage 3: the lifetime of partitions, and the update; zero3_calls.cc knows the modules' calls,
// zero3_fetches.cc gathers, zero3_reductions.cc reduces.
//
// Example: a weight of 512 x 512 over 4 ranks, p = bf16, o = fp32, AdamW. Each rank keeps from the
// start: 131,072 bytes of the weight's partition (p), 262,144 of its master (o), 131,072 of its
// gradient (p), and 524,288 of states. All partitions of a sub-group lie in one flat tensor per
// kind, so the allocator sees few large tensors instead of thousands of small ones.

#include <array>

#include "core/ranges.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/zero3_rules.h"

namespace shardwright {
Zero3Rules::Zero3Rules(Emitter& emitter, const UnitSpans& spans,
                       const std::vector<ResolvedUnit>& units)
    : ZeroRules(emitter, spans, units),
      low_(units.size()),
      grad_blocks_(units.size()),
      low_on_host_(units.size()),
      sums_on_host_(units.size()),
      stored_(units.size()),
      due_(units.size()),
      persistent_(units.size()),
      calls_(units.size()),
      units_of_(emitter.in.model.modules.size()),
      names_(emitter.in.model.modules.size(), 0),
      called_(emitter.in.model.modules.size(), 0),
      hooks_left_(emitter.in.model.modules.size()),
      fetch_of_(units.size(), kNoFetch),
      order_(plan_.zero, units.size()) {
  copy_ = Overlaps() ? Stream::kCopyIn : Stream::kCompute;
  storage_ = plan_.zero.before_deepspeed_0_6 ? Stream::kGather : copy_;
  reduce_ = Overlaps() ? Stream::kReduce : Stream::kCompute;
  if (!ScattersGradients(plan_)) {
    AddWorldGroup();
  }
  CountNames();
  FindCalls(units);
  CountGradients();
}

void Zero3Rules::BeginStep(bool first) {
  StepRules::BeginStep(first);
  if (flat_tensors_ == 0) {
    FlattenPartitions();
    PadHost();
  }
  copy_tail_ = seen_tail_ = last_reduce_ = OpId();
  fetch_events_.clear();
  reduce_events_.clear();
  fetches_.clear();
}

void Zero3Rules::BeginMicroBatch(bool first, bool last) {
  StepRules::BeginMicroBatch(first, last);
  std::fill(stored_.begin(), stored_.end(), 0);
  for (Calls& calls : calls_) {
    calls.next_forward = 0;
    calls.regions_again = regions_again_;
    calls.next_backward = calls.with_backward.size();
  }
  order_.BeginPass();
}

void Zero3Rules::EndForward() {
  if (job_.mode == JobMode::kForward) {
    EndPass(Phase::kForward);
  } else if (plan_.zero.before_deepspeed_0_6) {
    NewBucket();
  }
}

// The epilogue reduces what is left and synchronises the host with the reductions.
void Zero3Rules::EndBackward() {
  ReleaseLeftovers();
  Flush();
  FreeReduced();
  if (plan_.zero.before_deepspeed_0_6 && bucket_.valid()) {
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
// and the bucket, which is as large as it may get from the beginning. Before 0.6 each backward pass
// made its bucket, and the first reduction of a step the partitions of gradients.
void Zero3Rules::InitUnit(UnitId u) {
  if (HasParams(u)) {
    low_[u.value] = plan_.offload.parameters
                        ? e_.AllocOnHost(GatherShard(u), Category::kParameterShard)
                        : e_.Alloc(GatherShard(u), Category::kParameterShard, Stream::kCompute);
    HoldShard(low_[u.value], u);
    e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0),
               GatherShard(u), {{low_[u.value], AccessMode::kWrite, Role::kOutput}});
    Buffer b;
    b.size = Unsharded(u);
    b.category = Category::kUnshardedParameter;
    b.owner = storage_;
    if (Persists(u) && !InPlace()) {
      persistent_[u.value] = Hold(e_.body->NewBuffer(b), u, Holds::kUnit, job_.precision.param);
    }
  }
  if (job_.mode == JobMode::kForward || !IsTrainable(u)) {
    return;
  }
  ZeroRules::InitUnit(u);
  if (UpdatesOnHost()) {
    low_on_host_[u.value] = plan_.offload.parameters
                                ? low_[u.value]
                                : e_.AllocOnHost(GatherShard(u), Category::kParameterShard);
    HoldShard(low_on_host_[u.value], u);
    if (plan_.accumulation > 1) {
      sums_on_host_[u.value] =
          HoldShard(e_.AllocOnHost(GatherShard(u), Category::kShardedGradient), u);
    }
  } else if (!plan_.zero.before_deepspeed_0_6) {
    // Zeros, which the norm and the update read where no gradient comes.
    low_grads_[u.value] =
        HoldShard(e_.Alloc(GatherShard(u), Category::kShardedGradient, Stream::kCompute, true), u);
  }
  if (!plan_.zero.before_deepspeed_0_6 && !bucket_.valid()) {
    NewBucket();
  }
}

void Zero3Rules::NewBucket() {
  if (plan_.zero.contiguous_gradients) {
    bucket_ = NewMixed(InParam(plan_.zero.reduce_bucket), Stream::kCompute, job_.precision.param,
                       plan_.zero.before_deepspeed_0_6);
  }
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
    // Packed states are one tensor already.
    for (std::size_t k = 0; k < state.states.size() && !HasPackedStates(); ++k) {
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

// Of DeepSpeed 0.19.8: one block for the weights of all units (_create_param_groups_fp16_flat_
// cpu_memory), one that gradients add up in (grad_partitions_flat_buffer) and one for those of each
// sub-group in the masters' dtype.
void Zero3Rules::PadHost() {
  Bytes weights(0);
  BufferId first;
  const bool updates = UpdatesOnHost() && job_.mode == JobMode::kTrain;
  const std::vector<UnitId> trainable = updates ? TrainableUnits() : std::vector<UnitId>();
  const Bytes sums = InParam(FlatElements(trainable));
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (HasParams(UnitId(u)) && (plan_.offload.parameters || low_on_host_[u].valid())) {
      weights += plan_.offload.parameters ? GatherShard(UnitId(u)) : Bytes(0);
      first = first.valid() ? first : plan_.offload.parameters ? low_[u] : low_on_host_[u];
    }
  }
  for (const std::vector<UnitId>& group : SubGroups(trainable)) {
    const Bytes grads = Summed<Bytes>(group, [&](const UnitId u) { return GradShard(u); });
    grad_blocks_[group.front().value] = e_.Pinned(grads) - (grads - GradShard(group.front()));
  }
  if (!first.valid()) {
    return;
  }
  Buffer& buffer = e_.program.buffers[first.value];
  const Bytes named = plan_.accumulation > 1 ? sums : Bytes(0);  // sums_on_host_
  const std::array blocks = {e_.Pinned(weights) - weights + buffer.size, e_.Pinned(sums) - named};
  buffer.pieces = e_.InternPieces(blocks);
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
  const std::vector<std::vector<UnitId>> groups = SubGroups(all);
  std::vector<BufferId> norms;
  for (const std::vector<UnitId>& group : groups) {
    norms.push_back(AddNorm(group));
  }
  const bool clips = TakesGradNorm(job_);
  std::size_t added = clips ? norms.size() : 0;  // by the first clipping, to the first of them
  for (const std::vector<UnitId>& group : groups) {
    UpdateGroup(group, std::span<const BufferId>(norms).first(added));
    added = std::min<std::size_t>(added, 1);
  }
  for (const BufferId norm : norms) {
    e_.body->Free(norm);
  }
}

// Example: shards of 40, 70, 30 and 10 elements, sub_group 100. The first two are a group: it is
// closed when it has reached 100. The other two are the second group.
std::vector<std::vector<UnitId>> Zero3Rules::SubGroups(std::span<const UnitId> units) const {
  std::vector<std::vector<UnitId>> groups;
  std::int64_t elements = plan_.zero.sub_group;
  for (const UnitId u : units) {
    if (elements >= plan_.zero.sub_group) {
      groups.emplace_back();
      elements = 0;
    }
    groups.back().push_back(u);
    elements += Info(u).shard_elements;
  }
  return groups;
}

void Zero3Rules::UpdateGroup(const std::vector<UnitId>& units, std::span<const BufferId> norms) {
  CastGrads(units);
  std::vector<BufferId> grads;
  for (const UnitId u : units) {
    grads.push_back(At(u).sharded_grad);
    if (plan_.zero.before_deepspeed_0_6) {
      e_.body->Free(low_grads_[u.value], StreamBit(Stream::kCompute));
      low_grads_[u.value] = BufferId();
    }
  }
  Flatten(grads);
  ClipGrads(units, norms);
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

// All at once: sub-groups bound temporaries of the device. The host reads their norms first, casts
// what it has updated, and partitions that live on the device are copied there.
void Zero3Rules::UpdateOnHost(const std::vector<UnitId>& units) {
  WaitForHostGrads(Phase::kOptimizer);
  // With a gradient or without.
  for (std::size_t groups = UpdatedTogether().size(); groups > 0; --groups) {
    const BufferId norm = AddNormOfSent();
    const OpId summed = e_.body->last();
    e_.AddHostWait({&summed, 1}, Phase::kOptimizer, kNoSubject);
    e_.body->Free(norm);
  }
  std::vector<BufferId> casts =
      Mapped<BufferId>(units, [&](const UnitId u) { return low_on_host_[u.value]; });
  AddHostOptimizer(units, casts);
  for (const UnitId u : units) {
    if (!plan_.offload.parameters) {
      e_.AddTransfer(OpCode::kCopyH2d, Stream::kCompute, {Phase::kOptimizer, u.value},
                     GatherShard(u), low_on_host_[u.value], low_[u.value]);
    }
  }
  FreeShardedGrads(units);
}

std::unique_ptr<StepRules> MakeZero3(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Zero3Rules>(emitter, spans, units);
}

}  // namespace shardwright
