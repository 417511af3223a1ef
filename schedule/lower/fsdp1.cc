// PyTorch FSDP1 (FullyShardedDataParallel): one flat parameter per unit, gathers on the unshard
// stream, everything after backward on the post-backward stream, memory handed between streams by
// recordStream and bounded by the rate limiter. Rules: docs/lowering.md, section fsdp1.

#include <algorithm>
#include <deque>

#include "core/error.h"
#include "schedule/lower/flat_rules.h"
#include "schedule/lower/layout.h"

namespace shardwright {
namespace {

class Fsdp1Rules : public FlatRules {
 public:
  Fsdp1Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : FlatRules(emitter, spans, units) {
    if (plan_.replicate_size > 1) {
      replicate_group_ = e_.AddGroup("replicate", plan_.replicate_size, plan_.shard_size);
    }
  }

  // Forward prefetch follows the order recorded in the first step, so the first one has none.
  [[nodiscard]] bool FirstStepDiffers() const override { return plan_.forward_prefetch; }

  // The limiter's queue lives across steps: in the steady state it begins a step with as many
  // events as the gathers before the step's first free need, so that each of them finds one to
  // wait for; the step before left them in carry slots.
  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    free_events_.clear();
    if (!first) {
      for (std::uint32_t i = 0; i < CarriedEvents(); ++i) {
        free_events_.push_back({OpId(), kFirstEventSlot + i});
      }
    }
  }

  void PreForward(UnitId u, Phase phase) override {
    FlatRules::PreForward(u, phase);
    if (HasParams(u) && phase == Phase::kForward && plan_.forward_prefetch && !first_step_) {
      PrefetchForward(u);
    }
  }

  void PreBackward(UnitId u) override {
    if (!HasParams(u)) {
      return;
    }
    Unshard(u, Phase::kBackward);
    WaitForUnshard(u, Phase::kBackward);
    if (plan_.backward_prefetch == BackwardPrefetch::kPre) {
      PrefetchBackward(u);
    }
  }

  void GradientsFinal(UnitId u) override {
    At(u).backward_done = true;
    if (plan_.bounded_memory) {
      e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, u.value);
    }
    const BufferId flat = FlattenGrads(u);
    // Without a reduction, SHARD_GRAD_OP keeps the parameters for the next micro-batch.
    if (Syncs() || Reshards(u)) {
      FreeUnsharded(u);
    }
    if (plan_.backward_prefetch == BackwardPrefetch::kPost) {
      PrefetchBackward(u);
    }
    if (!Syncs()) {
      KeepUnreduced(u, flat);
      return;
    }
    Reduce(u, AddKept(u, flat));
  }

  void EndBackward() override {
    e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, kNoSubject);
    if (Syncs()) {
      FreeAllUnsharded();  // gathers that nobody used, too
    }
    WaitForHostGrads(Phase::kBackward);
    last_reduce_ = last_replicate_ = OpId();
  }

  void EndStep() override {
    std::uint32_t slot = kFirstEventSlot;
    for (const FreeEvent& event : free_events_) {
      if (slot < kFirstEventSlot + CarriedEvents() && event.op.valid()) {
        e_.body->SetCarry(slot++, event.op);
      }
    }
    StepRules::EndStep();
  }

 protected:
  void InitUnit(UnitId u) override {
    StepRules::InitUnit(u);
    for (std::uint32_t i = 0; i < CarriedEvents() && HasParams(u); ++i) {
      e_.body->SetCarry(kFirstEventSlot + i, e_.body->last());
    }
  }

  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutFlat(e_.in.model, unit, plan_.shard_size, plan_.use_orig_params,
                      UnitPrecision(job_.precision, unit.full_precision).param);
  }

  void BeforeGather(Phase phase, UnitId unit) override {
    if (plan_.limit_all_gathers) {
      WaitForLimiter(phase, unit);
    }
  }
  void AfterFree() override { free_events_.push_back({e_.LastCompute(), 0}); }

 private:
  void PrefetchForward(UnitId u) {
    // Units enter forward in the order of their first op; the next one after u.
    const auto first_op = [&](UnitId x) { return spans_.spans[x.value].front().first; };
    UnitId next;
    for (std::uint32_t v = 0; v < unit_count(); ++v) {
      const UnitId candidate(v);
      if (!HasParams(candidate) || spans_.spans[v].empty() || first_op(candidate) <= first_op(u)) {
        continue;
      }
      if (!next.valid() || first_op(candidate) < first_op(next)) {
        next = candidate;
      }
    }
    if (next.valid()) {
      Unshard(next, Phase::kForward);
    }
  }

  void PrefetchBackward(UnitId u) {
    const UnitId previous = LeftBefore(u);
    if (previous.valid() &&
        spans_.backward_first[previous.value] != kNoRegion) {  // its outputs need a gradient
      Unshard(previous, Phase::kBackward);
    }
  }

  // A free that the limiter may have to wait for: an op of this step, or a carry slot.
  struct FreeEvent {
    OpId op;
    std::uint32_t slot = 0;
  };
  static constexpr std::size_t kLimit = 2;  // _FreeEventQueue's constant
  static constexpr std::uint32_t kFirstEventSlot = kOptimizerSlot + 1;

  // kLimit - 1, plus the gathers of a forward pass before its first free.
  [[nodiscard]] std::uint32_t CarriedEvents() const {
    if (!plan_.limit_all_gathers) {
      return 0;
    }
    std::uint32_t first_free = kNoRegion;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (HasParams(UnitId(u)) && Reshards(UnitId(u))) {
        first_free = std::min(first_free, spans_.spans[u].front().last);
      }
    }
    std::uint32_t gathers = 0;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      const bool is_gathered = HasParams(UnitId(u)) && !InPlace(UnitId(u));
      gathers += is_gathered && spans_.spans[u].front().first <= first_free ? 1U : 0U;
    }
    return gathers == 0 ? 0 : static_cast<std::uint32_t>(kLimit) - 1 + gathers;
  }

  // At most two frees may be outstanding on the device when a new gather is issued.
  void WaitForLimiter(Phase phase, UnitId u) {
    if (free_events_.size() >= kLimit) {
      const FreeEvent oldest = free_events_.front();
      free_events_.pop_front();
      e_.AddHostWait({&oldest.op, 1}, phase, u.value);
      if (!oldest.op.valid()) {
        e_.body->AfterSlot(oldest.slot);
      }
    }
  }

  void Reduce(UnitId u, BufferId flat) {
    const OpId computed = e_.LastCompute();
    e_.AddWait(Stream::kReduce, {computed}, Phase::kBackward, u.value);
    const Stream s = Stream::kReduce;
    const DType r = PrecisionOf(u).reduce;
    const BufferId input = CastFlat(u, flat);
    Scale(u, input, FlatGrad(u, r), s, factors_.pre);
    BufferId out = input;
    const bool whole = plan_.shard_size == 1;
    const Bytes shard = Bytes(Info(u).shard_elements * SizeOf(r));
    if (!whole) {
      const bool adopts = !CastsReduce(u) && !At(u).sharded_grad.valid();
      out = e_.Alloc(shard, adopts ? Category::kShardedGradient : Category::kReduceScatter, s);
      e_.AddCollective(
          Collective(OpCode::kReduceScatter, s, shard_group_, FlatGrad(u, r), r),
          {Phase::kBackward, u.value},
          {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    }
    last_reduce_ = e_.body->last();
    Stream tail = s;
    if (replicate_group_.valid()) {
      tail = Stream::kReplicate;
      e_.AddCollective(Collective(OpCode::kAllReduce, tail, replicate_group_, shard, r),
                       {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
      e_.After(last_reduce_);
    }
    Scale(u, out, shard, tail, factors_.post);
    Store(u, out, tail);
    FreeReduced(u, flat, input, out);
    if (plan_.offload.parameters && last_micro_batch_) {
      GradToHost(u, tail, e_.body->last());
      DropSentGrad(u, tail);
    }
    (tail == s ? last_reduce_ : last_replicate_) = e_.body->last();
  }

  // The reduced shard becomes, or is added to, the gradient that the optimizer reads.
  void Store(UnitId u, BufferId out, Stream tail) {
    UnitState& state = At(u);
    const bool accumulate = state.sharded_grad.valid();
    const Bytes shard = e_.program.buffers[out.value].size;
    if (!accumulate && !CastsReduce(u)) {
      state.sharded_grad = out;
      return;
    }
    if (!accumulate) {
      state.sharded_grad = e_.Alloc(MasterShard(u), Category::kShardedGradient, tail);
    }
    e_.AddCopy(OpCode::kGradStore, tail, {Phase::kBackward, u.value},
               accumulate ? shard + MasterShard(u) : shard, MasterShard(u),
               {{state.sharded_grad, accumulate ? AccessMode::kReadWrite : AccessMode::kWrite,
                 Role::kOutput},
                {out, AccessMode::kRead, Role::kInput}});
  }

  void FreeReduced(UnitId u, BufferId flat, BufferId input, BufferId out) {
    const std::uint8_t others = StreamBit(Stream::kReduce) | StreamBit(Stream::kReplicate);
    if (flat != At(u).sharded_grad) {
      e_.body->Free(flat, others);
    }
    if (input != flat && input != At(u).sharded_grad) {
      e_.body->Free(input, StreamBit(Stream::kReplicate));
    }
    if (out != input && out != At(u).sharded_grad) {
      e_.body->Free(out, StreamBit(Stream::kReplicate));
    }
  }

  GroupId replicate_group_;
  OpId last_reduce_, last_replicate_;
  std::deque<FreeEvent> free_events_;
};

}  // namespace

std::unique_ptr<StepRules> MakeFsdp1(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Fsdp1Rules>(emitter, spans, units);
}

}  // namespace shardwright
