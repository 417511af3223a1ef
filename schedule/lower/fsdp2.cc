// FSDP2: the hooks of units, and what lives between them; fsdp2_gathers.cc gathers,
// fsdp2_reductions.cc reduces.
//
// Example: a Llama with 2 layers A and B (5.0 MiB each in bf16) and a root, on 4 ranks. One step:
//
//   forward    root: gather, copy out; it stays gathered (the plan's default for the root)
//              A: gather, copy out, ops, free
//              B: gather, copy out, ops, free
//   backward   root's hook prefetches B beside the loss
//              B's hook copies B out and prefetches A; B: ops, free, reduce-scatter
//              A's hook copies A out; A: ops, free, reduce-scatter
//              root: free, reduce-scatter; compute waits for the last one
//   end        norm, all-reduce of the norms, clip, AdamW
//
// A is gathered while B's backward runs: at B's pre-backward hook the unit before B in post-forward
// order is A. If that order were wrong, the program would gather A too late and be slower than
// torch, or gather a unit that torch does not.
//
// State and `in_backward` are torch's TrainingState. They decide about repeated hooks: a second
// pre-backward hook of one pass prefetches nothing, and a recomputation inside backward does not
// reshard.

#include <iterator>

#include "core/error.h"
#include "core/ranges.h"
#include "models/reference.h"
#include "models/stacked_experts.h"
#include "schedule/lower/fsdp2_rules.h"
#include "schedule/lower/layout.h"

namespace shardwright {

Fsdp2Rules::Fsdp2Rules(Emitter& emitter, const UnitSpans& spans,
                       const std::vector<ResolvedUnit>& units)
    : StepRules(emitter, spans, units),
      comm_(units.size()),
      stacks_(StacksExperts(emitter.in.kernels.name) ? StackExperts(emitter.in.model)
                                                     : ParamStacks()),
      is_fp8_(Fp8Weights(emitter.in)) {
  carried_buffer_.resize(units.size());
  shard_group_ = e_.AddGroup({Axis::kShard});
  if (plan_.replicate_size > 1) {
    replicate_group_ = e_.AddGroup({Axis::kReplicate});
  }
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    root_first_.push_back(UnitId(u));
  }
  StableSortBy(root_first_, [&](UnitId u) {
    return units[u.value].name.ends_with(kSecondRoot) ? 0 : spans.first_module[u.value];
  });
}

// Without a backward, units that stay gathered do so from pass to pass: only the first step gathers
// them. The same holds for units prefetched after their own forward.
bool Fsdp2Rules::FirstStepDiffers() const {
  bool keeps = false;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    const UnitPlan& unit = PlanOf(UnitId(u));
    keeps = keeps || unit.reshard.kind != Reshard::Kind::kAlways || StaysOpen(UnitId(u)) ||
            !unit.forward_prefetch.empty();
  }
  return !carried_.empty() || Precomputes() || (job_.mode == JobMode::kForward && keeps);
}

void Fsdp2Rules::BeginStep(bool first) {
  StepRules::BeginStep(first);
  reduce_done_ = OpId();  // an op of another body, for which the last backward has waited
  for (std::uint32_t u = 0; u < unit_count() && job_.mode == JobMode::kForward; ++u) {
    Comm& c = comm_[u];
    c.cloned = OpId();  // an op of another body, behind which this one begins
    c.is_carried = c.pending && Info(UnitId(u)).shards > 1;  // of one rank nothing runs
    c.gathered = OpId();
    if (!first && At(UnitId(u)).unsharded.valid()) {
      e_.body->Alloc(At(UnitId(u)).unsharded, PointKind::kAllocOnce);
    }
  }
}

// A gathered unit whose backward is over stays gathered into the next step. This happens where a
// call without a backward runs again behind the unit's post-backward, so all of the unit is frozen
// and its values are not stale. Lower then lowers the program anew with the unit in `carried_`.
void Fsdp2Rules::NoteGathered(UnitId u) {
  if (!At(u).unsharded.valid()) {
    return;
  }
  still_gathered_.resize(unit_count());
  still_gathered_[u.value] = true;
  if (!IsCarried(u)) {
    FreeUnsharded(u);  // this lowering is begun anew
  }
}

void Fsdp2Rules::BeginMicroBatch(bool first, bool last) {
  StepRules::BeginMicroBatch(first, last && !e_.in.stage);
  order_.clear();
  hooks_.BeginMicroBatch();
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    Comm& c = comm_[u];
    c.left.clear();
    c.passes = 0;
    const auto before = [&](std::uint32_t op) {
      return static_cast<std::size_t>(CountIf(
          spans_.backward_spans[u], [&](const UnitSpans::Span& span) { return span.last < op; }));
    };
    c.passes_before = before(e_.Stage().begin);
    c.passes_left = before(e_.Stage().end) - c.passes_before;
    c.state = State::kIdle;
  }
}

// Unshard, wait, and the prefetches that the plan lists. A recomputation inside the unit's own
// backward finds the parameters there, except under releases that gather once more.
void Fsdp2Rules::PreForward(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  if (phase == Phase::kRecompute && c.in_backward) {
    if (rules_.regathers_recomputed) {
      Unshard(u, Phase::kBackward);  // its pre-backward hook came first
      WaitForUnshard(u, Phase::kBackward);
    }
    return;
  }
  BeginGathers(phase);
  if (phase == Phase::kRecompute) {
    BeginRecompute(u);
  }
  c.state = State::kForward;
  Unshard(u, phase);
  WaitForUnshard(u, phase);
  Prefetch(PlanOf(u).forward_prefetch, phase);
}

// Each module of a unit has the hook: it casts inputs, and asks for the parameters, unless the
// unit's backward has begun.
void Fsdp2Rules::ModuleCalled(UnitId u, Phase phase) {
  if (CastsGather(u)) {
    hooks_.See(u, HookCall::kRecord);
  }
  if (HasParams(u) && !(phase == Phase::kRecompute && comm_[u.value].in_backward)) {
    hooks_.See(u, HookCall::kRecord);
  }
}

// The outermost unit that a recomputation enters takes itself for the root of a forward pass. An
// early stop skips its post-forward; then it stays the root until backward ends.
void Fsdp2Rules::BeginRecompute(UnitId u) {
  if (recompute_root_.valid()) {
    return;
  }
  recompute_root_ = u;
  hooks_.See(u, HookCall::kRecord);
  const OpId compute = e_.LastCompute();
  e_.AddWait(Stream::kCopyIn, {compute}, Phase::kRecompute, kNoSubject);
  e_.AddWait(Stream::kGather, {compute}, Phase::kRecompute, kNoSubject);
}

void Fsdp2Rules::EndRecompute(UnitId u) {
  if (recompute_root_ == u) {
    Unpark(Phase::kRecompute);
    recompute_root_ = UnitId();
  }
}

// A forward inside backward frees nothing: the unit's own backward comes next (post_forward of
// _fsdp_param_group.py, torch 2.13).
void Fsdp2Rules::PostForward(UnitId u, Phase phase) {
  Comm& c = comm_[u.value];
  if (phase == Phase::kForward) {
    if (++c.passes == spans_.ends[u.value].size() && StaysOpen(u)) {
      return;
    }
  } else if (c.in_backward) {
    return;
  }
  if (HasParams(u)) {
    hooks_.See(u, HookCall::kRecord);
  }
  if (phase == Phase::kForward || !rules_.keeps_recomputed) {
    LeaveForward(u, phase);
  }
  c.state = State::kIdle;
  if (phase == Phase::kRecompute) {
    EndRecompute(u);
  }
}

// Reshards, and appends the unit to the post-forward order, from which backward prefetches. A unit
// called twice is in the order twice.
void Fsdp2Rules::LeaveForward(UnitId u, Phase phase) {
  if (!HasParams(u)) {
    return;
  }
  if (PlanOf(u).reshard.kind != Reshard::Kind::kNever) {
    ReshardUnit(u, phase);
  }
  if (!IsOfReference(e_.in.model,
                     ModuleId(spans_.first_module[u.value]))) {  // a root has its own order
    comm_[u.value].left.push_back(order_.size());
    order_.push_back(u);
  }
}

void Fsdp2Rules::EndForward() {
  hooks_.InRegion(kNoRegion, Phase::kForward);
  Unpark(Phase::kForward);
  if (job_.mode != JobMode::kForward) {
    return;
  }
  // Gathers of units that have run already wait for the next pass.
  OpId last;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    Comm& c = comm_[u];
    if (c.pending && Info(UnitId(u)).shards > 1) {
      c.kept_out = c.gather_out;
      last = c.gathered.valid() && (!last.valid() || last < c.gathered) ? c.gathered : last;
    }
  }
  if (last.valid()) {
    e_.body->SetCarry(kPendingSlot, last);
  }
}

// The hook sits on what the last of the pass's modules returns: where that reaches no loss, nothing
// gathers the others.
void Fsdp2Rules::PreBackward(UnitId u) {
  const Comm& c = comm_[u.value];
  if (spans_.backward_reached[u.value][c.passes_before + c.passes_left - 1]) {
    hooked_.push_back(u);
  }
}

// Hooks on one tensor run in the order in which they were registered: of units that end with it
// the inner ones come first.
void Fsdp2Rules::BackwardBegins(std::uint32_t /*model_op*/) {
  for (std::size_t i = hooked_.size(); i-- > 0;) {
    BeginBackward(hooked_[i]);
  }
  hooked_.clear();
}

// The node that ends a unit in backward stands on its inputs, here on what it returned, too.
void Fsdp2Rules::GivenBack(std::span<const UnitId> units) {
  for (std::size_t i = units.size(); i-- > 0;) {
    BeginBackward(units[i]);
  }
}

// Once per call of the unit's module, unless the call after it has no post-backward hook.
void Fsdp2Rules::BeginBackward(UnitId u) {
  Comm& c = comm_[u.value];
  c.in_backward = true;
  const bool is_first = c.state != State::kPreBackward;
  c.state = State::kPreBackward;
  Unshard(u, Phase::kBackward);
  WaitForUnshard(u, Phase::kBackward);
  const auto& list = PlanOf(u).backward_prefetch;
  if (!list.empty()) {
    Prefetch(list, Phase::kBackward);
  } else if (is_first && !c.left.empty()) {
    const std::size_t position = c.left.back();
    c.left.pop_back();
    if (position > 0) {
      Unshard(order_[position - 1], Phase::kBackward);
    }
  }
}

// The hook sits on the gradients of the call's inputs; without any it runs at the very end.
void Fsdp2Rules::BackwardLeft(UnitId u, bool) {
  const std::size_t pass = --comm_[u.value].passes_left + comm_[u.value].passes_before;
  if (spans_.backward_hooked[u.value][pass]) {
    PostBackward(u);
  }
}

BufferId Fsdp2Rules::ParameterStorage(UnitId u, std::uint32_t model_op) {
  if (!At(u).unsharded.valid()) {
    const Model& model = e_.in.model;
    const ModelOp& op = model.ops[model_op];
    throw InputError("plan: units[" + std::to_string(u.value) + "]",
                     "parameter \"" + NameOfUsed(op, u) + "\" used in module \"" +
                         model.modules[op.module.value].fqn + "\", where the unit \"" +
                         Info(u).name + "\" is not gathered",
                     "its uses inside the unit's forward",
                     "torch fails: got mixed torch.Tensor and DTensor; give the unit both modules, "
                     "or leave the parameter to the root");
  }
  return At(u).unsharded;
}

// Of units whose post-backward hook did not run.
void Fsdp2Rules::EndUnit(UnitId u) {
  if (rules_.reduces_sharded || At(u).unsharded.valid()) {
    PostBackward(u);
  } else if (!At(u).grads.empty()) {
    throw InputError("plan: units[" + std::to_string(u.value) + "]",
                     "unit \"" + Info(u).name + "\", which no hook gathers or reduces in backward",
                     "torch 2.8 or later, or the modules in units of their own",
                     "torch 2.6 reduces none of its gradients");
  }
}

void Fsdp2Rules::EndBackward() {
  Unpark(Phase::kBackward);  // before buffers go that its waits would have to be ordered behind
  for (const UnitId u : root_first_) {
    if (comm_[u.value].state != State::kPostBackward) {
      EndUnit(u);
    }
    comm_[u.value].state = State::kIdle;
    comm_[u.value].in_backward = false;
    if (!StaysWhole()) {
      NoteGathered(u);
      DropPending(u);
      NoteClone(u);
    }
  }
  recompute_root_ = UnitId();
  FinishReductions();
}

// No hook runs, so that the gradients stay in .grad (stage_backward_weight of torch's
// _backward.py).
void Fsdp2Rules::EndWeights() {
  for (const UnitId u : UnitsOfStage()) {
    if (!At(u).grads.empty()) {
      comm_[u.value].kept_grads = At(u).grad_of_param;
      At(u).grads.clear();
    }
    comm_[u.value].passes_left = 0;
  }
}

void Fsdp2Rules::FinishReductions() {
  e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, kNoSubject);
  FreeReduceInput();
  for (const BufferId b : held_) {
    e_.body->Free(b);
  }
  held_.clear();
  WaitForHostGrads(Phase::kBackward);
  last_reduce_ = last_replicate_ = OpId();
}

// Its ops use the parameters. Of several stages of a rank each has a root of its own in torch.
bool Fsdp2Rules::IsOfStage(UnitId u) const {
  const std::uint32_t used = spans_.grads_final[u.value];
  return e_.in.model.stages.size() < 2 || (used >= e_.Stage().begin && used < e_.Stage().end);
}

// The root first.
std::vector<UnitId> Fsdp2Rules::UnitsOfStage() const {
  std::vector<UnitId> units;
  std::copy_if(root_first_.begin(), root_first_.end(), std::back_inserter(units),
               [&](UnitId u) { return IsOfStage(u); });
  return units;
}

// UNSHARD of pipelining/schedules.py, behind what compute has been given so far.
void Fsdp2Rules::GatherAll() {
  if (!e_.LastCompute().valid()) {
    e_.AddSlotWait(Stream::kCompute, kOptimizerSlot, Phase::kForward, kNoSubject);
  }
  e_.AddWait(Stream::kCopyIn, {e_.LastCompute()}, Phase::kForward, kNoSubject);
  for (const UnitId u : UnitsOfStage()) {
    Unshard(u, Phase::kBackward);
  }
}

// _assert_unsharded there.
void Fsdp2Rules::AwaitAll() {
  for (const UnitId u : UnitsOfStage()) {
    WaitForUnshard(u, Phase::kBackward);
  }
}

void Fsdp2Rules::DropAll() {
  for (const UnitId u : UnitsOfStage()) {
    FreeUnsharded(u);
  }
}

// perform_reduce_grad of pipelining/stage.py: each unit's post-backward, the root's first.
void Fsdp2Rules::ReduceAll() {
  last_micro_batch_ = true;
  for (const UnitId u : UnitsOfStage()) {
    PostBackward(u);
  }
  FinishReductions();
}

UnitInfo Fsdp2Rules::Layout(const ResolvedUnit& unit) const {
  return LayoutPerParameter(e_.in.model, unit, ShardsOf(unit), stacks_);
}

std::vector<std::int64_t> Fsdp2Rules::GradElementsOf(std::uint32_t model_op) const {
  std::vector<std::int64_t> elements;
  for (const ParamId p : e_.in.model.ops[model_op].params) {
    const ParamStacks::Stack* stack = stacks_.Of(p);
    if (e_.in.model.params[p.value].trainable && (stack == nullptr || stack->first == p)) {
      elements.push_back(stack == nullptr ? e_.in.model.params[p.value].Elements()
                                          : stack->elements);
    }
  }
  return elements;
}

std::vector<std::int64_t> Fsdp2Rules::ShardTensors(UnitId u) const {
  return PerParameter(u, true, false);
}

std::vector<std::int64_t> Fsdp2Rules::StateTensors(UnitId u) const {
  return PerParameter(u, true, true);
}

std::string Fsdp2Rules::NameOfUsed(const ModelOp& op, UnitId u) const {
  const auto used =
      FindIf(op.params, [&](ParamId p) { return spans_.unit_of_param[p.value] == u; });
  return used == op.params.end() ? "" : e_.in.model.params[used->value].fqn;
}

std::unique_ptr<StepRules> MakeFsdp2(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Fsdp2Rules>(emitter, spans, units);
}

}  // namespace shardwright
