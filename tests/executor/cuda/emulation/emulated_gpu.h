#pragma once

// A GPU that is none: its memory is ordinary memory, its kernels are loops on the CPU, its streams
// are queues that advance in a random legal order whenever somebody waits. What is missing an event
// between two streams therefore computes wrong numbers here, without a GPU.

#include <cstdint>
#include <functional>
#include <memory>

#include "executor/cuda/gpu.h"

namespace shardwright {

struct EmulationOptions {
  std::uint64_t seed = 1;  // of the order in which streams advance
  Bytes memory{0};         // 0: as much as this machine has
  std::int64_t shared_bytes = std::int64_t{160} << 10;
};

// What a GpuStream of an emulated GPU points to, for libraries that put work of their own on
// streams.
class EmulatedStream {
 public:
  EmulatedStream() = default;
  EmulatedStream(const EmulatedStream&) = delete;
  EmulatedStream& operator=(const EmulatedStream&) = delete;
  virtual ~EmulatedStream() = default;
  // `step` is asked, again and again once the stream has come to it, whether it is over.
  virtual void Push(std::function<bool()> step) = 0;
};

[[nodiscard]] std::unique_ptr<Gpu> MakeEmulatedGpu(const EmulationOptions& options);

}  // namespace shardwright
