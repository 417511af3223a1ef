// Speed of the simulator on Llama-3-70B, fsdp2, one block per unit, full recompute, on DGX H100:
// exact and periodic, with and without contention, for 8 to 16,384 ranks and 1 to 64 micro-batches.
// A run fails when a mode changes the predicted time or when it allocates memory after warm-up.
//
//   ops/s     device and host ops whose times were computed, per second (exact mode)
//   allocs    calls of operator new per simulation after warm-up; must be 0

#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <utility>

#include <benchmark/benchmark.h>

#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/plan.h"
#include "schedule/wrap.h"
#include "simulator/simulate.h"
#include "tests/counting_new.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

struct Setting {
  Cluster cluster;
  Profile profile;
  Program program;
};

const Setting& SettingFor(std::int64_t nodes, std::int64_t accumulation) {
  static std::map<std::pair<std::int64_t, std::int64_t>, std::unique_ptr<Setting>> settings;
  std::unique_ptr<Setting>& setting = settings[{nodes, accumulation}];
  if (setting == nullptr) {
    setting = std::make_unique<Setting>();
    setting->cluster = LoadCluster("dgx-h100", nodes);
    const KernelSetOptions& kernels = FindKernelSet("torch-eager", "bench");
    setting->profile = DefaultProfile(setting->cluster.gpu, kernels.name);
    const Model model = LoadModel("llama-3-70b", {.sequence_length = 8192});
    Job job;
    job.sequence_length = 8192;
    Plan plan;
    plan.dialect = Dialect::kFsdp2;
    plan.shard_size = setting->cluster.RankCount();
    plan.accumulation = accumulation;
    job.global_batch = plan.shard_size * accumulation;
    plan.units = Wrap(model, ParseWrap("block", "bench"), {}, plan.dialect, "bench");
    plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "bench");
    setting->program = Lower({model, kernels, job, plan});
  }
  return *setting;
}

void Run(benchmark::State& state, bool periodic, bool contention) {
  const Setting& setting = SettingFor(state.range(0), state.range(1));
  Simulator simulator(setting.cluster, setting.profile);
  SimulateOptions options;
  options.reserved = false;
  options.contention = contention;
  options.periodic = false;
  const SimulationResult exact = simulator.Run(setting.program, options);
  options.periodic = periodic;
  SimulationResult result = simulator.Run(setting.program, options);  // warm-up
  const double difference = static_cast<double>((result.step_time - exact.step_time).value) /
                            static_cast<double>(exact.step_time.value);
  if (difference > 1e-9 || difference < -1e-9 ||
      !(result.memory.allocated == exact.memory.allocated)) {
    state.SkipWithError("periodic and exact mode differ");
    return;
  }
  std::int64_t allocations = 0;
  std::int64_t ops = 0;
  std::int64_t runs = 0;
  for (auto _ : state) {
    const std::int64_t allocations_before = host_allocation_count;
    result = simulator.Run(setting.program, options);
    allocations += host_allocation_count - allocations_before;
    benchmark::DoNotOptimize(result.step_time);
    ops += result.timing.simulated_ops;
    ++runs;
  }
  state.counters["ops"] = static_cast<double>(setting.program.step.size());
  state.counters["steps"] = result.timing.steps;
  state.counters["simulated"] = static_cast<double>(result.timing.simulated_ops);
  state.counters["ops/s"] =
      benchmark::Counter(static_cast<double>(ops), benchmark::Counter::kIsRate);
  if (allocations > 0) {
    state.SkipWithError("a simulation allocated memory after warm-up");
    return;
  }
  state.counters["allocs"] = static_cast<double>(allocations) / static_cast<double>(runs);
  state.counters["step_s"] = ToSeconds(result.step_time).value;
}

void BM_ExactContended(benchmark::State& state) {
  Run(state, false, true);
}
void BM_ExactUncontended(benchmark::State& state) {
  Run(state, false, false);
}
void BM_PeriodicContended(benchmark::State& state) {
  Run(state, true, true);
}
void BM_PeriodicUncontended(benchmark::State& state) {
  Run(state, true, false);
}

// Nodes of 8 GPUs, micro-batches. The plan of the README has 128 nodes.
void Sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"nodes", "micro_batches"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t nodes : {1, 128, 2048}) {
    bench->Args({nodes, 1});
  }
  bench->Args({128, 8});
}
BENCHMARK(BM_ExactContended)->Apply(Sizes);
BENCHMARK(BM_ExactUncontended)->Apply(Sizes);
BENCHMARK(BM_PeriodicContended)->Apply(Sizes)->Args({128, 64});
BENCHMARK(BM_PeriodicUncontended)->Apply(Sizes)->Args({128, 64});

double ProcessSeconds() {
  timespec now{};
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// CPU time of periodic mode with 8 micro-batches over that with one, both in turns.
void BM_AccumulationRatio(benchmark::State& state) {
  SimulateOptions options;
  options.reserved = false;
  options.contention = state.range(0) != 0;
  std::unique_ptr<Simulator> simulators[2];
  double seconds[2] = {0, 0};
  for (auto _ : state) {
    for (const int i : {0, 1}) {
      const Setting& setting = SettingFor(128, i == 0 ? 1 : 8);
      if (simulators[i] == nullptr) {
        simulators[i] = std::make_unique<Simulator>(setting.cluster, setting.profile);
        (void)simulators[i]->Run(setting.program, options);  // warm-up
      }
      const double before = ProcessSeconds();
      benchmark::DoNotOptimize(simulators[i]->Run(setting.program, options).step_time);
      seconds[i] += ProcessSeconds() - before;
    }
  }
  state.counters["ratio"] = seconds[1] / seconds[0];
}
BENCHMARK(BM_AccumulationRatio)
    ->ArgNames({"contention"})
    ->Arg(1)
    ->Arg(0)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
