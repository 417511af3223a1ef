#pragma once

// Small random training jobs and their plans, for tests that try many.

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/units.h"
#include "planner/search.h"

namespace shardwright::testing {

// A job small enough to try all of its plans.
struct Case : Problem {
  Bytes moments_piece = Plan().moments_piece;  // of plans
};

// Uniform in [low, high].
[[nodiscard]] std::int64_t Draw(std::mt19937& random, std::int64_t low, std::int64_t high);

// More and larger jobs are wanted: the deep run.
[[nodiscard]] bool IsDeep();

// A chain of `blocks` blocks on up to two nodes with links of any speed.
[[nodiscard]] Case DrawCase(std::mt19937& random, int blocks);

struct Simulated {
  double seconds = INFINITY;
  Bytes memory;
  Bytes host;  // page-locked, per node
};
[[nodiscard]] Simulated SimulatePlan(const Case& c, const Plan& plan);

// All partitions of the blocks into runs of neighbours: bit i cuts behind block i.
[[nodiscard]] std::vector<UnitPlan> UnitsOf(int blocks, unsigned cuts, const Reshard& reshard);

[[nodiscard]] SearchOptions NativeSearch(const Case& c = Case());

// Calls f(plan) for each mesh, micro-batch, partition, resharding, in-flight limit, order of
// transfers and number of checkpointed blocks; with moments on the device or on the host.
template <class F>
void ForEachPlan(const Case& c, int blocks, bool moments, F f) {
  const std::int64_t ranks = c.cluster.RankCount();
  const std::int64_t samples = c.job.global_batch / ranks;
  for (std::int64_t shard = 1; shard <= ranks; shard *= 2) {
    for (std::int64_t micro_batch = 1; micro_batch <= samples; ++micro_batch) {
      for (unsigned cuts = 0; cuts < (1U << (blocks - 1)); ++cuts) {
        for (const Reshard::Kind kind : {Reshard::Kind::kAlways, Reshard::Kind::kNever}) {
          for (std::int64_t order = 0; order < 6; ++order) {
            for (int checkpointed = 0; checkpointed <= blocks; checkpointed += blocks) {
              Plan plan;
              plan.dialect = Dialect::kNative;
              plan.shard_size = shard;
              plan.replicate_size = ranks / shard;
              plan.micro_batch = micro_batch;
              plan.accumulation = samples / micro_batch;
              plan.offload.moments = moments;
              plan.moments_piece = c.moments_piece;
              plan.in_flight = order % 3 + 1;
              plan.transfers = order < 3 ? Transfers::kAtOnce : Transfers::kInTurn;
              plan.units = UnitsOf(blocks, cuts, {kind, 0});
              for (int b = 0; b < checkpointed; ++b) {
                plan.recompute.push_back({"block" + std::to_string(b), RecomputeKind::kFull, 1});
              }
              f(plan);
            }
          }
        }
      }
    }
  }
}

}  // namespace shardwright::testing
