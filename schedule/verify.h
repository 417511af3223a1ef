#pragma once

// Proves that a program is safe to run: no race on a buffer, no read before a write, no double
// allocation or free, no access outside a buffer or on the wrong side of the host link, no
// mismatched collectives; and that what updates read are means. The rules are those of
// docs/execution_model.md section 3. Both interpreters rely on it, so it runs before either.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// One broken rule. Ops are named "<pass>: <op name>", where the pass is init, warmup or step 1..3;
// a memory point is named by the op it stands before.
struct Finding {
  int rule = 0;        // 1..10, the number in docs/execution_model.md section 3
  std::string first;   // the earlier op, or "(none)" where the trouble is that there is no such op
  std::string second;  // the later op
  std::string buffer;  // empty where no buffer is concerned
  std::string text;    // a whole sentence
};

inline constexpr std::size_t kMaxFindings = 20;

// Empty = legal. At most kMaxFindings; those of rule 1 come alone, since ids out of range allow no
// further look; rule 10 is looked at where all else is legal. O((ops + edges + accesses + points) *
// streams); allocates nothing per op, but for rule 10.
[[nodiscard]] std::vector<Finding> Verify(const Program& program);

// Does a collective have members in other stages of the pipeline?
[[nodiscard]] bool SpansStages(const Program& program, const OpShape& shape);

// The collective that another member does meanwhile.
[[nodiscard]] OpCode CounterpartOf(OpCode code);

// Verifies each program, then that the rank classes agree on their collectives (rule 8). Classes of
// a pipeline are its stages, in order: the transfers of neighbours meet, and no two wait for each
// other.
[[nodiscard]] std::vector<Finding> VerifyRanks(std::span<const Program* const> classes);

}  // namespace shardwright
