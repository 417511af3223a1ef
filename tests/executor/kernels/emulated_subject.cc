// The CUDA device's kernels, as loops on the CPU.

#include <memory>
#include <string>

#include "core/error.h"
#include "executor/cuda/emulation/emulated_gpu.h"
#include "executor/cuda/ops/model_ops.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

void Run(const ModelOpCall& call, bool is_backward) {
  const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({});
  gpu::Fault fault;
  const GpuStream stream = gpu->NewStream(false);
  const GpuEvent event = gpu->NewEvent(false);
  SubmitModelOp(call, is_backward, {*gpu, stream, &fault});
  gpu->Record(event, stream);
  gpu->Synchronize(event);
  if (const std::string text = DescribeFault(fault); !text.empty()) {
    throw InputError(text);
  }
}

}  // namespace

const Subject& SubjectUnderTest() {
  // bf16's unit roundoff; fp16 is finer.
  static const Subject subject = {"shardwright-cuda-plain", Run, 0x1p-8};
  return subject;
}

}  // namespace shardwright::testing
