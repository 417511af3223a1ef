#pragma once

// Pipeline parallel: the model cut between blocks, so that each stage has some of them. A stage
// gets one tensor from the stage before and hands one on.
//
// Example: 32 blocks, 4 stages. Embedding and head count as a block each, so 34 make stages of 9,
// 9, 8 and 8: the embedding with 8 blocks, 9, 8, and 7 with the last norm, the head and the loss.
// With `edge_layers` 0 they count as none, so each stage has 8 blocks, as Megatron cuts them.
//
// Source: torchtitan, distributed/pipeline_parallel.py (_generate_llm_fqn_per_model_part).

#include <cstdint>
#include <string>

#include "models/model.h"

namespace shardwright {

// Leaves of the model what a rank of a pipeline has: the ops of every `ranks`-th of `stages`,
// `rank` the first of them, and their parameters; with `turns` the ranks' second stages go the
// other way round, so that the last rank has two neighbours, which get a tensor each. Modules stay
// all, those of other stages without parameters and buffers. Each stage is a call of its own of the
// modules around it. Nothing changes for one stage. `where` names the source of `stages`. Throws
// InputError for a model without blocks or with too few, and for parameters of several stages;
// where several stages of the rank read one input of the model; and where a stage hands on anything
// but one tensor. O(ops * stages + parameters).
void CutStage(Model& model, std::int64_t stages, std::int64_t rank, std::int64_t ranks,
              const std::string& where, std::int64_t edge_layers = 1, bool turns = false);

}  // namespace shardwright
