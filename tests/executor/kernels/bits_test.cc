// Which bits a kernel's results depend on: not on the run, not on where its operands lie, and not
// on the samples beside one (but for batch norm, whose purpose that is, and the last bits of linear
// ops).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

// Ops with more rows, columns and keys than one tile, vector or chunk has; inputs are per sample.
std::vector<KernelCase> Cases(std::int64_t batch) {
  std::vector<KernelCase> cases;
  const auto add = [&](const OpSpec& spec, const std::vector<std::int64_t>& inputs,
                       const std::vector<std::int64_t>& params, std::int64_t output) {
    KernelCase c = MakeCase(spec, batch);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      c.inputs.push_back(Normal(batch * inputs[i], i + 1));
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      c.params.push_back(Normal(params[i], i + 20));
    }
    c.output_elements = {batch * output};
    cases.push_back(c);
  };
  add({.kind = OpKind::kLinear, .rows = 41, .in = 70, .out = 35, .has_bias = true}, {41 * 70},
      {70 * 35, 35}, 41 * 35);
  add({.kind = OpKind::kLayerNorm, .rows = 5, .in = 37, .has_bias = true, .epsilon = 1e-5},
      {5 * 37}, {37, 37}, 5 * 37);
  add({.kind = OpKind::kActivation, .rows = 50, .in = 33, .activation = Activation::kGelu},
      {50 * 33}, {}, 50 * 33);
  add({.kind = OpKind::kLogSoftmax, .rows = 3, .in = 1100}, {3 * 1100}, {}, 3 * 1100);
  add({.kind = OpKind::kRope,
       .rows = 9,
       .heads = 2,
       .kv_heads = 2,
       .head_dim = 6,
       .rope = {.dim = 6, .theta = 1e4}},
      {9 * 12, 9 * 12}, {}, 9 * 12);
  cases.back().output_elements.push_back(batch * 9 * 12);
  add({.kind = OpKind::kAttention,
       .rows = 150,
       .heads = 2,
       .kv_heads = 1,
       .head_dim = 6,
       .value_dim = 6,
       .seq_q = 150,
       .seq_k = 150,
       .causal = true,
       .dropout_p = 0.25},
      {150 * 12, 150 * 6, 150 * 6}, {}, 150 * 12);
  add({.kind = OpKind::kConv2d,
       .in = 3,
       .out = 5,
       .has_bias = true,
       .height = 24,
       .width = 24,
       .height_out = 24,
       .width_out = 24,
       .kernel = 3,
       .stride = 1,
       .padding = 1},
      {3 * 576}, {5 * 27, 5}, 5 * 576);
  return cases;
}

}  // namespace

TEST_CASE("HostKernels.BitsDependOnNeitherRunNorAddress") {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (KernelCase c : Cases(2)) {
      CAPTURE(static_cast<int>(c.spec.kind));
      const std::vector<std::uint8_t> bits = RunKernel(c, dtype).bits;
      CHECK(RunKernel(c, dtype).bits == bits);
      c.shift = 4;
      CHECK(RunKernel(c, dtype).bits == bits);
      c.shift = 36;
      CHECK(RunKernel(c, dtype).bits == bits);
    }
  }
}

// So a sample's activations and their gradients are the same on a rank that holds more samples; the
// samples of a linear op are rows of one product, which OpenBLAS sums in an order that depends on
// its sizes. There, sums of 70 products of standard normal numbers, of magnitudes that add up to
// less than 140, are compared: in either order off by at most 70 * 2^-24 * 140 < 0.0006.
TEST_CASE("HostKernels.ASampleDoesNotDependOnTheOthers") {
  const std::vector<KernelCase> both = Cases(2);
  std::vector<KernelCase> one = Cases(1);
  for (std::size_t i = 0; i < both.size(); ++i) {
    CAPTURE(static_cast<int>(both[i].spec.kind));
    for (std::size_t k = 0; k < one[i].inputs.size(); ++k) {
      one[i].inputs[k].assign(
          both[i].inputs[k].begin(),
          both[i].inputs[k].begin() + static_cast<std::ptrdiff_t>(one[i].inputs[k].size()));
    }
    const KernelRun large = RunKernel(both[i], DType::kFp32);
    const KernelRun small = RunKernel(one[i], DType::kFp32);
    const double tolerance = both[i].spec.kind == OpKind::kLinear ? 0.0012 : 0.0;
    const auto begins = [&](const Numbers& all, const Numbers& first) {
      return std::equal(first.begin(), first.end(), all.begin(),
                        [&](double x, double y) { return std::fabs(x - y) <= tolerance; });
    };
    for (std::size_t k = 0; k < small.outputs.size(); ++k) {
      CHECK(begins(large.outputs[k], small.outputs[k]));
      CHECK(begins(large.output_grads[k], small.output_grads[k]));
    }
    for (std::size_t k = 0; k < small.input_grads.size(); ++k) {
      CHECK(begins(large.input_grads[k], small.input_grads[k]));
    }
  }
}

}  // namespace shardwright::testing
