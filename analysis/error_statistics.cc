#include "analysis/error_statistics.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace shardwright {

double Quantile(std::vector<double> values, double q) {
  SW_CHECK(!values.empty(), "a quantile of nothing");
  std::sort(values.begin(), values.end());
  const double position = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - static_cast<double>(below)) * (values[above] - values[below]);
}

ErrorStatistics Summarise(const std::vector<double>& signed_errors) {
  ErrorStatistics result;
  if (signed_errors.empty()) {
    return result;
  }
  std::vector<double> sizes;
  double sum = 0;
  double signed_sum = 0;
  for (const double error : signed_errors) {
    sizes.push_back(std::abs(error));
    sum += std::abs(error);
    signed_sum += error;
  }
  const auto count = static_cast<double>(signed_errors.size());
  result.count = signed_errors.size();
  result.mean = sum / count;
  result.bias = signed_sum / count;
  result.median = Quantile(sizes, 0.5);
  result.p90 = Quantile(sizes, 0.9);
  result.max = *std::max_element(sizes.begin(), sizes.end());
  return result;
}

}  // namespace shardwright
