// Whole small models of every type that the loader builds, run by the host kernels, against losses
// and gradients of PyTorch and Transformers (torch_models.py made the file, in fp64). This checks
// what kernels mean together: positions, masks, packings, routing, layouts of weights.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include <doctest/doctest.h>

#include "core/json.h"
#include "models/loader.h"
#include "tests/executor/kernels/model_runner.h"

namespace shardwright::testing {
namespace {

// The formula of torch_models.py: 16 bits that depend on a name and an index.
std::uint32_t Integer(const std::string& name, std::int64_t i) {
  std::uint32_t h = 0x811C9DC5U;
  for (const char c : name) {
    h = (h ^ static_cast<unsigned char>(c)) * 0x01000193U;
  }
  h += static_cast<std::uint32_t>(i) * 0x9E3779B9U;
  h = (h ^ (h >> 16U)) * 0x85EBCA6BU;
  h = (h ^ (h >> 13U)) * 0xC2B2AE35U;
  return (h ^ (h >> 16U)) >> 16U;
}

float Weight(const std::string& name, std::int64_t i) {
  return (static_cast<float>(Integer(name, i)) - 32768.0F) / 65536.0F;
}

ModelInputs InputsOf(const Model& model, std::int64_t batch) {
  std::int64_t vocabulary = 0;
  std::int64_t classes = 0;
  for (const OpSpec& spec : model.specs) {
    if (spec.kind == OpKind::kCrossEntropy || spec.kind == OpKind::kNllLoss) {
      classes = spec.in;
    }
    if (spec.kind == OpKind::kEmbedding) {
      vocabulary = std::max(vocabulary, spec.vocab);
    }
  }
  ModelInputs inputs;
  inputs.batch = batch;
  inputs.weight = Weight;
  inputs.feature = [](std::int64_t i) { return Weight("features", i); };
  inputs.index = [=](InputKind kind, std::int64_t i) -> std::int64_t {
    switch (kind) {
      case InputKind::kTokens:
        return Integer("tokens", i) % vocabulary;
      case InputKind::kDecoderTokens:
        return Integer("decoder", i) % vocabulary;
      case InputKind::kTokenTypes:
        return Integer("types", i) % 2;
      case InputKind::kLabels:
        return Integer("labels", i) % classes;
      case InputKind::kPositions:
        return i;
      case InputKind::kNone:
      case InputKind::kFeatures:
        break;
    }
    return -1;
  };
  return inputs;
}

// Forty kernels behind each other with sums of at most 30 terms, u = 2^-24 each, of numbers not
// much larger than the results; Transformers' own norms and softmaxes are fp32 as well.
constexpr double kRelative = 1e-4;
constexpr double kAbsolute = 1e-6;

double WorstError(const std::vector<float>& actual, const JsonValue& exact) {
  double largest = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    largest = std::max(largest, std::fabs(exact[i].AsDouble()));
  }
  double worst = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::fabs(static_cast<double>(actual[i]) - exact[i].AsDouble());
    const double ratio = error / (kRelative * largest + kAbsolute);
    worst = ratio <= worst ? worst : ratio;  // NaN counts as worst
  }
  return worst;
}

}  // namespace

TEST_CASE("TorchModels.LossesAndGradients") {
  const JsonValue file = JsonValue::ReadFile("data/executor/torch_models.json");
  const std::int64_t batch = file.At("batch").AsInt();
  const JsonValue models = file.At("models");
  REQUIRE(models.size() == 22);
  for (std::size_t m = 0; m < models.size(); ++m) {
    const std::string name = models[m].At("name").AsString();
    CAPTURE(name);
    LoadOptions options;
    options.sequence_length = models[m].At("tokens").AsInt();
    const Model model = ModelFromJson(models[m].At("config"), name, options);
    const ModelRun run = RunModel(model, InputsOf(model, batch));
    CHECK(std::fabs(run.loss - models[m].At("loss").AsDouble()) <= 1e-5);
    const JsonValue grads = models[m].At("grads");
    std::size_t compared = 0;
    for (std::size_t p = 0; p < model.params.size(); ++p) {
      const Parameter& param = model.params[p];
      if (param.tied_to.valid()) {
        continue;
      }
      CAPTURE(param.fqn);
      const std::optional<JsonValue> exact = grads.Find(param.fqn);
      REQUIRE(exact.has_value());
      REQUIRE(exact->size() == run.param_grads[p].size());
      CHECK(WorstError(run.param_grads[p], *exact) <= 1.0);
      ++compared;
    }
    CHECK(compared == grads.Keys().size());
  }
}

}  // namespace shardwright::testing
