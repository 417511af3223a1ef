// CutExperts by closed form: what a rank holds, and that nothing is counted twice or lost.

#include "models/cut_experts.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "models/trainable.h"

namespace shardwright {
namespace {

Model Loaded(const std::string& name) {
  LoadOptions options;
  options.sequence_length = 128;
  return LoadModel(name, options);
}

std::int64_t LocalElements(const Model& model) {
  std::int64_t sum = 0;
  for (const Parameter& param : model.params) {
    sum += param.tied_to.valid() ? 0 : param.Elements();
  }
  return sum;
}

// Mixtral 8x7B: 32 layers of 8 experts, each with three matrices of 4096 x 14336.
constexpr std::int64_t kExperts = std::int64_t{32} * 8 * 3 * 4096 * 14336;

TEST_CASE("CutExperts: a rank has its part of the experts and all else") {
  const Model whole = Loaded("mixtral-8x7b");
  for (const std::int64_t ranks : {2, 4, 8}) {
    CAPTURE(ranks);
    Model model = whole;
    CutExperts(model, ranks, "test");
    ValidateModel(model, "test");
    CHECK(LocalElements(model) == LocalElements(whole) - kExperts + kExperts / ranks);
    CHECK(CountParameters(model) == CountParameters(whole));
    CHECK(ConventionFlopsPerSample(model).value == ConventionFlopsPerSample(whole).value);
    CHECK(model.ops.size() == whole.ops.size() + std::size_t{32} * 4);
    Model again = model;
    CutExperts(again, ranks, "test");
    CHECK(again.ops.size() == model.ops.size());
  }
}

TEST_CASE("CutExperts: adapters go with the experts") {
  constexpr std::int64_t kAdapters = std::int64_t{32} * 6553600;  // of rank 16
  Model whole = Loaded("mixtral-8x7b");
  ApplyTrainable(whole, {.lora_rank = 8, .lora_targets = {"v_proj", "*@16"}}, Path("job"));
  Model model = whole;
  CutExperts(model, 4, "test");
  ValidateModel(model, "test");
  const std::int64_t cut = kExperts + kAdapters;
  CHECK(LocalElements(model) == LocalElements(whole) - cut + cut / 4);
  CHECK(CountParameters(model, true) == CountParameters(whole, true));
  CHECK(ConventionFlopsPerSample(model).value == ConventionFlopsPerSample(whole).value);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    if (model.SpecOf(model.ops[i]).kind != OpKind::kExperts) {
      continue;
    }
    const ModelOp& adapters = model.ops[i + 1];
    CHECK(adapters.name == "adapters");
    CHECK(model.params[adapters.params[1].value].shape ==
          std::vector<std::int64_t>{2, 16, 2 * 14336});
    CHECK(model.tensors[adapters.outputs[0].value].elements == std::int64_t{128} * 2 * 4096);
    CHECK(model.ops[i + 2].name == "from_experts");
    // A is read for two experts, and the rows of all tokens and choices.
    CHECK(model.SpecOf(adapters).other.kernels[0].read.elements ==
          Amount{.fixed = 2 * 16 * 4096, .per_sample = 128 * 2 * 4096});
  }
}

// gpt-oss-20b: 24 layers of 32 experts, 2,880 wide inside and outside; a bias per output.
TEST_CASE("CutExperts: biases go with the experts, before the rows travel back") {
  constexpr std::int64_t kSize = 2880;
  constexpr std::int64_t kAll = std::int64_t{24} * 32 * (kSize * 3 * kSize + 3 * kSize);
  const Model whole = Loaded("gpt-oss-20b");
  Model model = whole;
  CutExperts(model, 4, "test");
  ValidateModel(model, "test");
  CHECK(LocalElements(model) == LocalElements(whole) - kAll + kAll / 4);
  CHECK(CountParameters(model) == CountParameters(whole));
  int biases = 0;
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const OpSpec& spec = model.SpecOf(model.ops[i]);
    if (spec.kind == OpKind::kExperts) {
      const ModelOp& bias = model.ops[i + 1];
      const ModelOp& back = model.ops[i + 2];
      REQUIRE(bias.params.size() == 2);
      CHECK(model.params[bias.params[0].value].shape == std::vector<std::int64_t>{8, 2 * kSize});
      CHECK(model.params[bias.params[1].value].shape == std::vector<std::int64_t>{8, kSize});
      CHECK(bias.inputs == model.ops[i].outputs);
      CHECK(model.tensors[bias.outputs[0].value].elements == std::int64_t{128} * 4 * kSize);
      CHECK(model.SpecOf(back).kind == OpKind::kExchange);
      CHECK(back.inputs == bias.outputs);
      CHECK(model.SpecOf(model.ops[i + 3]).kind == OpKind::kCombine);
      ++biases;
    }
  }
  CHECK(biases == 24);
}

TEST_CASE("CutExperts: rows travel as tokens times chosen experts") {
  Model model = Loaded("mixtral-8x7b");
  CutExperts(model, 4, "test");
  int exchanges = 0;
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    if (spec.kind == OpKind::kExchange) {
      ++exchanges;
      CHECK(spec.rows == 128 * 2);
      CHECK(model.tensors[op.outputs[0].value].elements == std::int64_t{128} * 2 * 4096);
      CHECK(op.inputs.size() == (spec.routed ? 2U : 1U));
    }
    if (spec.kind == OpKind::kExperts) {
      CHECK(spec.experts == 2);
      CHECK(op.params.size() == 6);
      CHECK(model.modules[ExpertsModule(model, op).value].name == "experts");
    }
  }
  CHECK(exchanges == 2 * 32);
}

TEST_CASE("CutExperts: the parts have the whole model's names, in its order") {
  for (const char* const name : {"mixtral-8x7b", "qwen3-30b-a3b"}) {
    const Model whole = Loaded(name);
    for (const std::int64_t ranks : {2, 8}) {
      Model model = whole;
      CutExperts(model, ranks, "test");
      std::vector<std::string> names, expected;
      for (const auto& [param, part] : AllParts(model)) {
        names.push_back(FqnOfPart(model, param, part));
      }
      for (const Parameter& param : whole.params) {
        expected.push_back(param.fqn);
      }
      CHECK(names == expected);
    }
  }
}

// 128 tokens; of each, as many of its 2 experts as a rank has.
TEST_CASE("CutExperts: the most rows that may come") {
  const Model whole = Loaded("mixtral-8x7b");
  for (const auto& [ranks, most] : {std::pair{2, 2 * 128 * 2}, {4, 4 * 128 * 2}, {8, 8 * 128}}) {
    Model model = whole;
    CutExperts(model, ranks, "test");
    for (std::size_t i = 0; i < model.ops.size(); ++i) {
      CHECK(MostRows(model, i) == (model.SpecOf(model.ops[i]).routed ? most : 0));
    }
  }
}

TEST_CASE("CutExperts: what cannot be shared out is refused by name") {
  const auto refusal = [](const std::string& name, std::int64_t ranks) {
    Model model = Loaded(name);
    try {
      CutExperts(model, ranks, "ep");
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  CHECK(refusal("mixtral-8x7b", 3).find("a divisor of the 8 experts") != std::string::npos);
  CHECK(refusal("llama-3-8b", 2).find("has no experts") != std::string::npos);
  CHECK(refusal("llama-3-8b", 1) == "none");
}

}  // namespace
}  // namespace shardwright
