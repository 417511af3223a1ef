// CutTensor by closed form: what a rank holds, where tokens move, and what is refused.

#include "models/cut_tensor.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "models/loader.h"
#include "models/trainable.h"

namespace shardwright {
namespace {

Model Loaded(const std::string& name, std::int64_t sequence = 128) {
  LoadOptions options;
  options.sequence_length = sequence;
  return LoadModel(name, options);
}

std::int64_t LocalElements(const Model& model) {
  std::int64_t sum = 0;
  for (const Parameter& param : model.params) {
    sum += param.tied_to.valid() ? 0 : param.Elements();
  }
  return sum;
}

std::int64_t OpsOf(const Model& model, OpKind kind) {
  return std::count_if(model.ops.begin(), model.ops.end(),
                       [&](const ModelOp& op) { return model.SpecOf(op).kind == kind; });
}

TEST_CASE("CutTensor: a rank has its part of all but the norms") {
  // Layers, and elements of norms: two per layer and one, of q and k per head in Qwen3.
  struct Row {
    const char* name;
    std::int64_t layers, norms;
  };
  for (const Row& row :
       {Row{"llama-3-8b", 32, 65 * 4096}, Row{"qwen3-8b", 36, 73 * 4096 + 72 * 128},
        Row{"llama-3.2-1b", 16, 33 * 2048}}) {
    const Model whole = Loaded(row.name);
    for (const std::int64_t ranks : {2, 4, 8}) {
      CAPTURE(row.name);
      CAPTURE(ranks);
      Model model = whole;
      CutTensor(model, ranks, "test");
      ValidateModel(model, "test");
      CHECK(LocalElements(model) == (LocalElements(whole) - row.norms) / ranks + row.norms);
      CHECK(CountParameters(model) == CountParameters(whole));
      CHECK(ConventionFlopsPerSample(model).value == ConventionFlopsPerSample(whole).value);
      // One gather in front of attention, MLP and head; one scatter behind attention, MLP and
      // embedding.
      CHECK(OpsOf(model, OpKind::kGatherTokens) == 2 * row.layers + 1);
      CHECK(OpsOf(model, OpKind::kScatterTokens) == 2 * row.layers + 1);
      CHECK(model.ops.size() == whole.ops.size() + static_cast<std::size_t>(4 * row.layers + 2));
      Model again = model;
      CutTensor(again, ranks, "test");
      CHECK(again.ops.size() == model.ops.size());
    }
  }
}

TEST_CASE("CutTensor: sizes of a layer of llama-3-8b on 8 ranks") {
  Model model = Loaded("llama-3-8b");
  CutTensor(model, 8, "test");
  const auto elements = [&](const std::string& module, const std::string& name) {
    for (const ModelOp& op : model.ops) {
      if (model.modules[op.module.value].fqn == "model.layers.3" + module && op.name == name) {
        return model.tensors[op.outputs.front().value].elements;
      }
    }
    return std::int64_t{-1};
  };
  CHECK(elements(".input_layernorm", "input_layernorm") == 128 / 8 * 4096);
  CHECK(elements(".self_attn", "gather_tokens") == 128 * 4096);
  CHECK(elements(".self_attn.q_proj", "q_proj") == 128 * 4096 / 8);
  CHECK(elements(".self_attn.k_proj", "k_proj") == 128 * 128);  // one of 8 heads
  CHECK(elements(".self_attn.o_proj", "o_proj") == 128 * 4096);
  CHECK(elements(".self_attn.o_proj", "scatter_tokens") == 128 / 8 * 4096);
  CHECK(elements(".mlp", "gather_tokens") == 128 * 4096);
  CHECK(elements(".mlp.up_proj", "up_proj") == 128 * 14336 / 8);
}

const Parameter& Named(const Model& model, const std::string& fqn) {
  for (const Parameter& param : model.params) {
    if (param.fqn == fqn) {
      return param;
    }
  }
  FAIL(fqn);
  return model.params.front();
}

TEST_CASE("CutTensor: of an adapter one matrix is cut, and the other one has partial gradients") {
  constexpr std::int64_t kRank = 16, kLayers = 32;
  const Model bare = Loaded("llama-3-8b");
  Model whole = bare;
  ApplyTrainable(whole,
                 {.lora_rank = kRank, .lora_targets = {"q_proj", "o_proj", "up_proj", "down_proj"}},
                 Path("job"));
  Model model = whole, cut = bare;
  CutTensor(model, 4, "test");
  CutTensor(cut, 4, "test");
  ValidateModel(model, "test");
  // Of columns A is whole (q and up: 4096 inputs) and B has a quarter of 4096 and of 14336 outputs;
  // of rows A has a quarter of 4096 and of 14336 inputs, and B all of 4096 outputs (o and down).
  const std::int64_t each = 4 * 4096 + 2 * (4096 + 14336) / 4;
  CHECK(LocalElements(model) - LocalElements(cut) == kLayers * kRank * each);
  CHECK(CountParameters(model, true) == kLayers * kRank * (6 * 4096 + 2 * 14336));
  for (const char* const transfer : {"gather_tokens", "scatter_tokens"}) {  // no more of them
    const auto count = [&](const Model& of) {
      return std::count_if(of.ops.begin(), of.ops.end(),
                           [&](const ModelOp& op) { return op.name == transfer; });
    };
    CHECK(count(model) == count(cut));
  }
  for (const char* const layer : {"self_attn.q_proj", "mlp.up_proj"}) {
    const std::string fqn = "model.layers.3." + std::string(layer);
    CHECK(Named(model, fqn + ".lora_A.weight").has_partial_gradient);
    CHECK(Named(model, fqn + ".lora_B.weight").tensor_dimension == 0);
  }
  for (const char* const layer : {"self_attn.o_proj", "mlp.down_proj"}) {
    const std::string fqn = "model.layers.3." + std::string(layer);
    CHECK(Named(model, fqn + ".lora_A.weight").tensor_dimension == 1);
    CHECK(Named(model, fqn + ".lora_B.weight").has_partial_gradient);
  }
  // Packed q, k and v: the adapter's outputs are cut as the weight's.
  Model phi = Loaded("phi-4");
  ApplyTrainable(phi, {.lora_rank = kRank, .lora_targets = {"qkv_proj"}}, Path("job"));
  CutTensor(phi, 2, "test");
  CHECK(Named(phi, "model.layers.7.self_attn.qkv_proj.lora_B.weight").tensor_sections ==
        std::vector<std::int64_t>{2560, 640, 640});
  // All of DoRA's lengths are of whole rows.
  Model dora = bare;
  ApplyTrainable(dora, {.lora_rank = 2, .lora_targets = {"q_proj"}, .lora_magnitudes = true},
                 Path("job"));
  CHECK_THROWS_WITH_AS(CutTensor(dora, 2, "test"), doctest::Contains("DoRA"), InputError);
}

TEST_CASE("CutTensor: what is packed in a weight is cut each by itself") {
  // 40 heads of queries and 10 of keys and of values, 128 features each; 17,920 gates and as many
  // others.
  Model phi = Loaded("phi-4");
  CutTensor(phi, 2, "test");
  ValidateModel(phi, "test");
  CHECK(Named(phi, "model.layers.7.self_attn.qkv_proj.weight").tensor_sections ==
        std::vector<std::int64_t>{2560, 640, 640});
  CHECK(Named(phi, "model.layers.7.mlp.gate_up_proj.weight").tensor_sections ==
        std::vector<std::int64_t>{8960, 8960});
  CHECK(Named(phi, "model.layers.7.self_attn.o_proj.weight").tensor_sections.empty());
  // [head][q, k, v] is cut in one piece; GPT-2's three stand one behind the other.
  Model neox = Loaded("pythia-1b");
  CutTensor(neox, 4, "test");
  CHECK(Named(neox, "gpt_neox.layers.0.attention.query_key_value.weight").shape ==
        std::vector<std::int64_t>{3 * 2048 / 4, 2048});
  CHECK(Named(neox, "gpt_neox.layers.0.attention.query_key_value.weight").tensor_sections.empty());
}

TEST_CASE("CutTensor: a norm of which the costs alone are known has its part of the tokens") {
  // Nemotron adds one to the weight of a norm; rotations of half of a head copy q and k.
  Model whole = ModelFromJson(
      JsonValue::Parse(R"({"model_type": "nemotron", "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 128})",
                       "test"),
      "nemotron", {.sequence_length = 128});
  Model model = whole;
  CutTensor(model, 4, "test");
  ValidateModel(model, "test");
  const auto read = [](const Model& of) {
    std::vector<Amount> sizes;
    for (const ModelOp& op : of.ops) {
      const OpSpec& spec = of.SpecOf(op);
      if (spec.kind == OpKind::kOther && spec.other.function == "aten.native_layer_norm") {
        sizes.push_back(spec.other.kernels.front().read.elements);
      }
    }
    return sizes;
  };
  CHECK(read(whole) == std::vector<Amount>(3, {.fixed = 2 * 64, .per_sample = 128 * 64}));
  CHECK(read(model) == std::vector<Amount>(3, {.fixed = 2 * 64, .per_sample = 128 / 4 * 64}));
  CHECK(Named(model, "model.layers.0.input_layernorm.weight").has_partial_gradient);
  CHECK(Named(model, "model.layers.0.input_layernorm.bias").has_partial_gradient);
  CHECK(CountParameters(model) == CountParameters(whole));
}

TEST_CASE("CutTensor: each rank looks up the positions of its tokens") {
  Model model = Loaded("opt-1.3b");
  CutTensor(model, 4, "test");
  ValidateModel(model, "test");
  const Parameter& table = Named(model, "model.decoder.embed_positions.weight");
  CHECK(table.shape == std::vector<std::int64_t>{2050, 2048});
  CHECK(table.has_partial_gradient);
  for (const ModelOp& op : model.ops) {
    if (!op.params.empty() && &model.params[op.params.front().value] == &table) {
      CHECK(model.tensors[op.outputs.front().value].elements == 128 / 4 * 2048);
    }
  }
}

std::string Refusal(const std::string& name, std::int64_t ranks, std::int64_t sequence = 128) {
  try {
    Model model = Loaded(name, sequence);
    CutTensor(model, ranks, "--shard: tp");
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

TEST_CASE("CutTensor: what cannot be cut is said") {
  CHECK(Refusal("llama-3-8b", 16) ==
        "--shard: tp: got 16, expected a divisor of the 8 heads of keys and values of "
        "\"model.layers.0.self_attn\"");
  CHECK(Refusal("llama-3-8b", 8, 100).find("a divisor of the 100 tokens") != std::string::npos);
  CHECK(Refusal("llama-3-8b", 3).find("a divisor of the ") != std::string::npos);
  CHECK(Refusal("mixtral-8x7b", 2).find("block_sparse_moe") != std::string::npos);
  CHECK(Refusal("phi-4", 4) ==
        "--shard: tp: got 4, expected a divisor of the 10 heads of keys and values of "
        "\"model.layers.0.self_attn\"");
  CHECK(Refusal("olmo-2-7b", 2).find("a norm over features of several ranks") != std::string::npos);
  CHECK(Refusal("deepseek-v3", 2).find("a norm over features of several ranks") !=
        std::string::npos);
  CHECK(Refusal("vit-b-16", 2).find("no rule cuts op \"projection\"") != std::string::npos);
  CHECK(Refusal("t5-small", 2).find("no rule cuts op \"position_bias\"") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
