#pragma once

// Between a run's memory and a checkpoint: what one rank saves, and what it loads.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "executor/binding.h"
#include "executor/checkpoint/manifest.h"
#include "executor/checkpoint/save.h"
#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

class Checkpoint;

// One rank's training state in memory.
struct RankState {
  const Model& model;  // what the rank has of it: of a pipeline its stage's
  std::span<const BoundUnit> units;
  // Running statistics (fp32, module after module); null: the model has none. All ranks hold the
  // same ones.
  float* model_buffers = nullptr;
  MemoryCopy copy;        // how LoadState writes this memory
  std::int64_t part = 0;  // of the experts, where ranks share them out
};

// Fills model, optimizer, tensors and aliases of a manifest: those of the whole model, also where
// ranks share out its experts.
void DescribeState(const Model& model, const Job& job, Manifest& manifest);

// What this rank has: its pieces of parameters and states, and the running statistics. Of ranks
// that hold copies one saves them.
[[nodiscard]] std::vector<StretchData> StretchesOf(OptimizerKind optimizer, const RankState& rank);

// Elements [begin, begin + count) of a tensor, as `dtype`; false: there are none, and what the rank
// has stays.
using TensorReader = std::function<bool(const std::string& name, std::int64_t begin,
                                        std::int64_t count, DType dtype, void* out)>;

// What a checkpoint holds; all of it must be there. Refers to it.
[[nodiscard]] TensorReader ReaderOf(const Checkpoint& checkpoint);

// Fills this rank's shards. `with_states` false: parameters and running statistics only. Reads
// nothing but this rank's elements.
void LoadState(const TensorReader& read, OptimizerKind optimizer, const RankState& rank,
               bool with_states);

}  // namespace shardwright
