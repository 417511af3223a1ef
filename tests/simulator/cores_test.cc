// Cores that ranks share, worked out by hand.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <doctest/doctest.h>

#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "simulator/costs/contention.h"
#include "simulator/costs/pricer.h"
#include "simulator/simulate.h"
#include "tests/simulator/round_numbers.h"

namespace shardwright {
namespace {

using testing::RoundCluster;
using testing::RoundProfile;

constexpr auto kComputeStream = static_cast<std::size_t>(Stream::kCompute);
constexpr auto kGatherStream = static_cast<std::size_t>(Stream::kGather);

ContentionClass On(double cores, LoadKind kind = LoadKind::kKernel) {
  ContentionClass load;
  load.kind = kind;
  load.cores = cores;
  return load;
}

// Speeds of a kernel, and of what runs beside it on the rank's gather stream.
struct Pair {
  double kernel = 0, other = 0;
};
Pair SpeedsOn(double cores, double ranks, const ContentionClass& kernel,
              const ContentionClass& other, double busy_cores = 0) {
  ContentionModel model;
  model.classes = {ContentionClass(), kernel, other};
  model.cores = cores;
  model.ranks_on_cores = ranks;
  model.busy_cores = busy_cores;
  RunningClasses running{};
  running[kComputeStream] = 1;
  running[kGatherStream] = other.kind == LoadKind::kNone ? 0 : 2;
  const Speeds speeds = SolveSpeeds(model, running);
  return {speeds[kComputeStream], speeds[kGatherStream]};
}
const ContentionClass kNothing;

TEST_CASE("Ranks that compute share the cores") {
  CHECK(SpeedsOn(1, 1, On(1), kNothing).kernel == 1);
  CHECK(SpeedsOn(1, 2, On(1), kNothing).kernel == 0.5);
  CHECK(SpeedsOn(2, 3, On(1), kNothing).kernel == doctest::Approx(2.0 / 3));
  CHECK(SpeedsOn(2, 8, On(1), kNothing).kernel == 0.25);
  CHECK(SpeedsOn(1.5, 2, On(1), kNothing).kernel == 0.75);  // a container's quota
  CHECK(SpeedsOn(8, 2, On(1), kNothing).kernel == 1);
}

TEST_CASE("Ranks that take turns on a core find their data gone") {
  ContentionModel model;
  model.classes = {ContentionClass(), On(1)};
  model.core_turns = 0.25;
  RunningClasses running{};
  running[kComputeStream] = 1;
  model.cores = 2;
  model.ranks_on_cores = 2;
  CHECK(SolveSpeeds(model, running)[kComputeStream] == 1);
  model.ranks_on_cores = 4;
  CHECK(SolveSpeeds(model, running)[kComputeStream] == 0.4);
}

TEST_CASE("A rank's threads share its part: who wants less than an equal share gets it") {
  const ContentionClass copy = On(1, LoadKind::kCopyToDevice);
  CHECK(SpeedsOn(4, 2, On(1), copy).kernel == 1);  // four threads on four cores
  CHECK(SpeedsOn(2, 2, On(1), copy).kernel == 0.5);
  CHECK(SpeedsOn(2, 2, On(1), copy).other == 0.5);
  // A gather that sleeps for three quarters of its time.
  const Pair beside = SpeedsOn(1, 1, On(1), On(0.25, LoadKind::kCollective));
  CHECK(beside.kernel == 0.75);
  CHECK(beside.other == 1);
  // Half a core: both want more than a quarter ... or exactly that.
  CHECK(SpeedsOn(1, 2, On(1), On(0.25, LoadKind::kCollective)).kernel == 0.25);
  CHECK(SpeedsOn(1, 2, On(1), On(0.25, LoadKind::kCollective)).other == 1);
  // The host issues for a quarter of the op's time: 4 us of it and 1 us of issuing take 5 us.
  CHECK(SpeedsOn(1, 1, On(1.25), kNothing).kernel == doctest::Approx(0.8));
}

TEST_CASE("Busy cores slow each other down") {
  CHECK(SpeedsOn(3, 1, On(1), kNothing, 0.2).kernel == 1);
  CHECK(SpeedsOn(3, 2, On(1), kNothing, 0.2).kernel == doctest::Approx(1 / 1.2));
  CHECK(SpeedsOn(3, 3, On(1), kNothing, 0.2).kernel == doctest::Approx(1 / 1.4));
  CHECK(SpeedsOn(3, 6, On(1), kNothing, 0.2).kernel == doctest::Approx(0.5 / 1.4));
  CHECK(SpeedsOn(1, 2, On(1), kNothing, 0.2).kernel == 0.5);  // there is no other
}

Program Gpt2(std::int64_t ranks) {
  const Model model = LoadModel("gpt2", {.sequence_length = 128});
  Job job;
  job.sequence_length = 128;
  job.global_batch = ranks;
  Plan plan;
  plan.dialect = Dialect::kNative;
  plan.shard_size = ranks;
  plan.units = Wrap(model, ParseWrap("block", "test"), ReshardChoice(), plan.dialect, "test");
  return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
}

SimTime StepOf(const Program& program, const Cluster& cluster, const Profile& profile) {
  SimulateOptions options;
  options.reserved = false;
  return Simulate(program, cluster, profile, options).step_time;
}

TEST_CASE("Threads of one rank share its ops, by Amdahl's law") {
  Cluster cluster = RoundCluster(1);
  cluster.gpus_per_node = 1;
  const Program program = Gpt2(1);
  Profile profile = RoundProfile();
  profile.compute.kernel_gap.value = Seconds(0);  // which is nobody's work
  const auto longest = [&](double cores, double shared) {
    cluster.node_cores = cores;
    profile.overlap.shared_work.value = shared;
    SimTime most;
    for (const Price& price : PriceProgram(program, cluster, profile).prices) {
      most = std::max(most, price.duration);
    }
    return static_cast<double>(most.value);
  };
  const double alone = longest(1, 1);
  CHECK(alone > 1e9);  // a millisecond
  CHECK(longest(4.5, 0) == alone);
  CHECK(longest(4.5, 1) == doctest::Approx(alone / 4).epsilon(1e-6));
  CHECK(longest(4.5, 0.8) == doctest::Approx(alone * 0.4).epsilon(1e-6));
  CHECK(longest(1.9, 0.8) == alone);  // not two whole ones
  cluster.gpus_per_node = 2;          // two cores each
  CHECK(longest(4.5, 1) == doctest::Approx(alone / 2).epsilon(1e-6));
}

TEST_CASE("To share an op costs a start for each kernel, and nobody pays more than he gains") {
  Cluster cluster = RoundCluster(1);
  cluster.gpus_per_node = 1;
  cluster.node_cores = 4;
  Profile profile = RoundProfile();
  profile.overlap.shared_work.value = 0.8;
  profile.overlap.loop_start.value = Seconds(30e-6);
  // 1 ms: 0.2 ms by one thread, 0.8 ms by four, and the start.
  const SharedTime shared = ShareAmongThreads(Seconds(1e-3), cluster, profile);
  CHECK(shared.time.value * 1e6 == doctest::Approx(430));
  CHECK(shared.cores == doctest::Approx(1 / 0.43).epsilon(1e-9));
  // Sharing saves 60 % of an op: 50 us are the least that is worth 30.
  CHECK(ShareAmongThreads(Seconds(49e-6), cluster, profile).time.value == 49e-6);
  CHECK(ShareAmongThreads(Seconds(49e-6), cluster, profile).cores == 1);
  CHECK(ShareAmongThreads(Seconds(51e-6), cluster, profile).time.value * 1e6 ==
        doctest::Approx(50.4));
  cluster.rank_threads = 1;
  CHECK(ShareAmongThreads(Seconds(1e-3), cluster, profile).time.value == 1e-3);
  cluster.rank_threads = 2;
  CHECK(ShareAmongThreads(Seconds(1e-3), cluster, profile).time.value * 1e6 ==
        doctest::Approx(630));
}

TEST_CASE("As many cores as anything can use change nothing") {
  Cluster cluster = RoundCluster(1);
  const Program program = Gpt2(8);
  const auto usable = static_cast<double>(8 * 2 * kStreamCount);
  cluster.rank_threads = 1;
  cluster.node_cores = 2 * usable;
  const SimTime alone = StepOf(program, cluster, RoundProfile());
  cluster.node_cores = usable;
  CHECK(StepOf(program, cluster, RoundProfile()) == alone);
  cluster.node_cores = 8;
  CHECK(StepOf(program, cluster, RoundProfile()) > alone);
}

TEST_CASE("Half the cores take twice as long, once all are in use") {
  Cluster cluster = RoundCluster(1);
  cluster.gpus_per_node = 1;
  const Program program = Gpt2(1);
  Profile profile = RoundProfile();
  profile.host = {};
  cluster.node_cores = 1;
  const auto one = static_cast<double>(StepOf(program, cluster, profile).value);
  cluster.node_cores = 0.5;
  const auto half = static_cast<double>(StepOf(program, cluster, profile).value);
  CHECK(half == doctest::Approx(2 * one).epsilon(1e-6));
  // Two ranks on one core, one node: either way of saying it.
  cluster.node_cores = 0;
  cluster.machine_cores = 0.5;
  CHECK(static_cast<double>(StepOf(program, cluster, profile).value) == half);
}

TEST_CASE("Emulated nodes share one machine, real ones do not") {
  Cluster cluster = RoundCluster(2);
  cluster.node_cores = 4;
  CHECK(cluster.SharedCores() == 4);
  CHECK(cluster.RanksOnCores() == 8);
  cluster.node_cores = 0;
  cluster.machine_cores = 4;
  CHECK(cluster.RanksOnCores() == 16);
}

TEST_CASE("An op wants a core, the host's issuing beside it, a collective what it copies") {
  Cluster cluster = RoundCluster(1);
  Kernel update;
  update.kind = KernelClass::kOptimizer;
  update.read = Bytes(10'000'000);  // at 40 % of 1 TB/s: 25 us, and a gap of 1 us
  Program program;
  program.groups = {{"all", 8, 1}};
  program.kernels = {update};
  OpShape step;
  step.code = OpCode::kOptimizerStep;
  step.kernel_count = 1;
  OpShape gather;
  gather.code = OpCode::kAllGather;
  gather.stream = Stream::kGather;
  gather.group = GroupId(0);
  // 8 ranks, 320 GB/s, 10 us + 7 us: 892 us. A thread reads and writes 7/8 of it at 800 GB/s: 700.
  gather.bytes = Bytes(320'000'000);
  program.shapes = {step, gather};
  const PriceTable apart = PriceProgram(program, cluster, RoundProfile());
  for (const ContentionClass& load : apart.contention.classes) {
    CHECK(load.cores == 0);
  }
  cluster.node_cores = 2;
  const PriceTable shared = PriceProgram(program, cluster, RoundProfile());
  CHECK(shared.contention.cores == 2);
  CHECK(shared.contention.ranks_on_cores == 8);
  const auto cores = [&](std::size_t i) {
    return shared.contention.classes[shared.prices[i].contention_class].cores;
  };
  CHECK(cores(0) == doctest::Approx(1 + 7.0 / 26).epsilon(1.0 / 64));
  CHECK(cores(1) == doctest::Approx(700.0 / 892).epsilon(1.0 / 64));
  CHECK(shared.prices[0].duration == apart.prices[0].duration);
}

TEST_CASE("The norm of gradients and their scaling have rates of their own, if known") {
  Kernel pass;
  pass.kind = KernelClass::kOptimizer;
  pass.read = Bytes(40'000'000);  // at 40 % of 1 TB/s: 100 us, and a gap of 1 us
  Program program;
  program.kernels = {pass};
  for (const OpCode code : {OpCode::kOptimizerStep, OpCode::kGradNorm, OpCode::kGradClip}) {
    OpShape shape;
    shape.code = code;
    shape.kernel_count = 1;
    program.shapes.push_back(shape);
  }
  Profile profile = RoundProfile();
  const auto micros = [&](std::size_t i) {
    return ToSeconds(PriceProgram(program, RoundCluster(1), profile).prices[i].duration).value *
           1e6;
  };
  CHECK(micros(0) == doctest::Approx(101));
  CHECK(micros(1) == doctest::Approx(101));
  CHECK(micros(2) == doctest::Approx(101));
  profile.compute.grad_norm.value = 0.1;
  profile.compute.grad_clip.value = 0.8;
  CHECK(micros(0) == doctest::Approx(101));
  CHECK(micros(1) == doctest::Approx(401));
  CHECK(micros(2) == doctest::Approx(51));
}

}  // namespace
}  // namespace shardwright
