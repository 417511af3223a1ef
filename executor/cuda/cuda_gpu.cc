// The real GPU, by the CUDA runtime, and the entry point of libshardwright_cuda.so. The runtime is
// linked statically and loads the driver itself, so that the shared object can be opened on a
// machine without one.
//
// Each function sets the calling thread's device first, since CUDA's current device is per thread,
// and ranks of loopback as well as NCCL's watch call from threads of their own. Every status is
// checked where it comes up; errors of kernels that run later come with a later call.

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#if __has_include(<nvtx3/nvToolsExt.h>)  // a package of its own in NVIDIA's repositories
#include <nvtx3/nvToolsExt.h>
#define SW_HAS_NVTX 1
#endif

#include "core/error.h"
#include "core/printable.h"
#include "executor/cuda/cublaslt.h"
#include "executor/cuda/cuda_check.h"
#include "executor/cuda/cuda_product_timer.h"
#include "executor/cuda/cudnn_plans.h"
#include "executor/cuda/entries.h"
#include "executor/cuda/gpu.h"
#include "executor/cuda/plugin.h"

namespace shardwright {
namespace {

cudaStream_t StreamOf(GpuStream stream) {
  return static_cast<cudaStream_t>(stream.value);
}
cudaEvent_t EventOf(GpuEvent event) {
  return static_cast<cudaEvent_t>(event.value);
}

// Owns streams, events, graphs and memory until the end of the run: nothing is freed in between, so
// no call waits for the GPU as cudaFree does.
class CudaGpu : public Gpu {
 public:
  // A kernel may use 48 KiB of shared memory unless it asks for more. Attention with 128 features
  // takes 111 KiB, so every kernel asks for all that a block can have.
  explicit CudaGpu(int device) : device_(device) {
    Use();
    cudaDeviceProp properties{};
    Check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    info_.name = properties.name;
    info_.memory = Bytes(static_cast<std::int64_t>(properties.totalGlobalMem));
    info_.multiprocessors = properties.multiProcessorCount;
    info_.major = properties.major;
    info_.minor = properties.minor;
    info_.shared_bytes = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
    Check(cudaDriverGetVersion(&info_.driver_version), "cudaDriverGetVersion");
    OpenLibraries();
    for (std::size_t k = 0; k < static_cast<std::size_t>(gpu::KernelId::kCount); ++k) {
      Check(cudaFuncSetAttribute(KernelEntry(static_cast<gpu::KernelId>(k)),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(info_.shared_bytes)),
            "cudaFuncSetAttribute");
    }
  }

  ~CudaGpu() override {
    // Errors are of no use here: the process has its answer, and the driver frees what is left.
    (void)cudaSetDevice(device_);
    for (cudaGraphExec_t graph : graphs_) {
      (void)cudaGraphExecDestroy(graph);
    }
    for (cudaEvent_t event : events_) {
      (void)cudaEventDestroy(event);
    }
    for (cudaStream_t stream : streams_) {
      (void)cudaStreamDestroy(stream);
    }
    for (void* memory : device_memory_) {
      (void)cudaFree(memory);
    }
    for (void* memory : host_memory_) {
      (void)cudaFreeHost(memory);
    }
  }

  [[nodiscard]] const GpuInfo& Info() const override { return info_; }
  void MakeCurrent() override { Use(); }
#ifdef SW_HAS_NVTX
  // Without a profiler these return at once.
  void BeginRange(const char* name) override {
    (void)nvtxRangePushA(name);
  }
  void EndRange() override {
    (void)nvtxRangePop();
  }
#endif

  // Pinned memory is what cudaMemcpyAsync needs to be asynchronous; portable, so that all contexts
  // see it.
  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override {
    Use();
    void* memory = nullptr;
    const auto bytes = static_cast<std::size_t>(size.value > 0 ? size.value : 1);
    if (on_host) {
      Check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    } else {
      Check(cudaMalloc(&memory, bytes), "cudaMalloc");
    }
    const std::lock_guard lock(mutex_);
    (on_host ? host_memory_ : device_memory_).push_back(memory);
    return static_cast<std::byte*>(memory);
  }
  [[nodiscard]] Bytes FreeMemory() override {
    Use();
    std::size_t free = 0;
    std::size_t total = 0;
    Check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return Bytes(static_cast<std::int64_t>(free));
  }

  // Non-blocking: such a stream does not wait for CUDA's default stream, which libraries may use.
  [[nodiscard]] GpuStream NewStream(bool high_priority) override {
    Use();
    int lowest = 0;
    int highest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                       high_priority ? highest : lowest),
          "cudaStreamCreateWithPriority");
    const std::lock_guard lock(mutex_);
    streams_.push_back(stream);
    return {stream};
  }
  [[nodiscard]] GpuEvent NewEvent(bool timed) override {
    Use();
    cudaEvent_t event = nullptr;
    Check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
    return {event};
  }

  void Record(GpuEvent event, GpuStream stream) override {
    Use();
    Check(cudaEventRecord(EventOf(event), StreamOf(stream)), "cudaEventRecord");
  }
  void WaitFor(GpuStream stream, GpuEvent event) override {
    Use();
    Check(cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0), "cudaStreamWaitEvent");
  }
  // "Not ready" is an answer. It is taken back from the thread's last error, where a later check
  // would find it.
  [[nodiscard]] bool IsOver(GpuEvent event) override {
    Use();
    const cudaError_t status = cudaEventQuery(EventOf(event));
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    Check(status, "cudaEventQuery");
    return true;
  }
  void Synchronize(GpuEvent event) override {
    Use();
    Check(cudaEventSynchronize(EventOf(event)), "cudaEventSynchronize");
  }
  // CUDA gives milliseconds as fp32: 24 bits. See MoveAnchor in device.cc.
  [[nodiscard]] SimTime Between(GpuEvent first, GpuEvent second) override {
    Use();
    float milliseconds = 0.0F;
    Check(cudaEventElapsedTime(&milliseconds, EventOf(first), EventOf(second)),
          "cudaEventElapsedTime");
    return ToSimTime(Seconds(static_cast<double>(milliseconds) * 1e-3));
  }

  // CUDA finds the direction from the addresses.
  void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) override {
    Use();
    Check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                          StreamOf(stream)),
          "cudaMemcpyAsync");
  }
  void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) override {
    Use();
    Check(cudaMemsetAsync(to, byte, static_cast<std::size_t>(bytes), StreamOf(stream)),
          "cudaMemsetAsync");
  }
  // Kernels have one argument, their Args by value. A grid has at most 2^31 - 1 blocks: a map over
  // bf16 numbers reaches it at 8.8e12 elements.
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    Use();
    if (launch.blocks > std::numeric_limits<std::int32_t>::max()) {
      throw RunError("cudaLaunchKernel: a grid of " + std::to_string(launch.blocks) + " blocks");
    }
    void* arguments[] = {const_cast<void*>(launch.args)};
    const dim3 grid(static_cast<unsigned>(launch.blocks));
    const dim3 block(static_cast<unsigned>(launch.threads));
    Check(cudaLaunchKernel(KernelEntry(launch.kernel), grid, block, arguments,
                           static_cast<std::size_t>(launch.shared_bytes), StreamOf(stream)),
          "cudaLaunchKernel");
  }
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace,
                              std::int64_t workspace_bytes, GpuStream stream) override {
    Use();
    return library_ != nullptr &&
           library_->Multiply(product, workspace, workspace_bytes, StreamOf(stream));
  }
  // A capture is told, since some versions of cuDNN fail in graphs (cudnn_plans.cc).
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                            std::int64_t workspace_bytes, GpuStream stream) override {
    Use();
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    Check(cudaStreamIsCapturing(StreamOf(stream), &capture), "cudaStreamIsCapturing");
    return cudnn_ != nullptr &&
           cudnn_->Attend(args, is_backward, workspace, workspace_bytes, StreamOf(stream),
                          capture != cudaStreamCaptureStatusNone);
  }
  [[nodiscard]] bool Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                              std::int64_t workspace_bytes, GpuStream stream) override {
    Use();
    return cudnn_ != nullptr &&
           cudnn_->Convolve(args, pass, workspace, workspace_bytes, StreamOf(stream));
  }

  // By thread, so that other ranks' threads (loopback) and NCCL's watch may do what a capture
  // forbids.
  void BeginCapture(GpuStream stream) override {
    Use();
    Check(cudaStreamBeginCapture(StreamOf(stream), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
  }
  [[nodiscard]] GpuGraph EndCapture(GpuStream stream) override {
    cudaGraph_t graph = nullptr;
    Check(cudaStreamEndCapture(StreamOf(stream), &graph), "cudaStreamEndCapture");
    cudaGraphExec_t ready = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
    (void)cudaGraphDestroy(graph);
    Check(status, "cudaGraphInstantiate");
    const std::lock_guard lock(mutex_);
    graphs_.push_back(ready);
    return {ready};
  }
  void DropCapture(GpuStream stream) noexcept override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(StreamOf(stream), &status) == cudaSuccess &&
        status != cudaStreamCaptureStatusNone) {
      cudaGraph_t graph = nullptr;
      (void)cudaStreamEndCapture(StreamOf(stream), &graph);
      if (graph != nullptr) {
        (void)cudaGraphDestroy(graph);
      }
    }
    (void)cudaGetLastError();  // what failed has been said
  }
  void LaunchGraph(GpuGraph graph, GpuStream stream) override {
    Use();
    Check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.value), StreamOf(stream)),
          "cudaGraphLaunch");
  }

 private:
  // A missing library is told; our own kernels do its work.
  void OpenLibraries() {
    CublasLtTable products{};
    std::string missing = LoadCublasLtForGpu(&products);
    if (!missing.empty()) {
      info_.library = "own kernels";
      Say("warning: no cuBLASLt (" + missing +
          "); matrices are multiplied by our own, slower kernel");
    } else {
      library_ = std::make_unique<CublasLt>(products, Say, TuningFor(products));
      info_.library = "cuBLASLt";
      // cuDNN ends the process where it finds no cuBLASLt.
      CudnnTable cudnn{};
      missing = LoadCudnn(&cudnn);
      if (missing.empty()) {
        cudnn_ = std::make_unique<CudnnPlans>(cudnn, Say);
        return;
      }
    }
    Say("warning: no cuDNN (" + missing +
        "); attention and convolutions are computed by our own, slower kernels");
  }

  // Products are timed where SHARDWRIGHT_PRODUCTS names a file for what is found.
  [[nodiscard]] ProductTuning TuningFor(const CublasLtTable& products) {
    const char* const file = std::getenv("SHARDWRIGHT_PRODUCTS");
    if (file == nullptr || *file == '\0') {
      return {};
    }
    choices_ = std::make_unique<ProductChoices>(
        file, info_.name + ", cuBLASLt " + std::to_string(products.version()));
    timer_ = MakeCudaProductTimer(device_);
    return {timer_.get(), choices_.get()};
  }

  // CUDA's current device is per thread.
  void Use() const {
    Check(cudaSetDevice(device_), "cudaSetDevice");
  }

  const int device_;
  GpuInfo info_;
  std::unique_ptr<ProductChoices> choices_;
  std::unique_ptr<ProductTimer> timer_;
  std::unique_ptr<CublasLt> library_;
  std::unique_ptr<CudnnPlans> cudnn_;
  std::mutex mutex_;
  // All guarded by mutex_.
  std::vector<void*> device_memory_, host_memory_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<cudaGraphExec_t> graphs_;
};

// The GPU, or null with the reason: no driver, no GPU, a number out of range, a GPU before Ampere.
std::unique_ptr<Gpu> Open(int device, std::string* problem) {
  // The driver gives streams 8 queues of the hardware; those that share one wait for each other.
  // Our ranks have more streams, under loopback many more. Read when the driver starts.
  (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int driver = 0;
  int runtime = 0;
  int count = 0;
  (void)cudaDriverGetVersion(&driver);
  Check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const cudaError_t status = cudaGetDeviceCount(&count);
  *problem = DescribeNoGpu(status, driver, runtime, count);
  if (!problem->empty()) {
    return nullptr;
  }
  device = VisibleDevice(device, count);
  if (device >= count) {
    *problem = "got GPU " + std::to_string(device) + ", expected 0 to " + std::to_string(count - 1);
    return nullptr;
  }
  auto gpu = std::make_unique<CudaGpu>(device);
  constexpr int kOldest = 8;  // bf16 on tensor cores
  if (gpu->Info().major < kOldest) {
    *problem = gpu->Info().name + " has compute capability " + std::to_string(gpu->Info().major) +
               '.' + std::to_string(gpu->Info().minor) + ", expected 8.0 or later";
    return nullptr;
  }
  return gpu;
}

}  // namespace
}  // namespace shardwright

extern "C" [[gnu::visibility("default")]] shardwright::Gpu* ShardwrightMakeGpu(int version,
                                                                               int device,
                                                                               char* problem,
                                                                               std::size_t size) {
  std::string text = shardwright::DescribeOtherPlugin(version);
  shardwright::Gpu* gpu = nullptr;
  try {
    gpu = text.empty() ? shardwright::Open(device, &text).release() : nullptr;
  } catch (const std::exception& error) {
    text = error.what();
  }
  shardwright::WriteProblem(text, problem, size);
  return gpu;
}
