#pragma once

// From flags to a plan.

#include <cstdint>
#include <string>
#include <vector>

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
// Says what the model's file and the plan (WarningsOf) warn of.
void WarnOf(const PlanFile& file);

// Does that job compute in fp16, since nobody said a precision and the GPU multiplies no bf16?
[[nodiscard]] bool UsesFp16(const PlanOptions& options, const GpuSpec& gpu);

// Applies --loss-chunks to the job's kernel set. Throws UsageError where the model has no such
// loss.
void SetLossChunks(const PlanOptions& options, PlanFile& file);

// The attention kernels of --attention, where it is given. Throws UsageError for those of another
// maker's GPUs.
void SetAttention(const PlanOptions& options, PlanFile& file);

// The modules that PEFT adapts by default where no flag names them; of given ones, all-linear among
// them, those that match a module. Throws UsageError where the
// model has none of their names.
[[nodiscard]] std::vector<std::string> UsualLoraTargets(const PlanOptions& options);

// What runs on such ranks when no flag says it: PyTorch on GPUs, our own executor on the host.
[[nodiscard]] const char* UsualKernelSet(const GpuSpec& gpu);

// What is said of it where the job computes in a dtype that its matrix units do not have.
[[nodiscard]] std::string NoMatrixUnits(const GpuSpec& gpu);

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

// "shard 2 x replicate 1 x tensor 4", and how many share out the experts.
[[nodiscard]] std::string MeshText(const Plan& plan);
// Dialect, sizes of the mesh and batch, as reports in JSON have them.
void AddMesh(const Plan& plan, nlohmann::ordered_json& json);

}  // namespace shardwright
