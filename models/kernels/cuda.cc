// The CUDA device's kernels (executor/cuda): they keep what the host's keep and differ in their
// workspaces, listed piece by piece in the order in which the launching code takes them.

#include "models/kernels/cuda.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

void SetCudaLinear(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t library = CudaGemmWorkspace(rows, spec.out, spec.in);
  op->forward_workspace = Bytes(library);
  op->backward_workspace =
      Bytes(std::max(library, CudaPieces({Product({SumChunks(rows), spec.out, kFp32Bytes})})));
}

void SetCudaAttention(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  op->backward_workspace =
      Bytes(CudaPieces({Product({context.batch, spec.heads, spec.seq_q, kFp32Bytes})}));
  const bool may = MayUseCudnn(spec, context.compute);
  const std::int64_t scores = may ? CudnnAttentionGradWorkspace(spec, context.batch) : 0;
  if (may) {
    op->forward_workspace = Bytes(CudaPieces({kCudnnDescriptors}));
    op->backward_workspace += Bytes(CudaPieces({scores}));
  }
  const auto run_by_own = [](std::vector<Kernel>& kernels) {
    for (Kernel& kernel : kernels) {
      kernel.attention = IsAttention(kernel.kind) ? AttentionImpl::kOwn : kernel.attention;
    }
  };
  if (!may) {
    run_by_own(op->forward);
  }
  if (scores == 0) {
    run_by_own(op->backward_data);
  }
}

void SetConvolution(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t taps = spec.in / spec.groups * spec.kernel * spec.kernel;
  const std::int64_t pixels = context.batch * spec.height_out * spec.width_out;
  if (SizeOf(context.compute) == 2 && CudaGemmWorkspace(pixels, spec.out, taps) > 0) {
    op->forward_workspace = Bytes(CudnnConvolutionWorkspace(spec, context.batch, false));
    op->backward_workspace = Bytes(CudnnConvolutionWorkspace(spec, context.batch, true));
  }
}

void SetCudaRouter(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  op->forward_workspace = Bytes(CudaPieces(
      {Product({rows, spec.experts, kFp32Bytes}), Product({rows, spec.groups, kFp32Bytes})}));
  op->backward_workspace = Bytes(CudaPieces({Product({rows, spec.experts, kFp32Bytes})}));
}

void SetCudaExperts(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t routed =
      RoutedRows(spec, rows, context.options.moe_dispatch == MoeDispatch::kDense);
  const std::int64_t lists =
      CudaPieces({Product({spec.experts + 1, kIndexBytes}), Product({routed, kIndexBytes}),
                  Product({rows, spec.experts, kIndexBytes})});
  const std::int64_t in = Product({routed, spec.in, kFp32Bytes});
  const std::int64_t hidden = Product({routed, spec.out, kFp32Bytes});
  op->forward_workspace = Bytes(lists + CudaPieces({hidden, in}));
  op->backward_workspace =
      Bytes(lists + CudaPieces({hidden, in, hidden, hidden, Product({routed, kFp32Bytes})}));
}

}  // namespace

OpKernels AdaptToCuda(const LowerContext& context, OpKernels general) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  OpKernels op = AdaptToHost(context, std::move(general));
  op.forward_workspace = op.backward_workspace = Bytes(0);
  switch (spec.kind) {
    case OpKind::kLinear:
      SetCudaLinear(context, &op);
      break;
    case OpKind::kEmbedding:
      op.backward_workspace =
          Bytes(CudaPieces({Product({rows, kIndexBytes}), Product({rows, kIndexBytes})}));
      break;
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
      op.backward_workspace = Bytes(CudaPieces({Product({SumChunks(rows), spec.in, kFp32Bytes})}));
      break;
    case OpKind::kRope: {
      const std::int64_t table = Product({spec.rows, spec.rope.dim / 2, kFp32Bytes});
      op.forward_workspace = op.backward_workspace = Bytes(CudaPieces({table, table}));
      break;
    }
    case OpKind::kAttention:
      SetCudaAttention(context, &op);
      break;
    case OpKind::kConv2d:
      SetConvolution(context, &op);
      break;
    case OpKind::kRouter:
      SetCudaRouter(context, &op);
      break;
    case OpKind::kExperts:
      SetCudaExperts(context, &op);
      break;
    case OpKind::kNllLoss:
    case OpKind::kCrossEntropy:
      op.forward_workspace = op.backward_workspace = Bytes(LossWorkspace(rows));
      break;
    default:
      break;
  }
  return op;
}

}  // namespace shardwright::internal
