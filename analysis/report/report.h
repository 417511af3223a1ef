#pragma once

// A plan with its simulation, and a run of it where one was measured, as one HTML page that needs
// no network and no other file (docs/report.md).

#include <string>

#include "analysis/report/report_input.h"

namespace shardwright {

// The page. Equal inputs give equal bytes. O(spans + memory samples).
[[nodiscard]] std::string ReportHtml(const ReportInput& input);

// The data that the page draws, as JSON text (docs/report.md names the keys).
[[nodiscard]] std::string ReportJson(const ReportInput& input);

// The answer in a sentence or two: does it fit, how long is a step, what does it wait for.
[[nodiscard]] std::string VerdictOf(const ReportInput& input);

}  // namespace shardwright
