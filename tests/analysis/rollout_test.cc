// Phases of GRPO against hand computation: llama-3-8b on H100 in bf16, 3.35 TB/s and 989.4 TFLOP/s.

#include "analysis/rollout.h"

#include <string>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

PlanFile Plan8B(const std::string& rollout, const std::string& dialect = "fsdp2",
                const std::string& more = R"("micro_batch": 8, "accumulation": 1)") {
  const bool is_ddp = dialect == "ddp";
  return ParsePlanFile(
      R"({"format": "shardwright-plan", "version": 1, "model": {"name": "llama-3-8b"},
    "kernel_set": {"name": "torch-eager"},
    "cluster": {"name": "dgx-h100", "nodes": 1, "gpus_per_node": 8},
    "profile": {"name": "h100-80-torch"},
    "job": {"mode": "train", "sequence_length": 2048, "trains_by": "grpo",
            "precision": {"master": "fp32", "param": "bf16", "reduce": "fp32"},
            "rollout": {"completion": 1024)" +
          rollout + R"(}}, "plan": {"dialect": ")" + dialect + R"(", "shard_size": )" +
          (is_ddp ? "1" : "8") + R"(, "replicate_size": )" + (is_ddp ? "8, " : "1, ") + more +
          R"(, "units": [)" +
          (rollout.find("has_reference") != rollout.npos ? R"({"modules": ["reference"]}, )" : "") +
          R"({"modules": [""], "reshard": ")" + (is_ddp ? "never" : "always") + R"("}]}})",
      "p.json");
}

constexpr double kWeights = 2 * 8030261248.0;               // bytes
constexpr double kRead = kWeights - 2 * 128256.0 * 4096.0;  // the embedding is looked up
constexpr double kCache = 32 * 2 * 8 * (128 + 128);         // of a token
constexpr double kMemory = 3.35e12, kFlops = 989.4e12;

TEST_CASE("PhasesOf: a token reads the weights and the cache of all samples") {
  const PlanFile file = Plan8B(R"(, "engine": 0.4)");
  const RolloutPhases p = *PhasesOf(file, Seconds(10));
  const double token = (kRead + 8 * kCache * (1024 + 512)) / kMemory;
  const double prefill = 1024 * kRead / kFlops;  // of one prompt: 8 completions share it
  const double least = 1024 * token + prefill;
  CHECK(p.least.value == doctest::Approx(1.1 * least).epsilon(1e-4));
  CHECK(p.most.value == doctest::Approx(1.5 * least).epsilon(1e-4));
  CHECK(p.generation->value == doctest::Approx(1.3 * least).epsilon(1e-4));
  CHECK(p.samples == 8);
  const double room = static_cast<double>(EngineMemory(file).value) - kWeights;
  CHECK(static_cast<double>(p.cache.value) == doctest::Approx(room));
  CHECK(p.concurrent == static_cast<std::int64_t>(room / (kCache * 2048)));
  CHECK(p.log_probabilities == Seconds(0));
  CHECK(p.step.value == doctest::Approx(10 + p.weights.value + p.generation->value));
  CHECK_FALSE(PhasesOf(Plan8B(""), Seconds(10))->generation);  // elsewhere
  CHECK(PhasesOf(Plan8B(R"(, "seconds": 3)"), Seconds(10))->generation->value == 3);
}

// 0.2 of the memory holds 15.0 of its 15.9 GiB in weights: a few samples at a time.
TEST_CASE("PhasesOf: samples that the cache does not hold wait their turn") {
  const RolloutPhases p = *PhasesOf(Plan8B(R"(, "engine": 0.2)"), Seconds(10));
  REQUIRE(p.concurrent >= 1);
  REQUIRE(p.concurrent < 8);
  const double waves = static_cast<double>((8 + p.concurrent - 1) / p.concurrent);
  const double token = (kRead + 8 / waves * kCache * (1024 + 512)) / kMemory;
  CHECK(p.least.value ==
        doctest::Approx(1.1 * (waves * 1024 * token + 1024 * kRead / kFlops)).epsilon(1e-4));
  CHECK_THROWS_AS((void)PhasesOf(Plan8B(R"(, "engine": 0.18)"), Seconds(10)), InputError);
}

TEST_CASE("PhasesOf: weights are gathered where they are sharded, and copied") {
  const double bytes = 2 * kWeights;  // fp32
  const double copy = 2 * bytes / kMemory;
  const double ddp = PhasesOf(Plan8B(R"(, "engine": 0.4)", "ddp"), Seconds(1))->weights.value;
  CHECK(ddp == doctest::Approx(copy));
  const double fsdp = PhasesOf(Plan8B(R"(, "engine": 0.4)"), Seconds(1))->weights.value;
  const double wire = bytes * 7 / 8 / 450e9;  // NVLink, each way
  CHECK(fsdp > copy + wire);
  CHECK(fsdp < copy + 3 * wire);
  CHECK(PhasesOf(Plan8B(R"(, "by_trainer": true)"), Seconds(1))->weights == Seconds(0));
}

TEST_CASE("PhasesOf: updates share a generation and its forwards") {
  const PlanFile file =
      Plan8B(R"(, "engine": 0.4, "updates": 4, "has_old": true, "has_reference": true)");
  const double whole = Evaluate(file, file.plan, {.reserved = false}).step_time.value;
  const RolloutPhases p = *PhasesOf(file, Seconds(whole));
  CHECK(p.generations_per_step == doctest::Approx(0.25));
  CHECK(p.learning.value + p.log_probabilities.value == doctest::Approx(whole));
  CHECK(p.step.value ==
        doctest::Approx(p.learning.value +
                        (p.log_probabilities + p.weights + *p.generation).value / 4));
  // Two forwards beside a forward and a backward of twice its products: two thirds of it, if all of
  // it were products.
  const double part = p.log_probabilities.value / p.learning.value;
  CHECK(part > 0.45);
  CHECK(part < 0.75);
  CHECK(PhasesOf(Plan8B(R"(, "engine": 0.4, "batches": 2)", "fsdp2",
                        R"("micro_batch": 4, "accumulation": 4)"),
                 Seconds(1))
            ->generations_per_step == doctest::Approx(2));
}

TEST_CASE("CheckPlan: groups are whole, and an engine that sleeps exists") {
  const auto refuses = [](const char* text, const auto&... plan) {
    try {
      (void)Plan8B(plan...);
    } catch (const InputError& e) {
      return std::string(e.what()).ends_with(text);
    }
    return *text == '\0';
  };
  const std::string one = R"("micro_batch": 1, "accumulation": 3)";
  CHECK(refuses("", R"(, "generations": 12)", "fsdp2", one));
  CHECK(refuses(
      "got 3 completions of each of 8 ranks, expected in all a multiple of rollout.generations 16",
      R"(, "generations": 16)", "fsdp2", one));
  CHECK(refuses("", R"(, "generations": 16, "batches": 2)", "fsdp2", one));
  const char* contradicts =
      "got a job whose rollout contradicts itself, expected trains_by grpo, sleeps with an engine, "
      "by_trainer without one";
  CHECK(refuses(contradicts, R"(, "sleeps": true)"));
  CHECK(refuses(contradicts, R"(, "engine": 0.5, "by_trainer": true)"));
}

TEST_CASE(
    "UsableMemory: an engine that stays takes its part, one that sleeps wakes beside the state") {
  const Bytes all = UsableMemory(Plan8B(""));
  CHECK(static_cast<double>(UsableMemory(Plan8B(R"(, "engine": 0.3)")).value) ==
        doctest::Approx(0.7 * static_cast<double>(all.value)));
  const PlanFile asleep = Plan8B(R"(, "engine": 0.3, "sleeps": true)");
  CHECK(UsableMemory(asleep) == all);
  const auto wakes = [](const PlanFile& file) {
    const auto misfits = Evaluate(file, file.plan, {.reserved = false}).misfits;
    return misfits.empty() || misfits.back().text.find("the engine's") == std::string::npos;
  };
  // A rank's shard in fp32 and AdamW's states: 12 bytes of an eighth, 11.2 GiB, beside 80 % of 80
  // GB.
  CHECK(wakes(asleep));
  CHECK(wakes(Plan8B(R"(, "engine": 0.8, "sleeps": true)")));
  CHECK_FALSE(wakes(Plan8B(R"(, "engine": 0.9, "sleeps": true)")));
}

}  // namespace
}  // namespace shardwright
