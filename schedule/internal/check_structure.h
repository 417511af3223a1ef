#pragma once

// The rules of docs/execution_model.md section 3 that look at one op at a time.

#include <vector>

#include "schedule/program.h"
#include "schedule/verify.h"

namespace shardwright {

// Rule 1: ids in range, edges backwards, slots set by some body. Appends to `findings`.
void CheckStructure(const Program& program, std::vector<Finding>& findings);

// Rule 7: accesses lie inside their buffers and cover what the op moves. Requires rule 1.
void CheckSizes(const Program& program, std::vector<Finding>& findings);

}  // namespace shardwright
