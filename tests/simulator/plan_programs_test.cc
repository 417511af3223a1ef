// A step of many micro-batches, told from programs with few: against the whole step, simulated.

#include "simulator/plan_programs.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/sanitizers.h"
#include "tests/schedule/random_plan.h"

namespace shardwright {
namespace {

using testing::DrawDeepCase;
using testing::RandomCase;

Cluster ClusterFor(std::mt19937& random, std::int64_t ranks) {
  const std::int64_t nodes = ranks % 8 == 0 ? ranks / 8 : 1;
  const auto draw = [&](int low, int high) {
    return std::to_string(std::uniform_int_distribution<int>(low, high)(random));
  };
  return LoadCluster("h100-80 x" + std::to_string(ranks / nodes) + ", nvlink " + draw(10, 450) +
                         " GB/s, nic 2x" + draw(25, 400) + " Gbit/s",
                     nodes);
}

void CheckPeak(const MemoryPeak& a, const MemoryPeak& b) {
  CHECK(a.total == b.total);
  CHECK(a.by_category == b.by_category);
}

struct Told {
  bool by_fewer = false;       // micro-batches than all
  bool roughly = false;        // a rough answer is that of all of them
  bool other_reserve = false;  // the caching allocator reserves something else with all of them
  bool other_arena = false;    // so does the arena
};

// fsdp1 records streams: which block is free when is history, and it can take the allocator a dozen
// micro-batches that are alike to the picosecond until it needs a segment more.
bool ReservesOtherwise(const RandomCase& c, const ReservedMemory& told,
                       const ReservedMemory& whole) {
  constexpr double kAtMost = 0.05;
  const auto distance = [](Bytes a, Bytes b) { return std::abs(Ratio(a, b) - 1); };
  const bool is_other =
      told.peak_first != whole.peak_first || told.peak_steady != whole.peak_steady ||
      told.retries_first != whole.retries_first || told.retries_steady != whole.retries_steady;
  CHECK((!is_other || c.plan.dialect == Dialect::kFsdp1));
  CHECK(distance(told.peak_first, whole.peak_first) <= kAtMost);
  CHECK(distance(told.peak_steady, whole.peak_steady) <= kAtMost);
  return is_other;
}

// The time of two and three micro-batches, and the memory of three; of more where reductions in
// flight make more unlike. Returns whether both are right.
//
// Small models whose first micro-batches the host issues ahead, behind the last update, are told
// too fast: in 600 plans two of zero1 on gpt2 and t5-small, by 6 and 14 %.
bool CheckRough(const RandomCase& c, Simulator& simulator, const SimulationResult& whole) {
  const double at_most = c.plan.dialect == Dialect::kZero1 ? 0.15 : 0.05;
  const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
  SimulateOptions options;
  options.reserved = false;
  PlanPrograms programs({c.model, kernels, c.job, c.plan});
  const SimulationResult rough = SimulatePlan(simulator, programs, options, Telling::kRoughly);
  CHECK(programs.Largest().micro_batch_count == 2 + programs.CountUnlike());
  const Bytes told = rough.memory.allocated.DevicePeak().total;
  const Bytes right = whole.memory.allocated.DevicePeak().total;
  CHECK(std::abs(static_cast<double>(rough.step_time.value) /
                     static_cast<double>(whole.step_time.value) -
                 1) <= at_most);
  CHECK(std::abs(Ratio(told, right) - 1) <= 0.05);
  return rough.step_time == whole.step_time && told == right;
}

Told CheckCase(const RandomCase& c, const Cluster& cluster, bool reserved) {
  const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
  const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
  Simulator simulator(cluster, profile);
  SimulateOptions options;
  options.reserved = reserved;
  PlanPrograms programs({c.model, kernels, c.job, c.plan});
  const SimulationResult told = SimulatePlan(simulator, programs, options);
  const bool is_told = programs.Largest().micro_batch_count < c.plan.accumulation;
  const SimulationResult whole = simulator.Run(programs.With(c.plan.accumulation), options);
  CHECK(told.step_time.value == whole.step_time.value);
  CHECK(told.exposed_comm == whole.exposed_comm);
  CHECK(told.timing.is_steady == whole.timing.is_steady);
  CheckPeak(told.memory.allocated.DevicePeak(), whole.memory.allocated.DevicePeak());
  CheckPeak(told.memory.allocated.HostPeak(), whole.memory.allocated.HostPeak());
  CHECK(told.memory.outside == whole.memory.outside);
  if (reserved) {
    REQUIRE(told.memory.reserved->out_of_memory == whole.memory.reserved->out_of_memory);
  }
  const bool is_right = !reserved && CheckRough(c, simulator, whole);
  const bool is_compared = reserved && !told.memory.reserved->out_of_memory;
  Told result;
  result.by_fewer = is_told;
  result.roughly = is_right;
  result.other_reserve =
      is_compared && ReservesOtherwise(c, *told.memory.reserved, *whole.memory.reserved);
  return result;
}

TEST_CASE("SimulatePlan: few micro-batches tell what many take, to the picosecond and the byte") {
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  const int trials = is_deep ? 600 : testing::kHasSanitizer ? 6 : 30;
  const std::array names = {"gpt2", "pythia-70m", "t5-small", "bert-large", "llama-3-8b"};
  std::mt19937 random(11);
  int told = 0;
  int rough = 0;
  int other = 0;
  for (int trial = 0; trial < trials;) {
    RandomCase c = DrawDeepCase(random, LoadModel(names[random() % names.size()]));
    if (c.plan.accumulation == 1) {
      continue;
    }
    c.plan.accumulation = 12 + static_cast<std::int64_t>(random() % 30);
    c.job.global_batch = 0;
    CAPTURE(trial);
    CAPTURE(c.description);
    try {
      (void)testing::LowerCase(c);
    } catch (const InputError&) {  // too many messages
      continue;
    }
    const Cluster cluster = ClusterFor(random, c.plan.shard_size * c.plan.replicate_size);
    const Told result = CheckCase(c, cluster, trial % 2 == 0);
    told += result.by_fewer ? 1 : 0;
    rough += result.roughly ? 1 : 0;
    other += result.other_reserve ? 1 : 0;
    ++trial;
  }
  CHECK(told > trials * 2 / 3);  // not vacuous
  CHECK(rough > trials / 4);     // of the half without reserved memory
  CHECK(other <= trials / 100);
}

std::string PlaceOf(const Program& program, const MemoryPeak& peak) {
  const Body& body = peak.body == BodyKind::kInit     ? program.init
                     : peak.body == BodyKind::kWarmup ? program.warmup
                                                      : program.step;
  return peak.before_op.valid() ? OpName(program, body.ops[peak.before_op.value]) : "end";
}

std::vector<SimTime> NoSums(const Program& /*program*/, const SimulationResult& /*result*/) {
  return {};
}

// All that simulate prints, of a plan told from a few micro-batches and of all of them.
Told CheckAccount(const RandomCase& c, const Cluster& cluster) {
  const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
  const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
  Simulator simulator(cluster, profile);
  SimulateOptions options;
  options.trace = true;
  PlanPrograms programs({c.model, kernels, c.job, c.plan});
  const AccountedStep told = AccountForPlan(simulator, programs, options, NoSums);
  const Program& few = programs.Largest();
  const bool is_told = few.micro_batch_count < c.plan.accumulation;
  CHECK(told.result.trace.spans.empty() == is_told);

  PlanPrograms again({c.model, kernels, c.job, c.plan});
  const Program& all = again.With(c.plan.accumulation);
  const SimulationResult whole = simulator.Run(all, options);
  const StepAccount account = AccountFor(all, whole, NoSums);
  CHECK(told.result.step_time == whole.step_time);
  CHECK(told.result.first_step_time == whole.first_step_time);
  CHECK(told.result.exposed_comm == whole.exposed_comm);
  CHECK(told.result.timing.first == whole.timing.first);
  CHECK(told.result.timing.steady == whole.timing.steady);
  CHECK(told.account.attribution.step_time == account.attribution.step_time);
  CHECK(told.account.attribution.compute_busy == account.attribution.compute_busy);
  CHECK(told.account.attribution.idle == account.attribution.idle);
  CHECK(told.account.attribution.critical == account.attribution.critical);
  CHECK(told.account.device == account.device);
  CHECK(std::abs(Ratio(told.account.placed, account.placed) - 1) <= 0.02);
  const MemoryPeak& peak = whole.memory.allocated.DevicePeak();
  CheckPeak(told.result.memory.allocated.DevicePeak(), peak);
  CHECK(PlaceOf(few, told.result.memory.allocated.DevicePeak()) == PlaceOf(all, peak));
  if (c.plan.dialect != Dialect::kFsdp1) {  // see ReservesOtherwise
    CHECK(told.result.memory.reserved->peak_steady == whole.memory.reserved->peak_steady);
    CHECK(told.result.memory.reserved->retries_first == whole.memory.reserved->retries_first);
    CHECK(told.result.memory.reserved->retries_steady == whole.memory.reserved->retries_steady);
  }
  PlanPrograms counted({c.model, kernels, c.job, c.plan});
  CHECK(CountStepOps(counted) == std::ssize(all.step.ops));
  CHECK(PlacePlan(counted) == told.account.placed);
  Told result;
  result.by_fewer = is_told;
  result.other_arena = told.account.placed != account.placed;
  return result;
}

TEST_CASE("AccountForPlan: a few micro-batches tell all that simulate says of many") {
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  const int trials = is_deep ? 200 : testing::kHasSanitizer ? 2 : 10;
  const std::array names = {"gpt2", "pythia-70m", "t5-small"};
  std::mt19937 random(12);
  int told = 0;
  int other = 0;
  for (int trial = 0; trial < trials;) {
    RandomCase c = DrawDeepCase(random, LoadModel(names[random() % names.size()]));
    if (c.plan.accumulation == 1) {
      continue;
    }
    c.plan.accumulation = 12 + static_cast<std::int64_t>(random() % 30);
    c.job.global_batch = 0;
    CAPTURE(trial);
    CAPTURE(c.description);
    const Cluster cluster = ClusterFor(random, c.plan.shard_size * c.plan.replicate_size);
    const Told result = CheckAccount(c, cluster);
    told += result.by_fewer ? 1 : 0;
    other += result.other_arena ? 1 : 0;
    ++trial;
  }
  CHECK(told >= trials / 2);  // not vacuous
  CHECK(other <= trials / 100);
}

// With five reductions in flight, one per micro-batch, the peak is first reached in the fifth or
// sixth one: of programs with few micro-batches that is among the last, of all of them it is not.
TEST_CASE("AccountForPlan: names the micro-batch of a peak that some have to pass before") {
  RandomCase c;
  c.model = LoadModel("gpt2", {.sequence_length = 1024});
  c.kernel_set = "shardwright-cuda";
  c.job.sequence_length = 1024;
  c.plan.dialect = Dialect::kNative;
  c.plan.shard_size = 2;
  c.plan.accumulation = 24;
  c.plan.in_flight = 5;
  c.plan.units = {{"root", {""}, {Reshard::Kind::kNever, 0}, Gap::kHold, false, {}, {}}};
  (void)CheckAccount(c, LoadCluster("h100-80 x2, nvlink 450 GB/s", 1));
}

// Draws capacities between what is allocated and what a caching allocator reserves where memory
// does not end: most of them make it retry in every micro-batch. Where retries come to an end
// behind the 16th one, nothing before tells it: 1 of 100 plans, 54 % too slow.
TEST_CASE("SimulatePlan: on average a retrying plan takes what all its micro-batches take") {
  constexpr double kAtMost = 0.1;
  const int trials = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 100 : 8;
  std::mt19937 random(9);
  const Model model = LoadModel("gpt2");
  int retrying = 0, told = 0, far = 0;
  for (int trial = 0; trial < trials;) {
    RandomCase c = DrawDeepCase(random, model);
    if (c.plan.dialect == Dialect::kNative) {  // an arena never retries
      continue;
    }
    if (c.plan.dialect == Dialect::kFsdp1 && c.plan.offload.parameters &&
        c.plan.sync != SyncMode::kLast) {  // whose gradients do not add up there
      continue;
    }
    ++trial;
    c.plan.accumulation = 24 + static_cast<std::int64_t>(random() % 40);
    c.job.global_batch = 0;
    if (c.plan.dialect == Dialect::kFsdp1 && c.plan.offload.parameters) {
      c.plan.sync = SyncMode::kLast;  // all that it takes with several micro-batches
    }
    CAPTURE(trial);
    CAPTURE(c.description);
    const Cluster cluster = ClusterFor(random, c.plan.shard_size * c.plan.replicate_size);
    const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
    const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
    Simulator simulator(cluster, profile);
    PlanPrograms programs({c.model, kernels, c.job, c.plan});
    SimulateOptions options;
    const SimulationResult endless = simulator.Run(programs.With(3), options);
    const Bytes allocated = endless.memory.allocated.DevicePeak().total;
    options.allocator.capacity = allocated + (endless.memory.reserved->peak_steady - allocated) *
                                                 static_cast<std::int64_t>(random() % 10) / 10;
    const SimulationResult average =
        SimulatePlan(simulator, programs, options, Telling::kOnAverage);
    told += programs.Largest().micro_batch_count == 16 ? 1 : 0;
    const SimulationResult whole = simulator.Run(programs.With(c.plan.accumulation), options);
    const ReservedMemory& held = *whole.memory.reserved;
    REQUIRE(average.memory.reserved->out_of_memory == held.out_of_memory);
    if (held.out_of_memory) {
      continue;
    }
    retrying += held.retries_steady > 0 ? 1 : 0;
    const double error =
        static_cast<double>(average.step_time.value) / static_cast<double>(whole.step_time.value) -
        1;
    CHECK(error > -kAtMost);
    far += error > kAtMost ? 1 : 0;
  }
  CHECK(far <= trials / 50);
  CHECK(retrying >= trials / 4);  // not vacuous
  CHECK(told >= trials / 8);
}

// Without the clock where no stream is recorded, and up to the first allocation that fails.
TEST_CASE("Simulator: the steady step alone is that of the whole run") {
  const int trials = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 1000 : 60;
  std::mt19937 random(12);
  const Model model = LoadModel("gpt2");
  int untimed = 0, retrying = 0, failing = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const RandomCase c = DrawDeepCase(random, model);
    CAPTURE(trial);
    CAPTURE(c.description);
    const Cluster cluster = ClusterFor(random, c.plan.shard_size * c.plan.replicate_size);
    const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
    const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
    Simulator simulator(cluster, profile);
    PlanPrograms programs({c.model, kernels, c.job, c.plan});
    const Program& program = programs.With(c.plan.accumulation);
    SimulateOptions options;
    const SimulationResult endless = simulator.Run(program, options);
    const Bytes allocated = endless.memory.allocated.DevicePeak().total;
    options.allocator.capacity = allocated + (endless.memory.reserved->peak_steady - allocated) *
                                                 static_cast<std::int64_t>(random() % 16) / 10;
    const SimulationResult whole = simulator.Run(program, options);
    options.steady_only = true;
    const SimulationResult steady = simulator.Run(program, options);
    const ReservedMemory& a = *whole.memory.reserved;
    const ReservedMemory& b = *steady.memory.reserved;
    REQUIRE(a.out_of_memory == b.out_of_memory);
    failing += a.out_of_memory ? 1 : 0;
    if (a.out_of_memory) {
      continue;
    }
    CHECK(whole.step_time.value == steady.step_time.value);
    CHECK(whole.exposed_comm == steady.exposed_comm);
    CHECK(whole.timing.steady == steady.timing.steady);
    CHECK(whole.unsettled.has_value() == steady.unsettled.has_value());
    CHECK(a.peak_first == b.peak_first);
    CHECK(a.peak_steady == b.peak_steady);
    CHECK(a.retries_steady == b.retries_steady);
    retrying += a.retries_steady > 0 ? 1 : 0;
    untimed += RecordsStreams(program) ? 0 : 1;
  }
  CHECK(untimed > trials / 8);  // not vacuous
  CHECK(retrying > trials / 20);
  CHECK(failing > trials / 20);
  MESSAGE(untimed << " untimed, " << retrying << " that retry, " << failing << " that fail");
}

// One unit is one reduction per micro-batch, so four of them fill a queue of four, and only from
// the fifth on one waits for the oldest.
TEST_CASE(
    "CountStepOps: micro-batches are alike when the reductions in flight are at their limit") {
  const Model model = LoadModel("gpt2");
  const KernelSetOptions kernels = FindKernelSet("hf-eager", "test");
  Job job;
  job.global_batch = 0;
  Plan plan;
  plan.dialect = Dialect::kNative;
  plan.shard_size = 2;
  plan.accumulation = 40;
  plan.in_flight = 4;
  plan.units = Wrap(model, ParseWrap("root", "test"), {}, plan.dialect, "test");
  PlanPrograms programs({model, kernels, job, plan});
  CHECK(programs.CountUnlike() == 4);
  const std::int64_t count = CountStepOps(programs);
  CHECK(programs.Largest().micro_batch_count < plan.accumulation);
  CHECK(count == std::ssize(programs.With(plan.accumulation).step.ops));
  plan.in_flight = 1;
  CHECK(PlanPrograms({model, kernels, job, plan}).CountUnlike() == 1);
}

TEST_CASE("SimulatePlan: refuses what Lower refuses, and what it cannot tell from a few") {
  std::mt19937 random(1);
  RandomCase c = DrawDeepCase(random, LoadModel("gpt2"));
  c.plan.accumulation = 60000;
  const KernelSetOptions kernels = FindKernelSet(c.kernel_set, "test");
  PlanPrograms programs({c.model, kernels, c.job, c.plan});
  CHECK(programs.Largest().micro_batch_count == 3);
  CHECK_THROWS_AS((void)programs.With(60000), InputError);  // more ops than a step may have
  c.plan.accumulation = 70000;
  CHECK_THROWS_AS(PlanPrograms({c.model, kernels, c.job, c.plan}), InputError);
}

}  // namespace
}  // namespace shardwright
