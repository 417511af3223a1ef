// Files that start a run: torchrun and Slurm scripts. They carry the mesh; the plan itself is the
// script's to apply.

#include "planner/emitters/emitters.h"

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

std::string Heading(const PlanFile& file, const char* what) {
  return "#!/bin/bash\n# " + std::string(what) + " of " + std::to_string(file.cluster.node_count) +
         " x " + std::to_string(file.cluster.gpus_per_node) +
         " ranks. Written by shardwright emit.\n";
}

}  // namespace

Emission EmitTorchrun(const PlanFile& file, const EmitOptions& options) {
  Emission emission;
  emission.as_emitted = file;
  const std::string gpus = std::to_string(file.cluster.gpus_per_node);
  const std::string nodes = std::to_string(file.cluster.node_count);
  std::string text =
      Heading(file, "Starts one process per GPU") + "set -euo pipefail\n" + AllocatorExport(file);
  if (file.cluster.node_count == 1) {
    text += "exec torchrun --standalone --nproc-per-node=" + gpus + " " + Quoted(options.script) +
            " \"$@\"\n";
  } else {
    text +=
        "# On every node, with HEAD set to the name of one of them.\n"
        ": \"${HEAD:?the node where ranks meet}\"\n"
        "exec torchrun --nnodes=" +
        nodes + " --nproc-per-node=" + gpus +
        " --rdzv-backend=c10d \\\n  --rdzv-id=\"${RUN_ID:-shardwright}\" "
        "--rdzv-endpoint=\"$HEAD:29500\" " +
        Quoted(options.script) + " \"$@\"\n";
  }
  emission.by_hand.push_back("apply the plan in " + options.script +
                             ", as --to fsdp2 or another target writes it");
  emission.files.push_back({"torchrun.sh", text});
  emission.has_allocator = emission.has_sequence = true;
  return emission;
}

Emission EmitSlurm(const PlanFile& file, const EmitOptions& options) {
  Emission emission;
  emission.as_emitted = file;
  const std::string gpus = std::to_string(file.cluster.gpus_per_node);
  std::string text = "#!/bin/bash\n#SBATCH --job-name=shardwright\n#SBATCH --nodes=" +
                     std::to_string(file.cluster.node_count) +
                     "\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=" + gpus +
                     "\n#SBATCH --exclusive\n#SBATCH --output=%x-%j.out\n"
                     "# Written by shardwright emit. One torchrun per node starts " +
                     gpus + " processes.\nset -euo pipefail\n" + AllocatorExport(file);
  text +=
      "HEAD=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n"
      "srun torchrun --nnodes=\"$SLURM_NNODES\" --nproc-per-node=" +
      gpus +
      " --rdzv-backend=c10d \\\n  --rdzv-id=\"$SLURM_JOB_ID\" --rdzv-endpoint=\"$HEAD:29500\" " +
      Quoted(options.script) + " \"$@\"\n";
  emission.by_hand.push_back("apply the plan in " + options.script +
                             ", as --to fsdp2 or another target writes it");
  emission.by_hand.emplace_back("set a time limit, account and partition");
  emission.files.push_back({"job.sh", text});
  emission.has_allocator = emission.has_sequence = true;
  return emission;
}

}  // namespace shardwright
