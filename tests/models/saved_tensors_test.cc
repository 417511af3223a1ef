// What each op keeps for backward, against PyTorch's autograd and published closed forms.

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "models/model.h"
#include "tests/models/kernel_test_util.h"

namespace shardwright {
namespace {

// A few ops with numbered tensors, to add up what a layer keeps: a tensor that several ops keep
// counts once, a view counts as its base.
class Layer {
 public:
  Layer(std::int64_t batch, const KernelSetOptions& options) : batch_(batch), options_(options) {}

  // Elements per sample of tensor `id`.
  void Tensor(int id, std::int64_t elements) { elements_[id] = elements; }

  void Op(const OpSpec& spec, const std::vector<int>& inputs, const std::vector<int>& outputs) {
    const OpKernels op = LowerOp(spec, batch_, DType::kBf16, options_);
    REQUIRE(op.output_aliases.size() == outputs.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const int alias = op.output_aliases[i];
      base_[outputs[i]] = alias < 0 ? outputs[i] : Base(inputs[static_cast<std::size_t>(alias)]);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if ((op.saves_input >> i) & 1U) {
        kept_.insert(Base(inputs[i]));
      }
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if ((op.saves_output >> i) & 1U) {
        kept_.insert(Base(outputs[i]));
      }
    }
    extra_ += op.extra_saved.value;
    forward_flops_ += TotalFlops(op.forward);
  }

  [[nodiscard]] std::int64_t SavedBytes() const {
    std::int64_t bytes = extra_;
    for (const int id : kept_) {
      bytes += elements_.at(id) * batch_ * 2;
    }
    return bytes;
  }
  [[nodiscard]] double ForwardFlops() const { return forward_flops_; }

 private:
  [[nodiscard]] int Base(int id) const {
    const auto it = base_.find(id);
    return it == base_.end() ? id : it->second;
  }

  std::int64_t batch_;
  const KernelSetOptions& options_;
  std::map<int, std::int64_t> elements_;
  std::map<int, int> base_;
  std::set<int> kept_;
  std::int64_t extra_ = 0;
  double forward_flops_ = 0.0;
};

// A GPT-2 layer: pre-norm, separate projections, GELU in `activation`'s form.
Layer Gpt2Layer(const LayerSizes& z, Activation activation, const KernelSetOptions& options) {
  Layer layer(z.b, options);
  for (const int id : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14}) {
    layer.Tensor(id, z.s * z.h);
  }
  layer.Tensor(10, z.s * z.f);
  layer.Tensor(11, z.s * z.f);
  OpSpec norm = RowsSpec(OpKind::kLayerNorm, z.s, z.h);
  norm.has_bias = true;
  OpSpec dropout = RowsSpec(OpKind::kDropout, z.s, z.h);
  dropout.dropout_p = z.p;
  OpSpec gelu = RowsSpec(OpKind::kActivation, z.s, z.f);
  gelu.activation = activation;
  gelu.gelu_code = GeluCode::kNew;
  const OpSpec project = LinearSpec(z.s, z.h, z.h, true);
  const OpSpec add = RowsSpec(OpKind::kAdd, z.s, z.h);
  layer.Op(norm, {0}, {1});
  layer.Op(project, {1}, {2});
  layer.Op(project, {1}, {3});
  layer.Op(project, {1}, {4});
  layer.Op(AttentionSpec(z), {2, 3, 4}, {5});
  layer.Op(project, {5}, {6});
  layer.Op(dropout, {6}, {7});
  layer.Op(add, {0, 7}, {8});
  layer.Op(norm, {8}, {9});
  layer.Op(LinearSpec(z.s, z.h, z.f, true), {9}, {10});
  layer.Op(gelu, {10}, {11});
  layer.Op(LinearSpec(z.s, z.f, z.h, true), {11}, {12});
  layer.Op(dropout, {12}, {13});
  layer.Op(add, {8, 13}, {14});
  return layer;
}

// A Llama layer with grouped-query attention and SwiGLU.
Layer LlamaLayer(const LayerSizes& z, const KernelSetOptions& options) {
  const std::int64_t kv_features = z.kv * (z.h / z.a);
  Layer layer(z.b, options);
  for (const int id : {0, 1, 2, 5, 7, 8, 9, 10, 14, 15}) {
    layer.Tensor(id, z.s * z.h);
  }
  for (const int id : {3, 4, 6}) {
    layer.Tensor(id, z.s * kv_features);
  }
  for (const int id : {11, 12, 13}) {
    layer.Tensor(id, z.s * z.f);
  }
  const OpSpec norm = RowsSpec(OpKind::kRmsNorm, z.s, z.h);
  const OpSpec add = RowsSpec(OpKind::kAdd, z.s, z.h);
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = z.s, .heads = z.a, .kv_heads = z.kv, .head_dim = z.h / z.a};
  OpSpec swiglu = RowsSpec(OpKind::kGatedActivation, z.s, z.f);
  swiglu.activation = Activation::kSilu;
  layer.Op(norm, {0}, {1});
  layer.Op(LinearSpec(z.s, z.h, z.h, false), {1}, {2});
  layer.Op(LinearSpec(z.s, z.h, kv_features, false), {1}, {3});
  layer.Op(LinearSpec(z.s, z.h, kv_features, false), {1}, {4});
  layer.Op(rope, {2, 3}, {5, 6});
  layer.Op(AttentionSpec(z), {5, 6, 4}, {7});
  layer.Op(LinearSpec(z.s, z.h, z.h, false), {7}, {8});
  layer.Op(add, {0, 8}, {9});
  layer.Op(norm, {9}, {10});
  layer.Op(LinearSpec(z.s, z.h, z.f, false), {10}, {11});
  layer.Op(LinearSpec(z.s, z.h, z.f, false), {10}, {12});
  layer.Op(swiglu, {11, 12}, {13});
  layer.Op(LinearSpec(z.s, z.f, z.h, false), {13}, {14});
  layer.Op(add, {9, 14}, {15});
  return layer;
}

// What autograd keeps, measured with torch.autograd.graph.saved_tensors_hooks of PyTorch 2.13 on
// meta tensors (which run CUDA's shapes without a GPU); sizes 2 x 64 x 48 in bf16 unless stated.
// Scalars (the weight of a mean) are left out. measure_saved_tensors.py prints the figures again.
struct SavedCase {
  const char* name;
  OpSpec spec;
  DType compute;
  const char* set;
  std::uint32_t inputs;
  std::uint32_t outputs;
  std::int64_t extra_bytes;
};

void CheckSaved(const std::vector<SavedCase>& cases) {
  for (const SavedCase& c : cases) {
    CAPTURE(c.name);
    const OpKernels op = LowerOp(c.spec, 2, c.compute, Set(c.set));
    CHECK(op.saves_input == c.inputs);
    CHECK(op.saves_output == c.outputs);
    CHECK(op.extra_saved == Bytes(c.extra_bytes));
  }
}

TEST_CASE("row-wise ops keep what PyTorch's autograd keeps") {
  const auto act = [](OpKind kind, Activation activation) {
    OpSpec spec = RowsSpec(kind, 64, 48);
    spec.activation = activation;
    return spec;
  };
  const OpKind one = OpKind::kActivation;
  const OpKind gated = OpKind::kGatedActivation;
  OpSpec packed_silu = act(gated, Activation::kSilu);
  packed_silu.packed_gate = true;
  OpSpec packed_relu = act(gated, Activation::kRelu);
  packed_relu.packed_gate = true;
  const auto gelu = [&](OpKind kind, GeluCode code) {
    OpSpec spec = act(kind, Activation::kGeluTanh);
    spec.gelu_code = code;
    return spec;
  };
  const OpSpec embedding = {.kind = OpKind::kEmbedding, .rows = 64, .out = 48, .vocab = 100};
  const OpSpec rms = RowsSpec(OpKind::kRmsNorm, 64, 48);
  OpSpec gemma = rms;
  gemma.weight_offset = 1.0;
  const DType bf16 = DType::kBf16;
  CheckSaved({
      {"linear", LinearSpec(64, 48, 80, true), bf16, "torch-eager", 1, 0, 0},
      {"layer norm", RowsSpec(OpKind::kLayerNorm, 64, 48), bf16, "torch-eager", 1, 0, 512 + 512},
      {"rms norm in HF", rms, bf16, "hf-eager", 0, 0, 24576 + 512 + 12288},
      {"rms norm in HF, fp32", rms, DType::kFp32, "hf-eager", 1, 0, 512 + 24576},
      {"rms norm of Gemma", gemma, bf16, "hf-eager", 0, 0, 24576 + 512 + 24576 + 192},
      {"rms norm of Gemma, fp32", gemma, DType::kFp32, "hf-eager", 1, 0, 512 + 24576 + 192},
      {"relu", act(one, Activation::kRelu), bf16, "torch-eager", 0, 1, 0},
      {"tanh", act(one, Activation::kTanh), bf16, "torch-eager", 0, 1, 0},
      {"sigmoid", act(one, Activation::kSigmoid), bf16, "torch-eager", 0, 1, 0},
      {"gelu", act(one, Activation::kGelu), bf16, "torch-eager", 1, 0, 0},
      {"gelu tanh", act(one, Activation::kGeluTanh), bf16, "torch-eager", 1, 0, 0},
      {"gelu_pytorch_tanh of HF", act(one, Activation::kGeluTanh), bf16, "hf-eager", 1, 0, 0},
      {"gelu_new of HF", gelu(one, GeluCode::kNew), bf16, "hf-eager", 1, 0, 3 * 12288},
      {"gelu_fast of HF", gelu(one, GeluCode::kFast), bf16, "hf-eager", 1, 0, 6 * 12288},
      {"gelu_new elsewhere", gelu(one, GeluCode::kNew), bf16, "torch-eager", 1, 0, 0},
      {"gelu_new(gate) * up", gelu(gated, GeluCode::kNew), bf16, "hf-eager", 3, 0, 4 * 12288},
      {"gelu_fast(gate) * up", gelu(gated, GeluCode::kFast), bf16, "hf-eager", 3, 0, 7 * 12288},
      {"gelu_tanh(gate) * up", act(gated, Activation::kGeluTanh), bf16, "hf-eager", 3, 0, 12288},
      {"silu", act(one, Activation::kSilu), bf16, "torch-eager", 1, 0, 0},
      {"silu(gate) * up", act(gated, Activation::kSilu), bf16, "torch-eager", 3, 0, 12288},
      {"relu(gate) * up", act(gated, Activation::kRelu), bf16, "torch-eager", 2, 0, 12288},
      {"silu(gate) * up, packed", packed_silu, bf16, "torch-eager", 1, 0, 12288},
      {"relu(gate) * up, packed", packed_relu, bf16, "torch-eager", 1, 0, 12288},
      {"add", RowsSpec(OpKind::kAdd, 64, 48), bf16, "torch-eager", 0, 0, 0},
      {"mul", RowsSpec(OpKind::kMul, 64, 48), bf16, "torch-eager", 3, 0, 0},
      {"scale", RowsSpec(OpKind::kScale, 64, 48), bf16, "torch-eager", 0, 0, 0},
      {"embedding", embedding, bf16, "torch-eager", 1, 0, 0},
  });
}

TEST_CASE("attention and losses keep what PyTorch's autograd keeps") {
  // 3 heads of 16 over 64 tokens.
  const LayerSizes z = {.b = 2, .s = 64, .h = 48, .a = 3, .kv = 3};
  LayerSizes z_dropout = z;
  z_dropout.p = 0.1;
  OpSpec capped = AttentionSpec(z);
  capped.soft_cap = 50.0;
  OpSpec heads_first = AttentionSpec(z);
  heads_first.heads_first = true;
  const OpSpec rope = {
      .kind = OpKind::kRope, .rows = 64, .heads = 3, .kv_heads = 3, .head_dim = 16};
  const OpSpec logits = RowsSpec(OpKind::kCrossEntropy, 32, 100);
  const DType bf16 = DType::kBf16;
  CheckSaved({
      {"rope", rope, bf16, "hf-eager", 0, 0, 0},  // cos and sin are constants
      {"eager", AttentionSpec(z), bf16, "torch-2022", 7, 0, 49152},
      {"eager, fp32 softmax", AttentionSpec(z), bf16, "hf-2023", 7, 0, 98304 + 49152},
      // The mask is CUDA's (native_dropout): one byte; meta tensors show a scaled copy.
      {"eager, dropout", AttentionSpec(z_dropout), bf16, "torch-2022", 7, 0, 49152 + 24576 + 49152},
      {"eager, fp32 softmax, dropout", AttentionSpec(z_dropout), bf16, "hf-2023", 7, 0,
       98304 + 24576 + 49152},
      // PyTorch 1.10 and older: softmax and log-softmax keep their input, too (pytorch#65242).
      {"eager, 1.10", AttentionSpec(z), bf16, "hf-2021", 7, 0, 49152 + 49152},
      {"eager, 1.10, dropout", AttentionSpec(z_dropout), bf16, "megatron-1.1", 7, 0,
       49152 + 49152 + 24576 + 49152},
      {"fused softmax", AttentionSpec(z), bf16, "megatron-2021", 7, 0, 49152},
      // Of the logits without the last token a copy, beside the logits that the output holds.
      {"cross-entropy, 1.11", logits, bf16, "hf-2022", 3, 0, 12800},
      {"cross-entropy, 1.10", logits, bf16, "hf-2021", 3, 0, 12800 + 12800},
      {"flash", AttentionSpec(z), bf16, "torch-eager", 7, 1, 1536},
      // The output with heads first, of which the next layer takes a copy.
      {"flash, heads first", heads_first, bf16, "torch-eager", 7, 0, 12288 + 1536},
      {"flash, heads first, fused rope", heads_first, bf16, "torch-compile", 7, 1, 1536},
      // No fused attention of PyTorch's caps scores: tanh, softmax in fp32 and its copy are kept.
      {"capped scores", capped, bf16, "hf-trainer", 7, 0, 196608},
      {"capped scores in a kernel", capped, bf16, "torch-compile", 7, 1, 1536},
      {"log-softmax", RowsSpec(OpKind::kLogSoftmax, 32, 100), bf16, "torch-eager", 0, 1, 0},
      {"nll", RowsSpec(OpKind::kNllLoss, 32, 100), bf16, "torch-eager", 3, 0, 0},
      {"cross-entropy of fp32 logits", logits, bf16, "torch-eager", 2, 0, 25600},
      {"cross-entropy", logits, bf16, "torch-2022", 2, 0, 12800},
  });
}

TEST_CASE("image ops keep what PyTorch's autograd keeps") {
  OpSpec pool = {.kind = OpKind::kMaxPool,  // 3 x 32 x 32 by 2 x 2
                 .in = 3,
                 .height = 32,
                 .width = 32,
                 .height_out = 16,
                 .width_out = 16,
                 .kernel = 2,
                 .stride = 2};
  OpSpec average = pool;
  average.kind = OpKind::kAvgPool;
  OpSpec global = average;
  global.height_out = global.width_out = 1;
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
  const DType bf16 = DType::kBf16;
  CheckSaved({
      {"conv", conv, bf16, "torch-eager", 1, 0, 0},
      {"batch norm", batch_norm, DType::kFp32, "torch-eager", 1, 0, 12 + 12},
      {"max pool", pool, bf16, "torch-eager", 1, 0, 12288},
      {"average pool", average, bf16, "torch-eager", 1, 0, 0},
      {"global average pool", global, bf16, "torch-eager", 0, 0, 0},
  });
}

TEST_CASE("a router and its experts keep what PyTorch's autograd keeps") {
  // 64 tokens, 8 experts, top 2: softmax 2048, indices 1024, both operands of the normalisation 512
  // and 256 bytes.
  const OpSpec router = {
      .kind = OpKind::kRouter, .rows = 32, .in = 16, .experts = 8, .experts_per_token = 2};
  // MixtralExperts of Transformers 5.18 with grouped products: 64 tokens of 48 features, 4 experts
  // of 80, top 2.
  const OpSpec experts = {.kind = OpKind::kExperts,
                          .rows = 32,
                          .in = 48,
                          .out = 80,
                          .gated = true,
                          .activation = Activation::kSilu,
                          .experts = 4,
                          .experts_per_token = 2};
  CheckSaved({
      {"router", router, DType::kBf16, "torch-eager", 1, 0, 2048 + 1024 + 512 + 256},
      {"experts", experts, DType::kBf16, "torch-eager", 0, 0, 109840},
  });
}

TEST_CASE("a GPT-2 layer keeps sbh(34 + 5as/h) bytes and the norm statistics") {
  // Korthikanti et al., arXiv 2205.05198, equation 1: 16-bit, dropout 0.1, scores materialised. Per
  // token and feature: norm input 2, query/key/value input 2, q and k 4, v 2, attention output 2,
  // dropout mask 1; norm input 2, MLP input 2, GELU input 8, its output 8, mask 1; per score:
  // softmax 2, mask 1, dropout output 2. The paper leaves out mean and deviation of the two norms:
  // 2 norms * 2 numbers * 4 bytes per token.
  const LayerSizes z = {.b = 4, .s = 128, .h = 192, .a = 3, .kv = 3, .f = 768, .p = 0.1};
  const Layer layer = Gpt2Layer(z, Activation::kGelu, Set("torch-2022"));
  const std::int64_t paper = 34 * z.s * z.b * z.h + 5 * z.a * z.s * z.s * z.b;
  CHECK(layer.SavedBytes() == paper + 16 * z.s * z.b);
  // The same layer in Hugging Face Transformers 5.18 (GPT2Block, eager attention), measured with
  // saved_tensors_hooks of PyTorch 2.13; with gelu, then with gelu_new, which keeps 3 more tensors.
  CHECK(layer.SavedBytes() == 4333568);
  KernelSetOptions python_gelu = Set("torch-2022");
  python_gelu.python_gelu_tanh = true;
  CHECK(Gpt2Layer(z, Activation::kGeluTanh, python_gelu).SavedBytes() == 6692864);
  // And without dropout.
  LayerSizes no_dropout = z;
  no_dropout.p = 0.0;
  CHECK(Gpt2Layer(no_dropout, Activation::kGelu, Set("torch-2022")).SavedBytes() == 3547136);
  CHECK(Gpt2Layer(no_dropout, Activation::kGeluTanh, python_gelu).SavedBytes() == 5906432);
}

TEST_CASE("flash attention replaces the scores by one number per query and head") {
  const LayerSizes z = {.b = 4, .s = 128, .h = 192, .a = 3, .kv = 3, .f = 768, .p = 0.1};
  // 34 sbh + norm statistics, less nothing: the output that flash keeps is the input of the
  // projection, which is in the 34 already.
  CHECK(Gpt2Layer(z, Activation::kGelu, Set("torch-eager")).SavedBytes() ==
        34 * z.s * z.b * z.h + 16 * z.s * z.b + 4 * z.a * z.s * z.b);
}

TEST_CASE("a Llama layer keeps what PyTorch keeps") {
  // LlamaDecoderLayer of Transformers 5.18 in bf16, k and v repeated to all heads, measured with
  // saved_tensors_hooks of PyTorch 2.13: once with the flash kernel, once with eager attention.
  const LayerSizes z = {.b = 2, .s = 128, .h = 256, .a = 8, .kv = 2, .f = 704};
  CHECK(LlamaLayer(z, Set("hf-eager")).SavedBytes() == 3024896);
  CHECK(LlamaLayer(z, Set("hf-2023")).SavedBytes() == 4589568);
  // By hand for fused norms and no repetition, per token: two norm inputs, two norm outputs, q, k,
  // v, attention output: 2 * (6h + 2 kv d); gate and up: 4f; their product: 2f; 2 * 4 for the
  // norms, 4a for the attention.
  const std::int64_t per_token = 2 * (6 * 256 + 2 * 64) + 6 * 704 + 8 + 32;
  CHECK(LlamaLayer(z, Set("shardwright-cuda")).SavedBytes() == z.b * z.s * per_token);
}

TEST_CASE("matrix products of Llama-2-7B add up to 2 FLOPs per multiplied parameter and token") {
  // Published: 6,738,415,616 parameters, of which 131,072,000 are the embedding and 65 * 4096
  // belong to norms.
  const LayerSizes z = {.b = 1, .s = 4096, .h = 4096, .a = 32, .kv = 32, .f = 11008};
  KernelSetOptions options = Set("torch-eager");
  options.attention = AttentionImpl::kMaterialized;  // full square
  const double layer = LlamaLayer(z, options).ForwardFlops();
  const double attention = 4.0 * 4096.0 * 4096.0 * 4096.0;  // 4 s^2 h
  const OpKernels head = LowerOp(LinearSpec(4096, 4096, 32000, false), 1, DType::kBf16, options);
  const double parameters = 6738415616.0 - 131072000.0 - 65.0 * 4096.0;
  CHECK(32.0 * (layer - attention) + TotalFlops(head.forward) == 2.0 * 4096.0 * parameters);
}

}  // namespace
}  // namespace shardwright
