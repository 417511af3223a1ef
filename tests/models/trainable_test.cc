#include "models/trainable.h"

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/internal/order.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {
namespace {

std::string ErrorOf(const TrainableSpec& spec) {
  Model model = LoadModel("data/models/tiny-llama");
  try {
    ApplyTrainable(model, spec, Path("job"));
  } catch (const InputError& e) {
    return e.what();
  }
  return "applied";
}

TEST_CASE("Trainable.Globs") {
  CHECK(MatchesGlob("*", ""));
  CHECK(MatchesGlob("model.*.weight", "model.layers.0.q_proj.weight"));
  CHECK(MatchesGlob("*_proj", "q_proj"));
  CHECK(MatchesGlob("?_proj", "q_proj"));
  CHECK(MatchesGlob("a*b*c", "aXbYbZc"));
  CHECK(MatchesGlob("**", "anything"));
  CHECK_FALSE(MatchesGlob("?_proj", "qq_proj"));
  CHECK_FALSE(MatchesGlob("q_proj", "q_proj.weight"));
  CHECK_FALSE(MatchesGlob("", "x"));
  CHECK_FALSE(MatchesGlob("a*b", "ac"));
}

TEST_CASE("Trainable.FrozenParametersAndTheirAliases") {
  Model model = LoadModel("gpt2");
  ApplyTrainable(model, {.frozen = {"lm_head.weight"}}, Path("job"));
  // The head is the embedding table: 50257 * 768.
  CHECK(CountParameters(model, /*trainable_only=*/true) == 124439808 - 50257 * 768);
  CHECK_FALSE(model.params[0].trainable);
  CHECK_FALSE(model.params.back().trainable);
  // Frozen weights have no weight gradient: 4 instead of 6 FLOPs each.
  Model all = LoadModel("llama-2-7b");
  const double before = ConventionFlopsPerSample(all).value;
  ApplyTrainable(all, {.frozen = {"*"}}, Path("job"));
  CHECK(CountParameters(all, /*trainable_only=*/true) == 0);
  CHECK(before - ConventionFlopsPerSample(all).value ==
        doctest::Approx(2048.0 * 2 * (6738415616.0 - 32000.0 * 4096)));
}

TEST_CASE("Trainable.LoraAddsTwoMatricesPerTarget") {
  Model model = LoadModel("llama-2-7b");
  const std::size_t ops = model.ops.size();
  ApplyTrainable(model, {.lora_rank = 16, .lora_targets = {"q_proj", "v_proj"}}, Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  // PEFT prints "trainable params: 8,388,608" for this setting: 32 * 2 * 16 * (4096 + 4096).
  CHECK(CountParameters(model, /*trainable_only=*/true) == 8388608);
  CHECK(CountParameters(model) == 6738415616 + 8388608);
  CHECK(model.ops.size() == ops + 32 * 2 * 4);
  const ModuleId q = FindModule(model, "model.layers.0.self_attn.q_proj");
  const std::vector<ParamId>& params = model.modules[q.value].params;
  REQUIRE(params.size() == 1);
  CHECK(model.params[params[0].value].fqn == "model.layers.0.self_attn.q_proj.weight");
  // Modules of their own, as PEFT has them: FSDP1's policy makes a unit of each.
  const std::vector<ModuleId>& children = model.modules[q.value].children;
  REQUIRE(children.size() == 2);
  const auto only = [&](ModuleId module) {
    const Module& child = model.modules[module.value];
    CHECK(child.class_name == "Linear");
    CHECK(child.params.size() == 1);
    return model.params[child.params[0].value];
  };
  CHECK(only(children[0]).fqn == "model.layers.0.self_attn.q_proj.lora_A.weight");
  CHECK(only(children[0]).shape == std::vector<std::int64_t>{16, 4096});
  CHECK(only(children[1]).fqn == "model.layers.0.self_attn.q_proj.lora_B.weight");
  CHECK(only(children[1]).shape == std::vector<std::int64_t>{4096, 16});
}

TEST_CASE("Trainable.TargetsAreTakenBack") {
  Model model = LoadModel("llama-2-7b");
  ApplyTrainable(model,
                 {.lora_rank = 16, .lora_targets = {"*_proj", "!*.mlp.*", "!k_proj", "!o_proj"}},
                 Path("job"));
  CHECK(CountParameters(model, /*trainable_only=*/true) == 8388608);  // q_proj and v_proj
  CHECK_THROWS_WITH_AS(
      ApplyTrainable(model, {.lora_rank = 16, .lora_targets = {"!q_proj"}}, Path("job")),
      doctest::Contains("at least one pattern"), InputError);
  const std::vector<std::string> globs = {"all-linear", "!*.layers.0.*"};
  CHECK(MatchedTargets(LoadModel("llama-2-7b"), globs, "test").back() == "!*.layers.0.*");
}

// Sizes are those of Automodel's GroupedExpertsLoRA, run on torch's meta device: 6,553,600 elements
// for the experts of a layer of Mixtral 8x7B at rank 16.
TEST_CASE("Trainable.AdaptersOfExperts") {
  const Model whole = LoadModel("mixtral-8x7b");
  Model model = whole;
  ApplyTrainable(model, {.lora_rank = 32, .lora_targets = {"q_proj", "*@16"}}, Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  CHECK(CountParameters(model, /*trainable_only=*/true) ==
        std::int64_t{32} * (6553600 + 32 * (4096 + 4096)));
  // Two of eight experts read a token: 6 FLOPs of a quarter of what learns, 4 where nothing does.
  const double tokens = static_cast<double>(whole.sequence_length);
  Model q = whole;
  ApplyTrainable(q, {.lora_rank = 32, .lora_targets = {"q_proj"}}, Path("job"));
  CHECK(ConventionFlopsPerSample(model).value - ConventionFlopsPerSample(q).value ==
        doctest::Approx(6.0 * tokens * 32 * 6553600 / 4));
  // What the products really do per sample: two projections through the rank, forward, for rows and
  // for weights.
  double flops = 0.0;
  for (const ModelOp& op : model.ops) {
    for (const OtherKernel& kernel : model.SpecOf(op).other.kernels) {
      flops += static_cast<double>(kernel.flops.Of(1));
    }
  }
  CHECK(flops == doctest::Approx(6.0 * tokens * 32 * 6553600 / 4));
  const auto matched = [&](const char* glob) { return MatchedTargets(whole, {glob}, "test"); };
  CHECK(matched("*@32/k") == std::vector<std::string>{"*@16"});
  CHECK(matched("*.experts@1/k") == std::vector<std::string>{"*.experts@1"});
  for (const char* const wrong : {"*@", "*@0", "*@x", "*@4x", "*@-1"}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH_AS(matched(wrong), doctest::Contains("PATTERN@N"), InputError);
  }
  CHECK_THROWS_WITH_AS(ApplyTrainable(q = LoadModel("llama-2-7b"),
                                      {.lora_rank = 2, .lora_targets = {"*@4"}}, Path("job")),
                       doctest::Contains("a pattern that matches"), InputError);
}

// PEFT's modules_to_save: the copies learn and are read, the originals stay.
TEST_CASE("Trainable.SavedModulesLearnAsCopies") {
  Model model = LoadModel("data/models/tiny-llama");
  const std::int64_t all = CountParameters(model);
  ApplyTrainable(model,
                 {.lora_rank = 2, .lora_targets = {"up_proj"}, .lora_saved = {"embed_tokens"}},
                 Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  const ModuleId embedding = FindModule(model, "model.embed_tokens");
  const ModuleId copy = FindModule(model, "model.embed_tokens.modules_to_save");
  REQUIRE(copy.valid());
  CHECK(model.modules[copy.value].parent == embedding);
  CHECK(model.modules[copy.value].class_name == "Embedding");
  const Parameter& frozen = model.params[model.modules[embedding.value].params[0].value];
  const ParamId learns = model.modules[copy.value].params[0];
  CHECK_FALSE(frozen.trainable);
  CHECK(model.params[learns.value].trainable);
  CHECK(model.params[learns.value].shape == frozen.shape);
  CHECK(model.ops[0].params == std::vector<ParamId>{learns});
  CHECK(model.ops[0].module == copy);
  const std::int64_t adapters = 2 * 2 * (16 + 40);
  CHECK(CountParameters(model) == all + adapters + frozen.Elements());
  CHECK(CountParameters(model, /*trainable_only=*/true) == adapters + frozen.Elements());
}

// Tied weights part: copy.deepcopy makes a tensor of its own of each.
TEST_CASE("Trainable.SavedModulesAreUntied") {
  Model model = LoadModel("gpt2");
  ApplyTrainable(model,
                 {.lora_rank = 8, .lora_targets = {"c_attn"}, .lora_saved = {"wte", "lm_head"}},
                 Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  CHECK(CountParameters(model, /*trainable_only=*/true) == 12 * 8 * (768 + 2304) + 2 * 50257 * 768);
  CHECK(ErrorOf({.lora_rank = 2, .lora_targets = {"up_proj"}, .lora_saved = {"nothing"}}) ==
        "job: lora_saved[0]: got \"nothing\", expected a pattern that matches the name of a module "
        "with parameters");
  CHECK(
      ErrorOf({.lora_rank = 2, .lora_targets = {"up_proj"}, .lora_saved = {"up_proj"}}) ==
      "job: lora_saved[0]: got \"up_proj\" for module model.layers.0.mlp.up_proj, expected modules "
      "with one name, without adapters and without modules below them");
  CHECK(ErrorOf({.lora_saved = {"lm_head"}}) ==
        "job: lora_rank: got 0 with lora_saved, expected a rank above 0");
}

// DoRA: up_proj is 40 x 16, so its rows have 40 lengths. Behind dropout the whole weight is
// multiplied once more.
TEST_CASE("Trainable.MagnitudesOfRows") {
  TrainableSpec spec{.lora_rank = 2, .lora_targets = {"up_proj"}, .lora_magnitudes = true};
  for (const double dropout : {0.0, 0.25}) {
    Model model = LoadModel("data/models/tiny-llama");
    spec.lora_dropout = dropout;
    ApplyTrainable(model, spec, Path("job"));
    CHECK_NOTHROW(ValidateModel(model, "dora"));
    CHECK(CountParameters(model, /*trainable_only=*/true) == 2 * (2 * (16 + 40) + 40));
    const ModuleId own = FindModule(model, "model.layers.1.mlp.up_proj.lora_magnitude_vector");
    REQUIRE(own.valid());
    const Parameter& lengths = model.params[model.modules[own.value].params[0].value];
    CHECK(lengths.shape == std::vector<std::int64_t>{40});
    int whole = 0, magnitudes = 0;
    for (const ModelOp& op : model.ops) {
      whole += op.name == "lora_base" ? 1 : 0;
      if (op.name == "lora_magnitude") {
        ++magnitudes;
        CHECK(op.params.size() == 1);
        CHECK(model.SpecOf(op).other.forward_workspace.elements.fixed == 3 * 16 * 40);
      }
    }
    CHECK(magnitudes == 2);
    CHECK(whole == (dropout > 0.0 ? 2 : 0));
  }
  CHECK(ErrorOf({.lora_magnitudes = true}) ==
        "job: lora_rank: got 0 with lora_magnitudes, expected a rank above 0");
}

TEST_CASE("Trainable.LoraOutputReplacesTheLinearOutput") {
  Model model = LoadModel("data/models/tiny-llama");
  ApplyTrainable(model, {.lora_rank = 2, .lora_targets = {"model.layers.1.mlp.up_proj"}},
                 Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  const ModuleId mlp = FindModule(model, "model.layers.1.mlp");
  std::vector<std::string> labels;
  for (const ModelOp& op : model.ops) {
    if (IsInside(model, op.module, mlp)) {
      labels.push_back(OpLabel(model, op));
    }
  }
  const std::string up = "model.layers.1.mlp.up_proj";
  CHECK(labels == std::vector<std::string>{"model.layers.1.mlp.gate_proj", up, up + ".lora_A",
                                           up + ".lora_B", up + ".lora_scale", up + ".lora_add",
                                           "model.layers.1.mlp.gated_act",
                                           "model.layers.1.mlp.down_proj"});
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    if (model.ops[i].name == "lora_add") {
      // The activation reads the sum, and the sum reads the plain output and the adapter's.
      CHECK(model.ops[i + 1].inputs[1] == model.ops[i].outputs[0]);
      CHECK(model.ops[i].inputs[0] == model.ops[i - 4].outputs[0]);
      CHECK(model.ops[i].inputs[1] == model.ops[i - 1].outputs[0]);
    }
  }
  // The other layer is untouched, tied and aliased ids still hold.
  CHECK(CountParameters(model, /*trainable_only=*/true) == 2 * 16 + 40 * 2);
}

TEST_CASE("Trainable.LoraIsScaledByAlphaOverRank") {
  const auto factor_of = [](const TrainableSpec& spec) {
    Model model = LoadModel("data/models/tiny-llama");
    ApplyTrainable(model, spec, Path("job"));
    for (const ModelOp& op : model.ops) {
      if (op.name == "lora_scale") {
        return model.SpecOf(op).factor;
      }
    }
    return 0.0;
  };
  // PEFT: scaling = lora_alpha / r.
  CHECK(factor_of({.lora_rank = 4, .lora_alpha = 16.0, .lora_targets = {"up_proj"}}) == 4.0);
  CHECK(factor_of({.lora_rank = 16, .lora_alpha = 4.0, .lora_targets = {"up_proj"}}) == 0.25);
  CHECK(factor_of({.lora_rank = 16, .lora_targets = {"up_proj"}}) == 1.0);
  CHECK(ErrorOf({.lora_alpha = 8.0}) ==
        "job: lora_rank: got 0 with lora_alpha, expected a rank above 0");
}

TEST_CASE("Trainable.LoraKeepsTies") {
  Model model = LoadModel("gpt2");
  ApplyTrainable(model, {.lora_rank = 8, .lora_targets = {"c_attn"}}, Path("job"));
  CHECK_NOTHROW(ValidateModel(model, "lora"));
  CHECK(model.params.back().fqn == "lm_head.weight");
  CHECK(model.params[model.params.back().tied_to.value].fqn == "transformer.wte.weight");
  CHECK(CountParameters(model, /*trainable_only=*/true) == 12 * 8 * (768 + 2304));
}

TEST_CASE("Trainable.ErrorsNameThePattern") {
  CHECK(ErrorOf({.frozen = {"model.*", "nothing"}}) ==
        "job: frozen[1]: got \"nothing\", expected a pattern that matches the name of a parameter");
  CHECK(ErrorOf({.lora_rank = 4, .lora_targets = {"q_proj", "query"}}) ==
        "job: lora_targets[1]: got \"query\", expected a pattern that matches the name of a linear "
        "module");
  CHECK(ErrorOf({.lora_rank = 4}) ==
        "job: lora_targets: got none with lora_rank 4, expected at least one pattern, such as "
        "\"q_proj\"");
  CHECK(ErrorOf({.lora_targets = {"q_proj"}}) ==
        "job: lora_rank: got 0 with lora_targets, expected a rank above 0");
  CHECK(ErrorOf({.lora_rank = -1, .lora_targets = {"q_proj"}}) ==
        "job: lora_rank: got -1, expected 0 to 4194304");
}

}  // namespace
}  // namespace shardwright
