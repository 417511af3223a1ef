#pragma once

// Whether a job stays within its limits and where it was at the last record: for a repository's CI.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "schedule/plan_file.h"

namespace shardwright {

enum class GateMetric : std::uint8_t {
  kMemory,   // bytes that the device holds
  kTime,     // seconds per step
  kExposed,  // communication that nothing hides, a share of the step
  kCost,     // GPU-hours per 10^9 tokens (images)
};
inline constexpr std::size_t kGateMetricCount = 4;
[[nodiscard]] std::string_view NameOf(GateMetric metric);  // "step_time", as in budget files

struct GateFigures {
  std::array<double, kGateMetricCount> values{};
  std::vector<std::string> misfits;  // empty: the plan fits

  [[nodiscard]] double Of(GateMetric metric) const {
    return values[static_cast<std::size_t>(metric)];
  }
};

// Throws InputError as Evaluate does.
[[nodiscard]] GateFigures GateFiguresOf(const PlanFile& file);

// By metric: the section of a plan file in which two plans differ ("model", "job.sequence_length",
// "plan.recompute") and whose return to what it was before lowers the metric of `after` the most;
// nothing where no single one takes back a tenth of what was added. Simulates once per section that
// differs, and both plans.
using GateCauses = std::array<std::optional<std::string>, kGateMetricCount>;
[[nodiscard]] GateCauses FindCauses(const PlanFile& before, const PlanFile& after);

}  // namespace shardwright
