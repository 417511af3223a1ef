#pragma once

// Convolutions by oneDNN, which works on channels in blocks: fp32 images in PyTorch's layout are
// copied into blocks and back. The library is reached through a module that is loaded for models
// with convolutions (executor/onednn/module.cc), so that the program starts without it.

#include <compare>
#include <cstdint>

#include "executor/model_op.h"

namespace shardwright {

// Of one group-less convolution of `images` images.
struct BlockedConvShape {
  std::int64_t channels_in = 0, channels_out = 0;
  std::int64_t height = 0, width = 0;
  std::int64_t height_out = 0, width_out = 0;
  std::int64_t kernel = 0, stride = 0, padding = 0;
  std::int64_t images = 1;
  bool has_bias = false;

  auto operator<=>(const BlockedConvShape&) const = default;
};

enum class ConvPass : std::uint8_t { kForward, kDataGrad, kWeightGrad };

// Images are fp32 and contiguous. What runs for one image does not depend on the thread, which is
// the caller's, nor on the other images.
class BlockedConv {
 public:
  virtual ~BlockedConv() = default;

  // False: the library has no vector code for this pass here.
  [[nodiscard]] virtual bool Runs(ConvPass pass) const = 0;
  // (channels_out, channels_in, kernel, kernel) into the order in which a pass reads them, of
  // HostBlockedConv::weights numbers.
  virtual void PackWeights(ConvPass pass, const float* weights, float* packed) const = 0;
  // `bias` is null where the shape has none. `input` and `output` are room for images in blocks.
  virtual void Forward(const float* x, const float* packed, const float* bias, float* y,
                       float* input, float* output) const = 0;
  virtual void DataGrad(const float* dy, const float* packed, float* dx, float* input,
                        float* output) const = 0;
  // The gradient of the weights in the library's order; of `images` images that lie one behind
  // another in x, and whose gradients begin `dy_stride` elements apart.
  virtual void WeightGrad(const float* x, const float* dy, std::int64_t dy_stride, float* packed,
                          float* input, float* output) const = 0;
  virtual void UnpackWeights(const float* packed, float* weights) const = 0;
};

// What the module exports, as `ShardwrightMakeBlockedConv`. The caller owns the result.
using MakeBlockedConvFunction = BlockedConv* (*)(const BlockedConvShape& shape);

// Loads the library now, on the caller's thread. Throws EnvironmentError when the one that the user
// names cannot be loaded.
void LoadBlockedConvs();

// Each runs one pass of a kConv2d and returns true, or does nothing and returns false: without the
// module, for groups, tokens, 16-bit numbers or images that need no unfolding.
[[nodiscard]] bool BlockedConvForward(const ModelOpCall& call);
[[nodiscard]] bool BlockedConvDataGrad(const ModelOpCall& call);
[[nodiscard]] bool BlockedConvWeightGrad(const ModelOpCall& call);

}  // namespace shardwright
