#pragma once

// The table of emitters: from a plan to the files of a framework.

#include <span>
#include <string>
#include <string_view>

#include "planner/emitters/emission.h"
#include "planner/emitters/fqn.h"

namespace shardwright {

struct EmitOptions {
  std::string script = "train.py";      // what launch lines start
  FqnDialect fqns = FqnDialect::kHfV5;  // names of modules and parameters in Python targets
};

struct Emitter {
  std::string_view name;   // "fsdp2"
  std::string_view about;  // one line
  Emission (*emit)(const PlanFile& file, const EmitOptions& options);
  bool has_own_model = false;  // the framework builds the model, not the user's script
};

// In the order of the documentation.
[[nodiscard]] std::span<const Emitter> Emitters();

// What `emitter` writes of `file`, with all that the files do not say: duties of torch, of kernels
// and of trained parameters. Throws InputError for a plan that the framework cannot run at all, and
// for one of Muon or SOAP, which no framework's settings name.
[[nodiscard]] Emission Emit(const Emitter& emitter, const PlanFile& file,
                            const EmitOptions& options);

[[nodiscard]] Emission EmitFsdp2(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitFsdp1(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitAccelerate(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitTrainer(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitDeepSpeed(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitTorchtitan(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitLightning(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitSlurm(const PlanFile& file, const EmitOptions& options);
[[nodiscard]] Emission EmitTorchrun(const PlanFile& file, const EmitOptions& options);

}  // namespace shardwright
