#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/fake_nccl.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {

std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t seed) {
  return MakeEmulatedGpu({.seed = seed});
}

std::string LoadTestNccl(NcclTable* table) {
  *table = FakeNccl();
  return {};
}

}  // namespace shardwright::testing
