#pragma once

// The GPU that the tests of the CUDA device run on. Its device memory can be read and written by
// the host.

#include <cstdint>
#include <memory>
#include <string>

#include "executor/cuda/gpu.h"
#include "executor/cuda/nccl.h"

namespace shardwright::testing {

// `seed`: of the order in which an emulated GPU's streams advance; a real one has its own.
[[nodiscard]] std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t seed);

// NCCL for those GPUs. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadTestNccl(NcclTable* table);

}  // namespace shardwright::testing
