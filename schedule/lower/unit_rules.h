#pragma once

// The rules that dialects share: persistent buffers of the units, unsharded gradients of the
// backward at hand, clipping and the optimizer. unit_rules.cc has the sizes with numbers,
// unit_updates.cc the end of a step.

#include <memory>
#include <span>
#include <vector>

#include "schedule/lower/layout.h"
#include "schedule/lower/matrix_optimizer.h"
#include "schedule/lower/moment_staging.h"
#include "schedule/lower/optimizer.h"
#include "schedule/lower/walker.h"

namespace shardwright {

// A DialectRules with the moments around a step, and the state of its units.
class StepRules : public DialectRules {
 public:
  StepRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  // Fills Program::units and writes the init body.
  void Init(const std::vector<ResolvedUnit>& units);
  // True when the first step follows other rules than the rest.
  [[nodiscard]] virtual bool FirstStepDiffers() const { return false; }

  // Units of which something gathered lives when a step ends, where the dialect has none such: only
  // a lowering that is told of them beforehand, by CarryGathered, can say so of every step.
  [[nodiscard]] virtual std::vector<bool> StillGathered() const { return {}; }
  virtual void CarryGathered(const std::vector<bool>& /*units*/) {}

  virtual void BeginStep(bool first) { first_step_ = first; }
  virtual void BeginMicroBatch(bool first, bool last);
  virtual void EndForward() {}
  virtual void EndBackward() {}
  // Behind the gradients of weights that a backward pass has left out.
  virtual void EndWeights() {}
  // Of a pipeline's stage at hand: gathers all units, waits for them before the first pass that
  // needs them, drops them, and reduces their gradients when all micro-batches are through.
  virtual void GatherAll() {}
  virtual void AwaitAll() {}
  virtual void DropAll() {}
  virtual void ReduceAll() {}
  // Clipping, optimizer, release of the gradients.
  virtual void EndStep();

  [[nodiscard]] GradTarget WeightGradTarget(std::uint32_t model_op, UnitId unit) override;
  void WeightGradWritten(std::uint32_t model_op, UnitId unit) override;
  [[nodiscard]] BufferId ParameterStorage(UnitId unit, std::uint32_t /*model_op*/) override {
    return At(unit).unsharded;
  }

 protected:
  struct UnitState {
    // Persistent.
    BufferId shard;                // master parameters
    PieceRange unsharded_pieces;   // of `unsharded`, where it is one tensor per parameter
    PieceRange state_pieces;       // of each of `states`
    BufferId host_master;          // their copy on the host, when only the optimizer lives there
    std::vector<BufferId> states;  // optimizer states; with offloaded moments, pieces of them all
    // Of the step at hand.
    BufferId sharded_grad;  // master dtype; lives until the optimizer ran
    BufferId host_grad;     // offload: the copy the CPU optimizer reads
    BufferId accumulated;   // unsharded gradients kept without sync
    // Of the pass at hand.
    BufferId unsharded;           // gathered parameters
    std::vector<BufferId> grads;  // unsharded gradients, one buffer per model op; without
                                  // sharding they live until the optimizer ran
    std::vector<std::pair<ParamId, BufferId>> grad_of_param;
    bool backward_done = false;
  };

  // Ranks that the unit is cut over: the shard group, or those with the same experts.
  [[nodiscard]] std::int64_t ShardsOf(const ResolvedUnit& unit) const;
  [[nodiscard]] virtual UnitInfo Layout(const ResolvedUnit& unit) const = 0;
  // Elements of the unit's gradient before the reduction, a multiple of W; 0 when all is frozen.
  [[nodiscard]] virtual std::int64_t GradElements(const UnitInfo& unit) const {
    return TrainablePaddedElements(e_.in.model, unit);
  }
  // Elements of one optimizer state: the trainable ones of the fullest shard.
  [[nodiscard]] virtual std::int64_t StateElements(const UnitInfo& unit) const {
    return TrainablePaddedElements(e_.in.model, unit) / unit.shards;
  }
  // The tensors behind the unit's shard in elements; empty: one flat tensor.
  [[nodiscard]] virtual std::vector<std::int64_t> ShardTensors(UnitId) const { return {}; }
  // The tensors behind the trainable part of the shard, of which the optimizer keeps states; empty:
  // one flat tensor.
  [[nodiscard]] virtual std::vector<std::int64_t> StateTensors(UnitId) const { return {}; }
  // Elements of each parameter of the unit: of its shard, when `per_rank`, else of all ranks.
  [[nodiscard]] std::vector<std::int64_t> PerParameter(UnitId u, bool per_rank,
                                                       bool trainable_only) const;
  // Says that `buffer` holds parameters or gradients of the unit, and returns it.
  BufferId Hold(BufferId buffer, UnitId u, Holds holds, DType dtype) {
    return e_.Hold(buffer, holds, u.value, dtype);
  }
  // Allocates the buffer, in the master dtype, in which a reduced gradient waits for the optimizer.
  [[nodiscard]] BufferId NewShardedGrad(UnitId u, Stream owner) {
    return Hold(e_.Alloc(GradShard(u), Category::kShardedGradient, owner), u, Holds::kShard,
                job_.precision.master);
  }
  // Reduced gradients of `from` bytes become, or are added to, the `to` bytes that the optimizer
  // reads.
  void StoreReduced(UnitId u, BufferId reduced, Stream stream, Bytes from, Bytes to);
  // sum += other, both reduced shards, of which the other goes.
  void AddReduced(UnitId u, BufferId sum, BufferId other);
  // Tensors of so many elements of `dtype` as pieces of a buffer.
  [[nodiscard]] PieceRange Pieces(std::span<const std::int64_t> elements, DType dtype);
  [[nodiscard]] bool UpdatesOnHost() const {
    return plan_.offload.parameters || plan_.offload.optimizer;
  }
  // The page-locked blocks of a unit's masters, or of its gradients.
  [[nodiscard]] virtual std::vector<Bytes> HostBlocks(UnitId u, Category category) const;
  // Then the device has no masters.
  [[nodiscard]] virtual bool MastersOnHost() const { return plan_.offload.parameters; }
  // Allocates and initialises what lives for the whole run; called with the init body open.
  virtual void InitUnit(UnitId unit);
  // Runs after the last unit.
  virtual void EndInit() {}
  [[nodiscard]] UnitState& At(UnitId unit) { return units_[unit.value]; }
  [[nodiscard]] const UnitInfo& Info(UnitId unit) const { return e_.program.units[unit.value]; }
  [[nodiscard]] std::size_t unit_count() const { return units_.size(); }
  // The unit with this name, which ResolveUnits has checked.
  [[nodiscard]] UnitId UnitNamed(const std::string& name) const;

  // Sizes in bytes. p: gather dtype, o: master dtype, r: reduce dtype; a "train" size counts
  // trainable parameters only.
  // The bytes of each parameter of the unit, on one rank or on all: of those that learn in
  // `learned`, of the others as the job stores them (Job::frozen_format).
  [[nodiscard]] std::vector<Bytes> StoredBytes(UnitId u, DType learned, bool per_rank) const;
  [[nodiscard]] Bytes StoredSum(UnitId u, std::int64_t elements, DType learned,
                                bool per_rank) const;
  // By what the masters of those of the unit that learn in fp32 beside others exceed 16 bits.
  [[nodiscard]] Bytes WideBytes(UnitId u) const;
  // The scales of quantized weights, which every rank has.
  [[nodiscard]] Bytes ScaleBytes() const;
  // The part of the shard that is cast before it is gathered, but for weights that become fp8.
  [[nodiscard]] Bytes CastShard(UnitId u, DType dtype) const;
  // Elements of this rank's shard that are gathered in fp8.
  [[nodiscard]] std::int64_t Fp8Shard(UnitId u) const {
    return fp8_elements_[u.value] / Info(u).shards;
  }
  [[nodiscard]] Bytes StoredFlat(UnitId u, bool per_rank) const;
  // Adafactor where parameters keep their shape: a row and a column in place of each matrix.
  [[nodiscard]] bool IsFactored() const {
    return job_.optimizer.kind == OptimizerKind::kAdafactor && plan_.dialect == Dialect::kDdp;
  }
  // Codes and scales of one optimizer state, as they are allocated.
  [[nodiscard]] std::vector<Bytes> StatePieces(UnitId u) const;
  [[nodiscard]] Bytes Unsharded(UnitId u) const;    // N p
  [[nodiscard]] Bytes GatherShard(UnitId u) const;  // N/W p
  [[nodiscard]] Bytes MasterShard(UnitId u) const;  // N/W o
  [[nodiscard]] Bytes ReduceFull(UnitId u) const;   // train N r
  [[nodiscard]] Bytes ReduceShard(UnitId u) const;  // train N/W r
  [[nodiscard]] Bytes GradShard(UnitId u) const;    // train N/W o
  [[nodiscard]] Bytes StateShard(UnitId u) const;   // one optimizer state
  [[nodiscard]] Precision PrecisionOf(UnitId u) const {
    return UnitPrecision(job_.precision, Info(u).full_precision);
  }
  [[nodiscard]] bool CastsGather(UnitId u) const {
    return PrecisionOf(u).param != job_.precision.master && !IsStoredFlat(u);
  }
  // A flat parameter of FSDP1 whose members are all frozen, and stored as the job says.
  [[nodiscard]] bool IsStoredFlat(UnitId u) const {
    return plan_.dialect == Dialect::kFsdp1 && job_.frozen_format != FrozenFormat::kMaster &&
           TrainablePaddedElements(e_.in.model, Info(u)) == 0;
  }
  [[nodiscard]] bool CastsReduce(UnitId u) const {
    return PrecisionOf(u).reduce != job_.precision.master;
  }
  // Gradients of this micro-batch are reduced (not just accumulated).
  [[nodiscard]] bool Syncs() const { return plan_.sync != SyncMode::kLast || last_micro_batch_; }

  [[nodiscard]] bool IsOfExperts(UnitId u) const { return Info(u).shards != e_.program.shard_size; }
  [[nodiscard]] bool HasParams(UnitId u) const { return Info(u).padded_elements > 0; }
  // Before the outermost unit of a forward pass: gathers wait for what the compute stream did to
  // the parameters. Does nothing at inner units.
  void BeginGathers(Phase phase);
  // Copies a reduced gradient to the host for the CPU optimizer; WaitForHostGrads blocks until all
  // of them, and what the compute stream was given, are done.
  void GradToHost(UnitId u, Stream stream, OpId ready);
  // PyTorch drops the device's copy as soon as it is on its way.
  void DropSentGrad(UnitId u, Stream stream);
  void WaitForHostGrads(Phase phase);
  // The parameter that names the op's group: all ops with which it shares a parameter.
  [[nodiscard]] ParamId GroupOf(std::uint32_t model_op) const { return e_.a.grad_group[model_op]; }
  // The gradient of that group which an earlier op of this backward has begun; null: none.
  [[nodiscard]] const BufferId* WrittenGrad(std::uint32_t model_op, UnitId unit);
  // Gradient elements of the op's group: of what its ops share, and of what else each of them has,
  // such as a bias of its own.
  [[nodiscard]] std::vector<std::int64_t> GradElementsWith(std::uint32_t model_op) const;
  [[nodiscard]] std::vector<ParamId> GradStoragesWith(std::uint32_t model_op) const;
  [[nodiscard]] std::int64_t SumOfGradElementsWith(std::uint32_t model_op) const;
  // Of the op alone.
  [[nodiscard]] virtual std::vector<std::int64_t> GradElementsOf(std::uint32_t model_op) const;
  void FreeGrads(UnitId u);
  // The op last added reads them, and they go.
  void ConsumeGrads(UnitId u);
  [[nodiscard]] Bytes GradBytes(UnitId u) const;  // all of At(u).grads
  // Without sync: adds this micro-batch's gradients to those kept so far, in r.
  void AccumulateUnsharded(UnitId u);

  // unit_updates.cc: the end of a step.

  // All units whose sharded gradients the step produced, in unit order.
  [[nodiscard]] std::vector<UnitId> UnitsWithGrads() const;

  // Micro-batches are summed, and the optimizer wants their mean.
  [[nodiscard]] double MicroBatches() const { return static_cast<double>(plan_.accumulation); }

  [[nodiscard]] BufferId AddNorm(std::span<const UnitId> units, Stream stream);
  // Global norm over `units` (one scalar all-reduce over the shard group) and scaling.
  void AddClip(std::span<const UnitId> units, Stream stream, GroupId group);
  // torch's loss scaler, which looks at the gradients before they are clipped? Our own executor's
  // norm tells it of overflows.
  [[nodiscard]] bool HasScaler() const;
  // It divides the gradients by the scale, and its flag is summed.
  void AddUnscale(std::span<const UnitId> units);
  [[nodiscard]] std::int64_t RanksOfFlag() const;
  void SumFlag(BufferId flag);
  [[nodiscard]] std::int64_t CountTensors(std::span<const UnitId> units) const;
  // Of this rank's part of their gradients.
  [[nodiscard]] std::int64_t CountElements(std::span<const UnitId> units) const;
  void UseAllGrads(std::span<const UnitId> units);
  // The sum over the shards for a norm of `units`' gradients that the host has taken; it waits.
  void SumHostNorm(std::span<const UnitId> units);
  void SumHostFlag();
  void TakeIn(BufferId number, BufferId other = {});
  void ReturnToHost(BufferId number);
  // The kernel with which PyTorch's host takes the norm and scales the gradients.
  [[nodiscard]] Kernel HostClip(std::span<const UnitId> units) const;
  [[nodiscard]] DType NormDType() const;
  [[nodiscard]] bool RunsOurKernels() const {
    return e_.in.kernels.host_kernels || e_.in.kernels.cuda_kernels;
  }
  [[nodiscard]] BufferId NewNorm(std::span<const UnitId> units);
  void SumNorm(BufferId norm, Stream stream, GroupId group);
  void SumNormOverStages(BufferId norm, BufferId of_experts, Stream stream);
  // The optimizer's temporaries while `units` are updated.
  [[nodiscard]] BufferId AllocTemporaries(Bytes bytes, std::span<const UnitId> units,
                                          Stream stream);
  // Kernels and temporaries of the update of `units` by `optimizer`.
  [[nodiscard]] OptimizerStep UpdateOf(const OptimizerSpec& optimizer,
                                       std::span<const UnitId> units) const;
  // Adds the update's accesses to the op last added: parameters, gradients, states and `temporary`,
  // which is freed.
  void UseForUpdate(std::span<const UnitId> units, BufferId temporary);
  // The update of `units` as one op on `stream`; states are allocated by the first one that runs.
  OpId AddOptimizer(std::span<const UnitId> units, Stream stream);
  // The same for the one unit of ddp where the job updates matrices as such: first all other
  // parameters, then the matrices, whose updates may be summed over the ranks of `group`.
  OpId AddMatrixOptimizer(UnitId u, Stream stream, GroupId group);
  // `casts`, if any: per unit the host's copy of its shard in the gather dtype, written, too.
  // `clips`: the host takes the norm and scales the gradients before.
  OpId AddHostOptimizer(std::span<const UnitId> units, std::span<const BufferId> casts = {},
                        bool clips = false);
  // The kernel with which DeepSpeed's host scales and casts around an update of `units`.
  [[nodiscard]] Kernel HostCast(std::span<const UnitId> units) const;
  // The update of one unit whose states live on the host, piece by piece; the last op of it.
  OpId AddStagedOptimizer(UnitId u, Stream stream, MomentStaging& staging);
  // An op of the update of `units`, its accesses still missing.
  OpId AddUpdate(std::span<const UnitId> units, std::span<const Kernel> kernels, Bytes updated,
                 Stream stream);
  // Makes the unit's state buffers of these sizes if there are none yet, in the pool of `owner`.
  void AllocStates(UnitId u, Stream owner, std::span<const Bytes> sizes, PieceRange pieces);
  // Frees the gradients that the optimizer has used (zero_grad).
  void FreeShardedGrads(std::span<const UnitId> units);
  // The optimizer's gradient buffers of the unit become accesses of the op last added.
  void UseGrads(UnitId u, AccessMode mode, std::uint16_t index);

  Emitter& e_;
  const UnitSpans& spans_;
  const Plan& plan_;
  const Job& job_;
  std::vector<std::int64_t> fp8_elements_;  // per unit: gathered in fp8, of all ranks
  bool first_step_ = false;
  bool first_micro_batch_ = true;
  bool last_micro_batch_ = true;
  std::vector<bool> completes_grad_;  // per model op: no later op of backward adds to its gradient
  std::vector<bool> is_shared_;       // per storage: ops with gradients of their own share it
  // Per storage that stands for a group: the ops with weight gradients in it, in the model's order.
  std::vector<std::vector<std::uint32_t>> ops_of_group_;

 private:
  std::vector<UnitState> units_;
  bool in_forward_ = false;  // the outermost unit of this pass was entered
  std::vector<OpId> to_host_;
  std::vector<std::int64_t> train_elements_;  // GradElements per unit
  std::vector<bool> is_embedding_;            // per parameter
};

// Ends the name of the unit that is the root of a rank's second stage.
inline constexpr std::string_view kSecondRoot = "@2";

// Carry slot that holds the op after which the next step may touch the parameters.
inline constexpr std::uint32_t kOptimizerSlot = 0;

[[nodiscard]] std::unique_ptr<StepRules> MakeFsdp2(Emitter&, const UnitSpans&,
                                                   const std::vector<ResolvedUnit>&);
[[nodiscard]] std::unique_ptr<StepRules> MakeFsdp1(Emitter&, const UnitSpans&,
                                                   const std::vector<ResolvedUnit>&);
[[nodiscard]] std::unique_ptr<StepRules> MakeDdp(Emitter&, const UnitSpans&,
                                                 const std::vector<ResolvedUnit>&);
[[nodiscard]] std::unique_ptr<StepRules> MakeNative(Emitter&, const UnitSpans&,
                                                    const std::vector<ResolvedUnit>&);

}  // namespace shardwright
