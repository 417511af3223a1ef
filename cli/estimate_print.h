#pragma once

// The answer of `shardwright estimate`, for people and as JSON (docs/cli.md names the keys).

#include <string>

#include "analysis/estimate.h"
#include "cli/command.h"
#include "cli/estimate_question.h"

namespace shardwright {

// Of the whole run, without failures. Requires an estimate that fits.
struct Totals {
  double tokens_per_s = 0;  // of all GPUs
  double seconds = 0;
  double gpu_hours = 0;
};
[[nodiscard]] Totals TotalsOf(const Question& question, const Estimate& e);

[[nodiscard]] std::string EstimateText(const Arguments& arguments, const Question& question,
                                       const Estimate& e);
[[nodiscard]] std::string EstimateJson(const Arguments& arguments, const Question& question,
                                       const Estimate& e);

// "; parameters and optimizer states on the host"; empty: nothing is there.
[[nodiscard]] std::string OffloadWords(const Offload& offload);
// "45 s", "3.2 h", "12.5 days".
[[nodiscard]] std::string Duration(double seconds);
// 1000000000 -> "1e9".
[[nodiscard]] std::string Tokens(double count);

}  // namespace shardwright
