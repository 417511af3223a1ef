// Linear layers whose products are in fp8: against the recipe in fp64, with numbers rounded by
// search in a list of all that a format has, and against the layer without rounding, with a bound
// that follows from the formats alone.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

struct Format {
  int fraction_bits, bias;
  double largest;
  [[nodiscard]] double Least() const { return std::ldexp(1.0, 1 - bias - fraction_bits); }
  [[nodiscard]] double Unit() const { return std::ldexp(1.0, -fraction_bits - 1); }  // relative
};
constexpr Format kE4m3{3, 7, 448.0};
constexpr Format kE5m2{2, 15, 57344.0};

// Its numbers from 0 on; the parity of the place is that of the fraction's last bit.
Numbers ValuesOf(const Format& f) {
  Numbers values;
  for (int code = 0; values.empty() || values.back() < f.largest; ++code) {
    const int fraction = code & ((1 << f.fraction_bits) - 1);
    const int exponent = code >> f.fraction_bits;
    values.push_back(exponent == 0
                         ? fraction * f.Least()
                         : std::ldexp((1 << f.fraction_bits) + fraction, exponent - 1) * f.Least());
  }
  return values;
}

double Nearest(const Numbers& values, double x) {
  const double size = std::fabs(x);
  const auto above = std::lower_bound(values.begin(), values.end(), size);
  if (above == values.end()) {
    return std::copysign(values.back(), x);
  }
  if (above == values.begin()) {
    return std::copysign(0.0, x);
  }
  const double up = *above - size, down = size - above[-1];
  const bool is_even = (above - values.begin()) % 2 == 0;
  return std::copysign(up < down || (up == down && is_even) ? *above : above[-1], x);
}

// A matrix, and how far its numbers may be from those that were rounded, by the formats alone.
struct Operand {
  std::int64_t lines = 0, length = 0;  // sums go over a line
  Numbers exact, rounded, bound;
};
Operand Round(std::int64_t lines, std::int64_t length, const Format& f, bool by_row,
              const Numbers& exact) {
  const Numbers values = ValuesOf(f);
  Operand o{lines, length, exact, exact, exact};
  for (std::int64_t line = 0; line < lines; ++line) {
    double most = 0.0;
    for (std::size_t i = by_row ? S(line * length) : 0;
         i < (by_row ? S((line + 1) * length) : exact.size()); ++i) {
      most = std::max(most, std::fabs(exact[i]));
    }
    double scale = static_cast<double>(static_cast<float>(f.largest / std::max(most, 1e-12)));
    scale = by_row ? std::exp2(std::floor(std::log2(scale))) : scale;
    for (std::int64_t i = 0; i < length; ++i) {
      double& x = o.rounded[S(line * length + i)];
      const double scaled = static_cast<double>(static_cast<float>(x) * static_cast<float>(scale));
      o.bound[S(line * length + i)] =
          std::max(std::fabs(x) * (f.Unit() + kU), f.Least() / 2 / scale);
      x = Nearest(values, scaled) / scale;
    }
  }
  return o;
}

Numbers Transpose(const Numbers& x, std::int64_t rows, std::int64_t columns) {
  Numbers y(x.size());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      y[S(j * rows + i)] = x[S(i * columns + j)];
    }
  }
  return y;
}

double UnitOf(DType dtype) {
  return dtype == DType::kFp32 ? 0x1p-24 : dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11;
}

struct Sum {
  double by_recipe = 0.0, exact = 0.0;
  double of_sizes = 0.0;  // of the magnitudes of what the recipe adds up
  double formats = 0.0;   // what rounding to the formats changes at most
};
Sum SumOf(const Operand& a, std::int64_t i, const Operand& b, std::int64_t j) {
  Sum sum;
  for (std::int64_t k = 0; k < a.length; ++k) {
    const std::size_t p = S(i * a.length + k), q = S(j * b.length + k);
    sum.by_recipe += a.rounded[p] * b.rounded[q];
    sum.exact += a.exact[p] * b.exact[q];
    sum.of_sizes += std::fabs(a.rounded[p] * b.rounded[q]);
    sum.formats += std::fabs(a.exact[p]) * b.bound[q] + std::fabs(b.exact[q]) * a.bound[p] +
                   a.bound[p] * b.bound[q];
  }
  return sum;
}

// actual (lines of a, lines of b) = a b^T + base.
void CheckProduct(const char* what, const Numbers& actual, const Operand& a, const Operand& b,
                  const Numbers& base, DType dtype) {
  double worst = 0.0, worst_by_formats = 0.0;
  for (std::int64_t i = 0; i < a.lines; ++i) {
    for (std::int64_t j = 0; j < b.lines; ++j) {
      const Sum sum = SumOf(a, i, b, j);
      const double got = actual[S(i * b.lines + j)];
      const double more = base.empty() ? 0.0 : base[S(j)];
      const double size = sum.of_sizes + std::fabs(more);
      // Roundings of sums in fp32 in any order, of scales and their use, and of the result.
      const double fp32 = static_cast<double>(a.length + 8) * kU * size +
                          SubjectUnderTest().fp8_sums * sum.of_sizes;
      const double stored = UnitOf(dtype) * (std::fabs(sum.by_recipe + more) + fp32) +
                            (dtype == DType::kFp16 ? 0x1p-25 : 0.0);
      const double error = std::fabs(got - (sum.by_recipe + more));
      worst = std::max(worst, error == 0.0 ? 0.0 : error / (fp32 + stored));
      const double all = std::fabs(got - (sum.exact + more));
      worst_by_formats =
          std::max(worst_by_formats, all == 0.0 ? 0.0 : all / (sum.formats + fp32 + stored));
    }
  }
  CAPTURE(what);
  CHECK(worst <= 1.0);
  CHECK(worst_by_formats <= 1.0);
  // Far below it nothing would have been rounded.
  CHECK(worst_by_formats >= 0.001);
}

KernelCase LayerCase(const OpSpec& spec, std::int64_t batch, Fp8Products products) {
  KernelCase c = MakeCase(spec, batch);
  const std::int64_t rows = batch * spec.rows;
  c.options.fp8 = products;
  c.inputs = {Normal(rows * spec.in, 1)};
  c.inputs[0][7] *= 3000.0;  // whoever shares its scale becomes subnormal or nothing
  c.params = {Normal(spec.in * spec.out, 2, 0.1)};
  c.params[0][11] *= 50.0;
  if (spec.has_bias) {
    c.params.push_back(Normal(spec.out, 3));
  }
  c.output_elements = {rows * spec.out};
  return c;
}

void CheckLayer(const KernelCase& given, DType dtype) {
  const KernelCase c = Rounded(given, dtype);
  const KernelRun run = RunKernel(c, dtype);
  const OpSpec& spec = c.spec;
  const std::int64_t rows = c.batch * spec.rows;
  const bool by_row = c.options.fp8 == Fp8Products::kPerRow;
  const Format& gradient = by_row ? kE4m3 : kE5m2;
  const Numbers weight =
      spec.transposed ? Transpose(c.params[0], spec.in, spec.out) : c.params[0];  // (out, in)
  CheckProduct("output", run.outputs[0], Round(rows, spec.in, kE4m3, by_row, c.inputs[0]),
               Round(spec.out, spec.in, kE4m3, by_row, weight),
               spec.has_bias ? c.params[1] : Numbers(), dtype);
  const Numbers& dy = run.output_grads[0];
  CheckProduct("input gradient", run.input_grads[0], Round(rows, spec.out, gradient, by_row, dy),
               Round(spec.in, spec.out, kE4m3, by_row, Transpose(weight, spec.out, spec.in)), {},
               dtype);
  const Numbers dw =
      spec.transposed ? Transpose(run.param_grads[0], spec.in, spec.out) : run.param_grads[0];
  CheckProduct("weight gradient", dw,
               Round(spec.out, rows, gradient, by_row, Transpose(dy, rows, spec.out)),
               Round(spec.in, rows, kE4m3, by_row, Transpose(c.inputs[0], rows, spec.in)),
               c.accumulate ? Numbers(S(spec.in), 1.0) : Numbers(), c.grad_dtype);
  if (spec.has_bias) {
    for (std::int64_t j = 0; j < spec.out; ++j) {
      double sum = c.accumulate ? 1.0 : 0.0, size = 1.0;
      for (std::int64_t i = 0; i < rows; ++i) {
        sum += dy[S(i * spec.out + j)];
        size += std::fabs(dy[S(i * spec.out + j)]);
      }
      CHECK(std::fabs(run.param_grads[1][S(j)] - sum) <=
            static_cast<double>(rows + 2) * kU * size + UnitOf(c.grad_dtype) * std::fabs(sum));
    }
  }
}

}  // namespace

TEST_CASE("Fp8Products.AreTheRecipes") {
  for (const DType dtype : kAllDTypes) {
    for (const Fp8Products products : {Fp8Products::kPerTensor, Fp8Products::kPerRow}) {
      for (const bool transposed : {false, true}) {
        for (const bool has_bias : {false, true}) {
          CAPTURE(static_cast<int>(dtype));
          CAPTURE(static_cast<int>(products));
          CAPTURE(transposed);
          KernelCase c = LayerCase({.kind = OpKind::kLinear,
                                    .rows = 9,
                                    .in = 48,
                                    .out = 32,
                                    .has_bias = has_bias,
                                    .transposed = transposed},
                                   3, products);
          c.accumulate = has_bias;
          CheckLayer(c, dtype);
          c.accumulate = false;
          c.grad_dtype = dtype;
          CheckLayer(c, dtype);
        }
      }
    }
  }
}

TEST_CASE("Fp8Products.AcrossBlocks") {
  for (const Fp8Products products : {Fp8Products::kPerTensor, Fp8Products::kPerRow}) {
    CheckLayer(LayerCase({.kind = OpKind::kLinear, .rows = 70, .in = 272, .out = 528}, 1, products),
               DType::kBf16);
    CheckLayer(LayerCase({.kind = OpKind::kLinear,
                          .rows = 401,
                          .in = 96,
                          .out = 80,
                          .has_bias = true,
                          .transposed = true},
                         1, products),
               DType::kBf16);
  }
}

// torch._scaled_mm of PyTorch 2.13 on the CPU, of operands rounded as torchao rounds them, gave
// these for rows 0 and 17: x = ((37 i) % 101 - 50) / 16, its column 3 times 7, and the weight
// ((53 i) % 89 - 44) / 64. Sums in another order may move a result by one bf16 number.
TEST_CASE("Fp8Products.ArePyTorchs") {
  const Numbers expected[2][2] = {
      {{-1.078125, 6.4375, -10.3125, -3.59375, 4.03125, -1.9609375, 0.578125, -4.28125, 5.9375,
        4.96875, -3.5625, 3.578125, 0.60546875, 6.375, -11.8125, -3.90625},
       {-10.0625, 1.765625, -14.0, -2.671875, 9.1875, -4.8125, 1.7734375, -10.125, 4.09375, 8.4375,
        0.03369140625, 11.9375, -7.875, 1.421875, -14.875, -3.203125}},
      {{-1.328125, 6.4375, -9.9375, -3.75, 4.09375, -2.296875, 0.5625, -3.578125, 6.03125, 4.96875,
        -3.265625, 2.859375, 0.2451171875, 6.15625, -11.125, -3.6875},
       {-9.8125, 1.296875, -13.125, -2.703125, 9.0, -4.59375, 1.828125, -8.8125, 4.0, 7.46875,
        0.419921875, 11.125, -7.34375, 0.984375, -13.9375, -2.953125}}};
  for (const bool by_row : {false, true}) {
    KernelCase c = MakeCase({.kind = OpKind::kLinear, .rows = 32, .in = 48, .out = 16}, 1);
    c.options.fp8 = by_row ? Fp8Products::kPerRow : Fp8Products::kPerTensor;
    c.inputs = {Numbers(S(32 * 48))};
    c.params = {Numbers(S(48 * 16))};
    for (std::int64_t i = 0; i < 32 * 48; ++i) {
      c.inputs[0][S(i)] = static_cast<double>(37 * i % 101 - 50) / 16 * (i % 48 == 3 ? 7 : 1);
    }
    for (std::int64_t i = 0; i < 48 * 16; ++i) {
      c.params[0][S(i)] = static_cast<double>(53 * i % 89 - 44) / 64;
    }
    c.output_elements = {32 * 16};
    const KernelRun run = RunKernel(Rounded(c, DType::kBf16), DType::kBf16);
    for (std::int64_t j = 0; j < 16; ++j) {
      for (const std::int64_t row : {0, 17}) {
        const double value = expected[by_row ? 1 : 0][row == 0 ? 0 : 1][S(j)];
        CHECK(std::fabs(run.outputs[0][S(row * 16 + j)] - value) <= 0x1p-7 * std::fabs(value));
      }
    }
  }
}

// A layer whose sizes tensor cores do not take has the bits that it has without fp8.
TEST_CASE("Fp8Products.LeaveOtherLayersAlone") {
  const OpSpec spec{.kind = OpKind::kLinear, .rows = 16, .in = 24, .out = 32};
  const KernelRun with = RunKernel(LayerCase(spec, 1, Fp8Products::kPerTensor), DType::kBf16);
  const KernelRun without = RunKernel(LayerCase(spec, 1, Fp8Products::kNone), DType::kBf16);
  CHECK(with.bits == without.bits);
}

// Nothing but zeros and a bias; a number that is none spoils what it takes part in.
TEST_CASE("Fp8Products.OfZerosAndNans") {
  const OpSpec spec{.kind = OpKind::kLinear, .rows = 16, .in = 32, .out = 16, .has_bias = true};
  for (const Fp8Products products : {Fp8Products::kPerTensor, Fp8Products::kPerRow}) {
    KernelCase c = Rounded(LayerCase(spec, 1, products), DType::kBf16);
    c.inputs[0].assign(c.inputs[0].size(), 0.0);
    const KernelRun run = RunKernel(c, DType::kBf16);
    for (std::int64_t i = 0; i < 16 * 16; ++i) {
      CHECK(run.outputs[0][S(i)] == c.params[1][S(i % 16)]);
    }
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      c.inputs[0][3] = bad;
      const KernelRun spoilt = RunKernel(c, DType::kBf16);
      CHECK(std::isnan(spoilt.outputs[0][0]));
    }
  }
}

}  // namespace shardwright::testing
