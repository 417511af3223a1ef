// Files that start a run: torchrun and Slurm scripts (templates/). They carry the mesh; the plan
// itself is the script's to apply.

#include "planner/emitters/emitters.h"
#include "planner/emitters/plan_data.h"

namespace shardwright {
namespace {

// In single quotes, as a shell reads it back.
std::string Quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) {
    text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return text + "'";
}

// The plan's step and memory are those of its own allocator settings.
std::string AllocatorExport(const PlanFile& file) {
  const std::string planned = AllocatorConf(file.job.allocator);
  return planned.empty() ? "# Planned with the defaults of PyTorch's allocator.\n"
                         : "# Before PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF.\n"
                           "export PYTORCH_ALLOC_CONF=" +
                               planned + '\n';
}

Emission EmitScript(const PlanFile& file, const EmitOptions& options, const char* name,
                    const char* file_template) {
  Emission emission;
  emission.as_emitted = file;
  emission.by_hand.push_back("apply the plan in " + options.script +
                             ", as --to fsdp2 or another target writes it");
  emission.files.push_back(
      {name, FilledTemplate(file_template, {{"NODES", std::to_string(file.cluster.node_count)},
                                            {"GPUS", std::to_string(file.cluster.gpus_per_node)},
                                            {"ALLOCATOR", AllocatorExport(file)},
                                            {"SCRIPT", Quoted(options.script)}})});
  emission.has_allocator = emission.has_sequence = true;
  return emission;
}

}  // namespace

Emission EmitTorchrun(const PlanFile& file, const EmitOptions& options) {
  return EmitScript(file, options, "torchrun.sh",
                    file.cluster.node_count == 1 ? "torchrun.sh" : "torchrun_nodes.sh");
}

Emission EmitSlurm(const PlanFile& file, const EmitOptions& options) {
  Emission emission = EmitScript(file, options, "job.sh", "slurm.sh");
  emission.by_hand.emplace_back("set a time limit, account and partition");
  return emission;
}

}  // namespace shardwright
