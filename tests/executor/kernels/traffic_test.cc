// What the CUDA device's kernels move, counted on the emulated GPU, against the least by hand:
// every operand once. Products and attention are the libraries' on a GPU and have no place here;
// fp8 copies of products' operands have.

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/emulated_subject.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kRows = 96, kWide = 1024, kClasses = 20000;
constexpr std::int64_t kMove = kRows * kWide * 2;  // one activation in bf16
constexpr double kMost = 1.15;

// An op, and the least that its kernels move, one by one.
struct Case {
  const char* name;
  KernelCase op;
  std::int64_t forward, backward;
};

KernelCase Op(const OpSpec& spec, const std::vector<std::int64_t>& inputs,
              const std::vector<std::int64_t>& params, const std::vector<std::int64_t>& outputs) {
  KernelCase c = MakeCase(spec, 1);
  std::uint64_t seed = 1;
  for (const std::int64_t n : inputs) {
    c.inputs.push_back(Normal(n, seed++));
  }
  for (const std::int64_t n : params) {
    c.params.push_back(Normal(n, seed++));
  }
  c.output_elements = outputs;
  return c;
}

KernelCase Loss() {
  KernelCase c = Op({.kind = OpKind::kCrossEntropy, .rows = kRows, .in = kClasses},
                    {kRows * kClasses}, {}, {1});
  c.inputs.emplace_back(S(kRows), 5.0);
  c.index_inputs = {1};
  return c;
}

constexpr std::int64_t kOut = 256;
KernelCase Fp8Linear(Fp8Products products) {
  KernelCase c = Op({.kind = OpKind::kLinear, .rows = kRows, .in = kWide, .out = kOut},
                    {kRows * kWide}, {kWide * kOut}, {kRows * kOut});
  c.options.fp8 = products;
  return c;
}

std::vector<Case> Cases() {
  const std::int64_t n = kRows * kWide;
  const std::int64_t logits = kRows * kClasses * 2;
  const std::int64_t kv = n / 4;
  const std::int64_t weight = kWide * kOut, out = kRows * kOut;  // elements
  return {
      // Backward: x and dy into dx, then x and dy into the sums over rows.
      {"RMS norm",
       Op({.kind = OpKind::kRmsNorm, .rows = kRows, .in = kWide, .epsilon = 1e-5}, {n}, {kWide},
          {n}),
       2 * kMove, 5 * kMove},
      {"layer norm",
       Op({.kind = OpKind::kLayerNorm,
           .rows = kRows,
           .in = kWide,
           .has_bias = true,
           .epsilon = 1e-5},
          {n}, {kWide, kWide}, {n}),
       2 * kMove, 6 * kMove},
      {"rope",
       Op({.kind = OpKind::kRope,
           .rows = kRows,
           .heads = 8,
           .kv_heads = 2,
           .head_dim = 128,
           .rope = {.dim = 128, .theta = 5e5}},
          {n, kv}, {}, {n, kv}),
       // With a table of cosines and sines in fp32.
       2 * kMove * 5 / 4 + kRows * 128 * 4, 2 * kMove * 5 / 4 + kRows * 128 * 4},
      {"gated activation",
       Op({.kind = OpKind::kGatedActivation,
           .rows = kRows,
           .in = kWide,
           .activation = Activation::kSilu},
          {n, n}, {}, {n}),
       3 * kMove, 5 * kMove},
      {"activation",
       Op({.kind = OpKind::kActivation,
           .rows = kRows,
           .in = kWide,
           .activation = Activation::kGeluTanh},
          {n}, {}, {n}),
       2 * kMove, 3 * kMove},
      // Logits are read once each way: maximum and sum are kept while they go by.
      {"loss", Loss(), logits, 2 * logits},
      // A copy reads 2 bytes for the largest magnitude and 2 again, and writes one; a row that has
      // a scale of its own is read once. The products write y; dx and the fp32 gradient.
      {"fp8 copies", Fp8Linear(Fp8Products::kPerTensor), 5 * n + 5 * weight + 2 * out,
       5 * (out + weight) + 2 * n + 5 * (out + n) + 4 * weight},
      {"fp8 copies by row", Fp8Linear(Fp8Products::kPerRow), 3 * n + 3 * weight + 2 * out,
       3 * out + 5 * weight + 2 * n + 5 * (out + n) + 4 * weight},
  };
}

TEST_CASE("CudaKernels.MoveLittleMoreThanTheyMust") {
  for (const Case& c : Cases()) {
    CAPTURE(std::string(c.name));
    (void)RunKernel(c.op, DType::kBf16);
    const std::int64_t forward_moved = last_moved[0], backward_moved = last_moved[1];
    CAPTURE(static_cast<double>(forward_moved) / static_cast<double>(c.forward));
    CAPTURE(static_cast<double>(backward_moved) / static_cast<double>(c.backward));
    CHECK(static_cast<double>(forward_moved) <= kMost * static_cast<double>(c.forward));
    CHECK(static_cast<double>(backward_moved) <= kMost * static_cast<double>(c.backward));
    // What is not counted could be moved for nothing.
    CHECK(static_cast<double>(forward_moved) >= 0.95 * static_cast<double>(c.forward));
    CHECK(static_cast<double>(backward_moved) >= 0.95 * static_cast<double>(c.backward));
  }
}

}  // namespace
}  // namespace shardwright::testing
