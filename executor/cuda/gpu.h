#pragma once

// One GPU as the CUDA device sees it: the only place behind which CUDA is. Two implementations: the
// real one lies in libshardwright_cuda.so, which is loaded with dlopen, so that the program starts
// everywhere; the emulated one (executor/cuda/emulation) runs kernels as loops on the CPU, for
// tests. Neither header nor caller names a CUDA type.

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/units.h"
#include "executor/cuda/kernels/attention_tile.h"
#include "executor/cuda/kernels/convolution.h"
#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright {

struct GpuInfo {
  std::string name;
  Bytes memory;
  std::int64_t multiprocessors = 0;
  int major = 0, minor = 0;       // compute capability
  std::int64_t shared_bytes = 0;  // of one block, at most
  int driver_version = 0;         // as CUDA numbers it: 13000
  std::string library;            // who multiplies matrices, "own kernels" without cuBLASLt
};

// Of the GPU that made them. Null: none.
struct GpuStream {
  void* value = nullptr;
};
struct GpuEvent {
  void* value = nullptr;
};
struct GpuGraph {
  void* value = nullptr;
};

struct KernelLaunch {
  gpu::KernelId kernel = gpu::KernelId::kMap;
  std::int64_t blocks = 0;
  int threads = 0;
  std::int64_t shared_bytes = 0;
  const void* args = nullptr;  // the kernel's Args; copied
  std::size_t args_bytes = 0;
};

enum class ConvPass : std::uint8_t { kForward, kDataGrad, kWeightGrad };

// All functions throw RunError with CUDA's text when the GPU refuses. Work goes to streams, which
// run in order; functions without a stream act at once. One object may be used by several threads.
class Gpu {
 public:
  Gpu() = default;
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  virtual ~Gpu() = default;

  [[nodiscard]] virtual const GpuInfo& Info() const = 0;
  // Makes it the calling thread's GPU, for libraries that ask CUDA which one is meant.
  virtual void MakeCurrent() {}

  // For profilers: what this thread submits until EndRange belongs to the op of this name.
  virtual void BeginRange(const char* /*name*/) {}
  virtual void EndRange() {}

  // Memory with arbitrary content; `on_host`: pinned. Freed with the object.
  [[nodiscard]] virtual std::byte* Allocate(Bytes size, bool on_host) = 0;
  [[nodiscard]] virtual Bytes FreeMemory() = 0;

  // Streams and events live as long as the object.
  [[nodiscard]] virtual GpuStream NewStream(bool high_priority) = 0;
  [[nodiscard]] virtual GpuEvent NewEvent(bool timed) = 0;
  virtual void Record(GpuEvent event, GpuStream stream) = 0;
  // Work submitted to the stream from now on starts behind the event's last record.
  virtual void WaitFor(GpuStream stream, GpuEvent event) = 0;
  [[nodiscard]] virtual bool IsOver(GpuEvent event) = 0;
  virtual void Synchronize(GpuEvent event) = 0;
  // Between two timed events that are over.
  [[nodiscard]] virtual SimTime Between(GpuEvent first, GpuEvent second) = 0;

  // Between any two of device and pinned memory.
  virtual void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) = 0;
  virtual void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) = 0;
  virtual void Launch(const KernelLaunch& launch, GpuStream stream) = 0;
  // The product by a library, if there is one that takes it; false: nothing was done. `workspace`
  // is device memory.
  [[nodiscard]] virtual bool Multiply(const gpu::GemmArgs& product, void* workspace,
                                      std::int64_t workspace_bytes, GpuStream stream) = 0;
  // The same for attention and convolutions; most GPUs' libraries have neither.
  [[nodiscard]] virtual bool Attend(const gpu::AttentionArgs& /*args*/, bool /*is_backward*/,
                                    void* /*workspace*/, std::int64_t /*workspace_bytes*/,
                                    GpuStream /*stream*/) {
    return false;
  }
  [[nodiscard]] virtual bool Convolve(const gpu::ConvArgs& /*args*/, ConvPass /*pass*/,
                                      void* /*workspace*/, std::int64_t /*workspace_bytes*/,
                                      GpuStream /*stream*/) {
    return false;
  }

  // A graph of what this thread submits to the stream between two calls; none of it runs. Meanwhile
  // the thread may do nothing but submit to streams, and records and waits for no event of this
  // one; other threads are not concerned. EndCapture throws, too, when something could not be
  // captured. Graphs live as long as the object.
  virtual void BeginCapture(GpuStream stream) = 0;
  [[nodiscard]] virtual GpuGraph EndCapture(GpuStream stream) = 0;
  // Ends a capture that failed, if the stream is in one, and makes no graph.
  virtual void DropCapture(GpuStream stream) noexcept = 0;
  virtual void LaunchGraph(GpuGraph graph, GpuStream stream) = 0;
};

// Launches a kernel with its typed arguments.
template <class Kernel>
void LaunchKernel(Gpu& gpu, GpuStream stream, std::int64_t blocks, std::int64_t shared_bytes,
                  const typename Kernel::Args& args) {
  if (blocks == 0) {
    return;
  }
  gpu.Launch({.kernel = Kernel::kId,
              .blocks = blocks,
              .threads = Kernel::kThreads,
              .shared_bytes = shared_bytes,
              .args = &args,
              .args_bytes = sizeof args},
             stream);
}

}  // namespace shardwright
