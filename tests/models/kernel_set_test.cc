// LowerOp against closed forms. Names as in the literature: b samples, s tokens, h features, a
// heads.

#include "models/kernel_set.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernels/kernels.h"
#include "models/model.h"
#include "tests/models/kernel_test_util.h"

namespace shardwright {
namespace {

TEST_CASE("a linear layer is three products and a bias sum") {
  // 2 samples of 8 rows, 4 -> 5 features, bf16. By hand: x 16x4, w 5x4, y 16x5.
  const OpKernels op = LowerOp(LinearSpec(8, 4, 5, true), 2, DType::kBf16, Set("torch-eager"));
  REQUIRE(op.forward.size() == 1);
  CHECK(op.forward[0].m == 16);
  CHECK(op.forward[0].n == 5);
  CHECK(op.forward[0].k == 4);
  CHECK(op.forward[0].flops.value == 640.0);          // 2 * 16 * 5 * 4
  CHECK(op.forward[0].read == Bytes(128 + 40 + 10));  // x, w, bias
  CHECK(op.forward[0].written == Bytes(160));
  REQUIRE(op.backward_data.size() == 1);
  CHECK(op.backward_data[0].n == 4);
  CHECK(op.backward_data[0].flops.value == 640.0);
  CHECK(op.backward_data[0].read == Bytes(160 + 40));  // dy, w
  CHECK(op.backward_data[0].written == Bytes(128));
  REQUIRE(op.backward_weight.size() == 2);
  CHECK(op.backward_weight[0].flops.value == 640.0);
  CHECK(op.backward_weight[0].read == Bytes(160 + 128));  // dy, x
  CHECK(op.backward_weight[0].written == Bytes(40));
  CHECK(op.backward_weight[1].read == Bytes(160));  // dy
  CHECK(op.backward_weight[1].written == Bytes(10));
  CHECK(op.saves_input == 1U);
  CHECK(op.saves_input_for_weight == 1U);
  CHECK(op.saves_output == 0U);
  CHECK(op.extra_saved == Bytes(0));
  CHECK(op.compute_intensive);

  // One launch fewer where the bias gradient is summed inside the product.
  const OpKernels fused =
      LowerOp(LinearSpec(8, 4, 5, true), 2, DType::kBf16, Set("shardwright-cuda"));
  REQUIRE(fused.backward_weight.size() == 1);
  CHECK(fused.backward_weight[0].written == Bytes(50));
}

TEST_CASE("autocast casts the weight, keeps the cast and casts the gradient back") {
  KernelSetOptions options = Set("torch-eager");
  options.autocast_weights = true;
  const OpKernels op = LowerOp(LinearSpec(8, 4, 5, true), 2, DType::kBf16, options);
  REQUIRE(op.forward.size() == 2);
  CHECK(op.forward[0].kind == KernelClass::kCopy);
  CHECK(op.forward[0].read == Bytes(100));  // 25 fp32 elements of weight and bias
  CHECK(op.forward[0].written == Bytes(50));
  CHECK(op.extra_saved == Bytes(50));
  REQUIRE(op.backward_weight.size() == 3);
  CHECK(op.backward_weight[2].read == Bytes(50));
  CHECK(op.backward_weight[2].written == Bytes(100));
  // In fp32 there is nothing to cast.
  CHECK(LowerOp(LinearSpec(8, 4, 5, true), 2, DType::kFp32, options).forward.size() == 1);
}

TEST_CASE("attention FLOPs: full square, causal half with the diagonal, backward 2.5 and 2 times") {
  LayerSizes z = {.b = 3, .s = 1024, .h = 512, .a = 4, .kv = 4};
  OpSpec spec = AttentionSpec(z);
  const double square = 4.0 * 1024 * 1024 * 128 * 4 * 3;  // 4 s^2 d a b
  spec.causal = false;
  OpKernels flash = LowerOp(spec, 3, DType::kBf16, Set("torch-eager"));
  CHECK(TotalFlops(flash.forward) == square);
  CHECK(TotalFlops(flash.backward_data) == 2.5 * square);
  spec.causal = true;
  flash = LowerOp(spec, 3, DType::kBf16, Set("torch-eager"));
  // 8 x 8 tiles of 128, of which 36 are on or below the diagonal.
  CHECK(TotalFlops(flash.forward) == square * 36.0 / 64.0);
  CHECK(TotalFlops(flash.backward_data) == 2.5 * square * 36.0 / 64.0);
  const OpKernels scores = LowerOp(spec, 3, DType::kBf16, Set("torch-2022"));
  CHECK(TotalFlops(scores.forward) == square);
  CHECK(TotalFlops(scores.backward_data) == 2.0 * square);
}

// Tiles counted one by one.
double BruteForcePairs(const OpSpec& spec) {
  constexpr std::int64_t kTile = 128;
  const std::int64_t shift = std::max<std::int64_t>(0, spec.seq_k - spec.seq_q);
  double pairs = 0.0;
  for (std::int64_t q0 = 0; q0 < spec.seq_q; q0 += kTile) {
    const std::int64_t q1 = std::min(spec.seq_q, q0 + kTile);
    for (std::int64_t k0 = 0; k0 < spec.seq_k; k0 += kTile) {
      const std::int64_t k1 = std::min(spec.seq_k, k0 + kTile);
      bool visible = false;
      for (std::int64_t q = q0; q < q1 && !visible; ++q) {
        // The keys that query q sees are an interval.
        const std::int64_t own = q + shift;
        std::int64_t first = 0;
        std::int64_t last = spec.seq_k - 1;
        if (spec.window > 0) {
          first = own - spec.window + 1;
          last = own + spec.window - 1;
        }
        if (spec.causal) {
          last = own;
        }
        visible = std::max(first, k0) <= std::min(last, k1 - 1);
      }
      if (visible) {
        pairs += static_cast<double>(q1 - q0) * static_cast<double>(k1 - k0);
      }
    }
  }
  return pairs;
}

TEST_CASE("executed attention tiles equal a count of all tiles") {
  std::mt19937 random(20240601);
  const auto draw = [&random](int low, int high) {
    return static_cast<std::int64_t>(std::uniform_int_distribution<int>(low, high)(random));
  };
  for (int i = 0; i < 400; ++i) {
    OpSpec spec;
    spec.kind = OpKind::kAttention;
    spec.seq_q = draw(1, 1500);
    spec.seq_k = spec.seq_q + 128 * draw(0, 3);
    spec.causal = draw(0, 1) == 1;
    spec.window = draw(0, 1) == 1 ? draw(1, 1700) : 0;
    CAPTURE(spec.seq_q);
    CAPTURE(spec.seq_k);
    CAPTURE(spec.causal);
    CAPTURE(spec.window);
    CHECK(internal::FlashPairs(spec) == BruteForcePairs(spec));
  }
}

TEST_CASE("grouped-query attention keeps repeated keys only where the stack repeats them") {
  const LayerSizes z = {.b = 1, .s = 256, .h = 1024, .a = 8, .kv = 2};
  const OpSpec spec = AttentionSpec(z);
  const OpKernels repeated = LowerOp(spec, 1, DType::kBf16, Set("torch-eager"));
  CHECK(repeated.saves_input == 0b001U);
  CHECK(repeated.extra_saved == Bytes(2 * 256 * 1024 * 2 + 4 * 8 * 256));
  CHECK(repeated.forward.size() == 3);
  const OpKernels native = LowerOp(spec, 1, DType::kBf16, Set("shardwright-cuda"));
  CHECK(native.saves_input == 0b111U);
  CHECK(native.extra_saved == Bytes(4 * 8 * 256));
  CHECK(native.forward.size() == 1);
  CHECK(native.forward[0].read == Bytes((8 + 2 + 2) * 256 * 128 * 2));
  CHECK(TotalFlops(native.forward) == TotalFlops(repeated.forward));
}

TEST_CASE("a position bias forces the score matrix unless a fused kernel takes it") {
  LayerSizes z = {.b = 2, .s = 128, .h = 256, .a = 4, .kv = 4};
  OpSpec spec = AttentionSpec(z);
  spec.has_bias = true;
  const OpKernels scores = LowerOp(spec, 2, DType::kBf16, Set("hf-eager"));
  CHECK(scores.extra_saved == Bytes(2 * 4 * 128 * 128 * 2));
  // PyTorch's memory-efficient kernel keeps the layer's copy of the bias, and of each row a number;
  // tests/models/attention_stand_in_test.py has the same from PyTorch.
  spec.causal = false;
  const OpKernels efficient = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  const std::int64_t bias = 4 * 128 * 128 * 2, stats = 2 * 4 * 128 * 4;
  CHECK(efficient.extra_saved == Bytes(stats + bias));
  // The copy, then the kernel.
  REQUIRE(efficient.forward.size() == 2);
  CHECK(efficient.forward[0].read == Bytes(bias));
  CHECK(efficient.forward[0].written == Bytes(bias));
  // The bias's gradient comes per sample, and is summed up.
  CHECK(efficient.backward_data.back().read == Bytes(2 * bias));
  CHECK(efficient.backward_data.back().written == Bytes(bias));
  // A causal layer merges a mask into its copy, and keeps a byte per pair of tokens for it.
  spec.causal = true;
  const OpKernels masked = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(masked.extra_saved == Bytes(stats + bias + 128 * 128));
  const OpKernels flash = LowerOp(spec, 2, DType::kBf16, Set("shardwright-cuda"));
  CHECK(flash.extra_saved == Bytes(2 * 4 * 128 * 4));
}

TEST_CASE("convolution FLOPs equal those published for ResNet-50's first layer") {
  // 7 x 7 x 3 x 64 x 112 x 112 = 118,013,952 multiply-adds (He et al. count 3.8e9 in all layers).
  const OpSpec spec = {.kind = OpKind::kConv2d,
                       .in = 3,
                       .out = 64,
                       .height = 224,
                       .width = 224,
                       .height_out = 112,
                       .width_out = 112,
                       .kernel = 7,
                       .stride = 2,
                       .padding = 3};
  const OpKernels op = LowerOp(spec, 5, DType::kFp32, Set("torch-eager"));
  CHECK(TotalFlops(op.forward) == 5.0 * 2.0 * 118013952.0);
  CHECK(TotalFlops(op.backward_data) == TotalFlops(op.forward));
  CHECK(TotalFlops(op.backward_weight) == TotalFlops(op.forward));
  CHECK(op.forward[0].m == 5 * 112 * 112);
  CHECK(op.forward[0].n == 64);
  CHECK(op.forward[0].k == 147);
  // Groups divide the taps of each output channel.
  OpSpec grouped = spec;
  grouped.in = 64;
  grouped.groups = 16;
  const OpKernels group = LowerOp(grouped, 1, DType::kFp32, Set("torch-eager"));
  CHECK(TotalFlops(group.forward) == 2.0 * 112 * 112 * 64 * (64.0 / 16.0) * 49.0);
  CHECK(group.forward[0].batch == 16);
}

TEST_CASE("experts: grouped dispatch computes the routed rows, dense dispatch all of them") {
  // Sizes of one Mixtral 8x7B layer: 3 matrices of 4096 x 14336 in 8 experts, 2 per token.
  const OpSpec spec = {.kind = OpKind::kExperts,
                       .rows = 512,
                       .in = 4096,
                       .out = 14336,
                       .gated = true,
                       .activation = Activation::kSilu,
                       .experts = 8,
                       .experts_per_token = 2};
  KernelSetOptions options = Set("torch-eager");
  const OpKernels grouped = LowerOp(spec, 2, DType::kBf16, options);
  const double one_expert = 2.0 * 3.0 * 4096.0 * 14336.0;  // per row
  CHECK(TotalFlops(grouped.forward) == 1024.0 * 2.0 * one_expert);
  CHECK(TotalFlops(grouped.backward_data) == TotalFlops(grouped.forward));
  CHECK(TotalFlops(grouped.backward_weight) == TotalFlops(grouped.forward));
  // Kept per routed row: its copy and its output (4h), gate, up, silu(gate), product (8f), its
  // weight, and three indices; offsets of the 8 experts.
  CHECK(grouped.extra_saved == Bytes(2048 * (4 * 4096 + 8 * 14336 + 2 + 24) + 4 * 8));
  CHECK(grouped.saves_input == 0U);
  CHECK_FALSE(
      grouped.compute_intensive);  // torchtitan's list of what to keep has no grouped product

  options.moe_dispatch = MoeDispatch::kDense;
  const OpKernels dense = LowerOp(spec, 2, DType::kBf16, options);
  CHECK(TotalFlops(dense.forward) == 1024.0 * 8.0 * one_expert);
  CHECK(dense.extra_saved == Bytes(8192 * (2 * 4096 + 8 * 14336 + 2)));
  CHECK(dense.saves_input == 1U);
}

// MixtralExperts of Transformers 5.23 with grouped products, 256 tokens, PyTorch 2.13: live bytes
// of all storages at the peaks of its backward nodes, less those of the output and its gradient.
TEST_CASE("experts: the moments of backward have what autograd has alive") {
  const OpSpec spec = {.kind = OpKind::kExperts,
                       .rows = 256,
                       .in = 128,
                       .out = 352,
                       .gated = true,
                       .activation = Activation::kSilu,
                       .experts = 8,
                       .experts_per_token = 2};
  const OpKernels op = LowerOp(spec, 1, DType::kFp32, Set("hf-eager"));
  Bytes kept = op.extra_saved;
  for (std::size_t i = 0; i < op.early_tensors; ++i) {
    kept -= op.extra_saved_tensors[i];
  }
  const std::int64_t weights = 3 * 1441792;
  std::vector<std::int64_t> alive;
  for (const BackwardMoment& moment : op.moments) {
    alive.push_back(kept.value + moment.alive.value + weights - moment.weights_to_come.value);
  }
  REQUIRE(alive.size() == 5);
  alive.pop_back();  // the scatter of the rows' gradients, never the peak
  CHECK(alive == std::vector<std::int64_t>{4208672, 5580832, 6039584, 6301728});
  CHECK(LowerOp(spec, 1, DType::kFp32, Set("shardwright-host")).moments.empty());
}

TEST_CASE("cross-entropy: fp32 copies and the fused kernel") {
  const OpSpec spec = RowsSpec(OpKind::kCrossEntropy, 512, 32000);
  const std::int64_t e = 2 * 512 * 32000;
  const OpKernels eager = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(eager.extra_saved == Bytes(4 * e));
  CHECK(eager.forward_workspace == Bytes(4 * e));           // the fp32 copy
  CHECK(eager.backward_workspace == Bytes(8 * e - 2 * e));  // two fp32 gradients, then the bf16 one
  CHECK(eager.saves_input == 0b10U);
  CHECK(LowerOp(spec, 2, DType::kBf16, Set("hf-eager")).saves_input == 0b11U);
  const OpKernels fp32 = LowerOp(spec, 2, DType::kFp32, Set("torch-eager"));
  CHECK(fp32.extra_saved == Bytes(4 * e));
  CHECK(fp32.forward_workspace == Bytes(0));

  const OpKernels fused = LowerOp(spec, 2, DType::kBf16, Set("torch-compile"));
  CHECK(fused.saves_input == 0b11U);
  CHECK(fused.extra_saved == Bytes(1024 * 8));
  CHECK(fused.forward_workspace == Bytes(0));
  CHECK(fused.backward_workspace == Bytes(0));
}

// By hand, with e elements in a chunk of 128 of the 1024 rows. Eager: 16-bit logits, their fp32
// log-softmax, two fp32 gradients of which the second becomes the 16-bit one. Fused: logits, which
// become their gradient, and two numbers per row. Backward runs all products, and from the second
// chunk on reads the weight's gradient, too.
TEST_CASE("a linear layer that runs the loss behind it in chunks") {
  const OpSpec linear{.kind = OpKind::kLinear, .rows = 512, .in = 64, .out = 32000};
  const OpSpec loss = RowsSpec(OpKind::kCrossEntropy, 512, 32000);
  const std::int64_t e = 128 * 32000;
  const std::int64_t weight = 2 * 64 * 32000;
  KernelSetOptions chunked = Set("torch-eager");
  chunked.loss_chunks = 8;
  const OpKernels eager = LowerLinearLoss(linear, loss, 2, DType::kBf16, chunked);
  CHECK(eager.forward.empty());
  CHECK(eager.saves_input == 0b1U);
  CHECK(eager.extra_saved == Bytes(0));
  CHECK(eager.backward_workspace == Bytes(2 * e + 4 * e + 8 * e));
  const OpKernels linear_alone = LowerOp(linear, 2, DType::kBf16, chunked);
  const OpKernels loss_alone = LowerOp(loss, 2, DType::kBf16, chunked);
  CHECK(TotalFlops(eager.backward_data) == 2 * TotalFlops(linear_alone.forward));
  CHECK(TotalFlops(eager.backward_weight) == TotalFlops(linear_alone.backward_weight));
  CHECK(TotalRead(eager.backward_data) ==
        TotalRead(linear_alone.forward) + TotalRead(linear_alone.backward_data) +
            TotalRead(loss_alone.forward) + TotalRead(loss_alone.backward_data) + 2 * 7 * weight);
  // The other operands of the weight's gradient are read once, the weight's gradient seven times.
  CHECK(TotalRead(eager.backward_weight) == TotalRead(linear_alone.backward_weight) + 7 * weight);
  CHECK(TotalWritten(eager.backward_weight) == 8 * weight);

  chunked = Set("torch-compile");
  chunked.loss_chunks = 8;
  CHECK(LowerLinearLoss(linear, loss, 2, DType::kBf16, chunked).backward_workspace ==
        Bytes(2 * e + 128 * 8));
  chunked.loss_chunks = 5000;  // more than rows: one row each
  CHECK(LowerLinearLoss(linear, loss, 2, DType::kBf16, chunked).backward_workspace ==
        Bytes(2 * 32000 + 8));
}

TEST_CASE("a stack with its loss in chunks keeps no whole logits") {
  KernelSetOptions expected = Set("hf-2021");
  CHECK(WithLossChunks(expected, 1) == expected);
  REQUIRE(expected.keeps_logits);
  REQUIRE(expected.shifted_logits);
  expected.loss_chunks = 4;
  expected.keeps_logits = expected.shifted_logits = false;
  CHECK(WithLossChunks(Set("hf-2021"), 4) == expected);
  CHECK(WithLossChunks(Set("hf-liger"), 1).loss_chunks == 1);
}

TEST_CASE("a window over more keys than queries begins in the tile of its first key") {
  // Query i is token 150 + i and sees that token alone: keys 150 to 249, in tiles of 128 those from
  // 128 on.
  OpSpec spec = AttentionSpec({.b = 1, .s = 100, .h = 8, .a = 1, .kv = 1});
  spec.seq_k = 250;
  spec.window = 1;
  spec.causal = true;
  const OpKernels op = LowerOp(spec, 1, DType::kBf16, Set("torch-eager"));
  CHECK(TotalFlops(op.forward) == 2.0 * 100 * (250 - 128) * (8 + 8));
}

// T5LayerNorm multiplies the 16-bit x by the root, LlamaRMSNorm its fp32 copy: with hooks on the
// meta device autograd keeps x, x32, a root per row and the scaled x of the first, of the second
// not x.
TEST_CASE("a norm that scales its input keeps that, too") {
  OpSpec spec = RowsSpec(OpKind::kRmsNorm, 64, 48);
  const OpKernels llama = LowerOp(spec, 2, DType::kBf16, Set("hf-trainer"));
  spec.scales_input = true;
  const OpKernels t5 = LowerOp(spec, 2, DType::kBf16, Set("hf-trainer"));
  CHECK(llama.saves_input == 0);
  CHECK(t5.saves_input == 1);
  CHECK(t5.extra_saved == llama.extra_saved);
  CHECK(t5.backward_data.size() == llama.backward_data.size() + 1);  // two gradients of x
}

// By hand, after modeling_llama.py of 2024: `logits = logits.float()` (the 16-bit tensor dies) and
// `logits[..., :-1, :].contiguous()`: 4e each, then the loss.
TEST_CASE("cross-entropy behind Hugging Face's shifted fp32 logits") {
  const OpSpec spec = RowsSpec(OpKind::kCrossEntropy, 512, 32000);
  const std::int64_t e = 2 * 512 * 32000;
  const OpKernels eager = LowerOp(spec, 2, DType::kBf16, Set("hf-trainer"));
  CHECK(eager.extra_saved == Bytes(4 * e));  // log-softmax
  // Three fp32 tensors in all, where the graph still counts the 16-bit logits.
  CHECK(eager.forward_workspace == Bytes(8 * e - 2 * e));
  CHECK(eager.backward_workspace == Bytes(8 * e - 2 * e));
  CHECK(eager.forward.size() == 4);  // cast, shift, log-softmax, pick
  const OpKernels fused = LowerOp(spec, 2, DType::kBf16, Set("hf-foak"));
  CHECK(fused.extra_saved == Bytes(4 * e + 1024 * 8));
  CHECK(fused.forward_workspace == Bytes(4 * e - 2 * e));
  CHECK(fused.backward_workspace == Bytes(4 * e - 2 * e));  // zeros for the whole gradient
  CHECK(fused.saves_input == 0b10U);                        // labels
}

TEST_CASE("dropout: no op without probability, a mask in PyTorch, nothing in the native stack") {
  OpSpec spec = RowsSpec(OpKind::kDropout, 64, 48);
  const OpKernels off = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(off.forward.empty());
  CHECK(off.output_aliases == std::vector<int>{0});
  spec.dropout_p = 0.1;
  const OpKernels eager = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(eager.extra_saved == Bytes(2 * 64 * 48));
  CHECK(eager.forward[0].written == Bytes(2 * 64 * 48 * 3));
  CHECK(LowerOp(spec, 2, DType::kBf16, Set("torch-compile")).extra_saved == Bytes(2 * 64 * 48));
  CHECK(LowerOp(spec, 2, DType::kBf16, Set("shardwright-cuda")).extra_saved == Bytes(0));
}

TEST_CASE("embedding gradients zero the table and allocate worst-case partial sums") {
  // 4000 ids into a table of 700 x 4. By hand: 4000 / 10 + min(4000, 700) = 1100 partial sums of 4
  // fp32 numbers, and two vectors of sorted ids.
  OpSpec spec = {.kind = OpKind::kEmbedding, .rows = 2000, .out = 4, .vocab = 700};
  const OpKernels op = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(op.backward_data.empty());
  CHECK(op.backward_weight[0].written == Bytes(700L * 4 * 2));
  CHECK(op.backward_workspace == Bytes(1100L * 4 * 4 + 2L * 4000 * 8));
  // Up to 3072 ids there is no sorting.
  spec.rows = 1536;
  const OpKernels few = LowerOp(spec, 2, DType::kBf16, Set("torch-eager"));
  CHECK(few.backward_weight.size() == 2);
  CHECK(few.backward_workspace == Bytes(0));
}

TEST_CASE("in-place rotation and tensor sizes") {
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = 64, .heads = 4, .kv_heads = 2, .head_dim = 16};
  CHECK(LowerOp(rope, 2, DType::kBf16, Set("shardwright-cuda")).output_aliases ==
        std::vector<int>{0, 1});
  CHECK(LowerOp(rope, 2, DType::kBf16, Set("hf-eager")).output_aliases == std::vector<int>{-1, -1});
  Tensor tensor;
  tensor.elements = 10;
  CHECK(TensorBytes(tensor, 3, DType::kBf16) == Bytes(60));
  tensor.per_sample = false;
  CHECK(TensorBytes(tensor, 3, DType::kFp32) == Bytes(40));
  tensor.per_sample = true;
  tensor.role = TensorRole::kIndex;
  CHECK(TensorBytes(tensor, 3, DType::kBf16) == Bytes(240));
  tensor.role = TensorRole::kLoss;
  tensor.per_sample = false;
  CHECK(TensorBytes(tensor, 3, DType::kBf16) == Bytes(40));
  const Kernel sum = GradientSumKernel(Bytes(100), DType::kBf16);
  CHECK(sum.read == Bytes(200));
  CHECK(sum.written == Bytes(100));
}

// One random spec of the given kind with all fields it needs.
OpSpec RandomSpec(OpKind kind, std::mt19937* random) {
  const auto draw = [random](int low, int high) {
    return static_cast<std::int64_t>(std::uniform_int_distribution<int>(low, high)(*random));
  };
  OpSpec spec;
  spec.kind = kind;
  spec.rows = draw(1, 300);
  spec.in = draw(1, 300);
  spec.out = draw(1, 300);
  spec.vocab = draw(1, 3000);
  spec.kv_heads = draw(1, 4);
  spec.heads = spec.kv_heads * draw(1, 4);
  spec.head_dim = 8 * draw(1, 16);
  spec.value_dim = 8 * draw(1, 16);
  spec.seq_q = spec.rows;
  spec.seq_k = draw(0, 1) == 1 ? spec.rows : draw(1, 400);
  spec.causal = draw(0, 1) == 1;
  spec.window = draw(0, 1) == 1 ? draw(1, 300) : 0;
  spec.has_bias = draw(0, 1) == 1;
  spec.gated = draw(0, 1) == 1;
  spec.packed_gate = spec.gated;  // fields of two kinds
  spec.activation = static_cast<Activation>(draw(1, 6));
  spec.dropout_p = draw(0, 1) == 1 ? 0.1 : 0.0;
  spec.groups = draw(1, 3);
  if (kind == OpKind::kConv2d) {
    spec.in *= spec.groups;
    spec.out *= spec.groups;
  }
  spec.height = spec.width = draw(4, 30);
  spec.height_out = spec.width_out = draw(1, 4);
  spec.kernel = draw(1, 3);
  spec.stride = 1;
  spec.experts = draw(2, 16);
  spec.experts_per_token = draw(1, 2);
  return spec;
}

constexpr OpKind kAllKinds[] = {
    OpKind::kEmbedding,    OpKind::kLinear,     OpKind::kLayerNorm,  OpKind::kRmsNorm,
    OpKind::kRope,         OpKind::kAttention,  OpKind::kActivation, OpKind::kGatedActivation,
    OpKind::kAdd,          OpKind::kMul,        OpKind::kScale,      OpKind::kDropout,
    OpKind::kPositionBias, OpKind::kConv2d,     OpKind::kBatchNorm,  OpKind::kMaxPool,
    OpKind::kAvgPool,      OpKind::kConcat,     OpKind::kSelect,     OpKind::kRouter,
    OpKind::kExperts,      OpKind::kLogSoftmax, OpKind::kNllLoss,    OpKind::kCrossEntropy};

void CheckKernels(const std::vector<Kernel>& kernels) {
  for (const Kernel& kernel : kernels) {
    CHECK(kernel.read.value >= 0);
    CHECK(kernel.written.value >= 0);
    CHECK(kernel.read.value + kernel.written.value > 0);
    const bool multiplies =
        kernel.kind == KernelClass::kGemm || kernel.kind == KernelClass::kGroupedGemm ||
        kernel.kind == KernelClass::kConv || kernel.kind == KernelClass::kAttentionForward ||
        kernel.kind == KernelClass::kAttentionBackward;
    CHECK((kernel.flops.value > 0.0) == multiplies);
    CHECK((kernel.m > 0 && kernel.n > 0 && kernel.k > 0) == multiplies);
  }
}

TEST_CASE("every op in every stack: sane kernels, sizes linear in the batch") {
  std::mt19937 random(7);
  for (const KernelSetOptions& options : BuiltinKernelSets()) {
    for (const OpKind kind : kAllKinds) {
      for (int i = 0; i < 10; ++i) {
        const OpSpec spec = RandomSpec(kind, &random);
        CAPTURE(options.name);
        CAPTURE(static_cast<int>(kind));
        for (const DType compute : {DType::kBf16, DType::kFp32}) {
          // From 2 samples on: batched products of several samples copy their operands.
          const OpKernels one = LowerOp(spec, 2, compute, options);
          const OpKernels four = LowerOp(spec, 8, compute, options);
          CheckKernels(one.forward);
          CheckKernels(one.backward_data);
          CheckKernels(one.backward_weight);
          CHECK((one.saves_input_for_weight & ~one.saves_input) == 0U);
          CHECK(one.output_aliases.size() == (kind == OpKind::kRope ? 2U : 1U));
          CHECK(one.forward_workspace.value >= 0);
          CHECK(one.backward_workspace.value >= 0);
          CHECK(four.forward.size() == one.forward.size());
          CHECK(four.saves_input == one.saves_input);
          if (one.compute_intensive) {
            CHECK(TotalFlops(one.forward) > 0.0);
            CHECK(TotalFlops(one.backward_data) > 0.0);
          }
          if (kind == OpKind::kPositionBias) {
            continue;  // shared by the samples
          }
          CHECK(TotalFlops(four.forward) == doctest::Approx(4.0 * TotalFlops(one.forward)));
          CHECK(TotalFlops(four.backward_data) ==
                doctest::Approx(4.0 * TotalFlops(one.backward_data)));
          CHECK(TotalFlops(four.backward_weight) ==
                doctest::Approx(4.0 * TotalFlops(one.backward_weight)));
          if (kind == OpKind::kExperts) {  // but for the offsets, 4 bytes per expert
            CHECK(four.extra_saved.value <= 4 * one.extra_saved.value);
            CHECK(four.extra_saved.value >= 4 * (one.extra_saved.value - 4 * spec.experts));
          } else if (kind != OpKind::kBatchNorm) {  // statistics per channel
            // The samples share a position bias, of up to 4 bytes, and the mask in it.
            const bool is_biased = kind == OpKind::kAttention && spec.has_bias;
            const std::int64_t shared =
                is_biased ? (4 * spec.heads + 1) * spec.seq_q * spec.seq_k : 0;
            CHECK(four.extra_saved.value <= 4 * one.extra_saved.value);
            CHECK(four.extra_saved.value >= 4 * (one.extra_saved.value - shared));
          }
          CHECK(TotalRead(four.forward) >= TotalRead(one.forward));
          CHECK(TotalRead(four.forward) <= 4 * TotalRead(one.forward));
          CHECK(TotalWritten(four.forward) <= 4 * TotalWritten(one.forward));
        }
      }
    }
  }
}

TEST_CASE("a fused stack never moves more bytes than eager PyTorch, and never launches more") {
  std::mt19937 random(11);
  const KernelSetOptions& eager = Set("torch-eager");
  for (const char* name : {"torch-compile", "shardwright-cuda"}) {
    for (const OpKind kind : kAllKinds) {
      for (int i = 0; i < 30; ++i) {
        OpSpec spec = RandomSpec(kind, &random);
        if (kind == OpKind::kAttention) {
          // A bias means materialised scores in one stack only, which read less than a flash kernel
          // when sequences are shorter than heads.
          spec.has_bias = false;
        }
        CAPTURE(name);
        CAPTURE(static_cast<int>(kind));
        const OpKernels a = LowerOp(spec, 2, DType::kBf16, Set(name));
        const OpKernels b = LowerOp(spec, 2, DType::kBf16, eager);
        CHECK(TotalRead(a.forward) <= TotalRead(b.forward));
        CHECK(TotalRead(a.backward_data) <= TotalRead(b.backward_data));
        CHECK(TotalRead(a.backward_weight) <= TotalRead(b.backward_weight));
        CHECK(a.forward.size() <= b.forward.size());
        CHECK(a.extra_saved.value <= b.extra_saved.value);
      }
    }
  }
}

TEST_CASE("kernel set names: unique, found, and the nearest match for a wrong one") {
  std::set<std::string> names;
  for (const KernelSetOptions& options : BuiltinKernelSets()) {
    CHECK(names.insert(options.name).second);
    CHECK(FindKernelSet(options.name, "x") == options);
  }
  CHECK_THROWS_WITH_AS(
      (void)FindKernelSet("torch-eagr", "plan.json: kernel_set"),
      "plan.json: kernel_set: got \"torch-eagr\", expected one of \"torch-eager\", "
      "\"torch-compile\", \"torch-eager-2025\", \"torch-compile-2025\", \"torch-compile-2024\", "
      "\"torch-compile-2023\", \"torch-2024\", "
      "\"torch-2022\", "
      "\"megatron-1.1\", \"megatron-2021\", \"megatron-2021-tp\", \"megatron-core\", \"jax-xla\", "
      "\"composer-2023\", \"composer-2024\", "
      "\"deepspeed\", "
      "\"internevo\", "
      "\"hf-eager\", \"hf-2026\", \"hf-trainer\", \"hf-foak\", \"hf-liger\", \"hf-liger-full\", "
      "\"hf-2021\", "
      "\"hf-2022\", "
      "\"hf-2023\", "
      "\"shardwright-host\", "
      "\"shardwright-cuda\", \"shardwright-cuda-plain\", \"shardwright-cuda-gelu\", "
      "\"shardwright-cuda-fused\", \"shardwright-cuda-chunked\"; did you mean "
      "\"torch-eager\"?",
      InputError);
}

// Whose kernel the first one of attention is.
AttentionImpl AttentionBy(const std::vector<Kernel>& kernels) {
  const auto found = std::find_if(kernels.begin(), kernels.end(),
                                  [](const Kernel& k) { return IsAttention(k.kind); });
  REQUIRE(found != kernels.end());
  return found->attention;
}

TEST_CASE("the CUDA device runs the products of experts itself") {
  const OpSpec spec{.kind = OpKind::kExperts,
                    .rows = 64,
                    .in = 32,
                    .out = 16,
                    .experts = 4,
                    .experts_per_token = 2};
  for (const char* name : {"shardwright-cuda-fused", "torch-eager"}) {
    const OpKernels op = LowerOp(spec, 1, DType::kBf16, Set(name));
    int products = 0;
    for (const auto* kernels : {&op.forward, &op.backward_data, &op.backward_weight}) {
      for (const Kernel& kernel : *kernels) {
        const bool is_product = kernel.kind == KernelClass::kGroupedGemm;
        products += is_product ? 1 : 0;
        CHECK(kernel.is_own == (is_product && Set(name).cuda_kernels));
      }
    }
    CHECK(products > 0);
  }
}

TEST_CASE("the CUDA device declares what cuDNN needs for attention") {
  // 2 heads of 64 tokens: sums of a row in fp32, 2 bytes per score in tiles of 64 x 128, 4 KiB.
  OpSpec spec = AttentionSpec({.b = 1, .s = 64, .h = 16, .a = 2, .kv = 2});
  const KernelSetOptions& cuda = Set("shardwright-cuda-plain");
  const OpKernels op = LowerOp(spec, 1, DType::kBf16, cuda);
  CHECK(op.forward_workspace == Bytes(4096));
  CHECK(op.backward_workspace == Bytes(2 * 64 * 4 + 2 * 2 * 64 * 128 + 4096));
  // Heads that share a key have gradients of their own first: 2 x (8 + 8) features of 64 tokens.
  spec.kv_heads = 1;
  CHECK(LowerOp(spec, 1, DType::kBf16, cuda).backward_workspace ==
        op.backward_workspace + Bytes(2 * 2 * 64 * (8 + 8)));
  CHECK(AttentionBy(op.forward) == AttentionImpl::kFlash);
  CHECK(AttentionBy(op.backward_data) == AttentionImpl::kFlash);
  // A GPU without such a plan runs our own kernel; PyTorch has no such kernel.
  for (const char* name : {"shardwright-cuda-plain", "torch-eager"}) {
    for (const Kernel& kernel : LowerOp(spec, 1, DType::kBf16, Set(name)).backward_data) {
      CHECK(kernel.is_own == (IsAttention(kernel.kind) && Set(name).cuda_kernels));
    }
  }
  // Not asked: fp32, a window, more than 8 GiB of scores. Then our own kernels run, at their price.
  CHECK(LowerOp(spec, 1, DType::kFp32, cuda).backward_workspace == Bytes(2 * 64 * 4));
  spec.seq_q = spec.seq_k = spec.rows = 1 << 16;
  const OpKernels longer = LowerOp(spec, 1, DType::kBf16, cuda);
  CHECK(longer.backward_workspace == Bytes(2 * (1 << 16) * 4));
  CHECK(AttentionBy(longer.forward) == AttentionImpl::kFlash);
  CHECK(AttentionBy(longer.backward_data) == AttentionImpl::kOwn);
  spec.window = 128;
  const OpKernels windowed = LowerOp(spec, 1, DType::kBf16, cuda);
  CHECK(windowed.forward_workspace == Bytes(0));
  CHECK(AttentionBy(windowed.forward) == AttentionImpl::kOwn);
}

TEST_CASE("sizes above 2^56 are refused") {
  CHECK_THROWS_WITH_AS(
      (void)LowerOp(RowsSpec(OpKind::kAdd, std::int64_t{1} << 40, std::int64_t{1} << 20), 1,
                    DType::kBf16, Set("torch-eager")),
      "sizes of one op: got the product 1 x 1099511627776 x 1048576, expected at most 2^56; reduce "
      "the batch, the sequence length or the model",
      InputError);
}

}  // namespace
}  // namespace shardwright
