#pragma once

// Single kernels, priced as one process would run them.

#include <string>
#include <vector>

#include "analysis/kernel_rows.h"
#include "core/units.h"
#include "models/kernel_set.h"

namespace shardwright {

// The kernels that a kernel set makes of a row's op; none where there are none of its own, a size
// is missing or the dtype is not known.
[[nodiscard]] std::vector<Kernel> KernelsOfRow(const KernelRow& row);

struct KernelPrice {
  std::string error;  // why there is none; empty: there is one
  std::string profile;
  Seconds time;
};

// What the kernels that a kernel set makes of the row's op take, one after the other. An empty
// `profile` is the one that the GPU has for its kernel set. Throws InputError for an unknown
// profile.
[[nodiscard]] KernelPrice PriceKernel(const KernelRow& row, const std::string& profile);

}  // namespace shardwright
