// DeepSpeed ZeRO stage 3: parameters are partitioned one by one, fetched module by module and
// ahead of use along the order that the first pass recorded, and released when they are not used
// again soon. Rules: docs/lowering.md, section zero3.

#include <algorithm>
#include <deque>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/lower/fetch_order.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/zero_rules.h"

namespace shardwright {
namespace {

class Zero3Rules : public ZeroRules {
 public:
  Zero3Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : ZeroRules(emitter, spans, units),
        low_(units.size()),
        persistent_(units.size()),
        fetch_of_(units.size(), kNoFetch),
        order_(plan_.zero, units.size()) {
    copy_ = Overlaps() ? Stream::kCopyIn : Stream::kCompute;
    reduce_ = Overlaps() ? Stream::kReduce : Stream::kCompute;
  }

  // The first pass records the order of fetches and neither prefetches nor keeps anything.
  [[nodiscard]] bool FirstStepDiffers() const override { return !InPlace(); }

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    copy_tail_ = seen_tail_ = last_reduce_ = OpId();
    fetch_events_.clear();
    reduce_events_.clear();
    fetches_.clear();
  }

  void BeginMicroBatch(bool first, bool last) override {
    StepRules::BeginMicroBatch(first, last);
    order_.BeginPass();
  }

  void PreForward(UnitId u, Phase phase) override {
    if (!InPlace()) {
      BeginGathers(phase);
    }
    FetchModule(u, phase);
  }
  void PostForward(UnitId u, Phase /*phase*/) override { ReleaseModule(u); }
  void PreBackward(UnitId u) override { FetchModule(u, Phase::kBackward); }
  void BackwardLeft(UnitId u, bool /*done*/) override { ReleaseModule(u); }

  void EndForward() override {
    if (job_.mode == JobMode::kForward) {
      EndPass(Phase::kForward);
    }
  }

  // The epilogue reduces what is left and synchronises the host with the reductions.
  void EndBackward() override {
    Flush();
    if (last_reduce_.valid()) {
      e_.AddHostWait({&last_reduce_, 1}, Phase::kBackward, kNoSubject);
    }
    EndPass(Phase::kBackward);
  }

  void EndStep() override {
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

  BufferId ParameterStorage(UnitId u, std::uint32_t /*model_op*/) override {
    return InPlace() ? low_[u.value] : At(u).unsharded;
  }

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutPerParameterFlat(e_.in.model, unit, plan_.shard_size);
  }

  // Partitions of the weights in the compute dtype; in training, of the masters and gradients, too,
  // and the bucket, which is as large as it may get from the beginning.
  void InitUnit(UnitId u) override {
    if (HasParams(u)) {
      low_[u.value] = e_.Alloc(GatherShard(u), Category::kParameterShard, Stream::kCompute);
      e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0),
                 GatherShard(u), {{low_[u.value], AccessMode::kWrite, Role::kOutput}});
      Buffer b;
      b.size = Unsharded(u);
      b.category = Category::kUnshardedParameter;
      b.owner = copy_;
      persistent_[u.value] = Persists(u) && !InPlace() ? e_.body->NewBuffer(b) : BufferId();
    }
    if (job_.mode == JobMode::kForward || !IsTrainable(u)) {
      return;
    }
    ZeroRules::InitUnit(u);
    low_grads_[u.value] = e_.Alloc(GatherShard(u), Category::kShardedGradient, Stream::kCompute);
    if (!bucket_.valid() && plan_.zero.contiguous_gradients) {
      bucket_ =
          e_.Alloc(InParam(plan_.zero.reduce_bucket), Category::kReduceScatter, Stream::kCompute);
    }
  }

  void GradReady(std::uint32_t i, UnitId unit) override {
    Member member = TakeGrad(i, unit);
    if (elements_ > 0 && elements_ + member.elements > plan_.zero.reduce_bucket) {
      Flush();
    }
    e_.AddWait(reduce_, {e_.LastCompute()}, Phase::kBackward, unit.value);
    if (plan_.zero.contiguous_gradients &&
        elements_ + member.elements <= plan_.zero.reduce_bucket) {
      const Bytes bytes = InParam(member.elements);
      e_.AddCopy(OpCode::kBucketCopy, reduce_, {Phase::kBackward, unit.value}, bytes, bytes,
                 {{member.grad, AccessMode::kRead, Role::kInput}});
      e_.body->UseFirst(bucket_, InParam(elements_ + member.elements), AccessMode::kWrite,
                        Role::kOutput);
      e_.body->Free(member.grad, StreamBit(reduce_));
      member.grad = BufferId();
    }
    elements_ += member.elements;
    members_.push_back(member);
  }

 private:
  static constexpr std::uint32_t kNoFetch = 0xffffffffu;
  static constexpr std::size_t kMostEvents = 2;  // fetches and reductions that the host runs ahead

  // One all-gather. Several parameters go through a flat buffer and are copied out, all of them
  // when the first of its units is waited for; a parameter alone is gathered into place.
  struct Fetch {
    std::vector<UnitId> units;
    BufferId flat;
    OpId gathered;
    std::size_t left = 0;  // units not waited for yet
    bool complete = false;
  };

  // One rank computes on its partitions, which are whole.
  [[nodiscard]] bool InPlace() const { return plan_.shard_size == 1; }
  [[nodiscard]] bool Persists(UnitId u) const {
    const auto& params = Info(u).params;
    return std::all_of(params.begin(), params.end(), [&](const ParamSlot& slot) {
      return e_.in.model.params[slot.param.value].Elements() <= plan_.zero.persistence_threshold;
    });
  }
  [[nodiscard]] bool IsAway(UnitId u) { return !At(u).unsharded.valid(); }

  // --- Fetching and releasing.

  void FetchModule(UnitId u, Phase phase) {
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

  void ReleaseModule(UnitId u) {
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

  void Gather(const std::vector<UnitId>& units, Phase phase) {
    Fetch fetch;
    fetch.units = units;
    fetch.left = units.size();
    const bool direct = units.size() == 1 && Info(units.front()).params.size() == 1;
    Bytes full{0};
    for (const UnitId u : units) {
      full += Unsharded(u);
    }
    const Emitter::Where where{phase, units.front().value};
    const OpShape shape =
        Collective(OpCode::kAllGather, Stream::kGather, shard_group_, full, job_.precision.param);
    OpId before = copy_tail_;
    if (direct) {
      NewUnsharded(units.front());
      fetch.gathered =
          e_.AddCollective(shape, where,
                           {{low_[units.front().value], AccessMode::kRead, Role::kInput},
                            {At(units.front()).unsharded, AccessMode::kWrite, Role::kOutput}});
    } else {
      fetch.flat = e_.Alloc(full, Category::kAllGather, copy_);
      CopyIn(units, full / plan_.shard_size, fetch.flat, where);
      before = copy_tail_;
      fetch.gathered =
          e_.AddCollective(shape, where, {{fetch.flat, AccessMode::kReadWrite, Role::kOutput}});
      for (const UnitId u : units) {
        At(u).unsharded = fetch.flat;  // stands for "on its way" until it is copied out
      }
    }
    // NCCL's stream waits for what the calling stream was given.
    e_.After(Overlaps() ? before : LastComputeBefore(fetch.gathered));
    for (const UnitId u : units) {
      fetch_of_[u.value] = static_cast<std::uint32_t>(fetches_.size());
    }
    fetches_.push_back(fetch);
  }

  [[nodiscard]] OpId LastComputeBefore(OpId op) const {
    OpId last(op.value - 1);
    while (e_.StreamOf(last) != Stream::kCompute) {
      last = OpId(last.value - 1);
    }
    return last;
  }

  // The units' partitions, one behind the other, into this rank's slice of the flat buffer.
  void CopyIn(const std::vector<UnitId>& units, Bytes slice, BufferId flat, Emitter::Where where) {
    e_.AddCopy(OpCode::kGatherCopyIn, copy_, where, slice, slice,
               {{flat, AccessMode::kWrite, Role::kOutput}});
    std::uint16_t index = 0;
    for (const UnitId u : units) {
      e_.body->Use(low_[u.value], AccessMode::kRead, Role::kInput, index++);
    }
    copy_tail_ = e_.body->last();
  }

  void NewUnsharded(UnitId u) {
    if (persistent_[u.value].valid() && order_.IsComplete()) {
      At(u).unsharded = persistent_[u.value];
      e_.body->Alloc(At(u).unsharded);
    } else {
      At(u).unsharded = e_.Alloc(Unsharded(u), Category::kUnshardedParameter, copy_);
    }
  }

  void Wait(UnitId u, Phase phase) {
    Fetch& fetch = fetches_[fetch_of_[u.value]];
    fetch_of_[u.value] = kNoFetch;
    LimitHost(fetch_events_, phase, u);
    if (!fetch.complete) {
      fetch.complete = true;
      if (fetch.flat.valid()) {
        CopyOut(fetch, phase);
      } else {
        e_.AddWait(copy_, {fetch.gathered}, phase, u.value);
        copy_tail_ = e_.body->last();
      }
    }
    fetch_events_.push_back(copy_tail_);
    if (--fetch.left == 0 && fetch.flat.valid()) {
      e_.body->Free(fetch.flat);
    }
  }

  void CopyOut(const Fetch& fetch, Phase phase) {
    std::uint16_t index = 0;
    for (const UnitId u : fetch.units) {
      NewUnsharded(u);
      e_.AddCopy(OpCode::kGatherCopyOut, copy_, {phase, u.value}, Unsharded(u), Unsharded(u),
                 {{fetch.flat, AccessMode::kRead, Role::kInput, index++},
                  {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
      e_.After(fetch.gathered);
      copy_tail_ = e_.body->last();
    }
  }

  // Compute waits for all that the gather stream was given so far.
  void WaitForCopies(Phase phase, UnitId u) {
    if (copy_tail_ != seen_tail_) {
      seen_tail_ = copy_tail_;
      e_.AddWait(Stream::kCompute, {copy_tail_}, phase, u.value);
    }
  }

  // With more than two events outstanding the host waits for the oldest.
  void LimitHost(std::deque<OpId>& events, Phase phase, UnitId u) {
    if (events.size() > kMostEvents) {
      const OpId oldest = events.front();
      events.pop_front();
      e_.AddHostWait({&oldest, 1}, phase, u.value);
    }
  }

  void FreeUnsharded(UnitId u) {
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
  void EndPass(Phase phase) {
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      const bool is_over = phase == Phase::kForward && (first_step_ || !Persists(UnitId(u)));
      if (fetch_of_[u] != kNoFetch || is_over) {
        FreeUnsharded(UnitId(u));
      }
    }
    order_.EndPass();
  }

  // --- Reducing.

  void Flush() {
    if (members_.empty()) {
      return;
    }
    LimitHost(reduce_events_, Phase::kBackward, members_.front().unit);
    std::int64_t padded = 0;
    for (const Member& m : members_) {
      padded += m.padded_elements;
    }
    const Emitter::Where where{Phase::kBackward, members_.front().unit.value};
    const Bytes wide = InReduce(elements_), full = InReduce(padded);
    BufferId cast;
    if (job_.precision.reduce != job_.precision.param) {
      cast = e_.Alloc(wide, Category::kReduceScatter, reduce_);
      e_.AddCopy(OpCode::kCast, reduce_, where, InParam(elements_), wide,
                 {{cast, AccessMode::kWrite, Role::kOutput}});
      UseMembers();
    }
    const BufferId input = e_.Alloc(full, Category::kReduceScatter, reduce_);
    e_.AddCopy(
        OpCode::kReduceCopyIn, reduce_, where, wide, full,
        {{input, AccessMode::kWrite, Role::kOutput}, {cast, AccessMode::kRead, Role::kInput}});
    if (!cast.valid()) {
      UseMembers();
    }
    if (ranks() > 1) {
      e_.AddCopy(OpCode::kGradScale, reduce_, where, full, full,
                 {{input, AccessMode::kReadWrite, Role::kInput}});
    }
    const BufferId out = Scatter(input, full, where);
    StoreParts(out, where);
    if (cast.valid()) {
      e_.body->Free(cast);
    }
    e_.body->Free(input);
    if (out != input) {
      e_.body->Free(out);
    }
    for (const Member& m : members_) {
      if (m.grad.valid()) {
        e_.body->Free(m.grad, StreamBit(reduce_));
      }
    }
    last_reduce_ = e_.body->last();
    reduce_events_.push_back(last_reduce_);
    members_.clear();
    elements_ = 0;
  }

  // The bucket, then the gradients that did not fit into it.
  void UseMembers() {
    std::int64_t copied = 0;
    std::uint16_t index = 1;
    for (const Member& m : members_) {
      copied += m.grad.valid() ? 0 : m.elements;
      if (m.grad.valid()) {
        e_.body->Use(m.grad, AccessMode::kRead, Role::kInput, index++);
      }
    }
    if (copied > 0) {
      e_.body->UseFirst(bucket_, InParam(copied), AccessMode::kRead, Role::kInput);
    }
  }

  // Row r of `input`, seen as [W][sum of the members' chunks], is what rank r receives.
  [[nodiscard]] BufferId Scatter(BufferId input, Bytes full, Emitter::Where where) {
    if (plan_.shard_size == 1 && !replicate_group_.valid()) {
      return input;
    }
    BufferId out = input;
    if (plan_.shard_size > 1) {
      out = e_.Alloc(full / plan_.shard_size, Category::kReduceScatter, reduce_);
      e_.AddCollective(
          Collective(OpCode::kReduceScatter, reduce_, shard_group_, full, job_.precision.reduce),
          where,
          {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    }
    if (replicate_group_.valid()) {
      e_.AddCollective(Collective(OpCode::kAllReduce, reduce_, replicate_group_,
                                  full / plan_.shard_size, job_.precision.reduce),
                       where, {{out, AccessMode::kReadWrite, Role::kInput}});
    }
    return out;
  }

  // Chunk after chunk, in the order of the members, to the units' gradient partitions.
  void StoreParts(BufferId out, Emitter::Where where) {
    std::int64_t chunks = 0;
    std::vector<UnitId> units;
    for (const Member& m : members_) {
      chunks += m.padded_elements / plan_.shard_size;
      if (std::find(units.begin(), units.end(), m.unit) == units.end()) {
        units.push_back(m.unit);
      }
    }
    const Bytes wide = InReduce(chunks), low = InParam(chunks);
    e_.AddCopy(OpCode::kGradStore, reduce_, where, first_micro_batch_ ? wide : wide + low, low,
               {{out, AccessMode::kRead, Role::kInput}});
    std::uint16_t index = 0;
    for (const UnitId u : units) {
      e_.body->Use(low_grads_[u.value],
                   first_micro_batch_ ? AccessMode::kWrite : AccessMode::kReadWrite, Role::kOutput,
                   index++);
    }
  }

  // --- The update, one sub-group after the other.

  void Update() {
    std::vector<UnitId> all;
    for (std::uint32_t u = 0; u < unit_count(); ++u) {
      if (low_grads_[u].valid()) {
        all.push_back(UnitId(u));
      }
    }
    if (all.empty()) {
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

  void UpdateGroup(const std::vector<UnitId>& units, BufferId norm) {
    CastGrads(units);
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

  // Small parameters are gathered after the update and then stay; the host waits for it.
  void GatherPersistent() {
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

  Stream copy_ = Stream::kCopyIn, reduce_ = Stream::kReduce;
  std::vector<BufferId> low_;         // per unit: partition in the compute dtype
  std::vector<BufferId> persistent_;  // per unit: its weights, if they persist
  std::vector<Fetch> fetches_;        // of the step
  std::vector<std::uint32_t> fetch_of_;
  FetchOrder order_;
  std::deque<OpId> fetch_events_, reduce_events_;
  OpId copy_tail_;  // last op that the gather stream was given, and what compute has waited for
  OpId seen_tail_;
  BufferId bucket_;
  std::vector<Member> members_;  // of the open bucket
  std::int64_t elements_ = 0;
  OpId last_reduce_;
};

}  // namespace

std::unique_ptr<StepRules> MakeZero3(Emitter& emitter, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  return std::make_unique<Zero3Rules>(emitter, spans, units);
}

}  // namespace shardwright
