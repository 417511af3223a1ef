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

// The order of what Gemma's norm multiplies and casts is another.
TEST_CASE("launches and bytes of Gemma's norm equal those of the operators that PyTorch runs") {
  OpSpec norm = RowsSpec(OpKind::kRmsNorm, 64, 48);
  norm.weight_offset = 1.0;
  CheckCases({
      {"bf16", norm, kBf16, "hf-eager", 2, {10, 137184, 112512}, {17, 384384, 260384}},
      {"fp32", norm, kFp32, "hf-eager", 2, {7, 100224, 75456}, {14, 347328, 223424}},
  });
}

// The operators that launch something and the bytes of their arguments and results, logged by a
// TorchDispatchMode in PyTorch 2.13; measure_saved_tensors.py prints them.
TEST_CASE("launches and bytes equal those of the operators that PyTorch runs") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  OpSpec attention = AttentionSpec(z);
  attention.causal = false;  // no mask
  OpSpec dropout = attention;
  dropout.dropout_p = 0.1;
  const OpSpec rms = RowsSpec(OpKind::kRmsNorm, 64, 48);
  const OpSpec swiglu = ActivationSpec(OpKind::kGatedActivation, Activation::kSilu);
  OpSpec packed = swiglu;
  packed.packed_gate = true;
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
      {"silu(gate) * up", swiglu, kBf16, "torch-eager", 2, {2, 36864, 24576}, {3, 73728, 36864}},
      {"silu(gate) * up, packed",
       packed,
       kBf16,
       "torch-eager",
       2,
       {2, 36864, 24576},
       {4, 98304, 61440}},
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
      // By hand: two products, the softmax, a copy of the output; the gradients' three copies are
      // one torch.cat there, with the same bytes.
      {"attention, fused softmax, tokens first",
       attention,
       kBf16,
       "megatron-2021",
       2,
       {4, 147456, 122880},
       {8, 344064, 172032}},
      // select_backward likewise, with a copy of the selected 192 bytes.
      {"select", select, kBf16, "torch-eager", 2, {0, 0, 0}, {1 + 1, 192, 12288 + 192}},
  });
}

TEST_CASE("a GELU launches the operators that it is written in") {
  const auto gelu = [](OpKind kind, GeluCode code) {
    OpSpec spec = ActivationSpec(kind, Activation::kGeluTanh);
    spec.gelu_code = code;
    return spec;
  };
  const OpSpec one_gelu = gelu(OpKind::kActivation, GeluCode::kOneOperator);
  const OpSpec new_gelu = gelu(OpKind::kActivation, GeluCode::kNew);
  const OpSpec fast_gelu = gelu(OpKind::kActivation, GeluCode::kFast);
  const OpSpec gated_gelu = gelu(OpKind::kGatedActivation, GeluCode::kNew);
  CheckCases({
      {"gelu_pytorch_tanh", one_gelu, kBf16, "hf-eager", 2, {1, 12288, 12288}, {1, 24576, 12288}},
      {"gelu_new", new_gelu, kBf16, "hf-eager", 2, {8, 122880, 98304}, {11, 208896, 135168}},
      {"gelu_fast", fast_gelu, kBf16, "hf-eager", 2, {9, 147456, 110592}, {13, 282624, 159744}},
      {"gelu_new(gate) * up",
       gated_gelu,
       kBf16,
       "hf-eager",
       2,
       {9, 147456, 110592},
       {13, 258048, 159744}},
  });
}

TEST_CASE("routers and experts launch and move what PyTorch's operators do") {
  const OpSpec router = {
      .kind = OpKind::kRouter, .rows = 32, .in = 16, .experts = 8, .experts_per_token = 2};
  OpSpec experts = router;  // 64 tokens, 128 routed rows
  experts.kind = OpKind::kExperts;
  experts.in = 48;
  experts.out = 80;
  experts.gated = true;
  experts.experts = 4;
  experts.activation = Activation::kSilu;
  const std::int64_t t = 6144;   // tokens
  const std::int64_t r = 12288;  // routed rows
  const std::int64_t f = 20480;  // their hidden features
  const std::int64_t w = 30720;  // one matrix of all experts
  const std::int64_t i = 1024;   // one int64 per routed row
  const std::int64_t p = 256;    // one routing weight per routed row
  CheckCases({
      // PyTorch's log, less what a scatter does not touch (2048 read, 1536 written), and the three
      // products of the projection.
      {"router",
       router,
       kBf16,
       "torch-eager",
       2,
       {6 + 1, 6912 + 2304, 6656 + 1024},
       {12 + 2, 15104 - 2048 + 1280 + 3072, 11008 - 1536 + 2048 + 256}},
      // Launches as logged: Transformers computes gate and up as one product; here they are two,
      // each
      // with its data and weight gradient, and the sum of the data gradients takes the place of a
      // concatenation. Bytes by hand, in the order of the log.
      {"experts",
       experts,
       kBf16,
       "torch-eager",
       2,
       {16 + 1,
        (2 * i + i + (r + i) + (p + i) + i + i / 2 + 16) + (2 * (r + w) + f + 2 * f + f + w) +
            (r + p + 2 * i + r + i + r),
        (2 * i + i + r + p + i / 2 + 16 + 16) + (2 * f + f + f + r) + (r + i + i + r + t)},
       {18 + 2,
        (t + r + i + r + p + 2 * r + r) + (r + w + 3 * 2 * f + 2 * (f + w) + 2 * r) +
            (r + i + p + i) + 3 * (f + r),
        (r + r + r + r + r + p) + (f + 3 * f + 2 * r + r) + (t + t + p + p) + 3 * w}},
  });
  // Weighted rows in both orders; three gradients of hidden features, which are larger than rows.
  KernelSetOptions options = Set("torch-eager");
  const OpKernels op = LowerOp(experts, 2, kBf16, options);
  CHECK(op.forward_workspace == Bytes(2 * r));
  CHECK(op.backward_workspace == Bytes(0));  // its moments say what is alive
  options.moe_dispatch = MoeDispatch::kDense;
  CHECK(LowerOp(experts, 2, kBf16, options).backward_workspace == Bytes(3 * 2 * f));  // all experts
}

TEST_CASE("bytes of table lookups, by hand") {
  // 4096 ids into a table of 100 x 48: zeros, sort, 509 partial sums, one row per id of the table.
  const OpSpec large = {.kind = OpKind::kEmbedding, .rows = 2048, .out = 48, .vocab = 100};
  const std::int64_t e = 393216;
  const std::int64_t ids = 32768;
  const std::int64_t partials = 509L * 48 * 4;
  // T5: 64 x 64 pairs, 2 heads, 32 buckets: twelve passes over the ids, the lookup; like above
  // back.
  const OpSpec bias = {
      .kind = OpKind::kPositionBias, .vocab = 32, .heads = 2, .seq_q = 64, .seq_k = 64};
  const std::int64_t b = 16384;
  const std::int64_t bias_partials = 441L * 2 * 4;
  CheckCases({
      {"embedding",
       large,
       kBf16,
       "torch-eager",
       2,
       {1, ids + 9600, e},  // each row of the table once
       {4, 2 * ids + e + partials, 9600 + 2 * ids + partials + 9600}},
      {"position bias",
       bias,
       kBf16,
       "torch-eager",
       2,
       {13, 12 * ids + ids + b, 12 * ids + b},
       {4, 2 * ids + b + bias_partials, 128 + 2 * ids + bias_partials + 128}},
  });
  const OpKernels op = LowerOp(bias, 2, kBf16, Set("torch-eager"));
  CHECK(op.extra_saved == Bytes(ids));
  CHECK(op.forward_workspace == Bytes(2 * ids));
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
       {1, 1024 + 9600, e},
       {2, e + 1024 + 9600, 2 * 9600}},
  });
}

TEST_CASE("bytes of attention kernels, by hand") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  LayerSizes grouped = z;
  grouped.kv = 1;
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = 64, .heads = 3, .kv_heads = 1, .head_dim = 16};
  const std::int64_t e = 12288;     // q, and k and v with all heads
  const std::int64_t k = 4096;      // one head
  const std::int64_t stats = 1536;  // one fp32 number per query and head
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
  });
}

TEST_CASE("bytes of loss kernels, by hand") {
  const OpSpec loss = RowsSpec(OpKind::kCrossEntropy, 32, 100);
  const std::int64_t logits = 12800;
  CheckCases({
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

// What autograd of PyTorch 2.13 allocates in backward beyond what is saved, on CPU, in bytes per
// score: 4 (16-bit numbers), 2 with dropout, 6 with an fp32 softmax of bf16; and the gradient of v.
// Buffers of the gradients of q and k stand there, too, so it is less by both.
TEST_CASE("scores in memory: backward holds what its steps have not let go of") {
  LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  const std::int64_t qk = 2L * 12288;
  const std::int64_t scores = 2L * 3 * 64 * 64;
  const auto workspace = [&](DType dtype, const char* set) {
    return LowerOp(AttentionSpec(z), 2, dtype, Set(set)).backward_workspace;
  };
  CHECK(workspace(kBf16, "torch-2022") == Bytes(4 * scores - qk));
  CHECK(workspace(kBf16, "hf-2023") == Bytes(6 * scores - qk));
  // By hand: probabilities and the gradient that becomes that of the scores, 4 bytes, against 2
  // saved. Before 1.11: scores, probabilities and two gradients, 8 bytes, against 4.
  CHECK(workspace(kBf16, "megatron-2021") == Bytes(2 * scores - qk));
  CHECK(workspace(kBf16, "megatron-1.1") == Bytes(4 * scores - qk));
  // fp16, by hand: fp32 probabilities, their gradient and the one of the 16-bit copy, 10 bytes,
  // against 6 saved.
  CHECK(workspace(DType::kFp16, "hf-2023") == Bytes(4 * scores - qk));
  // The requests: gradients of the probabilities, of the scores and of v.
  CHECK(LowerOp(AttentionSpec(z), 2, kBf16, Set("torch-2022")).backward_workspace_tensors ==
        std::vector<Bytes>{Bytes(2 * scores), Bytes(2 * scores), Bytes(qk / 2)});
  z.p = 0.1;
  CHECK(workspace(kBf16, "torch-2022") == Bytes(2 * scores - qk));
  // Three fp32 tensors, 12 bytes, against 7 saved.
  CHECK(workspace(kBf16, "hf-2023") == Bytes(5 * scores - qk));
  z.s = 1;  // where the gradients of q and k are the larger part
  CHECK(workspace(kBf16, "torch-2022") == Bytes(0));
}

TEST_CASE("workspaces, by hand") {
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  const std::int64_t e = 12288;
  const std::int64_t scores = 2L * 3 * 64 * 64;
  // Queries round up to 128, heads to 32: 2 * 3 * 128 * 32 fp32 sums and 2 * 3 * 128 row sums.
  CHECK(LowerOp(AttentionSpec(z), 2, kBf16, Set("torch-eager")).backward_workspace ==
        Bytes(2L * 3 * 128 * 33 * 4));
  LayerSizes grouped = z;
  grouped.kv = 1;  // and gradients of k and v for all heads
  CHECK(LowerOp(AttentionSpec(grouped), 2, kBf16, Set("composer-2023")).backward_workspace ==
        Bytes(2L * 3 * 128 * 33 * 4 + 2 * e));
  // Copies of q, k, v, and the masked scores beside the softmax.
  const OpKernels eager = LowerOp(AttentionSpec(z), 2, kBf16, Set("torch-2022"));
  CHECK(eager.forward_workspace == Bytes(3 * e + 2 * scores));
  // Copies of q, k and v and one more tensor of scores are requests of their own.
  CHECK(eager.forward_workspace_tensors ==
        std::vector<Bytes>{Bytes(e), Bytes(e), Bytes(e), Bytes(2 * scores)});
  // No copies with tokens first; the scores outlive the softmax before 1.11.
  CHECK(LowerOp(AttentionSpec(z), 2, kBf16, Set("megatron-2021")).forward_workspace ==
        Bytes(2 * scores));
  CHECK(LowerOp(AttentionSpec(z), 2, kBf16, Set("megatron-1.1")).forward_workspace == Bytes(0));
  // The copy of 16-bit logits without the last token; before 1.11 it is kept.
  const OpSpec logits = RowsSpec(OpKind::kCrossEntropy, 32, 100);
  CHECK(LowerOp(logits, 2, kBf16, Set("hf-2022")).forward_workspace == Bytes(2L * 32 * 100 * 2));
  CHECK(LowerOp(logits, 2, kBf16, Set("hf-2021")).forward_workspace == Bytes(0));
  // bf16 scores, their fp32 copy and the fp32 result (10 bytes) against 6 saved.
  const OpKernels wide = LowerOp(AttentionSpec(z), 2, kBf16, Set("hf-2023"));
  CHECK(wide.forward_workspace == Bytes(3 * e + 4 * scores));
  // fp16 needs no copy: scores, fp32 result and fp16 result (8 bytes) against 6.
  const OpKernels half = LowerOp(AttentionSpec(z), 2, DType::kFp16, Set("hf-2023"));
  CHECK(half.forward_workspace == Bytes(3 * e + 2 * scores));
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
  const OpKernels native =
      LowerOp(RowsSpec(OpKind::kRmsNorm, 64, 48), 2, kBf16, Set("shardwright-cuda"));
  CHECK(native.backward_workspace == Bytes(8L * 48 * 4));  // one partial sum per 16 rows
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

TEST_CASE("kernels: training metrics read the logits again") {
  // 2 x 64 rows of 48 logits: 6144 elements, 12288 bytes in bf16, 24576 in fp32; labels 128 x 8.
  // The fused loss reads logits and labels and writes two fp32 numbers per row. Each of the two
  // metrics copies to fp32, takes the log-softmax, and picks one fp32 number per row.
  const std::int64_t metric_read = 12288 + 24576 + (128 * 4 + 1024);
  const std::int64_t metric_written = 24576 + 24576 + 4;
  const OpKernels op =
      LowerOp(RowsSpec(OpKind::kCrossEntropy, 64, 48), 2, kBf16, Set("composer-2024"));
  CheckPass(op.forward, {1, 12288 + 1024, 1024});
  CheckPass(op.metrics, {6, 2 * metric_read, 2 * metric_written});
  CHECK(op.forward_workspace == Bytes(0));
  CHECK(op.metrics_workspace_tensors == std::vector<Bytes>{Bytes(24576), Bytes(24576)});
}

TEST_CASE("kernels: fp8 linear layers") {
  // 128 rows, 48 -> 96: inputs 6144, weights 4608, outputs 12288 elements. A cast reads bf16 twice
  // and writes one byte; products read one byte per operand element and write bf16.
  OpSpec spec = RowsSpec(OpKind::kLinear, 64, 48);
  spec.out = 96;
  KernelSetOptions options = Set("torch-compile");
  options.fp8 = Fp8Products::kPerTensor;
  const OpKernels op = LowerOp(spec, 2, kBf16, options);
  CheckPass(op.forward, {3, 4 * 6144 + 4 * 4608 + 6144 + 4608, 6144 + 4608 + 2 * 12288});
  CheckPass(op.backward_data, {2, 4 * 12288 + 12288 + 4608, 12288 + 2 * 6144});
  CheckPass(op.backward_weight, {1, 12288 + 6144, 2 * 4608});
  CHECK(op.forward[2].dtype == DType::kFp8);
  // Vocabulary projections stay in bf16, as do sizes that are no multiples of 16.
  spec.out = 48 * 7;
  CHECK(LowerOp(spec, 2, kBf16, options).forward[0].dtype == kBf16);
  spec.out = 100;
  CHECK(LowerOp(spec, 2, kBf16, options).forward[0].dtype == kBf16);
}

// The same layer by the executor's kernels. The host looks for the largest magnitudes and rounds
// inside the product.
TEST_CASE("kernels: fp8 linear layers of the executor") {
  OpSpec spec = RowsSpec(OpKind::kLinear, 64, 48);
  spec.out = 96;
  KernelSetOptions options = Set("shardwright-host");
  options.fp8 = Fp8Products::kPerTensor;
  OpKernels op = LowerOp(spec, 2, kBf16, options);
  CheckPass(op.forward, {3, 2 * (2 * 6144 + 2 * 4608), 2 * 12288});
  CheckPass(op.backward_data, {3, 2 * (2 * 12288 + 2 * 4608), 2 * 6144});
  CheckPass(op.backward_weight, {3, 2 * (2 * 12288 + 2 * 6144), 2 * 4608});
  CHECK(op.forward[2].dtype == kBf16);
  // Panels of 128 x 48 and 96 x 48 and a tile of 128 x 96 numbers; two scales, or one per row.
  const std::int64_t product = 4 * (128 * 48 + 96 * 48 + 128 * 96);
  CHECK(op.forward_workspace == Bytes(product + 2 * 64));
  options.fp8 = Fp8Products::kPerRow;
  CHECK(LowerOp(spec, 2, kBf16, options).forward_workspace == Bytes(product + 4 * (128 + 96)));

  // The CUDA device copies both operands of every product. One scale takes a pass of its own; rows
  // find theirs while they are copied, unless they are columns.
  options = Set("shardwright-cuda-plain");
  options.fp8 = Fp8Products::kPerTensor;
  op = LowerOp(spec, 2, kBf16, options);
  CheckPass(op.forward, {5, 5 * 6144 + 5 * 4608, 6144 + 4608 + 2 * 12288});
  CheckPass(op.backward_data, {5, 5 * 12288 + 5 * 4608, 12288 + 4608 + 2 * 6144});
  CheckPass(op.backward_weight, {5, 5 * 12288 + 5 * 6144, 12288 + 6144 + 2 * 4608});
  CHECK(op.forward.back().dtype == DType::kFp8);
  // Copies, a scale each and 512 partial maxima each.
  CHECK(op.forward_workspace == Bytes(6144 + 4608 + 2 * 256 + 2 * 2048));
  options.fp8 = Fp8Products::kPerRow;
  op = LowerOp(spec, 2, kBf16, options);
  CheckPass(op.forward, {3, 3 * 6144 + 3 * 4608, 6144 + 4608 + 2 * 12288});
  CheckPass(op.backward_data, {4, 3 * 12288 + 5 * 4608, 12288 + 4608 + 2 * 6144});
  CheckPass(op.backward_weight, {5, 5 * 12288 + 5 * 6144, 12288 + 6144 + 2 * 4608});
  CHECK(op.forward_workspace == Bytes(6144 + 4608 + 512 + 512));
}

}  // namespace
}  // namespace shardwright
