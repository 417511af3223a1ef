#pragma once

// Saving and resuming a run: between two calls of Runtime::RunSteps all ranks stand still.

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/hub_weights.h"
#include "executor/checkpoint/run_folder.h"
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

struct FailedSave {
  std::int64_t step = 0;
  std::string cause;
};

// What every checkpoint of a run says of it.
struct RunIdentity {
  std::string id;
  std::vector<SavedSetting> settings = {};
};

class RunCheckpoints {
 public:
  // Checkpoints of the run with `identity` go into `folder`, which process 0 has as `own`; of its
  // finished ones the `keep` newest stay. Keeps references. `processes`: those that the ranks are
  // in, which all construct this at once and share the folder; null: the ranks are threads.
  RunCheckpoints(std::string folder, const RunFolder* own, std::int64_t keep, RunIdentity identity,
                 const Model& model, const Job& job, const Program& program, const Sampler& sampler,
                 MessagePassing* processes);

  // Copies the state of all ranks and writes it in the background. Where states lie in host memory
  // there may be no room for a copy: then they are written from where they lie before this returns.
  void Save(const Runtime& runtime);
  // Waits until everything is on the disk, or has failed to get there several times.
  void Finish();
  // Whether a checkpoint of the runtime's state would hold finite numbers only. Called by all
  // processes.
  [[nodiscard]] bool IsFinite(const Runtime& runtime);

  // The newest checkpoint of this run; empty: none was saved.
  [[nodiscard]] const std::string& newest() const { return newest_; }
  // Whether the last one that was to be saved is.
  [[nodiscard]] bool has_saved_last() const { return has_saved_last_; }
  // Those that could not be saved.
  [[nodiscard]] const std::vector<FailedSave>& failed() const { return failed_; }

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
  // Tries it several times: a disk that is full may be no longer so a moment later.
  void WriteRepeatedly(const std::vector<Share>& shares, const Manifest& manifest) const;
  void Write(const std::vector<Share>& shares, const Manifest& manifest) const;
  void WriteTogether(const Share& mine, const Manifest& manifest) const;
  void Commit(CheckpointWriter& writer, const Manifest& manifest) const;

  const std::string folder_;
  const RunFolder* const own_;
  const std::int64_t keep_;
  const RunIdentity identity_;
  const Model& model_;
  const Job& job_;
  const Program& program_;
  const Sampler sampler_;
  MessagePassing* const processes_;
  MessagePassing::Channel channel_ = MessagePassing::kAll;  // of the background, then of Finish
  std::int64_t step_ = 0;
  bool is_writing_ = false;  // the snapshot of step_
  std::string newest_;
  bool has_saved_last_ = true;
  std::vector<FailedSave> failed_;
  std::optional<std::set<StretchKey>> of_lower_ranks_;  // what ranks of lower processes save
  BackgroundWriter background_;                         // last: its work uses the others
};

// Runs `open`, which opens or verifies `checkpoint`. Where it is damaged the InputError names the
// newest older one in its folder that is good; `how`: what to do with that, "%STEP" being its step.
void OpenOrOfferOlder(const std::string& checkpoint, const std::string& how,
                      const std::function<void()>& open);

// Renames checkpoints of later steps, which a run that goes on from `step` leaves behind.
void SetLaterAside(const std::string& folder, std::int64_t step);

// "learning_rate 0.0005, was 0.001" for each setting whose value is another.
[[nodiscard]] std::vector<std::string> Differences(const std::vector<SavedSetting>& before,
                                                   const std::vector<SavedSetting>& now);

// FindLatestCheckpoint of process 0, in all `processes` (null: in this one).
[[nodiscard]] std::string NewestCheckpoint(const std::string& folder, MessagePassing* processes);

// Checkpoint::Verify of every file in one of the processes.
void VerifyShare(const Checkpoint& checkpoint, const MessagePassing* processes);

// Fills all ranks of an initialised runtime from a checkpoint that CheckFits accepts, and sets its
// next step. `with_states` false: parameters and running statistics only (evaluation).
void Resume(const Checkpoint& checkpoint, Runtime& runtime, bool with_states);

// Gives all ranks of an initialised runtime the weights that somebody else has trained; what those
// lack (adapters) keeps its first values.
void StartFrom(const HubWeights& weights, Runtime& runtime);

// Gives `to` the parameters and running statistics of `from`. Both run the same plan, `to` perhaps
// forward only.
void CopyParameters(const Runtime& from, const Runtime& to);

}  // namespace shardwright
