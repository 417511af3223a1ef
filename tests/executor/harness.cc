#include "tests/executor/harness.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "core/error.h"
#include "executor/half.h"
#include "executor/host/kernels/table.h"
#include "models/cut_experts.h"
#include "models/cut_stage.h"
#include "schedule/lower.h"
#include "schedule/place.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "tests/executor/tiny_training.h"
#include "traces/check.h"

namespace shardwright::testing {
namespace {

// The weights of one replica, put together by their names.
std::vector<std::vector<float>> Collect(const Model& whole, const Runtime& runtime,
                                        std::int64_t replica) {
  std::map<std::string, std::size_t> places;
  for (const auto& [param, part] : AllParts(whole)) {
    places.emplace(FqnOfPart(whole, param, part), places.size());
  }
  std::vector<std::vector<float>> weights(places.size());
  for (const Rank rank : runtime.LocalRanks()) {
    if (runtime.mesh().At(rank).replica != replica) {
      continue;
    }
    const Model& model = runtime.InputOf(rank).model;
    const std::int64_t part = runtime.PartOf(rank);
    for (const BoundUnit& unit : runtime.BindingOf(rank).units) {
      const auto collect = [&](const ShardPiece& piece, DType dtype, const std::byte* device) {
        const auto size = static_cast<std::int64_t>(SizeOf(dtype));
        std::vector<std::byte> data(static_cast<std::size_t>(piece.count * size));
        runtime.CopyMemory(rank, data.data(), device + piece.shard_offset * size,
                           piece.count * size);
        std::vector<float>& all = weights[places.at(FqnOfPart(model, piece.param, part))];
        const Parameter& param = model.params[piece.param.value];
        all.resize(static_cast<std::size_t>(param.Elements() * param.tensor_parts));
        for (std::int64_t i = 0; i < piece.count; ++i) {
          all[static_cast<std::size_t>(piece.param_begin + i)] = LoadFloat(dtype, data.data(), i);
        }
      };
      for (const ShardPiece& piece : InWhole(model, unit.pieces, part)) {
        collect(piece, unit.dtype, unit.parameters);
      }
      for (const ShardPiece& piece : InWhole(model, unit.copy_only, part)) {
        collect(piece, unit.copy->dtype, unit.copy->data);
      }
    }
  }
  return weights;
}

// What of a trace ranks of one stage recorded.
Trace OfStage(const Trace& trace, const Program& program, std::size_t stage) {
  Trace own;
  for (const Span& span : trace.spans) {
    if (StageOf(program, span.rank) == stage) {
      own.spans.push_back(span);
    }
  }
  return own;
}

}  // namespace

KernelSetOptions KernelsOf(const Setup& setup, const char* name) {
  KernelSetOptions kernels = FindKernelSet(name, "test");
  kernels.loss_chunks = setup.loss_chunks;
  kernels.fp8 = setup.fp8;
  return kernels;
}

Program LowerSetup(const Setup& setup) {
  return std::move(LowerAllStages(setup).front());
}

std::vector<Program> LowerAllStages(const Setup& setup) {
  const KernelSetOptions kernels = KernelsOf(setup, "shardwright-host");
  std::vector<Program> programs = LowerStages({setup.model, kernels, setup.job, setup.plan});
  std::vector<const Program*> classes;
  for (const Program& program : programs) {
    classes.push_back(&program);
  }
  const auto illegal = VerifyRanks(classes);
  SW_CHECK(illegal.empty(), illegal.front().text);
  return programs;
}

Outcome Train(const Setup& setup) {
  const std::vector<Program> programs = LowerAllStages(setup);
  return TrainPrograms(setup, programs, programs);
}

Outcome TrainProgram(const Setup& setup, const Program& program, const Program& legal) {
  return TrainPrograms(setup, {&program, 1}, {&legal, 1});
}

Outcome TrainPrograms(const Setup& setup, std::span<const Program> programs,
                      std::span<const Program> legal) {
  const KernelSetOptions kernels = KernelsOf(setup, "shardwright-host");
  const std::size_t stages = programs.size();
  std::vector<Model> models(stages, setup.model);
  std::vector<Placement> placements;
  std::vector<ExecutorInput> inputs;
  std::vector<ExecuteContext> contexts;
  for (std::size_t s = 0; s < stages; ++s) {
    CutStage(models[s], std::ssize(models) * setup.plan.pipeline_stages,
             static_cast<std::int64_t>(s), std::ssize(models), "test",
             setup.plan.pipeline_edge_layers, IsVShaped(setup.plan.pipeline_schedule));
    placements.push_back(Place(legal[s]));
  }
  for (std::size_t s = 0; s < stages; ++s) {
    inputs.push_back({models[s], kernels, setup.job, programs[s], placements[s], setup.training});
  }
  for (std::size_t s = 0; s < stages; ++s) {
    contexts.push_back({inputs[s], InitRules(models[s], setup.training.init_std), setup.kernel});
  }
  HostWorld world(contexts, setup.host);
  RunOptions run = setup.run;
  run.trace = true;
  run.poison = true;
  Runtime runtime(
      inputs, [&](Rank rank) { return std::make_unique<HostDevice>(world, rank); }, run);
  Outcome outcome = RunToEnd(setup, programs.front(), runtime);
  for (std::size_t s = 0; s < stages; ++s) {
    for (const std::string& finding : CheckTrace(legal[s], OfStage(outcome.trace, legal[s], s))) {
      outcome.findings.push_back(finding);
    }
  }
  return outcome;
}

Outcome RunToEnd(const Setup& setup, const Program& program, Runtime& runtime) {
  runtime.Initialize();
  runtime.RunSteps(setup.steps);
  Outcome outcome;
  outcome.weights = Collect(setup.model, runtime, 0);
  for (std::int64_t r = 1; r < program.replicate_size; ++r) {
    outcome.replicas_agree =
        outcome.replicas_agree && Collect(setup.model, runtime, r) == outcome.weights;
  }
  std::int64_t buffer_elements = 0;
  for (const Module& module : setup.model.modules) {
    buffer_elements += module.buffer_elements;
  }
  for (const Rank rank : runtime.LocalRanks()) {
    const float* const buffers = runtime.BindingOf(rank).model_buffers;
    std::vector<float>& copy = outcome.buffers.emplace_back();
    if (buffers != nullptr) {
      copy.resize(static_cast<std::size_t>(buffer_elements));
      runtime.CopyMemory(rank, copy.data(), buffers, buffer_elements * 4);
    }
  }
  for (const StepReport& report : runtime.TakeReports()) {
    outcome.losses.push_back(report.loss);
    outcome.ends.push_back(report.end);
    if (report.gradient_norm.has_value()) {
      outcome.norms.push_back(*report.gradient_norm);
    }
  }
  outcome.scaler = runtime.loss_scaler();
  outcome.skipped_steps = runtime.skipped_steps();
  outcome.trace = runtime.TakeTrace();
  return outcome;
}

std::vector<SimTime> LastEnds(const Trace& trace) {
  std::vector<SimTime> ends;
  for (const Span& span : trace.spans) {
    if (span.body != BodyKind::kInit) {
      ends.resize(std::max<std::size_t>(ends.size(), span.step + 1));
      ends[span.step] = std::max(ends[span.step], span.end);
    }
  }
  return ends;
}

Setup TinySetup(Dialect dialect, std::int64_t ranks) {
  Setup s;
  s.model = TinyNetwork(3);
  s.kernel = ReferenceKernel;
  s.run.inputs = FillTinyBatch;
  s.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  s.job.clip_gradients = false;
  s.training = DefaultTrainingOptions(s.job);
  s.training.optimizer.learning_rate = 0.02;
  s.plan.dialect = dialect;
  s.plan.micro_batch = 2;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  if (dialect == Dialect::kZero1 || dialect == Dialect::kZero2 || dialect == Dialect::kZero3) {
    s.plan.zero.reduce_bucket = 100;  // elements: several buckets per backward, and a small arena
  }
  const std::string wrap = dialect == Dialect::kDdp ? "root" : "block";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, dialect, "test");
  return s;
}

Setup DescentSetup(Model model, double rate) {
  Setup s;
  s.model = std::move(model);
  s.kernel = HostKernel;
  s.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  s.job.clip_gradients = false;
  s.job.optimizer.kind = OptimizerKind::kSgd;
  s.training = DefaultTrainingOptions(s.job);
  s.training.optimizer.learning_rate = rate;
  s.training.optimizer.weight_decay = 0.0;
  return s;
}

void HostKernel(const ModelOpCall& call, bool is_backward) {
  if (is_backward) {
    BackwardOnHost(call);
  } else {
    ForwardOnHost(call);
  }
}

namespace {

double Largest(const std::vector<float>& weights) {
  double most = 0.0;
  for (const float w : weights) {
    most = std::isfinite(w) ? std::max(most, std::abs(static_cast<double>(w)))
                            : std::numeric_limits<double>::infinity();
  }
  return most;
}

}  // namespace

double UpdateDifference(const Outcome& x, const Outcome& y, const Outcome& first) {
  SW_CHECK(x.weights.size() == y.weights.size(), "weights of two models");
  std::vector<double> updates, differences;
  for (std::size_t p = 0; p < x.weights.size(); ++p) {
    std::vector<float> update = y.weights[p], difference = y.weights[p];
    SW_CHECK(x.weights[p].size() == update.size(), "parameters of two shapes");
    for (std::size_t i = 0; i < update.size(); ++i) {
      difference[i] -= x.weights[p][i];
      update[i] -= first.weights[p][i];
    }
    updates.push_back(Largest(update));
    differences.push_back(Largest(difference));
  }
  const double most = *std::max_element(updates.begin(), updates.end());
  SW_CHECK(std::isfinite(most) && most > 0.0, "updates that are numbers");
  double worst = 0.0;
  for (std::size_t p = 0; p < updates.size(); ++p) {
    worst = std::max(worst, differences[p] / std::max(updates[p], most / 100.0));
  }
  return worst;
}

double RelativeDifference(const Outcome& x, const Outcome& y) {
  double largest = 0.0, difference = 0.0;
  SW_CHECK(x.weights.size() == y.weights.size(), "weights of two models");
  for (std::size_t p = 0; p < x.weights.size(); ++p) {
    SW_CHECK(x.weights[p].size() == y.weights[p].size(), "parameters of two shapes");
    for (std::size_t i = 0; i < x.weights[p].size(); ++i) {
      const double a = static_cast<double>(x.weights[p][i]);
      const double b = static_cast<double>(y.weights[p][i]);
      SW_CHECK(std::isfinite(a) && std::isfinite(b), "weights that are no numbers");
      largest = std::max(largest, std::abs(a));
      difference = std::max(difference, std::abs(a - b));
    }
  }
  return difference / largest;
}

}  // namespace shardwright::testing
