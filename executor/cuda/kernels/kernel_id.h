#pragma once

// Every kernel's number; both devices have their entry points in this order.
//
// A new kernel takes one line here, and its struct <name>Kernel goes into a header of kernels.h.
// The struct is a KernelTraits with Run(Block&, const Args&). Example: X(RowNorm) makes
// KernelId::kRowNorm, an entry point of the GPU in kernels.cu, and a loop of the emulated GPU in
// tests. Launches name the id only, so no caller sees a CUDA type.

#include <cstdint>

namespace shardwright::gpu {

#define SW_KERNELS(X)   \
  X(Map)                \
  X(CopyRows)           \
  X(Dropout)            \
  X(ColumnSum)          \
  X(PartialSum)         \
  X(Fold)               \
  X(Squares)            \
  X(Norm)               \
  X(Clip)               \
  X(Update)             \
  X(RowNorm)            \
  X(RowNormGrad)        \
  X(RopeTable)          \
  X(Rope)               \
  X(Embedding)          \
  X(EmbeddingLinks)     \
  X(EmbeddingGrad)      \
  X(LogSumExp)          \
  X(LogSoftmax)         \
  X(LogSoftmaxGrad)     \
  X(LossRows)           \
  X(LossSum)            \
  X(LossGrad)           \
  X(LabelRows)          \
  X(LabelCount)         \
  X(Gemm)               \
  X(Fp8Max)             \
  X(Fp8ColumnMax)       \
  X(Fp8Cast)            \
  X(Fp8Transpose)       \
  X(Fp8Gemm)            \
  X(AttentionForward)   \
  X(AttentionProducts)  \
  X(AttentionKeyGrad)   \
  X(AttentionQueryGrad) \
  X(AttentionBiasGrad)  \
  X(PositionBias)       \
  X(PositionBiasGrad)   \
  X(Conv)               \
  X(ConvDataGrad)       \
  X(ConvWeightGrad)     \
  X(ConvBiasGrad)       \
  X(BatchNormStats)     \
  X(BatchNorm)          \
  X(BatchNormGrad)      \
  X(MaxPool)            \
  X(MaxPoolGrad)        \
  X(AvgPool)            \
  X(AvgPoolGrad)        \
  X(ChannelScaleGrad)   \
  X(Route)              \
  X(RouteGrad)          \
  X(RouterInputGrad)    \
  X(RouterWeightGrad)   \
  X(DispatchCount)      \
  X(DispatchOffsets)    \
  X(Dispatch)           \
  X(ExpertGemm)         \
  X(ExpertHidden)       \
  X(ExpertHiddenGrad)   \
  X(ExpertCombine)      \
  X(ExpertWeightGemm)

enum class KernelId : std::uint16_t {
#define SW_ID(name) k##name,
  SW_KERNELS(SW_ID)
#undef SW_ID
      kCount
};

// What a launch has to know of a kernel: its number, its arguments, the threads of a block.
template <KernelId id, class Arguments, int threads>
struct KernelTraits {
  static constexpr KernelId kId = id;
  using Args = Arguments;
  static constexpr int kThreads = threads;
};

}  // namespace shardwright::gpu
