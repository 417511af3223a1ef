// Our own dialect: what FSDP2 would be without Python hooks and a caching allocator. One flat
// buffer per unit, gathers land in the parameter views, weight gradients are written straight into
// the reduce-scatter input, gathers and reductions run on separate communicators. Rules:
// docs/lowering.md, section native.

#include <algorithm>
#include <deque>
#include <numeric>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/products.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {
namespace {

class NativeRules : public StepRules {
 public:
  NativeRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : StepRules(emitter, spans, units),
        comm_(units.size()),
        moments_(emitter, emitter.in.plan.in_flight, FreedSlot() + 1),
        part_of_param_(emitter.in.model.params.size()) {
    gather_group_ = e_.AddGroup("shard", plan_.shard_size, 1);
    reduce_group_ = e_.AddGroup("shard.reduce", plan_.shard_size, 1);
    if (plan_.replicate_size > 1) {
      replicate_group_ = e_.AddGroup("replicate", plan_.replicate_size, plan_.shard_size);
    }
    if (TakesTurns()) {
      products_ = FindLargeProducts(e_.in.model, e_.a, spans);
    }
    is_read_again_ = FindReadAgain();
  }

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    for (Comm& c : comm_) {
      c.updated_before = true;
    }
    FindOrders();
    first_gather_ = true;
    last_collective_ = OpId();
    last_read_of_freed_ = before_last_params_ = OpId();
  }

  void PreForward(UnitId u, Phase phase) override {
    if (!HasParams(u)) {
      return;
    }
    Gather(u, phase);
    WaitForGather(u, phase);
    if (phase == Phase::kForward) {
      PrefetchAfter(u, forward_order_, plan_.units[u.value].forward_prefetch, phase);
    }
  }

  void PostForward(UnitId u, Phase phase) override {
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

  void PreBackward(UnitId u) override {
    if (!HasParams(u)) {
      return;
    }
    Gather(u, Phase::kBackward);
    WaitForGather(u, Phase::kBackward);
    PrefetchAfter(u, backward_order_, plan_.units[u.value].backward_prefetch, Phase::kBackward);
  }

  void BackwardLeft(UnitId u, bool done) override {
    FreeUnsharded(u);
    At(u).backward_done = done;
  }

  // What backward gathers again waits for the end of forward, so that what is gathered then counts
  // as kept, in memory as in time.
  void EndForward() override {
    waiting_gathers_.clear();  // prefetch lists may name units that forward has passed
    if (job_.mode == JobMode::kForward) {
      FreeAll();
    }
    CarryFreed();
    const OpId freed = last_read_of_freed_;
    last_read_of_freed_ =
        freed.valid() && freed > before_last_params_ ? freed : before_last_params_;
  }

  // The reduction starts when the last weight gradient is written, also for the first units.
  void GradientsFinal(UnitId u) override {
    if (Syncs() && TakesTurns()) {
      waiting_reductions_.push_back(u);
    } else if (Syncs()) {
      Reduce(u);
    }
  }

  // Of transfers that take turns one begins beside each large product, and with its unit's last one
  // all that still wait.
  void BeforeForwardOp(std::uint32_t model_op, Phase phase) override {
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
  void BeforeBackwardOp(std::uint32_t model_op) override {
    if (TakesTurns() && products_.any[model_op]) {
      (void)BeginTransfer();
      if (products_.first[model_op]) {
        BeginTransfers();
      }
    }
  }

  GradTarget WeightGradTarget(std::uint32_t model_op, UnitId u) override {
    UnitState& state = At(u);
    if (IsSummedApart(model_op)) {
      BufferId& part = part_of_param_[StorageOf(model_op).value];
      const bool is_new = !part.valid();
      if (is_new) {
        part = e_.Alloc(Bytes(SumOfGradElementsWith(model_op) * SizeOf(PrecisionOf(u).reduce)),
                        Category::kUnshardedGradient, Stream::kCompute);
      }
      return {part, is_new ? AccessMode::kWrite : AccessMode::kReadWrite};
    }
    if (!state.accumulated.valid()) {
      MakeRoomForGrads();
      state.accumulated = e_.Alloc(ReduceFull(u), Category::kUnshardedGradient, Stream::kCompute);
      written_[u.value].clear();
    }
    const ParamId storage = StorageOf(model_op);
    auto& written = written_[u.value];
    const bool again = std::find(written.begin(), written.end(), storage) != written.end();
    if (!again) {
      written.push_back(storage);
    }
    return {state.accumulated, again ? AccessMode::kReadWrite : AccessMode::kWrite};
  }
  void WeightGradWritten(std::uint32_t model_op, UnitId u) override {
    if (!IsSummedApart(model_op) || !completes_grad_[model_op]) {
      return;
    }
    BufferId& part = part_of_param_[StorageOf(model_op).value];
    const Bytes size = e_.program.buffers[part.value].size;
    e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, model_op}, 2 * size,
               size,
               {{At(u).accumulated, AccessMode::kReadWrite, Role::kOutput},
                {part, AccessMode::kRead, Role::kInput}});
    e_.body->Free(part);
    part = BufferId();
  }

  void EndBackward() override {
    BeginTransfers();
    FreeAll();
    CarryFreed();
    if (last_micro_batch_) {
      FollowActivations();
      // Nothing waits for the last reductions but the updates behind them.
      for (const InUse& r : reducing_) {
        e_.body->Free(r.buffer, StreamBit(Stream::kReduce));
      }
      reducing_.clear();
    }
  }

  void EndStep() override {
    std::vector<UnitId> units = UnitsWithGrads();
    if (units.empty()) {  // without the norm all of them are updated already
      moments_.EndStep();
      return;
    }
    // In the order in which the next forward needs them.
    std::stable_sort(units.begin(), units.end(), [&](UnitId x, UnitId y) {
      return spans_.spans[x.value].front().first < spans_.spans[y.value].front().first;
    });
    if (plan_.offload.parameters || plan_.offload.optimizer) {
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

 protected:
  // With the optimizer on the host, masters live there too.
  void InitUnit(UnitId u) override {
    StepRules::InitUnit(u);
    if (HasParams(u)) {
      e_.body->SetCarry(SlotOf(u), e_.body->last());
    }
    if (plan_.offload.optimizer && !plan_.offload.parameters && HasParams(u)) {
      At(u).host_master = e_.AllocOnHost(MasterShard(u), Category::kParameterShard);
      e_.AddTransfer(OpCode::kCopyD2h, Stream::kCompute, {Phase::kInit, u.value}, MasterShard(u),
                     At(u).shard, At(u).host_master);
    }
  }

  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutNative(e_.in.model, unit, plan_.shard_size,
                        UnitPrecision(job_.precision, unit.full_precision).param);
  }

  // The gradient has the layout of the parameters, so that a rank reduces what it owns. A unit that
  // mixes frozen and trainable parameters reduces zeros for the frozen ones, as FSDP1 does.
  [[nodiscard]] std::int64_t GradElements(const UnitInfo& unit) const override {
    return TrainablePaddedElements(e_.in.model, unit) > 0 ? unit.padded_elements : 0;
  }

  [[nodiscard]] std::int64_t StateElements(const UnitInfo& unit) const override {
    const std::vector<std::int64_t> tensors = FullestFlatShard(e_.in.model, unit);
    return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0});
  }

 private:
  struct Comm {
    OpId gathered;
    bool pending = false;
    BufferId part;  // kept by reshard to a smaller group
    OpId part_made;
    BufferId partial;            // a gradient reduced over the shard group, not over the replicas
    bool updated_before = true;  // the parameters were last changed by the step before
  };

  // Carry slots: per unit what last changed its parameters, then the last read of a freed buffer.
  [[nodiscard]] static std::uint32_t SlotOf(UnitId u) { return u.value; }
  [[nodiscard]] std::uint32_t FreedSlot() const { return static_cast<std::uint32_t>(unit_count()); }
  // Ops that share a weight add up a later micro-batch's gradient before it is added to those of
  // the micro-batches before, as one rank more would. Without that they write straight into them.
  [[nodiscard]] bool IsSummedApart(std::uint32_t model_op) const {
    return plan_.sync == SyncMode::kLast && !first_micro_batch_ &&
           is_shared_[StorageOf(model_op).value];
  }
  // A plan may list units whose backward has passed, or that have none.
  [[nodiscard]] bool HasBackwardAhead(UnitId u) {
    return !At(u).backward_done && spans_.backward_first[u.value] != kNoRegion;
  }

  // Does backward, or a recomputation, read the unit's parameters? That of an embedding does not.
  [[nodiscard]] std::vector<bool> FindReadAgain() const {
    std::vector<bool> result(unit_count(), false);
    for (std::size_t i = 0; i < e_.in.model.ops.size(); ++i) {
      const ModelOpFacts& facts = e_.a.ops[i];
      for (const ParamId param : e_.in.model.ops[i].params) {
        const bool reads = facts.reruns || (facts.has_backward && facts.input_grads != 0);
        const std::uint32_t u = spans_.unit_of_param[param.value].value;
        result[u] = result[u] || reads;
      }
    }
    return result;
  }

  void FindOrders() {
    written_.resize(unit_count());
    forward_order_.clear();
    backward_order_.clear();
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (HasParams(UnitId(u)) && !spans_.spans[u].empty()) {
        forward_order_.push_back(UnitId(u));
        if (spans_.backward_first[u] != kNoRegion) {
          backward_order_.push_back(UnitId(u));
        }
      }
    }
    std::stable_sort(forward_order_.begin(), forward_order_.end(), [&](UnitId x, UnitId y) {
      return spans_.spans[x.value].front().first < spans_.spans[y.value].front().first;
    });
    std::stable_sort(backward_order_.begin(), backward_order_.end(), [&](UnitId x, UnitId y) {
      return spans_.backward_first[x.value] > spans_.backward_first[y.value];
    });
  }

  // Gathers the unit, or lets it wait for its turn.
  void Prefetch(UnitId u, Phase phase) {
    pass_ = phase;
    if (!TakesTurns()) {
      Gather(u, phase);
    } else if (std::find(waiting_gathers_.begin(), waiting_gathers_.end(), u) ==
               waiting_gathers_.end()) {
      waiting_gathers_.push_back(u);
    }
  }

  // Gathers what the plan lists or, without a list, the units that come next, as far as the
  // in-flight limit allows; units kept for good (root, reshard never) do not count against it.
  void PrefetchAfter(UnitId u, const std::vector<UnitId>& order,
                     const std::vector<std::string>& names, Phase phase) {
    if (!names.empty()) {
      for (const std::string& name : names) {
        Prefetch(UnitNamed(name), phase);
      }
      return;
    }
    const auto at = std::find(order.begin(), order.end(), u);
    std::int64_t ahead = plan_.in_flight - 1;
    for (auto it = at; it != order.end() && ahead > 0; ++it) {
      if (it != at) {
        Prefetch(*it, phase);
        --ahead;
      }
    }
  }

  [[nodiscard]] bool TakesTurns() const { return plan_.transfers == Transfers::kInTurn; }

  // Begins the transfer that has waited longest, reductions first, beside what compute does next;
  // false: none waits.
  bool BeginTransfer() {
    if (!waiting_reductions_.empty()) {
      const UnitId u = waiting_reductions_.front();
      waiting_reductions_.pop_front();
      Reduce(u);
      return true;
    }
    return BeginGather();
  }
  bool BeginGather() {
    while (!waiting_gathers_.empty()) {
      if (Gather(waiting_gathers_.front(), pass_, e_.LastCompute())) {
        return true;
      }
    }
    return false;
  }
  void BeginTransfers() {
    while (BeginTransfer()) {
    }
  }

  // Called right after a gather or a reduction was added.
  void TakeTurn() {
    if (TakesTurns()) {
      const OpId collective = e_.body->last();
      e_.After(last_collective_);
      last_collective_ = collective;
    }
  }

  // Not before `not_before` has ended. False if the unit is there, on its way or not needed.
  bool Gather(UnitId u, Phase phase, OpId not_before = OpId()) {
    std::erase(waiting_gathers_, u);
    Comm& c = comm_[u.value];
    const bool needless =
        phase == Phase::kBackward && (!HasBackwardAhead(u) || !is_read_again_[u.value]);
    if (c.pending || At(u).unsharded.valid() || !HasParams(u) || needless) {
      return false;
    }
    c.pending = true;
    // Copies wait until the buffer whose bytes this one may take is no longer read.
    if (first_gather_) {
      e_.AddSlotWait(Stream::kCopyIn, FreedSlot(), phase, u.value);
      first_gather_ = false;
    }
    e_.AddWait(Stream::kCopyIn, {last_read_of_freed_, not_before}, phase, u.value);
    last_read_of_freed_ = OpId();
    At(u).unsharded = e_.Alloc(Unsharded(u), Category::kUnshardedParameter, Stream::kCopyIn);
    const bool small = c.part.valid();
    CopyIn(u, phase);
    c.gathered = e_.body->last();
    if (plan_.shard_size > 1) {
      const std::int64_t size = small ? plan_.units[u.value].reshard.group : plan_.shard_size;
      const GroupId group =
          small ? e_.AddGroup("reshard" + std::to_string(size), size, 1) : gather_group_;
      const OpId copied = c.gathered;
      c.gathered = e_.AddCollective(Collective(OpCode::kAllGather, Stream::kGather, group,
                                               Unsharded(u), PrecisionOf(u).param),
                                    {phase, u.value},
                                    {{At(u).unsharded, AccessMode::kReadWrite, Role::kOutput}});
      e_.After(copied);
      TakeTurn();
    }
    return true;
  }

  // This rank's shard (or kept part) into its slice of the unit's buffer, cast on the way.
  void CopyIn(UnitId u, Phase phase) {
    Comm& c = comm_[u.value];
    const bool small = c.part.valid();
    const Bytes slice = small ? Unsharded(u) / plan_.units[u.value].reshard.group : GatherShard(u);
    if (plan_.offload.parameters && !small) {
      const BufferId staged = e_.Alloc(MasterShard(u), Category::kAllGather, Stream::kCopyIn);
      e_.AddTransfer(OpCode::kCopyH2d, Stream::kCopyIn, {phase, u.value}, MasterShard(u),
                     At(u).shard, staged);
      WaitForUpdate(c, u);
      e_.AddCopy(OpCode::kGatherCopyIn, Stream::kCopyIn, {phase, u.value}, MasterShard(u), slice,
                 {{staged, AccessMode::kRead, Role::kInput},
                  {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
      e_.body->Free(staged);
      return;
    }
    e_.AddCopy(OpCode::kGatherCopyIn, Stream::kCopyIn, {phase, u.value},
               small ? slice : MasterShard(u), slice,
               {{small ? c.part : At(u).shard, AccessMode::kRead, Role::kInput},
                {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
    if (small) {
      e_.After(c.part_made);
    } else {
      WaitForUpdate(c, u);
    }
  }

  // The op last added reads parameters that the step before (or init) wrote.
  void WaitForUpdate(Comm& c, UnitId u) {
    if (c.updated_before) {
      e_.body->AfterSlot(SlotOf(u));
      c.updated_before = false;
    }
  }

  void WaitForGather(UnitId u, Phase phase) {
    Comm& c = comm_[u.value];
    if (c.pending) {
      c.pending = false;
      e_.AddWait(Stream::kCompute, {c.gathered}, phase, u.value);
      if (c.part.valid()) {
        e_.body->Free(c.part);
        c.part = BufferId();
      }
    }
  }

  void FreeUnsharded(UnitId u) {
    if (!At(u).unsharded.valid()) {
      return;
    }
    WaitForGather(u, Phase::kBackward);
    last_read_of_freed_ = e_.LastCompute();
    e_.body->Free(At(u).unsharded);
    At(u).unsharded = BufferId();
  }

  // The next step's first gather must not overwrite what this step still reads.
  void CarryFreed() {
    if (last_read_of_freed_.valid()) {
      e_.body->SetCarry(FreedSlot(), last_read_of_freed_);
    }
  }

  // Whatever is still gathered, used or not.
  void FreeAll() {
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      FreeUnsharded(UnitId(u));
    }
  }

  void KeepPart(UnitId u, Phase phase) {
    Comm& c = comm_[u.value];
    const Bytes part = Unsharded(u) / plan_.units[u.value].reshard.group;
    c.part = e_.Alloc(part, Category::kUnshardedParameter, Stream::kCompute);
    c.part_made = e_.AddCopy(OpCode::kReshardClone, Stream::kCompute, {phase, u.value}, part, part,
                             {{At(u).unsharded, AccessMode::kRead, Role::kInput},
                              {c.part, AccessMode::kWrite, Role::kOutput}});
    FreeUnsharded(u);
  }

  // At most in_flight gradient buffers: the oldest one's reduction must be over first.
  void MakeRoomForGrads() {
    while (Syncs() && reducing_.size() + waiting_reductions_.size() >=
                          static_cast<std::size_t>(plan_.in_flight)) {
      if (reducing_.empty()) {
        (void)BeginTransfer();
      }
      RetireOldestReduction();
    }
  }

  // At most in_flight reduced gradients are on their way to the host; the next reduction waits for
  // the oldest copy.
  void MakeRoomForShardedGrads() {
    while (sending_.size() >= static_cast<std::size_t>(plan_.in_flight)) {
      e_.AddWait(Stream::kReduce, {sending_.front().done}, Phase::kBackward, kNoSubject);
      e_.body->Free(sending_.front().buffer);
      sending_.pop_front();
    }
  }

  struct InUse {
    BufferId buffer;
    OpId done;  // then nobody reads it
  };

  void RetireOldestReduction() {
    const InUse oldest = reducing_.front();
    reducing_.pop_front();
    e_.AddWait(Stream::kCompute, {oldest.done}, Phase::kBackward, kNoSubject);
    e_.body->Free(oldest.buffer);
  }

  void Reduce(UnitId u) {
    MakeRoomForShardedGrads();
    UnitState& state = At(u);
    const BufferId input = state.accumulated;
    state.accumulated = BufferId();
    const OpId written = e_.LastCompute();
    const Stream s = Stream::kReduce;
    const bool adopts = !CastsReduce(u) && !state.sharded_grad.valid();
    BufferId out =
        e_.Alloc(ReduceShard(u), adopts ? Category::kShardedGradient : Category::kReduceScatter, s);
    if (plan_.shard_size > 1) {
      e_.AddCollective(
          Collective(OpCode::kReduceScatter, s, reduce_group_, ReduceFull(u),
                     PrecisionOf(u).reduce),
          {Phase::kBackward, u.value},
          {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
      TakeTurn();
    } else {
      e_.AddCopy(
          OpCode::kGradStore, s, {Phase::kBackward, u.value}, ReduceFull(u), ReduceShard(u),
          {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    }
    e_.After(written);
    reducing_.push_back({input, e_.body->last()});
    if (replicate_group_.valid() && plan_.sync == SyncMode::kReplicateLast && !SumPartial(u, out)) {
      return;
    }
    if (replicate_group_.valid()) {
      const OpId reduced = e_.body->last();
      const OpId replicated = e_.AddCollective(
          Collective(OpCode::kAllReduce, Stream::kReplicate, replicate_group_, ReduceShard(u),
                     PrecisionOf(u).reduce),
          {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
      e_.After(reduced);
      e_.AddWait(s, {replicated}, Phase::kBackward, u.value);
    }
    Store(u, out, adopts);
    last_reduce_ = e_.body->last();
    const bool on_host = plan_.offload.parameters || plan_.offload.optimizer;
    if (on_host && last_micro_batch_) {
      GradToHost(u, Stream::kD2h, last_reduce_);
      sending_.push_back({state.sharded_grad, e_.body->last()});
      state.sharded_grad = BufferId();
    } else if (last_micro_batch_ && !TakesGradNorm(job_)) {
      FollowActivations();
      Update(u, s);
      last_reduce_ = e_.body->last();
      FreeShardedGrads({&u, 1});
    }
  }

  // Sums over the shard group that the replicas have not seen yet stay apart until the last
  // micro-batch; then they are added to `out`. True when `out` is to be all-reduced now.
  bool SumPartial(UnitId u, BufferId out) {
    BufferId& partial = comm_[u.value].partial;
    if (!partial.valid()) {
      if (!last_micro_batch_) {
        partial = out;
      }
      return last_micro_batch_;
    }
    const BufferId sum = last_micro_batch_ ? out : partial;
    const BufferId other = last_micro_batch_ ? partial : out;
    e_.AddCopy(
        OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value}, 2 * ReduceShard(u),
        ReduceShard(u),
        {{sum, AccessMode::kReadWrite, Role::kOutput}, {other, AccessMode::kRead, Role::kInput}});
    e_.body->Free(other);
    partial = last_micro_batch_ ? BufferId() : partial;
    return last_micro_batch_;
  }

  void Store(UnitId u, BufferId out, bool adopts) {
    UnitState& state = At(u);
    if (adopts) {
      state.sharded_grad = out;
      return;
    }
    const bool accumulate = state.sharded_grad.valid();
    if (!accumulate) {
      state.sharded_grad = e_.Alloc(GradShard(u), Category::kShardedGradient, Stream::kReduce);
    }
    e_.AddCopy(OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value},
               accumulate ? ReduceShard(u) + GradShard(u) : ReduceShard(u), GradShard(u),
               {{state.sharded_grad, accumulate ? AccessMode::kReadWrite : AccessMode::kWrite,
                 Role::kOutput},
                {out, AccessMode::kRead, Role::kInput}});
    e_.body->Free(out);
  }

  // The next step's gather of the unit waits for this, and for nothing else of this step.
  void Update(UnitId u, Stream stream) {
    e_.body->SetCarry(SlotOf(u), StagesMoments() ? AddStagedOptimizer(u, stream, moments_)
                                                 : AddOptimizer({&u, 1}, stream));
  }
  [[nodiscard]] bool StagesMoments() const {
    return plan_.offload.moments && StateCount(job_.optimizer.kind) > 0;
  }
  void FollowActivations() {
    if (StagesMoments() && plan_.offload.activations) {
      moments_.FollowCompute();
    }
  }
  // Of updates behind the norm. Those that wait for moments let the next forward begin; but what
  // fp16 skips, only the compute stream knows.
  [[nodiscard]] Stream UpdateStream() const {
    return StagesMoments() && job_.precision.param != DType::kFp16 ? Stream::kReduce
                                                                   : Stream::kCompute;
  }

  void UpdateOnHost(const std::vector<UnitId>& units) {
    WaitForHostGrads(Phase::kOptimizer);
    for (const InUse& s : sending_) {
      e_.body->Free(s.buffer);
    }
    sending_.clear();
    AddHostOptimizer(units);
    if (!plan_.offload.parameters) {
      for (const UnitId u : units) {
        e_.body->SetCarry(
            SlotOf(u), e_.AddTransfer(OpCode::kCopyH2d, Stream::kH2d, {Phase::kOptimizer, u.value},
                                      MasterShard(u), At(u).host_master, At(u).shard));
      }
    }
    FreeShardedGrads(units);
  }

  std::vector<Comm> comm_;
  MomentStaging moments_;
  GroupId gather_group_, reduce_group_, replicate_group_;
  std::vector<UnitId> forward_order_, backward_order_;
  std::vector<bool> is_read_again_;            // per unit: behind its forward
  std::vector<std::vector<ParamId>> written_;  // per unit: storages whose gradient is there
  std::vector<BufferId> part_of_param_;  // by storage, while a micro-batch's ops add up theirs
  OpId last_read_of_freed_;
  OpId before_last_params_;     // runs before the last op of forward that reads parameters
  bool first_gather_ = true;    // of the step
  std::deque<InUse> reducing_;  // gradients of units, by reductions
  std::deque<InUse> sending_;   // reduced ones, by copies to the host
  OpId last_reduce_;
  // Of transfers that take turns.
  LargeProducts products_;
  std::vector<UnitId> waiting_gathers_;
  std::deque<UnitId> waiting_reductions_;
  OpId last_collective_;
  Phase pass_ = Phase::kForward;
};

}  // namespace

std::unique_ptr<StepRules> MakeNative(Emitter& emitter, const UnitSpans& spans,
                                      const std::vector<ResolvedUnit>& units) {
  return std::make_unique<NativeRules>(emitter, spans, units);
}

}  // namespace shardwright
