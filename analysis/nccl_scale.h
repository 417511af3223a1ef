#pragma once

// Efficiency of rings over many nodes, against the table that SimAI ships.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/error_statistics.h"
#include "core/units.h"

namespace shardwright {

// One entry: the fraction of its adapters' rate that an all-gather of `bytes` reaches.
struct ScalePoint {
  std::int64_t nodes = 0;  // of eight GPUs with an adapter of 400 Gbit/s each
  Bytes bytes;
  double published = 0;
  double predicted = 0;
};

struct ScaleReport {
  std::vector<ScalePoint> points;  // by nodes, then bytes
  ErrorStatistics errors;          // of times: published / predicted fraction - 1
};

// Reads the rows of `nic_ratio` for two and more nodes (columns table, bytes, scope,
// fraction_of_link_rate) and predicts them for H100 nodes on RoCE. The fractions are of 48.5 GB/s
// per adapter, as SimAI counts them. Throws InputError for a table without such rows.
[[nodiscard]] ScaleReport ReportScale(const std::string& file);
[[nodiscard]] ScaleReport ReportScaleOf(std::string_view text, const std::string& file);

}  // namespace shardwright
