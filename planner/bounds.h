#pragma once

// Computes lower bounds on step time and memory of all plans with the same mesh, batch and offload.
// docs/planning.md derives them; a test compares them with random plans.
//
// Example: 8e9 parameters under Adam, bf16-mixed, sharded over 8 ranks. Each rank holds a master
// and two moments of 1e9 parameters, in fp32: no such plan needs less than 12e9 bytes. A job with
// 11e9 bytes per device has a deficit of 1e9, so none of these plans is lowered.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "planner/dual.h"
#include "planner/evaluator.h"
#include "planner/measure.h"
#include "planner/occupancy.h"
#include "planner/search.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "simulator/costs/kernels.h"
#include "topologies/routing.h"

namespace shardwright {

struct OuterBound {
  Seconds time;          // no plan of this outer choice that fits is faster
  Bytes memory;          // and none needs less, with what lives outside the allocator
  Bytes memory_at_turn;  // when the last block's backward begins
  Bytes deficit;         // what is missing, on the device or the host, at least: none fits
};

class Bounds {
 public:
  // All arguments must outlive it.
  Bounds(const Problem& input, const SearchOptions& options, const Limits& limits);

  // The sets of ops that may run together, for all plans with this one's mesh and offload of
  // activations and moments.
  [[nodiscard]] Occupancy OccupancyOf(const OuterChoice& outer) const;
  // `bubble`: of a pipeline's rank, seconds of a step in which it computes nothing (StageParts).
  [[nodiscard]] OuterBound Of(const OuterChoice& outer, const Measured& measured,
                              const Occupancy& occupancy, double bubble = 0) const;

 private:
  // Elements, each storage once: of all parameters, of those that the result depends on, of those
  // that get gradients, too, and of those used outside of blocks.
  struct Sizes {
    double all = 0, read = 0, trainable = 0, tail = 0;
  };
  // Experts that ranks share out (Parameter::parts) count `experts` times.
  [[nodiscard]] Sizes SizesOn(std::int64_t ranks, double experts) const;
  // So that a shard group's part of the sum is what a rank holds: each has more of fewer experts.
  [[nodiscard]] Sizes HeldBy(std::int64_t ranks) const;
  // The seconds of a byte of experts, gathered or reduced among the ranks with the same experts, as
  // a share of those of a byte that the whole shard group has; at most 1.
  [[nodiscard]] double ShareOfExperts(const OuterChoice& outer) const;
  [[nodiscard]] double Shard(const OuterChoice& outer) const;

  [[nodiscard]] double States(const OuterChoice& outer) const;
  [[nodiscard]] double EarlierGradients(const OuterChoice& outer) const;
  [[nodiscard]] double HostBytes(const OuterChoice& outer) const;
  [[nodiscard]] double Outside(const OuterChoice& outer) const;
  [[nodiscard]] double LeastPeak(const OuterChoice& outer, const Measured& measured) const;

  // Does compute wait for all reductions at the end of every backward, and everything of the next
  // forward and the update for compute?
  [[nodiscard]] bool EndsEachPass() const { return facts_.pass_end == PassEnd::kReductions; }
  [[nodiscard]] bool IsOrdered(const OuterChoice& outer) const;
  // Do updates with moments from the host run on the compute stream, as others do behind the norm?
  // Bytes of an element that does not learn, at least: where it is stored, and while gathered.
  [[nodiscard]] double FrozenWidth(double as_learned) const;
  // Optimizer states in 8 or 4 bits, or in paged memory: nothing is counted of them.
  [[nodiscard]] bool IsPacked() const { return in_.job.optimizer.states != StateFormat::kMaster; }
  [[nodiscard]] bool StagesOnCompute() const { return in_.job.precision.param == DType::kFp16; }
  struct Times {
    double gather = 1, reduce = 1, replicate = 1;
  };
  [[nodiscard]] Times TimesOf(const OuterChoice& outer) const;
  [[nodiscard]] Occupancy::RowWeights BytesOf(const OuterChoice& outer) const;
  [[nodiscard]] std::vector<std::int64_t> PartialGroups(const OuterChoice& outer) const;
  [[nodiscard]] StreamingWork Update(const OuterChoice& outer) const;
  [[nodiscard]] StreamingWork Copies(double read, double written) const;
  [[nodiscard]] double MessageSeconds(OpCode code, GroupShape group, double bytes) const;
  void AddTraffic(const OuterChoice& outer, const Occupancy& occupancy, Terms& terms) const;
  void AddEnds(const OuterChoice& outer, Terms& terms) const;

  const Problem& in_;
  const SearchOptions& options_;
  Limits limits_;
  const DialectFacts& facts_;
  KernelRates rates_;
  bool is_train_;
  double master_, param_, reduce_, sent_;   // bytes of an element; of a gradient that is reduced
  std::vector<bool> is_read_, is_outside_;  // by parameter that holds a storage
  Sizes whole_;                             // without padding
};

}  // namespace shardwright
