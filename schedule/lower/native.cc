// The native dialect: hooks, gradients' targets and the end of a step; native_gathers.cc gathers,
// native_reductions.cc reduces and updates.
//
// Example: layers A and B and a root on 4 ranks, in_flight 2. A step, with the streams:
//
//   copy_in, gather   root, then A (one ahead); B when A is entered
//   compute           root's op, A, free A, B, free B, head and loss
//   copy_in, gather   B for backward, not before the op in front of the head has ended; then A
//   compute           B's backward, writing into B's reduce-scatter input
//   reduce            reduce-scatter of B, beside A's backward; of A; of the root
//   compute           norm, clip, then updates in the order root, A, B
//
// The updates go in the order in which the next forward gathers. A gather of the next step waits
// for its own unit's update only, so root's gather may begin while A is still being updated.

#include "core/budget.h"
#include "core/ranges.h"
#include "schedule/lower.h"
#include "schedule/lower/native_rules.h"

namespace shardwright {

NativeRules::NativeRules(Emitter& emitter, const UnitSpans& spans,
                         const std::vector<ResolvedUnit>& units)
    : StepRules(emitter, spans, units),
      comm_(units.size()),
      moments_(emitter, emitter.in.plan.in_flight, FreedSlot() + 1),
      part_of_param_(emitter.in.model.params.size()) {
  constexpr std::int64_t kMostAhead = 100'000'000;
  const std::int64_t ahead = std::min<std::int64_t>(plan_.in_flight, std::ssize(units));
  Budget("plan: in_flight", "looks at units to gather ahead", kMostAhead)
      .Take(ahead * std::ssize(units));
  gather_group_ = e_.AddGroup({Axis::kShard});
  reduce_group_ = e_.AddGroup({Axis::kShard}, "shard.reduce");
  if (plan_.replicate_size > 1) {
    replicate_group_ = e_.AddGroup({Axis::kReplicate});
  }
  if (TakesTurns()) {
    products_ = FindLargeProducts(e_.in.model, e_.a, spans);
  }
  is_read_again_ = FindReadAgain();
  mixes_frozen_.resize(units.size());
}

void NativeRules::BeginStep(bool first) {
  StepRules::BeginStep(first);
  for (Comm& c : comm_) {
    c.updated_before = true;
  }
  FindOrders();
  first_gather_ = true;
  last_collective_ = OpId();
  last_read_of_freed_ = before_last_params_ = OpId();
}

void NativeRules::PreForward(UnitId u, Phase phase) {
  if (!HasParams(u)) {
    return;
  }
  Gather(u, phase);
  WaitForGather(u, phase);
  if (phase == Phase::kForward) {
    PrefetchAfter(u, forward_order_, plan_.units[u.value].forward_prefetch, phase);
  }
}

// Frees the unit, keeps it (`never`, or the unit whose backward comes next), or keeps a part of it
// (`reshard` to a group).
void NativeRules::PostForward(UnitId u, Phase phase) {
  if (!HasParams(u) || !At(u).unsharded.valid()) {
    return;
  }
  const bool last = phase == Phase::kForward && !backward_order_.empty() &&
                    backward_order_.front() == u && job_.mode == JobMode::kTrain;
  const Reshard::Kind kind = plan_.units[u.value].reshard.kind;
  // A unit whose backward follows at once stays gathered.
  if (job_.mode == JobMode::kForward || (!last && kind == Reshard::Kind::kAlways)) {
    FreeUnsharded(u);
  } else if (!last && kind == Reshard::Kind::kToGroup) {
    // A part that no backward gathers would outlive the update.
    const bool is_updated_unread = HasBackwardAhead(u) && !is_read_again_[u.value];
    is_updated_unread ? FreeUnsharded(u) : KeepPart(u, phase);
  }
}

void NativeRules::PreBackward(UnitId u) {
  if (!HasParams(u)) {
    return;
  }
  Gather(u, Phase::kBackward);
  WaitForGather(u, Phase::kBackward);
  PrefetchAfter(u, backward_order_, plan_.units[u.value].backward_prefetch, Phase::kBackward);
}

void NativeRules::EndForward() {
  waiting_gathers_.clear();  // prefetch lists may name units that forward has passed
  if (job_.mode == JobMode::kForward) {
    FreeAll();
  }
  CarryFreed();
  const OpId freed = last_read_of_freed_;
  last_read_of_freed_ = freed.valid() && freed > before_last_params_ ? freed : before_last_params_;
}

void NativeRules::GradientsFinal(UnitId u) {
  if (Syncs() && TakesTurns()) {
    waiting_reductions_.push_back(u);
  } else if (Syncs()) {
    Reduce(u);
  }
}

void NativeRules::BeforeForwardOp(std::uint32_t model_op, Phase phase) {
  if (phase == Phase::kForward && !e_.in.model.ops[model_op].params.empty()) {
    before_last_params_ = e_.LastCompute();
  }
  if (TakesTurns() && products_.any[model_op]) {
    (void)BeginGather();
    if (phase == Phase::kForward && products_.last[model_op]) {
      BeginTransfers();
    }
  }
}

void NativeRules::BeforeBackwardOp(std::uint32_t model_op) {
  if (TakesTurns() && products_.any[model_op]) {
    (void)BeginTransfer();
    if (products_.first[model_op]) {
      BeginTransfers();
    }
  }
}

// The unit's gradient buffer has the layout of its parameters, so kernels write where the
// reduce-scatter reads. The first write to a storage overwrites, later ones add: of a second op
// with the weight, or of a later micro-batch without a reduction.
NativeRules::GradTarget NativeRules::WeightGradTarget(std::uint32_t model_op, UnitId u) {
  UnitState& state = At(u);
  if (IsSummedApart(model_op)) {
    BufferId& part = part_of_param_[GroupOf(model_op).value];
    const bool is_new = !part.valid();
    if (is_new) {
      const DType r = PrecisionOf(u).reduce;
      part = e_.Hold(e_.Alloc(Bytes(SumOfGradElementsWith(model_op) * SizeOf(r)),
                              Category::kUnshardedGradient, Stream::kCompute),
                     Holds::kTensors, model_op, r);
    }
    return {part, is_new ? AccessMode::kWrite : AccessMode::kReadWrite};
  }
  if (!state.accumulated.valid()) {
    MakeRoomForGrads();
    state.accumulated =
        Hold(e_.Alloc(ReduceFull(u), Category::kUnshardedGradient, Stream::kCompute), u,
             Holds::kShards, PrecisionOf(u).reduce);
    written_[u.value].clear();
  }
  const ParamId storage = GroupOf(model_op);
  auto& written = written_[u.value];
  const bool again = IsIn(written, storage);
  if (!again) {
    written.push_back(storage);
  }
  return {state.accumulated, again ? AccessMode::kReadWrite : AccessMode::kWrite};
}

void NativeRules::WeightGradWritten(std::uint32_t model_op, UnitId u) {
  if (!IsSummedApart(model_op) || !completes_grad_[model_op]) {
    return;
  }
  BufferId& part = part_of_param_[GroupOf(model_op).value];
  const Bytes size = e_.program.buffers[part.value].size;
  e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, model_op}, 2 * size,
             size,
             {{At(u).accumulated, AccessMode::kReadWrite, Role::kOutput},
              {part, AccessMode::kRead, Role::kInput}});
  e_.body->Free(part);
  part = BufferId();
}

void NativeRules::EndBackward() {
  BeginTransfers();
  FreeAll();
  CarryFreed();
  if (last_micro_batch_) {
    FollowActivations();
    // Nothing waits for the last reductions but the updates behind them.
    const std::uint8_t used_on =
        StreamBit(Stream::kReduce) |
        (ReducesInPlace() && replicate_group_.valid() ? StreamBit(Stream::kReplicate) : 0);
    for (const InUse& r : reducing_) {
      e_.body->Free(r.buffer, used_on);
    }
    reducing_.clear();
  }
}

void NativeRules::EndStep() {
  std::vector<UnitId> units = UnitsWithGrads();
  if (units.empty()) {  // without the norm all of them are updated already
    moments_.EndStep();
    return;
  }
  // In the order in which the next forward needs them.
  StableSort(units, [&](UnitId x, UnitId y) {
    return spans_.spans[x.value].front().first < spans_.spans[y.value].front().first;
  });
  if (UpdatesOnHost()) {
    UpdateOnHost(units);
    return;
  }
  e_.AddWait(Stream::kCompute, {last_reduce_}, Phase::kOptimizer, kNoSubject);
  AddClip(units, Stream::kCompute, reduce_group_);
  const Stream stream = UpdateStream();
  e_.AddWait(stream, {e_.body->last()}, Phase::kOptimizer, kNoSubject);
  for (const UnitId u : units) {
    Update(u, stream);
  }
  moments_.EndStep();
  FreeShardedGrads(units);
}

void NativeRules::InitUnit(UnitId u) {
  StepRules::InitUnit(u);
  const std::int64_t trainable = TrainablePaddedElements(e_.in.model, Info(u));
  mixes_frozen_[u.value] = trainable > 0 && trainable < Info(u).padded_elements;
  if (HasParams(u)) {
    e_.body->SetCarry(SlotOf(u), e_.body->last());
  }
  if (plan_.offload.optimizer && !plan_.offload.parameters && HasParams(u)) {
    At(u).host_master = Hold(e_.AllocOnHost(MasterShard(u), Category::kParameterShard), u,
                             Holds::kShard, job_.precision.master);
    e_.AddTransfer(OpCode::kCopyD2h, Stream::kCompute, {Phase::kInit, u.value}, MasterShard(u),
                   At(u).shard, At(u).host_master);
  }
}

bool NativeRules::IsSummedApart(std::uint32_t model_op) const {
  return plan_.sync == SyncMode::kLast && !first_micro_batch_ &&
         is_shared_[GroupOf(model_op).value];
}

std::unique_ptr<StepRules> MakeNative(Emitter& emitter, const UnitSpans& spans,
                                      const std::vector<ResolvedUnit>& units) {
  return std::make_unique<NativeRules>(emitter, spans, units);
}

}  // namespace shardwright
