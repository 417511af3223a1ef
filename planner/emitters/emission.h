#pragma once

// What an emitter returns: the files of a framework, the plan as the framework will run it, and
// what was lost on the way.

#include <string>
#include <string_view>
#include <vector>

#include "schedule/plan_file.h"

namespace shardwright {

struct EmittedFile {
  std::string name;  // inside the output folder
  std::string text;

  bool operator==(const EmittedFile&) const = default;
};

// A field of job or plan that the framework will run differently.
struct Loss {
  std::string field;    // "plan.units.reshard"
  std::string subject;  // the units it is about: "model.layers.0 and 31 more"; may be empty
  std::string planned;
  std::string emitted;
  std::string why;

  bool operator==(const Loss&) const = default;
};

struct Emission {
  std::vector<EmittedFile> files;
  PlanFile as_emitted;
  std::vector<Loss> losses;
  std::vector<std::string> by_hand;  // what the user's own script must do, one sentence each
  bool has_compile = false;          // the files say that the model is compiled
  bool has_loss_chunks = false;      // the files say that head and loss run in chunks
  bool has_allocator = false;        // the files set PYTORCH_ALLOC_CONF
  bool has_sequence = false;         // the files say how long samples are
};

// Throws InputError for a plan that no framework's settings can say anything about: its job updates
// matrices by Muon or SOAP. Packed bases and states, Lion and Adafactor are for accelerate and
// trainer, whose scripts name them; DeepSpeed has Lion. `where` names the plan.
void CheckEmittable(const PlanFile& file, const std::string& where, std::string_view target = "");

// Names the release of PyTorch that the plan is for, and settings of its allocator, if they are not
// the default and the files do not say them.
void AddTorchDuties(const PlanFile& file, Emission& emission);

// What the files do not say of a plan's kernels, and the script must do: attention that is not the
// framework's own, fp8, compiled blocks, a loss in chunks.
void AddKernelDuties(const PlanFile& file, Emission& emission);

// What of the job the script must do: samples of the planned length, forward passes alone, frozen
// parameters and adapters. A framework that builds the model itself (`has_own_model`) trains it
// whole: that is a loss, and the emitted plan is without them.
void AddJobDuties(const PlanFile& file, bool has_own_model, Emission& emission);

// Every field of job and plan in which `emitted` differs from `planned`, in the order of the plan
// file. Units are compared by the parameters they hold, whatever their names; options that only the
// emitted plan's dialect has are no loss. loss_reasons.json says why `target` runs a field
// differently; the longest beginning of the field's name counts. Other fields name the dialect.
[[nodiscard]] std::vector<Loss> FindLosses(const PlanFile& planned, const PlanFile& emitted,
                                           std::string_view target);

// Mesh, batch, recomputation and offload of `plan`; units and the options of its dialect are left
// at their defaults.
[[nodiscard]] Plan WithDialect(const Plan& plan, Dialect dialect);

// What PyTorch calls a training dtype: "bfloat16".
[[nodiscard]] std::string LongNameOf(DType dtype);

}  // namespace shardwright
