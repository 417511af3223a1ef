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

Bytes ReservedPeak(const SimulationResult& result) {
  const std::optional<ReservedMemory>& reserved = result.memory.reserved;
  return reserved ? std::max(reserved->peak_first, reserved->peak_steady) : Bytes(0);
}

// The bytes that the allocator would reserve if memory never ended.
Bytes ReservedWithoutLimit(Simulator& simulator, PlanPrograms& programs, SimulateOptions options,
                           Telling telling) {
  constexpr Bytes kEndless{std::int64_t{1} << 50};
  options.allocator.capacity = kEndless;
  return ReservedPeak(SimulatePlan(simulator, programs, options, telling));
}

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

PlanOutcome OutcomeOf(const Problem& problem, const Plan& plan, Bytes usable, Bytes placed,
                      const SimulationResult& result) {
  PlanOutcome e;
  e.step_time = result.step_time;
  e.exposed_comm = result.exposed_comm;
  e.bubble = result.bubble;
  e.rates = RatesOf(problem, plan, ToSeconds(result.step_time));
  e.device_peak = result.memory.allocated.DevicePeak();
  e.reserved = ReservedPeak(result);
  e.outside = result.memory.outside;
  e.usable = usable;
  e.first_retries = result.memory.reserved ? result.memory.reserved->retries_first : 0;
  e.retries_per_step = result.memory.reserved ? result.memory.reserved->retries_steady : 0;
  e.host_peak = result.memory.allocated.HostPeak().total * problem.cluster.gpus_per_node;
  e.misfits = FindMisfits(problem, plan, usable, placed, result);
  return e;
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

Bytes PlanOutcome::DeviceTotal() const {
  return std::max(reserved, device_peak.total) + outside;
}

Bytes PlanOutcome::Excess() const {
  Bytes excess(0);
  for (const Misfit& misfit : misfits) {
    excess = std::max(excess, misfit.Excess());
  }
  return excess;
}

// With `compares` the memory of the buffers comes first, which costs no simulation of time. A plan
// that does not fit by then is done.
PlanOutcome Evaluate(const Problem& problem, const Plan& plan, const EvaluateOptions& options) {
  CheckPlan(problem, plan, "plan");
  const Bytes usable =
      options.memory_limit > Bytes(0) ? options.memory_limit : UsableMemory(problem);
  if (plan.pipeline_size > 1) {
    return OutcomeOf(problem, plan, usable, Bytes(0),
                     SimulateStages(LowerAndVerifyStages(problem, plan), problem,
                                    options.compares ? usable : kNoLimit));
  }
  PlanPrograms programs({problem, plan});
  Simulator simulator(problem.cluster, problem.profile);
  SimulateOptions simulate = SimulateOptionsOf(problem, programs.Largest());
  simulate.reserved = options.reserved;
  const bool has_arena = programs.Largest().memory == MemoryRegime::kArena;
  if (options.compares) {
    SW_CHECK(!options.reserved && !has_arena, "what is reserved or placed is not compared");
    SimulationResult allocated;
    allocated.memory = simulator.Allocated(programs.Largest());
    if (PlanOutcome e = OutcomeOf(problem, plan, usable, Bytes(0), allocated); !e.Fits()) {
      return e;
    }
  } else {
    CheckLegal(programs.Largest());
  }
  const SimulationResult result = SimulatePlan(simulator, programs, simulate, options.telling);
  PlanOutcome e =
      OutcomeOf(problem, plan, usable, has_arena ? PlacePlan(programs) : Bytes(0), result);
  for (Misfit& misfit : e.misfits) {
    if (misfit.kind == Misfit::Kind::kFragmentation) {
      misfit.needed =
          ReservedWithoutLimit(simulator, programs, simulate, options.telling) + e.outside;
    }
  }
  return e;
}

}  // namespace shardwright
