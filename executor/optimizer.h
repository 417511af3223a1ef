#pragma once

// Parameter updates on shards, in the arithmetic of torch.optim, and what surrounds them:
// parameter groups, learning-rate schedules, clipping and loss scaling.

#include <array>
#include <cstdint>
#include <span>

#include "core/units.h"
#include "executor/shard_map.h"
#include "executor/training_options.h"
#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// One stretch of a shard whose elements are updated alike. Parameter groups are nothing but ranges
// with different arguments, so they may differ inside one flat unit.
struct OptimizerRange {
  std::int64_t param_offset = 0;  // first element inside the parameter shard
  std::int64_t grad_offset = 0;   // inside the gradient shard
  std::int64_t state_offset = 0;  // inside each optimizer state
  std::int64_t count = 0;
  double weight_decay = 0.0;
  std::int64_t columns = 0;  // Adafactor: of the matrix that the range is; 0: no matrix

  bool operator==(const OptimizerRange&) const = default;
};

// Is the parameter subject to weight decay? See OptimizerOptions::decay_matrices_only.
[[nodiscard]] bool HasWeightDecay(const Parameter& param, const OptimizerOptions& options);

// One update of one shard. Arrays hold elements of `dtype` (fp32, bf16 or fp16).
struct OptimizerCall {
  OptimizerSpec spec;
  DType dtype = DType::kFp32;
  void* params = nullptr;
  const void* grads = nullptr;
  std::array<void*, 2> states = {nullptr, nullptr};  // StateCount(spec.kind) of them are used
  std::span<const OptimizerRange> ranges;
  double learning_rate = 0.0;  // of this step
  std::int64_t step = 1;       // updates of this run so far, this one included (torch's `step`)
};

// Formulas and order of operations of torch/optim/{sgd,adam,adamw,adadelta}.py, and of Lion in
// bitsandbytes 0.50 (backends/cpu/ops.py); states must be zero before the first step. With 16-bit
// elements the foreach and for-loop implementations round after every operation, as PyTorch does in
// its vector loops, and the fused one only what it stores. States: momentum: the momentum buffer;
// adam, adamw: exp_avg, exp_avg_sq; adadelta: square_avg, acc_delta; lion: exp_avg. Every element
// is computed on its own, so any sharding gives the same bits. Uses no memory beyond its arguments.
//   Adafactor (Transformers 5.23, optimization.py, as the Trainer calls it: without first moment,
// relative step and scale) takes each range as one whole parameter, in fp32. The state of a matrix
// is its mean squares by row, then by column; of other parameters one per element.
void UpdateShard(const OptimizerCall& call, const OptimizerOptions& options);

// Throws InputError where the job's matrices are to be updated as such (Muon, SOAP), or states are
// kept in another dtype than `master`: plans of such jobs are for the simulator.
void CheckUpdates(const OptimizerSpec& spec, DType master);
// The same for frozen parameters that are stored otherwise than those that learn.
void CheckFrozen(const Job& job);

// torch's names of the states, in the order of OptimizerCall::states.
[[nodiscard]] std::span<const std::string_view> OptimizerStateNames(OptimizerKind kind);

// The learning rate of a step. `step` counts updates from 0, `epoch` passes over the data from 0.
//   warm-up, unit t < warmup:  lr * (t + 1) / (warmup + 1)      then, with u = t - warmup:
//   step:    lr * gamma^floor(u / step_size)                     (StepLR)
//   cosine:  lr * (f + (1 - f) (1 + cos(pi u / U)) / 2),  U = total - warmup, constant behind it
//   linear:  lr * (1 - (1 - f) u / U)
[[nodiscard]] double LearningRateAt(const ScheduleOptions& schedule, double learning_rate,
                                    std::int64_t step, std::int64_t epoch);

// Sum of squares in fp64, element after element: what a shard contributes to the gradient norm.
[[nodiscard]] double SumOfSquares(DType dtype, const void* data, std::int64_t count);
// min(1, max_norm / (norm + 1e-6)), as clip_grad_norm_ computes it in fp32.
[[nodiscard]] float ClipCoefficient(double norm, double max_norm);
// data[i] *= factor, rounded to `dtype`.
void ScaleInPlace(DType dtype, void* data, std::int64_t count, float factor);

// torch.amp.GradScaler: the loss is multiplied by `scale`; a step whose gradients overflow is
// skipped and halves it, growth_interval good steps in a row double it.
struct LossScaler {
  double scale = 1.0;
  std::int64_t good_steps = 0;

  // After a step: `overflowed` on any rank.
  void Update(bool overflowed, const LossScaleOptions& options);
  bool operator==(const LossScaler&) const = default;
};

}  // namespace shardwright
