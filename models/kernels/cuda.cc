// The CUDA device's kernels (executor/cuda): they keep what the host's keep and differ in their
// workspaces, listed piece by piece in the order in which the launching code takes them.

#include "models/kernels/cuda.h"

#include <utility>

#include "models/kernels/fp8.h"
#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// The kernels that make an fp8 copy of a matrix: one that finds the largest magnitudes, unless a
// block does that for its own row, and one that rounds.
void AppendCopy(const LowerContext& context, std::int64_t elements, bool finds_first,
                std::vector<Kernel>* kernels) {
  const std::int64_t bytes = Product({elements, context.s});
  if (finds_first) {
    kernels->push_back(PassKernel(KernelClass::kCopy, context.compute, bytes, 0));
  }
  kernels->push_back(PassKernel(KernelClass::kCopy, context.compute, bytes, elements));
}

// Every product has copies of its own, in which the elements that are summed over are neighbours;
// no other layout is multiplied. Bias gradients are sums beside it.
void UseFp8Copies(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const bool by_row = context.options.fp8 == Fp8Products::kPerRow;
  const std::int64_t inputs = Product({rows, spec.in});
  const std::int64_t outputs = Product({rows, spec.out});
  const std::int64_t weights = Product({spec.in, spec.out});
  const auto product = [&](std::vector<Kernel>& kernels, std::int64_t a, std::int64_t b,
                           bool a_finds_first, bool b_finds_first) {
    Kernel gemm = kernels.front();
    MultiplyCopies(context, a + b, &gemm);
    kernels.clear();
    AppendCopy(context, a, a_finds_first, &kernels);
    AppendCopy(context, b, b_finds_first, &kernels);
    kernels.push_back(gemm);
  };
  product(op->forward, inputs, weights, !by_row, !by_row || spec.transposed);
  product(op->backward_data, outputs, weights, !by_row, !by_row || !spec.transposed);
  product(op->backward_weight, outputs, inputs, true, true);
  if (spec.has_bias) {
    op->backward_weight.push_back(PassKernel(KernelClass::kElementwise, context.compute,
                                             Product({outputs, context.s}),
                                             Product({spec.out, context.s})));
  }
  const auto copies = [&](std::int64_t m, std::int64_t n, std::int64_t k, bool a_lies_across,
                          bool b_lies_across) {
    return CudaFp8Copy(m, k, by_row, a_lies_across) + CudaFp8Copy(n, k, by_row, b_lies_across);
  };
  op->forward_workspace += Bytes(copies(rows, spec.out, spec.in, false, spec.transposed));
  op->backward_workspace += Bytes(std::max(copies(rows, spec.in, spec.out, false, !spec.transposed),
                                           copies(spec.out, spec.in, rows, true, true)));
}

void SetCudaLinear(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t library = CudaGemmWorkspace(rows, spec.out, spec.in);
  op->forward_workspace = Bytes(library);
  op->backward_workspace =
      Bytes(std::max(library, CudaPieces({Product({SumChunks(rows), spec.out, kFp32Bytes})})));
  if (MultipliesFp8(spec, context.compute, context.options)) {
    UseFp8Copies(context, op);
  }
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
  const auto run_by = [](bool cudnn, std::vector<Kernel>& kernels) {
    for (Kernel& kernel : kernels) {
      kernel.is_own = IsAttention(kernel.kind);
      kernel.attention = kernel.is_own && !cudnn ? AttentionImpl::kOwn : kernel.attention;
    }
  };
  run_by(may, op->forward);
  run_by(scores > 0, op->backward_data);
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
  for (std::vector<Kernel>* kernels : {&op->forward, &op->backward_data, &op->backward_weight}) {
    for (Kernel& kernel : *kernels) {
      kernel.is_own = kernel.kind == KernelClass::kGroupedGemm;
    }
  }
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
