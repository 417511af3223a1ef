#pragma once

// Numbers of profiles that fits of collectives may change: where they stand, and the fit itself.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/fit_nccl.h"
#include "analysis/validate_nccl.h"

namespace shardwright::internal {

// Stands for all transports between nodes.
inline constexpr std::string_view kBetweenNodes = "between nodes";

[[nodiscard]] NetworkNumber Factor(std::string fabric, std::string transport, std::string protocol,
                                   std::string field, double lower, double upper);
[[nodiscard]] NetworkNumber Time(std::string fabric, std::string transport, std::string protocol,
                                 std::string field, double upper_us);

// Sets one number in all profiles that have it.
struct NumberSetter {
  std::vector<double*> values;

  NumberSetter(const NetworkNumber& number, PreparedSweep& sweep);
  void operator()(double value) const;
};

// Fits `numbers` to `entries` of `sweep`, whose profiles are left at the result. Rows below 64 KiB
// count a quarter. Returns how often prices were asked.
std::int64_t FitNumbers(const std::vector<const PreparedSweep::Entry*>& entries,
                        PreparedSweep& sweep, std::vector<NetworkNumber>& numbers);

}  // namespace shardwright::internal
