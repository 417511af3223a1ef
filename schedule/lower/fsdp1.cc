// PyTorch FSDP1 (FullyShardedDataParallel): one flat parameter per unit, gathers on the unshard
// stream, everything after backward on the post-backward stream, memory handed between streams by
// recordStream and bounded by the rate limiter. Rules: docs/lowering.md, section fsdp1.
//
// Example: layers A and B and a root on 4 ranks, limiter on. Forward of a steady step:
//
//   root: cast, host waits for an event of the step before, all-gather; never freed after forward
//   A: cast, host waits, all-gather, ops, free: an event is queued behind A's last op
//   B: cast, host waits, all-gather, ops, free: a second event
//   backward of B: cast, host waits for A's event, all-gather; A is prefetched before B's ops
//
// The limiter bounds how far the host runs ahead. Gather buffers come from the pool of the unshard
// stream and are freed by recordStream, so they return only when compute is done with them. A host
// that ran ahead without a limit would allocate a new buffer for each unit.

#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/flat_rules.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/selective_hooks.h"

namespace shardwright {
namespace {

class Fsdp1Rules : public FlatRules {
 public:
  Fsdp1Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : FlatRules(emitter, spans, units), handles_(units.size()) {
    CheckSharedGrads();
    FindHooks();
    if (plan_.replicate_size > 1) {
      replicate_group_ = e_.AddGroup({Axis::kReplicate});
    }
  }

  // Without a reduction gradients wait in the dtype in which they were made. Where they are whole,
  // as the parameters are, torch gives a parameter's second name the first one's gradient, and that
  // setter asks for the parameter's dtype (_use_sharded_grad_views of _flat_param.py, torch 2.13).
  void CheckSharedGrads() const {
    if (plan_.shard_size > 1 || !plan_.use_orig_params || plan_.sync != SyncMode::kLast ||
        plan_.accumulation == 1 || job_.mode != JobMode::kTrain ||
        job_.precision.param == job_.precision.master) {
      return;
    }
    for (std::size_t p = 0; p < e_.in.model.params.size(); ++p) {
      const Parameter& param = e_.in.model.params[p];
      const UnitId u = spans_.unit_of_param[p];
      if (param.tied_to.valid() && e_.in.model.params[param.tied_to.value].trainable &&
          spans_.grads_final[u.value] != kNoRegion) {
        throw InputError("plan: units[" + std::to_string(u.value) + "]",
                         "parameter \"" + param.fqn + "\", a second name, with replicas only",
                         "gradients of the parameters' dtype, sync \"every\", or shards",
                         "torch fails without a reduction: attempting to assign a gradient with "
                         "another dtype");
      }
    }
  }

  // Forward prefetch follows the order recorded in the first pass, so that one has none. Without a
  // backward, the first pass gathers what stays.
  [[nodiscard]] bool FirstStepDiffers() const override {
    return plan_.forward_prefetch || job_.mode == JobMode::kForward || !carried_.empty();
  }

  // Units that torch keeps for good, gathered by the first step.
  [[nodiscard]] std::vector<bool> StillGathered() const override { return still_gathered_; }
  void CarryGathered(const std::vector<bool>& units) override { carried_ = units; }

  // The limiter's queue lives across steps. In the steady state a step begins with an event for
  // each gather before its first free, so each of these gathers finds one to wait for. The step
  // before has left the events in carry slots.
  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    for (std::uint32_t u = 0; u < unit_count() && !first; ++u) {
      if (StaysGathered(UnitId(u)) && At(UnitId(u)).unsharded.valid()) {
        e_.body->Alloc(At(UnitId(u)).unsharded, PointKind::kAllocOnce);
      }
    }
    free_events_.clear();
    if (!first) {
      for (std::uint32_t i = 0; i < CarriedEvents(); ++i) {
        free_events_.push_back({OpId(), kFirstEventSlot + i});
      }
    }
  }

  void BeginMicroBatch(bool first, bool last) override {
    StepRules::BeginMicroBatch(first, last);
    handles_.assign(handles_.size(), {});
    left_.clear();
    hooks_.BeginMicroBatch();
  }

  void InRegion(std::uint32_t region, Phase phase) override { hooks_.InRegion(region, phase); }
  void BeforeForwardOp(std::uint32_t model_op, Phase /*phase*/) override { at_ = model_op; }

  void EndForward() override {
    hooks_.InRegion(kNoRegion, Phase::kForward);
    if (job_.mode != JobMode::kForward) {
      FindFinals();
      return;
    }
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (!StaysGathered(UnitId(u))) {
        FreeUnsharded(UnitId(u));
      }
    }
  }

  void PreForward(UnitId u, Phase phase) override {
    hooks_.See(u, HookCall::kRecord, 3);  // forward, _root_pre_forward, _pre_forward
    if (HasParams(u) && handles_[u.value].in_backward) {
      return;  // a recomputation that needs the unit's backward has begun
    }
    if (HasParams(u)) {
      SeeUnshard(u);
      hooks_.See(u, HookCall::kRecord);  // _pre_forward_prefetch
    }
    BeginGathers(phase);
    if (HasParams(u)) {
      Unshard(u, phase);
      WaitForUnshard(u, phase);
    }
    handles_[u.value].was_entered = true;
    handles_[u.value].looks_freed = false;
    if (HasParams(u) && phase == Phase::kForward && MakesViewsEarly()) {
      PrefetchForward(u);
    }
  }

  void PostForward(UnitId u, Phase /*phase*/) override {
    Handle& handle = handles_[u.value];
    hooks_.See(u, HookCall::kRecord);  // _post_forward
    if (!HasParams(u) || handle.in_backward) {
      return;
    }
    SeeReshard(u, Reshards(u));
    // _exec_order_utils.py, record_post_forward: a second place replaces the first one only if
    // that was 0, which is taken for none.
    if (handle.place == 0) {
      handle.place = left_.size();
    }
    left_.push_back(u);
    if (Reshards(u)) {
      FreeUnsharded(u);
    }
    const Call& call = CallAt(u);
    if (!call.is_without_grad) {  // _register_pre_backward_hooks
      handle.needs_backward = call.has_grad_output;
      handle.ran_pre_backward = handle.has_ended = false;
    }
    // With gradients SHARD_GRAD_OP skips the sharded views (_use_sharded_flat_param).
    const bool skips_views = plan_.use_orig_params && !call.is_without_grad && !IsFullShard(u);
    handle.looks_freed = plan_.shard_size > 1 && !skips_views;
  }

  void PreBackward(UnitId u) override { hooked_.push_back(u); }
  void GivenBack(std::span<const UnitId> units) override {
    given_.insert(given_.end(), units.begin(), units.end());
  }

  // Hooks on one tensor run in the order in which they were registered. An
  // all-frozen unit registers its hook when a call enters it with the tensor. A unit that returns
  // the tensor registers its hook when the call leaves it. Inner units are left first.
  void BackwardBegins(std::uint32_t model_op) override {
    std::vector<TensorHook> hooks;
    for (const std::vector<UnitId>* left : {&hooked_, &given_}) {
      for (std::size_t i = left->size(); i-- > 0;) {
        hooks.push_back({2 * LeftAt((*left)[i], model_op) + 1, (*left)[i], false});
      }
    }
    hooked_.clear();
    given_.clear();
    for (const UnitId u : frozen_ends_[model_op]) {
      hooks.push_back({2 * FirstWithGrad(u).first, u, true});
    }
    StableSortBy(hooks, &TensorHook::moment);
    for (const TensorHook& hook : hooks) {
      if (!hook.ends_frozen) {
        BeginUnit(hook.unit);
      } else if (HasParams(hook.unit) &&
                 std::exchange(handles_[hook.unit.value].is_pending_frozen, false)) {
        EndUnit(hook.unit);
      }
    }
  }

  void BeginUnit(UnitId u) {
    Handle& handle = handles_[u.value];
    if (!HasParams(u) || handle.ran_pre_backward) {
      return;
    }
    CheckNotEnded(u);
    handle.ran_pre_backward = handle.in_backward = true;
    if (std::exchange(handle.needs_backward, false)) {
      SeeUnshard(u);
    } else {
      CheckUnsharded(u);
    }
    handle.looks_freed = false;
    Unshard(u, Phase::kBackward);
    WaitForUnshard(u, Phase::kBackward);
    if (plan_.backward_prefetch == BackwardPrefetch::kPre) {
      PrefetchBackward(u);
    }
  }

  // The hook that ends an all-frozen unit sits on its inputs, and on what it returns where that is
  // one of them: it has come first, and torch's state machine stops at the other one.
  void CheckNotEnded(UnitId u) const {
    if (handles_[u.value].has_ended) {
      throw InputError(
          "plan: units[" + std::to_string(u.value) + "]",
          "all-frozen unit \"" + Info(u).name + "\", whose module returns what it is given",
          "a trainable parameter in it, or its parameters in a unit around it",
          "torch fails: expected to be in states [<TrainingState.IDLE: 1>] but "
          "current state is TrainingState.FORWARD_BACKWARD");
    }
  }

  // The latest call of a unit says whether it is gathered in backward, also for those before.
  void CheckUnsharded(UnitId u) {
    if (!At(u).unsharded.valid() && !InPlace(u)) {
      throw InputError("plan: units[" + std::to_string(u.value) + "]",
                       "unit \"" + Info(u).name +
                           "\", whose last call returns nothing that needs a gradient and an "
                           "earlier one does",
                       "its parameters in a unit around it, or \"reshard\": \"never\"",
                       "torch does not gather it in backward and fails: setStorage ... out of "
                       "bounds for storage of size 0");
    }
  }

  void BackwardLeft(UnitId, bool) override {}

  void FlatGradFinal(UnitId u) override {
    At(u).backward_done = true;
    if (plan_.bounded_memory) {
      e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, u.value);
    }
    const BufferId flat = FlattenGrads(u);
    EndUnit(u);
    if (!Syncs()) {  // no_sync: the flat gradient stays unsharded, in the compute dtype
      At(u).accumulated = AddKept(u, flat);
      return;
    }
    Reduce(u, AddKept(u, flat));
  }

  void EndBackward() override {
    e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, kNoSubject);
    for (std::uint32_t u = 0; u < unit_count(); ++u) {  // gathers that nobody used, too
      if (IsFreedInBackward(UnitId(u)) && !handles_[u].looks_freed) {
        SeeReshard(UnitId(u), IsEntered(UnitId(u)) && !handles_[u].has_ended);
        FreeUnsharded(UnitId(u));
      }
      if (last_micro_batch_ && Syncs()) {
        NoteGathered(UnitId(u));
      }
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
    initialized_ = HasParams(u) ? e_.body->last() : initialized_;
    const bool is_last = u.value + 1 == unit_count();
    for (std::uint32_t i = 0; is_last && initialized_.valid() && i < CarriedEvents(); ++i) {
      e_.body->SetCarry(kFirstEventSlot + i, initialized_);
    }
  }

  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    UnitInfo info = LayoutFlat(e_.in.model, unit, plan_.shard_size, plan_.use_orig_params,
                               UnitPrecision(job_.precision, unit.full_precision).param);
    if (plan_.shard_size == 1 && plan_.use_orig_params) {  // padded for all ranks of its group
      info.padded_elements = RoundUp(info.padded_elements, plan_.replicate_size);
      info.shard_elements = info.padded_elements;
    }
    return info;
  }

  [[nodiscard]] bool StaysGathered(UnitId u) const override {
    return (job_.mode == JobMode::kForward && !Reshards(u)) || IsCarried(u);
  }
  [[nodiscard]] bool MakesViewsEarly() const override {
    return plan_.forward_prefetch && !(first_step_ && first_micro_batch_);
  }

  void BeforeGather(Phase phase, UnitId unit) override {
    if (plan_.limit_all_gathers) {
      WaitForLimiter(phase, unit);
    }
  }
  void AfterFree() override {
    if (plan_.shard_size > 1) {
      free_events_.push_back({e_.LastCompute(), 0});
    }
  }

 private:
  // The state that a FlatParamHandle has in one forward and backward.
  struct Handle {
    bool was_entered = false;       // in this forward
    bool needs_backward = false;    // has left forward with outputs that need a gradient
    bool ran_pre_backward = false;  // since it left forward last
    bool in_backward = false;       // between the hooks before and after backward
    bool has_ended = false;         // the hook after backward ran since it left forward last
    bool is_pending_frozen = true;  // the hook on its inputs has not run
    bool is_prefetched = false;
    // Resharded last, freed or not, with views of the shard: torch then takes it for freed at the
    // end of backward, for good (already_resharded in _catch_all_reshard of _runtime_utils.py).
    bool looks_freed = false;
    std::size_t place = 0;  // in left_
  };

  // A hook on a tensor. Moments: 2 * op before a forward op, 2 * op + 1 behind it.
  struct TensorHook {
    std::uint32_t moment = 0;  // of forward, when it was registered
    UnitId unit;
    bool ends_frozen = false;
  };

  // The last op of the first call that returned the tensor whose gradient is complete before
  // backward of `model_op`.
  [[nodiscard]] std::uint32_t LeftAt(UnitId u, std::uint32_t model_op) const {
    std::uint32_t left = kNoRegion / 2;
    for (std::size_t k = 0; k < spans_.backward_spans[u.value].size(); ++k) {
      if (spans_.backward_spans[u.value][k].last == model_op) {
        left = std::min(left, spans_.backward_from[u.value][k].last);
      }
    }
    return left;
  }

  // A call of a unit's module, as torch sees it.
  struct Call {
    std::uint32_t first = 0;       // model op
    bool is_without_grad = false;  // torch.no_grad()
    bool has_grad_output = false;  // returns something that needs a gradient
  };

  // The call whose op was run last.
  [[nodiscard]] const Call& CallAt(UnitId u) const {
    const std::vector<Call>& calls = calls_[u.value];
    const auto behind =
        std::upper_bound(calls.begin(), calls.end(), at_,
                         [](std::uint32_t op, const Call& c) { return op < c.first; });
    return behind == calls.begin() ? *behind : *std::prev(behind);
  }

  // The calls of units, and all-frozen units by the op that has made their input. These end when
  // that gradient is complete (a hook on all inputs of the first call with gradients), whoever it
  // comes from; without such inputs, with the whole backward.
  void FindHooks() {
    const Model& model = e_.in.model;
    frozen_ends_.resize(model.ops.size());
    std::vector<bool> is_frozen(handles_.size(), true);
    for (std::size_t p = 0; p < model.params.size(); ++p) {
      const UnitId u = spans_.unit_of_param[p];
      is_frozen[u.value] = is_frozen[u.value] && !e_.a.param_grad[p];
    }
    calls_.resize(handles_.size());
    for (std::uint32_t u = 0; u < handles_.size(); ++u) {
      FindCalls(UnitId(u));
      if (is_frozen[u] && !calls_[u].empty() && !IsWithoutGrad(FirstWithGrad(UnitId(u)))) {
        AddFrozenEnd(UnitId(u), FirstWithGrad(UnitId(u)));
      }
    }
    for (std::vector<UnitId>& ends : frozen_ends_) {
      SortAll(ends, [&](UnitId x, UnitId y) { return EntersBefore(x, y); });
    }
  }

  // The views of a unit that is gathered ahead are made in the mode of the unit before it.
  void CheckForwardPrefetch(UnitId u) const {
    if (calls_[u.value].front().is_without_grad && calls_[u.value].size() > 1) {
      throw InputError("plan.forward_prefetch",
                       "true, and a unit whose first call runs under torch.no_grad(): units[" +
                           std::to_string(u.value) + "]",
                       "false",
                       "torch makes the unit's views under no_grad or not by where it prefetches "
                       "them, which moves its reduction");
    }
  }

  void FindCalls(UnitId u) {
    const auto& backward = spans_.backward_from[u.value];
    for (const UnitSpans::Span& s : spans_.spans[u.value]) {
      const auto& outputs = e_.in.model.ops[s.last].outputs;
      const bool has_output = AnyOf(outputs, [&](TensorId t) { return requires_grad_[t.value]; });
      const bool runs_backward = IsIn(backward, s.first, &UnitSpans::Span::first);
      calls_[u.value].push_back({s.first, IsWithoutGrad(s), has_output || runs_backward});
    }
  }

  void AddFrozenEnd(UnitId u, UnitSpans::Span call) {
    const Model& model = e_.in.model;
    std::uint32_t first = kNoRegion;
    for (std::uint32_t i = call.first; i <= call.last; ++i) {
      for (const TensorId t : model.ops[i].inputs) {
        const ModelOpId p = model.tensors[t.value].producer;
        if (e_.a.tensor_grad[t.value] && p.valid() && p.value < call.first) {
          first = std::min(first, p.value);
        }
      }
    }
    if (first != kNoRegion) {
      frozen_ends_[first].push_back(u);
    }
  }

  // The unit that the first pass entered after u.
  void PrefetchForward(UnitId u) {
    auto next = std::lower_bound(entered_.begin(), entered_.end(), u,
                                 [&](UnitId x, UnitId y) { return EntersBefore(x, y); });
    if (++next != entered_.end() && !handles_[next->value].was_entered) {
      CheckForwardPrefetch(*next);
      SeeUnshard(*next);
      handles_[next->value].is_prefetched = true;
      handles_[next->value].looks_freed = false;
      Unshard(*next, Phase::kForward);
    }
  }

  // The unit that left forward before u, unless its own backward has begun.
  void PrefetchBackward(UnitId u) {
    const std::size_t place = handles_[u.value].place;
    if (place > 0 && place <= left_.size() && handles_[left_[place - 1].value].needs_backward) {
      CheckHasViews(left_[place - 1]);
      SeeUnshard(left_[place - 1]);
      handles_[left_[place - 1].value].is_prefetched = true;
      handles_[left_[place - 1].value].looks_freed = false;
      Unshard(left_[place - 1], Phase::kBackward);
    }
  }

  // A unit that reaches no loss ends in backward where its input's gradient is complete, without
  // having begun there. Torch then drops the views of its parameters (_use_sharded_views of
  // _flat_param.py, torch 2.13), so the unit cannot be gathered ahead any more.
  void CheckHasViews(UnitId u) const {
    if (handles_[u.value].has_ended && plan_.use_orig_params && plan_.shard_size > 1) {
      throw InputError("plan: units[" + std::to_string(u.value) + "]",
                       "unit \"" + Info(u).name +
                           "\", which reaches no loss, gathered ahead in backward when that is "
                           "over for it",
                       "backward_prefetch \"none\", its parameters in a unit around it, or no "
                       "use_orig_params",
                       "torch fails: 'NoneType' object has no attribute 'data'");
    }
  }

  // The operators of _unshard that a selective checkpoint counts: the rate limiter where it finds
  // an event, and the gather. Events are counted apart from free_events_, from the first step on,
  // since a run has to get through that step and begins without any. The next step begins with
  // those it leaves.
  void SeeUnshard(UnitId u) {
    if (handles_[u.value].is_prefetched) {
      return;
    }
    if (plan_.limit_all_gathers && queued_ >= kLimit) {
      --queued_;
      hooks_.See(u, HookCall::kRecord);
    }
    if (plan_.shard_size > 1 && !At(u).unsharded.valid()) {
      hooks_.See(u, HookCall::kAllGather);
    }
  }
  void SeeReshard(UnitId u, bool frees) {
    handles_[u.value].is_prefetched = false;
    queued_ += frees && plan_.shard_size > 1 ? 1 : 0;  // NO_SHARD frees nothing
  }

  // _should_free_in_backward: without a reduction, SHARD_GRAD_OP keeps the parameters for the next
  // micro-batch.
  [[nodiscard]] bool IsFreedInBackward(UnitId u) const {
    return Syncs() || IsFullShard(u) || plan_.shard_size == 1;
  }

  // The hook after a unit's backward.
  void EndUnit(UnitId u) {
    handles_[u.value].in_backward = false;
    handles_[u.value].has_ended = true;
    SeeReshard(u, IsFreedInBackward(u));
    if (IsFreedInBackward(u)) {
      FreeUnsharded(u);
    }
    if (plan_.backward_prefetch == BackwardPrefetch::kPost) {
      PrefetchBackward(u);
    }
  }

  // Only a lowering that knows of them beforehand can keep them (StepRules).
  void NoteGathered(UnitId u) {
    if (!At(u).unsharded.valid()) {
      return;
    }
    still_gathered_.resize(unit_count());
    still_gathered_[u.value] = true;
    if (!IsCarried(u)) {
      FreeUnsharded(u);
    }
  }
  [[nodiscard]] bool IsCarried(UnitId u) const { return !carried_.empty() && carried_[u.value]; }

  // A free that the limiter may have to wait for: an op of this step, or a carry slot.
  struct FreeEvent {
    OpId op;
    std::uint32_t slot = 0;
  };
  static constexpr std::size_t kLimit = 2;  // _FreeEventQueue's constant
  static constexpr std::uint32_t kFirstEventSlot = kOptimizerSlot + 1;

  // kLimit - 1, plus the gathers of a forward pass before its first free, one of them ahead.
  [[nodiscard]] std::uint32_t CarriedEvents() {
    if (!carried_events_) {
      carried_events_ = CountCarriedEvents();
    }
    return *carried_events_;
  }
  [[nodiscard]] std::uint32_t CountCarriedEvents() const {
    if (!plan_.limit_all_gathers || plan_.shard_size == 1) {
      return 0;
    }
    std::uint32_t first_free = kNoRegion;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (IsEntered(UnitId(u)) && Reshards(UnitId(u))) {
        first_free = std::min(first_free, spans_.spans[u].front().last);
      }
    }
    std::uint32_t gathers = plan_.forward_prefetch ? 1 : 0;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      const bool is_gathered = IsEntered(UnitId(u)) && !InPlace(UnitId(u)) && !IsCarried(UnitId(u));
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
    const BufferId cast = CastFlat(u, flat);
    const BufferId input = PadFlat(u, cast);
    Scale(u, input, FlatGrad(u, r), s, factors_.pre);
    BufferId out = input;
    const bool whole = plan_.shard_size == 1;
    const Bytes shard = Bytes(Info(u).shard_elements * SizeOf(r));
    if (!whole) {
      const bool adopts = !CastsReduce(u) && !At(u).sharded_grad.valid();
      out = Hold(e_.Alloc(shard, adopts ? Category::kShardedGradient : Category::kReduceScatter, s),
                 u, Holds::kShard, r);
      e_.AddCollective(
          Collective(OpCode::kReduceScatter, s, shard_group_, FlatGrad(u, r), r),
          {Phase::kBackward, u.value},
          {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    }
    last_reduce_ = e_.body->last();
    Stream tail = s;
    if (replicate_group_.valid()) {
      tail = whole ? s : Stream::kReplicate;  // NO_SHARD has one process group and one stream
      e_.AddCollective(Collective(OpCode::kAllReduce, tail, replicate_group_, shard, r),
                       {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
      e_.After(last_reduce_);
    }
    Scale(u, out, shard, tail, factors_.post);
    Store(u, out, tail);
    if (cast != flat && cast != input) {
      e_.body->Free(cast);
    }
    FreeReduced(u, flat, input, out);
    if (plan_.offload.parameters && last_micro_batch_) {
      GradToHost(u, tail, e_.body->last());
      DropSentGrad(u, tail);
    }
    (tail == s ? last_reduce_ : last_replicate_) = e_.body->last();
  }

  // The reduced shard becomes, or is added to, the gradient that the optimizer reads.
  void Store(UnitId u, BufferId out, Stream tail) {
    if (!At(u).sharded_grad.valid() && !CastsReduce(u)) {
      At(u).sharded_grad = out;
    } else {
      StoreReduced(u, out, tail, e_.program.buffers[out.value].size, MasterShard(u));
    }
  }

  void FreeReduced(UnitId u, BufferId flat, BufferId input, BufferId out) {
    const std::uint16_t others = StreamBit(Stream::kReduce) | StreamBit(Stream::kReplicate);
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

  std::vector<Handle> handles_;
  std::vector<std::vector<Call>> calls_;          // per unit, in their order
  std::uint32_t at_ = 0;                          // the model op that ran last
  std::vector<bool> carried_, still_gathered_;    // per unit, or empty
  std::vector<std::vector<UnitId>> frozen_ends_;  // per model op
  std::vector<UnitId> hooked_;  // whose backward begins with the op at hand, outer ones first
  std::vector<UnitId> given_;   // of them those that return what they are given
  std::vector<UnitId> left_;    // forward, in this order
  GroupId replicate_group_;
  OpId last_reduce_, last_replicate_;
  OpId initialized_;  // the last unit's parameters
  std::optional<std::uint32_t> carried_events_;
  std::deque<FreeEvent> free_events_;
  std::size_t queued_ = 0;  // frees that the limiter's queue has
  SelectiveHooks hooks_{e_};
};

}  // namespace

std::unique_ptr<StepRules> MakeFsdp1(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Fsdp1Rules>(emitter, spans, units);
}

}  // namespace shardwright
