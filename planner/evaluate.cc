// One plan, predicted from end to end: lower, verify, simulate, compare with the limits.
//
// Example: a plan whose buffers peak at 60 GiB, with 2 GiB outside the allocator, on a GPU with 77
// GiB usable and a margin of 3 %. The limit is 74.7 GiB. The buffers fit with 62 GiB. The replay of
// the allocator reserves 71 GiB and finds room, so the plan fits. Had it found none,
// Misfit::kFragmentation would say so, and a second replay without a limit says how much memory
// would be enough.
//
// Every command takes this way, whether the plan comes from a file, a baseline or the search.

#include "planner/evaluate.h"

#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "simulator/stages.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// FLOPs of one sample as published MFU figures count them.
Flops FlopsPerSample(const Problem& problem) {
  if (problem.job.mode == JobMode::kTrain) {
    return ConventionFlopsPerSample(problem.model);
  }
  // Forward is a third of training, when everything is trained.
  Model all_trained = problem.model;
  for (Parameter& param : all_trained.params) {
    param.trainable = true;
  }
  return Flops(ConventionFlopsPerSample(all_trained).value / 3.0);
}

}  // namespace

void CheckLegal(const Program& program) {
  const std::vector<Finding> findings = Verify(program);
  SW_CHECK(findings.empty(), "an illegal program: " + findings[0].text);
}

Program LowerAndVerify(const PlanFile& file) {
  Program program = Lower({file, file.plan});
  CheckLegal(program);
  return program;
}

std::vector<Program> LowerAndVerifyStages(const Problem& problem, const Plan& plan) {
  std::vector<Program> programs = LowerStages({problem, plan});
  std::vector<const Program*> classes =
      Mapped<const Program*>(programs, [&](const Program& program) { return &program; });
  const std::vector<Finding> findings = VerifyRanks(classes);
  SW_CHECK(findings.empty(), "illegal programs: " + findings[0].text);
  return programs;
}

SimulationResult SimulateStages(const std::vector<Program>& programs, const Problem& problem,
                                Bytes most) {
  PipelineResult result = MemoryOfStages(programs, problem.cluster, problem.profile);
  if (SumOf(result).memory.Needs() <= most) {
    result.timing = TimeOfStages(programs, problem.cluster, problem.profile, true);
  }
  return SumOf(result);
}

Bytes UsableMemory(const Problem& problem) {
  const auto usable = static_cast<double>(problem.cluster.gpu.usable_memory.value.value);
  const Rollout& rollout = problem.job.rollout;
  return Bytes(std::llround(
      usable * (1.0 - problem.job.memory_margin - (rollout.sleeps ? 0.0 : rollout.engine))));
}

Bytes EngineMemory(const Problem& problem) {
  const auto usable = static_cast<double>(problem.cluster.gpu.usable_memory.value.value);
  return Bytes(std::llround(usable * problem.job.rollout.engine));
}

SimulateOptions SimulateOptionsOf(const Problem& problem, const Program& program) {
  const Bytes room = UsableMemory(problem) - OutsideBytes(program, problem.profile.memory);
  SimulateOptions options;
  options.allocator = AllocatorOptionsOf(problem.job.allocator, std::max(room, Bytes(1)));
  return options;
}

std::vector<Misfit> FindMisfits(const Problem& problem, const Plan& plan, Bytes usable,
                                Bytes placed, const SimulationResult& result) {
  std::vector<Misfit> misfits;
  const bool has_arena = FactsOf(plan).has_arena;
  const Bytes peak = has_arena ? placed : result.memory.allocated.DevicePeak().total;
  const Bytes allocated = peak + result.memory.outside;
  const std::string limit = Format(usable) + " usable on " + problem.cluster.gpu.name;
  if (allocated > usable) {
    misfits.push_back({Misfit::Kind::kDevice, allocated, usable,
                       "does not fit: " + std::string(has_arena ? "arena " : "peak allocated ") +
                           Format(peak) + " + outside the allocator " +
                           Format(result.memory.outside) + " = " + Format(allocated) + ", of " +
                           limit});
  } else if (result.memory.reserved && result.memory.reserved->out_of_memory) {
    misfits.push_back({Misfit::Kind::kFragmentation, allocated, usable,
                       "does not fit: fragmentation leaves no room, with peak allocated " +
                           Format(peak) + " + outside the allocator " +
                           Format(result.memory.outside) + ", of " + limit});
  }
  if (problem.job.rollout.sleeps) {  // it wakes beside what no step frees
    const auto kept = [&](Category category) {
      return result.memory.allocated.DevicePeak().by_category[static_cast<std::size_t>(category)];
    };
    const Bytes needed = EngineMemory(problem) + result.memory.outside +
                         kept(Category::kParameterShard) + kept(Category::kOptimizerState) +
                         kept(Category::kModelBuffer);
    if (needed > usable) {
      misfits.push_back({Misfit::Kind::kDevice, needed, usable,
                         "does not fit: the engine's " + Format(EngineMemory(problem)) +
                             " beside the model's state = " + Format(needed) + ", of " + limit});
    }
  }
  const Bytes host = result.memory.allocated.HostPeak().total * problem.cluster.gpus_per_node;
  const Bytes host_limit = problem.cluster.node.pinned_limit;
  if (host_limit > Bytes(0) && host > host_limit) {
    misfits.push_back({Misfit::Kind::kHost, host, host_limit,
                       "does not fit: offloading needs " + Format(host) +
                           " of page-locked host memory per node, of " + Format(host_limit)});
  }
  return misfits;
}

Rates RatesOf(const Problem& problem, const Plan& plan, Seconds step_time) {
  Rates rates;
  const std::optional<FlopsPerSecond> peak =
      PeakFlops(problem.cluster.gpu, MathTypeOf(problem.job.precision.param));
  rates.has_dtype = peak.has_value();
  rates.peak =
      peak.value_or(PeakFlops(problem.cluster.gpu, MathType::kFp32).value_or(FlopsPerSecond(0.0)));
  const Mesh mesh = MeshOf(plan);
  const double samples =  // of one GPU
      static_cast<double>(plan.micro_batch) * static_cast<double>(plan.accumulation) *
      static_cast<double>(mesh.DataCount()) / static_cast<double>(mesh.RankCount());
  if (step_time.value > 0.0) {
    rates.tokens_per_second_per_gpu =
        samples * static_cast<double>(problem.model.tokens_per_sample) / step_time.value;
    if (rates.peak.value > 0.0) {
      rates.mfu = samples * FlopsPerSample(problem).value / (step_time.value * rates.peak.value);
    }
  }
  return rates;
}

Bytes Outcome::DeviceTotal() const {
  return std::max(reserved, device_peak.total) + outside;
}

Bytes Outcome::Needed() const {
  const Bytes held = reserved > Bytes(0) ? reserved : device_peak.total;
  return (placed > Bytes(0) ? placed : held) + outside;
}

// The allocator knows how much there is. An arena, and the buffers of a pipeline, do not.
bool Outcome::HasRoom() const {
  const bool knows_limit = reserved > Bytes(0) && placed == Bytes(0);
  return !runs_out && (knows_limit || Needed() <= usable);
}

std::int64_t Outcome::Retries() const {
  return placed > Bytes(0) ? 0 : std::max(first_retries, retries_per_step);
}

Bytes Outcome::Excess() const {
  Bytes excess(0);
  for (const Misfit& misfit : misfits) {
    excess = std::max(excess, misfit.Excess());
  }
  return excess;
}

// Host memory is that of a node: 10 GiB of one rank on a node of 8 GPUs are 80 GiB.
Outcome OutcomeOf(const Problem& problem, const SimulationResult& result) {
  Outcome outcome;
  outcome.step_time = ToSeconds(result.step_time);
  outcome.exposed_comm = ToSeconds(result.exposed_comm);
  outcome.bubble = ToSeconds(result.bubble);
  outcome.device_peak = result.memory.allocated.DevicePeak();
  outcome.outside = result.memory.outside;
  outcome.host_peak = result.memory.allocated.HostPeak().total * problem.cluster.gpus_per_node;
  if (const std::optional<ReservedMemory>& reserved = result.memory.reserved) {
    outcome.reserved = std::max(reserved->peak_first, reserved->peak_steady);
    outcome.runs_out = reserved->out_of_memory;
    outcome.first_retries = reserved->retries_first;
    outcome.retries_per_step = reserved->retries_steady;
  }
  return outcome;
}

}  // namespace shardwright
