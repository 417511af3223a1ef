#include "executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {

std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t seed) {
  return MakeEmulatedGpu({.seed = seed});
}

}  // namespace shardwright::testing
