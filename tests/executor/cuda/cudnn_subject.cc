// The kernel cases of attention and convolutions, computed by a cuDNN on an emulated GPU, and what
// is known about cuDNN without one. The library is one that computes graphs in loops.

#include <cstdio>
#include <string>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/cudnn_plans.h"
#include "executor/cuda/ops/model_ops.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/fake_cudnn.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

// An emulated GPU beside which cuDNN computes at once, in the order of submission: one stream.
class GpuWithCudnn : public ForwardingGpu {
 public:
  GpuWithCudnn() : ForwardingGpu(MakeEmulatedGpu({})) {}
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                            std::int64_t bytes, GpuStream stream) override {
    Finish(stream);
    FakeCudnn().workspace_size = bytes;  // as the library, whose plans take what is declared
    return plans_.Attend(args, is_backward, workspace, bytes, stream.value);
  }
  [[nodiscard]] bool Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                              std::int64_t bytes, GpuStream stream) override {
    Finish(stream);
    FakeCudnn().workspace_size = 0;
    return plans_.Convolve(args, pass, workspace, bytes, stream.value);
  }

 private:
  void Finish(GpuStream stream) {
    const GpuEvent event = NewEvent(false);
    Record(event, stream);
    Synchronize(event);
  }

  CudnnPlans plans_{FakeCudnnTable(), [](const std::string&) {}};
};

void Run(const ModelOpCall& call, bool is_backward) {
  GpuWithCudnn gpu;
  gpu::Fault fault;
  const GpuStream stream = gpu.NewStream(false);
  const GpuEvent event = gpu.NewEvent(false);
  SubmitModelOp(call, is_backward, {gpu, stream, &fault});
  gpu.Record(event, stream);
  gpu.Synchronize(event);
}

}  // namespace

const Subject& SubjectUnderTest() {
  static const Subject subject = {"shardwright-cuda-plain", Run, 0x1p-8};
  return subject;
}

}  // namespace shardwright::testing

int main(int count, char** arguments) {
  doctest::Context context(count, arguments);
  context.addFilter("test-case", "Cudnn*,HostKernels.Attention*,HostKernels.Conv2d");
  const int code = context.run();
  // Attention forward and backward, convolutions and their two gradients, in two types each.
  constexpr int kLeast = 20;
  const int executed = shardwright::testing::FakeCudnn().executed;
  std::printf("%d calls were cuDNN's\n", executed);
  return executed < kLeast ? 1 : code;
}
