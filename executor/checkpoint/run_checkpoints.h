#pragma once

// Saving and resuming a run: between two calls of Runtime::RunSteps all ranks stand still.

#include <cstdint>
#include <string>

#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/save.h"
#include "executor/data/sampler.h"
#include "executor/runtime.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

class RunCheckpoints {
 public:
  // Checkpoints go into `folder`; of the finished ones the `keep` newest stay. Keeps references.
  RunCheckpoints(std::string folder, std::int64_t keep, const Model& model, const Job& job,
                 const Program& program, const Sampler& sampler);

  // Copies the state of all ranks and writes it in the background. Throws what the write before
  // this one threw.
  void Save(const Runtime& runtime);
  // Waits until everything is on the disk. Throws EnvironmentError.
  void Finish() { background_.Wait(); }

 private:
  const std::string folder_;
  const std::int64_t keep_;
  const Model& model_;
  const Job& job_;
  const Program& program_;
  const Sampler sampler_;
  BackgroundWriter background_;  // last: its work uses the others
};

// Fills all ranks of an initialised runtime from a checkpoint that CheckFits accepts, and sets its
// next step. `with_states` false: parameters and running statistics only (evaluation).
void Resume(const Checkpoint& checkpoint, const Model& model, const Job& job, Runtime& runtime,
            bool with_states);

// Gives `to` the parameters and running statistics of `from`. Both run the same plan, `to` perhaps
// forward only.
void CopyParameters(const Runtime& from, const Model& model, const Runtime& to);

}  // namespace shardwright
