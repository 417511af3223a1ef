#pragma once

// From a program to calls: which bytes of one rank's memory every op reads and writes. Units,
// shards and padding end here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/units.h"
#include "executor/call.h"
#include "executor/shard_map.h"
#include "executor/training_options.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/place.h"
#include "schedule/program.h"

namespace shardwright {

// Everything that is the same on all ranks of a run.
struct ExecutorInput {
  const Model& model;
  const KernelSetOptions& kernels;
  const Job& job;
  const Program& program;
  const Placement& placement;
  const TrainingOptions& training;
};

// Throws InputError for what the host does not run of ranks that cut layers or tokens, dropout and
// ALiBi, and for dropout in a pipeline.
void CheckCuts(const Model& model, const Job& job);

struct BoundBody {
  std::vector<Call> calls;                     // by op
  std::vector<std::vector<ByteRange>> poison;  // by op: memory that it is the first to use
};

// A second place of a unit's parameters, beside the masters that the optimizer updates: what ZeRO
// computes with, or gathers from.
struct BoundCopy {
  std::vector<ShardPiece> pieces;
  std::int64_t elements = 0;  // padding included
  DType dtype = DType::kFp32;
  std::byte* data = nullptr;
};

// Optimizer states of some of a unit's elements: `data[k]` is the k-th state, packed as `pieces`
// say.
struct BoundStates {
  std::vector<ShardPiece> pieces;
  std::vector<std::byte*> data;
};

// Where a unit's resident parameters and optimizer states lie on this rank.
struct BoundUnit {
  std::vector<ShardPiece> pieces;
  std::int64_t elements = 0;  // padding included
  DType dtype = DType::kFp32;
  std::byte* parameters = nullptr;
  std::byte* host_copy = nullptr;  // a second copy in host memory (optimizer offload), or null
  std::optional<BoundCopy> copy;
  std::vector<ShardPiece> copy_only;  // pieces of `copy` that no rank's masters have (frozen ones)
  std::vector<BoundStates> states;    // none: not trained; several: see Plan::moments_piece
};

struct Binding {
  BoundBody init, warmup, step;
  std::vector<BoundUnit> units;  // by unit; `parameters` null for a unit without parameters
  // Host memory from which a micro-batch's inputs are copied: the model's input tensors in order.
  std::vector<View> inputs;
  // Running statistics, fp32, module after module; null: the model has none.
  float* model_buffers = nullptr;
  // By mixture whose experts ranks share out: rows of each micro-batch, as the host has learnt
  // them. First how many this rank sends to each expert, then how many came from each rank for each
  // expert here. Calls point into them; all run on one stream, a copy of the next step's numbers
  // behind those that need the ones before.
  std::deque<std::vector<std::int64_t>> row_counts;
};

// One rank's memory, laid out by the placement.
struct RankMemory {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
};

// Binds the program for one rank of the mesh. Throws InputError for a program
// that asks for something the executor cannot do, naming the op. O(ops + runs).
[[nodiscard]] Binding Bind(const ExecutorInput& input, Rank rank, const RankMemory& memory);

}  // namespace shardwright
