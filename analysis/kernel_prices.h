#pragma once

// Single kernels, priced as one process would run them.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"

namespace shardwright {

// One op of a library, as tables of kernel times name it (docs/cli.md). 0: not given.
struct KernelRow {
  std::string gpu;        // of the catalog
  std::string stack;      // the library, such as "cublas"
  std::string op;         // "gemm", "attention", ...
  std::string direction;  // "forward", "backward" or "both"
  std::string dtype;
  std::int64_t batch = 0, m = 0, n = 0, k = 0, groups = 0;
  std::int64_t sequence = 0, kv_sequence = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  bool causal = false;
  std::int64_t rows = 0, features = 0;
};

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
