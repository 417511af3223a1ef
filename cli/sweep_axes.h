#pragma once

// Lists and ranges of numbers as values of flags.

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/flag_values.h"

namespace shardwright {

// "1,2,6", "1..64" (doubling: 1, 2, 4, ..., at most 64) or "8..32:8" (steps of 8), joined by
// commas; integers from 1 to `max`, in the order given. Throws UsageError, also for more than 1000
// values.
[[nodiscard]] std::vector<std::int64_t> ReadCounts(const Flag& flag, std::int64_t max);

// "tp=1..4" and "pp=2" as tp=1,pp=2, tp=2,pp=2 and tp=4,pp=2; other words are kept. Throws
// UsageError.
[[nodiscard]] std::vector<std::string> ReadMeshes(const std::string& flag,
                                                  std::span<const std::string> words,
                                                  std::int64_t max);

// "0.5,1,2": positive factors of at most 1000. Throws UsageError.
[[nodiscard]] std::vector<double> ReadFactors(const Flag& flag);

// "nvlink:0.5,1" as level and factors; without a level it is "network". Throws UsageError.
[[nodiscard]] std::pair<std::string, std::vector<double>> ReadLevelFactors(const Flag& flag);

}  // namespace shardwright
