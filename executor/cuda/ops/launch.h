#pragma once

// Shared by the files that launch kernels: views of tensors, pieces of a workspace, common
// launches.
//
// Example of Scratch: a workspace of 10,000 bytes. Take<float>(100) gives 400 bytes at offset 0,
// the next Take begins at 512, as pieces are rounded up to 256. A piece that does not fit is a bug
// of the lowering, which has declared too small a workspace.

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.h"
#include "core/units.h"
#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/convolution.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/experts.h"
#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/ops/model_ops.h"
#include "executor/model_op.h"
#include "models/kernels/cuda.h"
#include "models/kernels/fp8.h"

namespace shardwright::ops {

[[nodiscard]] inline gpu::Array ArrayOf(const ConstView& view) {
  return {const_cast<void*>(view.data), view.dtype};  // kernels do not write what they only read
}
[[nodiscard]] inline gpu::Array ArrayOf(const View& view) {
  return {view.data, view.dtype};
}

// Hands out pieces of a workspace; each begins at a multiple of 256 bytes.
class Scratch {
 public:
  explicit Scratch(std::span<std::byte> memory) : memory_(memory) {}

  template <class T>
  [[nodiscard]] T* Take(std::int64_t n) {
    const auto size =
        static_cast<std::size_t>(CudaAligned(n * static_cast<std::int64_t>(sizeof(T))));
    SW_CHECK(used_ + size <= memory_.size(), "a kernel needs " + std::to_string(used_ + size) +
                                                 " bytes of workspace, declared are " +
                                                 std::to_string(memory_.size()));
    T* const piece = reinterpret_cast<T*>(memory_.data() + used_);
    used_ += size;
    return piece;
  }
  // The rest, which nobody has taken.
  [[nodiscard]] std::span<std::byte> Rest() const { return memory_.subspan(used_); }

 private:
  std::span<std::byte> memory_;
  std::size_t used_ = 0;
};

// A thread per item.
template <class Kernel>
void LaunchItems(const OpContext& context, std::int64_t items, const typename Kernel::Args& args,
                 std::int64_t shared = 0) {
  LaunchKernel<Kernel>(context.gpu, context.stream, CeilDiv(items, Kernel::kThreads), shared, args);
}
// A block per item, with room for one T per thread where the kernel sums over its block.
template <class Kernel, class T = float>
void LaunchBlocks(const OpContext& context, std::int64_t blocks,
                  const typename Kernel::Args& args) {
  LaunchKernel<Kernel>(context.gpu, context.stream, blocks, gpu::SharedSize<T>(Kernel::kThreads),
                       args);
}

void Map(const OpContext& context, const gpu::MapArgs& args);
void ZeroFill(const OpContext& context, const View& view);

// to (columns) (+)= sum over rows of x[first + row * stride + j]. With a workspace, many blocks
// share the rows.
struct RowSum {
  gpu::Array x = {};
  std::int64_t rows = 0, columns = 0;
  std::int64_t first = 0, stride = 0;
  gpu::Array y = {};  // multiplied in; null: none
  std::int64_t y_stride = 0;
  const float* means = nullptr;  // y is normalized first
  const float* inverses = nullptr;
};
void SumRows(const OpContext& context, const RowSum& sum, const gpu::Array& to, bool adds,
             float* partial);

// Where the call's layer multiplies in fp8: puts copies in place of the product's operands, which
// lie as they do in memory, row by row. Returns what the call's workspace has left.
[[nodiscard]] std::span<std::byte> RoundOperands(const ModelOpCall& call, const OpContext& context,
                                                 const Fp8Formats& formats, gpu::GemmArgs& product);
// By the library if it takes the product, else by our own kernel.
void Multiply(const OpContext& context, gpu::GemmArgs args, std::span<std::byte> workspace);
[[nodiscard]] DType MultiplyAs(DType a, DType b);
// By the library if it takes the product; false: nothing was done.
[[nodiscard]] inline bool MultiplyByLibrary(const OpContext& context, const gpu::GemmArgs& args,
                                            std::span<std::byte> workspace) {
  return context.gpu.Multiply(args, workspace.data(), static_cast<std::int64_t>(workspace.size()),
                              context.stream);
}
// By the library if it takes the call; false: nothing was done.
[[nodiscard]] inline bool AttendByLibrary(const OpContext& context, const gpu::AttentionArgs& args,
                                          bool is_backward, std::span<std::byte> workspace) {
  return context.gpu.Attend(args, is_backward, workspace.data(),
                            static_cast<std::int64_t>(workspace.size()), context.stream);
}
[[nodiscard]] inline bool ConvolveByLibrary(const OpContext& context, const gpu::ConvArgs& args,
                                            ConvPass pass, std::span<std::byte> workspace) {
  return context.gpu.Convolve(args, pass, workspace.data(),
                              static_cast<std::int64_t>(workspace.size()), context.stream);
}

[[nodiscard]] gpu::DropoutMask MaskOf(const ModelOpCall& call);

// The rows of every expert, see gpu::DispatchArgs.
void DispatchRows(const OpContext& context, const gpu::DispatchArgs& args);

// The kinds, by file.
void SubmitElementwise(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitLinear(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitLinearLoss(const ModelOpCall& call, const OpContext& context);  // loss_spec
void SubmitEmbedding(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitNorm(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitRope(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitPositionBias(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitAttention(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitLoss(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitImage(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitRouter(const ModelOpCall& call, bool is_backward, const OpContext& context);
void SubmitExperts(const ModelOpCall& call, bool is_backward, const OpContext& context);

}  // namespace shardwright::ops
