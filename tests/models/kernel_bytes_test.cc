// Launches and bytes of kernel lists, against PyTorch's operators and sums by hand.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "models/model.h"
#include "tests/models/kernel_test_util.h"

namespace shardwright {
namespace {

struct Pass {
  std::int64_t launches = 0;
  std::int64_t read = 0;
  std::int64_t written = 0;
};

struct Case {
  const char* name;
  OpSpec spec;
  DType compute;
  const char* set;
  std::int64_t batch;
  Pass forward;
  Pass backward;
};

void CheckPass(const std::vector<Kernel>& kernels, const Pass& expected) {
  CHECK(static_cast<std::int64_t>(kernels.size()) == expected.launches);
  CHECK(TotalRead(kernels) == expected.read);
  CHECK(TotalWritten(kernels) == expected.written);
}

void CheckCases(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    CAPTURE(c.name);
    const OpKernels op = LowerOp(c.spec, c.batch, c.compute, Set(c.set));
    CheckPass(op.forward, c.forward);
    std::vector<Kernel> backward = op.backward_data;
    backward.insert(backward.end(), op.backward_weight.begin(), op.backward_weight.end());
    CheckPass(backward, c.backward);
  }
}

OpSpec ActivationSpec(OpKind kind, Activation activation) {
  OpSpec spec = RowsSpec(kind, 64, 48);
  spec.activation = activation;
  return spec;
}

constexpr DType kBf16 = DType::kBf16;
constexpr DType kFp32 = DType::kFp32;

// Sizes are 2 x 64 x 48 in bf16 unless stated: e = 12288 bytes, 128 rows.

// The operators that launch something and the bytes of their arguments and results, logged by a
// TorchDispatchMode in PyTorch 2.13; measure_saved_tensors.py prints them.
TEST_CASE("launches and bytes equal those of the operators that PyTorch runs") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  OpSpec attention = AttentionSpec(z);
  attention.causal = false;  // no mask
  OpSpec dropout = attention;
  dropout.dropout_p = 0.1;
  const OpSpec rms = RowsSpec(OpKind::kRmsNorm, 64, 48);
  const OpSpec gelu = ActivationSpec(OpKind::kActivation, Activation::kGeluTanh);
  const OpSpec swiglu = ActivationSpec(OpKind::kGatedActivation, Activation::kSilu);
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = 64, .heads = 3, .kv_heads = 3, .head_dim = 16};
  const OpSpec select = {.kind = OpKind::kSelect, .rows = 1, .in = 48, .seq_k = 64};
  CheckCases({
      {"linear",
       LinearSpec(64, 48, 80, true),
       kBf16,
       "torch-eager",
       2,
       {1, 20128, 20480},
       {3, 81408, 20128}},
      {"rms norm in HF", rms, kBf16, "hf-eager", 2, {8, 124512, 99840}, {16, 334944, 235616}},
      {"rms norm in HF, fp32", rms, kFp32, "hf-eager", 2, {6, 100032, 75264}, {14, 347328, 223424}},
      {"gelu_new", gelu, kBf16, "hf-eager", 2, {8, 122880, 98304}, {11, 208896, 135168}},
      {"silu(gate) * up", swiglu, kBf16, "torch-eager", 2, {2, 36864, 24576}, {3, 73728, 36864}},
      // Each of the two slice_backward is two kernels: zeros, then a copy of e / 2.
      {"rope of q and k",
       rope,
       kBf16,
       "hf-eager",
       2,
       {2 * 5, 2 * 71680, 2 * 55296},
       {2 * (7 + 2), 2 * 96256, 2 * (79872 + 2 * 6144)}},
      {"attention", attention, kBf16, "torch-2022", 2, {8, 233472, 208896}, {10, 405504, 233472}},
      {"attention of one sample",
       attention,
       kBf16,
       "torch-2022",
       1,
       {5, 98304, 86016},
       {9, 196608, 110592}},
      {"attention, fp32 softmax, dropout",
       dropout,
       kBf16,
       "hf-2023",
       2,
       {11, 479232, 479232},
       {13, 724992, 479232}},
      // select_backward likewise, with a copy of the selected 192 bytes.
      {"select", select, kBf16, "torch-eager", 2, {0, 0, 0}, {1 + 1, 192, 12288 + 192}},
  });
}

TEST_CASE("launches of routers and experts equal the operators that PyTorch runs") {
  const OpSpec router = {
      .kind = OpKind::kRouter, .rows = 32, .in = 16, .experts = 8, .experts_per_token = 2};
  OpSpec experts = router;
  experts.kind = OpKind::kExperts;
  experts.out = 80;
  experts.gated = true;
  experts.activation = Activation::kSilu;
  const OpKernels route = LowerOp(router, 2, kBf16, Set("torch-eager"));
  CHECK(route.forward.size() == 6 + 1);  // and the projection
  CHECK(route.backward_data.size() == 12 + 1);
  CHECK(route.backward_weight.size() == 1);
  const OpKernels mlp = LowerOp(experts, 2, kBf16, Set("torch-eager"));
  // Transformers computes gate and up as one product; here they are two, each with its data and
  // weight gradient, and the sum of the data gradients takes the place of a concatenation.
  CHECK(mlp.forward.size() == 16 + 1);
  CHECK(mlp.backward_data.size() + mlp.backward_weight.size() == 18 + 2);
}

TEST_CASE("bytes of row-wise kernels, by hand") {
  OpSpec layer_norm = RowsSpec(OpKind::kLayerNorm, 64, 48);
  layer_norm.has_bias = true;
  const OpSpec rms = RowsSpec(OpKind::kRmsNorm, 64, 48);
  const OpSpec gelu = ActivationSpec(OpKind::kActivation, Activation::kGelu);
  const OpSpec swiglu = ActivationSpec(OpKind::kGatedActivation, Activation::kSilu);
  const OpSpec add = RowsSpec(OpKind::kAdd, 64, 48);
  const OpSpec mul = RowsSpec(OpKind::kMul, 64, 48);
  OpSpec dropout = RowsSpec(OpKind::kDropout, 64, 48);
  dropout.dropout_p = 0.1;
  const OpSpec embedding = {.kind = OpKind::kEmbedding, .rows = 64, .out = 48, .vocab = 100};
  const std::int64_t e = 12288;
  const std::int64_t w = 96;  // one vector of features
  CheckCases({
      // x, weight, bias -> y, statistics; dy, x, statistics, weight -> dx; dy, x, statistics ->
      // both.
      {"layer norm",
       layer_norm,
       kBf16,
       "torch-eager",
       2,
       {1, e + 2 * w, e + 1024},
       {2, 4 * e + 2 * 1024 + w, e + 2 * w}},
      {"rms norm",
       rms,
       kBf16,
       "torch-eager",
       2,
       {1, e + w, e + 512},
       {2, 4 * e + 2 * 512 + w, e + w}},
      // 8 partial sums of 48 fp32 numbers instead of a second pass.
      {"rms norm, native",
       rms,
       kBf16,
       "shardwright-cuda",
       2,
       {1, e + w, e + 512},
       {2, 2 * e + 512 + w + 1536, e + 1536 + w}},
      {"gelu", gelu, kBf16, "torch-eager", 2, {1, e, e}, {1, 2 * e, e}},
      {"swiglu, fused", swiglu, kBf16, "torch-compile", 2, {1, 2 * e, e}, {1, 3 * e, 2 * e}},
      {"add", add, kBf16, "torch-eager", 2, {1, 2 * e, e}, {0, 0, 0}},
      {"add, fused", add, kBf16, "torch-compile", 2, {1, e, e}, {0, 0, 0}},
      {"mul", mul, kBf16, "torch-eager", 2, {1, 2 * e, e}, {2, 4 * e, 2 * e}},
      {"mul, fused", mul, kBf16, "torch-compile", 2, {1, 2 * e, e}, {1, 3 * e, 2 * e}},
      {"dropout", dropout, kBf16, "torch-eager", 2, {1, e, e + 6144}, {1, e + 6144, e}},
      {"dropout, fused", dropout, kBf16, "torch-compile", 2, {1, 0, 6144}, {1, 6144, 0}},
      {"dropout, native", dropout, kBf16, "shardwright-cuda", 2, {0, 0, 0}, {0, 0, 0}},
      // Zeros of 100 x 48, then all 100 rows may be read and written again.
      {"embedding",
       embedding,
       kBf16,
       "torch-eager",
       2,
       {1, 1024 + e, e},
       {2, e + 1024 + 9600, 2 * 9600}},
  });
}

TEST_CASE("bytes of attention and loss kernels, by hand") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  LayerSizes grouped = z;
  grouped.kv = 1;
  const OpSpec loss = RowsSpec(OpKind::kCrossEntropy, 32, 100);
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = 64, .heads = 3, .kv_heads = 1, .head_dim = 16};
  const std::int64_t e = 12288;     // q, and k and v with all heads
  const std::int64_t k = 4096;      // one head
  const std::int64_t stats = 1536;  // one fp32 number per query and head
  const std::int64_t logits = 12800;
  CheckCases({
      // q, k, v -> o, log-sum-exp. o, do -> row sums; q, k, v, do, two statistics -> fp32 dq, dk,
      // dv;
      // fp32 dq -> dq.
      {"flash",
       AttentionSpec(z),
       kBf16,
       "torch-eager",
       2,
       {1, 3 * e, e + stats},
       {3, 2 * e + 4 * e + 2 * stats + 2 * e, stats + 2 * e + 2 * e + e}},
      // dk and dv for all heads, then their sums.
      {"flash, grouped",
       AttentionSpec(grouped),
       kBf16,
       "composer-2023",
       2,
       {1, e + 2 * k, e + stats},
       {4, 2 * e + 2 * e + 2 * k + 2 * stats + 2 * e + 2 * e, stats + 2 * e + 2 * e + e + 2 * k}},
      // Copies of k and v first; sums of their gradients last.
      {"flash, repeated",
       AttentionSpec(grouped),
       kBf16,
       "torch-eager",
       2,
       {3, 2 * k + 3 * e, 2 * e + e + stats},
       {5, 2 * e + 4 * e + 2 * stats + 2 * e + 2 * e, stats + 2 * e + 2 * e + e + 2 * k}},
      {"rope, fused",
       rope,
       kBf16,
       "torch-compile",
       2,
       {1, e + k + 4096, e + k},
       {1, e + k + 4096, e + k}},
      // Logits to fp32, log-softmax, then 64 of its values and the labels; zeros, 64 values from
      // the
      // labels, log-softmax gradient from two tensors, back to bf16.
      {"cross-entropy",
       loss,
       kBf16,
       "torch-eager",
       2,
       {3, logits + 2 * logits + 256 + 512, 2 * logits + 2 * logits + 4},
       {4, 512 + 4 * logits + 2 * logits, 2 * logits + 256 + 2 * logits + logits}},
      {"cross-entropy, fused",
       loss,
       kBf16,
       "torch-compile",
       2,
       {1, logits + 512, 512},
       {1, logits + 512 + 512, logits}},
      {"log-softmax",
       RowsSpec(OpKind::kLogSoftmax, 32, 100),
       kBf16,
       "torch-eager",
       2,
       {1, logits, logits},
       {1, 2 * logits, logits}},
      {"nll",
       RowsSpec(OpKind::kNllLoss, 32, 100),
       kBf16,
       "torch-eager",
       2,
       {1, 128 + 512, 4},
       {2, 512, logits + 128}},
  });
}

TEST_CASE("bytes of image kernels, by hand") {
  OpSpec pool = {.kind = OpKind::kMaxPool,
                 .in = 3,
                 .height = 32,
                 .width = 32,
                 .height_out = 16,
                 .width_out = 16,
                 .kernel = 2,
                 .stride = 2};
  OpSpec average = pool;
  average.kind = OpKind::kAvgPool;
  const OpSpec conv = {.kind = OpKind::kConv2d,
                       .in = 3,
                       .out = 8,
                       .has_bias = true,
                       .height = 32,
                       .width = 32,
                       .height_out = 32,
                       .width_out = 32,
                       .kernel = 3,
                       .stride = 1,
                       .padding = 1};
  const OpSpec batch_norm = {.kind = OpKind::kBatchNorm, .in = 3, .height = 32, .width = 32};
  const std::int64_t x = 12288;  // 2 x 3 x 32 x 32 in bf16
  const std::int64_t y = 32768;  // 2 x 8 x 32 x 32
  const std::int64_t w = 432;    // 8 x 3 x 3 x 3
  const std::int64_t f = 24576;  // x in fp32
  CheckCases({
      {"conv",
       conv,
       kBf16,
       "torch-eager",
       2,
       {2, x + w + y + 16, 2 * y},
       {3, y + w + x + y + y, x + w + 16}},
      {"conv, fused bias",
       conv,
       kBf16,
       "torch-compile",
       2,
       {1, x + w + 16, y},
       {3, y + w + x + y + y, x + w + 16}},
      // 12 bytes per channel vector: running statistics in, these and the batch's out; then both
      // and weight and bias. Backward: statistics in, two sums out; these, statistics and weight
      // in.
      {"batch norm",
       batch_norm,
       kFp32,
       "torch-eager",
       2,
       {2, f + 24 + f + 48, 48 + f},
       {2, 2 * f + 24 + 2 * f + 60, 24 + f}},
      {"max pool", pool, kBf16, "torch-eager", 2, {1, x, 3072 + 12288}, {1, 3072 + 12288, x}},
      {"average pool", average, kBf16, "torch-eager", 2, {1, x, 3072}, {1, 3072, x}},
  });
}

TEST_CASE("workspaces, by hand") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  const std::int64_t e = 12288;
  const std::int64_t scores = 2L * 3 * 64 * 64;
  // Queries round up to 128, heads to 32: 2 * 3 * 128 * 32 fp32 sums and 2 * 3 * 128 row sums.
  CHECK(LowerOp(AttentionSpec(z), 2, kBf16, Set("torch-eager")).backward_workspace ==
        Bytes(2L * 3 * 128 * 33 * 4));
  // Copies of q, k, v, and the masked scores beside the softmax; two gradients of the scores.
  const OpKernels eager = LowerOp(AttentionSpec(z), 2, kBf16, Set("torch-2022"));
  CHECK(eager.forward_workspace == Bytes(3 * e + 2 * scores));
  CHECK(eager.backward_workspace == Bytes(4 * scores));
  // bf16 scores, their fp32 copy and the fp32 result (10 bytes) against 6 saved; two fp32
  // gradients.
  const OpKernels wide = LowerOp(AttentionSpec(z), 2, kBf16, Set("hf-2023"));
  CHECK(wide.forward_workspace == Bytes(3 * e + 4 * scores));
  CHECK(wide.backward_workspace == Bytes(8 * scores));
  // fp16 needs no copy: scores, fp32 result and fp16 result (8 bytes) against 6.
  const OpKernels half = LowerOp(AttentionSpec(z), 2, DType::kFp16, Set("hf-2023"));
  CHECK(half.forward_workspace == Bytes(3 * e + 2 * scores));
  CHECK(half.backward_workspace == Bytes(6 * scores));
  // With dropout: scores, fp32 copy and result (10 bytes) against 7 saved.
  LayerSizes dropout = z;
  dropout.p = 0.1;
  CHECK(LowerOp(AttentionSpec(dropout), 2, kBf16, Set("hf-2023")).forward_workspace ==
        Bytes(3 * e + 3 * scores));
  // Without a cast the mask and the result of dropout outweigh the scores.
  CHECK(LowerOp(AttentionSpec(dropout), 2, kBf16, Set("torch-2022")).forward_workspace ==
        Bytes(3 * e));
  // x32, product and y less y (saved), x32 (saved) and the output; five fp32 tensors less the
  // output.
  const OpKernels rms = LowerOp(RowsSpec(OpKind::kRmsNorm, 64, 48), 2, kBf16, Set("hf-eager"));
  CHECK(rms.forward_workspace == Bytes(2 * e - e));
  CHECK(rms.backward_workspace == Bytes(10 * e - e));
}

TEST_CASE("what only the weight gradient reads") {
  const OpSpec conv = {.kind = OpKind::kConv2d,
                       .in = 3,
                       .out = 8,
                       .height = 8,
                       .width = 8,
                       .height_out = 8,
                       .width_out = 8,
                       .kernel = 1,
                       .stride = 1};
  const OpSpec embedding = {.kind = OpKind::kEmbedding, .rows = 64, .out = 48, .vocab = 100};
  const OpSpec router = {
      .kind = OpKind::kRouter, .rows = 32, .in = 16, .experts = 8, .experts_per_token = 2};
  for (const OpSpec& spec : {LinearSpec(64, 48, 80, true), conv, embedding, router}) {
    CHECK(LowerOp(spec, 2, kBf16, Set("torch-eager")).saves_input_for_weight == 1U);
  }
  for (const OpSpec& spec : {RowsSpec(OpKind::kLayerNorm, 64, 48), RowsSpec(OpKind::kMul, 64, 48),
                             ActivationSpec(OpKind::kActivation, Activation::kGelu)}) {
    CHECK(LowerOp(spec, 2, kBf16, Set("torch-eager")).saves_input_for_weight == 0U);
  }
}

}  // namespace
}  // namespace shardwright
