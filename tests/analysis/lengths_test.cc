// Sampled steps against enumerations over simulations of whole steps, and packed attention against
// programs whose kernels are scaled.

#include "analysis/lengths.h"

#include <cmath>
#include <functional>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "planner/evaluate.h"
#include "schedule/lower.h"

namespace shardwright {
namespace {

PlanFile TwoRanks(const std::string& dialect, std::int64_t length, int accumulation) {
  const bool is_ddp = dialect == "ddp";
  return ParsePlanFile(
      R"({"format": "shardwright-plan", "version": 1,
    "model": {"name": "gpt2"}, "kernel_set": {"name": "torch-eager"},
    "cluster": {"name": "dgx-a100", "nodes": 1, "gpus_per_node": 2},
    "profile": {"name": "a100-torch-eager"},
    "job": {"mode": "train", "sequence_length": )" +
          std::to_string(length) + R"(, "global_batch": )" + std::to_string(32 * accumulation) +
          R"(}, "plan": {"sync": "last", "dialect": ")" + dialect + R"(", "shard_size": )" +
          (is_ddp ? "1" : "2") + R"(, "replicate_size": )" + (is_ddp ? "2" : "1") +
          R"(, "micro_batch": 16, "accumulation": )" + std::to_string(accumulation) +
          R"(, "units": [{"modules": [""], "reshard": ")" + (is_ddp ? "never" : "always") +
          R"("}]}})",
      "p.json");
}

double TimeOf(const PlanFile& file) {
  return Evaluate(file, file.plan, {.reserved = false}).step_time.value;
}

double Off(double found, double right) {
  return std::abs(found / right - 1);
}

constexpr double kShort = 0.98;  // of the samples: 0.98^16 = 0.724 of the micro-batches

TEST_CASE("SampleStepsByLength: one micro-batch, padded to the longest of all ranks") {
  const PlanFile file = TwoRanks("fsdp2", 1024, 1);
  const double all_short = std::pow(kShort, 32);
  const double fast = TimeOf(TwoRanks("fsdp2", 256, 1)), slow = TimeOf(file);
  REQUIRE(slow > 2 * fast);
  const StepsOfLengths steps =
      SampleStepsByLength(file, {{256, 98}, {1024, 1}, {3000, 1}}, 1).padded;  // cut to 1024
  CHECK(steps.batches == 1000);
  // Five standard deviations of the mean of 1,000 draws.
  const double sigma = (slow - fast) * std::sqrt(all_short * (1 - all_short) / 1000);
  CHECK(std::abs(steps.mean.value - (all_short * fast + (1 - all_short) * slow)) < 5 * sigma);
  CHECK(steps.p50.value == doctest::Approx(all_short > 0.5 ? fast : slow));
  CHECK(steps.p99.value == doctest::Approx(slow));
  const double tokens = 0.98 * 256 + 0.02 * 1024;
  CHECK(steps.tokens_per_second_per_gpu == doctest::Approx(16 * tokens / steps.mean.value));
  const double longest = std::pow(kShort, 16) * 256 + (1 - std::pow(kShort, 16)) * 1024;
  CHECK(steps.padding == doctest::Approx(1 - tokens / longest));
}

// The mean over all choices of short and long for each rank and micro-batch.
double Enumerated(double fast, double slow, bool meets_in_each) {
  const double is_short = std::pow(kShort, 16);
  double mean = 0;
  for (unsigned choice = 0; choice < 16; ++choice) {
    double chance = 1, first = 0, second = 0, each = 0;
    for (unsigned i = 0; i < 2; ++i) {
      const bool a = (choice >> i & 1) != 0, b = (choice >> (i + 2) & 1) != 0;
      chance *= (a ? 1 - is_short : is_short) * (b ? 1 - is_short : is_short);
      first += (a ? slow : fast) / 2;
      second += (b ? slow : fast) / 2;
      each += (a || b ? slow : fast) / 2;
    }
    mean += chance * (meets_in_each ? each : std::max(first, second));
  }
  return mean;
}

TEST_CASE("SampleStepsByLength: ranks meet in each micro-batch, or in the last") {
  for (const bool is_ddp : {false, true}) {
    CAPTURE(is_ddp);
    const std::string dialect = is_ddp ? "ddp" : "fsdp2";
    const PlanFile file = TwoRanks(dialect, 1024, 2);
    const double fast = TimeOf(TwoRanks(dialect, 256, 2)), slow = TimeOf(file);
    const double right = Enumerated(fast, slow, !is_ddp), wrong = Enumerated(fast, slow, is_ddp);
    const StepsOfLengths steps = SampleStepsByLength(file, {{256, 98}, {1024, 2}}, 1).padded;
    CHECK(std::abs(steps.mean.value - right) < 0.4 * std::abs(right - wrong));
  }
}

TEST_CASE("SampleStepsByLength: each length is within 1.5 % of its own simulation") {
  const PlanFile file = TwoRanks("fsdp2", 1024, 1);
  for (const std::int64_t length : {70, 333, 600, 871, 1000}) {
    CAPTURE(length);
    const StepsOfLengths steps =
        SampleStepsByLength(file, {{1, 1}, {length, 1'000'000'000'000}, {1024, 1}}, 1).padded;
    CHECK(Off(steps.p50.value, TimeOf(TwoRanks("fsdp2", length, 1))) < 0.015);
  }
}

// The step where attention multiplies so much of what it does in a whole row.
double TimeOfShare(const PlanFile& file, double share) {
  Program program = LowerAndVerify(file);
  for (Kernel& kernel : program.kernels) {
    kernel.flops = IsAttention(kernel.kind) ? Flops(kernel.flops.value * share) : kernel.flops;
  }
  SimulateOptions options;
  options.reserved = false;
  return ToSeconds(Simulate(program, file.cluster, file.profile, options).step_time).value;
}

TEST_CASE("SampleStepsByLength: documents of a packed row see themselves") {
  const PlanFile file = TwoRanks("fsdp2", 1024, 1);
  const double whole = TimeOf(file);
  const auto packed = [&](const Lengths& lengths) {
    return SampleStepsByLength(file, lengths, 1).packed.value();
  };
  CHECK(Off(packed({{1024, 1}}).mean.value, whole) < 0.005);
  CHECK(packed({{1024, 1}}).padding == 0.0);
  // Of 8 tiles in a row 36 pairs of tiles are seen, of 2 tiles 3, of 1 tile 1.
  for (const auto& [length, share] :
       {std::pair(std::int64_t{256}, 4 * 3.0 / 36), std::pair(std::int64_t{128}, 8 * 1.0 / 36)}) {
    CAPTURE(length);
    const StepsOfLengths steps = packed({{length, 1}});
    CHECK(Off(steps.mean.value, TimeOfShare(file, share)) < 0.005);
    CHECK(steps.mean.value < 0.99 * whole);
    CHECK(steps.p99 == steps.p50);
  }
  // 600 tokens fill no row beside another 600: 424 are padding.
  CHECK(packed({{600, 1}}).padding == doctest::Approx(424.0 / 1024));
  // One of 600 beside one of 400, whatever the order in which they come; a few are left over.
  CHECK(packed({{400, 1}, {600, 1}}).padding < 0.06);
}

std::string ErrorOf(const std::function<void()>& act) {
  try {
    act();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("ParseLengths: a length per line, or a histogram") {
  CHECK(ParseLengths("7\n\n512 3\r\n7,2\n", "l") == Lengths{{7, 3}, {512, 3}});
  const std::string expected =
      ", expected the tokens of a sample, or a length and how many samples have it";
  for (const std::string line : {"0", "-3", "12.5", "7 0", "7 2 3", "text", "2000000000", "7,"}) {
    CHECK(ErrorOf([&] { (void)ParseLengths("5\n" + line, "l.txt"); }) ==
          "l.txt: line 2: got " + line + expected);
  }
  CHECK(ErrorOf([] { (void)ParseLengths("\n", "l.txt"); }) ==
        "l.txt: got no length, expected a line per sample");
}

TEST_CASE("LognormalLengths: mean and percentile are those asked for") {
  const Lengths lengths = LognormalLengths(500, 2000);
  double sum = 0, count = 0, p99 = 0;
  for (const LengthCount& one : lengths) {
    sum += static_cast<double>(one.length * one.count);
    count += static_cast<double>(one.count);
    p99 = p99 == 0 && count >= 9900 ? static_cast<double>(one.length) : p99;
  }
  CHECK(count == 10'000);
  CHECK(sum / count == doctest::Approx(500).epsilon(0.01));
  CHECK(p99 == doctest::Approx(2000).epsilon(0.01));
  CHECK(LognormalLengths(500, 499).empty());
  CHECK(LognormalLengths(500, 7600).empty());  // exp(2.3263^2 / 2) = 14.97
}

TEST_CASE("SampleStepsByLength: who reads no sequences, two, or parts of one") {
  const auto error = [](const char* name) {
    PlanFile file = TwoRanks("fsdp2", 1024, 1);
    static_cast<Model&>(file.model) = LoadModel(name, {});
    return ErrorOf([&] { (void)SampleStepsByLength(file, {{5, 1}}, 1); });
  };
  CHECK(error("t5-small") == "--lengths: got model t5-small, expected one that reads one sequence");
  CHECK(error("mnist-convnet") ==
        "--lengths: got model mnist-convnet, expected one that reads sequences");
  PlanFile cut = TwoRanks("fsdp2", 1024, 1);
  cut.plan.tensor_size = 2;
  CHECK(
      ErrorOf([&] {
        (void)SampleStepsByLength(cut, {{5, 1}}, 1);
      }) ==
      "--lengths: got layers cut among 2, expected ranks with whole layers, which take samples of "
      "any length");
}

}  // namespace
}  // namespace shardwright
