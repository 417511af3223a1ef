// Speed of the simulator on Llama-3-70B, fsdp2, one block per unit, full recompute, on DGX H100:
// with and without contention, for 8 to 16,384 ranks and 1 to 64 micro-batches. A run fails when it
// allocates memory after warm-up.
//
//   ops/s     device and host ops whose times were computed, per second
//   allocs    calls of operator new per simulation after warm-up; must be 0

#include <cstdint>
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

void Run(benchmark::State& state, bool contention) {
  const Setting& setting = SettingFor(state.range(0), state.range(1));
  Simulator simulator(setting.cluster, setting.profile);
  SimulateOptions options;
  options.reserved = false;
  options.contention = contention;
  SimulationResult result = simulator.Run(setting.program, options);  // warm-up
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

void BM_Contended(benchmark::State& state) {
  Run(state, true);
}
void BM_Uncontended(benchmark::State& state) {
  Run(state, false);
}

// Nodes of 8 GPUs, micro-batches. The plan of the README has 128 nodes.
void Sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"nodes", "micro_batches"})->Unit(benchmark::kMicrosecond);
  for (const std::int64_t nodes : {1, 128, 2048}) {
    bench->Args({nodes, 1});
  }
  bench->Args({128, 8});
}
BENCHMARK(BM_Contended)->Apply(Sizes)->Args({128, 64});
BENCHMARK(BM_Uncontended)->Apply(Sizes)->Args({128, 64});

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
