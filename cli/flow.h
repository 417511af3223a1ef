#pragma once

// From flags to a plan.

#include <cstdint>
#include <string>

#include "cli/command.h"
#include "cli/plan_options.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Fills in what the flags leave open: shard and replica sizes from the ranks of the cluster,
// accumulation from the global batch, units from the wrap rule. Throws InputError, or UsageError
// where two flags contradict each other.
[[nodiscard]] PlanFile MakePlanFile(const PlanOptions& options);

// Everything but the plan's choices: cluster, kernel set, profile, model and job. A global batch
// that no flag gives follows from micro-batch and accumulation.
[[nodiscard]] PlanFile MakeJobFile(const PlanOptions& options);

// The pieces of MakePlanFile that a search needs for the choices that flags fix.
void SetMesh(const PlanOptions& options, std::int64_t ranks, Plan& plan);
void SetUnits(const PlanOptions& options, const Model& model, const Job& job, Plan& plan);

// Reads a plan from a file, or from standard input ("-").
[[nodiscard]] PlanFile ReadPlanFile(const std::string& file,
                                    const Streams& streams = StandardStreams());

// A cluster without a name of its own: "16 x h100-80, 2 nodes".
[[nodiscard]] std::string DescribedCluster(const Cluster& cluster);
// "llama-3-8b on 2 x dgx-h100 (16 GPUs), fsdp2".
[[nodiscard]] std::string TitleOf(const PlanFile& file);

}  // namespace shardwright
