// Speed of the caching allocator's model in pairs of Alloc and Free per second, on the patterns
// that a simulation replays. A run fails when the replay changes what is reserved from one round to
// the next, or when it allocates host memory after warm-up.

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include "core/units.h"
#include "simulator/caching_allocator.h"
#include "tests/counting_new.h"

namespace shardwright {
namespace {

struct Step {
  std::int64_t alloc_bytes = 0;  // 0: free
  int stream = 0;
  std::uint32_t buffer = 0;
  bool has_foreign_use = false;  // the free records a use on the other stream
};

// One training step in the manner of FSDP1: gather buffers come from stream 1 and are used on
// stream 0; each layer keeps `tensors` activations until its backward, which makes as many
// short-lived gradients.
std::vector<Step> TrainingStep(int layers, int tensors) {
  std::mt19937_64 random(7);
  std::vector<Step> steps;
  std::uint32_t next_buffer = 0;
  const auto gather = [&](int layer) {
    steps.push_back({(400 + layer % 3) * kMiB.value, 1, next_buffer, false});
    return next_buffer++;
  };
  std::vector<std::vector<std::uint32_t>> kept(static_cast<std::size_t>(layers));
  std::vector<std::int64_t> sizes;
  for (int t = 0; t < tensors; ++t) {
    // From 512 B to 128 MiB, so that both pools and all segment sizes occur.
    const auto scale = std::int64_t{512} << (random() % 19);
    sizes.push_back(scale + static_cast<std::int64_t>(random() % static_cast<unsigned>(scale)));
  }
  for (int layer = 0; layer < layers; ++layer) {
    const std::uint32_t weights = gather(layer);
    for (const std::int64_t size : sizes) {
      kept[static_cast<std::size_t>(layer)].push_back(next_buffer);
      steps.push_back({size, 0, next_buffer++, false});
    }
    steps.push_back({0, 0, weights, true});
  }
  for (int layer = layers - 1; layer >= 0; --layer) {
    const std::uint32_t weights = gather(layer);
    for (std::size_t t = sizes.size(); t-- > 0;) {
      steps.push_back({sizes[t], 0, next_buffer, false});
      steps.push_back({0, 0, kept[static_cast<std::size_t>(layer)][t], false});
      steps.push_back({0, 0, next_buffer++, false});
    }
    steps.push_back({0, 0, weights, true});
  }
  return steps;
}

// `live` blocks of random sizes; each step frees a random one and allocates another of a random
// size. It ends by freeing all, so that rounds are equal. Random holes keep the free lists about
// live/2 long.
std::vector<Step> RandomChurn(std::uint32_t live, int churn) {
  std::mt19937_64 random(11);
  std::vector<Step> steps;
  std::vector<std::uint32_t> buffers;
  std::uint32_t next_buffer = 0;
  const auto alloc = [&] {
    const auto size = static_cast<std::int64_t>(kMiB.value + 1 + random() % (30u << 20));
    steps.push_back({size, 0, next_buffer, false});
    return next_buffer++;
  };
  for (std::uint32_t i = 0; i < live; ++i) {
    buffers.push_back(alloc());
  }
  for (int i = 0; i < churn; ++i) {
    std::uint32_t& b = buffers[random() % live];
    steps.push_back({0, 0, b, false});
    b = alloc();
  }
  for (const std::uint32_t b : buffers) {
    steps.push_back({0, 0, b, false});
  }
  return steps;
}

// Replays the steps once; each takes 1 us of host time, and uses end 50 us after the free.
void Replay(const std::vector<Step>& steps, CachingAllocator& allocator,
            std::vector<BlockHandle>& handles, SimTime& now) {
  for (const Step& step : steps) {
    now += SimTime(1'000'000);
    if (step.alloc_bytes > 0) {
      handles[step.buffer] = allocator.Alloc(Bytes(step.alloc_bytes), step.stream, now).block;
    } else if (step.has_foreign_use) {
      const PendingUse use{0, now + SimTime(50'000'000)};
      allocator.Free(handles[step.buffer], {&use, 1});
    } else {
      allocator.Free(handles[step.buffer]);
    }
  }
}

void RunReplay(benchmark::State& state, const std::vector<Step>& steps) {
  CachingAllocator allocator({.capacity = Bytes(kGiB * 4096)});
  std::vector<BlockHandle> handles(steps.size());
  SimTime now;
  for (int round = 0; round < 4; ++round) {
    Replay(steps, allocator, handles, now);
  }
  const Bytes reserved = allocator.counters().reserved;
  const std::int64_t allocations_before = host_allocation_count;
  std::int64_t allocations = 0;
  for (auto _ : state) {
    Replay(steps, allocator, handles, now);
  }
  allocations = host_allocation_count - allocations_before;
  if (allocations != 0) {
    state.SkipWithError("the replay allocates host memory after warm-up");
  }
  if (allocator.counters().reserved != reserved || allocator.counters().allocated != Bytes(0)) {
    state.SkipWithError("the replay is not periodic");
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(steps.size() / 2));
  std::size_t blocks = 0;
  for (const AllocatorSegmentView& segment : allocator.Segments()) {
    blocks += segment.blocks.size();
  }
  state.counters["cached_blocks"] = static_cast<double>(blocks);
}

// Arguments: layers, tensors per layer.
void TrainingReplay(benchmark::State& state) {
  RunReplay(state,
            TrainingStep(static_cast<int>(state.range(0)), static_cast<int>(state.range(1))));
}
BENCHMARK(TrainingReplay)->Args({32, 12})->Args({80, 20})->Args({400, 40});

// Argument: live blocks.
void RandomReplay(benchmark::State& state) {
  RunReplay(state, RandomChurn(static_cast<std::uint32_t>(state.range(0)), 20'000));
}
BENCHMARK(RandomReplay)->Arg(20)->Arg(200)->Arg(2'000)->Arg(20'000);

// Time of one fingerprint in the middle of a training step, where most blocks are in use.
void FingerprintOfTraining(benchmark::State& state) {
  std::vector<Step> steps = TrainingStep(80, 20);
  steps.resize(steps.size() / 3);
  CachingAllocator allocator({.capacity = Bytes(kGiB * 4096)});
  std::vector<BlockHandle> handles(steps.size());
  SimTime now;
  Replay(steps, allocator, handles, now);
  std::uint64_t sum = allocator.Fingerprint(now);
  for (auto _ : state) {
    sum += allocator.Fingerprint(now);
  }
  benchmark::DoNotOptimize(sum);
}
BENCHMARK(FingerprintOfTraining);

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
