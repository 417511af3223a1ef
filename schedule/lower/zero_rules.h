#pragma once

// What DeepSpeed's three ZeRO stages share: masters and states in partitions of the master dtype,
// beside low-precision weights that the model computes with; gradients that are reduced bucket by
// bucket as their parameters' hooks fire; an update of flat partitions.

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
  // Elements of a rank that are updated at once, at most.
  [[nodiscard]] virtual std::int64_t LargestUpdate() const;
  // A gradient that waits for its reduction: what one model op's backward wrote.
  struct Member {
    std::uint32_t model_op = 0;
    UnitId unit;    // that of the op's first parameter
    BufferId grad;  // none once it was copied into the bucket
    std::int64_t elements = 0;
    std::int64_t padded_elements = 0;  // each parameter padded to a multiple of W
    // Of those, each unit's. The others than `unit` have what else the ops that share a weight
    // have, such as biases.
    std::vector<std::pair<UnitId, std::int64_t>> shares;

    [[nodiscard]] std::int64_t PaddedOf(UnitId u) const {
      for (const auto& [owner, padded] : shares) {
        if (owner == u) {
          return padded;
        }
      }
      return 0;
    }
  };

  // The gradient of the op's parameters, in At(unit).grads, is complete; its accumulation hook
  // fires. Called once per parameter storage and micro-batch.
  virtual void GradReady(std::uint32_t model_op, UnitId unit) = 0;
  // Takes the gradient that GradReady announces out of At(unit).grads.
  [[nodiscard]] Member TakeGrad(std::uint32_t model_op, UnitId unit);

  [[nodiscard]] bool Overlaps() const { return overlaps_; }
  // Elements of the unit that are updated, over all ranks, with padding.
  [[nodiscard]] std::int64_t Partitioned(UnitId u) const {
    return Info(u).shard_elements * plan_.shard_size;
  }
  [[nodiscard]] std::int64_t ranks() const { return plan_.shard_size * plan_.replicate_size; }
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

  // The global norm of `units`' partitioned gradients: one scalar sum over the shard group. Freed
  // by the caller. DeepSpeed takes it in each step, to report it, also where nothing is clipped.
  [[nodiscard]] BufferId AddNorm(std::span<const UnitId> units);
  // Makes gradients of the master dtype, At(u).sharded_grad, of the partitioned ones: flattened,
  // which takes a temporary of their dtype, and cast.
  void CastGrads(std::span<const UnitId> units);
  // Multiplies them by the clip coefficient. `norm` none: no clipping.
  void ClipGrads(std::span<const UnitId> units, BufferId norm);
  // The update of the units' masters as one flat tensor.
  void AddFlatOptimizer(std::span<const UnitId> units);
  // Scratch of such an update: flat tensors of `elements`, or none.
  [[nodiscard]] BufferId AllocFlatTemporaries(const OptimizerStep& step, std::int64_t elements);

  GroupId shard_group_, replicate_group_, world_group_;
  std::vector<BufferId> low_grads_;  // per unit: the partition of its gradient, reduced
  // DeepSpeed divides by the number of ranks before it sums. Here a power of two is divided off
  // before and the rest behind the sum, so that sums of fp32 have the bits of every other dialect.
  const DivideFactors factors_;

 private:
  bool overlaps_ = false;
};

[[nodiscard]] std::unique_ptr<StepRules> MakeZero12(Emitter&, const UnitSpans&,
                                                    const std::vector<ResolvedUnit>&);
[[nodiscard]] std::unique_ptr<StepRules> MakeZero3(Emitter&, const UnitSpans&,
                                                   const std::vector<ResolvedUnit>&);

}  // namespace shardwright
