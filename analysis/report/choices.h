#pragma once

// The plans beside the one that a report is about: those a search considered, and what-ifs.

#include <cstdint>
#include <string>
#include <vector>

#include "core/json.h"
#include "core/units.h"

namespace shardwright {

struct ConsideredPlan {
  std::string label;
  Seconds step_time;
  Bytes memory;  // of one device
  bool is_chosen = false;
};

struct RejectedPlans {
  std::string family;
  std::string reason;
  std::int64_t count = 0;
  // Of the best of them, where known: else 0.
  Seconds best_time;
  Bytes least_deficit;
};

struct Choices {
  // By step time; none beats another in both time and memory, but perhaps the chosen one.
  std::vector<ConsideredPlan> pareto;
  std::vector<RejectedPlans> rejected;
  std::vector<ConsideredPlan> what_if;
};

// Reads what `shardwright plan --json` printed. Throws InputError for anything else.
void ReadSearch(const JsonValue& search, Choices& choices);
// Reads what `shardwright sweep --json` printed: rows that were predicted.
void ReadSweep(const JsonValue& sweep, Choices& choices);

}  // namespace shardwright
