#pragma once

// Building blocks of LowerOp: one function per op family, and the kernels they share. Formulas use
// e = elements of the op's activation for the whole micro-batch and s = bytes of one element in the
// compute dtype. docs/kernel_sets.md lists what is counted and why.

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright::internal {

struct LowerContext {
  const OpSpec& spec;
  std::int64_t batch = 1;
  DType compute = DType::kBf16;
  const KernelSetOptions& options;
  std::int64_t s = 2;  // SizeOf(compute)
};

inline constexpr std::int64_t kFp32Bytes = 4;
inline constexpr std::int64_t kIndexBytes = 8;  // PyTorch's indices are int64

// Product of non-negative counts. Throws InputError above 2^56, so that sums of many such products
// stay inside 63 bits.
[[nodiscard]] std::int64_t Product(std::initializer_list<std::int64_t> factors);

// Rows of the whole micro-batch, and elements of a (rows, in) activation.
[[nodiscard]] std::int64_t Rows(const LowerContext& context);
[[nodiscard]] std::int64_t Elements(const LowerContext& context);

// A kernel priced by its bytes.
[[nodiscard]] Kernel PassKernel(KernelClass kind, DType dtype, std::int64_t read,
                                std::int64_t written);

// Sizes of `batch` matrix products (m, k) x (k, n).
struct GemmShape {
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
};
// 2 * batch * m * n * k FLOPs; both operands read, the result written once.
[[nodiscard]] Kernel GemmKernel(const LowerContext& context, const GemmShape& shape);

// The product reads fp8 copies of its operands, so many elements in all, instead of them.
void MultiplyCopies(const LowerContext& context, std::int64_t elements, Kernel* product);

// Appends an element-wise kernel over `elements` elements of the compute dtype that reads `reads`
// tensors and writes `writes` tensors of that size.
void AppendElementwise(const LowerContext& context, std::int64_t elements, std::int64_t reads,
                       std::int64_t writes, std::vector<Kernel>* kernels);

// Does the stack run cheap ops again instead of keeping what they give to matrix products? Our own
// does; torch.compile keeps it: a Llama-3.2 3B in torchtune, compiled, two samples of 4096 tokens
// on one GPU, peaks at 42.9 GiB (published), where 43.0 are expected so and 36.9 otherwise.
[[nodiscard]] inline bool RecomputesOutputs(const LowerContext& context) {
  return context.options.fused_elementwise && context.options.fused_reductions;
}

// Adds tensors of these sizes to a count of bytes (extra_saved, a workspace) and to the list of
// tensors beside it; a count that had no list becomes its first tensor. Sizes of 0 are left out.
void AddTensors(std::initializer_list<std::int64_t> sizes, Bytes* total,
                std::vector<Bytes>* tensors);

// AMP: the cast of a fp32 weight before its use (kept for backward) and of its gradient after.
void ApplyAutocast(const LowerContext& context, std::int64_t weight_elements, OpKernels* op);

[[nodiscard]] OpKernels LowerEmbedding(const LowerContext& context);
[[nodiscard]] OpKernels LowerPositionBias(const LowerContext& context);
[[nodiscard]] OpKernels LowerLinear(const LowerContext& context);
[[nodiscard]] OpKernels LowerLayerNorm(const LowerContext& context);
[[nodiscard]] OpKernels LowerRmsNorm(const LowerContext& context);
[[nodiscard]] OpKernels LowerRope(const LowerContext& context);
[[nodiscard]] OpKernels LowerAttention(const LowerContext& context);
[[nodiscard]] OpKernels LowerActivation(const LowerContext& context);
[[nodiscard]] OpKernels LowerGatedActivation(const LowerContext& context);
[[nodiscard]] OpKernels LowerAdd(const LowerContext& context);
[[nodiscard]] OpKernels LowerMul(const LowerContext& context);
[[nodiscard]] OpKernels LowerScale(const LowerContext& context);
[[nodiscard]] OpKernels LowerDropout(const LowerContext& context);
[[nodiscard]] OpKernels LowerConcat(const LowerContext& context);
[[nodiscard]] OpKernels LowerSelect(const LowerContext& context);
[[nodiscard]] OpKernels LowerConv2d(const LowerContext& context);
[[nodiscard]] OpKernels LowerBatchNorm(const LowerContext& context);
[[nodiscard]] OpKernels LowerMaxPool(const LowerContext& context);
[[nodiscard]] OpKernels LowerAvgPool(const LowerContext& context);
[[nodiscard]] OpKernels LowerRouter(const LowerContext& context);
[[nodiscard]] OpKernels LowerExperts(const LowerContext& context);
[[nodiscard]] OpKernels LowerDispatch(const LowerContext& context);
[[nodiscard]] OpKernels LowerExchange(const LowerContext& context);
[[nodiscard]] OpKernels LowerCombine(const LowerContext& context);
[[nodiscard]] OpKernels LowerMoveTokens(const LowerContext& context);
[[nodiscard]] OpKernels LowerLogSoftmax(const LowerContext& context);
[[nodiscard]] OpKernels LowerNllLoss(const LowerContext& context);
[[nodiscard]] OpKernels LowerCrossEntropy(const LowerContext& context);
[[nodiscard]] OpKernels LowerOther(const LowerContext& context);

// What the executor's host kernels make of the general lowering of an op.
[[nodiscard]] OpKernels AdaptToHost(const LowerContext& context, OpKernels general);
// The same for its CUDA kernels.
[[nodiscard]] OpKernels AdaptToCuda(const LowerContext& context, OpKernels general);

// (query, key) pairs per head that a flash kernel multiplies, masked or not: whole tiles of
// kFlashTile queries by kFlashTile keys in which at least one pair is visible. A causal mask lets
// the last query see the last key (the first the first, when there are fewer keys than queries);
// the surplus of keys is rounded up to tiles. A window of w lets a query see w keys that end with
// its own, without a causal mask also w - 1 after it. O(1).
inline constexpr std::int64_t kFlashTile = 128;
[[nodiscard]] double FlashPairs(const OpSpec& spec);

}  // namespace shardwright::internal
