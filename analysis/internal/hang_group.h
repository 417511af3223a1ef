#pragma once

// What is wrong in one process group.

#include <cstdint>
#include <vector>

#include "analysis/hang.h"
#include "analysis/internal/hang_calls.h"
#include "schedule/program.h"

namespace shardwright::internal {

struct GroupDiagnosis {
  bool has_plan = false;   // the program has collectives in this group
  std::int64_t alike = 0;  // collectives that all members issued alike
  std::vector<HangFinding> findings;
  HangFinding waiting;  // the collective that has not ended and who is in it: of use if a rank died
};

// `program` may be null; `patience` in nanoseconds.
[[nodiscard]] GroupDiagnosis DiagnoseGroup(const GroupCalls& group, const Program* program,
                                           std::int64_t patience);

}  // namespace shardwright::internal
