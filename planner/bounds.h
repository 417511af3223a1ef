#pragma once

// Lower bounds on step time and memory of every plan with the same mesh, batch and offload.
// docs/planning.md derives them; a test compares them with random plans.

#include <array>
#include <cstdint>
#include <vector>

#include "core/units.h"
#include "planner/measure.h"
#include "planner/search.h"
#include "planner/space.h"
#include "simulator/costs/contention.h"

namespace shardwright {

struct OuterBound {
  Seconds time;   // no plan of this outer choice that fits is faster
  Bytes memory;   // and none needs less, with what lives outside the allocator
  Bytes deficit;  // memory - limit where that is positive: none fits
};

// How fast kernels and collectives can run beside each other at most: all sets of them that can run
// at the same time, as rows of a linear program.
class Occupancy {
 public:
  // kRegather: gathers over part of the shard group, of units that keep a copy per such part.
  // kToHost runs in forward only, kToDevice in backward: copies of offloaded activations.
  enum Transfer : std::uint8_t { kGather, kReduce, kReplicate, kRegather, kToHost, kToDevice };
  static constexpr std::size_t kTransferCount = 6;
  static constexpr std::size_t kStreamCount = 4;  // that transfers run on
  enum Phase : std::uint8_t { kForward, kBackward };
  static constexpr std::size_t kPhaseCount = 2;
  using Weights = std::array<double, kTransferCount>;

  // `bytes` of each transfer in one pass, full arrays; 0: there is none. Those of kRegather are
  // gathered over each of `regather_groups`.
  Occupancy(const SearchInput& input, const OuterChoice& outer, Dialect dialect,
            const Weights& bytes, const std::vector<std::int64_t>& regather_groups);

  // Seconds that one byte of a transfer takes at its best rate.
  [[nodiscard]] double SecondsPerByte(Transfer transfer) const { return best_[transfer]; }
  // The same of kRegather over the i-th group.
  [[nodiscard]] double RegatherSecondsPerByte(std::size_t i) const { return regather_[i]; }

  // The largest prices that keep all rows feasible: given what a second of each transfer (at its
  // best rate) is worth, what a second of each kind of kernel is worth in each phase. `weights` is
  // scaled down where it is too large by itself.
  using Prices = std::array<std::array<double, kLoadCount>, kPhaseCount>;
  [[nodiscard]] Prices KernelPrices(Weights& weights) const;

 private:
  // A transfer cut into messages of one size.
  struct Variant {
    std::size_t transfer = 0;
    double seconds_per_byte = 0;  // 0: nothing runs
    double best = 0;              // the same at the best size
    std::uint8_t contention_class = 0;
  };
  struct Row {                      // one set of ops that run together
    std::size_t load = kLoadCount;  // of the kernel; kLoadCount: none
    double kernel_speed = 1;
    Weights progress{};  // seconds' worth per second
  };

  using Running = std::array<const Variant*, kStreamCount>;
  void AddRows(const ContentionModel& model,
               const std::array<std::vector<Variant>, kStreamCount>& streams,
               bool shares_communicator);
  void AddRow(const ContentionModel& model, std::size_t load, std::uint8_t kernel,
              const Running& running);
  // Among the rows from `first` on, which are of one kind of kernel.
  void DropWeakRows(std::size_t first);

  std::vector<Row> rows_;
  Weights best_{};
  std::vector<double> regather_;
};

class Bounds {
 public:
  // All arguments must outlive it.
  Bounds(const SearchInput& input, const SearchOptions& options, Bytes limit);

  [[nodiscard]] OuterBound Of(const OuterChoice& outer, const Measured& measured) const;

 private:
  struct Traffic {               // bytes of full arrays
    Occupancy::Weights bytes{};  // of one pass over the model
    Occupancy::Weights times{};  // passes per step, at least
    std::vector<std::int64_t> regather_groups;
  };

  [[nodiscard]] double PersistentBytes(const OuterChoice& outer) const;
  [[nodiscard]] Traffic TrafficOf(const OuterChoice& outer) const;
  [[nodiscard]] double OptimizerSeconds(const OuterChoice& outer) const;

  const SearchInput& in_;
  const SearchOptions& options_;
  Bytes limit_;
  double elements_ = 0;       // of all parameters, each storage once
  double trainable_ = 0;      // of those that get gradients
  double tail_elements_ = 0;  // of those used outside of blocks
};

}  // namespace shardwright
