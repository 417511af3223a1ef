// A norm that makes the sum before it, against the host's sum and norm.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include "executor/cuda/ops/model_ops.h"
#include "executor/half.h"
#include "executor/host/kernels/table.h"
#include "models/kernel_set.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kRows = 3, kSamples = 2, kWidth = 300;  // more features than threads
constexpr std::int64_t kElements = kRows * kSamples * kWidth;

// Memory of the host and of a GPU; views of the host are copied there and back.
class Memory {
 public:
  explicit Memory(Gpu& gpu) : gpu_(gpu) {}

  [[nodiscard]] std::span<std::byte> OnHost(Bytes size) {
    return owned_.emplace_back(static_cast<std::size_t>(size.value));
  }
  [[nodiscard]] std::span<std::byte> OnGpu(Bytes size) {
    return {gpu_.Allocate(size, false), static_cast<std::size_t>(size.value)};
  }
  [[nodiscard]] View Make(std::int64_t n, DType dtype, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const View view{OnHost(Bytes(n * SizeOf(dtype))).data(), dtype, n};
    for (std::int64_t i = 0; i < n; ++i) {
      StoreFloat(dtype, view.data, i, normal(random));
    }
    return view;
  }
  [[nodiscard]] View ToGpu(const View& host) {
    const Bytes size(host.elements * SizeOf(host.dtype));
    const View view{OnGpu(size).data(), host.dtype, host.elements};
    Put(gpu_, view.data, host.data, size.value);
    return view;
  }
  [[nodiscard]] View FromGpu(const View& device) {
    const Bytes size(device.elements * SizeOf(device.dtype));
    const View view{OnHost(size).data(), device.dtype, device.elements};
    Get(gpu_, view.data, device.data, size.value);
    return view;
  }

 private:
  Gpu& gpu_;
  std::deque<std::vector<std::byte>> owned_;
};

ConstView Read(const View& view) {
  return {view.data, view.dtype, view.elements};
}

// |x - y| <= bound * (1 + |y|) everywhere.
void CheckClose(const View& x, const View& y, double bound) {
  REQUIRE(x.elements == y.elements);
  double worst = 0.0;
  for (std::int64_t i = 0; i < x.elements; ++i) {
    const double expected = LoadFloat(y.dtype, y.data, i);
    const double difference = std::abs(LoadFloat(x.dtype, x.data, i) - expected);
    worst = std::max(worst, difference / (1.0 + std::abs(expected)));
  }
  CHECK(worst <= bound);
}

void RunOnGpu(Gpu& gpu, const ModelOpCall& call, bool is_backward) {
  const GpuStream stream = gpu.NewStream(false);
  const GpuEvent event = gpu.NewEvent(false);
  SubmitModelOp(call, is_backward, {gpu, stream, nullptr});
  gpu.Record(event, stream);
  gpu.Synchronize(event);
}

void CheckNorm(OpKind kind, DType dtype) {
  const std::unique_ptr<Gpu> gpu = MakeTestGpu(1);
  Memory memory(*gpu);
  const KernelSetOptions options = FindKernelSet("shardwright-cuda-fused", "test");
  const bool has_bias = kind == OpKind::kLayerNorm;
  const OpSpec spec{
      .kind = kind, .rows = kRows, .in = kWidth, .has_bias = has_bias, .epsilon = 1e-5};
  const OpSpec sum_spec{.kind = OpKind::kAdd, .rows = kRows, .in = kWidth};
  const OpKernels kernels = LowerOp(spec, kSamples, dtype, options);
  const auto make = [&](std::uint64_t seed) { return memory.Make(kElements, dtype, seed); };
  const View a = make(1), b = make(2), dy = make(5);
  const View sum = memory.ToGpu(make(3)), y = memory.ToGpu(make(4));
  const View host_sum = make(6), host_y = make(7);
  ModelOpCall call;
  call.spec = &spec;
  call.options = &options;
  call.batch = kSamples;
  call.compute = dtype;
  std::vector<ConstView> params;  // of the host
  for (int p = 0; p < (has_bias ? 2 : 1); ++p) {
    const View param = memory.Make(kWidth, dtype, static_cast<std::uint64_t>(8 + p));
    params.push_back(Read(param));
    call.params.push_back(Read(memory.ToGpu(param)));
  }
  call.saved = memory.OnGpu(kernels.extra_saved);
  call.workspace = memory.OnGpu(kernels.backward_workspace);
  call.inputs = {Read(memory.ToGpu(a)), Read(memory.ToGpu(b))};
  call.outputs = {y, sum};
  RunOnGpu(*gpu, call, false);

  ModelOpCall host = call;
  host.spec = &sum_spec;
  host.params.clear();
  host.inputs = {Read(a), Read(b)};
  host.outputs = {host_sum};
  ForwardOnHost(host);
  CHECK(std::memcmp(memory.FromGpu(sum).data, host_sum.data,
                    static_cast<std::size_t>(kElements * SizeOf(dtype))) == 0);
  host.spec = &spec;
  host.params = params;
  host.inputs = {Read(host_sum)};
  host.outputs = {host_y};
  host.saved = memory.OnHost(kernels.extra_saved);
  host.workspace = memory.OnHost(Bytes(1 << 20));
  ForwardOnHost(host);
  const double bound = dtype == DType::kFp32 ? 1e-5 : 0x1p-8;  // half a unit, twice
  CheckClose(memory.FromGpu(y), host_y, bound);

  // Backward: what is in the gradient's place stays in it.
  const View before = make(10), dx = memory.ToGpu(before), host_dx = make(11);
  call.inputs = {Read(sum)};
  call.outputs = {y};
  call.output_grads = {Read(memory.ToGpu(dy))};
  call.input_grads = {dx};
  call.param_grads.resize(call.params.size());
  call.adds_input_grads = true;
  RunOnGpu(*gpu, call, true);
  host.output_grads = {Read(dy)};
  host.input_grads = {host_dx};
  host.param_grads.resize(call.params.size());
  BackwardOnHost(host);
  for (std::int64_t i = 0; i < kElements; ++i) {
    const float sum_of_both = LoadFloat(dtype, host_dx.data, i) + LoadFloat(dtype, before.data, i);
    StoreFloat(dtype, host_dx.data, i, sum_of_both);
  }
  CheckClose(memory.FromGpu(dx), host_dx, 2 * bound);
}

TEST_CASE("ResidualNorm.IsTheSumAndTheNormOfTheHost") {
  for (const OpKind kind : {OpKind::kLayerNorm, OpKind::kRmsNorm}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      CAPTURE(static_cast<int>(dtype));
      CheckNorm(kind, dtype);
    }
  }
}

}  // namespace
}  // namespace shardwright::testing
