// Experts that ranks share out, run on the host: random mixtures on random meshes. The expected
// values are those of runs in which every rank has all experts (expert_size 1).

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "executor/data/batch.h"
#include "models/cut_experts.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"
#include "tests/sanitizers.h"

namespace shardwright::testing {
namespace {

constexpr double kRate = 8.0;
constexpr std::int64_t kLength = 12;

// A model, whole, and a plan for it with its experts shared out.
struct Case {
  Model model;
  Plan plan;
  bool clips = false;
  Precision precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  std::string description;

  [[nodiscard]] std::int64_t Ranks() const { return plan.shard_size * plan.replicate_size; }
};

Model MixtureOf(const std::string& type, std::int64_t layers, std::int64_t experts,
                std::int64_t per_token, std::int64_t hidden) {
  const auto field = [](const char* name, std::int64_t value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  const bool is_deepseek = type == "deepseek_v3";
  std::string text = R"({"model_type": ")" + type + '"';
  text += field("hidden_size", hidden) + field("num_hidden_layers", layers) +
          field("num_attention_heads", 2) + field("num_key_value_heads", is_deepseek ? 2 : 1) +
          field("intermediate_size", 20) + field("moe_intermediate_size", 12) +
          field("vocab_size", 37) + field("max_position_embeddings", 64) +
          field("num_experts_per_tok", per_token);
  text += field(is_deepseek           ? "n_routed_experts"
                : type == "qwen3_moe" ? "num_experts"
                                      : "num_local_experts",
                experts);
  if (is_deepseek) {  // its shared expert, sigmoid scores and groups of experts
    text += field("n_shared_experts", 1) + field("first_k_dense_replace", layers > 1 ? 1 : 0) +
            field("q_lora_rank", 8) + field("kv_lora_rank", 8) + field("qk_nope_head_dim", 4) +
            field("qk_rope_head_dim", 4) + field("v_head_dim", 4) + field("n_group", 2) +
            field("topk_group", 2);
  } else {
    text += field("head_dim", 8);
  }
  if (type == "qwen3_moe") {
    text += R"(, "norm_topk_prob": true)";
  }
  LoadOptions options;
  options.sequence_length = kLength;
  return ModelFromJson(JsonValue::Parse(text + "}", "test"), type, options);
}

template <class T, std::size_t N>
T OneOf(const std::array<T, N>& values, std::mt19937& random) {
  return values[random() % N];
}

// May be a plan that is refused.
Case Draw(std::mt19937& random) {
  Case c;
  const std::string type = OneOf(std::array{"mixtral", "qwen3_moe", "deepseek_v3"}, random);
  const std::int64_t experts = OneOf(std::array{4, 8, 16}, random);
  const std::int64_t per_token = 1 + static_cast<std::int64_t>(random() % 4);
  const std::int64_t layers = 1 + static_cast<std::int64_t>(random() % 2);
  c.model = MixtureOf(type, layers, experts, per_token, OneOf(std::array{16, 24}, random));
  c.plan.dialect = Dialect::kFsdp2;
  c.plan.expert_size = OneOf(std::array{2, 4, 8}, random);
  c.plan.shard_size = c.plan.expert_size * (1 + static_cast<std::int64_t>(random() % 3));
  c.plan.replicate_size = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.micro_batch = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.accumulation = 1 + static_cast<std::int64_t>(random() % 2);
  c.plan.sync = random() % 2 == 0 ? SyncMode::kEvery : SyncMode::kLast;
  Model cut = c.model;
  CutExperts(cut, c.plan.expert_size, "test");
  c.plan.units = Wrap(cut, ParseWrap("block", "test"), {}, c.plan.dialect, "test");
  AddExpertUnits(cut, c.plan.units);
  if (random() % 3 == 0) {
    for (UnitPlan& unit : c.plan.units) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    }
  }
  if (random() % 2 == 0) {
    const auto kind = random() % 2 == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective;
    c.plan.recompute = RecomputeBlocks(cut, kind, 1, "test");
  }
  c.plan.offload.activations = c.plan.recompute.empty() && random() % 3 == 0;
  c.clips = random() % 3 == 0;
  c.description = type + " " + std::to_string(layers) + " layers, " + std::to_string(per_token) +
                  " of " + std::to_string(experts) + " experts, shard " +
                  std::to_string(c.plan.shard_size) + ",ep=" + std::to_string(c.plan.expert_size) +
                  " x " + std::to_string(c.plan.replicate_size) + ", accumulation " +
                  std::to_string(c.plan.accumulation) + ", " +
                  std::to_string(c.plan.recompute.size()) + " regions" +
                  (c.plan.offload.activations ? ", activations offloaded" : "");
  return c;
}

// The job with this plan: `model` is whole, and cut where the plan's experts are shared out. Plain
// descent; the last step alone changes the weights.
Setup SetupOf(const Case& c, const Plan& plan, const Dataset& data) {
  Setup s = DescentSetup(c.model, 1e-50);  // 0 in fp32
  CutExperts(s.model, plan.expert_size, "test");
  s.plan = plan;
  s.job.precision = c.precision;
  s.job.sequence_length = kLength;
  s.job.clip_gradients = c.clips;
  s.training.clip_norm = 0.05;
  s.training.schedule = {.kind = ScheduleKind::kStep, .gamma = kRate * 1e50};
  s.training.loss_scale.initial = 16.0;  // no step of fp16 is skipped
  s.steps = 2;
  const Sampler sampler{
      data.size(), plan.shard_size * plan.replicate_size * plan.micro_batch * plan.accumulation};
  s.run.inputs = [&c, &data, sampler](const BatchKey& key, std::span<const View> views) {
    WriteBatch(c.model, data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  return s;
}

Case DrawLegal(std::mt19937& random) {
  while (true) {
    try {
      Case c = Draw(random);
      if (c.Ranks() > 8) {
        continue;
      }
      const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
      (void)LowerSetup(SetupOf(c, c.plan, *data));
      return c;
    } catch (const InputError&) {
      continue;
    }
  }
}

// As many ranks; nothing sharded, nothing chosen.
Plan UnshardedPlan(const Case& c) {
  Plan plan;
  plan.dialect = Dialect::kDdp;
  plan.replicate_size = c.Ranks();
  plan.micro_batch = c.plan.micro_batch;
  plan.accumulation = c.plan.accumulation;
  plan.sync = c.plan.sync;
  plan.units = Wrap(c.model, ParseWrap("root", "test"), {}, plan.dialect, "test");
  return plan;
}

// A sum of n terms in another order, or with its factors multiplied elsewhere, differs by Gamma(2
// n) of its terms' magnitude. Here n is at most the rows of the batch and a hundred features; some
// twenty such sums stand one behind the other between the loss and the first gradients.
double Bound(const Case& c) {
  const auto rows =
      static_cast<double>(c.Ranks() * c.plan.micro_batch * c.plan.accumulation * kLength);
  return 20.0 * Gamma(2.0 * (rows + 100.0));
}

}  // namespace

TEST_CASE("shared-out experts: random mixtures train like ranks that have all experts") {
  const char* const deep = std::getenv("SHARDWRIGHT_DEEP");
  const int count = deep != nullptr ? 150 : kHasSanitizer ? 3 : 10;
  std::mt19937 random(20261129);
  double worst = 0.0, worst_loss = 0.0;
  for (int i = 0; i < count; ++i) {
    const Case c = DrawLegal(random);
    CAPTURE(c.description);
    if (std::getenv("SHARDWRIGHT_VERBOSE") != nullptr) {
      MESSAGE(c.description);
    }
    const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
    const Setup unsharded = SetupOf(c, UnshardedPlan(c), *data);
    Setup setup = SetupOf(c, c.plan, *data);
    const Outcome expected = Train(unsharded);
    const Outcome outcome = Train(setup);
    CHECK(outcome.findings == std::vector<std::string>{});
    CHECK(outcome.replicas_agree);
    REQUIRE(outcome.losses.size() == expected.losses.size());
    for (std::size_t s = 0; s < outcome.losses.size(); ++s) {
      const double difference = std::abs(outcome.losses[s] / expected.losses[s] - 1.0);
      worst_loss = std::max(worst_loss, difference);
      CHECK(difference < 8 * kUnit);
    }
    setup.steps = 0;
    const double difference = UpdateDifference(outcome, expected, Train(setup));
    CHECK(difference < Bound(c));
    worst = std::max(worst, difference / Bound(c));
  }
  MESSAGE(count << " jobs; the largest difference of an update is " << worst
                << " of its bound, of a loss " << worst_loss);
  CHECK(worst > 1e-4);  // a bound that anything passes would be worth nothing
}

// Where every expert has one rank, its rows come in the order of the samples: the gradient of its
// last matrix is the sum that one rank makes of the whole batch. That of the others is not: routing
// weights are multiplied before the product with the last matrix, not behind it.
TEST_CASE("shared-out experts: the last layer's gradients have the bits of one rank's run") {
  for (const std::string type : {"mixtral", "qwen3_moe", "deepseek_v3"}) {
    for (const std::int64_t ranks : {2, 4, 8}) {
      CAPTURE(type);
      CAPTURE(ranks);
      Case c;
      c.model = MixtureOf(type, 2, 8, 3, 24);
      c.plan.dialect = Dialect::kFsdp2;
      c.plan.expert_size = c.plan.shard_size = ranks;
      c.plan.micro_batch = 2;
      c.plan.accumulation = 2;
      Plan one = c.plan;
      one.expert_size = one.shard_size = 1;
      one.micro_batch *= ranks;
      for (Plan* const plan : {&c.plan, &one}) {
        Model cut = c.model;
        CutExperts(cut, plan->expert_size, "test");
        plan->units = Wrap(cut, ParseWrap("block", "test"), {}, plan->dialect, "test");
        AddExpertUnits(cut, plan->units);
      }
      const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
      Setup setup = SetupOf(c, c.plan, *data);
      const Outcome outcome = Train(setup);
      const Outcome expected = Train(SetupOf(c, one, *data));
      setup.steps = 0;
      const Outcome first = Train(setup);
      int compared = 0;
      for (std::size_t p = 0; p < c.model.params.size(); ++p) {
        if (c.model.params[p].fqn.find("layers.1.") != std::string::npos &&
            c.model.params[p].fqn.find(".experts.") != std::string::npos &&
            c.model.params[p].fqn.find(type == "mixtral" ? ".w2." : ".down_proj.") !=
                std::string::npos) {
          CAPTURE(c.model.params[p].fqn);
          CHECK(outcome.weights[p] == expected.weights[p]);
          compared += outcome.weights[p] != first.weights[p] ? 1 : 0;
        }
      }
      CHECK(compared == 8);
    }
  }
}

TEST_CASE("shared-out experts: random delays change no bit") {
  std::mt19937 random(11);
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  for (int i = 0; i < (is_deep ? 60 : 2); ++i) {
    const Case c = DrawLegal(random);
    CAPTURE(c.description);
    const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
    Setup setup = SetupOf(c, c.plan, *data);
    const Outcome expected = Train(setup);
    REQUIRE(expected.weights == expected.weights);  // numbers
    for (int run = 0; run < 3; ++run) {
      setup.host.delay_percent = 10 + static_cast<int>(random() % 40);
      setup.host.max_delay = std::chrono::microseconds(20 + random() % 300);
      setup.host.delay_seed = random();
      const Outcome outcome = Train(setup);
      CHECK(outcome.weights == expected.weights);
      CHECK(outcome.losses == expected.losses);
      CHECK(outcome.findings == std::vector<std::string>{});
    }
  }
}

// One layer: behind it roundings of 16 bits could choose other experts. A sum of such roundings,
// some thirty one behind the other, stays below 2^-3.
TEST_CASE("shared-out experts: 16-bit types train like ranks that have all experts") {
  for (const DType param : {DType::kBf16, DType::kFp16}) {
    for (const DType reduce : {DType::kFp32, param}) {
      Case c;
      c.model = MixtureOf("mixtral", 1, 8, 2, 16);
      c.plan.dialect = Dialect::kFsdp2;
      c.plan.shard_size = 4;
      c.plan.expert_size = 2;
      c.precision = {DType::kFp32, param, reduce};
      Model cut = c.model;
      CutExperts(cut, 2, "test");
      c.plan.units = Wrap(cut, ParseWrap("block", "test"), {}, c.plan.dialect, "test");
      AddExpertUnits(cut, c.plan.units);
      Plan whole = c.plan;
      whole.expert_size = 1;
      whole.units = Wrap(c.model, ParseWrap("block", "test"), {}, c.plan.dialect, "test");
      const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
      Setup setup = SetupOf(c, c.plan, *data);
      const Outcome outcome = Train(setup);
      const Outcome expected = Train(SetupOf(c, whole, *data));
      CHECK(outcome.findings == std::vector<std::string>{});
      CHECK(outcome.skipped_steps == 0);
      CHECK(expected.skipped_steps == 0);
      CHECK(outcome.losses[0] == doctest::Approx(expected.losses[0]).epsilon(0.01));
      setup.steps = 0;
      const double difference = UpdateDifference(outcome, expected, Train(setup));
      CHECK(difference < 0.125);
      CHECK(difference > 0.0);
    }
  }
}

// All tokens choose the same experts: one rank gets every row there is, the others none.
TEST_CASE("shared-out experts: every row may go to one rank") {
  Case c;
  c.model = MixtureOf("mixtral", 1, 4, 2, 16);
  c.plan.dialect = Dialect::kFsdp2;
  c.plan.expert_size = c.plan.shard_size = 2;
  c.plan.micro_batch = 2;
  Model cut = c.model;
  CutExperts(cut, 2, "test");
  c.plan.units = Wrap(cut, ParseWrap("block", "test"), {}, c.plan.dialect, "test");
  AddExpertUnits(cut, c.plan.units);
  const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
  std::vector<Outcome> outcomes;
  std::int64_t most = 0, least = 1000;
  for (const Plan& plan : {c.plan, UnshardedPlan(c)}) {
    Setup setup = SetupOf(c, plan, *data);
    setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
      HostKernel(call, is_backward);
      if (call.spec->kind == OpKind::kRouter && !is_backward) {
        auto* const weights = static_cast<float*>(call.outputs[0].data);
        for (std::int64_t i = 0; i < RowsOf(call); ++i) {
          std::fill_n(weights + 4 * i, 4, 0.0F);
          weights[4 * i + 2] = 0.75F;
          weights[4 * i + 3] = 0.25F;
        }
      }
      if (call.spec->routed && !is_backward) {
        std::int64_t rows = 0;
        const auto* const came = reinterpret_cast<const std::int64_t*>(call.exchange.data());
        rows = std::accumulate(came, came + call.exchange.size() / 8, rows);
        static std::mutex mutex;
        const std::lock_guard lock(mutex);
        most = std::max(most, rows);
        least = std::min(least, rows);
      }
    };
    outcomes.push_back(Train(setup));
    CHECK(outcomes.back().findings == std::vector<std::string>{});
  }
  CHECK(outcomes[0].losses == outcomes[1].losses);
  CHECK(least == 0);
  CHECK(most == 2 * 2 * kLength * 2);  // of two ranks with two samples, each token twice
  std::int64_t room = 0;
  for (std::size_t i = 0; i < cut.ops.size(); ++i) {
    room = std::max(room, MostRows(cut, i));
  }
  CHECK(most == 2 * room);
}

}  // namespace shardwright::testing
