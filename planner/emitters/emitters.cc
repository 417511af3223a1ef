#include "planner/emitters/emitters.h"

#include <array>

namespace shardwright {

std::span<const Emitter> Emitters() {
  static constexpr std::array<Emitter, 9> kEmitters = {{
      {"fsdp2", "plan data and the Python that applies it with fully_shard", EmitFsdp2},
      {"fsdp1", "plan data and the Python that applies it with FullyShardedDataParallel",
       EmitFsdp1},
      {"accelerate", "YAML for accelerate launch", EmitAccelerate},
      {"trainer", "TrainingArguments of the Hugging Face Trainer", EmitTrainer},
      {"deepspeed", "DeepSpeed configuration", EmitDeepSpeed},
      {"torchtitan", "TOML, and a Python recipe for versions without it", EmitTorchtitan, true},
      {"lightning", "strategy and module for Lightning, beside plan data", EmitLightning},
      {"slurm", "sbatch script", EmitSlurm},
      {"torchrun", "start script", EmitTorchrun},
  }};
  return kEmitters;
}

Emission Emit(const Emitter& emitter, const PlanFile& file, const EmitOptions& options) {
  CheckEmittable(file, "plan", emitter.name);
  Emission emission = emitter.emit(file, options);
  AddTorchDuties(emission.as_emitted, emission);
  AddKernelDuties(file, emission);
  AddJobDuties(file, emitter.has_own_model, emission);
  return emission;
}

}  // namespace shardwright
