// PyTorch FSDP2 (fully_shard): per-parameter sharding, one all-gather and one reduce-scatter per
// unit, implicit forward prefetch with a parked gather buffer, backward prefetch in reverse
// post-forward order. Rules: docs/lowering.md, section fsdp2.

#include <algorithm>
#include <array>

#include "core/error.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {
namespace {

class Fsdp2Rules : public StepRules {
 public:
  Fsdp2Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : StepRules(emitter, spans, units), comm_(units.size()) {
    const std::int64_t w = plan_.shard_size;
    shard_group_ = e_.AddGroup("shard", w, 1);
    if (plan_.replicate_size > 1) {
      replicate_group_ = e_.AddGroup("replicate", plan_.replicate_size, w);
    }
    for (std::uint32_t u = 0; u < units.size(); ++u) {
      root_first_.push_back(UnitId(u));
      comm_[u].first_module = units[u].modules.front().value;
    }
    std::stable_sort(root_first_.begin(), root_first_.end(), [&](UnitId x, UnitId y) {
      return comm_[x.value].first_module < comm_[y.value].first_module;
    });
  }

  void PreForward(UnitId u, Phase phase) override {
    BeginGathers(phase);
    if (phase == Phase::kRecompute) {
      BeginRecompute(u);
    }
    if (!HasParams(u)) {
      return;
    }
    Unshard(u, phase);
    WaitForUnshard(u, phase);
    Prefetch(PlanOf(u).forward_prefetch, phase);
  }

  // A forward inside backward frees nothing: the unit's own backward comes next (post_forward of
  // _fsdp_param_group.py, torch 2.13).
  void PostForward(UnitId u, Phase phase) override {
    if (phase == Phase::kRecompute) {
      EndRecompute(u);
      return;
    }
    if (!HasParams(u)) {
      return;
    }
    if (PlanOf(u).reshard.kind != Reshard::Kind::kNever) {
      ReshardUnit(u, phase);
    }
    RecordForward(u);
  }

  void EndForward() override {
    if (job_.mode == JobMode::kForward) {
      for (std::uint32_t u = 0; u < unit_count(); ++u) {
        DropUnused(UnitId(u), Phase::kForward);
      }
    }
    Unpark(Phase::kForward);
  }

  void PreBackward(UnitId u) override {
    if (!HasParams(u)) {
      return;
    }
    Unshard(u, Phase::kBackward);
    WaitForUnshard(u, Phase::kBackward);
    const auto& list = PlanOf(u).backward_prefetch;
    if (!list.empty()) {
      Prefetch(list, Phase::kBackward);
    } else if (const UnitId previous = LeftBefore(u); previous.valid()) {
      Unshard(previous, Phase::kBackward);
    }
  }

  void BackwardLeft(UnitId u, bool done) override {
    if (!done) {
      FreeUnsharded(u);
      return;
    }
    // The hook sits on the gradients of the unit's inputs; without any it runs at the very end.
    if (spans_.input_grads[u.value]) {
      PostBackward(u);
    }
  }
  void GradientsFinal(UnitId) override {}

  void EndBackward() override {
    for (const UnitId u : root_first_) {
      PostBackward(u);
      DropUnused(u, Phase::kBackward);
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
    return LayoutPerParameter(e_.in.model, unit, plan_.shard_size);
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
  struct Comm {
    bool pending = false;  // gather issued, not yet waited for
    BufferId gather_out;   // AGout
    OpId gathered;         // eAG
    BufferId partial;      // reduced over the shard group, not over the replicas
    BufferId clone;        // the 1/g kept by reshard to a smaller group
    OpId cloned;
    std::uint32_t first_module = 0;
  };

  [[nodiscard]] const UnitPlan& PlanOf(UnitId u) const { return plan_.units[u.value]; }

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
      staged = e_.Alloc(MasterShard(u), Category::kAllGather, Stream::kCopyIn);
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
    c.gather_out = e_.Alloc(Unsharded(u), Category::kAllGather, Stream::kCopyIn);
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
    At(u).unsharded = e_.AllocPieces(Unsharded(u), At(u).unsharded_pieces,
                                     Category::kUnshardedParameter, Stream::kCompute);
    const bool whole = plan_.shard_size == 1;
    BufferId source = whole ? At(u).shard : c.gather_out;
    const bool staged = whole && plan_.offload.parameters;
    if (staged) {
      source = e_.Alloc(MasterShard(u), Category::kAllGather, Stream::kCompute);
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
    if (c.clone.valid()) {
      e_.body->Free(c.clone);
      c.clone = BufferId();
    }
  }

  void ReshardUnit(UnitId u, Phase phase) {
    const Reshard& reshard = PlanOf(u).reshard;
    if (reshard.kind == Reshard::Kind::kToGroup && job_.mode == JobMode::kTrain) {
      Comm& c = comm_[u.value];
      const Bytes part = Unsharded(u) / reshard.group;
      c.clone = e_.Alloc(part, Category::kUnshardedParameter, Stream::kCompute);
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

  // Frees what is gathered, also what was gathered for a pass that was over already.
  void DropUnused(UnitId u, Phase phase) {
    if (comm_[u.value].pending) {
      WaitForUnshard(u, phase);
    }
    FreeUnsharded(u);
  }

  void FreeReduceInput() {
    if (reduce_input_.valid()) {
      e_.body->Free(reduce_input_);
      reduce_input_ = BufferId();
    }
  }

  void PostBackward(UnitId u) {
    if (At(u).backward_done || !HasParams(u)) {
      return;
    }
    At(u).backward_done = true;
    const bool has_grads = !At(u).grads.empty() || At(u).accumulated.valid();
    // Later gradients are added while the parameters are there; the first are cast when they are
    // gone (post_backward of _fsdp_param_group.py, torch 2.13).
    const bool keeps = plan_.sync == SyncMode::kLast && plan_.accumulation > 1;
    const bool adds = keeps && At(u).accumulated.valid();
    if (adds) {
      AccumulateUnsharded(u);
    }
    DropUnused(u, Phase::kBackward);
    if (keeps && !adds) {
      AccumulateUnsharded(u);
    }
    if (!has_grads || !Syncs()) {
      return;
    }
    ReduceGrads(u);
  }

  void ReduceGrads(UnitId u) {
    // One reduce-scatter input in flight: compute waits for the unit before.
    e_.AddWait(Stream::kCompute, {reduce_done_}, Phase::kBackward, u.value);
    FreeReduceInput();
    CopyGradsIn(u);
    const OpId copied = e_.body->last();
    const bool replicate =
        replicate_group_.valid() && (plan_.sync != SyncMode::kReplicateLast || last_micro_batch_);
    const bool adopts = !CastsReduce(u) && !At(u).sharded_grad.valid();
    BufferId out =
        e_.Alloc(ReduceShard(u), adopts ? Category::kShardedGradient : Category::kReduceScatter,
                 Stream::kReduce);
    if (plan_.shard_size > 1) {
      ScaleForFp16(u, reduce_input_, ReduceFull(u), Stream::kReduce);
      e_.AddCollective(Collective(OpCode::kReduceScatter, Stream::kReduce, shard_group_,
                                  ReduceFull(u), PrecisionOf(u).reduce),
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
      e_.AddCollective(Collective(OpCode::kAllReduce, tail, replicate_group_, ReduceShard(u),
                                  PrecisionOf(u).reduce),
                       {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
      e_.After(last_reduce_);
      last_replicate_ = e_.body->last();
    }
    ScaleForFp16(u, out, ReduceShard(u), tail);
    StoreShardedGrad(u, out, adopts, tail);
  }

  void CopyGradsIn(UnitId u) {
    UnitState& state = At(u);
    const bool kept = state.accumulated.valid();
    reduce_input_ = e_.Alloc(ReduceFull(u), Category::kReduceScatter, Stream::kCompute);
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
    for (const BufferId g : state.grads) {
      e_.body->Use(g, AccessMode::kRead, Role::kInput, index++);
    }
    if (narrow.valid()) {
      e_.body->Free(narrow);
    }
    FreeGrads(u);
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
  void ScaleForFp16(UnitId u, BufferId buffer, Bytes bytes, Stream stream) {
    if (PrecisionOf(u).reduce != DType::kFp16) {
      return;
    }
    const OpId before = e_.body->last();
    e_.AddCopy(OpCode::kGradScale, stream, {Phase::kBackward, u.value}, bytes, bytes,
               {{buffer, AccessMode::kReadWrite, Role::kInput}});
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
        state.sharded_grad = e_.Alloc(GradShard(u), Category::kShardedGradient, tail);
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
    if (plan_.offload.parameters && last_micro_batch_) {
      GradToHost(u, tail, e_.body->last());
      DropSentGrad(u, tail);
      (tail == Stream::kReplicate ? last_replicate_ : last_reduce_) = e_.body->last();
    }
  }

  std::vector<Comm> comm_;
  GroupId shard_group_, replicate_group_;
  std::vector<UnitId> root_first_;
  UnitId recompute_root_;  // set while a recomputation runs units of its own
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
