#pragma once

// The steps of a run, cut where something happens between them: a checkpoint, the end of an epoch.

#include <cstdint>
#include <string>
#include <vector>

#include "cli/evaluator.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/data/sampler.h"
#include "executor/runtime.h"

namespace shardwright {

struct LoopOptions {
  std::int64_t steps = 10;    // of the whole run, what was resumed included
  std::int64_t epochs = 0;    // instead of `steps`; 0: none
  std::int64_t every = 0;     // steps between two checkpoints; 0: only at the end
  bool sum_loss = false;      // the loss is a sum over samples
  bool prints_epochs = true;  // the lines of PyTorch's FSDP tutorial, as the epochs end
};

// Of one pass over the data.
struct EpochReport {
  std::int64_t epoch = 0;   // from 0
  double train_loss = 0.0;  // mean over the samples
  bool has_test = false;
  Evaluation test = {};
};

struct LoopReport {
  std::vector<StepReport> steps;
  std::vector<EpochReport> epochs;
};

// What a loop works on. `checkpoints` and `evaluator` may be null.
struct LoopParts {
  const Model& model;
  Sampler sampler;
  Runtime& runtime;
  std::int64_t micro_batches = 1;  // per step, over all ranks
  RunCheckpoints* checkpoints = nullptr;
  Evaluator* evaluator = nullptr;
};

// Steps that the options ask for in all.
[[nodiscard]] std::int64_t TotalSteps(const LoopOptions& options, const Sampler& sampler);

// Runs from runtime.next_step() on. When it returns all checkpoints are on the disk.
[[nodiscard]] LoopReport RunLoop(const LoopOptions& options, const LoopParts& parts);

// "Test set: Average loss: 0.0412, Accuracy: 296/297 (99.66%)", the tutorial's line.
[[nodiscard]] std::string TestLine(const Evaluation& test);

}  // namespace shardwright
