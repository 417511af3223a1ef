#pragma once

// The GPU that the tests of the CUDA device run on. The host reaches its device memory by copies
// only, since a real one's is on the card.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "executor/cuda/gpu.h"
#include "executor/cuda/nccl.h"

namespace shardwright::testing {

// `seed`: of the order in which an emulated GPU's streams advance; a real one has its own.
[[nodiscard]] std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t seed);

// Copies between device memory and memory of the host that need not be pinned; both wait.
void Put(Gpu& gpu, void* device, const void* host, std::int64_t bytes);
void Get(Gpu& gpu, void* host, const void* device, std::int64_t bytes);

// New device memory with the elements, and the elements of device memory.
template <class T>
[[nodiscard]] T* ToGpu(Gpu& gpu, const std::vector<T>& elements) {
  const auto bytes = static_cast<std::int64_t>(elements.size() * sizeof(T));
  std::byte* const device = gpu.Allocate(Bytes(bytes), false);
  Put(gpu, device, elements.data(), bytes);
  return reinterpret_cast<T*>(device);
}
template <class T>
[[nodiscard]] std::vector<T> FromGpu(Gpu& gpu, const T* device, std::int64_t count) {
  std::vector<T> elements(static_cast<std::size_t>(count));
  Get(gpu, elements.data(), device, count * static_cast<std::int64_t>(sizeof(T)));
  return elements;
}

// NCCL for those GPUs. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadTestNccl(NcclTable* table);

}  // namespace shardwright::testing
