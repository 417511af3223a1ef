// Plans of real models, deep enough for much to be skipped: skipping changes no time and no peak.

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "models/loader.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "tests/sanitizers.h"
#include "tests/schedule/random_plan.h"

namespace shardwright {
namespace {

using testing::DrawDeepCase;
using testing::LowerCase;
using testing::RandomCase;

const Model& DrawModel(std::mt19937& random) {
  static const std::array<const char*, 10> kNames = {
      "bert-large",  "deepvit-8b-like", "gemma-2-9b", "gpt3-13b", "llama-3-8b",
      "llama-3-70b", "mixtral-8x7b",    "mpt-7b",     "t5-large", "qwen3-30b-a3b"};
  static std::map<std::string, Model> models;
  const std::string name =
      kNames[std::uniform_int_distribution<std::size_t>(0, kNames.size() - 1)(random)];
  const auto known = models.find(name);
  return known != models.end() ? known->second
                               : models.emplace(name, LoadModel(name)).first->second;
}

// Nodes of up to eight GPUs, as many as the plan has ranks.
Cluster DrawCluster(std::mt19937& random, std::int64_t ranks) {
  const std::int64_t nodes = ranks % 8 == 0 ? ranks / 8 : ranks % 3 == 0 ? 3 : 1;
  const auto draw = [&](int low, int high) {
    return std::to_string(std::uniform_int_distribution<int>(low, high)(random));
  };
  return LoadCluster("h100-80 x" + std::to_string(ranks / nodes) + ", nvlink " + draw(10, 450) +
                         " GB/s, nic 2x" + draw(25, 400) + " Gbit/s",
                     nodes);
}

// Times up to the rounding of contended durations; a step that is not steady in exact mode's eight
// steps gets more.
void CompareModes(const Program& program, Simulator& simulator, bool contention) {
  SimulateOptions options;
  options.contention = contention;
  options.reserved = false;
  const SimulationResult periodic = simulator.Run(program, options);
  options.periodic = false;
  SimulationResult exact = simulator.Run(program, options);
  if (periodic.timing.is_steady && !exact.timing.is_steady) {
    options.max_steps = 64;
    exact = simulator.Run(program, options);
  }
  CHECK(periodic.memory.allocated == exact.memory.allocated);
  CHECK(periodic.timing.init == exact.timing.init);
  CHECK(periodic.timing.first == exact.timing.first);
  CHECK(periodic.timing.is_steady == exact.timing.is_steady);
  const StepTiming& a = periodic.timing.steady;
  const StepTiming& b = exact.timing.steady;
  const std::int64_t rounding = contention ? b.time.value / 1'000'000'000 : 0;
  const auto are_equal = [&](SimTime x, SimTime y) { return std::abs((x - y).value) <= rounding; };
  CHECK(are_equal(a.time, b.time));
  CHECK(are_equal(a.collectives_on_compute, b.collectives_on_compute));
  CHECK(are_equal(a.host_blocked, b.host_blocked));
  CHECK(a.host_issue == b.host_issue);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    CHECK(are_equal(a.busy[s], b.busy[s]));
    CHECK(are_equal(a.compute_idle[s], b.compute_idle[s]));
  }
}

TEST_CASE("Skipping repeats changes nothing in plans of real models") {
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  const int trials = is_deep ? 5000 : testing::kHasSanitizer ? 5 : 20;
  std::mt19937 random(7);
  for (int trial = 0; trial < trials; ++trial) {
    const RandomCase c = DrawDeepCase(random, DrawModel(random));
    CAPTURE(trial);
    CAPTURE(c.description);
    const Cluster cluster = DrawCluster(random, c.plan.shard_size * c.plan.replicate_size);
    const Profile profile = DefaultProfile(cluster.gpu, c.kernel_set);
    Simulator simulator(cluster, profile);
    const Program program = LowerCase(c);
    CompareModes(program, simulator, false);
    CompareModes(program, simulator, true);
  }
}

}  // namespace
}  // namespace shardwright
