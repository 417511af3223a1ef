#pragma once

#include <cstddef>
#include <vector>

namespace shardwright {

// How far predictions are from measurements. Errors are predicted / measured - 1.
struct ErrorStatistics {
  std::size_t count = 0;
  double mean = 0;    // of the absolute errors
  double median = 0;  // of the absolute errors
  double p90 = 0;     // of the absolute errors: nine tenths are at most this
  double max = 0;     // the largest absolute error
  double bias = 0;    // mean of the signed errors

  bool operator==(const ErrorStatistics&) const = default;
};

// All zero without errors. Quantiles are interpolated linearly between the sorted values (the value
// at position q * (count - 1), counted from 0), as NumPy does by default.
[[nodiscard]] ErrorStatistics Summarise(const std::vector<double>& signed_errors);

// The quantile `q` in [0, 1] of `values`, as above. Requires at least one value.
[[nodiscard]] double Quantile(std::vector<double> values, double q);

}  // namespace shardwright
