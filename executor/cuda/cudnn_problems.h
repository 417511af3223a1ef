#pragma once

// Attention and convolutions as cuDNN sees them: what makes two calls the same problem, the plan of
// a problem, and which address each tensor of the plan has in a call.

#include <compare>
#include <cstdint>
#include <utility>
#include <vector>

#include "executor/cuda/cudnn_graph.h"
#include "executor/cuda/gpu.h"
#include "executor/cuda/kernels/attention_tile.h"
#include "executor/cuda/kernels/convolution.h"

namespace shardwright {

// Everything that a plan of attention depends on. Strides are in elements.
struct CudnnAttention {
  struct Heads {
    std::int64_t row = 0, head = 0;
    auto operator<=>(const Heads&) const = default;
  };
  DType dtype = DType::kBf16;
  bool is_backward = false, causal = false;
  std::int64_t batch = 0, heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  std::int64_t seq_q = 0, seq_k = 0;
  Heads q, k, v, dq, dk, dv;
  auto operator<=>(const CudnnAttention&) const = default;
};

struct CudnnConvolution {
  DType dtype = DType::kBf16;  // of images, weights and all gradients
  ConvPass pass = ConvPass::kForward;
  bool adds = false, tokens_out = false;
  std::int64_t batch = 0, in = 0, out = 0, groups = 1;
  std::int64_t height = 0, width = 0, height_out = 0, width_out = 0;
  std::int64_t kernel = 0, stride = 0, padding = 0;
  auto operator<=>(const CudnnConvolution&) const = default;
};

// False: a call that is left to our own kernels, whatever the library says: dropout, windows,
// biases of scores, fp32, odd addresses. Forward saves what our own kernel saves, so that backward
// may be either's.
[[nodiscard]] bool IsForCudnn(const gpu::AttentionArgs& args, bool is_backward);
[[nodiscard]] bool IsForCudnn(const gpu::ConvArgs& args, ConvPass pass);

[[nodiscard]] CudnnAttention CudnnProblemOf(const gpu::AttentionArgs& args, bool is_backward);
[[nodiscard]] CudnnConvolution CudnnProblemOf(const gpu::ConvArgs& args, ConvPass pass);

// Plans repeat bit by bit: the gradients of queries are not summed by atomics, which costs a
// workspace of two bytes per score (CudnnAttentionWorkspace in models/kernels/cuda.h).
[[nodiscard]] CudnnPlan MakeCudnnPlan(const CudnnTable& table, const CudnnDescriptor& device,
                                      const CudnnAttention& problem, std::int64_t workspace_limit);
[[nodiscard]] CudnnPlan MakeCudnnPlan(const CudnnTable& table, const CudnnDescriptor& device,
                                      const CudnnConvolution& problem,
                                      std::int64_t workspace_limit);

using CudnnPointers = std::vector<std::pair<CudnnGraph::Uid, void*>>;
// `args` outlives the plan's submission: numbers are read from it.
[[nodiscard]] CudnnPointers CudnnPointersOf(const gpu::AttentionArgs& args, bool is_backward);
[[nodiscard]] CudnnPointers CudnnPointersOf(const gpu::ConvArgs& args, ConvPass pass);

}  // namespace shardwright
