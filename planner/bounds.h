#pragma once

// Lower bounds on step time and memory of every plan with the same mesh, batch and offload.
// docs/planning.md derives them; a test compares them with random plans.

#include <cstdint>
#include <map>
#include <vector>

#include "core/units.h"
#include "planner/dual.h"
#include "planner/evaluator.h"
#include "planner/measure.h"
#include "planner/occupancy.h"
#include "planner/search.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
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
  Bounds(const SearchInput& input, const SearchOptions& options, const Limits& limits);

  // What runs beside what for all plans with this one's mesh and offload of activations and
  // moments.
  [[nodiscard]] Occupancy OccupancyOf(const OuterChoice& outer) const;
  [[nodiscard]] OuterBound Of(const OuterChoice& outer, const Measured& measured,
                              const Occupancy& occupancy) const;

 private:
  // Of full arrays: bytes of one pass over the model, and passes per step, at least.
  struct Traffic {
    Occupancy::RowWeights bytes{};
    Occupancy::RowWeights times{};
    std::vector<std::int64_t> partial_groups;
  };

  // Elements, each storage once: of all parameters, of those that the result depends on, and of
  // those that get gradients, too.
  struct Sizes {
    double all = 0, read = 0, trainable = 0;
  };
  [[nodiscard]] Sizes SizesOn(std::int64_t ranks) const;
  [[nodiscard]] double PersistentBytes(const OuterChoice& outer) const;
  [[nodiscard]] Bytes WhileWidestOpRuns(const OuterChoice& outer, const Measured& measured) const;
  [[nodiscard]] Bytes BeforeUpdate(const OuterChoice& outer) const;
  [[nodiscard]] double HostBytes(const OuterChoice& outer) const;
  [[nodiscard]] Traffic TrafficOf(const OuterChoice& outer) const;
  [[nodiscard]] bool StagesOnCompute() const;
  [[nodiscard]] StreamingWork Update(const OuterChoice& outer) const;
  [[nodiscard]] double ClipSeconds(const OuterChoice& outer) const;
  [[nodiscard]] double ReduceBytes() const;
  [[nodiscard]] StreamingWork Copies(double read, double written) const;
  [[nodiscard]] bool EndsEachPass() const;
  [[nodiscard]] bool IsOrdered(const OuterChoice& outer) const;
  [[nodiscard]] double MessageSeconds(OpCode code, GroupShape group, double bytes) const;
  void AddEnds(const OuterChoice& outer, const Traffic& traffic, Terms& terms) const;
  void AddGathers(const Traffic& traffic, const Occupancy& occupancy, Terms& terms) const;
  void AddMoments(const OuterChoice& outer, const Occupancy& occupancy, Terms& terms) const;

  const SearchInput& in_;
  const SearchOptions& options_;
  Limits limits_;
  const DialectFacts& facts_;
  HostCopyRates copy_rates_;
  std::map<std::int64_t, Sizes> sizes_;             // by shard size
  double elements_ = 0, read_ = 0, trainable_ = 0;  // without padding
  double tail_elements_ = 0;                        // of parameters used outside of blocks
};

}  // namespace shardwright
