#pragma once

// What one training step of a whole model multiplies and keeps, on one rank without sharding.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {

struct ModelTotals {
  // Of matrix products, convolutions and attention, counted as torch.utils.flop_counter does.
  Flops forward{0};
  Flops backward{0};
  // Activations kept between forward and backward, each storage once; parameters are not counted.
  Bytes saved{0};
};

// For `batch` samples with activations in `compute` dtype. O(ops).
[[nodiscard]] ModelTotals TotalsOf(const Model& model, std::int64_t batch, DType compute,
                                   const KernelSetOptions& options);

// Per op: does a loss depend on it, or what is made of a loss and other terms? In a model without a
// loss, does a tensor that no op reads? Backward runs no other ops.
[[nodiscard]] std::vector<bool> OpsBehindResult(const Model& model);

}  // namespace shardwright
