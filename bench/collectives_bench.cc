// In-process collectives of four ranks beside a plain memcpy of the same bytes by the same number
// of threads, in one program. Rates count the bytes that all ranks receive. Wall time means
// something only with as many free cores as ranks; CPU time is that of the whole process.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "executor/call.h"
#include "executor/host/clock.h"
#include "executor/host/communicator.h"
#include "executor/host/fault.h"

namespace shardwright {
namespace {

constexpr int kRanks = 4;

// Memory of all ranks: what each sends and what each receives. All pages are touched.
struct Arrays {
  explicit Arrays(std::int64_t gathered) : part(gathered / kRanks) {
    for (int r = 0; r < kRanks; ++r) {
      send.emplace_back(static_cast<std::size_t>(part), static_cast<std::byte>(r + 1));
      receive.emplace_back(static_cast<std::size_t>(gathered));
    }
  }
  // Every rank has received what each one sends.
  [[nodiscard]] bool IsGathered() const {
    for (const std::vector<std::byte>& whole : receive) {
      for (int r = 0; r < kRanks; ++r) {
        const auto begin = whole.begin() + r * part;
        if (!std::equal(begin, begin + part, send[static_cast<std::size_t>(r)].begin())) {
          return false;
        }
      }
    }
    return true;
  }

  std::int64_t part = 0;  // bytes
  std::vector<std::vector<std::byte>> send, receive;
};

struct World {
  explicit World(std::int64_t gathered) : arrays(gathered) {}

  Arrays arrays;
  RunClock clock;
  FaultBoard faults;
  ThreadCommunicator communicator{{kRanks, 0, 1}, std::chrono::milliseconds(60000), clock, faults};
};
// Made by the first thread of a benchmark, used by all.
std::unique_ptr<World> world;

void SetUp(const benchmark::State& state) {
  world = std::make_unique<World>(state.range(0));
}

void TearDown(const benchmark::State&) {
  world.reset();
}

// Called by each thread behind its loop.
void Finish(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * state.range(0));
  if (state.thread_index() == 0 && !world->arrays.IsGathered()) {
    state.SkipWithError("the bytes are wrong");
  }
}

void BM_Memcpy(benchmark::State& state) {
  const auto me = static_cast<std::size_t>(state.thread_index());
  Arrays& arrays = world->arrays;
  for (auto _ : state) {
    for (std::size_t k = 0; k < kRanks; ++k) {
      const std::size_t from = (me + k) % kRanks;
      std::memcpy(arrays.receive[me].data() + static_cast<std::int64_t>(from) * arrays.part,
                  arrays.send[from].data(), static_cast<std::size_t>(arrays.part));
    }
    benchmark::ClobberMemory();
  }
  Finish(state);
}

void BM_AllGather(benchmark::State& state) {
  const auto me = static_cast<std::size_t>(state.thread_index());
  CollectiveCall call;
  call.code = OpCode::kAllGather;
  call.dtype = DType::kFp32;
  call.elements = state.range(0) / 4;
  call.send = world->arrays.send[me].data();
  call.receive = world->arrays.receive[me].data();
  const std::string name = "all_gather";
  for (auto _ : state) {
    (void)world->communicator.Run(state.thread_index(), call, name, world->clock.Now(), SimTime(0));
  }
  Finish(state);
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  for (const std::int64_t mebibytes : {1, 16, 64}) {
    benchmark->Arg(mebibytes << 20);
  }
  benchmark->Setup(SetUp)->Teardown(TearDown)->Threads(kRanks)->MeasureProcessCPUTime();
  benchmark->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(BM_Memcpy)->Apply(Sizes);
BENCHMARK(BM_AllGather)->Apply(Sizes);

}  // namespace
}  // namespace shardwright

BENCHMARK_MAIN();
