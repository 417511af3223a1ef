#include "executor/initialize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/half.h"
#include "executor/shard_map.h"
#include "models/loader.h"
#include "models/trainable.h"
#include "schedule/lower/layout.h"
#include "schedule/plan.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

// Expected: the known answers of Random123 1.09 (kat_vectors, philox4x32, 10 rounds).
TEST_CASE("philox gives the published numbers") {
  const auto words = [](std::uint64_t key, std::uint64_t low, std::uint64_t high) {
    const RandomWords r = Philox(key, low, high);
    return std::array<std::uint32_t, 4>{r.word[0], r.word[1], r.word[2], r.word[3]};
  };
  CHECK(words(0, 0, 0) ==
        std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr std::uint64_t kOnes = ~std::uint64_t{0};
  CHECK(words(kOnes, kOnes, kOnes) ==
        std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(words(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e) ==
        std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

const Model& ConvNet() {
  static const Model model = LoadModel("mnist-convnet");
  return model;
}

InitRule RuleFor(const Model& model, const std::string& fqn,
                 std::optional<double> init_std = 0.02) {
  const std::vector<InitRule> rules = InitRules(model, init_std);
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    if (model.params[p].fqn == fqn) {
      return rules[p];
    }
  }
  FAIL("no parameter " << fqn);
  return {};
}

InitRule Uniform(double bound) {
  return {InitRule::Kind::kUniform, -bound, bound};
}
InitRule Normal(double deviation) {
  return {InitRule::Kind::kNormal, 0.0, deviation};
}
InitRule Constant(double value) {
  return {InitRule::Kind::kConstant, value, 0.0};
}

// Expected: reset_parameters of torch.nn.Conv2d and Linear by hand: bound 1 / sqrt(fan in), fan in
// 1 * 3 * 3 and 9216, biases alike.
TEST_CASE("custom models start as torch.nn does") {
  CHECK(RuleFor(ConvNet(), "conv1.weight") == Uniform(1.0 / 3.0));
  CHECK(RuleFor(ConvNet(), "conv1.bias") == Uniform(1.0 / 3.0));
  CHECK(RuleFor(ConvNet(), "fc1.weight") == Uniform(1.0 / 96.0));
  CHECK(RuleFor(ConvNet(), "fc1.bias") == Uniform(1.0 / 96.0));
  const Model regnet = LoadModel("regnet-y-16gf");
  std::size_t ones = 0;
  for (std::size_t p = 0; p < regnet.params.size(); ++p) {
    ones += InitRules(regnet, 0.02)[p] == Constant(1.0) ? 1 : 0;
    if (ones > 0) {
      break;  // at least one batch norm weight
    }
  }
  CHECK(ones == 1);
}

// Expected: _init_weights of transformers' GPT-2, T5, Llama, Gemma and BERT models, by hand.
TEST_CASE("Hugging Face types start as transformers does") {
  const Model gpt2 = LoadModel("gpt2");
  CHECK(RuleFor(gpt2, "transformer.wte.weight") == Normal(0.02));
  CHECK(RuleFor(gpt2, "lm_head.weight") == Normal(0.02));
  CHECK(RuleFor(gpt2, "transformer.h.3.attn.c_attn.weight") == Normal(0.02));
  CHECK(RuleFor(gpt2, "transformer.h.3.attn.c_attn.bias") == Constant(0.0));
  CHECK(RuleFor(gpt2, "transformer.h.3.mlp.c_proj.weight") == Normal(0.02 / std::sqrt(24.0)));
  CHECK(RuleFor(gpt2, "transformer.ln_f.weight") == Constant(1.0));
  CHECK(RuleFor(gpt2, "transformer.ln_f.bias") == Constant(0.0));

  const Model t5 = LoadModel("t5-small");
  const std::string block = "encoder.block.0.layer.0.SelfAttention.";
  CHECK(RuleFor(t5, "shared.weight") == Normal(1.0));
  CHECK(RuleFor(t5, block + "q.weight") == Normal(1.0 / std::sqrt(512.0 * 64.0)));
  CHECK(RuleFor(t5, block + "k.weight") == Normal(1.0 / std::sqrt(512.0)));
  CHECK(RuleFor(t5, block + "relative_attention_bias.weight") == Normal(1.0 / std::sqrt(512.0)));
  CHECK(RuleFor(t5, "encoder.block.0.layer.1.DenseReluDense.wo.weight") ==
        Normal(1.0 / std::sqrt(2048.0)));
  CHECK(RuleFor(t5, "encoder.final_layer_norm.weight") == Constant(1.0));

  CHECK(RuleFor(LoadModel("llama-3.2-1b"), "model.layers.0.mlp.up_proj.weight") == Normal(0.02));
  // Gemma's norms multiply by 1 + weight.
  CHECK(RuleFor(LoadModel("gemma-2b"), "model.norm.weight") == Constant(0.0));
  CHECK(RuleFor(LoadModel("bert-base-uncased"), "bert.embeddings.LayerNorm.weight") ==
        Constant(1.0));
}

Model FromConfig(const testing::ScratchFolder& folder, const std::string& config) {
  return LoadModel(folder.Write("config.json", config));
}

// Expected: PreTrainedModel._init_weights of transformers 5.23: N(0, initializer_range or
// init_std), the row padding_idx zero; T5's numbers times initializer_factor. Defaults: those of
// the classes.
TEST_CASE("first values are those that the config asks for") {
  const testing::ScratchFolder folder;
  const std::string sizes = R"("vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 8, )";
  const std::string llama = R"({"model_type": "llama", "intermediate_size": 12, )" + sizes;
  const Model wide = FromConfig(folder, llama + R"("initializer_range": 0.5, "pad_token_id": 3})");
  CHECK(RuleFor(wide, "model.layers.0.mlp.up_proj.weight", {}) == Normal(0.5));
  CHECK(RuleFor(wide, "model.layers.0.mlp.up_proj.weight", 0.25) == Normal(0.25));
  InitRule padded = Normal(0.5);
  padded.zeros_begin = 3 * 8;
  padded.zeros_end = 4 * 8;
  CHECK(RuleFor(wide, "model.embed_tokens.weight", {}) == padded);
  std::vector<float> values(11 * 8);
  FillParameter(padded, 1, 0, 11 * 8, DType::kFp32, values.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK((values[i] == 0.0F) == (i / 8 == 3));
  }
  // torch counts a negative padding_idx from the end.
  const Model negative = FromConfig(folder, llama + R"("pad_token_id": -1})");
  CHECK(RuleFor(negative, "model.embed_tokens.weight", {}).zeros_begin == 10 * 8);
  CHECK(RuleFor(FromConfig(folder, llama + R"("pad_token_id": null})"), "model.embed_tokens.weight",
                {}) == Normal(0.02));
  CHECK_THROWS_AS(FromConfig(folder, llama + R"("pad_token_id": 11})"), InputError);

  const Model opt = FromConfig(folder, R"({"model_type": "opt", "ffn_dim": 12,
    "word_embed_proj_dim": 8, "init_std": 0.125, )" +
                                           sizes + R"("dropout": 0.0})");
  CHECK(RuleFor(opt, "model.decoder.embed_tokens.weight", {}).b == 0.125);
  CHECK(RuleFor(opt, "model.decoder.embed_tokens.weight", {}).zeros_begin == 8);
  CHECK(RuleFor(opt, "model.decoder.embed_positions.weight", {}) == Normal(0.125));

  // BERT's padding token is 0; GPT-2's classes take none.
  CHECK(RuleFor(LoadModel("bert-base-uncased"), "bert.embeddings.word_embeddings.weight", {})
            .zeros_end == 768);
  CHECK(RuleFor(LoadModel("gpt2"), "transformer.wte.weight", {}) == Normal(0.02));

  const Model t5 = FromConfig(folder, R"({"model_type": "t5", "vocab_size": 11, "d_model": 16,
    "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 4, "initializer_factor": 0.5})");
  CHECK(RuleFor(t5, "shared.weight", {}) == Normal(0.5));
  CHECK(RuleFor(t5, "encoder.final_layer_norm.weight", {}) == Constant(0.5));
  CHECK(RuleFor(t5, "encoder.block.0.layer.0.SelfAttention.q.weight", {}) ==
        Normal(0.5 / std::sqrt(16.0 * 4.0)));
}

TEST_CASE("adapters start as the identity") {
  Model model = LoadModel("llama-3.2-1b");
  ApplyTrainable(model, {.lora_rank = 8, .lora_targets = {"q_proj"}}, Path("job"));
  CHECK(RuleFor(model, "model.layers.0.self_attn.q_proj.lora_A.weight") ==
        Uniform(1.0 / std::sqrt(2048.0)));
  CHECK(RuleFor(model, "model.layers.0.self_attn.q_proj.lora_B.weight") == Constant(0.0));
}

// Bounds: mean and variance of n samples lie within 5 standard errors; the largest distance of the
// empirical distribution from the true one (Kolmogorov) exceeds 1.95 / sqrt(n) once in 1,000.
TEST_CASE("the numbers have their distributions") {
  constexpr std::int64_t kCount = 100000;
  const double root = std::sqrt(static_cast<double>(kCount));
  std::vector<float> values(kCount);
  FillParameter(Normal(1.0), InitKey(1, "x"), 0, kCount, DType::kFp32, values.data());
  double sum = 0.0, squares = 0.0;
  for (const float v : values) {
    sum += v;
    squares += static_cast<double>(v) * v;
  }
  CHECK(std::abs(sum / kCount) < 5.0 / root);
  CHECK(std::abs(squares / kCount - 1.0) < 5.0 * std::sqrt(2.0) / root);
  std::sort(values.begin(), values.end());
  double distance = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = 0.5 * std::erfc(-values[i] / std::numbers::sqrt2);
    distance = std::max(distance, std::abs(expected - static_cast<double>(i) / kCount));
  }
  CHECK(distance < 1.95 / root);

  FillParameter(Uniform(0.5), InitKey(1, "y"), 0, kCount, DType::kFp32, values.data());
  std::sort(values.begin(), values.end());
  CHECK(values.front() >= -0.5F);
  CHECK(values.back() <= 0.5F);
  distance = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    distance = std::max(distance, std::abs(values[i] + 0.5 - static_cast<double>(i) / kCount));
  }
  CHECK(distance < 1.95 / root);
}

TEST_CASE("neighbouring seeds, names and elements are unrelated") {
  // The correlation of two independent series of n normal numbers is below 5 / sqrt(n).
  constexpr std::int64_t kCount = 20000;
  const auto fill = [](std::uint64_t seed, const std::string& name, std::int64_t begin) {
    std::vector<float> values(kCount);
    FillParameter(Normal(1.0), InitKey(seed, name), begin, kCount, DType::kFp32, values.data());
    return values;
  };
  const std::vector<float> base = fill(1, "layers.0.weight", 0);
  for (const std::vector<float>& other :
       {fill(2, "layers.0.weight", 0), fill(1, "layers.1.weight", 0),
        fill(1, "layers.0.weight", 1)}) {
    double product = 0.0;
    for (std::size_t i = 0; i < base.size(); ++i) {
      product += static_cast<double>(base[i]) * other[i];
    }
    CHECK(std::abs(product / kCount) < 5.0 / std::sqrt(static_cast<double>(kCount)));
  }
}

TEST_CASE("16-bit weights are the rounded fp32 ones") {
  std::vector<float> wide(100);
  std::vector<std::uint16_t> narrow(100);
  FillParameter(Normal(1.0), 9, 3, 100, DType::kFp32, wide.data());
  FillParameter(Normal(1.0), 9, 3, 100, DType::kBf16, narrow.data());
  int wrong = 0;
  for (std::size_t i = 0; i < wide.size(); ++i) {
    wrong += narrow[i] == FloatToBf16(wide[i]) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

// All parameters of the model in one unit.
ResolvedUnit WholeModel(const Model& model) {
  Plan plan;
  plan.units.push_back({.name = "root",
                        .modules = {""},
                        .reshard = {},
                        .forward_prefetch = {},
                        .backward_prefetch = {}});
  return ResolveUnits(model, plan, "test").front();
}

struct Layout {
  const char* name;
  UnitInfo info;
};

std::vector<Layout> LayoutsOf(const Model& model, std::int64_t shards) {
  const ResolvedUnit unit = WholeModel(model);
  return {{"rows", LayoutPerParameter(model, unit, shards)},
          {"flat", LayoutFlat(model, unit, shards, true, DType::kBf16)},
          {"packed", LayoutFlat(model, unit, shards, false, DType::kBf16)},
          {"native", LayoutNative(model, unit, shards, DType::kBf16)}};
}

TEST_CASE("any sharding starts with the same weights, and padding is zero") {
  const Model& model = ConvNet();
  const std::vector<InitRule> rules = InitRules(model, 0.02);
  std::vector<std::vector<float>> expected;
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    const std::int64_t n = model.params[p].Elements();
    expected.emplace_back(static_cast<std::size_t>(n));
    FillParameter(rules[p], InitKey(5, model.params[p].fqn), 0, n, DType::kFp32,
                  expected.back().data());
  }
  for (const std::int64_t shards : {1, 2, 3, 4, 8, 129}) {
    for (const Layout& layout : LayoutsOf(model, shards)) {
      CAPTURE(shards);
      CAPTURE(layout.name);
      std::vector<std::vector<int>> seen;
      for (const std::vector<float>& param : expected) {
        seen.emplace_back(param.size(), 0);
      }
      std::int64_t wrong = 0, padding = 0;
      for (std::int64_t s = 0; s < shards; ++s) {
        const auto pieces = ShardPieces(model, layout.info, s, shards);
        std::vector<float> shard(static_cast<std::size_t>(layout.info.shard_elements), -1.0F);
        InitializeShard(model, rules, 5, pieces,
                        {shard.data(), DType::kFp32, layout.info.shard_elements}, 3);
        for (const ShardPiece& piece : pieces) {
          for (std::int64_t i = 0; i < piece.count; ++i) {
            const auto at = static_cast<std::size_t>(piece.param_begin + i);
            float& value = shard[static_cast<std::size_t>(piece.shard_offset + i)];
            wrong += value == expected[piece.param.value][at] ? 0 : 1;
            ++seen[piece.param.value][at];
            value = 0.0F;
          }
        }
        padding += std::count_if(shard.begin(), shard.end(), [](float v) { return v != 0.0F; });
      }
      CHECK(wrong == 0);
      CHECK(padding == 0);
      for (const std::vector<int>& param : seen) {
        CHECK(std::count(param.begin(), param.end(), 1) ==
              static_cast<std::ptrdiff_t>(param.size()));
      }
    }
  }
}

TEST_CASE("running statistics start at mean 0 and variance 1") {
  const Model model = LoadModel("regnet-y-16gf");
  std::int64_t elements = 0, channels = 0, norms = 0;
  for (const Module& module : model.modules) {
    elements += module.buffer_elements;
    norms += module.buffer_elements > 0 ? 1 : 0;
    // running_mean, running_var and num_batches_tracked
    channels += module.buffer_elements > 0 ? (module.buffer_elements - 1) / 2 : 0;
  }
  std::vector<float> buffers(static_cast<std::size_t>(elements), -1.0F);
  InitializeModelBuffers(model, buffers);
  CHECK(std::count(buffers.begin(), buffers.end(), 1.0F) == channels);
  CHECK(std::count(buffers.begin(), buffers.end(), 0.0F) == channels + norms);
  // The first batch norm has 32 channels: 32 means, 32 variances, one counter.
  CHECK(buffers[31] == 0.0F);
  CHECK(buffers[32] == 1.0F);
  CHECK(buffers[63] == 1.0F);
  CHECK(buffers[64] == 0.0F);
}

}  // namespace
}  // namespace shardwright
