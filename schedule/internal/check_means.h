#pragma once

// Rule 10 of docs/execution_model.md section 3: what updates read are means.

#include <vector>

#include "schedule/program.h"
#include "schedule/verify.h"

namespace shardwright {

// Follows every gradient from backward to its update and counts over which ranks and micro-batches
// it is summed and what it is divided by. Requires rules 1 to 9. Appends to `findings`.
// O(ops + accesses), times the sums that a gradient has parts of (two at most in lowered programs).
void CheckMeans(const Program& program, std::vector<Finding>& findings);

}  // namespace shardwright
