#include "models/reference.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "models/model.h"
#include "models/totals.h"
#include "models/trainable.h"

namespace shardwright {
namespace {

constexpr std::int64_t kLlama = 6738415616;  // of llama-2-7b

Model Made(const std::string& name, const TrainableSpec& spec) {
  Model model = LoadModel(name);
  ApplyTrainable(model, spec, Path("job"));
  return model;
}

TEST_CASE("Reference.OfAWholeModelIsACopyInATreeOfItsOwn") {
  const Model alone = LoadModel("llama-2-7b");
  const Model model = Made("llama-2-7b", {.trains_by = TrainsBy::kDpo});
  CHECK(CountParameters(model) == 2 * kLlama);
  CHECK(CountParameters(model, /*trainable_only=*/true) == kLlama);
  REQUIRE(model.ops.size() == 2 * alone.ops.size());
  const std::vector<bool> reaches = OpsBehindResult(model);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const bool is_reference = i >= alone.ops.size();
    CHECK(IsOfReference(model, model.ops[i].module) == is_reference);
    CHECK((is_reference || reaches[i]));
  }
  CHECK_FALSE(model.modules[FindModule(model, kReferenceRoot).value].parent.valid());
  CHECK(FindModule(model, "reference.model.layers.31.mlp.up_proj").valid());
  // The reference has 2 of the 6 FLOPs of each weight and a third of attention's.
  CHECK(ConventionFlopsPerSample(model).value ==
        doctest::Approx(ConventionFlopsPerSample(alone).value * 4 / 3));
}

// "Trainable params" stay those of the adapters, and no weight is there twice.
TEST_CASE("Reference.OfAdaptersIsTheirBaseOnceMore") {
  const Model alone = LoadModel("llama-2-7b");
  const TrainableSpec lora = {.lora_rank = 16, .lora_targets = {"q_proj", "v_proj"}};
  TrainableSpec spec = lora;
  spec.trains_by = TrainsBy::kDpo;
  spec.lora_dropout = 0.1;
  const Model model = Made("llama-2-7b", spec);
  CHECK(CountParameters(model) == kLlama + 8388608);
  CHECK(CountParameters(model, /*trainable_only=*/true) == 8388608);
  const std::size_t adapted = alone.ops.size() + 64 * 5;  // dropout, A, B, scale, add
  REQUIRE(model.ops.size() == adapted + alone.ops.size());
  CHECK(model.ops[adapted].called_again == ModuleId(0));
  const std::vector<bool> reaches = OpsBehindResult(model);
  for (std::size_t i = 0; i < alone.ops.size(); ++i) {
    const ModelOp& op = model.ops[adapted + i];
    CHECK(op.name == alone.ops[i].name);
    CHECK(model.modules[op.module.value].fqn == alone.modules[alone.ops[i].module.value].fqn);
    CHECK_FALSE(reaches[adapted + i]);
    for (const TensorId t : op.inputs) {  // its own, or those of the batch
      const ModelOpId maker = model.tensors[t.value].producer;
      CHECK((!maker.valid() || maker.value >= adapted));
    }
  }
}

// KTO: mismatched answers before the model's own and before the reference's, which are called
// twice.
TEST_CASE("Reference.OfSingleAnswersRunsMismatchedOnesToo") {
  const Model alone = LoadModel("llama-2-7b");
  for (const std::int64_t rank : {0, 4}) {
    TrainableSpec spec;
    if (rank > 0) {
      spec = {.lora_rank = rank, .lora_targets = {"q_proj"}};
    }
    const Model own = Made("llama-2-7b", spec);
    spec.trains_by = TrainsBy::kKto;
    const Model model = Made("llama-2-7b", spec);
    const std::size_t n = own.ops.size(), m = alone.ops.size();
    REQUIRE(model.ops.size() == 2 * n + 2 * m);
    CHECK(CountParameters(model) == CountParameters(own) + (rank > 0 ? 0 : kLlama));
    const std::vector<bool> reaches = OpsBehindResult(model);
    for (std::size_t i = 0; i < model.ops.size(); ++i) {
      CHECK((reaches[i] == (i >= n && i < 2 * n)));  // the second forward alone learns
      for (const TensorId t : model.ops[i].outputs) {
        CHECK(model.tensors[t.value].producer == ModelOpId(i));
      }
      // Which forward reads which: none another's.
      const std::size_t begin = i < n ? 0 : i < 2 * n ? n : i < 2 * n + m ? 2 * n : 2 * n + m;
      for (const TensorId t : model.ops[i].inputs) {
        const ModelOpId maker = model.tensors[t.value].producer;
        CHECK((!maker.valid() || (maker.value >= begin && maker.value < i)));
      }
    }
    const ModuleId reference = rank > 0 ? ModuleId(0) : FindModule(model, kReferenceRoot);
    CHECK(model.ops[n].called_again == ModuleId(0));
    CHECK(model.ops[2 * n].called_again.valid() == (rank > 0));
    CHECK(model.ops[2 * n + m].called_again == reference);
    // Three further forwards of 2 FLOPs of the 6 that a weight that learns has.
    if (rank == 0) {
      CHECK(ConventionFlopsPerSample(model).value ==
            doctest::Approx(ConventionFlopsPerSample(alone).value * 2));
    }
  }
}

// GRPO: forwards of the policy and of the reference come first. Head and loss read the completion.
TEST_CASE("Reference.OfCompletionsRunsBeforeTheUpdate") {
  const Model alone = LoadModel("llama-2-7b");  // 2,048 tokens a sample
  const std::size_t m = alone.ops.size() + 1;   // and the choice of rows
  for (const auto& [has_old, has_reference] : {std::pair(false, false), std::pair(true, false),
                                               std::pair(false, true), std::pair(true, true)}) {
    TrainableSpec spec = {.trains_by = TrainsBy::kGrpo};
    spec.rollout = {.completion = 512, .has_old = has_old, .has_reference = has_reference};
    const Model model = Made("llama-2-7b", spec);
    const std::size_t calls = 1 + (has_old ? 1 : 0) + (has_reference ? 1 : 0);
    REQUIRE(model.ops.size() == calls * m);
    CHECK(CountParameters(model) == (has_reference ? 2 : 1) * kLlama);
    const std::vector<bool> reaches = OpsBehindResult(model);
    for (std::size_t i = 0; i < model.ops.size(); ++i) {
      const std::size_t call = i / m;
      CHECK((IsOfReference(model, model.ops[i].module) ==
             (has_reference && call == (has_old ? 1U : 0U))));
      CHECK((IsOfReference(model, model.ops[i].module) || reaches[i] == (call + 1 == calls)));
      for (const TensorId t : model.ops[i].inputs) {
        const ModelOpId maker = model.tensors[t.value].producer;
        CHECK((!maker.valid() || (maker.value / m == call && maker.value < i)));
      }
    }
    // Logits of 512 tokens, of which the head's FLOPs are.
    const Tensor& logits = model.tensors[model.ops.back().inputs[0].value];
    CHECK(logits.elements == 512 * 32000);
    if (calls == 1) {
      CHECK(ConventionFlopsPerSample(alone).value - ConventionFlopsPerSample(model).value ==
            doctest::Approx(6.0 * 1536 * 4096 * 32000));
    }
  }
  CHECK_THROWS_AS(
      Made("llama-2-7b", {.trains_by = TrainsBy::kGrpo, .rollout = {.completion = 2048}}),
      InputError);
}

// A module that learns as a copy runs as it was.
TEST_CASE("Reference.ReadsTheOriginalsOfSavedModules") {
  const TrainableSpec spec = {.lora_rank = 2,
                              .lora_targets = {"up_proj"},
                              .lora_saved = {"embed_tokens"},
                              .trains_by = TrainsBy::kDpo};
  const Model model = Made("data/models/tiny-llama", spec);
  std::vector<std::string> read;
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kEmbedding) {
      read.push_back(model.params[op.params[0].value].fqn);
    }
  }
  CHECK(read == std::vector<std::string>{"model.embed_tokens.modules_to_save.weight",
                                         "model.embed_tokens.weight"});
}

// transformers 5.23: LlamaForSequenceClassification and GPT2ForSequenceClassification of one label.
TEST_CASE("Reference.ScoreTakesTheHeadsPlace") {
  const Model llama = Made("llama-2-7b", {.trains_by = TrainsBy::kReward});
  CHECK(CountParameters(llama) == kLlama - 32000 * 4096 + 4096);
  CHECK_NOTHROW(ValidateModel(llama, "reward"));
  const Model gpt2 = Made("gpt2", {.trains_by = TrainsBy::kReward});
  CHECK(CountParameters(gpt2) == 124439808 + 768);
  CHECK(gpt2.params.back().fqn == "score.weight");
  CHECK_FALSE(gpt2.params.back().tied_to.valid());
  // No op is wider than the blocks' any more.
  for (const Tensor& tensor : llama.tensors) {
    CHECK(tensor.elements < std::int64_t{2048} * 32000);
  }
}

TEST_CASE("Reference.ScoresNeedAHead") {
  Model model = LoadModel("mnist-convnet");
  CHECK_THROWS_AS(ApplyTrainable(model, {.trains_by = TrainsBy::kReward}, Path("job")), InputError);
}

}  // namespace
}  // namespace shardwright
