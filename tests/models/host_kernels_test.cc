// What the kernel set shardwright-host declares, by hand. That the kernels need no more is checked
// where they run (tests/executor/kernels); pieces of workspaces are whole lines of 64 bytes.

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {
namespace {

OpKernels LowerForHost(const OpSpec& spec, std::int64_t batch, DType compute) {
  return LowerOp(spec, batch, compute, FindKernelSet("shardwright-host", "test"));
}

}  // namespace

TEST_CASE("HostKernelSet.Linear") {
  const OpKernels op = LowerForHost(
      {.kind = OpKind::kLinear, .rows = 3, .in = 5, .out = 4, .has_bias = true}, 2, DType::kBf16);
  CHECK(op.saves_input == 1);
  CHECK(op.saves_input_for_weight == 1);
  CHECK(op.extra_saved == Bytes(0));
  // Bias of 4 numbers (one line); panels of 6 x 5 and 5 x 4 numbers (120 and 80 bytes: 2 lines
  // each); a tile of 6 x 4 numbers (2 lines).
  CHECK(op.forward_workspace == Bytes(64 * (1 + 2 + 2 + 2)));
  // Input gradient, 6 x 5 with 4 in between: panels of 24 and 20 numbers, a tile of 30 (2 lines
  // each). Weight gradient, 4 x 5 with 6 in between: 24, 30 and 20 numbers (2 lines each).
  CHECK(op.backward_workspace == Bytes(64 * (2 + 2 + 2)));
}

TEST_CASE("HostKernelSet.Attention") {
  const OpKernels op = LowerForHost({.kind = OpKind::kAttention,
                                     .rows = 3,
                                     .heads = 2,
                                     .kv_heads = 2,
                                     .head_dim = 4,
                                     .value_dim = 4,
                                     .seq_q = 3,
                                     .seq_k = 3,
                                     .causal = true},
                                    2, DType::kFp32);
  CHECK(op.saves_input == 0b111);
  CHECK(op.saves_output == 1);
  CHECK(op.extra_saved == Bytes(2 * 2 * 3 * 4));  // a log-sum per sample, head and query
  // 3 x 3 scores, 3 x 4 outputs, maxima and sums (a line each); panels of 3 x 4 and 4 x 4 numbers
  // (a line each).
  CHECK(op.forward_workspace == Bytes(64 * (4 + 1 + 1)));
  // Four tiles of scores, gradients of q, k, v, the row sums: a line each.
  CHECK(op.backward_workspace == Bytes(64 * (8 + 1 + 1)));
}

// The first layer of a ResNet: 3 channels of 224 x 224 pixels to 64 of 112 x 112, unfolded into 147
// taps of 512 pixels at a time.
TEST_CASE("HostKernelSet.Convolution") {
  const OpKernels op = LowerForHost({.kind = OpKind::kConv2d,
                                     .in = 3,
                                     .out = 64,
                                     .height = 224,
                                     .width = 224,
                                     .height_out = 112,
                                     .width_out = 112,
                                     .kernel = 7,
                                     .stride = 2,
                                     .padding = 3},
                                    2, DType::kFp32);
  CHECK(op.saves_input == 1);
  CHECK(op.saves_input_for_weight == 1);
  const std::int64_t unfolded = 147 * 512;
  // Room for a bias, and panels of (64, 147) and (147, 512).
  CHECK(op.forward_workspace == Bytes(4 * (unfolded + 64 + 64 * 147 + 147 * 512)));
  // The gradient of one image, and panels of (147, 64) and (64, 512). The gradient of the weights,
  // 64 x 147 with panels of 64 x 256 and 256 x 147, takes less.
  CHECK(op.backward_workspace == Bytes(4 * (unfolded + 3 * 224 * 224 + 147 * 64 + 64 * 512)));
}

TEST_CASE("HostKernelSet.WhatElseIsKept") {
  const OpSpec gated{
      .kind = OpKind::kGatedActivation, .rows = 3, .in = 4, .activation = Activation::kSilu};
  CHECK(LowerForHost(gated, 2, DType::kBf16).saves_input == 0b11);
  CHECK(LowerForHost(gated, 2, DType::kBf16).extra_saved == Bytes(0));
  const OpSpec norm{.kind = OpKind::kLayerNorm, .rows = 3, .in = 4, .has_bias = true};
  CHECK(LowerForHost(norm, 2, DType::kBf16).extra_saved == Bytes(6 * 8));
  const OpSpec pool{.kind = OpKind::kMaxPool,
                    .in = 3,
                    .height = 4,
                    .width = 4,
                    .height_out = 2,
                    .width_out = 2,
                    .kernel = 2,
                    .stride = 2};
  CHECK(LowerForHost(pool, 2, DType::kBf16).extra_saved == Bytes(2 * 3 * 4 * 4));
  CHECK(LowerForHost(pool, 2, DType::kBf16).saves_input == 0);
  const OpSpec loss{.kind = OpKind::kCrossEntropy, .rows = 3, .in = 7};
  CHECK(LowerForHost(loss, 2, DType::kBf16).extra_saved == Bytes(6 * 4));
}

// Every op writes memory of its own; only what launches nothing is a view.
TEST_CASE("HostKernelSet.OutputsAreTheirOwn") {
  for (const OpKind kind : {OpKind::kAdd, OpKind::kScale, OpKind::kSelect, OpKind::kConcat}) {
    CHECK(LowerForHost({.kind = kind, .rows = 3, .in = 4}, 2, DType::kFp32).output_aliases ==
          std::vector<int>{-1});
    CHECK_FALSE(LowerForHost({.kind = kind, .rows = 3, .in = 4}, 2, DType::kFp32).forward.empty());
  }
  const OpSpec dropout{.kind = OpKind::kDropout, .rows = 3, .in = 4, .dropout_p = 0.1};
  CHECK(LowerForHost(dropout, 2, DType::kFp32).output_aliases == std::vector<int>{-1});
  CHECK(LowerForHost(dropout, 2, DType::kFp32).forward.size() == 1);
  CHECK(LowerForHost(dropout, 2, DType::kFp32).extra_saved == Bytes(0));
}

}  // namespace shardwright
