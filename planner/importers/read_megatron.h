#pragma once

// Megatron-LM's arguments, from a command line, a shell script or a table of them
// (megatron/training/arguments.py, commit of 2026-08-22).

#include "core/json.h"
#include "planner/importers/read_trainer.h"

namespace shardwright {

// The model as a config.json (ScriptFacts::config) and the rest as flags of `shardwright plan`
// (ScriptFacts::plan_flags): "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4" is
// "--shard tp=2,pp=4:even". Throws InputError for what cannot be predicted, such as fp8, and for
// replicas whose optimizer is not sharded.
[[nodiscard]] TrainerFile ReadMegatron(const JsonValue& root);

}  // namespace shardwright
