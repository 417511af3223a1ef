#pragma once

// PyTorch FSDP2 (fully_shard): per-parameter sharding, one all-gather and one reduce-scatter per
// unit, implicit forward prefetch with a parked gather buffer, backward prefetch in reverse
// post-forward order. Rules: docs/lowering.md, section fsdp2.
//
// Example: a weight (512, 512) on 4 ranks is cut by rows: each rank keeps (128, 512). A unit's
// parameters are gathered together into one buffer and copied out into whole tensors. fsdp2.cc has
// one step.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "schedule/lower/selective_hooks.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {

// Per parameter: a weight of a linear layer that is gathered in fp8.
[[nodiscard]] std::vector<bool> Fp8Weights(const LowerInput& in);

class Fsdp2Rules : public StepRules {
 public:
  Fsdp2Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  [[nodiscard]] bool FirstStepDiffers() const override;
  [[nodiscard]] std::vector<bool> StillGathered() const override { return still_gathered_; }
  void CarryGathered(const std::vector<bool>& units) override { carried_ = units; }
  void BeginStep(bool first) override;
  void BeginMicroBatch(bool first, bool last) override;
  void InRegion(std::uint32_t region, Phase phase) override { hooks_.InRegion(region, phase); }
  void PreForward(UnitId u, Phase phase) override;
  void PostForward(UnitId u, Phase phase) override;
  void EndForward() override;
  void ModuleCalled(UnitId u, Phase phase) override;
  void PreBackward(UnitId u) override;
  void GivenBack(std::span<const UnitId> units) override;
  void BackwardBegins(std::uint32_t /*model_op*/) override;
  void BackwardLeft(UnitId u, bool) override;
  void GradientsFinal(UnitId) override {}
  void WeightGradWritten(std::uint32_t model_op, UnitId unit) override;
  [[nodiscard]] BufferId ParameterStorage(UnitId u, std::uint32_t model_op) override;
  void EndBackward() override;
  void EndWeights() override;
  void EndStep() override;
  void GatherAll() override;
  void AwaitAll() override;
  void DropAll() override;
  void ReduceAll() override;

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override;
  [[nodiscard]] std::vector<std::int64_t> GradElementsOf(std::uint32_t model_op) const override;

  void InitUnit(UnitId u) override;
  [[nodiscard]] std::vector<std::int64_t> ShardTensors(UnitId u) const override;
  [[nodiscard]] std::vector<std::int64_t> StateTensors(UnitId u) const override;

 private:
  // TrainingState of _fsdp_common.py, of a unit's parameters; the module's is PRE_BACKWARD while
  // `in_backward`.
  enum class State : std::uint8_t { kIdle, kForward, kPreBackward, kPostBackward };

  struct Comm {
    State state = State::kIdle;
    bool in_backward = false;
    std::vector<std::size_t> left;  // places in order_ of forward calls without a backward so far
    std::size_t passes = 0;         // stretches of forward that are over
    std::size_t passes_left = 0;    // stretches of backward still to come
    std::size_t passes_before = 0;  // those of earlier stages of the rank
    bool pending = false;           // gather issued, not yet waited for
    bool is_carried = false;        // issued in the step before
    BufferId gather_out;            // AGout
    BufferId kept_out;              // the one that lives on into the next step
    OpId gathered;                  // eAG
    BufferId partial;               // reduced over the shard group, not over the replicas
    // Gradients of earlier micro-batches in .grad, by parameter, to which later ones are added in
    // place.
    std::vector<std::pair<ParamId, BufferId>> kept_grads;
    std::vector<BufferId> kept_order;  // the gradients that UnitState::accumulated began with
    BufferId clone;                    // the 1/g kept by reshard to a smaller group
    BufferId kept;                     // the last such
    BufferId stale;                    // one that nothing gathered from, until the next comes
    OpId cloned;
  };

  [[nodiscard]] const UnitPlan& PlanOf(UnitId u) const { return plan_.units[u.value]; }
  [[nodiscard]] std::string NameOfUsed(const ModelOp& op, UnitId u) const;

  // fsdp2.cc.
  void BeginBackward(UnitId u);
  void BeginRecompute(UnitId u);
  void EndRecompute(UnitId u);
  void LeaveForward(UnitId u, Phase phase);
  void EndUnit(UnitId u);
  void NoteGathered(UnitId u);
  // The unit's last pass has no end.
  [[nodiscard]] bool StaysOpen(UnitId u) const {
    return !spans_.ends[u.value].empty() && spans_.ends[u.value].back().is_open;
  }
  [[nodiscard]] bool StaysInForward(UnitId u) const {
    return PlanOf(u).reshard.kind == Reshard::Kind::kNever || StaysOpen(u);
  }
  [[nodiscard]] bool IsCarried(UnitId u) const { return !carried_.empty() && carried_[u.value]; }

  // fsdp2_gathers.cc.
  void Prefetch(const std::vector<std::string>& names, Phase phase);
  void Unshard(UnitId u, Phase phase);
  void CopyIn(UnitId u, BufferId source, Phase phase);
  [[nodiscard]] BufferId NewStaged(UnitId u, Stream owner);
  [[nodiscard]] BufferId AllocGatherOut(UnitId u, Phase phase);
  void Unpark(Phase phase);
  void ReleaseGatherOut(BufferId buffer, OpId copied_out, Phase phase);
  void WaitForUnshard(UnitId u, Phase phase);
  void FreeClone(UnitId u);
  void LeaveClone(UnitId u);
  void NoteClone(UnitId u);
  [[nodiscard]] BufferId AllocUnsharded(UnitId u);
  void ReshardUnit(UnitId u, Phase phase);
  void FreeUnsharded(UnitId u);
  void DropPending(UnitId u);

  // fsdp2_fp8.cc.
  [[nodiscard]] DType GatherDType(UnitId u) const;
  [[nodiscard]] BufferId CastToFp8(UnitId u, BufferId source, Phase phase,
                                   std::vector<Kernel>& casts);
  [[nodiscard]] bool Precomputes() const {
    return e_.in.kernels.fp8 == Fp8Products::kPrecomputed && job_.mode == JobMode::kTrain;
  }

  // fsdp2_reductions.cc.
  void FreeReduceInput();
  void FinishReductions();
  [[nodiscard]] bool IsOfStage(UnitId u) const;
  [[nodiscard]] std::vector<UnitId> UnitsOfStage() const;
  // Of a pipeline's stage nothing is freed or reduced before all micro-batches are through.
  [[nodiscard]] bool StaysWhole() const {
    return (e_.in.stage || plan_.keeps_gathered) && !last_micro_batch_;
  }
  void PostBackward(UnitId u);
  [[nodiscard]] bool AddsInPlace(UnitId u) const;
  void KeepGrads(UnitId u);
  void TakeKept(UnitId u);
  void SumOverTensor(UnitId u);
  void ReduceGrads(UnitId u);
  [[nodiscard]] std::vector<BufferId> TakeGrads(UnitId u, bool is_last);
  void CopyGradsIn(UnitId u, bool is_last);
  void KeepPartial(UnitId u, BufferId out);
  void AddPartial(UnitId u, BufferId out);
  void AddShards(UnitId u, BufferId sum, BufferId other);
  [[nodiscard]] static double MeanOver(std::int64_t ranks, DType reduce);
  void ScaleForFp16(UnitId u, BufferId buffer, Bytes bytes, Stream stream, double divisor);
  void StoreShardedGrad(UnitId u, BufferId out, bool adopts, Stream tail);

  static constexpr std::uint32_t kPendingSlot = kOptimizerSlot + 1;

  std::vector<Comm> comm_;
  ParamStacks stacks_;
  std::vector<bool> is_fp8_;  // per parameter: gathered in fp8
  [[nodiscard]] GroupId ShardGroup(UnitId u) {
    return IsOfExperts(u) ? e_.AddSameExperts() : shard_group_;
  }
  GroupId shard_group_, replicate_group_;
  const DivideFactors factors_ = FactorsFor(e_.mesh.RankCount());
  std::vector<UnitId> root_first_;
  std::vector<UnitId> order_;   // in which calls of units ended in this forward
  std::vector<UnitId> hooked_;  // whose backward begins with the op at hand, outer ones first
  UnitId recompute_root_;       // set while a recomputation runs units of its own
  const TorchRules& rules_ = RulesOf(plan_.torch);
  SelectiveHooks hooks_{e_};
  BufferId parked_;
  OpId parked_copied_;
  BufferId reduce_input_;
  OpId reduce_done_, last_reduce_, last_replicate_;
  std::vector<BufferId> held_;
  std::vector<bool> carried_, still_gathered_;  // per unit, or empty; see StepRules
  std::vector<BufferId> carried_buffer_;        // per unit: the one in every step
};

}  // namespace shardwright
