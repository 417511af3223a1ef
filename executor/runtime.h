#pragma once

// Runs a program: one host thread per rank issues its ops to a device, as docs/execution_model.md
// says. Nothing here knows which device it is.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/units.h"
#include "executor/binding.h"
#include "executor/device.h"
#include "topologies/mesh.h"
#include "traces/trace.h"

namespace shardwright {

// Which samples a call for data is about.
struct BatchKey {
  std::int64_t step = 0;
  std::int64_t first_sample = 0;  // of this micro-batch, within the step's global batch
  std::int64_t count = 0;         // samples
  CutPlace cut = {};              // which of their tokens, where ranks cut those
  const Model* model = nullptr;   // of the rank: what reads them
};
// Fills that model's input tensors (in tensor order; ids and labels as int64, images in the compute
// dtype) for one micro-batch. Called from the host threads of several ranks at once.
using BatchSource = std::function<void(const BatchKey& key, std::span<const View> tensors)>;

// Durations by op, for emulation: body[op] is the least time that the op takes. Empty: none.
struct DurationTable {
  std::vector<SimTime> init, warmup, step;
};

struct StepReport {
  std::int64_t step = 0;
  double loss = 0.0;  // mean over ranks (of the last stage) and micro-batches; 0 without a loss
  // Of all gradients before clipping, where there is clipping, on the host device.
  std::optional<double> gradient_norm = {};
  SimTime end;  // when the last op of the last rank was over
};

// What one rank knows of a step.
struct RankReport {
  std::vector<float> losses;  // by micro-batch
  SimTime end;                // when its last op was over
  std::optional<float> squared_norm = {};
  bool asks_to_stop = false;
};

struct RunOptions {
  bool trace = false;
  // Fill memory with NaNs when it is allocated, so that bytes which nobody wrote show.
  bool poison = false;
  DurationTable durations;
  BatchSource inputs;  // may be empty for a model without inputs
  // The pass over the data that a step belongs to; empty: 0. For learning-rate schedules.
  std::function<std::int64_t(std::int64_t step)> epoch_of;
  std::function<void(const StepReport& report)> on_step;  // called by one thread at a time
  // Asked once a step by every rank. True ends RunSteps a step or two later, on all ranks at the
  // same; so does, where `stops_at_nan`, a loss that is no finite number.
  std::function<bool()> asks_to_stop;
  bool stops_at_nan = false;
  // The only rank of this process, where every rank has a process of its own; and how the ranks
  // tell each other what they know of a step: given this rank's, those of all.
  std::optional<Rank> only_rank;
  std::function<std::vector<RankReport>(std::int64_t step, const RankReport& mine)> share_reports;
};

using DeviceFactory = std::function<std::unique_ptr<Device>(Rank rank)>;

// All ranks of one plan, or one of them, on the devices of this process. Between two calls all
// devices are idle; where BindingOf says that parameters lie, CopyMemory reads and writes them.
class Runtime {
 public:
  // Binds its program for every rank: all that cannot run is refused here, with InputError, and
  // memory is taken (RunError if it does not fit). `inputs`: by stage of the pipeline; one where
  // there is none. Keeps references to what they name.
  Runtime(std::vector<ExecutorInput> inputs, const DeviceFactory& devices, RunOptions options);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();

  // Runs init: parameters get their first values.
  void Initialize();
  // Runs `count` steps, from number `next_step()` on; fewer when somebody asks to stop. Returns
  // whether that is so, also behind the last one. Throws RunError when any rank fails; then nothing
  // more can be run.
  bool RunSteps(std::int64_t count);

  [[nodiscard]] std::int64_t next_step() const { return next_step_; }
  // Resumes: the next step is number `step`, of as many updates. It is a first step: parameters may
  // have been written since the last one, and what that kept gathered is not read again.
  void set_next_step(std::int64_t step);
  [[nodiscard]] const Binding& BindingOf(Rank rank) const;
  // Which part of the experts a rank has, where ranks share them out; otherwise 0.
  [[nodiscard]] std::int64_t PartOf(Rank rank) const {
    return shardwright::PartOf(InputOf(rank).program, rank);
  }
  // What the rank runs: of a pipeline its stage's model and program.
  [[nodiscard]] const ExecutorInput& InputOf(Rank rank) const {
    return inputs_[StageOf(inputs_.front().program, rank)];
  }
  // Between memory of this rank's device and memory of the caller, either way.
  void CopyMemory(Rank rank, void* to, const void* from, std::int64_t bytes) const;
  // The ranks of this process.
  [[nodiscard]] std::vector<Rank> LocalRanks() const;
  // Loss scaling of fp16 runs; equal on all ranks. `skipped_steps` are those without an
  // update because gradients overflowed.
  [[nodiscard]] LossScaler loss_scaler() const;
  [[nodiscard]] std::int64_t skipped_steps() const;
  // Resumes with what an earlier run had.
  void set_loss_scaler(const LossScaler& scaler, std::int64_t skipped_steps);
  [[nodiscard]] std::int64_t rank_count() const { return mesh().RankCount(); }
  // What the stage has that needs most memory.
  [[nodiscard]] const ExecutorInput& LargestInput() const;
  [[nodiscard]] Mesh mesh() const { return MeshOf(inputs_.front().program); }
  // One report per step since the last call.
  [[nodiscard]] std::vector<StepReport> TakeReports();
  // What was recorded since the last call.
  [[nodiscard]] Trace TakeTrace();

 private:
  class RankRunner;
  class LossBook;

  [[nodiscard]] RankRunner& RunnerOf(Rank rank) const;
  void OnAllRanks(const std::function<void(RankRunner& rank)>& work);

  const std::vector<ExecutorInput> inputs_;
  const RunOptions options_;
  std::unique_ptr<LossBook> losses_;
  std::vector<std::unique_ptr<RankRunner>> ranks_;  // of this process
  std::int64_t next_step_ = 0;
  bool initialized_ = false;
};

}  // namespace shardwright
