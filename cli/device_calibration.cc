#include "cli/device_calibration.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "cli/collect_trace.h"
#include "cli/run_processes.h"
#include "cli/run_session.h"
#include "core/json.h"
#include "executor/cuda/plugin.h"
#include "executor/data/batch.h"
#include "executor/data/dataset.h"
#include "executor/data/sampler.h"
#include "executor/host/together.h"
#include "executor/training_options.h"
#include "models/loader.h"
#include "planner/evaluate.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// The first step warms up and does not count.
constexpr std::int64_t kSteps = 10;

std::string TransformerConfig(std::int64_t width, std::int64_t sequence, std::int64_t vocabulary) {
  constexpr std::int64_t kLayers = 3;
  // Heads of 64 features from 512 on, of 128 from 2,048 on.
  const std::int64_t head_width = std::clamp<std::int64_t>(
      std::max(width / 16, std::min<std::int64_t>(width / 8, 64)), 32, 128);
  return R"({"model_type": "gpt2", "n_embd": )" + std::to_string(width) + R"(, "n_layer": )" +
         std::to_string(kLayers) + R"(, "n_head": )" + std::to_string(width / head_width) +
         R"(, "n_positions": )" + std::to_string(std::max<std::int64_t>(sequence, 256)) +
         R"(, "vocab_size": )" + std::to_string(vocabulary) +
         R"(, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})";
}

LoadedModel Transformer(std::int64_t width, std::int64_t sequence, std::int64_t vocabulary) {
  std::string json = TransformerConfig(width, sequence, vocabulary);
  Model model =
      ModelFromJson(JsonValue::Parse(json, "calibrate"), "transformer-" + std::to_string(width),
                    {.sequence_length = sequence});
  const std::uint64_t hash = HashModel(model);
  return {std::move(model), std::move(json), hash};
}

// Of transformers as many times wider and longer than the device's narrowest one.
struct Shape {
  std::int64_t width, sequence;
  bool offloads = false;
};

// Blocks as units, everything sharded over all ranks.
PlanFile CalibrationPlan(const CalibrationDevice& device, const Shape& shape) {
  constexpr std::int64_t kMicroBatch = 2;
  const std::int64_t vocabulary = std::max<std::int64_t>(1000, 8 * device.width);
  PlanFile file;
  file.cluster = LoadCluster(device.cluster, device.nodes, device.ranks / device.nodes);
  if (device.one_core) {
    // Not two whole ones, so that one thread computes, and room for what runs beside it.
    constexpr double kOneAndMore = 1.999;
    file.cluster.machine_cores = std::min(file.cluster.machine_cores, kOneAndMore);
  }
  file.kernels = FindKernelSet(device.kernel_set, "calibrate");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.job.precision = device.precision;
  file.job.sequence_length = shape.sequence * device.width;
  file.job.global_batch = device.ranks * kMicroBatch;
  file.plan.dialect = Dialect::kNative;
  file.plan.shard_size = device.ranks;
  file.plan.micro_batch = kMicroBatch;
  file.plan.offload.activations = shape.offloads;
  file.model = Transformer(shape.width * device.width, file.job.sequence_length, vocabulary);
  file.plan.units = Wrap(file.model, ParseWrap("block", "calibrate"), ReshardChoice(),
                         file.plan.dialect, "calibrate");
  CheckPlan(file, file.plan, "calibrate");
  return file;
}

}  // namespace

TracedRun RunTraced(const CalibrationDevice& device, PlanFile file, std::string name,
                    std::int64_t steps) {
  TracedRun result{std::move(name), std::move(file), {}, {}};
  result.program = LowerAndVerify(result.file);
  const Model& model = result.file.model;
  const TrainingOptions training = DefaultTrainingOptions(result.file.job);
  const std::unique_ptr<Dataset> data = OpenDataset("random", model, training.seed);
  const Sampler sampler{data->size(), result.file.job.global_batch, training.seed, training.shuffle,
                        training.epoch_tail};
  RunOptions run;
  run.trace = true;
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(model, *data, sampler, {key.step, key.first_sample, key.count, key.cut}, views);
  };
  HostOptions host;
  host.threads = result.file.cluster.ThreadsPerRank();
  host.processes = device.processes;
  if (device.processes != nullptr) {
    device.processes->set_timeout(host.set_up_timeout);  // EndSetUp of the plan before
    JoinRun(*device.processes, run);
  }
  const SessionInput input{model, result.file.kernels, result.file.job, result.program, training};
  RunSession session({&input, 1}, host, std::move(run), {.gpu = device.gpu});
  EndProcessOnFault(session, device.processes);
  session.runtime().Initialize();
  EndSetUp(device.processes, host.timeout);
  session.runtime().RunSteps(steps);
  result.trace = TakeWholeTrace(session, result.program, device.processes);
  return result;
}

namespace {

void RunShapes(const CalibrationDevice& device, std::vector<TracedRun>& runs,
               std::vector<Shape> shapes = {{1, 1}, {4, 1}, {2, 2}}) {
  if (device.large) {
    shapes.push_back({8, 2});
  }
  if (device.copies) {
    shapes.push_back({.width = 2, .sequence = 1, .offloads = true});
  }
  for (const Shape& shape : shapes) {
    PlanFile plan = CalibrationPlan(device, shape);
    std::string name = plan.model.name + " on " + std::to_string(device.ranks) +
                       (device.ranks == 1 ? " rank" : " ranks") +
                       (device.one_core ? " with one thread" : "") +
                       (shape.offloads ? ", offloading" : "");
    runs.push_back(RunTraced(device, std::move(plan), std::move(name), kSteps));
  }
}

}  // namespace

std::vector<TracedRun> RunCalibrationPlans(const CalibrationDevice& device) {
  std::vector<TracedRun> runs;
  if (device.ranks > 1) {
    RunShapes(device, runs);
  }
  if (device.processes != nullptr) {
    FinishTogether(device.processes);
    if (device.processes->rank() > 0) {
      return {};
    }
  }
  if (CalibrationDevice turns = device; turns.large && turns.processes == nullptr) {
    // Twice as many ranks as cores, if the cluster has room for them.
    const Cluster most = LoadCluster(device.cluster, 1, 0);
    turns.ranks = 2 * std::max<std::int64_t>(1, static_cast<std::int64_t>(most.SharedCores()));
    if (turns.ranks <= most.gpus_per_node) {
      RunShapes(turns, runs, {{4, 1}});
    }
  }
  CalibrationDevice alone = device;
  alone.ranks = alone.nodes = 1;
  alone.processes = nullptr;
  if (LoadCluster(alone.cluster, 1, 1).ThreadsPerRank() > 1) {
    RunShapes(alone, runs);
    alone.one_core = true;
  }
  RunShapes(alone, runs);
  return runs;
}

CalibrationDevice CudaCalibration(const std::string& cluster, std::int64_t nodes, int gpu) {
  CalibrationDevice device;
  device.cluster = cluster;
  const Cluster all = LoadCluster(cluster, nodes, 0);
  device.nodes = all.node_count;
  device.ranks = all.RankCount();
  device.kernel_set = "shardwright-cuda-plain";
  device.precision = Precision();
  device.copies = true;
  device.gpu = gpu;
  // 1,024 for a GPU of 132 multiprocessors: products of some 500 tiles of 128 x 256 at the widest.
  constexpr std::int64_t kPerMultiprocessor = 8;
  constexpr std::int64_t kNarrowest = 32;
  const std::int64_t width = kPerMultiprocessor * OpenGpu(gpu)->Info().multiprocessors;
  device.width = std::max(
      kNarrowest, static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(width))));
  return device;
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
