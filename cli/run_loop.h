#pragma once

// The steps of a run, cut where something happens between them: a checkpoint, an evaluation, the
// end of an epoch.

#include <cstdint>
#include <string>
#include <vector>

#include "cli/evaluator.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/data/sampler.h"
#include "executor/runtime.h"

namespace shardwright {

struct LoopOptions {
  std::int64_t steps = 10;      // of the whole run, what was resumed included
  std::int64_t epochs = 0;      // instead of `steps`; 0: none
  std::int64_t every = 0;       // steps between two checkpoints; 0: only at the end
  std::int64_t eval_every = 0;  // steps between two evaluations; 0: at the end, or after epochs
  bool sum_loss = false;        // the loss is a sum over samples
  bool stops_at_nan = true;     // at a loss, or weights to be saved, that are no finite numbers
  bool prints_tests = true;     // evaluations as they come, in lines of PyTorch's FSDP tutorial
};

// Of one pass over the data.
struct EpochReport {
  std::int64_t epoch = 0;   // from 0
  double train_loss = 0.0;  // mean over the samples
  bool has_test = false;
  Evaluation test = {};
};

// Between two steps, epochs aside.
struct TestReport {
  std::int64_t step = 0;  // steps done
  Evaluation test = {};
};

enum class LoopEnd : std::uint8_t {
  kDone,
  kAsked,    // somebody asked to stop
  kNan,      // a step's loss
  kNanState  // weights behind a step
};

struct LoopReport {
  std::vector<StepReport> steps;
  std::vector<EpochReport> epochs;
  std::vector<TestReport> tests;
  LoopEnd end = LoopEnd::kDone;
  std::int64_t end_step = 0;  // kAsked and kNanState: steps done; kNan: the step's number
};

// What a loop works on. `checkpoints` and `evaluator` may be null.
struct LoopParts {
  Sampler sampler;
  Runtime& runtime;
  std::int64_t micro_batches = 1;  // per step, over all ranks with tokens of their own
  RunCheckpoints* checkpoints = nullptr;
  DatasetEvaluator* evaluator = nullptr;
};

// Steps that the options ask for in all.
[[nodiscard]] std::int64_t TotalSteps(const LoopOptions& options, const Sampler& sampler);

// Runs from runtime.next_step() on. When it returns all checkpoints are on the disk, but for those
// that RunCheckpoints::failed names.
[[nodiscard]] LoopReport RunLoop(const LoopOptions& options, const LoopParts& parts);

// "Test set: Average loss: 0.0412, Accuracy: 296/297 (99.66%)", the tutorial's line.
[[nodiscard]] std::string TestLine(const Evaluation& test);

}  // namespace shardwright
