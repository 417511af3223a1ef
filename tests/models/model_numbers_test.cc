// What the numbers of an op depend on. Expected values are those of the Transformers classes and of
// the published configurations.

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {
namespace {

// The spec of the first op of this kind in the module (any module when `fqn` is empty).
OpSpec FirstSpec(const Model& model, OpKind kind, std::string_view fqn = "") {
  const ModuleId module = FindModule(model, fqn);
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == kind && IsInside(model, op.module, module)) {
      return model.SpecOf(op);
    }
  }
  FAIL("no such op in " << fqn);
  return {};
}

std::vector<InputKind> InputsOf(const Model& model) {
  std::vector<InputKind> kinds;
  for (const Tensor& tensor : model.tensors) {
    if (!tensor.producer.valid()) {
      kinds.push_back(tensor.input);
    }
  }
  return kinds;
}

Model LlamaWith(const std::string& more) {
  return ModelFromJson(
      JsonValue::Parse(R"({"model_type": "llama", "vocab_size": 50, "hidden_size": 16,
      "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2)" +
                           more + "}",
                       "config.json"),
      "tiny");
}

}  // namespace

TEST_CASE("ModelNumbers.Gpt2") {
  const Model model = LoadModel("gpt2", {.sequence_length = 64});
  CHECK(FirstSpec(model, OpKind::kLinear, "transformer.h.0.attn.c_attn").transposed);
  CHECK_FALSE(FirstSpec(model, OpKind::kLinear, "lm_head").transposed);
  CHECK(FirstSpec(model, OpKind::kLayerNorm).epsilon == 1e-5);
  CHECK(FirstSpec(model, OpKind::kAttention).factor == 0.0);
  CHECK(InputsOf(model) ==
        std::vector{InputKind::kTokens, InputKind::kPositions, InputKind::kLabels});
}

TEST_CASE("ModelNumbers.T5") {
  const Model model = LoadModel("t5-small", {.sequence_length = 64});
  CHECK(FirstSpec(model, OpKind::kAttention).factor == 1.0);
  CHECK(FirstSpec(model, OpKind::kPositionBias, "encoder").max_distance == 128);
  CHECK_FALSE(FirstSpec(model, OpKind::kPositionBias, "encoder").causal);
  CHECK(FirstSpec(model, OpKind::kPositionBias, "decoder").causal);
  CHECK(FirstSpec(model, OpKind::kScale).factor == doctest::Approx(std::pow(512.0, -0.5)));
  CHECK(InputsOf(model) ==
        std::vector{InputKind::kTokens, InputKind::kDecoderTokens, InputKind::kLabels});
}

TEST_CASE("ModelNumbers.Gemma") {
  const Model two = LoadModel("gemma-2-2b", {.sequence_length = 64});
  CHECK(FirstSpec(two, OpKind::kRmsNorm).weight_offset == 1.0);
  CHECK(FirstSpec(two, OpKind::kAttention).soft_cap == 50.0);
  CHECK(FirstSpec(two, OpKind::kAttention).factor == 1.0 / 16.0);  // query_pre_attn_scalar 256
  CHECK(FirstSpec(two, OpKind::kScale).factor == std::sqrt(2304.0));
  // Every sixth layer of Gemma 3 is global and turns more slowly.
  const Model three = LoadModel("gemma-3-1b", {.sequence_length = 64});
  CHECK(FirstSpec(three, OpKind::kRope, "model.layers.0").rope.theta == 1e4);
  CHECK(FirstSpec(three, OpKind::kRope, "model.layers.5").rope.theta == 1e6);
}

TEST_CASE("ModelNumbers.PositionsOfOtherDecoders") {
  const Model opt = LoadModel("opt-125m", {.sequence_length = 64});
  CHECK(FirstSpec(opt, OpKind::kEmbedding, "model.decoder.embed_positions").index_offset == 2);
  CHECK(FirstSpec(opt, OpKind::kEmbedding, "model.decoder.embed_tokens").index_offset == 0);
  CHECK(FirstSpec(opt, OpKind::kScale).factor == 0.125);  // heads of 64
  CHECK(FirstSpec(opt, OpKind::kAttention).factor == 1.0);
  const Model neox = LoadModel("pythia-160m", {.sequence_length = 64});
  CHECK(FirstSpec(neox, OpKind::kRope).rope.dim == 16);  // a quarter of 64
  CHECK(FirstSpec(neox, OpKind::kRope).packed_by_head);
  CHECK(FirstSpec(neox, OpKind::kAttention).packed_by_head);
}

TEST_CASE("ModelNumbers.RopeScaling") {
  const RopeAngles plain = FirstSpec(LlamaWith(""), OpKind::kRope).rope;
  CHECK(plain == RopeAngles{.dim = 8, .theta = 1e4});
  const RopeAngles scaled =
      FirstSpec(LlamaWith(R"(, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3",
          "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192})"),
                OpKind::kRope)
          .rope;
  CHECK(scaled == RopeAngles{.dim = 8,
                             .theta = 5e5,
                             .scaling = RopeScaling::kLlama3,
                             .factor = 8.0,
                             .low_frequency_factor = 1.0,
                             .high_frequency_factor = 4.0,
                             .original_length = 8192.0});
  const RopeAngles yarn =
      FirstSpec(LlamaWith(R"(, "rope_scaling": {"type": "yarn", "factor": 40})"), OpKind::kRope)
          .rope;
  CHECK(yarn.scaling == RopeScaling::kOther);
}

TEST_CASE("ModelNumbers.PartOfTheHeadIsRotated") {
  const auto phi = [](const std::string& more) {
    return ModelFromJson(JsonValue::Parse(R"({"model_type": "phi3", "vocab_size": 50,
      "pad_token_id": 0, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
      "num_attention_heads": 2)" + more + "}",
                                          "config.json"),
                         "tiny");
  };
  const auto rotated = [&](const std::string& more) {
    return FirstSpec(phi(more), OpKind::kRope).rope.dim;
  };
  CHECK(rotated("") == 8);
  CHECK(rotated(R"(, "partial_rotary_factor": 0.75)") == 6);
  CHECK(rotated(R"(, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default",
                     "partial_rotary_factor": 0.5})") == 4);
  // 0.4 of 8 is 3.2: three features do not pair up. Less than a pair is nothing to rotate.
  CHECK_THROWS_WITH_AS(rotated(R"(, "partial_rotary_factor": 0.4)"),
                       "config.json: partial_rotary_factor: got 3 rotated features of a head, "
                       "expected an even number from 2 to 8",
                       InputError);
  CHECK_THROWS_WITH_AS(rotated(R"(, "partial_rotary_factor": 0.1)"),
                       "config.json: partial_rotary_factor: got 0 rotated features of a head, "
                       "expected an even number from 2 to 8",
                       InputError);
  // Phi-3's long rule can be planned, not run; its dropout stands before both sums.
  const Model model = phi(R"(, "resid_pdrop": 0.1,
      "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]})");
  CHECK(FirstSpec(model, OpKind::kRope).rope.scaling == RopeScaling::kOther);
  CHECK(std::count_if(model.ops.begin(), model.ops.end(), [&](const ModelOp& op) {
          return model.SpecOf(op).kind == OpKind::kDropout;
        }) == 2);
}

TEST_CASE("ModelNumbers.Routing") {
  const OpSpec mixtral =
      FirstSpec(LoadModel("mixtral-8x7b", {.sequence_length = 64}), OpKind::kRouter);
  CHECK(mixtral.normalizes_top_k);
  CHECK_FALSE(mixtral.scores_by_sigmoid);
  CHECK(mixtral.factor == 0.0);
  const Model v3 = LoadModel("deepseek-v3", {.sequence_length = 64});
  const OpSpec router = FirstSpec(v3, OpKind::kRouter);
  CHECK(router.scores_by_sigmoid);
  CHECK(router.groups == 8);
  CHECK(router.groups_per_token == 4);
  CHECK(router.factor == 2.5);
  CHECK(FirstSpec(v3, OpKind::kRope).rope ==
        RopeAngles{.dim = 64, .theta = 1e4, .interleaved = true});
}

TEST_CASE("ModelNumbers.ConvolutionBeforeTokensWritesThem") {
  CHECK(FirstSpec(LoadModel("vit-b-16"), OpKind::kConv2d).tokens_out);
  CHECK_FALSE(FirstSpec(LoadModel("mnist-convnet"), OpKind::kConv2d).tokens_out);
  CHECK(InputsOf(LoadModel("mnist-convnet")) ==
        std::vector{InputKind::kFeatures, InputKind::kLabels});
}

}  // namespace shardwright
