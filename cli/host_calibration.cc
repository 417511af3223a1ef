#include "cli/host_calibration.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "cli/flow.h"
#include "core/json.h"
#include "executor/data/batch.h"
#include "executor/data/dataset.h"
#include "executor/data/sampler.h"
#include "executor/host/session.h"
#include "executor/training_options.h"
#include "models/loader.h"
#include "planner/evaluate.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// The first step warms up and does not count.
constexpr std::int64_t kSteps = 6;

std::string TransformerConfig(std::int64_t width, std::int64_t layers, std::int64_t vocabulary) {
  constexpr std::int64_t kHeadWidth = 32;
  return R"({"model_type": "gpt2", "n_embd": )" + std::to_string(width) + R"(, "n_layer": )" +
         std::to_string(layers) + R"(, "n_head": )" + std::to_string(width / kHeadWidth) +
         R"(, "n_positions": 256, "vocab_size": )" + std::to_string(vocabulary) +
         R"(, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})";
}

// In fp32, blocks as units, everything sharded over all ranks.
PlanFile HostPlan(LoadedModel model, Job job, std::int64_t ranks, std::int64_t micro_batch) {
  PlanFile file;
  file.cluster = LoadCluster("host", 1, ranks);
  file.kernels = FindKernelSet("shardwright-host", "calibrate");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.job = std::move(job);
  file.plan.dialect = Dialect::kNative;
  file.plan.shard_size = ranks;
  file.plan.micro_batch = micro_batch;
  file.job.global_batch = ranks * micro_batch;
  file.model = std::move(model);
  file.plan.units = Wrap(file.model.model, ParseWrap("block", "calibrate"), ReshardChoice(),
                         file.plan.dialect, "calibrate");
  CheckPlan(file, "calibrate");
  return file;
}

Job JobInFp32() {
  Job job;
  job.precision.master = job.precision.param = job.precision.reduce = DType::kFp32;
  return job;
}

PlanFile TransformerPlan(std::int64_t width, std::int64_t sequence, std::int64_t ranks) {
  constexpr std::int64_t kLayers = 3;
  constexpr std::int64_t kVocabulary = 1000;
  Job job = JobInFp32();
  job.sequence_length = sequence;
  LoadedModel model;
  model.json = TransformerConfig(width, kLayers, kVocabulary);
  model.model =
      ModelFromJson(JsonValue::Parse(model.json, "calibrate"),
                    "transformer-" + std::to_string(width), {.sequence_length = sequence});
  model.hash = HashModel(model.model);
  return HostPlan(std::move(model), std::move(job), ranks, 2);
}

}  // namespace

TracedRun RunTraced(PlanFile file, std::string name, std::int64_t steps) {
  TracedRun result{std::move(name), std::move(file), {}, {}};
  result.program = LowerAndVerify(result.file);
  const Model& model = result.file.model.model;
  const TrainingOptions training = DefaultTrainingOptions(result.file.job);
  const std::unique_ptr<Dataset> data = OpenDataset("random", model, training.seed);
  const Sampler sampler{data->size(), result.file.job.global_batch, training.seed, training.shuffle,
                        training.epoch_tail};
  RunOptions run;
  run.trace = true;
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(model, *data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  HostSession session(
      {model, result.file.kernels, result.file.job, result.file.plan, result.program, training},
      HostOptions(), std::move(run));
  session.runtime().Initialize();
  session.runtime().RunSteps(steps);
  result.trace = session.runtime().TakeTrace();
  return result;
}

std::vector<TracedRun> RunHostPlans(std::int64_t ranks) {
  std::vector<PlanFile> plans;
  for (const std::int64_t on : {std::int64_t{1}, ranks}) {
    plans.push_back(TransformerPlan(64, 64, on));
    plans.push_back(TransformerPlan(256, 64, on));
    plans.push_back(TransformerPlan(128, 128, on));
    if (ranks == 1) {
      break;
    }
  }
  std::vector<TracedRun> runs;
  for (PlanFile& plan : plans) {
    std::string name = plan.model.model.name + " on " + std::to_string(plan.cluster.RankCount()) +
                       (plan.cluster.RankCount() == 1 ? " rank" : " ranks");
    runs.push_back(RunTraced(std::move(plan), std::move(name), kSteps));
  }
  return runs;
}

std::string MachineName() {
  std::string name = "unknown processor";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      name = line.substr(colon + 2);
      break;
    }
  }
  const unsigned threads = std::max(1U, std::thread::hardware_concurrency());
  return name + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
}

}  // namespace shardwright
