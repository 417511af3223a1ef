#pragma once

// The units of a plan in the order in which forward runs through them, and what is gathered ahead.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"

namespace shardwright {

// A stretch of forward whose parameters belong to one unit.
struct UnitRun {
  std::uint32_t unit = 0;  // index into Program::units
};

// A gather that is issued ahead: before the host issues the compute of `during`, for a later unit.
struct PrefetchArrow {
  std::uint32_t during = 0;
  std::uint32_t gathered = 0;
  Phase phase = Phase::kForward;

  bool operator==(const PrefetchArrow&) const = default;
};

struct UnitRow {
  std::string name;
  std::int64_t parameters = 0;  // elements
  Bytes gathered;               // unsharded, in the compute dtype, padding included
  std::string reshard;    // "always", "never", "to 8 ranks"; empty: the dialect has no such choice
  std::string recompute;  // "full", "selective", or empty
};

struct UnitPicture {
  std::vector<UnitRow> units;         // as in Program::units
  std::vector<UnitRun> runs;          // in forward order; every unit at least once
  std::vector<PrefetchArrow> arrows;  // of the first micro-batch, without doubles
};

// O(ops + edges).
[[nodiscard]] UnitPicture DrawUnits(const PlanFile& file, const Program& program);

}  // namespace shardwright
