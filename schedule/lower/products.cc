// Finds the large products of each unit, from the FLOPs of forward kernels. O(ops + kernels).
//
// Example: a block with four linear layers of 8, 2, 16 and 16 GFLOP. The largest has 16, so
// products from 8 on are large. `any` marks the ops with 8, 16 and 16, `first` the one with 8, and
// `last` the second one with 16. Ops without parameters, such as attention, belong to no unit here
// and are never marked.

#include "schedule/lower/products.h"

#include <algorithm>

namespace shardwright {

LargeProducts FindLargeProducts(const Model& model, const ModelAnalysis& analysis,
                                const UnitSpans& spans) {
  const std::size_t op_count = model.ops.size();
  std::vector<double> flops(op_count, 0);
  std::vector<double> most(spans.spans.size(), 0);  // per unit
  const auto unit_of = [&](std::size_t i) {
    return spans.unit_of_param[model.ops[i].params.front().value].value;
  };
  for (std::size_t i = 0; i < op_count; ++i) {
    if (model.ops[i].params.empty()) {
      continue;
    }
    for (const Kernel& kernel : analysis.KernelsOf(static_cast<std::uint32_t>(i)).forward) {
      flops[i] += static_cast<double>(kernel.flops.value);
    }
    most[unit_of(i)] = std::max(most[unit_of(i)], flops[i]);
  }
  LargeProducts result;
  result.any.assign(op_count, false);
  result.first = result.last = result.any;
  std::vector<std::size_t> last(most.size(), op_count);
  for (std::size_t i = 0; i < op_count; ++i) {
    if (flops[i] > 0 && flops[i] >= most[unit_of(i)] / 2) {
      result.any[i] = true;
      result.first[i] = last[unit_of(i)] == op_count;
      last[unit_of(i)] = i;
    }
  }
  for (const std::size_t i : last) {
    if (i < op_count) {
      result.last[i] = true;
    }
  }
  return result;
}

}  // namespace shardwright
