// DeepSpeed ZeRO stages 1 and 2: every rank holds all low-precision weights, and a partition of
// masters, states and (stage 2) gradients. Buckets of gradients are all-reduced, each rank keeps
// its part, updates it and all-gathers the weights. Rules: docs/lowering.md, section zero1, zero2.
//
// Example: a Llama of 6,269,440 parameters on 4 ranks, stage 2, one bucket of 500 million elements.
// Backward copies 21 gradients into the bucket as they come. At its end the bucket is averaged:
// divide, cast, one all-reduce of 25,077,760 bytes, cast. This rank copies its quarter out
// (3,134,720 bytes in bf16) and frees the bucket. The update casts the quarter to fp32, clips, runs
// AdamW on 1,567,360 elements, casts them into this rank's slice, and one all-gather of 12,538,880
// bytes ends the step.

#include <array>
#include <map>
#include <set>
#include <utility>

#include "core/ranges.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/zero_rules.h"

namespace shardwright {
namespace {

class Zero12Rules : public ZeroRules {
 public:
  Zero12Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : ZeroRules(emitter, spans, units),
        fresh_(units.size()),
        kept_(emitter.in.model.params.size()) {
    AddWorldGroup();
    stream_ = Overlaps() ? Stream::kReduce : Stream::kCompute;
  }

  void PreForward(UnitId, Phase) override {}
  void PostForward(UnitId, Phase) override {}
  void PreBackward(UnitId) override {}
  void BackwardLeft(UnitId, bool) override {}

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    std::fill(low_grads_.begin(), low_grads_.end(), BufferId());
    std::fill(kept_.begin(), kept_.end(), BufferId());
  }

  void BeginMicroBatch(bool first, bool last) override {
    StepRules::BeginMicroBatch(first, last);
    last_reduce_ = OpId();
  }

  void GradientsFinal(UnitId u) override {
    if (Reduces() && Scatters()) {
      ScatterUnit(u);
    }
  }

  void EndBackward() override {
    if (!Reduces()) {
      return;
    }
    // Stage 1 without overlap reduces when backward is over, in parameter order.
    StableSort(waiting_, [](const auto& x, const auto& y) { return x.first < y.first; });
    for (const auto& [storage, member] : waiting_) {
      AddToBucket(member, false);
    }
    waiting_.clear();
    Flush();
    if (Overlaps() && last_reduce_.valid()) {  // the epilogue synchronises the device
      const std::array<OpId, 2> over = {last_reduce_, e_.LastCompute()};
      e_.AddHostWait(over, Phase::kBackward, kNoSubject);
    }
    for (BufferId& b : bucket_) {
      if (b.valid()) {
        e_.body->Free(b);
        b = BufferId();
      }
    }
    if (scatter_input_.valid()) {
      e_.body->Free(scatter_input_);
      scatter_input_ = BufferId();
    }
    AddFreshPartitions();
  }

  void EndStep() override {
    std::vector<UnitId> units;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (low_grads_[u].valid()) {
        units.push_back(UnitId(u));
      }
    }
    if (units.empty()) {
      return;
    }
    const bool clips = TakesGradNorm(job_);
    const BufferId norm = clips || !Scatters() ? AddNorm(units) : BufferId();
    for (const UnitId u : units) {
      Update(u, clips ? norm : BufferId());
    }
    if (norm.valid()) {
      e_.body->Free(norm);
    }
    for (const UnitId u : units) {
      GatherWeights(u);
    }
  }

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutPartitioned(e_.in.model, unit, plan_.shard_size);
  }
  [[nodiscard]] std::int64_t GradElements(const UnitInfo& unit) const override {
    return unit.shard_elements * plan_.shard_size;
  }

  // The weights in the compute dtype, then the partition of masters.
  void InitUnit(UnitId u) override {
    if (!HasParams(u)) {
      return;
    }
    At(u).unsharded = Hold(e_.Alloc(Unsharded(u), Category::kUnshardedParameter, Stream::kCompute),
                           u, Holds::kUnit, job_.precision.param);
    e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0),
               Unsharded(u), {{At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
    if (job_.mode == JobMode::kTrain) {
      ZeroRules::InitUnit(u);
    }
  }

  // Stage 1 keeps adding to whole gradients before the last micro-batch.
  void GradReady(std::uint32_t i, UnitId unit) override {
    if (!Reduces() || KeepsWhole()) {
      KeepWhole(i, unit);
    }
    if (!Reduces() || Scatters()) {
      return;
    }
    const Member member = TakeGrad(i, unit);
    if (ReducesBehind()) {
      waiting_.emplace_back(GroupOf(i), member);
    } else {
      AddToBucket(member, true);
    }
  }

  void AddPart(Part part, BufferId grad) override {
    Member& added = part.member;
    FlushBefore(added.elements);
    if (!FitsBucket(added)) {
      added.grad = NewMixed(InParam(added.elements), Stream::kCompute, job_.precision.param);
    }
    CopyPart(part, grad, added.grad.valid() ? added.grad : ActiveBucket(), Stream::kCompute);
    Add(added);
  }
  [[nodiscard]] bool ReducesAtOnce() const override {
    return Reduces() && !Scatters() && !KeepsWhole() && !ReducesBehind();
  }

 private:
  // Stage 1 without overlap: when backward is over.
  [[nodiscard]] bool ReducesBehind() const {
    return plan_.dialect == Dialect::kZero1 && !Overlaps();
  }
  [[nodiscard]] bool Reduces() const {
    return plan_.dialect == Dialect::kZero2 || last_micro_batch_;
  }
  [[nodiscard]] bool Scatters() const { return ScattersGradients(plan_); }
  [[nodiscard]] bool KeepsWhole() const {
    return plan_.dialect == Dialect::kZero1 && plan_.accumulation > 1;
  }
  [[nodiscard]] Bytes PartitionBytes(UnitId u) const {
    return Bytes(Info(u).shard_elements * SizeOf(GradType()));
  }
  // Partitions hold what the reduction leaves: the compute dtype after an all-reduce in place.
  [[nodiscard]] DType GradType() const {
    return Scatters() ? job_.precision.reduce : job_.precision.param;
  }

  // The gradient of op i joins those of earlier micro-batches and takes their place in
  // At(unit).grads.
  void KeepWhole(std::uint32_t i, UnitId unit) {
    BufferId& kept = kept_[GroupOf(i).value];
    if (!kept.valid()) {
      const Member member = TakeGrad(i, unit);
      kept = member.grad;
      PutGrad(i, unit, kept);
      return;
    }
    const Member fresh = TakeGrad(i, unit);
    const Bytes bytes = InParam(fresh.elements);
    e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, i}, 2 * bytes, bytes,
               {{kept, AccessMode::kReadWrite, Role::kOutput},
                {fresh.grad, AccessMode::kRead, Role::kInput}});
    e_.body->Free(fresh.grad);
    PutGrad(i, unit, kept);
  }

  void PutGrad(std::uint32_t i, UnitId unit, BufferId grad) {
    UnitState& state = At(unit);
    if (!IsIn(state.grads, grad)) {
      state.grads.push_back(grad);
    }
    state.grad_of_param.emplace_back(GroupOf(i), grad);
  }

  // --- All-reduce of buckets.

  // `ready`: parameter by parameter in autograd's order, not in the model's.
  void AddToBucket(const Member& member, bool ready) {
    const bool fits = elements_ + member.elements <= plan_.zero.reduce_bucket;
    if (member.storages.size() == 1 || (fits && !IsTaken(member))) {
      AddWhole(member);
      return;
    }
    std::vector<Part> parts = ByParameter(member);
    if (!ready) {
      StableSort(parts, [](const Part& x, const Part& y) {
        return x.member.storages.front() < y.member.storages.front();
      });
    }
    AddParts(std::move(parts), member.grad);
    e_.body->Free(member.grad);
  }

  void AddWhole(const Member& member) {
    FlushBefore(member.elements);
    Member added = member;
    if (FitsBucket(member)) {
      const BufferId buffer = ActiveBucket();
      const Bytes bytes = InParam(member.elements);
      e_.AddCopy(OpCode::kBucketCopy, Stream::kCompute, {Phase::kBackward, member.unit.value},
                 bytes, bytes,
                 {{member.grad, AccessMode::kRead, Role::kInput},
                  {buffer, AccessMode::kWrite, Role::kOutput}});
      e_.body->Free(member.grad);
      added.grad = BufferId();
    }
    Add(added);
  }

  void Add(const Member& member) {
    elements_ += member.elements;
    members_.push_back(member);
  }
  void FlushBefore(std::int64_t elements) {
    if (elements_ + elements > plan_.zero.reduce_bucket) {
      Flush();
    }
  }
  [[nodiscard]] bool FitsBucket(const Member& member) const {
    return plan_.zero.contiguous_gradients && member.elements <= plan_.zero.reduce_bucket;
  }
  [[nodiscard]] BufferId ActiveBucket() {
    if (!bucket_[active_].valid()) {
      AllocateBuckets();
    }
    return bucket_[active_];
  }

  // Both halves of the double buffer at once, as the framework does at the first gradient.
  void AllocateBuckets() {
    const std::size_t count = Overlaps() ? 2 : 1;
    for (std::size_t i = 0; i < count; ++i) {
      bucket_[i] =
          NewMixed(InParam(plan_.zero.reduce_bucket), Stream::kCompute, job_.precision.param);
    }
  }

  void Flush() {
    if (members_.empty()) {
      return;
    }
    if (Overlaps()) {
      e_.AddWait(stream_, {e_.LastCompute()}, Phase::kBackward, kNoSubject);
      e_.AddWait(Stream::kCompute, {last_reduce_}, Phase::kBackward, kNoSubject);
    }
    const bool copied = !members_.front().grad.valid();
    BufferId source = copied ? bucket_[active_] : members_.front().grad;
    BufferId flat;
    if (!copied && members_.size() > 1) {
      source = flat = FlattenMembers(members_, stream_);
    }
    AverageInPlace(source, elements_, stream_, {Phase::kBackward, members_.front().unit.value},
                   Pieces());
    for (const UnitId u : UnitsOf(members_)) {
      StorePart(u, source);
    }
    last_reduce_ = e_.body->last();
    const std::uint16_t recorded = Overlaps() ? StreamBit(stream_) : std::uint16_t{0};
    for (const Member& m : members_) {
      if (m.grad.valid()) {
        e_.body->Free(m.grad, recorded);
      }
    }
    if (flat.valid()) {
      e_.body->Free(flat);
    }
    members_.clear();
    elements_ = 0;
    if (copied && Overlaps()) {
      active_ = 1 - active_;
    }
  }

  // How the open bucket is sent: at once, but a gradient larger than a bucket in parts that end
  // where ranks' partitions meet, of more than a bucket each (average_tensor and
  // allreduce_and_scatter of stage_1_and_2.py).
  [[nodiscard]] std::vector<std::int64_t> Pieces() {
    const Member& first = members_.front();
    if (first.elements <= plan_.zero.reduce_bucket || !plan_.zero.contiguous_gradients) {
      return {elements_};
    }
    const UnitInfo& info = Info(first.unit);
    std::vector<std::int64_t> pieces;
    std::int64_t left = elements_, open = 0;
    for (std::uint32_t u = 0; slots_.empty() && u < unit_count(); ++u) {
      for (const ParamSlot& slot : Info(UnitId(u)).params) {
        slots_[{UnitId(u), slot.param}] = &slot;
      }
    }
    std::set<const ParamSlot*> slots;  // in the unit's order
    for (const ParamId storage : first.storages) {
      if (const auto found = slots_.find({first.unit, storage}); found != slots_.end()) {
        slots.insert(found->second);
      }
    }
    for (const ParamSlot* const its : slots) {
      const ParamSlot& slot = *its;
      const std::int64_t end = slot.unsharded_offset + slot.padded_elements;
      for (std::int64_t at = slot.unsharded_offset; at < end;) {
        const std::int64_t next = std::min(end, RoundUp(at + 1, info.shard_elements));
        open += next - at;
        at = next;
        if (open > plan_.zero.reduce_bucket && open < left) {
          pieces.push_back(open);
          left -= std::exchange(open, 0);
        }
      }
    }
    pieces.push_back(left);
    return pieces;
  }

  // Copies this rank's partition of the unit out of the reduced bucket: on average 1 / W of its
  // elements. (Which rank copies how much depends on where the bucket lies.)
  void StorePart(UnitId u, BufferId source) {
    std::int64_t elements = 0;
    for (const Member& m : members_) {
      elements += m.unit == u ? m.elements : 0;
    }
    const Bytes part = InParam(CeilDiv(elements, plan_.shard_size));
    const BufferId kept = Partition(u);
    e_.AddCopy(OpCode::kGradStore, stream_, {Phase::kBackward, u.value}, part, part, {});
    e_.body->UseFirst(source, InParam(elements_), AccessMode::kRead, Role::kInput);
    e_.body->Use(kept, AccessMode::kWrite, Role::kOutput);
  }

  // Where this micro-batch's reduced partition goes; allocated at its first use.
  [[nodiscard]] BufferId Partition(UnitId u) {
    BufferId& buffer = first_micro_batch_ || plan_.dialect == Dialect::kZero1 ? low_grads_[u.value]
                                                                              : fresh_[u.value];
    if (!buffer.valid()) {
      buffer = Hold(e_.Alloc(PartitionBytes(u), Category::kShardedGradient, stream_), u,
                    Holds::kShard, GradType());
    }
    return buffer;
  }

  // --- Reduce-scatter of whole units.

  void ScatterUnit(UnitId u) {
    UnitState& state = At(u);
    if (state.grads.empty()) {
      return;
    }
    e_.AddWait(Stream::kCompute, {last_reduce_}, Phase::kBackward, u.value);
    if (scatter_input_.valid()) {
      e_.body->Free(scatter_input_);
    }
    const Bytes full = InReduce(Partitioned(u));
    const Emitter::Where where{Phase::kBackward, u.value};
    scatter_input_ = Hold(e_.Alloc(full, Category::kReduceScatter, Stream::kCompute), u,
                          Holds::kShards, job_.precision.reduce);
    e_.AddCopy(OpCode::kReduceCopyIn, Stream::kCompute, where, GradBytes(u), full,
               {{scatter_input_, AccessMode::kWrite, Role::kOutput}});
    ConsumeGrads(u);
    const OpId copied = e_.body->last();
    const BufferId out = Partition(u);
    if (ranks() > 1) {
      e_.AddCopy(OpCode::kGradScale, stream_, where, full, full,
                 {{scatter_input_, AccessMode::kReadWrite, Role::kInput}}, factors_.pre);
      e_.After(copied);
    }
    if (plan_.shard_size > 1) {
      e_.AddCollective(
          Collective(OpCode::kReduceScatter, stream_, shard_group_, full, job_.precision.reduce,
                     replicate_group_.valid() ? 1.0 : factors_.post),
          where,
          {{scatter_input_, AccessMode::kRead, Role::kInput},
           {out, AccessMode::kWrite, Role::kOutput}});
    } else {
      e_.AddCopy(OpCode::kGradStore, stream_, where, full, full,
                 {{scatter_input_, AccessMode::kRead, Role::kInput},
                  {out, AccessMode::kWrite, Role::kOutput}});
      e_.After(copied);
    }
    if (replicate_group_.valid()) {
      e_.AddCollective(Collective(OpCode::kAllReduce, stream_, replicate_group_, PartitionBytes(u),
                                  job_.precision.reduce, factors_.post),
                       where, {{out, AccessMode::kReadWrite, Role::kInput}});
    }
    last_reduce_ = e_.body->last();
  }

  // --- Partitions and the update.

  // Stage 2 adds the partitions of later micro-batches to those of the first.
  void AddFreshPartitions() {
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (!fresh_[u].valid()) {
        continue;
      }
      const Bytes bytes = PartitionBytes(UnitId(u));
      e_.AddCopy(OpCode::kGradStore, Stream::kCompute, {Phase::kBackward, u}, 2 * bytes, bytes,
                 {{low_grads_[u], AccessMode::kReadWrite, Role::kOutput},
                  {fresh_[u], AccessMode::kRead, Role::kInput}});
      e_.body->Free(fresh_[u]);
      fresh_[u] = BufferId();
    }
  }

  void Update(UnitId u, BufferId norm) {
    CastGrads({&u, 1});
    e_.body->Free(low_grads_[u.value]);
    low_grads_[u.value] = BufferId();
    ClipGrads({&u, 1}, {&norm, norm.valid() ? 1U : 0U});
    AddFlatOptimizer({&u, 1});
    FreeShardedGrads({&u, 1});
    e_.AddCopy(OpCode::kGatherCopyIn, Stream::kCompute, {Phase::kOptimizer, u.value},
               MasterShard(u), GatherShard(u),
               {{At(u).shard, AccessMode::kRead, Role::kInput},
                {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
  }

  // The n-th bucket holds elements [n b / W, (n + 1) b / W) of every rank's partition.
  void GatherWeights(UnitId u) {
    if (plan_.shard_size == 1) {
      return;
    }
    const std::int64_t shard = Info(u).shard_elements;
    const std::int64_t most =
        plan_.zero.allgather_bucket == 0
            ? shard
            : std::max<std::int64_t>(1, plan_.zero.allgather_bucket / plan_.shard_size);
    for (std::int64_t begin = 0; begin < shard; begin += most) {
      const Bytes bytes = InParam(std::min(most, shard - begin) * plan_.shard_size);
      e_.AddCollective(Collective(OpCode::kAllGather, Stream::kCompute, shard_group_, bytes,
                                  job_.precision.param),
                       {Phase::kOptimizer, u.value},
                       {{At(u).unsharded, AccessMode::kReadWrite, Role::kOutput}});
    }
  }

  Stream stream_ = Stream::kCompute;
  std::vector<BufferId> fresh_;  // per unit: stage 2's partition of a later micro-batch
  std::vector<BufferId> kept_;   // per storage: stage 1's whole gradient of earlier micro-batches
  std::vector<std::pair<ParamId, Member>> waiting_;
  std::map<std::pair<UnitId, ParamId>, const ParamSlot*> slots_;
  std::vector<Member> members_;  // of the open bucket
  std::int64_t elements_ = 0;    // in it
  std::array<BufferId, 2> bucket_;
  std::size_t active_ = 0;
  BufferId scatter_input_;
  OpId last_reduce_;
};

}  // namespace

std::unique_ptr<StepRules> MakeZero12(Emitter& emitter, const UnitSpans& spans,
                                      const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Zero12Rules>(emitter, spans, units);
}

}  // namespace shardwright
