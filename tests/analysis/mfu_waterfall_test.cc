// The reasons add up to the step, and each is what the spans of a simulation without contention
// say.

#include "analysis/mfu_waterfall.h"

#include <cstdlib>
#include <functional>
#include <numeric>
#include <span>
#include <string>

#include <doctest/doctest.h>

#include "planner/evaluate.h"
#include "schedule/lower.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

PlanFile Gpt2(const std::string& dialect, const std::string& more) {
  const bool is_ddp = dialect == "ddp";
  return ParsePlanFile(R"({"format": "shardwright-plan", "version": 1,
    "model": {"name": "gpt2"}, "kernel_set": {"name": "torch-eager"},
    "cluster": {"name": "dgx-a100", "nodes": 2, "gpus_per_node": 4},
    "profile": {"name": "a100-torch-eager"},
    "job": {"mode": "train", "sequence_length": 1024, "global_batch": 64},
    "plan": {"dialect": ")" +
                           dialect + R"(", "shard_size": )" + (is_ddp ? "1" : "8") +
                           R"(, "replicate_size": )" + (is_ddp ? "8" : "1") +
                           R"(, "micro_batch": 8, "accumulation": 1, )" + more +
                           R"("units": [{"name": "root", "modules": [""], "reshard": ")" +
                           (dialect.starts_with("zero") ? "always" : "never") + R"("}]}})",
                       "p.json");
}

constexpr const char* kTwoRecomputed =
    R"("recompute": [{"module": "transformer.h.0", "kind": "full"},
                     {"module": "transformer.h.7", "kind": "full"}], )";

// A plan with its simulation and the waterfall of it.
struct Explained {
  explicit Explained(PlanFile plan, bool contention = false)
      : file(std::move(plan)), program(Lower({file, file.plan})) {
    SimulateOptions options;
    options.trace = true;
    options.contention = contention;
    result = Simulate(program, file.cluster, file.profile, options);
    waterfall = ExplainMfu(file, SumsForMfu(file, program, result),
                           Explain(program, result.trace.spans, result.step_time));
  }
  [[nodiscard]] SimTime Lost(MfuLoss loss) const {
    return waterfall.lost[static_cast<std::size_t>(loss)];
  }
  // Of the last step: how long the compute ops run that `is_meant`.
  [[nodiscard]] SimTime Running(const std::function<bool(const Op&)>& is_meant) const {
    const Body& body = program.step;
    const std::span<const Span> spans = std::span(result.trace.spans).last(body.size());
    SimTime sum;
    for (std::size_t i = 0; i < body.size(); ++i) {
      if (spans[i].stream == Stream::kCompute && is_meant(body.ops[i])) {
        sum += spans[i].end - spans[i].start;
      }
    }
    return sum;
  }

  PlanFile file;
  Program program;
  SimulationResult result;
  MfuWaterfall waterfall;
};

TEST_CASE("ExplainMfu: the reasons add up, and MFU is the share at peak") {
  for (const char* dialect : {"fsdp2", "fsdp1", "ddp", "native", "zero1", "zero3"}) {
    CAPTURE(dialect);
    const Explained e(Gpt2(dialect, kTwoRecomputed), true);
    const SimTime sum =
        std::accumulate(e.waterfall.lost.begin(), e.waterfall.lost.end(), e.waterfall.at_peak);
    CHECK(sum == e.result.step_time);
    CHECK(Ratio(e.waterfall.at_peak, e.waterfall.step_time) ==
          doctest::Approx(RatesOf(e.file, e.file.plan, ToSeconds(e.result.step_time)).mfu));
    CHECK(std::abs(Ratio(e.Lost(MfuLoss::kOther), e.waterfall.step_time)) < 1e-6);
  }
}

TEST_CASE("ExplainMfu: reasons are what the spans say") {
  const Explained e(Gpt2("fsdp2", kTwoRecomputed));
  const auto is_model = [&](const Op& op) {
    return e.program.ShapeOf(op).code == OpCode::kCompute && op.phase != Phase::kRecompute &&
           op.phase != Phase::kOptimizer;
  };
  CHECK(e.Lost(MfuLoss::kRecomputation) ==
        e.Running([](const Op& op) { return op.phase == Phase::kRecompute; }));
  CHECK(e.Lost(MfuLoss::kRecomputation) > SimTime(0));
  CHECK(e.waterfall.at_peak + e.Lost(MfuLoss::kCounting) + e.Lost(MfuLoss::kProducts) +
            e.Lost(MfuLoss::kAttention) + e.Lost(MfuLoss::kElementwise) +
            e.Lost(MfuLoss::kLaunches) ==
        e.Running(is_model));
  // Launches of updates that come too late are the host's, the norm's all-reduce is traffic.
  const SimTime updates = e.Running([&](const Op& op) {
    return op.phase == Phase::kOptimizer && !InfoOf(e.program.ShapeOf(op).code).is_collective;
  });
  CHECK(e.Lost(MfuLoss::kOptimizer) <= updates);
  CHECK(e.Lost(MfuLoss::kOptimizer) + e.Lost(MfuLoss::kHost) >= updates);
  CHECK(e.Lost(MfuLoss::kNeighbours) == SimTime(0));
  for (const MfuLoss loss : {MfuLoss::kProducts, MfuLoss::kAttention, MfuLoss::kElementwise}) {
    CHECK(e.Lost(loss) > SimTime(0));
  }
  // GPT-2 with B = 8 and s = 1,024: forward and backward multiply 6 * (123,532,032 + 768 *
  // 1,024...) less the lookups of tokens and positions; causal attention runs half of what 12 L s^2
  // h says.
  const double tokens = 8.0 * 1024;
  const double linear = 6.0 * tokens * (12.0 * 12 * 768 * 768 + 50257.0 * 768);
  const double attention = 12.0 * 12 * tokens * 1024 * 768;
  const double peak = RatesOf(e.file, e.file.plan, Seconds(1)).peak.value;
  const double ran = ToSeconds(e.waterfall.at_peak + e.Lost(MfuLoss::kCounting)).value * peak;
  CHECK(ran > linear + 0.5 * attention);
  CHECK(ran < linear + 0.75 * attention);
}

TEST_CASE("ExplainMfu: a slow host and a slow network are named") {
  PlanFile slow_host = Gpt2("fsdp2", "");
  slow_host.profile.host.op_issue.value = Seconds(2e-3);
  const Explained host(std::move(slow_host));
  CHECK(Ratio(host.Lost(MfuLoss::kHost), host.result.step_time) > 0.5);

  PlanFile slow_network = Gpt2("ddp", "");
  ScaleLinks(slow_network.cluster, "network", 0.01, "test");
  const Explained network(std::move(slow_network));
  CHECK(Ratio(network.Lost(MfuLoss::kExposedTraffic), network.result.step_time) > 0.5);
  CHECK(network.Lost(MfuLoss::kExposedTraffic) == network.result.exposed_comm);
}

TEST_CASE("ExplainMfu: collectives beside kernels slow them") {
  const Explained e(Gpt2("ddp", ""), true);
  CHECK(e.Lost(MfuLoss::kNeighbours) > SimTime(0));
}

}  // namespace
}  // namespace shardwright
