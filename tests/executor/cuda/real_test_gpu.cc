// A real GPU whose device memory is pinned host memory: kernels reach it, and so do the tests.
// Without a GPU the program says why and ends as skipped.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/ops/model_ops.h"
#include "executor/cuda/plugin.h"
#include "tests/executor/cuda/test_gpu.h"
#include "tests/executor/kernels/harness.h"
#include "tests/skip.h"

namespace shardwright::testing {
namespace {

class PinnedGpu : public Gpu {
 public:
  PinnedGpu() : gpu_(OpenGpu(0)) {}

  [[nodiscard]] const GpuInfo& Info() const override { return gpu_->Info(); }
  void MakeCurrent() override { gpu_->MakeCurrent(); }
  [[nodiscard]] std::byte* Allocate(Bytes size, bool /*on_host*/) override {
    return gpu_->Allocate(size, true);
  }
  [[nodiscard]] Bytes FreeMemory() override { return gpu_->FreeMemory(); }
  [[nodiscard]] GpuStream NewStream(bool high) override { return gpu_->NewStream(high); }
  [[nodiscard]] GpuEvent NewEvent(bool timed) override { return gpu_->NewEvent(timed); }
  void Record(GpuEvent event, GpuStream stream) override { gpu_->Record(event, stream); }
  void WaitFor(GpuStream stream, GpuEvent event) override { gpu_->WaitFor(stream, event); }
  [[nodiscard]] bool IsOver(GpuEvent event) override { return gpu_->IsOver(event); }
  void Synchronize(GpuEvent event) override { gpu_->Synchronize(event); }
  [[nodiscard]] SimTime Between(GpuEvent first, GpuEvent second) override {
    return gpu_->Between(first, second);
  }
  void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) override {
    gpu_->Copy(to, from, bytes, stream);
  }
  void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) override {
    gpu_->Fill(to, byte, bytes, stream);
  }
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    gpu_->Launch(launch, stream);
  }
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace, std::int64_t bytes,
                              GpuStream stream) override {
    return gpu_->Multiply(product, workspace, bytes, stream);
  }

 private:
  std::unique_ptr<Gpu> gpu_;
};

// Copies of a call's operands in memory that the GPU reaches, and back.
class Mirror {
 public:
  explicit Mirror(std::byte* memory) : next_(memory) {}

  void* Add(void* data, std::int64_t bytes, bool is_written) {
    if (data == nullptr || bytes == 0) {
      return data;
    }
    // Whatever the address was aligned to, the copy is.
    constexpr std::uintptr_t kAlignment = 256;
    next_ += reinterpret_cast<std::uintptr_t>(data) % kAlignment;
    std::byte* const copy = next_;
    std::memcpy(copy, data, static_cast<std::size_t>(bytes));
    next_ += bytes;
    next_ += (kAlignment - reinterpret_cast<std::uintptr_t>(next_) % kAlignment) % kAlignment;
    if (is_written) {
      results_.push_back({data, copy, bytes});
    }
    return copy;
  }
  void CopyBack() const {
    for (const Result& r : results_) {
      std::memcpy(r.data, r.copy, static_cast<std::size_t>(r.bytes));
    }
  }

 private:
  struct Result {
    void* data;
    const std::byte* copy;
    std::int64_t bytes;
  };
  std::byte* next_;
  std::vector<Result> results_;
};

struct Bench {
  PinnedGpu gpu;
  GpuStream stream = gpu.NewStream(false);
  GpuEvent event = gpu.NewEvent(false);
  std::byte* memory = gpu.Allocate(Bytes(std::int64_t{64} << 20), true);
  gpu::Fault* fault = reinterpret_cast<gpu::Fault*>(gpu.Allocate(Bytes(sizeof(gpu::Fault)), true));
};

void RunOnGpu(const ModelOpCall& original, bool is_backward) {
  static Bench bench;
  *bench.fault = {};
  ModelOpCall call = original;
  Mirror mirror(bench.memory);
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
  std::int64_t buffers = original.spec->kind == OpKind::kBatchNorm ? 2 * original.spec->in : 0;
  buffers = original.spec->kind == OpKind::kRouter ? original.spec->experts : buffers;
  call.buffers = static_cast<float*>(mirror.Add(call.buffers, buffers * 4, true));
  SubmitModelOp(call, is_backward, {bench.gpu, bench.stream, bench.fault});
  bench.gpu.Record(bench.event, bench.stream);
  bench.gpu.Synchronize(bench.event);
  if (const std::string text = DescribeFault(*bench.fault); !text.empty()) {
    throw InputError(text);
  }
  mirror.CopyBack();
}

}  // namespace

std::unique_ptr<Gpu> MakeTestGpu(std::uint64_t /*seed*/) {
  return std::make_unique<PinnedGpu>();
}

const Subject& SubjectUnderTest() {
  static const Subject subject = {"shardwright-cuda-plain", RunOnGpu, 0x1p-8};
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
  return context.run();
}
