// Microseconds of one launch: the shortest of four runs between two events.
//
// Example: 310, 42, 41 and 43 us give 41. The first run loads the kernel. The shortest counts,
// since other work on the GPU can only lengthen a run.

#include "executor/cuda/cuda_product_timer.h"

#include <algorithm>
#include <limits>

#include <cuda_runtime_api.h>

#include "executor/cuda/cuda_check.h"

namespace shardwright {
namespace {

class CudaProductTimer : public ProductTimer {
 public:
  explicit CudaProductTimer(int device) : device_(device) {
    Check(cudaSetDevice(device_), "cudaSetDevice");
    Check(cudaEventCreate(&first_), "cudaEventCreate");
    Check(cudaEventCreate(&last_), "cudaEventCreate");
  }
  ~CudaProductTimer() override {
    (void)cudaEventDestroy(first_);
    (void)cudaEventDestroy(last_);
  }

  [[nodiscard]] bool CanTime(void* stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
           status == cudaStreamCaptureStatusNone;
  }

  [[nodiscard]] double Time(const std::function<void()>& launch, void* stream) override {
    constexpr int kRuns = 4;  // the first one loads the kernel
    const auto on = static_cast<cudaStream_t>(stream);
    double least = std::numeric_limits<double>::infinity();
    for (int run = 0; run < kRuns; ++run) {
      Check(cudaEventRecord(first_, on), "cudaEventRecord");
      launch();
      Check(cudaEventRecord(last_, on), "cudaEventRecord");
      Check(cudaEventSynchronize(last_), "cudaEventSynchronize");
      float milliseconds = 0.0F;
      Check(cudaEventElapsedTime(&milliseconds, first_, last_), "cudaEventElapsedTime");
      least = std::min(least, static_cast<double>(milliseconds) * 1e3);
    }
    return least;
  }

  [[nodiscard]] std::shared_ptr<void> Borrow(std::int64_t bytes) override {
    void* memory = nullptr;
    if (cudaMalloc(&memory, static_cast<std::size_t>(bytes)) != cudaSuccess) {
      (void)cudaGetLastError();  // none to spare is an answer
      return nullptr;
    }
    return {memory, [](void* borrowed) { (void)cudaFree(borrowed); }};
  }

 private:
  const int device_;
  cudaEvent_t first_ = nullptr, last_ = nullptr;
};

}  // namespace

std::unique_ptr<ProductTimer> MakeCudaProductTimer(int device) {
  return std::make_unique<CudaProductTimer>(device);
}

}  // namespace shardwright
