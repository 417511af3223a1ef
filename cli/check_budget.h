#pragma once

// Budget files of `shardwright check`, and the record of what their jobs were at the last commit.

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "analysis/fit_gate.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct BudgetJob {
  std::string name;
  PlanFile plan;
  std::array<std::optional<double>, kGateMetricCount> limits;
  std::size_t line = 1;  // of its table in the file
};

struct JobBudget {
  double tolerance = 0.01;  // growth against the record that is no news
  std::vector<BudgetJob> jobs;
};

// TOML (docs/cli.md, section check). Reads the plans that it names. Throws InputError.
[[nodiscard]] JobBudget ReadBudget(const std::string& file);

struct RecordedJob {
  std::string name;
  GateFigures figures;
  PlanFile plan;
};

// Throws InputError.
[[nodiscard]] std::vector<RecordedJob> ReadRecord(const std::string& file);
[[nodiscard]] std::string RecordJson(std::span<const RecordedJob> jobs);

}  // namespace shardwright
