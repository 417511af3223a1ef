#pragma once

// The reports of shardwright validate-nccl and fit-nccl, for people and as JSON (docs/cli.md names
// the keys).

#include <optional>
#include <string>
#include <vector>

#include "analysis/fit_nccl.h"
#include "analysis/nccl_scale.h"
#include "analysis/validate_nccl.h"

namespace shardwright {

struct SweepOutput {
  SweepReport report;
  std::vector<LeftOutFabric> left_out;  // empty: not asked for
  std::optional<ScaleReport> scale;
};
[[nodiscard]] std::string SweepText(const SweepOutput& output);
[[nodiscard]] std::string SweepJson(const PreparedSweep& sweep, const SweepOutput& output);

[[nodiscard]] std::string NetworkFitText(const NetworkFit& fit);
[[nodiscard]] std::string NetworkFitJson(const NetworkFit& fit);

}  // namespace shardwright
