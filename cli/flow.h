#pragma once

// From flags to a plan, from a plan to a verified program, from that to a prediction.

#include <string>

#include "cli/command_line.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"

namespace shardwright {

// Fills in what the flags leave open: shard and replica sizes from the ranks of the cluster,
// accumulation from the global batch, units from the wrap rule. Throws InputError, or UsageError
// where two flags contradict each other.
[[nodiscard]] PlanFile MakePlanFile(const PlanCommand& options);

// Reads a plan from a file, or from standard input ("-").
[[nodiscard]] PlanFile ReadPlanFile(const std::string& file);

// Lower, then Verify. Throws InputError for a plan that the dialect cannot express; a program that
// Verify refuses is our bug.
[[nodiscard]] Program LowerAndVerify(const PlanFile& file);

// "llama-3-8b on 2 x dgx-h100 (16 GPUs), fsdp2".
[[nodiscard]] std::string TitleOf(const PlanFile& file);

// All of standard input.
[[nodiscard]] std::string ReadStandardInput();

}  // namespace shardwright
