// Convolution and pools against fp64 loops and finite differences.

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

std::vector<Numbers> ConvOracle(const KernelCase& c, const std::vector<Numbers>& in,
                                const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  const std::int64_t in_group = s.in / s.groups;
  const std::int64_t out_group = s.out / s.groups;
  const std::int64_t pixels = s.height_out * s.width_out;
  Numbers y(S(c.batch * s.out * pixels));
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t o = 0; o < s.out; ++o) {
      for (std::int64_t p = 0; p < pixels; ++p) {
        double sum = s.has_bias ? params[1][S(o)] : 0.0;
        for (std::int64_t i = 0; i < in_group; ++i) {
          for (std::int64_t ky = 0; ky < s.kernel; ++ky) {
            for (std::int64_t kx = 0; kx < s.kernel; ++kx) {
              const std::int64_t yy = p / s.width_out * s.stride + ky - s.padding;
              const std::int64_t xx = p % s.width_out * s.stride + kx - s.padding;
              if (yy < 0 || yy >= s.height || xx < 0 || xx >= s.width) {
                continue;
              }
              const std::int64_t channel = o / out_group * in_group + i;
              sum += in[0][S(((b * s.in + channel) * s.height + yy) * s.width + xx)] *
                     params[0][S(((o * in_group + i) * s.kernel + ky) * s.kernel + kx)];
            }
          }
        }
        y[S(s.tokens_out ? (b * pixels + p) * s.out + o : (b * s.out + o) * pixels + p)] = sum;
      }
    }
  }
  return {y};
}

struct ConvShape {
  std::int64_t in, out, height, width, kernel, stride, padding, groups;
  bool has_bias, tokens_out;
};

KernelCase ConvCase(const ConvShape& shape, std::int64_t batch) {
  const auto slide = [&](std::int64_t size) {
    return (size + 2 * shape.padding - shape.kernel) / shape.stride + 1;
  };
  KernelCase c = MakeCase({.kind = OpKind::kConv2d,
                           .in = shape.in,
                           .out = shape.out,
                           .has_bias = shape.has_bias,
                           .height = shape.height,
                           .width = shape.width,
                           .height_out = slide(shape.height),
                           .width_out = slide(shape.width),
                           .kernel = shape.kernel,
                           .stride = shape.stride,
                           .padding = shape.padding,
                           .groups = shape.groups,
                           .tokens_out = shape.tokens_out},
                          batch);
  c.inputs = {Normal(batch * shape.in * shape.height * shape.width, 1)};
  c.params = {Normal(shape.out * shape.in / shape.groups * shape.kernel * shape.kernel, 2)};
  if (shape.has_bias) {
    c.params.push_back(Normal(shape.out, 3));
  }
  c.output_elements = {batch * shape.out * c.spec.height_out * c.spec.width_out};
  return c;
}

KernelCase PoolCase(OpKind kind, std::int64_t kernel, std::int64_t stride, std::int64_t padding) {
  const auto slide = [&](std::int64_t size) { return (size + 2 * padding - kernel) / stride + 1; };
  KernelCase c = MakeCase({.kind = kind,
                           .in = 3,
                           .height = 6,
                           .width = 7,
                           .height_out = slide(6),
                           .width_out = slide(7),
                           .kernel = kernel,
                           .stride = stride,
                           .padding = padding},
                          2);
  c.inputs = {Normal(2 * 3 * 42, 1)};
  c.output_elements = {2 * 3 * c.spec.height_out * c.spec.width_out};
  return c;
}

std::vector<Numbers> PoolOracle(const KernelCase& c, const std::vector<Numbers>& in) {
  const OpSpec& s = c.spec;
  Numbers y;
  for (std::int64_t plane = 0; plane < c.batch * s.in; ++plane) {
    for (std::int64_t p = 0; p < s.height_out * s.width_out; ++p) {
      double sum = 0.0;
      double largest = -1e300;
      for (std::int64_t k = 0; k < s.kernel * s.kernel; ++k) {
        const std::int64_t yy = p / s.width_out * s.stride + k / s.kernel - s.padding;
        const std::int64_t xx = p % s.width_out * s.stride + k % s.kernel - s.padding;
        if (yy >= 0 && yy < s.height && xx >= 0 && xx < s.width) {
          const double value = in[0][S((plane * s.height + yy) * s.width + xx)];
          sum += value;
          largest = std::max(largest, value);
        }
      }
      y.push_back(s.kind == OpKind::kMaxPool ? largest
                                             : sum / static_cast<double>(s.kernel * s.kernel));
    }
  }
  return {y};
}

}  // namespace

TEST_CASE("HostKernels.Conv2d") {
  for (const DType dtype : kAllDTypes) {
    for (const ConvShape& shape :
         {ConvShape{2, 4, 5, 6, 3, 1, 1, 1, true, false},
          ConvShape{4, 6, 5, 5, 3, 2, 1, 2, true, false},    // grouped
          ConvShape{4, 4, 4, 5, 3, 1, 1, 4, false, false},   // depthwise
          ConvShape{3, 5, 4, 3, 1, 1, 0, 1, true, false},    // 1 x 1
          ConvShape{2, 2, 5, 6, 1, 2, 0, 1, false, false},   // shortcut
          ConvShape{2, 2, 2, 1, 3, 1, 2, 1, true, false},    // past the edge
          ConvShape{1, 2, 7, 8, 5, 3, 4, 1, false, false},   // rows of padding
          ConvShape{2, 3, 6, 6, 2, 2, 0, 1, true, true}}) {  // patches
      KernelCase c = ConvCase(shape, 2);
      // Sums of at most 4 * 9 products, or of 2 * 30 for weights, of numbers below 4.
      CheckKernel(c, dtype,
                  [&c](const auto& in, const auto& params) { return ConvOracle(c, in, params); },
                  {.absolute = 60 * 60 * 4 * kU, .relative = 0.0});
      c.grad_dtype = dtype;  // gradients that are reduced in the compute dtype
      CheckKernel(c, dtype,
                  [&c](const auto& in, const auto& params) { return ConvOracle(c, in, params); },
                  {.absolute = 60 * 60 * 4 * kU, .relative = 0.0});
    }
  }
}

TEST_CASE("HostKernels.Conv2dAcrossBlocks") {
  // 576 pixels are more than one block of 512.
  for (const bool tokens_out : {false, true}) {
    for (const std::int64_t stride : {1, 2}) {
      // With a stride of 2, rows of 23 pixels: 529 of them, and a row that two blocks share.
      const std::int64_t side = stride == 1 ? 24 : 46;
      KernelCase c = ConvCase({2, 3, side, side, 3, stride, 1, 1, true, tokens_out}, 1);
      CheckKernel(c, DType::kFp32,
                  [&c](const auto& in, const auto& params) { return ConvOracle(c, in, params); },
                  {.absolute = 576 * 16 * kU, .relative = 0.0});
    }
  }
}

// Up to 16 x 5 x 5 = 400 taps, which a product sums in panels of 256, and up to 10 images.
TEST_CASE("HostKernels.Conv2dOfManyTaps") {
  for (const auto& [shape, batch] :
       {std::pair{ConvShape{20, 40, 9, 8, 3, 1, 1, 1, true, false}, 2},
        std::pair{ConvShape{16, 33, 13, 7, 5, 2, 2, 1, false, false}, 1},
        std::pair{ConvShape{3, 48, 20, 20, 7, 2, 3, 1, true, false}, 2},  // a first layer
        std::pair{ConvShape{16, 70, 10, 10, 3, 1, 0, 1, true, false}, 10}}) {
    KernelCase c = ConvCase(shape, batch);
    CheckKernel(c, DType::kFp32,
                [&c](const auto& in, const auto& params) { return ConvOracle(c, in, params); },
                {.absolute = 20 * 9 * 40 * 16 * kU, .relative = 0.0});
  }
}

TEST_CASE("HostKernels.Pools") {
  for (const DType dtype : kAllDTypes) {
    for (const OpKind kind : {OpKind::kMaxPool, OpKind::kAvgPool}) {
      for (const auto& [kernel, stride, padding] :
           {std::tuple{2, 2, 0}, std::tuple{3, 2, 1}, std::tuple{3, 1, 1}, std::tuple{3, 3, 0},
            std::tuple{2, 4, 0}}) {
        KernelCase c = PoolCase(kind, kernel, stride, padding);
        CheckKernel(c, dtype, [&c](const auto& in, const auto&) { return PoolOracle(c, in); },
                    {.absolute = 40 * kU, .relative = 0.0});
      }
    }
    KernelCase c = PoolCase(OpKind::kAvgPool, 6, 6, 0);  // global: the whole plane of 6 x 7
    REQUIRE(c.spec.width_out == 1);
    CheckKernel(c, dtype,
                [](const auto& in, const auto&) {
                  Numbers y(6, 0.0);
                  for (std::size_t i = 0; i < in[0].size(); ++i) {
                    y[i / 42] += in[0][i] / 42.0;
                  }
                  return std::vector<Numbers>{y};
                },
                {.absolute = 84 * kU, .relative = 0.0});
  }
}

TEST_CASE("HostKernels.MaxPoolOfEqualNumbersTakesTheFirst") {
  KernelCase c = PoolCase(OpKind::kMaxPool, 2, 2, 0);
  c.inputs[0].assign(c.inputs[0].size(), 1.0);
  const KernelRun run = RunKernel(c, DType::kFp32);
  CHECK(run.input_grads[0][0] == run.output_grads[0][0]);
  CHECK(run.input_grads[0][1] == 0.0);
  CHECK(run.input_grads[0][7] == 0.0);
}

}  // namespace shardwright::testing
