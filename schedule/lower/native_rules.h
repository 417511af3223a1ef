#pragma once

// Our own dialect: what FSDP2 would be without Python hooks and a caching allocator. One flat
// buffer per unit, gathers land in the parameter views, weight gradients are written straight into
// the reduce-scatter input, gathers and reductions run on separate communicators. Rules:
// docs/lowering.md, section native.

#include <cstdint>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

#include "schedule/lower/layout.h"
#include "schedule/lower/moment_staging.h"
#include "schedule/lower/products.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {

class NativeRules : public StepRules {
 public:
  NativeRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  void BeginStep(bool first) override;
  void PreForward(UnitId u, Phase phase) override;
  void PostForward(UnitId u, Phase phase) override;
  void PreBackward(UnitId u) override;
  [[nodiscard]] BufferId ParameterStorage(UnitId u, std::uint32_t model_op) override {
    return IsInPlace(u) ? At(u).shard : StepRules::ParameterStorage(u, model_op);
  }

  void BackwardLeft(UnitId u, bool done) override {
    FreeUnsharded(u);
    At(u).backward_done = done;
  }

  // Gathers for backward wait until forward has ended. A unit gathered then counts as kept, in
  // memory as in time.
  void EndForward() override;

  // The reduction starts when the last weight gradient is written, also for the first units.
  void GradientsFinal(UnitId u) override;

  // Of transfers that take turns one begins beside each large product, and with its unit's last one
  // all that still wait.
  void BeforeForwardOp(std::uint32_t model_op, Phase phase) override;
  void BeforeBackwardOp(std::uint32_t model_op) override;

  GradTarget WeightGradTarget(std::uint32_t model_op, UnitId u) override;
  void WeightGradWritten(std::uint32_t model_op, UnitId u) override;
  void EndBackward() override;
  void EndStep() override;

 protected:
  // With the optimizer on the host, masters live there too.
  void InitUnit(UnitId u) override;

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

  struct InUse {
    BufferId buffer;
    OpId done;  // then nobody reads it
  };

  // Carry slots: per unit what last changed its parameters, then the last read of a freed buffer.
  [[nodiscard]] static std::uint32_t SlotOf(UnitId u) { return u.value; }
  [[nodiscard]] std::uint32_t FreedSlot() const { return static_cast<std::uint32_t>(unit_count()); }

  // Ops that share a weight add up a later micro-batch's gradient before it is added to those of
  // the micro-batches before, as one rank more would. Without that they write straight into them.
  [[nodiscard]] bool IsSummedApart(std::uint32_t model_op) const;

  // native_gathers.cc: parameters come and go.

  // One rank computes on its shard, which is whole, if it need not be cast. The update writes all
  // of the shard; without a norm it may run while backward still reads the unit's frozen
  // parameters.
  [[nodiscard]] bool IsInPlace(UnitId u) const {
    return plan_.shard_size == 1 && !plan_.offload.parameters && !CastsGather(u) &&
           (TakesGradNorm(job_) || !mixes_frozen_[u.value]);
  }

  // A plan may list units whose backward has passed, or that have none.
  [[nodiscard]] bool HasBackwardAhead(UnitId u);

  // Does backward, or a recomputation, read the unit's parameters? That of an embedding does not.
  [[nodiscard]] std::vector<bool> FindReadAgain() const;

  void FindOrders();

  // Gathers the unit, or lets it wait for its turn.
  void Prefetch(UnitId u, Phase phase);

  // Gathers what the plan lists or, without a list, the units that come next, as far as the
  // in-flight limit allows; units kept for good (root, reshard never) do not count against it.
  void PrefetchAfter(UnitId u, const std::vector<UnitId>& order,
                     const std::vector<std::string>& names, Phase phase);

  [[nodiscard]] bool TakesTurns() const { return plan_.transfers == Transfers::kInTurn; }

  // Begins the transfer that has waited longest, reductions first, beside what compute does next;
  // false: none waits.
  bool BeginTransfer();
  bool BeginGather();
  void BeginTransfers();

  // Called right after a gather or a reduction was added.
  void TakeTurn();

  // Not before `not_before` has ended. False if the unit is there, on its way or not needed.
  bool Gather(UnitId u, Phase phase, OpId not_before = OpId());

  // This rank's shard (or kept part) into its slice of the unit's buffer, cast on the way.
  void CopyIn(UnitId u, Phase phase);

  // The op last added reads parameters that the step before (or init) wrote.
  void WaitForUpdate(Comm& c, UnitId u);

  // Before the first op that reads the unit.
  void WaitForGather(UnitId u, Phase phase);
  void FreeUnsharded(UnitId u);

  // The next step's first gather must not overwrite what this step still reads.
  void CarryFreed();

  // Frees every unit that is still gathered, used or not.
  void FreeAll();

  void KeepPart(UnitId u, Phase phase);

  // native_reductions.cc: gradients leave, and what follows them.

  // At most in_flight gradient buffers: the oldest one's reduction must be over first.
  void MakeRoomForGrads();

  // At most in_flight reduced gradients are on their way to the host; the next reduction waits for
  // the oldest copy.
  void MakeRoomForShardedGrads();

  void RetireOldestReduction();
  void Reduce(UnitId u);

  // One rank's gradient is its shard: it stays where it was made, and replicas sum it there.
  // Updates on the host, staged moments and partial sums need it among the reduction's buffers.
  [[nodiscard]] bool ReducesInPlace() const {
    return plan_.shard_size == 1 && !UpdatesOnHost() && !StagesMoments() &&
           !(replicate_group_.valid() && plan_.sync == SyncMode::kReplicateLast);
  }
  void ReduceInPlace(UnitId u);

  // In place, once the gradient is written; the reduce stream waits for it.
  void SumOverReplicas(UnitId u, BufferId grad, OpId written);

  // Sums over the shard group that the replicas have not seen yet stay apart until the last
  // micro-batch; then they are added to `out`. True when `out` is to be all-reduced now.
  bool SumPartial(UnitId u, BufferId out);

  // Does the reduced gradient become the sharded one as it is?
  [[nodiscard]] bool Adopts(UnitId u) { return !CastsReduce(u) && !At(u).sharded_grad.valid(); }

  // Into the sharded gradient, on a stream.
  void Store(UnitId u, BufferId out, Stream stream);

  // The next step's gather of the unit waits for this, and for nothing else of this step.
  void Update(UnitId u, Stream stream);

  [[nodiscard]] bool StagesMoments() const {
    return plan_.offload.moments && StateCount(job_.optimizer.kind) > 0;
  }

  void FollowActivations();

  // The stream of updates behind the norm. Updates that wait for moments let the next forward
  // begin. But only the compute stream knows which updates fp16 skips.
  [[nodiscard]] Stream UpdateStream() const {
    return StagesMoments() && job_.precision.param != DType::kFp16 ? Stream::kReduce
                                                                   : Stream::kCompute;
  }

  void UpdateOnHost(const std::vector<UnitId>& units);

  std::vector<Comm> comm_;
  MomentStaging moments_;
  GroupId gather_group_, reduce_group_, replicate_group_;
  std::vector<UnitId> forward_order_, backward_order_;
  std::vector<bool> is_read_again_;            // per unit: behind its forward
  std::vector<bool> mixes_frozen_;             // per unit: frozen and trainable parameters
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

}  // namespace shardwright
