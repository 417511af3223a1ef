// 2-D convolution as matrix products over an unfolded input, block of pixels by block of pixels.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "executor/host/kernels/gemm.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

// Output pixels [first, first + count) of one group of one sample.
struct PixelBlock {
  std::int64_t sample = 0, group = 0;
  std::int64_t first = 0, count = 0;
};

// Of some images, each of which is one group of one sample.
template <class F>
void ForEachBlock(const ModelOpCall& call, const HostConvSizes& sizes, std::int64_t first_image,
                  std::int64_t last_image, const F& f) {
  PixelBlock block;
  for (std::int64_t image = first_image; image < last_image; ++image) {
    block.sample = image / call.spec->groups;
    block.group = image % call.spec->groups;
    for (block.first = 0; block.first < sizes.pixels_out; block.first += sizes.pixels) {
      block.count = std::min(sizes.pixels, sizes.pixels_out - block.first);
      f(block);
    }
  }
}

std::int64_t Images(const ModelOpCall& call) {
  return call.batch * call.spec->groups;
}

// Neighbouring pixels of one output row under one tap: columns [column, column + count) of the
// tap's row in the unfolded block are elements `element`, `element + stride`, ... of the group's
// input.
struct TapRun {
  std::int64_t tap = 0;
  std::int64_t column = 0;
  std::int64_t count = 0;
  std::int64_t element = 0;
};

// Calls f(run) for what lies inside the image, tap by tap from `first` to before `last` and row by
// row.
template <class F>
void ForEachRun(const OpSpec& spec, const PixelBlock& block, std::int64_t first, std::int64_t last,
                const F& f) {
  const std::int64_t pixels_in = spec.height * spec.width;
  for (std::int64_t tap = first; tap < last; ++tap) {
    const std::int64_t channel = tap / (spec.kernel * spec.kernel);
    const std::int64_t shift_y = tap / spec.kernel % spec.kernel - spec.padding;
    const std::int64_t shift_x = tap % spec.kernel - spec.padding;
    // Output columns whose input column `ox * stride + shift_x` is in [0, width).
    const std::int64_t first_x = shift_x < 0 ? (-shift_x + spec.stride - 1) / spec.stride : 0;
    const std::int64_t last_x =
        shift_x < spec.width
            ? std::min(spec.width_out, (spec.width - 1 - shift_x) / spec.stride + 1)
            : 0;
    std::int64_t row_end = 0;
    for (std::int64_t row = block.first; row < block.first + block.count; row = row_end) {
      const std::int64_t oy = row / spec.width_out;
      const std::int64_t row_begin = oy * spec.width_out;
      row_end = std::min(row_begin + spec.width_out, block.first + block.count);
      const std::int64_t y = oy * spec.stride + shift_y;
      const std::int64_t begin = std::max(row, row_begin + first_x);
      const std::int64_t end = std::min(row_end, row_begin + last_x);
      if (y >= 0 && y < spec.height && begin < end) {
        const std::int64_t x = (begin - row_begin) * spec.stride + shift_x;
        f(TapRun{tap, begin - block.first, end - begin, channel * pixels_in + y * spec.width + x});
      }
    }
  }
}

// The first element of a group's input in its tensor.
std::int64_t InputAt(const HostConvSizes& sizes, const OpSpec& spec, const PixelBlock& block) {
  return (block.sample * spec.in + block.group * sizes.channels_in) * sizes.pixels_in;
}

GemmOperand At(const void* data, DType dtype, std::int64_t element, std::int64_t row_stride,
               std::int64_t column_stride) {
  return {static_cast<const std::byte*>(data) + element * SizeOf(dtype), dtype, row_stride,
          column_stride};
}

// (taps, pixels) of the block; `columns` is where it is unfolded, if it has to be. fp32 images of
// 1 x 1 convolutions are read in place. `team` shares the taps.
GemmOperand Unfold(const ModelOpCall& call, const HostConvSizes& sizes, const PixelBlock& block,
                   float* columns, Team* team) {
  const OpSpec& spec = *call.spec;
  const ConstView& x = call.inputs[0];
  const std::int64_t base = InputAt(sizes, spec, block);
  if (!sizes.unfolds) {
    return At(x.data, x.dtype, base + block.first, sizes.pixels_in, 1);
  }
  const auto unfold = [&](const TapRun& run) {
    float* const to = columns + run.tap * block.count + run.column;
    const std::int64_t element = base + run.element;
    if (spec.stride == 1) {
      LoadFloats(x, element, run.count, to);
      return;
    }
    if (x.dtype == DType::kFp32) {
      const float* const from = static_cast<const float*>(x.data) + element;
      for (std::int64_t i = 0; i < run.count; ++i) {
        to[i] = from[i * spec.stride];
      }
      return;
    }
    for (std::int64_t i = 0; i < run.count; ++i) {
      LoadFloats(x, element + i * spec.stride, 1, to + i);
    }
  };
  ForEachPart(team, sizes.taps, LeastRows(block.count),
              [&](std::int64_t first, std::int64_t last, std::size_t) {
                std::fill_n(columns + first * block.count, (last - first) * block.count, 0.0F);
                ForEachRun(spec, block, first, last, unfold);
              });
  return {columns, DType::kFp32, block.count, 1};
}

// (channels_out, pixels) of the block of the output or its gradient, transposed for tokens_out.
struct OutputPlace {
  std::int64_t element = 0;
  std::int64_t channel_stride = 0;
  std::int64_t pixel_stride = 0;
};
OutputPlace PlaceOf(const OpSpec& spec, const HostConvSizes& sizes, const PixelBlock& block) {
  const std::int64_t channel = block.group * sizes.channels_out;
  const std::int64_t sample = block.sample * spec.out * sizes.pixels_out;
  if (spec.tokens_out) {
    return {sample + block.first * spec.out + channel, 1, spec.out};
  }
  return {sample + channel * sizes.pixels_out + block.first, sizes.pixels_out, 1};
}

GemmOperand Weights(const ModelOpCall& call, const HostConvSizes& sizes, std::int64_t group,
                    bool transposed) {
  const ConstView& w = call.params[0];
  return At(w.data, w.dtype, group * sizes.channels_out * sizes.taps, transposed ? 1 : sizes.taps,
            transposed ? sizes.taps : 1);
}

// Fills the output with the bias, to which the products are then added.
void SetBias(const ModelOpCall& call, const HostConvSizes& sizes) {
  const OpSpec& spec = *call.spec;
  const View& y = call.outputs[0];
  ForEachRowChunk(call.team, call.batch * spec.out, sizes.pixels_out,
                  [&](std::int64_t plane, std::int64_t begin, std::int64_t n) {
                    float bias = 0.0F;
                    LoadFloats(call.params[1], plane % spec.out, 1, &bias);
                    ChunkBuffer values;
                    std::fill_n(values.values.data(), n, bias);
                    StoreFloats(values.values.data(), n, y, plane * sizes.pixels_out + begin);
                  });
}

void AddBiasGrad(const ModelOpCall& call, const HostConvSizes& sizes, float* sums) {
  const OpSpec& spec = *call.spec;
  const ConstView& dy = call.output_grads[0];
  std::fill_n(sums, spec.out, 0.0F);
  if (spec.tokens_out) {
    for (std::int64_t row = 0; row < call.batch * sizes.pixels_out; ++row) {
      ForEachChunk(spec.out, [&](std::int64_t begin, std::int64_t n) {
        ChunkBuffer buffer;
        VectorAdd(1.0F, ReadFloats(dy, row * spec.out + begin, n, buffer.values.data()),
                  sums + begin, n);
      });
    }
    return;
  }
  for (std::int64_t plane = 0; plane < call.batch * spec.out; ++plane) {
    ForEachChunk(sizes.pixels_out, [&](std::int64_t begin, std::int64_t n) {
      ChunkBuffer buffer;
      sums[plane % spec.out] +=
          VectorSum(ReadFloats(dy, plane * sizes.pixels_out + begin, n, buffer.values.data()), n);
    });
  }
}

void WeightGrad(const ModelOpCall& call, const HostConvSizes& sizes) {
  const OpSpec& spec = *call.spec;
  const ConstView& dy = call.output_grads[0];
  Scratch scratch(call.workspace);
  float* const columns = scratch.Floats(sizes.taps * sizes.pixels);
  float* const sums = scratch.Floats(spec.out * sizes.taps);
  const auto gemm =
      scratch.Take(HostGemmWorkspace(sizes.channels_out, sizes.taps, sizes.pixels, DType::kFp32));
  std::fill_n(sums, spec.out * sizes.taps, 0.0F);
  // Sums go image by image, so threads share what is done for one block.
  ForEachBlock(call, sizes, 0, Images(call), [&](const PixelBlock& block) {
    GemmOperand x = Unfold(call, sizes, block, columns, call.team);
    std::swap(x.row_stride, x.column_stride);
    const OutputPlace place = PlaceOf(spec, sizes, block);
    HostGemm({sizes.channels_out, sizes.taps, block.count},
             At(dy.data, dy.dtype, place.element, place.channel_stride, place.pixel_stride), x,
             {sums + block.group * sizes.channels_out * sizes.taps, DType::kFp32, sizes.taps, true},
             nullptr, gemm, call.team);
  });
  StoreParamGrad(sums, spec.out * sizes.taps, call.param_grads[0], 0);
}

void DataGrad(const ModelOpCall& call, const HostConvSizes& sizes, std::int64_t first,
              std::int64_t last, std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const ConstView& dy = call.output_grads[0];
  Scratch scratch(workspace);
  float* const columns = scratch.Floats(sizes.taps * sizes.pixels);
  float* const image = scratch.Floats(sizes.channels_in * sizes.pixels_in);
  const auto gemm =
      scratch.Take(HostGemmWorkspace(sizes.taps, sizes.pixels, sizes.channels_out, DType::kFp32));
  const std::int64_t elements = sizes.channels_in * sizes.pixels_in;
  ForEachBlock(call, sizes, first, last, [&](const PixelBlock& block) {
    if (block.first == 0) {
      std::fill_n(image, elements, 0.0F);
    }
    const OutputPlace place = PlaceOf(spec, sizes, block);
    HostGemm({sizes.taps, block.count, sizes.channels_out},
             Weights(call, sizes, block.group, /*transposed=*/true),
             At(dy.data, dy.dtype, place.element, place.channel_stride, place.pixel_stride),
             {columns, DType::kFp32, block.count}, nullptr, gemm);
    ForEachRun(spec, block, 0, sizes.taps, [&](const TapRun& run) {
      const float* const from = columns + run.tap * block.count + run.column;
      float* const to = image + run.element;
      if (spec.stride == 1) {
        VectorAdd(1.0F, from, to, run.count);
        return;
      }
      for (std::int64_t i = 0; i < run.count; ++i) {
        to[i * spec.stride] += from[i];
      }
    });
    if (block.first + block.count == sizes.pixels_out) {
      StoreFloats(image, elements, call.input_grads[0], InputAt(sizes, spec, block));
    }
  });
}

// Some images' outputs; `bias` is one number per column of a product, or null.
void ForwardImages(const ModelOpCall& call, const HostConvSizes& sizes, std::int64_t first,
                   std::int64_t last, const float* bias, Scratch scratch) {
  const OpSpec& spec = *call.spec;
  const View& y = call.outputs[0];
  float* const columns = scratch.Floats(sizes.taps * sizes.pixels);
  // Tokens are the product the other way round, where the bias is one per column.
  const auto gemm = scratch.Take(
      spec.tokens_out ? HostGemmWorkspace(sizes.pixels, sizes.channels_out, sizes.taps, y.dtype)
                      : HostGemmWorkspace(sizes.channels_out, sizes.pixels, sizes.taps, y.dtype));
  ForEachBlock(call, sizes, first, last, [&](const PixelBlock& block) {
    GemmOperand x = Unfold(call, sizes, block, columns, nullptr);
    const OutputPlace place = PlaceOf(spec, sizes, block);
    void* const to = static_cast<std::byte*>(y.data) + place.element * SizeOf(y.dtype);
    if (spec.tokens_out) {
      std::swap(x.row_stride, x.column_stride);
      HostGemm({block.count, sizes.channels_out, sizes.taps}, x,
               Weights(call, sizes, block.group, /*transposed=*/true),
               {to, y.dtype, place.pixel_stride},
               bias == nullptr ? nullptr : bias + block.group * sizes.channels_out, gemm);
    } else {
      HostGemm({sizes.channels_out, block.count, sizes.taps},
               Weights(call, sizes, block.group, /*transposed=*/false), x,
               {to, y.dtype, place.channel_stride, spec.has_bias}, nullptr, gemm);
    }
  });
}

}  // namespace

void Conv2dForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const HostConvSizes sizes = ConvSizesOf(spec);
  if (spec.has_bias && !spec.tokens_out) {
    SetBias(call, sizes);
  }
  ForEachPart(call.team, Images(call), LeastConvImages(sizes),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                Scratch scratch(WorkspaceOf(call, worker));
                float* const bias = scratch.Floats(spec.out);
                if (spec.has_bias && spec.tokens_out) {
                  LoadFloats(call.params[1], 0, spec.out, bias);
                }
                ForwardImages(call, sizes, first, last,
                              spec.has_bias && spec.tokens_out ? bias : nullptr, scratch);
              });
}

void Conv2dBackward(const ModelOpCall& call) {
  const HostConvSizes sizes = ConvSizesOf(*call.spec);
  if (call.input_grads[0].data != nullptr) {
    ForEachPart(call.team, Images(call), LeastConvImages(sizes),
                [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                  DataGrad(call, sizes, first, last, WorkspaceOf(call, worker));
                });
  }
  if (Wants(call.param_grads, 0)) {
    WeightGrad(call, sizes);
  }
  if (Wants(call.param_grads, 1)) {
    Scratch scratch(call.workspace);
    float* const sums = scratch.Floats(call.spec->out);
    AddBiasGrad(call, sizes, sums);
    StoreParamGrad(sums, call.spec->out, call.param_grads[1], 0);
  }
}

}  // namespace shardwright
