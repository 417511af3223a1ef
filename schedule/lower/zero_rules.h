#pragma once

// The common part of DeepSpeed's three ZeRO stages. Masters and states are partitions of the master
// dtype, beside low-precision weights that the model computes with. Gradients are reduced bucket by
// bucket as their parameters' hooks fire. The update works on flat partitions.
//
// Example: 6,269,440 parameters on 4 ranks: each updates 1,567,360 of them. zero12.cc has one step
// of stage 2, zero3.cc the memory of stage 3.

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "schedule/lower/unit_rules.h"

namespace shardwright {

class ZeroRules : public StepRules {
 public:
  ZeroRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  void WeightGradWritten(std::uint32_t model_op, UnitId unit) override;
  void GradientsFinal(UnitId /*unit*/) override {}

 protected:
  // Masters, and the optimizer's states, which DeepSpeed allocates before the first step
  // (initialize_optimizer_states), so that activations do not cut the memory into pieces.
  void InitUnit(UnitId u) override;
  [[nodiscard]] bool MastersOnHost() const override { return UpdatesOnHost(); }
  // The update that allocates the states, with gradients of zeros.
  void EndInit() override;
  // Units whose partitions an update takes as one flat tensor.
  [[nodiscard]] virtual std::vector<std::vector<UnitId>> UpdatedTogether() const {
    return {TrainableUnits()};
  }
  [[nodiscard]] std::vector<UnitId> TrainableUnits() const;
  // A gradient that waits for its reduction: what one model op's backward wrote, or, in a bucket
  // that has no room for all of it, of one parameter.
  struct Member {
    std::uint32_t model_op = 0;
    UnitId unit;    // that of the op's first parameter
    BufferId grad;  // none once it was copied into the bucket
    std::int64_t elements = 0;
    std::int64_t padded_elements = 0;  // each parameter padded to a multiple of W
    // Of those, each unit's. The others than `unit` have what else the ops that share a weight
    // have, such as biases.
    std::vector<std::pair<UnitId, std::int64_t>> shares;
    std::vector<ParamId> storages;  // as they lie in the gradient
  };

  // The gradient of the op's parameters, in At(unit).grads, is complete; its accumulation hook
  // fires. Called once per parameter storage and micro-batch.
  virtual void GradReady(std::uint32_t model_op, UnitId unit) = 0;
  // Takes the gradient that GradReady announces out of At(unit).grads.
  [[nodiscard]] Member TakeGrad(std::uint32_t model_op, UnitId unit);
  [[nodiscard]] Member MemberOf(std::uint32_t model_op, UnitId unit, BufferId grad) const;

  // The parameters of a gradient, each with elements [end - elements, end) of it, in the order in
  // which autograd has them: what is the op's own comes last.
  struct Part {
    Member member;
    std::int64_t end = 0;
  };
  [[nodiscard]] std::vector<Part> ByParameter(const Member& member) const;
  // Takes one parameter's gradient, which lies in `grad`, for reduction.
  virtual void AddPart(Part part, BufferId grad) = 0;
  // Are gradients reduced as soon as they are there? Then what an op has beside a weight that
  // others share is taken before that weight's gradient is complete.
  [[nodiscard]] virtual bool ReducesAtOnce() const = 0;
  // Of a gradient that is complete: what was not taken before.
  void AddParts(std::vector<Part> parts, BufferId grad);
  [[nodiscard]] bool IsTaken(const Member& member) const;
  // Copies a part of a gradient, behind what is there.
  void CopyPart(const Part& part, BufferId grad, BufferId to, Stream stream);

  // States that are no partitions in the masters' dtype.
  [[nodiscard]] bool HasPackedStates() const {
    const bool is_fp32 =
        job_.optimizer.states == StateFormat::kFp32 && job_.precision.master == DType::kFp32;
    return job_.optimizer.states != StateFormat::kMaster && !is_fp32;
  }
  [[nodiscard]] bool Overlaps() const { return overlaps_; }
  // Elements of the unit that are updated, over all ranks, with padding.
  [[nodiscard]] std::int64_t Partitioned(UnitId u) const {
    return Info(u).shard_elements * plan_.shard_size;
  }
  [[nodiscard]] std::int64_t ranks() const { return e_.mesh.RankCount(); }
  [[nodiscard]] Bytes InParam(std::int64_t elements) const {
    return Bytes(elements * SizeOf(job_.precision.param));
  }
  [[nodiscard]] Bytes InReduce(std::int64_t elements) const {
    return Bytes(elements * SizeOf(job_.precision.reduce));
  }
  [[nodiscard]] bool IsTrainable(UnitId u) const;

  // The group of all-reduced buckets: all ranks.
  void AddWorldGroup();
  // Gradients that are in no bucket, one behind the other in a buffer that the caller frees.
  [[nodiscard]] BufferId FlattenMembers(std::span<const Member> members, Stream stream);
  // A buffer for gradients of several parameters, one behind the other.
  [[nodiscard]] BufferId NewMixed(Bytes bytes, Stream owner, DType dtype, bool zero_filled = false);
  // Divides the first elements of `source` by the ranks and sums them over all, in the reduce
  // dtype; in `pieces`, one behind the other, each an all-reduce of its own.
  void AverageInPlace(BufferId source, std::int64_t elements, Stream stream, Emitter::Where where,
                      std::span<const std::int64_t> pieces);
  [[nodiscard]] static std::int64_t SumOf(std::span<const Member> members);
  // The members' units, each once, in the order in which they come.
  [[nodiscard]] static std::vector<UnitId> UnitsOf(std::span<const Member> members);

  // The norm of `units`' partitioned gradients, or of those that are on the host: one scalar sum
  // over the shard group. Freed by the caller. DeepSpeed takes it in each step, to report it, also
  // where nothing is clipped.
  [[nodiscard]] BufferId AddNorm(std::span<const UnitId> units);
  [[nodiscard]] BufferId AddNormOfSent();
  // Makes gradients of the master dtype, At(u).sharded_grad, of the partitioned ones: flattened,
  // which takes a temporary of their dtype, and cast.
  void CastGrads(std::span<const UnitId> units);
  // Multiplies them by the clip coefficient; the others of `norms` are added to the first one
  // before. None: no clipping.
  void ClipGrads(std::span<const UnitId> units, std::span<const BufferId> norms);
  // The update of the units' masters as one flat tensor.
  void AddFlatOptimizer(std::span<const UnitId> units);
  [[nodiscard]] std::int64_t FlatElements(std::span<const UnitId> units) const;
  // Scratch of such an update: flat tensors of `elements`, or none.
  [[nodiscard]] BufferId AllocFlatTemporaries(const OptimizerStep& step, std::int64_t elements);

  GroupId shard_group_, replicate_group_, world_group_;
  std::vector<BufferId> low_grads_;  // per unit: the partition of its gradient, reduced
  // DeepSpeed divides by the number of ranks before it sums. Here a power of two is divided off
  // before and the rest behind the sum, so that sums of fp32 have the bits of every other dialect.
  const DivideFactors factors_;

 private:
  void AllocFlatStates(std::span<const UnitId> units);
  [[nodiscard]] StateSize FlatState(std::int64_t elements) const;
  [[nodiscard]] OptimizerStep FlatUpdate(std::int64_t elements) const;
  [[nodiscard]] std::vector<ParamId> AsLaidOut(std::uint32_t model_op) const;
  void TakeOwn(std::uint32_t model_op, UnitId unit);

  bool overlaps_ = false;
  std::vector<std::uint32_t> only_user_;  // per storage: the op that has it; kNoRegion: several
  std::vector<bool> taken_;  // per storage: its gradient of this pass, before its op's others
};

[[nodiscard]] std::unique_ptr<StepRules> MakeZero12(Emitter&, const UnitSpans&,
                                                    const std::vector<ResolvedUnit>&);
[[nodiscard]] std::unique_ptr<StepRules> MakeZero3(Emitter&, const UnitSpans&,
                                                   const std::vector<ResolvedUnit>&);

}  // namespace shardwright
