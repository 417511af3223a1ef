#pragma once

// Where transfers that take turns may begin: beside a large product, which they slow least, since
// it leaves memory bandwidth free and lasts.

#include <vector>

#include "schedule/lower/walker.h"

namespace shardwright {

// Per model op, what begins with it.
struct LargeProducts {
  std::vector<bool> any;    // an op with at least half of the FLOPs of its unit's largest
  std::vector<bool> first;  // the first of its unit in forward, so the last one in backward
  std::vector<bool> last;   // the last one in forward
};
[[nodiscard]] LargeProducts FindLargeProducts(const Model& model, const ModelAnalysis& analysis,
                                              const UnitSpans& spans);

}  // namespace shardwright
