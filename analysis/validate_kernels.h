#pragma once

// Predicted against measured times of single kernels.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/error_statistics.h"
#include "core/units.h"
#include "models/kernel_set.h"

namespace shardwright {

// One line of a table of kernel times; its columns are described in docs/cli.md. 0: not given.
struct KernelRow {
  std::int64_t line = 0;
  std::string gpu;
  std::string stack;      // the library, such as "cublas"
  std::string op;         // "gemm", "attention", ...
  std::string direction;  // "forward", "backward" or "both"
  std::string dtype;
  std::int64_t batch = 0, m = 0, n = 0, k = 0, groups = 0;
  std::int64_t sequence = 0, kv_sequence = 0;
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  bool causal = false;
  std::int64_t rows = 0, features = 0;
  Seconds time;  // measured
};

// Throws InputError with the line for a table without one of the columns, and for fields that are
// no numbers.
[[nodiscard]] std::vector<KernelRow> ParseKernelRows(std::string_view text,
                                                     const std::string& file);
[[nodiscard]] std::vector<KernelRow> ReadKernelRows(const std::string& file);

// The kernels that a kernel set makes of a row's op; none where there are none of its own, a size
// is missing or the dtype is not known.
[[nodiscard]] std::vector<Kernel> KernelsOfRow(const KernelRow& row);

// A row with its price, by the profile that the GPU has for its kernel set.
struct KernelPrediction {
  std::int64_t line = 0;
  std::string gpu, stack, op;
  std::string profile;
  Seconds predicted, measured;
  double error = 0;  // predicted / measured - 1
};

// Rows of one GPU, library and op.
struct KernelRowGroup {
  std::string gpu, stack, op;
  ErrorStatistics errors;
};

struct SkippedKernelRows {
  std::string reason;
  std::size_t rows = 0;
};

struct KernelReport {
  std::vector<KernelPrediction> rows;      // in the table's order
  std::vector<KernelRowGroup> groups;      // sorted by GPU, library and op
  std::vector<SkippedKernelRows> skipped;  // sorted by reason
};

// Prices every row as one process would run it: the kernels that a kernel set makes of the op, one
// after the other. `profile` names the profile of all rows; empty: each GPU's default.
[[nodiscard]] KernelReport ValidateKernels(const std::vector<KernelRow>& rows,
                                           const std::string& profile);

}  // namespace shardwright
