#pragma once

// The report of shardwright validate, for people and as JSON (docs/cli.md names the keys).

#include <optional>
#include <string>

#include "analysis/validate.h"

namespace shardwright {

struct ValidationOutput {
  ValidationReport report;
  std::optional<OutOfMemoryReport> outcomes;
};

[[nodiscard]] std::string ValidationText(const ValidationOutput& output);
[[nodiscard]] std::string ValidationJson(const ValidationOutput& output);

}  // namespace shardwright
