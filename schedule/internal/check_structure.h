#pragma once

// The rules of docs/execution_model.md section 3 that look at one op at a time.

#include <vector>

#include "schedule/program.h"
#include "schedule/verify.h"

namespace shardwright {

// Rule 1: ids in range, edges backwards, slots set by some body. Appends to `findings`.
void CheckStructure(const Program& program, std::vector<Finding>& findings);

// Rules 7 and 9: accesses lie inside their buffers, cover what the op moves, and are on the side of
// the host link that the op can reach. Requires rule 1.
void CheckAccesses(const Program& program, std::vector<Finding>& findings);

}  // namespace shardwright
