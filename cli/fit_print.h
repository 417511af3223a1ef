#pragma once

// The report of shardwright fit, for people and as JSON (docs/cli.md names the keys).

#include <string>

#include "analysis/fit_runs.h"

namespace shardwright {

[[nodiscard]] std::string RunFitText(const RunFit& fit);
[[nodiscard]] std::string RunFitJson(const RunFit& fit);

}  // namespace shardwright
