// Convolution, pools, batch norm and mixture of experts against fp64 loops and finite differences.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

constexpr double kU = 0x1p-24;
constexpr DType kAllDTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

std::size_t S(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

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

double Silu(double x) {
  return x / (1.0 + std::exp(-x));
}

// Routing weights of each row: softmax or sigmoid, the k best, divided by their sum.
std::vector<Numbers> RouterOracle(const KernelCase& c, const std::vector<Numbers>& in,
                                  const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  Numbers y;
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    Numbers scores(S(s.experts));
    double sum = 0.0;
    for (std::int64_t e = 0; e < s.experts; ++e) {
      double logit = 0.0;
      for (std::int64_t i = 0; i < s.in; ++i) {
        logit += in[0][S(r * s.in + i)] * params[0][S(e * s.in + i)];
      }
      scores[S(e)] = s.scores_by_sigmoid ? 1.0 / (1.0 + std::exp(-logit)) : std::exp(logit);
      sum += scores[S(e)];
    }
    for (double& score : scores) {
      score = s.scores_by_sigmoid ? score : score / sum;
    }
    Numbers ordered = scores;
    if (s.groups_per_token > 0) {  // two groups, the better one remains
      const auto best_two = [&](std::int64_t g) {
        Numbers group(ordered.begin() + g * s.experts / 2,
                      ordered.begin() + (g + 1) * s.experts / 2);
        std::sort(group.rbegin(), group.rend());
        return group[0] + group[1];
      };
      const std::int64_t loser = best_two(0) >= best_two(1) ? 1 : 0;
      std::fill_n(ordered.begin() + loser * s.experts / 2, s.experts / 2, -1.0);
    }
    std::sort(ordered.rbegin(), ordered.rend());
    double chosen_sum = 0.0;
    for (std::int64_t k = 0; k < s.experts_per_token; ++k) {
      chosen_sum += ordered[S(k)];
    }
    const double smallest = ordered[S(s.experts_per_token - 1)];
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const bool in_group = s.groups_per_token == 0 ||
                            std::find(ordered.begin(), ordered.begin() + s.experts_per_token,
                                      scores[S(e)]) != ordered.begin() + s.experts_per_token;
      const double weight =
          scores[S(e)] / (s.normalizes_top_k ? chosen_sum : 1.0) * (s.factor > 0 ? s.factor : 1.0);
      y.push_back(in_group && scores[S(e)] >= smallest ? weight : 0.0);
    }
  }
  return {y};
}

// x (rows, in) through every expert with its weight of `routing`.
std::vector<Numbers> ExpertsOracle(const KernelCase& c, const std::vector<Numbers>& in,
                                   const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  const std::int64_t per_expert = s.gated ? 3 : 2;
  Numbers y(S(c.batch * s.rows * s.in), 0.0);
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const double weight = in[1][S(r * s.experts + e)];
      const auto project = [&](std::int64_t matrix, std::int64_t o) {
        double sum = 0.0;
        for (std::int64_t i = 0; i < s.in; ++i) {
          sum += in[0][S(r * s.in + i)] * params[S(e * per_expert + matrix)][S(o * s.in + i)];
        }
        return sum;
      };
      const std::int64_t up = s.gated ? (s.up_last ? 2 : 1) : 0;
      const std::int64_t down = s.gated ? (s.up_last ? 1 : 2) : 1;
      for (std::int64_t o = 0; o < s.out; ++o) {
        const double hidden = s.gated ? Silu(project(0, o)) * project(up, o) : Silu(project(up, o));
        for (std::int64_t i = 0; i < s.in; ++i) {
          y[S(r * s.in + i)] +=
              weight * hidden * params[S(e * per_expert + down)][S(i * s.out + o)];
        }
      }
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
      c.grad_dtype = dtype;  // which is what a library takes
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

// By oneDNN where it is installed: channels in blocks of 8 or 16, weights' gradients of 32 output
// channels and of some images at a time.
TEST_CASE("HostKernels.Conv2dInBlocks") {
  for (const auto& [shape, batch] :
       {std::pair{ConvShape{20, 40, 9, 8, 3, 1, 1, 1, true, false}, 2},
        std::pair{ConvShape{16, 33, 13, 7, 5, 2, 2, 1, false, false}, 1},
        std::pair{ConvShape{3, 48, 20, 20, 7, 2, 3, 1, true, false}, 2},       // a first layer
        std::pair{ConvShape{16, 70, 10, 10, 3, 1, 0, 1, true, false}, 10}}) {  // 8 images and 2
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

namespace {

// Of images of `channels` planes.
Oracle BatchNormOracle(std::size_t batch, std::size_t channels, std::size_t plane) {
  return [=](const std::vector<Numbers>& in, const std::vector<Numbers>& params) {
    Numbers y = in[0];
    const auto n = static_cast<double>(batch * plane);
    for (std::size_t channel = 0; channel < channels; ++channel) {
      double mean = 0.0;
      double square = 0.0;
      for (int pass = 0; pass < 3; ++pass) {
        for (std::size_t b = 0; b < batch; ++b) {
          for (std::size_t p = 0; p < plane; ++p) {
            double& v = y[(b * channels + channel) * plane + p];
            if (pass == 0) {
              mean += v / n;
            } else if (pass == 1) {
              square += (v - mean) * (v - mean) / n;
            } else {
              v = (v - mean) / std::sqrt(square + 1e-5) * params[0][channel] + params[1][channel];
            }
          }
        }
      }
    }
    return std::vector<Numbers>{y};
  };
}

}  // namespace

TEST_CASE("HostKernels.BatchNorm") {
  const Oracle oracle = BatchNormOracle(2, 3, 20);
  for (const DType dtype : kAllDTypes) {
    KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                             .in = 3,
                             .has_bias = true,
                             .height = 4,
                             .width = 5,
                             .epsilon = 1e-5},
                            2);
    c.inputs = {Normal(2 * 3 * 20, 1)};
    c.params = {Normal(3, 2), Normal(3, 3)};
    c.output_elements = {2 * 3 * 20};
    CheckKernel(c, dtype, oracle, {.absolute = 200 * kU, .relative = 50 * kU});

    // Running statistics: 0.9 of the old and 0.1 of the new, the variance divided by n - 1.
    c.buffers = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 0.0F};
    const KernelRun run = RunKernel(c, DType::kFp32);
    double mean = 0.0;
    double square = 0.0;
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t p = 0; p < 20; ++p) {
        mean += c.inputs[0][(b * 3 + 1) * 20 + p] / 40.0;
      }
    }
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t p = 0; p < 20; ++p) {
        square += std::pow(c.inputs[0][(b * 3 + 1) * 20 + p] - mean, 2) / 39.0;
      }
    }
    CHECK(static_cast<double>(run.buffers[1]) == doctest::Approx(1.8 + 0.1 * mean).epsilon(1e-6));
    CHECK(static_cast<double>(run.buffers[4]) == doctest::Approx(4.5 + 0.1 * square).epsilon(1e-6));
    // In evaluation they replace the batch's.
    c.is_training = false;
    const KernelRun eval = RunKernel(c, DType::kFp32);
    CHECK(eval.buffers == c.buffers);
    CHECK(eval.outputs[0][0] ==
          doctest::Approx((c.inputs[0][0] - 1.0) / std::sqrt(4.0 + 1e-5) * c.params[0][0] +
                          c.params[1][0])
              .epsilon(1e-5));
  }
}

// Planes of more elements than threads take at once.
TEST_CASE("HostKernels.BatchNormAcrossBlocks") {
  KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                           .in = 2,
                           .has_bias = true,
                           .height = 71,
                           .width = 303,
                           .epsilon = 1e-5},
                          2);
  constexpr std::int64_t kPlane = std::int64_t{71} * 303;
  c.inputs = {Normal(2 * 2 * kPlane, 1)};
  c.params = {Normal(2, 2), Normal(2, 3)};
  c.output_elements = {2 * 2 * kPlane};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    CheckKernel(c, dtype, BatchNormOracle(2, 2, kPlane),
                {.absolute = 2 * kPlane * 8 * kU, .relative = 50 * kU});
  }
}

namespace {

using Floats = std::vector<float>;

template <class T>
ConstView ReadOnly(const std::vector<T>& numbers) {
  return {numbers.data(), DType::kFp32, static_cast<std::int64_t>(numbers.size())};
}
View Writable(Floats& numbers) {
  return {numbers.data(), DType::kFp32, static_cast<std::int64_t>(numbers.size())};
}
std::span<std::byte> BytesOf(Floats& numbers) {
  return std::as_writable_bytes(std::span<float>(numbers));
}

// What one of several ranks holds of a synchronised batch norm.
struct NormRank {
  std::int64_t batch = 0;
  Floats x, dy, y, dx, exchange, running;
  Floats saved = Floats(7, NAN), weight_grad = Floats(3, NAN), bias_grad = Floats(3, NAN);
};

void RunPart(const OpSpec& spec, const KernelCase& c, const std::vector<Floats>& params,
             NormRank& r, OpPart part, bool is_backward) {
  ModelOpCall call;
  call.spec = &spec;
  call.options = &c.options;
  call.batch = r.batch;
  call.part = part;
  call.inputs = {ReadOnly(r.x)};
  call.params = {ReadOnly(params[0]), ReadOnly(params[1])};
  call.outputs = {part == OpPart::kAfterExchange ? Writable(r.y) : View()};
  call.saved = BytesOf(r.saved);
  call.exchange = BytesOf(r.exchange);
  call.buffers = r.running.data();
  if (is_backward) {
    call.output_grads = {ReadOnly(r.dy)};
    call.input_grads = {part == OpPart::kAfterExchange ? Writable(r.dx) : View()};
    call.param_grads.resize(2);
    if (part == OpPart::kBeforeExchange) {
      call.param_grads[0].view = Writable(r.weight_grad);
      call.param_grads[1].view = Writable(r.bias_grad);
    }
  }
  SubjectUnderTest().run(call, is_backward);
}

Floats Slice(const Numbers& numbers, std::int64_t begin, std::int64_t count) {
  return {numbers.begin() + begin, numbers.begin() + begin + count};
}

void CheckClose(const Floats& actual, const Numbers& whole, std::int64_t begin, double bound) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double expected = whole[S(begin) + i];
    CHECK(std::abs(static_cast<double>(actual[i]) - expected) <=
          bound * std::max(1.0, std::abs(expected)));
  }
}

}  // namespace

// Ranks with batches of 1, 2 and 3 samples, exchanging what they declare, against one rank with all
// six. Each lies within 200 u of the exact numbers (as above), for the mean is some 3, three times
// that.
TEST_CASE("HostKernels.BatchNormOfSeveralRanks") {
  constexpr std::int64_t kSample = 3 * 4 * 5;
  constexpr double kBound = 2 * 600 * kU;
  KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                           .in = 3,
                           .has_bias = true,
                           .height = 4,
                           .width = 5,
                           .epsilon = 1e-5},
                          6);
  c.inputs = {Normal(6 * kSample, 1)};
  for (std::size_t i = 0; i < c.inputs[0].size(); ++i) {  // the ranks' means differ, too
    c.inputs[0][i] = static_cast<double>(
        static_cast<float>(c.inputs[0][i] + 3.0 + 0.2 * static_cast<double>(i / kSample)));
  }
  c.params = {Normal(3, 2), Normal(3, 3)};
  c.output_elements = {6 * kSample};
  c.buffers = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 0.0F};
  const KernelRun whole = RunKernel(c, DType::kFp32);

  OpSpec spec = c.spec;
  spec.synchronized = true;
  const OpKernels kernels = LowerOp(spec, 1, DType::kFp32, c.options);
  CHECK(kernels.forward_exchange.bytes == Bytes(7 * 4));  // 3 means, 3 sums of squares, a count
  CHECK(kernels.backward_exchange.bytes == Bytes(6 * 4));
  CHECK(kernels.extra_saved == Bytes(7 * 4));
  const std::vector<Floats> params = {Slice(c.params[0], 0, 3), Slice(c.params[1], 0, 3)};
  std::vector<NormRank> ranks;
  Floats gathered;
  std::int64_t begin = 0;
  for (const std::int64_t batch : {1, 2, 3}) {
    NormRank r{.batch = batch,
               .x = Slice(c.inputs[0], begin, batch * kSample),
               .dy = Slice(whole.output_grads[0], begin, batch * kSample),
               .y = Floats(S(batch * kSample), NAN),
               .dx = Floats(S(batch * kSample), NAN),
               .exchange = Floats(7, NAN),
               .running = c.buffers};
    begin += batch * kSample;
    RunPart(spec, c, params, r, OpPart::kBeforeExchange, false);
    gathered.insert(gathered.end(), r.exchange.begin(), r.exchange.end());
    ranks.push_back(std::move(r));
  }
  Floats sums(6, 0.0F);
  Floats param_grads(6, 0.0F);
  for (NormRank& r : ranks) {
    r.exchange = gathered;
    RunPart(spec, c, params, r, OpPart::kAfterExchange, false);
    r.exchange = Floats(6, NAN);
    RunPart(spec, c, params, r, OpPart::kBeforeExchange, true);
    for (std::size_t i = 0; i < 6; ++i) {
      sums[i] += r.exchange[i];
      param_grads[i] += (i < 3 ? r.weight_grad : r.bias_grad)[i % 3];
    }
  }
  begin = 0;
  for (NormRank& r : ranks) {
    r.exchange = sums;
    RunPart(spec, c, params, r, OpPart::kAfterExchange, true);
    CheckClose(r.y, whole.outputs[0], begin, kBound);
    CheckClose(r.dx, whole.input_grads[0], begin, kBound);
    CheckClose(r.running, {whole.buffers.begin(), whole.buffers.end()}, 0, kBound);
    begin += r.batch * kSample;
  }
  CheckClose({param_grads.begin(), param_grads.begin() + 3}, whole.param_grads[0], 0, 60 * kBound);
  CheckClose({param_grads.begin() + 3, param_grads.end()}, whole.param_grads[1], 0, 60 * kBound);
}

TEST_CASE("HostKernels.Router") {
  for (const DType dtype : kAllDTypes) {
    for (const bool normalizes : {false, true}) {
      for (const bool by_sigmoid : {false, true}) {
        KernelCase c = MakeCase({.kind = OpKind::kRouter,
                                 .rows = 3,
                                 .in = 4,
                                 .groups = by_sigmoid ? 2 : 1,
                                 .experts = 6,
                                 .experts_per_token = 2,
                                 .factor = by_sigmoid ? 2.5 : 0.0,
                                 .normalizes_top_k = normalizes,
                                 .scores_by_sigmoid = by_sigmoid,
                                 .groups_per_token = by_sigmoid ? 1 : 0},
                                2);
        c.inputs = {Normal(6 * 4, 1)};
        c.params = {Normal(6 * 4, 2)};
        c.output_elements = {6 * 6};
        CheckKernel(
            c, dtype,
            [&c](const auto& in, const auto& params) { return RouterOracle(c, in, params); },
            {.absolute = 600 * kU, .relative = 64 * kU});
      }
    }
  }
}

TEST_CASE("HostKernels.RouterAcrossBlocks") {
  KernelCase c = MakeCase(
      {.kind = OpKind::kRouter, .rows = 150, .in = 300, .experts = 6, .experts_per_token = 2}, 1);
  c.inputs = {Normal(150 * 300, 1)};
  c.params = {Normal(6 * 300, 2, 1.0 / 16)};
  c.output_elements = {150 * 6};
  CheckKernel(c, DType::kFp32,
              [&c](const auto& in, const auto& params) { return RouterOracle(c, in, params); },
              {.absolute = 150 * 16 * kU, .relative = 64 * kU});
}

TEST_CASE("HostKernels.RouterCorrectionSteersTheChoiceOnly") {
  KernelCase c = MakeCase({.kind = OpKind::kRouter,
                           .rows = 1,
                           .in = 1,
                           .experts = 3,
                           .experts_per_token = 1,
                           .scores_by_sigmoid = true},
                          1);
  c.inputs = {{1.0}};
  c.params = {{2.0, 1.0, 0.0}};
  c.output_elements = {3};
  c.buffers = {0.0F, 0.0F, 1.0F};
  const KernelRun run = RunKernel(c, DType::kFp32);
  CHECK(run.outputs[0] == Numbers{0.0, 0.0, 0.5});
}

TEST_CASE("HostKernels.Experts") {
  for (const DType dtype : kAllDTypes) {
    for (const bool gated : {false, true}) {
      for (const MoeDispatch dispatch : {MoeDispatch::kGrouped, MoeDispatch::kDense}) {
        KernelCase c = MakeCase({.kind = OpKind::kExperts,
                                 .rows = 3,
                                 .in = 4,
                                 .out = 5,
                                 .gated = gated,
                                 .activation = Activation::kSilu,
                                 .experts = 4,
                                 .experts_per_token = 2,
                                 .up_last = gated},
                                2);
        c.options.moe_dispatch = dispatch;
        c.inputs = {Normal(6 * 4, 1), Numbers(6 * 4, 0.0)};
        // Two experts per row; the last one gets no row at all.
        for (std::int64_t r = 0; r < 6; ++r) {
          c.inputs[1][S(r * 4 + r % 3)] = 0.75;
          c.inputs[1][S(r * 4 + (r + 1) % 3)] = 0.25;
        }
        for (std::int64_t e = 0; e < 4; ++e) {
          for (std::int64_t matrix = 0; matrix < (gated ? 3 : 2); ++matrix) {
            c.params.push_back(Normal(20, S(10 + e * 3 + matrix)));
          }
        }
        c.output_elements = {6 * 4};
        Oracle oracle = [&c](const auto& in, const auto& params) {
          return ExpertsOracle(c, in, params);
        };
        if (dispatch == MoeDispatch::kGrouped) {
          // An expert that was not chosen has no gradient of its weight: keep those constant.
          oracle = [&c](std::vector<Numbers> in, const auto& params) {
            for (std::size_t i = 0; i < in[1].size(); ++i) {
              in[1][i] = c.inputs[1][i] == 0.0 ? 0.0 : in[1][i];
            }
            return ExpertsOracle(c, in, params);
          };
        }
        // Gate and up projections, numbers up to 8, are kept in 16 bits: each is off by up to 8 u,
        // and so is the hidden row times the other one; sums of five such terms times weights up
        // to 2.
        const double kept = dtype == DType::kFp32 ? 0.0 : (dtype == DType::kBf16 ? 0.25 : 0.03);
        KernelCase forward = c;
        CheckKernel(forward, dtype, oracle,
                    {.absolute = 5000 * kU + 2.0 * kept, .relative = 100 * kU});
        c.accumulate = true;
        CheckKernel(c, dtype, oracle, {.absolute = 5000 * kU + 2.0 * kept, .relative = 100 * kU});
      }
    }
  }
}

}  // namespace shardwright::testing
