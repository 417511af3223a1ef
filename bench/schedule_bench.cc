// What precedes a simulation, stage by stage, for Llama-3-70B on 1,024 GPUs (fsdp2, blocks, full
// recompute). Each bench checks its result, so that a fast wrong answer fails.
//
//   build/bench/schedule_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true

#include <benchmark/benchmark.h>

#include "core/error.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/place.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

struct Setup {
  Model model;
  Job job;
  Plan plan;

  Setup() : model(LoadModel("llama-3-70b", {8192, 0, ""})) {
    job.sequence_length = 8192;
    plan.dialect = Dialect::kFsdp2;
    plan.shard_size = 1024;
    plan.units = Wrap(model, ParseWrap("block", "bench"), {}, plan.dialect, "bench");
    plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "bench");
  }
  [[nodiscard]] Program LowerIt() const {
    return Lower({model, FindKernelSet("torch-eager", "bench"), job, plan});
  }
};

void BM_LowerVerifyPlace(benchmark::State& state) {
  const Setup setup;
  for (auto _ : state) {
    const Program program = setup.LowerIt();
    SW_CHECK(Verify(program).empty());
    const Placement placement = Place(program);
    SW_CHECK(placement.device_size >= PeakInUse(program));
    benchmark::DoNotOptimize(placement.device_size);
  }
}
BENCHMARK(BM_LowerVerifyPlace)->Unit(benchmark::kMillisecond);

void BM_Lower(benchmark::State& state) {
  const Setup setup;
  for (auto _ : state) {
    benchmark::DoNotOptimize(setup.LowerIt().step.ops.size());
  }
}
BENCHMARK(BM_Lower)->Unit(benchmark::kMillisecond);

void BM_Verify(benchmark::State& state) {
  const Program program = Setup().LowerIt();
  for (auto _ : state) {
    SW_CHECK(Verify(program).empty());
  }
}
BENCHMARK(BM_Verify)->Unit(benchmark::kMillisecond);

void BM_Place(benchmark::State& state) {
  const Program program = Setup().LowerIt();
  for (auto _ : state) {
    benchmark::DoNotOptimize(Place(program).device_size);
  }
  state.counters["arena_over_allocated"] =
      Ratio(Place(program).device_size, PeakAllocated(program));
}
BENCHMARK(BM_Place)->Unit(benchmark::kMillisecond);

void BM_LoadCluster(benchmark::State& state) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(LoadCluster("dgx-h100", 12500, 0).node_count);
  }
}
BENCHMARK(BM_LoadCluster)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
