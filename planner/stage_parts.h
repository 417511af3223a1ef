#pragma once

// The ranks of a pipeline, each as a job of its own, for the bound of plans with one.
//
// A rank computes all passes of its stages, and waits at both ends of a step. Before its first pass
// a micro-batch goes forward through the first stages of the ranks before it. Behind its last pass,
// whatever its stage, a micro-batch goes backward through them, before the first rank begins
// another step. So with f and b seconds of these stages, and w of the rank per micro-batch,
//
//   step >= micro-batches x w + sum over ranks before it of (f + b)
//
// The last rank gives the bubble that is known of equal stages, (P - 1) / V forwards and backwards
// of a rank; a slow rank gives its own work. Transfers may run meanwhile, and so may the update:
// what these take beside compute is not added (Bounds::Of). Example: 4 ranks of f = 1 s and b = 2
// s, 8 micro-batches: 8 x 3 + 3 x 3 = 33 s, which is what 1F1B takes. Where gradients of weights
// are passes of their own, these may fill the ends: no bubble is counted.

#include <cstdint>
#include <map>
#include <vector>

#include "planner/evaluator.h"
#include "planner/measure.h"
#include "planner/search.h"
#include "planner/space.h"

namespace shardwright {

struct StagePart {
  Problem problem;                            // the model is what the rank has
  Space space;                                // its blocks are
  std::map<std::int64_t, Measured> measured;  // by micro-batch; kept bytes are of all in flight
  std::map<std::int64_t, double> bubble;      // seconds, by micro-batch
};

// Throws InputError where the model cannot be cut.
[[nodiscard]] std::vector<StagePart> StageParts(const Problem& input, const SearchOptions& options,
                                                const Space& space, Workers& workers);

}  // namespace shardwright
