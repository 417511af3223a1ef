#include "tests/planner/random_jobs.h"

#include <cstdlib>
#include <string>

#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "tests/schedule/chain_model.h"

namespace shardwright::testing {

std::int64_t Draw(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

bool IsDeep() {
  return std::getenv("SHARDWRIGHT_DEEP") != nullptr;
}

Case DrawCase(std::mt19937& random, int blocks) {
  Case c;
  ChainSpec spec;
  spec.blocks = blocks;
  spec.linears = static_cast<int>(Draw(random, 1, 3));
  spec.width = 256 * Draw(random, 1, 8);
  spec.rows = 64 << Draw(random, 0, 5);
  c.model = {ChainModel(spec)};
  c.kernels = FindKernelSet("shardwright-cuda", "test");
  const std::int64_t gpus = std::int64_t{1} << Draw(random, 0, 2);
  const std::int64_t nodes = std::int64_t{1} << Draw(random, 0, 1);
  c.cluster =
      LoadCluster("h100-80 x" + std::to_string(gpus) + ", nvlink " +
                      std::to_string(Draw(random, 5, 450)) + " GB/s, nic " + std::to_string(gpus) +
                      "x" + std::to_string(Draw(random, 25, 400)) + " Gbit/s, host 1 TiB",
                  nodes);
  c.profile = DefaultProfile(c.cluster.gpu, c.kernels.name);
  c.job.sequence_length = spec.rows;
  c.job.global_batch = c.cluster.RankCount() * Draw(random, 1, 2);
  c.job.clip_gradients = Draw(random, 0, 1) == 1;
  // Small: offloaded moments come and go many times.
  constexpr std::int64_t kStates = 8;  // bytes of one parameter's
  c.moments_piece = Bytes(CountParameters(c.model) * kStates / Draw(random, 20, 60));
  return c;
}

Simulated SimulatePlan(const Case& c, const Plan& plan) {
  const Program program = Lower({c.model, c.kernels, c.job, plan});
  SimulateOptions options;
  options.reserved = false;
  const SimulationResult result = Simulate(program, c.cluster, c.profile, options);
  return {ToSeconds(result.step_time).value,
          result.memory.allocated.DevicePeak().total + result.memory.outside,
          result.memory.allocated.HostPeak().total * c.cluster.gpus_per_node};
}

std::vector<UnitPlan> UnitsOf(int blocks, unsigned cuts, const Reshard& reshard) {
  std::vector<UnitPlan> units;
  UnitPlan unit;
  for (int b = 0; b < blocks; ++b) {
    unit.modules.push_back("block" + std::to_string(b));
    if (b + 1 == blocks || ((cuts >> b) & 1U) != 0) {
      unit.name = unit.modules.front();
      unit.reshard = reshard;
      units.push_back(unit);
      unit = UnitPlan();
    }
  }
  units.push_back({"root", {""}, {Reshard::Kind::kNever, 0}, Gap::kHold, false, {}, {}});
  return units;
}

SearchOptions NativeSearch(const Case& c) {
  SearchOptions options;
  options.base.dialect = Dialect::kNative;
  options.base.moments_piece = c.moments_piece;
  options.threads = 2;
  return options;
}

}  // namespace shardwright::testing
