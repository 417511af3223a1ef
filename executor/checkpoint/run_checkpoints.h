#pragma once

// Saving and resuming a run: between two calls of Runtime::RunSteps all ranks stand still.

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/save.h"
#include "executor/data/sampler.h"
#include "executor/host/message_passing.h"
#include "executor/host/together.h"
#include "executor/runtime.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

// How others are waited for while they write or read a checkpoint: a second longer for every 32 MiB
// of all its files, since disks are slow, shared, and replicas' files one rank's to write.
[[nodiscard]] Wait WaitForFiles(const Model& model, const Job& job, const std::string& what);

class RunCheckpoints {
 public:
  // Checkpoints go into `folder`; of the finished ones the `keep` newest stay. Keeps references.
  // `processes`: those that the ranks are in, which all construct this at once and share the
  // folder; null: the ranks are threads.
  RunCheckpoints(std::string folder, std::int64_t keep, const Model& model, const Job& job,
                 const Program& program, const Sampler& sampler, MessagePassing* processes);

  // Copies the state of all ranks and writes it in the background. Where states lie in host memory
  // there may be no room for a copy: then they are written from where they lie before this returns.
  // Throws what the write before this one threw, in every process.
  void Save(const Runtime& runtime);
  // Waits until everything is on the disk. Throws EnvironmentError, in every process.
  void Finish();

 private:
  // Tensor and first element of a stretch.
  using StretchKey = std::pair<std::string, std::int64_t>;
  // What one rank writes.
  struct Share {
    std::int64_t rank = 0;
    RankShare state;
  };

  [[nodiscard]] std::vector<Share> TakeShares(const Runtime& runtime);
  [[nodiscard]] Manifest Describe(const Runtime& runtime) const;
  // "checkpoint of step 7": that of the snapshot that was taken last, or is being taken.
  [[nodiscard]] std::string Name() const { return "checkpoint of step " + std::to_string(step_); }
  void Write(const std::vector<Share>& shares, const Manifest& manifest) const;
  void WriteTogether(const Share& mine, const Manifest& manifest) const;

  const std::string folder_;
  const std::int64_t keep_;
  const Model& model_;
  const Job& job_;
  const Program& program_;
  const Sampler sampler_;
  MessagePassing* const processes_;
  MessagePassing::Channel channel_ = MessagePassing::kAll;  // of the background, then of Finish
  std::int64_t step_ = 0;
  std::optional<std::set<StretchKey>> of_lower_ranks_;  // what ranks of lower processes save
  BackgroundWriter background_;                         // last: its work uses the others
};

// FindLatestCheckpoint of process 0, in all `processes` (null: in this one).
[[nodiscard]] std::string NewestCheckpoint(const std::string& folder, MessagePassing* processes);

// Checkpoint::Verify of every file in one of the processes.
void VerifyShare(const Checkpoint& checkpoint, const MessagePassing* processes);

// Fills all ranks of an initialised runtime from a checkpoint that CheckFits accepts, and sets its
// next step. `with_states` false: parameters and running statistics only (evaluation).
void Resume(const Checkpoint& checkpoint, const Model& model, const Job& job, Runtime& runtime,
            bool with_states);

// Gives `to` the parameters and running statistics of `from`. Both run the same plan, `to` perhaps
// forward only.
void CopyParameters(const Runtime& from, const Model& model, const Runtime& to);

}  // namespace shardwright
