#pragma once

// Remembers the order in which ZeRO-3's modules use their parameters: recorded in the first pass,
// then followed to fetch ahead and to keep what is used again soon. Sizes are unsharded elements.
// Source: DeepSpeed partitioned_param_coordinator.py.
//
// Example: calls a, b, c of 30 elements each, prefetch_bucket 50. The first pass fetches each at
// its own call. From the second pass on, the call of a also fetches b and c: one is requested while
// fewer than 50 elements are, so 60 are in all.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "core/units.h"
#include "schedule/plan.h"

namespace shardwright {

// Does the policy run without gradients in front of its own forward, and nothing else of its
// engine? A reference's calls mismatch what was recorded, which is not modelled.
[[nodiscard]] inline bool RunsPolicyBefore(const Job& job) {
  return job.rollout.has_old && !job.rollout.has_reference;
}

class FetchOrder {
 public:
  FetchOrder(const ZeroOptions& options, std::size_t unit_count)
      : options_(options), fetched_for_(unit_count, kNever), uses_(unit_count) {}

  // A pass is one forward and backward of a micro-batch (or one forward, if there is no backward).
  // DeepSpeed ends it where the model is called again: its second forward then follows the first
  // one, and its backward is forgotten.
  void BeginPass() {
    call_ = 0;
    next_ = 0;
    available_ = 0;
    std::fill(fetched_for_.begin(), fetched_for_.end(), kNever);
  }
  void EndPass() {
    is_complete_ = !is_forgotten_;
    is_forgotten_ = false;
  }
  [[nodiscard]] bool IsComplete() const { return is_complete_; }
  [[nodiscard]] std::int64_t NextCall() const { return call_; }

  // Parameters were requested (or released: negative).
  void AddAvailable(std::int64_t elements) { available_ += elements; }

  // The call of a module that needs `units`, which have been requested. Returns the units to fetch
  // ahead of later calls. `away(x)` is the size of x, or 0 when x is there or requested.
  template <class Away>
  [[nodiscard]] std::vector<UnitId> Fetch(const std::vector<UnitId>& units, Away away) {
    std::vector<UnitId> ahead;
    std::set<UnitId> seen;
    const std::int64_t call = call_++;
    if (is_forgotten_ || (is_complete_ && call == std::ssize(first_))) {
      Forget();
      return ahead;
    }
    if (!is_complete_) {
      first_.push_back(order_.size());
      for (const UnitId unit : units) {
        uses_[unit.value].push_back(order_.size());
        order_.push_back({unit, call});
      }
      return ahead;
    }
    // The units of this call leave the queue, except those that an earlier fetch has taken.
    const auto left = std::count_if(units.begin(), units.end(),
                                    [&](UnitId unit) { return fetched_for_[unit.value] < call; });
    for (auto n = left; n > 0; --n) {
      Take();
    }
    const std::int64_t most =
        std::min(options_.max_live_parameters - available_, options_.prefetch_bucket);
    std::int64_t requested = 0;
    while (next_ < order_.size() && requested < most) {
      const UnitId candidate = Take();
      const std::int64_t elements = away(candidate);
      if (elements > 0 && seen.insert(candidate).second) {
        ahead.push_back(candidate);
        requested += elements;
      }
    }
    available_ += requested;
    return ahead;
  }

  // Is `unit`, whose module has just run, to be kept: because a fetch has passed over a later use
  // of it, or because it comes again within the reuse distance? `size(x)` is the size of x.
  template <class Size>
  [[nodiscard]] bool IsUsedSoon(UnitId unit, Size size) {
    if (fetched_for_[unit.value] > call_) {
      return true;
    }
    const auto from = static_cast<std::size_t>(call_);
    const std::vector<std::size_t>& uses = uses_[unit.value];
    if (from >= first_.size()) {
      return false;
    }
    const auto next = std::lower_bound(uses.begin(), uses.end(), first_[from]);
    if (next == uses.end()) {
      return false;
    }
    for (std::size_t i = before_.size(); i <= order_.size(); ++i) {
      before_.push_back(i == 0 ? 0 : before_.back() + size(order_[i - 1].unit));
    }
    const std::size_t its = first_[static_cast<std::size_t>(order_[*next].call)];
    return before_[its] - before_[first_[from]] < options_.max_reuse_distance;
  }

 private:
  static constexpr std::int64_t kNever = -1;

  // A call that the order does not have: the next pass records it anew.
  void Forget() {
    is_complete_ = false;
    is_forgotten_ = true;
    order_.clear();
    first_.clear();
    before_.clear();
    uses_.assign(uses_.size(), {});
  }

  struct Use {
    UnitId unit;
    std::int64_t call = 0;
  };

  // The first entry of the queue leaves it.
  UnitId Take() {
    const Use& use = order_[next_++];
    fetched_for_[use.unit.value] = use.call;
    return use.unit;
  }

  const ZeroOptions& options_;
  bool is_complete_ = false, is_forgotten_ = false;
  std::vector<Use> order_;            // of a pass, call after call
  std::vector<std::size_t> first_;    // per call its first entry of order_
  std::vector<std::int64_t> before_;  // per entry of order_: elements of those before it
  std::int64_t call_ = 0;             // the next one
  std::size_t next_ = 0;              // first entry of order_ that no fetch has taken
  std::int64_t available_ = 0;
  std::vector<std::int64_t> fetched_for_;  // per unit: the last call that a fetch has taken it for
  std::vector<std::vector<std::size_t>> uses_;  // per unit: its entries of order_
};

}  // namespace shardwright
