#pragma once

// The flat parameters of FSDP1. A unit has one flat parameter, which is
// cast, gathered and freed as a whole. Memory is handed between streams by recordStream. Gradients
// are concatenated, summed, and divided before and after the reduction.
//
// Example: a layer of 2,622,464 parameters on 4 ranks. Each rank keeps one flat shard of 655,616
// elements. A gather makes 5.0 MiB in bf16, of which the layer's parameters are views.
// flat_rules.cc has the order in which gradients become final.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "schedule/lower/unit_rules.h"

namespace shardwright {

class FlatRules : public StepRules {
 public:
  FlatRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  void BackwardDone(std::uint32_t model_op) override;
  [[nodiscard]] BufferId ParameterStorage(UnitId u, std::uint32_t model_op) override;

 protected:
  // Called when the gradient of the unit's flat parameter is final. Autograd runs the nodes that
  // are ready youngest first. The node that has split the flat parameter into views thus runs after
  // all nodes made later, by whatever unit; then the gradient is complete.
  virtual void FlatGradFinal(UnitId u) = 0;
  // Whether the views of a unit are made when the unit before it is entered.
  [[nodiscard]] virtual bool MakesViewsEarly() const = 0;
  // Has parameters and runs.
  [[nodiscard]] bool IsEntered(UnitId u) const {
    return HasParams(u) && !spans_.spans[u.value].empty();
  }
  // Of units that run: is x entered before y?
  [[nodiscard]] bool EntersBefore(UnitId x, UnitId y) const;
  // Is it a call under torch.no_grad()? Where nothing in it would have made a node anyway, the ops
  // before and behind it say so.
  [[nodiscard]] bool IsWithoutGrad(UnitSpans::Span call) const;
  // The unit's first call that is none, whose hooks torch keeps; the first one where all are.
  [[nodiscard]] UnitSpans::Span FirstWithGrad(UnitId u) const;
  // From pass to pass, where there is no backward.
  [[nodiscard]] virtual bool StaysGathered(UnitId u) const = 0;
  void EndInit() override;

  // One trainable parameter makes the whole flat parameter need a gradient.
  [[nodiscard]] std::int64_t GradElements(const UnitInfo& unit) const override;

  // With use_orig_params the optimizer sees the parts of parameters that lie in the shard (here:
  // the first rank's), otherwise one flat tensor.
  [[nodiscard]] std::int64_t StateElements(const UnitInfo& unit) const override;
  [[nodiscard]] std::vector<std::int64_t> StateTensors(UnitId u) const override;

  // Right before the buffer of a gather is allocated, and right after one was freed.
  virtual void BeforeGather(Phase phase, UnitId unit) = 0;
  virtual void AfterFree() = 0;

  // NO_SHARD without mixed precision computes on the parameters themselves.
  [[nodiscard]] bool InPlace(UnitId u) const {
    return plan_.shard_size == 1 && !CastsGather(u) && !plan_.offload.parameters;
  }
  // After forward. NO_SHARD drops a copy that it has cast or fetched each time.
  [[nodiscard]] bool Reshards(UnitId u) const {
    return plan_.shard_size == 1 || (IsFullShard(u) && !is_root_[u.value]);
  }
  [[nodiscard]] bool IsFullShard(UnitId u) const {
    return plan_.units[u.value].reshard.kind == Reshard::Kind::kAlways;
  }
  // A unit's flat gradient covers all of its parameters.
  [[nodiscard]] Bytes FlatGrad(UnitId u, DType dtype) const {
    return Bytes(Info(u).padded_elements * SizeOf(dtype));
  }
  // Without use_orig_params the flat parameter has no padding, and neither has its gradient
  // before it is reduced (_get_reduce_scatter_tensors of _runtime_utils.py).
  [[nodiscard]] bool IsPaddedLate(UnitId u) const {
    return !plan_.use_orig_params && Info(u).elements != Info(u).padded_elements;
  }
  [[nodiscard]] Bytes MadeGrad(UnitId u, DType dtype) const {
    return IsPaddedLate(u) ? Bytes(Info(u).elements * SizeOf(dtype)) : FlatGrad(u, dtype);
  }
  [[nodiscard]] Holds HeldGrad(UnitId u) const {
    return IsPaddedLate(u) ? Holds::kUnit : Holds::kShards;
  }

  // Issues the gather of the unit unless it is there or on its way.
  void Unshard(UnitId u, Phase phase);
  void WaitForUnshard(UnitId u, Phase phase);
  void FreeUnsharded(UnitId u);

  // Autograd concatenates the views' gradients into the gradient of the flat parameter.
  [[nodiscard]] BufferId FlattenGrads(UnitId u);
  // `flat` plus what earlier micro-batches kept.
  [[nodiscard]] BufferId AddKept(UnitId u, BufferId flat);
  // `flat` in the reduce dtype, on the reduce stream; `flat` itself where the dtypes agree.
  [[nodiscard]] BufferId CastFlat(UnitId u, BufferId flat);
  [[nodiscard]] BufferId PadFlat(UnitId u, BufferId flat);
  // Divides by `divisor`, if it is above 1.
  void Scale(UnitId u, BufferId buffer, Bytes bytes, Stream stream, double divisor);

  // At the end of forward: which flat gradients backward will complete, and when.
  void FindFinals();

  const DivideFactors factors_;  // before and behind the reduction
  const GroupId shard_group_;
  std::vector<UnitId> entered_;      // units with parameters, in the order that forward enters them
  std::vector<bool> requires_grad_;  // per tensor, whether or not a loss depends on it

 private:
  void FindRequiresGrad();
  [[nodiscard]] bool WouldMakeNode(const ModelOp& op) const;
  // Does the op run under torch.no_grad()? Nothing where it would have made no node anyway.
  [[nodiscard]] std::optional<bool> IsWithoutGrad(const ModelOp& op) const;
  void CheckHook(UnitId u) const;
  [[nodiscard]] BufferId AllocUnsharded(UnitId u);

  // The shard as the gather reads it: copied to the device and cast on copy_in where needed.
  // Appends the buffers that it allocated to `staged`.
  [[nodiscard]] BufferId StageShard(UnitId u, Phase phase, std::vector<BufferId>& staged);

  // Per model op.
  std::vector<std::optional<bool>> without_grad_, without_grad_before_, without_grad_behind_;
  // The flat gradients that backward completes, in its order, and after which op.
  struct Final {
    std::uint32_t model_op = 0;
    UnitId unit;
  };
  std::vector<Final> finals_;
  std::size_t next_final_ = 0;
  std::vector<bool> pending_;
  std::vector<bool> is_root_;
  OpId last_gather_;
};

}  // namespace shardwright
