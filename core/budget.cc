#include "core/budget.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include <sys/resource.h>

#include "core/error.h"

namespace shardwright {
namespace {

// Readers stand in many folders and are called through many more; a factor in each signature would
// say the same everywhere.
std::atomic<std::int64_t> factor_of_all{1};

// "20,000,000".
std::string Grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::ptrdiff_t at = std::ssize(text) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return text;
}

// The number behind `key` in a file of the kernel; nothing where there is none.
std::optional<std::int64_t> NumberFrom(const std::string& file, std::string_view key = {}) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) {
      continue;
    }
    const std::size_t at = line.find_first_not_of(" \t", key.size());
    std::int64_t value = 0;
    if (at != std::string::npos &&
        std::from_chars(line.data() + at, line.data() + line.size(), value).ec == std::errc()) {
      return value;
    }
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

Budget::Budget(std::string where, std::string what, std::int64_t limit)
    : where_(std::move(where)),
      what_(std::move(what)),
      limit_(limit * BudgetFactor()),
      left_(limit_) {}

void Budget::Refuse() const {
  throw InputError(where_, "more than " + Grouped(limit_) + ' ' + what_,
                   "at most " + Grouped(limit_),
                   "--budget " + std::to_string(2 * BudgetFactor()) + " allows twice as many");
}

void SetBudgetFactor(std::int64_t factor) {
  SW_CHECK(factor >= 1 && factor <= kLargestBudgetFactor, std::to_string(factor));
  factor_of_all = factor;
}

std::int64_t BudgetFactor() {
  return factor_of_all;
}

std::int64_t AvailableMemory() {
  constexpr std::int64_t kUnknown = std::int64_t{4} << 30;
  const auto kilobytes = NumberFrom("/proc/meminfo", "MemAvailable:");
  std::int64_t bytes = kilobytes ? *kilobytes * 1024 : kUnknown;
  for (const auto& [limit, used] :
       {std::pair{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        std::pair{"/sys/fs/cgroup/memory/memory.limit_in_bytes",
                  "/sys/fs/cgroup/memory/memory.usage_in_bytes"}}) {
    const auto most = NumberFrom(limit);  // "max" is no number
    if (most) {
      bytes = std::min(bytes, std::max<std::int64_t>(*most - NumberFrom(used).value_or(0), 0));
    }
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    bytes = std::min(bytes, static_cast<std::int64_t>(std::min<rlim_t>(limit.rlim_cur, INT64_MAX)));
  }
  return bytes;
}

}  // namespace shardwright
