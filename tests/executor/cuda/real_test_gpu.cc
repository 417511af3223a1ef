// A real GPU: operands are copied to device memory and back, as in a run, since the copy engines of
// Hopper's kernels may refuse pinned memory of the host. Without a GPU the program says why and
// ends as skipped. A call that cuDNN should have taken and did not is a failure, since our own
// kernels would hide it.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/cudnn.h"
#include "executor/cuda/cudnn_problems.h"
#include "executor/cuda/ops/model_ops.h"
#include "executor/cuda/plugin.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/cuda/test_gpu.h"
#include "tests/executor/kernels/harness.h"
#include "tests/skip.h"

namespace shardwright::testing {
namespace {

// Counts calls that are for cuDNN, and those that it took.
class WatchedGpu : public ForwardingGpu {
 public:
  WatchedGpu() : ForwardingGpu(OpenGpu(0)) {}
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                            std::int64_t bytes, GpuStream stream) override {
    const bool is_taken = ForwardingGpu::Attend(args, is_backward, workspace, bytes, stream);
    Count(IsForCudnn(args, is_backward), is_taken);
    return is_taken;
  }
  [[nodiscard]] bool Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                              std::int64_t bytes, GpuStream stream) override {
    const bool is_taken = ForwardingGpu::Convolve(args, pass, workspace, bytes, stream);
    Count(IsForCudnn(args, pass), is_taken);
    return is_taken;
  }

  inline static std::atomic<int> due = 0, taken = 0;

 private:
  static void Count(bool is_due, bool is_taken) {
    due += is_due ? 1 : 0;
    taken += is_taken ? 1 : 0;
  }
};

// Copies of a call's operands in memory that the GPU reaches, and back.
class Mirror {
 public:
  Mirror(Gpu& gpu, std::byte* memory) : gpu_(gpu), next_(memory) {}

  void* Add(void* data, std::int64_t bytes, bool is_written) {
    if (data == nullptr || bytes == 0) {
      return data;
    }
    // Whatever the address was aligned to, the copy is.
    constexpr std::uintptr_t kAlignment = 256;
    next_ += reinterpret_cast<std::uintptr_t>(data) % kAlignment;
    std::byte* const copy = next_;
    Put(gpu_, copy, data, bytes);
    next_ += bytes;
    next_ += (kAlignment - reinterpret_cast<std::uintptr_t>(next_) % kAlignment) % kAlignment;
    if (is_written) {
      results_.push_back({data, copy, bytes});
    }
    return copy;
  }
  void CopyBack() const {
    for (const Result& r : results_) {
      Get(gpu_, r.data, r.copy, r.bytes);
    }
  }

 private:
  struct Result {
    void* data;
    const std::byte* copy;
    std::int64_t bytes;
  };
  Gpu& gpu_;
  std::byte* next_;
  std::vector<Result> results_;
};

struct Bench {
  WatchedGpu gpu;
  GpuStream stream = gpu.NewStream(false);
  GpuEvent event = gpu.NewEvent(false);
  std::byte* memory = gpu.Allocate(Bytes(std::int64_t{64} << 20), false);
  gpu::Fault* fault = reinterpret_cast<gpu::Fault*>(gpu.Allocate(Bytes(sizeof(gpu::Fault)), false));
};

void RunOnGpu(const ModelOpCall& original, bool is_backward) {
  static Bench bench;
  gpu::Fault fault;
  Put(bench.gpu, bench.fault, &fault, sizeof fault);
  ModelOpCall call = original;
  Mirror mirror(bench.gpu, bench.memory);
  const auto read = [&](ConstView& view) {
    view.data = mirror.Add(const_cast<void*>(view.data), view.elements * SizeOf(view.dtype), false);
  };
  const auto written = [&](View& view) {
    view.data = mirror.Add(view.data, view.elements * SizeOf(view.dtype), true);
  };
  std::for_each(call.inputs.begin(), call.inputs.end(), read);
  std::for_each(call.params.begin(), call.params.end(), read);
  std::for_each(call.output_grads.begin(), call.output_grads.end(), read);
  std::for_each(call.outputs.begin(), call.outputs.end(), written);
  std::for_each(call.input_grads.begin(), call.input_grads.end(), written);
  for (ParamGrad& grad : call.param_grads) {
    written(grad.view);
  }
  const auto bytes_of = [&](std::span<std::byte> memory) {
    const auto size = static_cast<std::int64_t>(memory.size());
    return std::span(static_cast<std::byte*>(mirror.Add(memory.data(), size, true)), memory.size());
  };
  call.saved = bytes_of(call.saved);
  call.workspace = bytes_of(call.workspace);
  call.exchange = bytes_of(call.exchange);
  std::int64_t buffers = original.spec->kind == OpKind::kBatchNorm ? 2 * original.spec->in : 0;
  buffers = original.spec->kind == OpKind::kRouter ? original.spec->experts : buffers;
  call.buffers = static_cast<float*>(mirror.Add(call.buffers, buffers * 4, true));
  SubmitModelOp(call, is_backward, {bench.gpu, bench.stream, bench.fault});
  bench.gpu.Record(bench.event, bench.stream);
  bench.gpu.Synchronize(bench.event);
  Get(bench.gpu, &fault, bench.fault, sizeof fault);
  if (const std::string text = DescribeFault(fault); !text.empty()) {
    throw InputError(text);
  }
  mirror.CopyBack();
}

}  // namespace

std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t /*seed*/) {
  return std::make_unique<WatchedGpu>();
}

std::string LoadTestNccl(NcclTable* table) {
  return LoadNccl(table);
}

const Subject& SubjectUnderTest() {
  // Hopper's tensor cores keep some 13 bits behind the largest of the fp8 products that they add at
  // a time, as others have measured (DeepSeek-V3's report, section 3.3.2).
  static const Subject subject = {"shardwright-cuda-plain", RunOnGpu, 0x1p-8, 0x1p-13};
  return subject;
}

}  // namespace shardwright::testing

int main(int count, char** arguments) {
  try {
    (void)shardwright::OpenGpu(0);
  } catch (const shardwright::EnvironmentError& error) {
    std::printf("skipped: %s\n", error.what());
    return shardwright::kSkipExitCode;
  }
  doctest::Context context(count, arguments);
  const int code = context.run();
  using shardwright::testing::WatchedGpu;
  shardwright::CudnnTable cudnn{};
  if (WatchedGpu::due == 0 || code != 0) {
    return code;
  }
  if (const std::string missing = shardwright::LoadCudnn(&cudnn); !missing.empty()) {
    std::printf("no cuDNN, by our own kernels: %s\n", missing.c_str());
    return code;
  }
  std::printf("cuDNN took %d of %d calls that are for it\n", WatchedGpu::taken.load(),
              WatchedGpu::due.load());
  return WatchedGpu::taken < WatchedGpu::due ? 1 : 0;
}
