#pragma once

// Lists all sets of kernels and transfers that can run at the same time, with the highest speed of
// each member: rows of a linear program (docs/planning.md, "The bound").
//
// Example: the row {load 8, kernel_speed 0.8, progress of kGather 0.9}. A kernel that uses 8/16 of
// the memory bandwidth runs beside a gather. In each second the kernel does what takes it 0.8 s
// alone, and the gather what takes it 0.9 s alone.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/measure.h"
#include "planner/search.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "simulator/costs/contention.h"

namespace shardwright {

class Occupancy {
 public:
  // Kinds of transfers. kGather and kRegather are over the whole shard group, kPartial over a part
  // of it, of units that keep a copy per such part. kToHost and kToDevice are of offloaded
  // activations.
  enum Transfer : std::uint8_t {
    kGather,  // before forward
    kReduce,
    kReplicate,
    kPartial,
    kToHost,
    kToDevice,
    // Rows do not tell these from kGather, kToHost and kToDevice.
    kRegather,       // before backward
    kMomentsToHost,  // of offloaded moments
    kMomentsToDevice,
  };
  static constexpr std::size_t kTransferCount = 9;
  static constexpr std::size_t kRowTransferCount = 6;
  using RowWeights = std::array<double, kRowTransferCount>;

  struct Row {                      // one set of ops that run together
    std::size_t load = kLoadCount;  // of the kernel; kLoadCount: none
    double kernel_speed = 1;
    RowWeights progress{};  // seconds' worth per second
  };

  // `bytes` of each transfer in one pass, full arrays; 0: there is none. Those of kPartial are
  // gathered over each of `partial_groups`.
  Occupancy(const Problem& input, const OuterChoice& outer, const DialectFacts& facts,
            const RowWeights& bytes, const std::vector<std::int64_t>& partial_groups);

  // Seconds that one byte of a transfer that rows tell apart takes at its best rate.
  [[nodiscard]] double SecondsPerByte(Transfer transfer) const { return best_[transfer]; }
  // The same of kPartial over the i-th group.
  [[nodiscard]] double PartialSecondsPerByte(std::size_t i) const { return partial_[i]; }

  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

 private:
  // One way to use a stream: nothing, a kernel, or a transfer in messages of one size.
  struct Variant {
    std::size_t transfer = 0;
    double rate = 0;  // of the transfer, alone, as a share of the best one; 0: it is none
    std::uint8_t contention_class = 0;
    std::size_t level = 0;  // sixteenths of the memory bandwidth
    bool is_full = true;    // everything in one message
  };
  using Streams = std::array<std::vector<Variant>, kStreamCount>;
  using Running = std::array<const Variant*, kStreamCount>;

  static void AddSlower(Variant full, double share, ContentionModel& model,
                        std::vector<Variant>& variants);
  [[nodiscard]] static Streams AtLoad(const Streams& streams, std::size_t load);
  void AddRows(const ContentionModel& model, const Streams& streams, Running& running,
               std::size_t stream);

  bool shares_communicator_ = false;  // no gather beside a reduction
  std::vector<Row> rows_;
  RowWeights best_{};
  std::vector<double> partial_;
};

}  // namespace shardwright
