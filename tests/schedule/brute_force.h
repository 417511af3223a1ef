#pragma once

// An independent reading of docs/execution_model.md section 3, for tests: the happens-before order
// as a full table of pairs, and each rule checked over all pairs. Shares no code with Verify.
// O(ops^2) memory and worse time: for programs of a few thousand op instances at most.

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// The ops of init, warmup, step, step, step, numbered in the order the host issues them.
class BruteForceOrder {
 public:
  struct Instance {
    const Body* body;
    std::size_t pass;
    std::uint32_t op;
    Stream stream;
  };

  explicit BruteForceOrder(const Program& program);

  [[nodiscard]] const std::vector<Instance>& instances() const { return instances_; }
  // Passes in order; an empty warm-up is one of them.
  [[nodiscard]] const std::vector<const Body*>& passes() const { return passes_; }
  // Number of op 0 of a pass.
  [[nodiscard]] std::size_t FirstOf(std::size_t pass) const { return first_of_pass_[pass]; }
  // Does instance x happen before instance y?
  [[nodiscard]] bool Before(std::size_t x, std::size_t y) const {
    return ((before_[y * words_ + x / 64] >> (x % 64)) & 1U) != 0;
  }

 private:
  void AddBefore(std::size_t x, std::size_t y);

  std::vector<const Body*> passes_;
  std::vector<std::size_t> first_of_pass_;
  std::vector<Instance> instances_;
  std::size_t words_ = 0;
  std::vector<std::uint64_t> before_;  // row y: the set of all x before y
};

// One life of a buffer: from an alloc point to its free, or to the end.
struct Allocation {
  BufferId buffer;
  std::size_t alloc_pass = 0;
  std::vector<std::pair<std::size_t, AccessMode>> accesses;  // by instance number, in issue order
};
// All lives in the concatenation, whether legal or not.
[[nodiscard]] std::vector<Allocation> AllocationsOf(const Program& program,
                                                    const BruteForceOrder& order);

// Do all accesses of one life happen before all of the other, or the other way round?
[[nodiscard]] bool AreOrdered(const BruteForceOrder& order, const Allocation& a,
                              const Allocation& b);

// Numbers of the rules (1..7) that the program breaks; empty = legal. If rule 1 is broken the
// others are not looked at.
[[nodiscard]] std::set<int> BruteForceBrokenRules(const Program& program);

// Rule 8 alone: do the classes agree on their collectives, and can none wait for another?
// Requires that each program is legal by itself.
[[nodiscard]] bool BruteForceRanksAgree(std::span<const Program* const> classes);

}  // namespace shardwright
