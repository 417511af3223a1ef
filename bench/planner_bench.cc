// Time of a whole search from model to plan, by model and cluster, and its growth in layers, ranks
// and gradient accumulation. Counters: step time, proven gap and plans simulated, so that a faster
// search that finds less is seen. Run on an idle machine; two threads.

#include <cstdint>
#include <string>

#include <benchmark/benchmark.h>

#include "planner/search.h"
#include "schedule/plan_file.h"

namespace {

using namespace shardwright;  // NOLINT(google-build-using-namespace): one file, no library

struct Setting {
  std::string model, cluster;
  std::int64_t nodes = 1, sequence = 2048, batch = 8;
};

void RunSearch(benchmark::State& state, const Setting& setting) {
  Problem problem;
  problem.cluster = LoadCluster(setting.cluster, setting.nodes);
  problem.kernels = FindKernelSet("torch-eager", "bench");
  problem.profile = DefaultProfile(problem.cluster.gpu, problem.kernels.name);
  problem.job.sequence_length = setting.sequence;
  problem.job.global_batch = setting.batch;
  problem.model = LoadModelForJob(setting.model, problem.job, Path("bench"));
  SearchOptions options;
  options.base.dialect = Dialect::kNative;
  options.threads = 2;
  SearchResult result;
  for (auto _ : state) {
    result = Search(problem, options);
  }
  if (!result.is_feasible) {
    state.SkipWithError("nothing fits");
    return;
  }
  state.counters["step_s"] = result.best.step_time.value;
  state.counters["gap_percent"] = 100 * result.proven_gap;
  state.counters["simulated"] = static_cast<double>(result.simulated);
}

void BM_Gpt2On8(benchmark::State& state) {
  RunSearch(state, {"gpt2", "dgx-h100", 1, 1024, 64});
}
void BM_Llama70bOn1024(benchmark::State& state) {
  RunSearch(state, {"llama-3-70b", "dgx-h100", 128, 8192, 1024});
}
void BM_Llama405bOn16384(benchmark::State& state) {
  RunSearch(state, {"llama-3.1-405b", "dgx-h100", 2048, 8192, 16384});
}
void BM_Llama70bOnP4d(benchmark::State& state) {
  RunSearch(state, {"llama-3-70b", "p4d", 128, 4096, 1024});
}
void BM_Llama7bOn4090(benchmark::State& state) {
  RunSearch(state, {"llama-2-7b", "pcie-8x4090", 1, 2048, 16});
}
// Needs nearly all of the memory that there is.
void BM_Llama13bAtMemoryLimit(benchmark::State& state) {
  RunSearch(state, {"llama-2-13b", "dgx-a100-40", 1, 4096, 8});
}
// Ranks: 8 to 16,384, one sample each.
void BM_Ranks(benchmark::State& state) {
  const std::int64_t nodes = state.range(0);
  RunSearch(state, {"llama-3-8b", "dgx-h100", nodes, 4096, 8 * nodes});
}
// Samples per rank: 8 to 512, so that up to as many micro-batches are accumulated.
void BM_Accumulation(benchmark::State& state) {
  RunSearch(state, {"llama-3-8b", "dgx-h100", 1, 2048, 8 * state.range(0)});
}
// Layers: GPT-2's 12, 24, 36 and 48.
void BM_Layers(benchmark::State& state, const char* model) {
  RunSearch(state, {model, "dgx-h100", 2, 1024, 64});
}

BENCHMARK(BM_Gpt2On8)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Llama70bOn1024)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Llama405bOn16384)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Llama70bOnP4d)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Llama7bOn4090)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Llama13bAtMemoryLimit)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Ranks)
    ->RangeMultiplier(8)
    ->Range(1, 2048)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(BM_Accumulation)
    ->RangeMultiplier(8)
    ->Range(8, 512)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Layers, gpt2, "gpt2")->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(BM_Layers, gpt2_medium, "gpt2-medium")
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Layers, gpt2_large, "gpt2-large")
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(BM_Layers, gpt2_xl, "gpt2-xl")->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
