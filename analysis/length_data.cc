// How long samples are, as a file or a distribution says it.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "analysis/lengths.h"
#include "core/error.h"
#include "simulator/jitter.h"

namespace shardwright {
namespace {

// A whole number that begins `text`, which then begins behind it; 0: none in [1, 2^40].
std::int64_t TakeCount(std::string_view& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return error == std::errc() && value >= 1 && value <= std::int64_t{1} << 40 ? value : 0;
}

Lengths SortedLengths(const std::map<std::int64_t, std::int64_t>& counts) {
  Lengths lengths;
  for (const auto& [length, count] : counts) {
    lengths.push_back({length, count});
  }
  return lengths;
}

}  // namespace

Lengths ParseLengths(std::string_view text, const std::string& name) {
  std::map<std::int64_t, std::int64_t> counts;
  std::int64_t number = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++number;
    line = line.substr(0, line.find_last_not_of(" \t\r") + 1);
    if (line.empty()) {
      continue;
    }
    std::string_view rest = line;
    const std::int64_t length = TakeCount(rest);
    std::int64_t count = 1;
    if (!rest.empty() && std::string_view(" ,\t").find(rest.front()) != rest.npos) {
      rest.remove_prefix(std::min(rest.size(), rest.find_first_not_of(" ,\t")));
      count = TakeCount(rest);
    }
    if (length == 0 || count == 0 || length > std::int64_t{1} << 30 || !rest.empty()) {
      throw InputError(name + ": line " + std::to_string(number), std::string(line.substr(0, 40)),
                       "the tokens of a sample, or a length and how many samples have it");
    }
    counts[length] += count;
  }
  if (counts.empty()) {
    throw InputError(name, "no length", "a line per sample");
  }
  return SortedLengths(counts);
}

Lengths LognormalLengths(double mean, double p99) {
  // mean = exp(m + s^2 / 2) and p99 = exp(m + z s).
  const double z = NormalUpperQuantile(0.01);
  const double root = z * z - 2 * std::log(p99 / mean);
  if (!(p99 >= mean) || root < 0) {
    return {};
  }
  const double s = z - std::sqrt(root);
  const double m = std::log(mean) - s * s / 2;
  constexpr int kQuantiles = 10'000;
  std::map<std::int64_t, std::int64_t> counts;
  for (int i = 0; i < kQuantiles; ++i) {
    const double x = NormalUpperQuantile((i + 0.5) / kQuantiles);
    ++counts[std::max<std::int64_t>(1, std::llround(std::exp(m + s * x)))];
  }
  return SortedLengths(counts);
}

}  // namespace shardwright
