// From an op of the model to its kernels, by kind.
//
// A kind with a case here and no refusal in CudaKernelProblem can run. The session asks
// CudaKernelProblem for every op before it takes memory.
//
// Dispatch, exchange and combine of expert parallelism have no kernel here. CheckCudaPlan
// (session.cc) refuses such plans.

#include "executor/cuda/ops/model_ops.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "core/lookup.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright {

void SubmitModelOp(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  using enum OpKind;
  using Submit = void (*)(const ModelOpCall&, bool, const OpContext&);
  static constexpr std::array<std::pair<OpKind, Submit>, 24> kSubmits = {{
      {kEmbedding, ops::SubmitEmbedding},
      {kLinear, ops::SubmitLinear},
      {kLayerNorm, ops::SubmitNorm},
      {kRmsNorm, ops::SubmitNorm},
      {kRope, ops::SubmitRope},
      {kAttention, ops::SubmitAttention},
      {kPositionBias, ops::SubmitPositionBias},
      {kActivation, ops::SubmitElementwise},
      {kGatedActivation, ops::SubmitElementwise},
      {kAdd, ops::SubmitElementwise},
      {kMul, ops::SubmitElementwise},
      {kScale, ops::SubmitElementwise},
      {kDropout, ops::SubmitElementwise},
      {kConcat, ops::SubmitElementwise},
      {kSelect, ops::SubmitElementwise},
      {kConv2d, ops::SubmitImage},
      {kBatchNorm, ops::SubmitImage},
      {kMaxPool, ops::SubmitImage},
      {kAvgPool, ops::SubmitImage},
      {kRouter, ops::SubmitRouter},
      {kExperts, ops::SubmitExperts},
      {kLogSoftmax, ops::SubmitLoss},
      {kNllLoss, ops::SubmitLoss},
      {kCrossEntropy, ops::SubmitLoss},
  }};
  const Submit submit = ValueOf(kSubmits, call.spec->kind, Submit{nullptr});
  SW_CHECK(submit != nullptr, "CudaKernelProblem refuses what has no kernel");
  submit(call, is_backward, context);
}

std::string CudaKernelProblem(const OpSpec& spec, DType compute, const KernelSetOptions& options) {
  return options.cuda_kernels
             ? KernelProblem(spec, compute, options, "the CUDA device")
             : "the plan's kernel set is " + options.name +
                   "; the CUDA device runs shardwright-cuda-plain, -gelu, -fused and -chunked only "
                   "(its kernels keep and need other memory)";
}

// Example: {kTableRow, 50300, 50257} is "the data: got an id whose row in the table is 50300,
// expected 0 to 50256".
std::string DescribeFault(const gpu::Fault& fault) {
  const std::string value = std::to_string(fault.value);
  switch (static_cast<gpu::FaultKind>(fault.kind)) {
    case gpu::FaultKind::kNone:
      break;
    case gpu::FaultKind::kTableRow:
      return "the data: got an id whose row in the table is " + value + ", expected 0 to " +
             std::to_string(fault.limit - 1);
    case gpu::FaultKind::kLabel:
      return "the data: got a label " + value + ", expected less than the number of classes, " +
             std::to_string(fault.limit);
  }
  return {};
}

}  // namespace shardwright
