// The linear program of the bound, in its dual form: a price for every resource, such that no set
// of ops that run together is worth more than the time it takes.
//
// Example of dual.h as a program: columns y (a second of kernels) and z (a second of gathers),
// worth 10 and 4.5. Rows: kernel beside gather 0.8 y + 0.9 z <= 1, kernel alone y <= 1, gather
// alone z <= 1. The maximum of 10 y + 4.5 z is 11, at y = 1 and z = 2/9. That is the bound.
//
// Prices that keep all rows give a bound, whether they are the best ones or not. Memory has a price
// as well: the cheapest pattern of a block depends on it, as recomputation costs kernels and saves
// bytes. Cheapest() expresses "the least of several" by one column below each of them.
//
// A step has up to 7 stretches, and SourcesIn says which transfers may run in which. Columns: about
// a hundred; rows: stretches times sets of ops, some thousands.

#include "planner/dual.h"

#include <cstddef>
#include <numeric>
#include <utility>

#include "core/ranges.h"
#include "planner/simplex.h"

namespace shardwright {
namespace {

using Term = LinearProgram::Term;
using Sum = std::vector<Term>;

// Stretches of a step, by what may run in them.
enum Stretch : std::uint8_t {
  kUpdate,
  kFirstForward,
  kTurnForward,
  kTurnBackward,
  kForward,
  kBackward,
  kEnd,  // behind the last op of backward
};
constexpr std::size_t kStretchCount = 7;
constexpr std::size_t kNoColumn = static_cast<std::size_t>(-1);

// The columns are prices: of a second of each transfer, of device and host memory, and in each
// stretch of a second of each kind of kernel, and of a second without one.
class Dual {
 public:
  Dual(const Terms& terms, const Occupancy& occupancy)
      : t_(terms), m_(*terms.measured), occupancy_(occupancy) {
    // A step, roughly. All memory is worth `kMost` of them at most, which is far too much.
    const double step =
        std::accumulate(t_.seconds.begin(), t_.seconds.end(), t_.passes * m_.base.Total());
    constexpr double kMost = 4;
    most_seconds_ = 1e4 * step;
    for (const double seconds : t_.seconds) {
      transfers_.push_back(lp_.AddColumn(seconds, 1));
    }
    device_unit_ = kMost * step / t_.device_limit;
    device_ = lp_.AddColumn(t_.device_excess * device_unit_, 1);
    host_unit_ = t_.has_host_limit ? kMost * step / t_.host_limit : 0;
    host_ = lp_.AddColumn(t_.host_excess * host_unit_, 1);
    for (auto& columns : kernels_) {
      columns.fill(kNoColumn);
    }
    AddWork();
    AddBlocks();
    AddGathered();
    AddRows();
  }

  [[nodiscard]] double Solve() const {
    // Prices of 0 are a bound, too, should rounding be in the way, which it was in no search yet.
    return t_.serial + lp_.Solve().value_or(0);
  }

 private:
  // The price of a second of such kernels there.
  std::size_t Kernel(Stretch stretch, std::size_t load) {
    constexpr double kMost = 16;
    std::size_t& column = kernels_[stretch][load];
    column = column == kNoColumn ? lp_.AddColumn(0, kMost) : column;
    return column;
  }

  void AddWork() {
    const double first = t_.first_forwards;
    const auto add = [&](Stretch stretch, std::size_t load, double seconds) {
      if (seconds != 0) {
        lp_.AddWorth(Kernel(stretch, load), seconds);
      }
    };
    for (std::size_t l = 0; l < kLoadCount; ++l) {
      const double forward = m_.forward.seconds[l];
      const double turn_forward = m_.turn_forward.seconds[l];
      const double turn_backward = first * m_.turn_backward.seconds[l];
      add(kFirstForward, l, first * (forward - turn_forward));
      add(kTurnForward, l, first * turn_forward);
      add(kTurnBackward, l, turn_backward);
      add(kForward, l, (t_.passes - first) * forward);
      add(kBackward, l, t_.passes * (m_.base.seconds[l] - forward) - turn_backward);
    }
    // Updates that are longer than the gather of what the first op reads take its place.
    const bool has_updates =
        t_.update.seconds > 0 && (!t_.is_ordered || t_.update.seconds >= t_.head);
    if (has_updates) {
      lp_.AddWorth(Streaming(t_.update, t_.is_ordered ? kUpdate : kBackward), 1);
    }
    if (t_.is_ordered) {
      add(kUpdate, kLoadCount, has_updates ? 0 : t_.head);
      add(kEnd, kLoadCount, t_.tail);
    }
    // Where all forwards are first ones, what is gathered for them is copied there.
    if (t_.gather_copies.seconds > 0) {
      const bool all_first = t_.first_forwards >= t_.passes;
      lp_.AddWorth(Streaming(t_.gather_copies, all_first ? kFirstForward : kForward), 1);
    }
    if (t_.reduce_copies.seconds > 0) {
      lp_.AddWorth(Streaming(t_.reduce_copies, kBackward), 1);
    }
  }

  // The price of one of `options`, of which the cheapest is taken.
  std::size_t Cheapest(const std::vector<Sum>& options) {
    const std::size_t column = lp_.AddColumn(0, most_seconds_);
    for (const Sum& option : options) {
      Sum row = {{column, 1}};
      for (const Term& term : option) {
        row.push_back({term.column, -term.times});
      }
      lp_.AddRow(row, 0);
    }
    return column;
  }

  // Of whatever load is cheapest.
  std::size_t Streaming(const StreamingWork& work, Stretch stretch) {
    std::vector<Sum> options;
    for (std::size_t l = 1; l < kLoadCount; ++l) {
      const double at_load = work.streaming * (kLoadCount - 1) / static_cast<double>(l);
      options.push_back({{Kernel(stretch, l), std::max(work.seconds, at_load)}});
    }
    return Cheapest(options);
  }

  // Copies of so many bytes of activations to the host and back, in each micro-batch.
  [[nodiscard]] Sum Copies(double bytes) const {
    return {{transfers_[Occupancy::kToHost], t_.passes * bytes * t_.to_host_per_byte},
            {transfers_[Occupancy::kToDevice], t_.passes * bytes * t_.to_device_per_byte},
            {host_, bytes * host_unit_}};
  }

  // Each block takes the cheapest pattern.
  void AddBlocks() {
    for (const BlockClass& c : m_.classes) {
      std::vector<Sum> options;
      for (std::size_t p = 0; p < c.costs.size(); ++p) {
        const BlockCost& cost = c.costs[p];
        if (!m_.pattern_is_allowed[p]) {
          continue;
        }
        Sum sum = t_.offloads_activations ? Copies(cost.copied_bytes) : Sum();
        sum.push_back({device_, device_unit_ * cost.BytesOnDevice(t_.offloads_activations)});
        for (std::size_t l = 0; l < kLoadCount; ++l) {
          if (cost.work.seconds[l] != 0) {
            sum.push_back({Kernel(kBackward, l), t_.passes * cost.work.seconds[l]});
          }
        }
        options.push_back(std::move(sum));
      }
      // Activations that the first layer of backward reads are not copied.
      const bool all_count = !t_.offloads_activations || m_.all_blocks_copy;
      lp_.AddWorth(Cheapest(options), static_cast<double>(c.blocks.size()) - (all_count ? 0 : 1));
    }
    if (t_.offloads_activations && m_.all_blocks_copy) {
      for (const Term& term : Copies(-m_.read_by_tail)) {
        lp_.AddWorth(term.column, term.times);
      }
    }
  }

  // And gathered parameters stay, or are gathered again, as is cheapest.
  void AddGathered() {
    std::vector<Sum> options;
    for (const AfterForward& a : t_.after_forward) {
      options.push_back({{device_, a.bytes * device_unit_}, {transfers_[a.transfer], a.seconds}});
      if (a.copies.seconds > 0) {
        options.back().push_back({Streaming(a.copies, kBackward), 1});
      }
    }
    if (!options.empty()) {
      lp_.AddWorth(Cheapest(options), 1);
    }
  }

  // Has a step such a stretch?
  [[nodiscard]] bool Exists(Stretch stretch) const {
    if (stretch == kForward) {
      return t_.passes > t_.first_forwards;
    }
    return stretch == kBackward || t_.is_ordered;
  }

  // Of each transfer in a row: as which ones it may run in the stretch.
  using Sources = std::array<std::vector<std::size_t>, Occupancy::kRowTransferCount>;
  [[nodiscard]] Sources SourcesIn(Stretch stretch) const {
    const bool is_update = stretch == kUpdate;
    const bool is_first = is_update || stretch == kFirstForward;
    const bool is_turn = stretch == kTurnForward || stretch == kTurnBackward;
    const bool is_end = stretch == kEnd;
    const bool is_backward = stretch == kTurnBackward || stretch == kBackward;
    const bool only_first = is_update || (is_first && t_.regathers_follow_forward) || is_end;
    const bool only_again = is_turn || (stretch == kBackward && t_.forward_gathers_end) || is_end;
    const bool has_moments =
        !t_.is_ordered || is_update || (is_first && !t_.moments_end_before_forward);
    Sources s;
    const auto add = [&](bool may_run, std::size_t transfer, std::size_t source) {
      if (may_run) {
        s[transfer].push_back(transfers_[source]);
      }
    };
    add(!only_again, Occupancy::kGather, Occupancy::kGather);
    add(!only_first, Occupancy::kGather, Occupancy::kRegather);
    add(!only_first, Occupancy::kPartial, Occupancy::kPartial);
    add(!is_first && !is_turn, Occupancy::kReduce, Occupancy::kReduce);
    add(!is_first && !is_turn, Occupancy::kReplicate, Occupancy::kReplicate);
    add(!is_update && !is_backward && !is_end, Occupancy::kToHost, Occupancy::kToHost);
    add(is_backward, Occupancy::kToDevice, Occupancy::kToDevice);
    add(has_moments && !is_end, Occupancy::kToHost, Occupancy::kMomentsToHost);
    add(has_moments && !is_end, Occupancy::kToDevice, Occupancy::kMomentsToDevice);
    return s;
  }

  // The price of a second of each transfer of a row in this stretch: that of the most valuable
  // transfer that it may be. kNoColumn: it does not run there.
  std::array<std::size_t, Occupancy::kRowTransferCount> PricesIn(Stretch stretch) {
    const Sources sources = SourcesIn(stretch);
    std::array<std::size_t, Occupancy::kRowTransferCount> prices{};
    for (std::size_t i = 0; i < prices.size(); ++i) {
      prices[i] = sources[i].empty()       ? kNoColumn
                  : sources[i].size() == 1 ? sources[i].front()
                                           : lp_.AddColumn(0, 1);
      for (std::size_t s = 0; sources[i].size() > 1 && s < sources[i].size(); ++s) {
        lp_.AddRow(Sum{{sources[i][s], 1}, {prices[i], -1}}, 0);
      }
    }
    return prices;
  }

  // In each stretch ops that run together are worth no more than the time.
  void AddRows() {
    Sum sum;
    for (std::size_t s = 0; s < kStretchCount; ++s) {
      const auto stretch = static_cast<Stretch>(s);
      const auto prices = PricesIn(stretch);
      if (Exists(stretch)) {
        Kernel(stretch, kLoadCount);
      }
      for (const Occupancy::Row& row : occupancy_.rows()) {
        sum = {{kernels_[s][row.load], row.kernel_speed}};
        for (std::size_t i = 0; i < prices.size(); ++i) {
          if (row.progress[i] > 0) {
            sum.push_back({prices[i], row.progress[i]});
          }
        }
        // All that the row has may run there.
        if (!IsIn(sum, kNoColumn, &Term::column)) {
          lp_.AddRow(sum, 1);
        }
      }
    }
  }

  const Terms& t_;
  const Measured& m_;
  const Occupancy& occupancy_;
  LinearProgram lp_;
  std::vector<std::size_t> transfers_;
  std::size_t device_ = 0, host_ = 0;
  double device_unit_ = 0, host_unit_ = 0;  // prices of a byte where the columns are 1
  double most_seconds_ = 0;                 // that something can cost
  std::array<std::array<std::size_t, kLoadCount + 1>, kStretchCount> kernels_{};
};

}  // namespace

double LeastTime(const Terms& terms, const Occupancy& occupancy) {
  return Dual(terms, occupancy).Solve();
}

}  // namespace shardwright
