#pragma once

// What a run is told beyond its plan: hyper-parameters, schedules, seeds. None of it changes the
// program, so none of it is a field of Plan or Job. docs/training.md describes the JSON form,
// training_fields.json the parts.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"
#include "executor/training_fields.h"
#include "schedule/plan.h"

namespace shardwright {

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
