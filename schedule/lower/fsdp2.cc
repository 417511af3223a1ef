// PyTorch FSDP2 (fully_shard): per-parameter sharding, one all-gather and one reduce-scatter per
// unit, implicit forward prefetch with a parked gather buffer, backward prefetch in reverse
// post-forward order. Rules: docs/lowering.md, section fsdp2.

#include <algorithm>
#include <array>

#include "core/error.h"
#include "models/stacked_experts.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {
namespace {

class Fsdp2Rules : public StepRules {
 public:
  Fsdp2Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : StepRules(emitter, spans, units),
        comm_(units.size()),
        stacks_(StacksExperts(emitter.in.kernels.name) ? StackExperts(emitter.in.model)
                                                       : ParamStacks()) {
    const std::int64_t w = plan_.shard_size;
    shard_group_ = e_.AddGroup("shard", w, 1);
    if (plan_.replicate_size > 1) {
      replicate_group_ = e_.AddGroup("replicate", plan_.replicate_size, w);
    }
    for (std::uint32_t u = 0; u < units.size(); ++u) {
      root_first_.push_back(UnitId(u));
    }
    std::stable_sort(root_first_.begin(), root_first_.end(), [&](UnitId x, UnitId y) {
      return spans.first_module[x.value] < spans.first_module[y.value];
    });
  }

  // Units that keep what they gather do so from pass to pass without a backward.
  [[nodiscard]] bool FirstStepDiffers() const override {
    return job_.mode == JobMode::kForward &&
           std::any_of(plan_.units.begin(), plan_.units.end(), [](const UnitPlan& unit) {
             return unit.reshard.kind != Reshard::Kind::kAlways;
           });
  }

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    for (std::uint32_t u = 0; u < unit_count() && job_.mode == JobMode::kForward; ++u) {
      Comm& c = comm_[u];
      c.cloned = OpId();  // an op of another body, behind which this one begins
      c.is_carried = c.pending;
      c.gathered = OpId();
      if (!first && At(UnitId(u)).unsharded.valid()) {
        e_.body->Alloc(At(UnitId(u)).unsharded, PointKind::kAllocOnce);
      }
    }
  }

  void BeginMicroBatch(bool first, bool last) override {
    StepRules::BeginMicroBatch(first, last);
    order_.clear();
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      Comm& c = comm_[u];
      c.left.clear();
      c.passes_left = spans_.backward_spans[u].size();
      c.state = State::kIdle;
    }
  }

  void PreForward(UnitId u, Phase phase) override {
    Comm& c = comm_[u.value];
    if (phase == Phase::kRecompute && c.in_backward) {
      Unshard(u, Phase::kBackward);  // its pre-backward hook came first
      WaitForUnshard(u, Phase::kBackward);
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

  // A forward inside backward frees nothing: the unit's own backward comes next (post_forward of
  // _fsdp_param_group.py, torch 2.13).
  void PostForward(UnitId u, Phase phase) override {
    if (phase == Phase::kRecompute) {
      if (!comm_[u.value].in_backward) {
        comm_[u.value].state = State::kIdle;
        EndRecompute(u);
      }
      return;
    }
    if (!HasParams(u)) {
      return;
    }
    if (PlanOf(u).reshard.kind != Reshard::Kind::kNever) {
      ReshardUnit(u, phase);
    }
    comm_[u.value].left.push_back(order_.size());
    order_.push_back(u);
    comm_[u.value].state = State::kIdle;
  }

  void EndForward() override {
    Unpark(Phase::kForward);
    if (job_.mode != JobMode::kForward) {
      return;
    }
    // What was gathered for a unit that has run already waits for the next pass.
    OpId last;
    for (Comm& c : comm_) {
      if (c.pending && plan_.shard_size > 1) {
        c.kept_out = c.gather_out;
        last = c.gathered.valid() && (!last.valid() || last < c.gathered) ? c.gathered : last;
      }
    }
    if (last.valid()) {
      e_.body->SetCarry(kPendingSlot, last);
    }
  }

  void PreBackward(UnitId u) override { hooked_.push_back(u); }

  // Hooks on one tensor run in the order in which they were registered: of units that end with it
  // the inner ones come first.
  void BackwardBegins(std::uint32_t /*model_op*/) override {
    for (std::size_t i = hooked_.size(); i-- > 0;) {
      BeginBackward(hooked_[i]);
    }
    hooked_.clear();
  }

  // Once per call of the unit's module, unless the call after it has no post-backward hook.
  void BeginBackward(UnitId u) {
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
  void BackwardLeft(UnitId u, bool) override {
    const std::size_t pass = --comm_[u.value].passes_left;
    if (spans_.backward_hooked[u.value][pass]) {
      PostBackward(u);
    }
  }
  void GradientsFinal(UnitId) override {}

  [[nodiscard]] BufferId ParameterStorage(UnitId u, std::uint32_t model_op) override {
    if (!At(u).unsharded.valid()) {
      const Model& model = e_.in.model;
      const ModelOp& op = model.ops[model_op];
      throw InputError(
          "plan: units[" + std::to_string(u.value) + "]",
          "parameter \"" + NameOfUsed(op, u) + "\" used in module \"" +
              model.modules[op.module.value].fqn + "\", where the unit \"" + Info(u).name +
              "\" is not gathered",
          "its uses inside the unit's forward",
          "torch fails: got mixed torch.Tensor and DTensor; give the unit both modules, "
          "or leave the parameter to the root");
    }
    return At(u).unsharded;
  }

  void EndBackward() override {
    for (const UnitId u : root_first_) {
      if (comm_[u.value].state != State::kPostBackward) {
        PostBackward(u);
      }
      comm_[u.value].state = State::kIdle;
      comm_[u.value].in_backward = false;
      DropPending(u);
    }
    Unpark(Phase::kBackward);
    recompute_root_ = UnitId();
    e_.AddWait(Stream::kCompute, {last_reduce_, last_replicate_}, Phase::kBackward, kNoSubject);
    FreeReduceInput();
    for (const BufferId b : held_) {
      e_.body->Free(b);
    }
    held_.clear();
    WaitForHostGrads(Phase::kBackward);
    last_reduce_ = last_replicate_ = OpId();
  }

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutPerParameter(e_.in.model, unit, plan_.shard_size, stacks_);
  }
  [[nodiscard]] std::vector<std::int64_t> GradElementsOf(std::uint32_t model_op) const override {
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

  void InitUnit(UnitId u) override {
    StepRules::InitUnit(u);
    At(u).unsharded_pieces = Pieces(PerParameter(u, false, false), PrecisionOf(u).param);
  }
  [[nodiscard]] std::vector<std::int64_t> ShardTensors(UnitId u) const override {
    return PerParameter(u, true, false);
  }
  [[nodiscard]] std::vector<std::int64_t> StateTensors(UnitId u) const override {
    return PerParameter(u, true, true);
  }

 private:
  // TrainingState of _fsdp_common.py, of a unit's parameters; the module's is PRE_BACKWARD while
  // `in_backward`.
  enum class State : std::uint8_t { kIdle, kForward, kPreBackward, kPostBackward };

  struct Comm {
    State state = State::kIdle;
    bool in_backward = false;
    std::vector<std::size_t> left;  // places in order_ of forward calls without a backward so far
    std::size_t passes_left = 0;    // stretches of backward still to come
    bool pending = false;           // gather issued, not yet waited for
    bool is_carried = false;        // issued in the step before
    BufferId gather_out;            // AGout
    BufferId kept_out;              // the one that lives on into the next step
    OpId gathered;                  // eAG
    BufferId partial;               // reduced over the shard group, not over the replicas
    BufferId clone;                 // the 1/g kept by reshard to a smaller group
    BufferId kept;                  // the last such
    OpId cloned;
  };

  [[nodiscard]] const UnitPlan& PlanOf(UnitId u) const { return plan_.units[u.value]; }

  [[nodiscard]] std::string NameOfUsed(const ModelOp& op, UnitId u) const {
    const auto used = std::find_if(op.params.begin(), op.params.end(),
                                   [&](ParamId p) { return spans_.unit_of_param[p.value] == u; });
    return used == op.params.end() ? "" : e_.in.model.params[used->value].fqn;
  }

  void Prefetch(const std::vector<std::string>& names, Phase phase) {
    for (const std::string& name : names) {
      Unshard(UnitNamed(name), phase);
    }
  }

  void Unshard(UnitId u, Phase phase) {
    Comm& c = comm_[u.value];
    if (c.pending || At(u).unsharded.valid() || !HasParams(u)) {
      return;
    }
    c.pending = true;
    if (plan_.shard_size == 1) {
      return;  // no collective; the copy-out reads the shard itself
    }
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
    const bool small = c.clone.valid();
    const GroupId group = small ? e_.AddGroup("reshard" + std::to_string(PlanOf(u).reshard.group),
                                              PlanOf(u).reshard.group, 1)
                                : shard_group_;
    const OpId copied = e_.body->last();
    c.gathered = e_.AddCollective(
        Collective(OpCode::kAllGather, Stream::kGather, group, Unsharded(u), PrecisionOf(u).param),
        {phase, u.value}, {{c.gather_out, AccessMode::kReadWrite, Role::kOutput}});
    e_.After(copied);
  }

  // Casts the shards (fused with the copy unless parameters are offloaded) into this rank's slice.
  void CopyIn(UnitId u, BufferId source, Phase phase) {
    Comm& c = comm_[u.value];
    BufferId cast;
    const bool from_clone = c.clone.valid();
    const Bytes slice = from_clone ? Unsharded(u) / PlanOf(u).reshard.group : GatherShard(u);
    if (CastsGather(u) && !from_clone) {
      cast = e_.Alloc(GatherShard(u), Category::kAllGather, Stream::kCopyIn);
    }
    c.gather_out = AllocGatherOut(u, phase);
    std::array<Kernel, 2> kernels;
    kernels[0].kind = kernels[1].kind = KernelClass::kCopy;
    kernels[0].read = MasterShard(u);
    kernels[0].written = kernels[1].read = kernels[1].written = slice;
    OpShape shape;
    shape.code = OpCode::kGatherCopyIn;
    shape.stream = Stream::kCopyIn;
    shape.dtype = PrecisionOf(u).param;
    shape.bytes = slice;
    e_.Add(shape, std::span<const Kernel>(kernels).subspan(cast.valid() ? 0 : 1), phase, u.value,
           {{from_clone ? c.clone : source, AccessMode::kRead, Role::kInput},
            {c.gather_out, AccessMode::kWrite, Role::kOutput},
            {cast, AccessMode::kWrite, Role::kWorkspace}});
    if (from_clone) {
      e_.After(c.cloned);
    }
    if (cast.valid()) {
      e_.body->Free(cast);
    }
  }

  // The shard on the device, where parameters are offloaded.
  [[nodiscard]] BufferId NewStaged(UnitId u, Stream owner) {
    return Hold(e_.Alloc(MasterShard(u), Category::kAllGather, owner), u, Holds::kShard,
                job_.precision.master);
  }

  // Forward only, a buffer that lives on into the next pass is the same one in every pass.
  [[nodiscard]] BufferId AllocGatherOut(UnitId u, Phase phase) {
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

  // The outermost unit that a recomputation enters takes itself for the root of a forward pass. An
  // early stop skips its post-forward; then it stays the root until backward ends.
  void BeginRecompute(UnitId u) {
    if (recompute_root_.valid()) {
      return;
    }
    recompute_root_ = u;
    const OpId compute = e_.LastCompute();
    e_.AddWait(Stream::kCopyIn, {compute}, Phase::kRecompute, kNoSubject);
    e_.AddWait(Stream::kGather, {compute}, Phase::kRecompute, kNoSubject);
  }
  void EndRecompute(UnitId u) {
    if (recompute_root_ == u) {
      Unpark(Phase::kRecompute);
      recompute_root_ = UnitId();
    }
  }

  // Both gather streams wait for the parked buffer's copy-out; then it may go.
  void Unpark(Phase phase) {
    if (parked_.valid()) {
      ReleaseGatherOut(parked_, parked_copied_, phase);
      parked_ = BufferId();
    }
  }

  void ReleaseGatherOut(BufferId buffer, OpId copied_out, Phase phase) {
    e_.AddWait(Stream::kCopyIn, {copied_out}, phase, kNoSubject);
    e_.AddWait(Stream::kGather, {copied_out}, phase, kNoSubject);
    e_.body->Free(buffer);
  }

  void WaitForUnshard(UnitId u, Phase phase) {
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
    const bool whole = plan_.shard_size == 1;
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

  void FreeClone(UnitId u) {
    Comm& c = comm_[u.value];
    if (c.clone.valid()) {
      if (c.pending) {
        e_.AddWait(Stream::kCompute, {c.gathered}, Phase::kBackward, u.value);
      }
      e_.body->Free(c.clone);
      c.clone = BufferId();
    }
  }

  [[nodiscard]] BufferId AllocUnsharded(UnitId u) {
    Buffer buffer;
    buffer.size = Unsharded(u);
    buffer.category = Category::kUnshardedParameter;
    buffer.pieces = At(u).unsharded_pieces;
    const BufferId id = Hold(e_.body->NewBuffer(buffer), u, Holds::kUnit, PrecisionOf(u).param);
    const bool stays =
        job_.mode == JobMode::kForward && PlanOf(u).reshard.kind == Reshard::Kind::kNever;
    e_.body->Alloc(id, stays ? PointKind::kAllocOnce : PointKind::kAlloc);
    return id;
  }

  void ReshardUnit(UnitId u, Phase phase) {
    const Reshard& reshard = PlanOf(u).reshard;
    if (reshard.kind == Reshard::Kind::kToGroup) {
      Comm& c = comm_[u.value];
      const Bytes part = Unsharded(u) / reshard.group;
      if (job_.mode == JobMode::kForward && c.kept.valid()) {
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

  void FreeUnsharded(UnitId u) {
    if (At(u).unsharded.valid()) {
      e_.body->Free(At(u).unsharded);
      At(u).unsharded = BufferId();
    }
  }

  // What was gathered for a pass that was over already goes without a copy (finalize_backward).
  void DropPending(UnitId u) {
    Comm& c = comm_[u.value];
    if (!c.pending) {
      return;
    }
    c.pending = false;
    if (plan_.shard_size > 1) {
      e_.AddWait(Stream::kCompute, {c.gathered}, Phase::kBackward, u.value);
      e_.body->Free(c.gather_out);
    }
  }

  void FreeReduceInput() {
    if (reduce_input_.valid()) {
      e_.body->Free(reduce_input_);
      reduce_input_ = BufferId();
    }
  }

  void PostBackward(UnitId u) {
    if (!HasParams(u)) {
      return;
    }
    comm_[u.value].state = State::kPostBackward;
    // Autograd sums the gradients of all calls before it hands them to the parameters.
    const bool is_last = comm_[u.value].passes_left == 0;
    const bool has_grads = At(u).accumulated.valid() || (is_last && !At(u).grads.empty());
    // Later gradients are added while the parameters are there; the first are cast when they are
    // gone (post_backward of _fsdp_param_group.py, torch 2.13).
    if (is_last && At(u).accumulated.valid()) {
      AccumulateUnsharded(u);
    }
    FreeUnsharded(u);
    FreeClone(u);
    if (!Syncs()) {
      if (is_last) {
        AccumulateUnsharded(u);
      }
    } else {
      // One reduce-scatter input in flight: compute waits for the unit before.
      e_.AddWait(Stream::kCompute, {reduce_done_}, Phase::kBackward, u.value);
      FreeReduceInput();
      if (has_grads) {
        ReduceGrads(u);
      }
    }
  }

  void ReduceGrads(UnitId u) {
    CopyGradsIn(u, comm_[u.value].passes_left == 0);
    const OpId copied = e_.body->last();
    const bool replicate =
        replicate_group_.valid() && (plan_.sync != SyncMode::kReplicateLast || last_micro_batch_);
    const bool adopts = !CastsReduce(u) && !At(u).sharded_grad.valid();
    const DType r = PrecisionOf(u).reduce;
    BufferId out = Hold(
        e_.Alloc(ReduceShard(u), adopts ? Category::kShardedGradient : Category::kReduceScatter,
                 Stream::kReduce),
        u, Holds::kShard, r);
    if (plan_.shard_size > 1) {
      ScaleForFp16(u, reduce_input_, ReduceFull(u), Stream::kReduce, factors_.pre);
      e_.AddCollective(Collective(OpCode::kReduceScatter, Stream::kReduce, shard_group_,
                                  ReduceFull(u), r, MeanOver(plan_.shard_size, r)),
                       {Phase::kBackward, u.value},
                       {{reduce_input_, AccessMode::kRead, Role::kInput},
                        {out, AccessMode::kWrite, Role::kOutput}});
    } else {
      e_.AddCopy(OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value}, ReduceShard(u),
                 ReduceShard(u),
                 {{reduce_input_, AccessMode::kRead, Role::kInput},
                  {out, AccessMode::kWrite, Role::kOutput}});
    }
    e_.After(copied);
    reduce_done_ = last_reduce_ = e_.body->last();
    if (!replicate && replicate_group_.valid()) {
      KeepPartial(u, out);
      return;
    }
    AddPartial(u, out);
    Stream tail = Stream::kReduce;
    if (replicate) {
      tail = Stream::kReplicate;
      e_.AddCollective(Collective(OpCode::kAllReduce, tail, replicate_group_, ReduceShard(u), r,
                                  MeanOver(plan_.replicate_size, r)),
                       {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
      e_.After(last_reduce_);
      last_replicate_ = e_.body->last();
    }
    ScaleForFp16(u, out, ReduceShard(u), tail,
                 plan_.shard_size > 1 ? factors_.post : factors_.pre * factors_.post);
    StoreShardedGrad(u, out, adopts, tail);
  }

  // What earlier micro-batches kept and, after the last call, this one's.
  void CopyGradsIn(UnitId u, bool is_last) {
    UnitState& state = At(u);
    const bool kept = state.accumulated.valid();
    reduce_input_ = Hold(e_.Alloc(ReduceFull(u), Category::kReduceScatter, Stream::kCompute), u,
                         Holds::kShards, PrecisionOf(u).reduce);
    BufferId narrow;
    if (SizeOf(PrecisionOf(u).reduce) < SizeOf(PrecisionOf(u).param)) {
      narrow =
          e_.Alloc(ReduceFull(u) / SizeOf(PrecisionOf(u).reduce) * SizeOf(PrecisionOf(u).param),
                   Category::kTemporary, Stream::kCompute);
    }
    const Bytes read = kept ? e_.program.buffers[state.accumulated.value].size : GradBytes(u);
    e_.AddCopy(OpCode::kReduceCopyIn, Stream::kCompute, {Phase::kBackward, u.value}, read,
               ReduceFull(u),
               {{reduce_input_, AccessMode::kWrite, Role::kOutput},
                {state.accumulated, AccessMode::kRead, Role::kInput},
                {narrow, AccessMode::kWrite, Role::kWorkspace}});
    std::uint16_t index = 0;
    for (std::size_t i = 0; is_last && i < state.grads.size(); ++i) {
      e_.body->Use(state.grads[i], AccessMode::kRead, Role::kInput, index++);
    }
    if (narrow.valid()) {
      e_.body->Free(narrow);
    }
    if (is_last) {
      FreeGrads(u);
    }
    if (kept) {
      e_.body->Free(state.accumulated);
      state.accumulated = BufferId();
    }
  }

  // Sums over the shard group that the replicas have not seen yet stay apart, in the reduce dtype,
  // until the last micro-batch's are added and all-reduced with them. Source: foreach_reduce's
  // partial_reduce_output.
  void KeepPartial(UnitId u, BufferId out) {
    BufferId& partial = comm_[u.value].partial;
    if (!partial.valid()) {
      partial = out;
      return;
    }
    AddShards(u, partial, out);
  }
  void AddPartial(UnitId u, BufferId out) {
    BufferId& partial = comm_[u.value].partial;
    if (partial.valid()) {
      AddShards(u, out, partial);
      partial = BufferId();
    }
  }
  // sum += other, which goes.
  void AddShards(UnitId u, BufferId sum, BufferId other) {
    e_.AddCopy(
        OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value}, 2 * ReduceShard(u),
        ReduceShard(u),
        {{sum, AccessMode::kReadWrite, Role::kOutput}, {other, AccessMode::kRead, Role::kInput}});
    e_.body->Free(other);
    last_reduce_ = e_.body->last();
  }

  // fp16 sums are divided before and after; other dtypes use NCCL's average.
  [[nodiscard]] static double MeanOver(std::int64_t ranks, DType reduce) {
    return reduce == DType::kFp16 ? 1.0 : static_cast<double>(ranks);
  }
  void ScaleForFp16(UnitId u, BufferId buffer, Bytes bytes, Stream stream, double divisor) {
    if (PrecisionOf(u).reduce != DType::kFp16) {
      return;
    }
    const OpId before = e_.body->last();
    e_.AddCopy(OpCode::kGradScale, stream, {Phase::kBackward, u.value}, bytes, bytes,
               {{buffer, AccessMode::kReadWrite, Role::kInput}}, divisor);
    e_.After(before);
  }

  void StoreShardedGrad(UnitId u, BufferId out, bool adopts, Stream tail) {
    UnitState& state = At(u);
    if (adopts) {
      state.sharded_grad = out;
    } else {
      const OpId before = e_.body->last();
      const bool accumulate = state.sharded_grad.valid();
      if (!accumulate) {
        state.sharded_grad = NewShardedGrad(u, tail);
      }
      e_.AddCopy(OpCode::kGradStore, tail, {Phase::kBackward, u.value},
                 accumulate ? ReduceShard(u) + GradShard(u) : ReduceShard(u), GradShard(u),
                 {{state.sharded_grad, accumulate ? AccessMode::kReadWrite : AccessMode::kWrite,
                   Role::kOutput},
                  {out, AccessMode::kRead, Role::kInput}});
      e_.After(before);
      if (tail == Stream::kReplicate) {
        held_.push_back(out);  // the 2025 code keeps a reference until backward ends
      } else {
        e_.body->Free(out);
      }
    }
    (tail == Stream::kReplicate ? last_replicate_ : last_reduce_) = e_.body->last();
    if (plan_.offload.parameters && last_micro_batch_ && comm_[u.value].passes_left == 0) {
      GradToHost(u, tail, e_.body->last());
      DropSentGrad(u, tail);
      (tail == Stream::kReplicate ? last_replicate_ : last_reduce_) = e_.body->last();
    }
  }

  static constexpr std::uint32_t kPendingSlot = kOptimizerSlot + 1;

  std::vector<Comm> comm_;
  ParamStacks stacks_;
  GroupId shard_group_, replicate_group_;
  const DivideFactors factors_ = FactorsFor(plan_.shard_size * plan_.replicate_size);
  std::vector<UnitId> root_first_;
  std::vector<UnitId> order_;   // in which calls of units ended in this forward
  std::vector<UnitId> hooked_;  // whose backward begins with the op at hand, outer ones first
  UnitId recompute_root_;       // set while a recomputation runs units of its own
  BufferId parked_;
  OpId parked_copied_;
  BufferId reduce_input_;
  OpId reduce_done_, last_reduce_, last_replicate_;
  std::vector<BufferId> held_;
};

}  // namespace

std::unique_ptr<StepRules> MakeFsdp2(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Fsdp2Rules>(emitter, spans, units);
}

}  // namespace shardwright
