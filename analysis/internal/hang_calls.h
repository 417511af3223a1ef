#pragma once

// The calls of dumps as what the ranks of a process group did, in order.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/hang.h"

namespace shardwright::internal {

// What one rank issued in one group.
struct RankCalls {
  std::int64_t rank = 0;
  std::int64_t written = 0;       // when the dump was
  std::int64_t first = 1;         // sequence number of calls[0]
  std::vector<HangCall> calls;    // without gaps
  std::vector<bool> is_complete;  // of calls: known to have ended on this rank

  [[nodiscard]] std::int64_t Last() const { return first + std::ssize(calls) - 1; }
  [[nodiscard]] bool Has(std::int64_t sequence) const {
    return sequence >= first && sequence <= Last();
  }
  [[nodiscard]] const HangCall& At(std::int64_t sequence) const {
    return calls[static_cast<std::size_t>(sequence - first)];
  }
  [[nodiscard]] bool IsComplete(std::int64_t sequence) const {
    return is_complete[static_cast<std::size_t>(sequence - first)];
  }
};

struct GroupCalls {
  std::string name;                 // "default_pg (0)"
  std::vector<std::int64_t> ranks;  // members, ascending
  bool knows_ranks = true;          // false: no dump says who they are, these issued something
  std::vector<RankCalls> members;   // those with a dump, ascending
};

// Groups in which something was issued.
[[nodiscard]] std::vector<GroupCalls> GroupsOf(const std::vector<FlightDump>& dumps);

// Whether two ranks may have issued them together.
[[nodiscard]] bool AreAlike(const HangCall& a, const HangCall& b);

}  // namespace shardwright::internal
