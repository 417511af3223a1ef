// Convolutions of images (channels, height, width) by weights (out, in / groups, kernel, kernel).
//
// Example of tokens_out, the patches of a vision transformer: 768 channels of 14 x 14 patches, to
// be stored as (pixel, channel). The output's strides by (sample, channel, row, column) are
// (150,528, 1, 10,752, 768), so no transpose follows.
//
// Weight gradients that are added to the present ones use the operation's beta, 1 instead of 0.

#include <array>
#include <cstdint>

#include "executor/cuda/cudnn_problems.h"

namespace shardwright {
namespace {

using N = CudnnNumbers;
using Pass = ConvPass;

enum : CudnnGraph::Uid { kInput = 1, kWeight, kOutput };

CudnnTensor TensorOf(int type, const CudnnShape& dims) {
  return {.type = type, .dims = dims, .strides = CudnnPacked(dims)};
}

bool IsAligned(const gpu::Array& array) {
  constexpr std::uintptr_t kConvolutionAlignment = 16;
  return reinterpret_cast<std::uintptr_t>(array.data) % kConvolutionAlignment == 0;
}

}  // namespace

bool IsForCudnn(const gpu::ConvArgs& a, Pass pass) {
  const gpu::Array& weight = pass == Pass::kWeightGrad ? a.grad : a.w;
  // No engine makes gradients in fp32 of images in 16 bits.
  const bool has_type =
      CudnnTypeOf(a.x.dtype) >= 0 && a.y.dtype == a.x.dtype && weight.dtype == a.x.dtype;
  // A bias would need a kernel of its own behind the library's.
  const bool is_plain = pass != Pass::kForward || a.bias.data == nullptr;
  return has_type && is_plain && IsAligned(a.x) && IsAligned(a.y) && IsAligned(weight);
}

CudnnConvolution CudnnProblemOf(const gpu::ConvArgs& a, Pass pass) {
  CudnnConvolution p;
  p.dtype = a.x.dtype;
  p.pass = pass;
  p.adds = pass == Pass::kWeightGrad && a.adds;
  p.tokens_out = a.tokens_out;
  p.batch = a.batch;
  p.in = a.in;
  p.out = a.out;
  p.groups = a.groups;
  p.height = a.height;
  p.width = a.width;
  p.height_out = a.height_out;
  p.width_out = a.width_out;
  p.kernel = a.kernel;
  p.stride = a.stride;
  p.padding = a.padding;
  return p;
}

CudnnPlan MakeCudnnPlan(const CudnnTable& table, const CudnnDescriptor& device,
                        const CudnnConvolution& p, std::int64_t workspace_limit) {
  const int type = CudnnTypeOf(p.dtype);
  CudnnTensor output = TensorOf(type, {p.batch, p.out, p.height_out, p.width_out});
  if (p.tokens_out) {
    output.strides = {p.out * p.height_out * p.width_out, 1, p.out * p.width_out, p.out};
  }
  CudnnGraph graph(table);
  graph.Add(TensorOf(type, {p.batch, p.in, p.height, p.width}), kInput);
  graph.Add(TensorOf(type, {p.out, p.in / p.groups, p.kernel, p.kernel}), kWeight);
  graph.Add(output, kOutput);
  constexpr std::array kKinds = {N::kConvForward, N::kConvDataGrad, N::kConvWeightGrad};
  graph.Convolve({.kind = kKinds[static_cast<std::size_t>(p.pass)],
                  .weight = kWeight,
                  .input = kInput,
                  .output = kOutput,
                  .stride = p.stride,
                  .padding = p.padding,
                  .adds = p.adds});
  return graph.Plan(device, workspace_limit);
}

CudnnPointers CudnnPointersOf(const gpu::ConvArgs& a, Pass pass) {
  return {{kInput, a.x.data},
          {kWeight, pass == Pass::kWeightGrad ? a.grad.data : a.w.data},
          {kOutput, a.y.data}};
}

}  // namespace shardwright
