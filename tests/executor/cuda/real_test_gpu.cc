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
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/cuda/test_gpu.h"
#include "tests/executor/kernels/harness.h"
#include "tests/skip.h"

namespace shardwright::testing {
namespace {

class PinnedGpu : public ForwardingGpu {
 public:
  PinnedGpu() : ForwardingGpu(OpenGpu(0)) {}
  [[nodiscard]] std::byte* Allocate(Bytes size, bool /*on_host*/) override {
    return ForwardingGpu::Allocate(size, true);
  }
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

std::string LoadTestNccl(NcclTable* table) {
  return LoadNccl(table);
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
