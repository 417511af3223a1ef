// From an op of the model to its kernels, by kind.
//
// A kind with a case here and no refusal in CudaKernelProblem can run. The session asks
// CudaKernelProblem for every op before it takes memory.
//
// Dispatch, exchange and combine of expert parallelism have no kernel here. CheckCudaPlan
// (session.cc) refuses such plans.

#include "executor/cuda/ops/model_ops.h"

#include "core/error.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright {

void SubmitModelOp(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  switch (call.spec->kind) {
    case OpKind::kEmbedding:
      return ops::SubmitEmbedding(call, is_backward, context);
    case OpKind::kLinear:
      return ops::SubmitLinear(call, is_backward, context);
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
      return ops::SubmitNorm(call, is_backward, context);
    case OpKind::kRope:
      return ops::SubmitRope(call, is_backward, context);
    case OpKind::kAttention:
      return ops::SubmitAttention(call, is_backward, context);
    case OpKind::kPositionBias:
      return ops::SubmitPositionBias(call, is_backward, context);
    case OpKind::kActivation:
    case OpKind::kGatedActivation:
    case OpKind::kAdd:
    case OpKind::kMul:
    case OpKind::kScale:
    case OpKind::kDropout:
    case OpKind::kConcat:
    case OpKind::kSelect:
      return ops::SubmitElementwise(call, is_backward, context);
    case OpKind::kConv2d:
    case OpKind::kBatchNorm:
    case OpKind::kMaxPool:
    case OpKind::kAvgPool:
      return ops::SubmitImage(call, is_backward, context);
    case OpKind::kRouter:
      return ops::SubmitRouter(call, is_backward, context);
    case OpKind::kExperts:
      return ops::SubmitExperts(call, is_backward, context);
    case OpKind::kLogSoftmax:
    case OpKind::kNllLoss:
    case OpKind::kCrossEntropy:
      return ops::SubmitLoss(call, is_backward, context);
    case OpKind::kDispatch:
    case OpKind::kExchange:
    case OpKind::kCombine:
    case OpKind::kGatherTokens:
    case OpKind::kScatterTokens:
    case OpKind::kOther:
      break;
  }
  SW_CHECK(false, "CudaKernelProblem refuses what has no kernel");
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
