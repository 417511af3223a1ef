#pragma once

// What a run is told beyond its plan: hyper-parameters, schedules, seeds. None of it changes the
// program, so none of it is a field of Plan or Job. docs/training.md describes the JSON form.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"
#include "schedule/plan.h"

namespace shardwright {

// Hyper-parameters of the update, named as in torch.optim. Each kind reads only its own.
struct OptimizerOptions {
  double learning_rate = 1e-3;
  double weight_decay = 0.0;  // added to the gradient; AdamW: decoupled
  double momentum = 0.9;      // momentum
  double dampening = 0.0;     // momentum
  bool nesterov = false;      // momentum
  double beta1 = 0.9;         // adam, adamw
  double beta2 = 0.999;       // adam, adamw
  double rho = 0.9;           // adadelta
  double epsilon = 1e-8;      // adam, adamw, adadelta
  // Parameters without weight decay. True: biases and the parameters of norms, which are those with
  // fewer than two dimensions (the rule of most training recipes). Globs name further ones.
  bool decay_matrices_only = true;
  std::vector<std::string> no_decay = {};

  bool operator==(const OptimizerOptions&) const = default;
};

enum class ScheduleKind : std::uint8_t { kConstant, kStep, kCosine, kLinear };
// What the schedule counts: optimizer steps, or passes over the data (PyTorch's StepLR of the MNIST
// example is stepped once per epoch).
enum class ScheduleUnit : std::uint8_t { kStep, kEpoch };

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kConstant;
  ScheduleUnit unit = ScheduleUnit::kStep;
  std::int64_t step_size = 1;   // kStep: units between two decays; at least 1
  double gamma = 0.1;           // kStep: factor of each decay
  std::int64_t warmup = 0;      // units of linear warm-up before the schedule proper
  std::int64_t total = 0;       // kCosine, kLinear: unit at which the end is reached
  double final_fraction = 0.0;  // kCosine, kLinear: learning rate at the end, as a fraction

  bool operator==(const ScheduleOptions&) const = default;
};

// Dynamic loss scaling as torch.amp.GradScaler does it; used when gradients are fp16.
struct LossScaleOptions {
  double initial = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  // successful steps between two growths

  bool operator==(const LossScaleOptions&) const = default;
};

// What happens to the samples at the end of an epoch that fill no whole global batch.
enum class EpochTail : std::uint8_t {
  kCarry,  // the batch is completed with the first samples of the next epoch
  kDrop,   // they are left out
  kPad,    // the batch is completed with empty samples, whose labels count for nothing
};
inline constexpr std::array<std::string_view, 3> kTailNames = {"carry", "drop", "pad"};

struct TrainingOptions {
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  LossScaleOptions loss_scale;
  double clip_norm = 1.0;  // global gradient norm, where the job clips; positive
  // Standard deviation of the Hugging Face initialisations; none: what the model's config says.
  std::optional<double> init_std = {};
  std::uint64_t seed = 1;  // initial weights, dropout, order of the samples
  bool shuffle = true;
  EpochTail epoch_tail = EpochTail::kCarry;
  bool sum_loss = false;  // sum over samples instead of the mean

  bool operator==(const TrainingOptions&) const = default;
};

// PyTorch's default hyper-parameters of the job's optimizer: learning rate 1e-3 (Adadelta 1.0),
// epsilon 1e-8 (Adadelta 1e-6), weight decay 0 (AdamW 0.01; 0 where the job switches it off).
[[nodiscard]] TrainingOptions DefaultTrainingOptions(const Job& job);

// Reads a document (format "shardwright-training", version 1); fields that are absent keep the
// value they have in `defaults`. Throws InputError for unknown keys and values out of range, and
// for a weight decay in a job that was lowered without one.
[[nodiscard]] TrainingOptions ReadTrainingOptions(const JsonValue& json, const Job& job,
                                                  const TrainingOptions& defaults);

// All of it but for what the sampler has, by the names of the document: {"schedule.gamma", "0.1"}.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> ShowTrainingOptions(
    const TrainingOptions& options);

// Throws InputError naming `where` when a value is out of range.
void CheckTrainingOptions(const TrainingOptions& options, const Job& job, const Path& where);

}  // namespace shardwright
