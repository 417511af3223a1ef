#pragma once

// A Hugging Face checkpoint: names, shapes and dtypes from the headers of its safetensors files.
// The weights themselves are never read.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "models/model.h"

namespace shardwright {

struct CheckpointTensor {
  std::string dtype;                     // "BF16", "F32", ...; empty: the file is not here
  std::vector<std::int64_t> shape = {};  // row-major
};

struct Checkpoint {
  std::map<std::string, CheckpointTensor> tensors;  // by name
  std::int64_t file_count = 0;                      // shards whose headers were read
  std::vector<std::string> absent_files;            // shards that the index names and nobody has
};

// Does the folder hold model.safetensors or model.safetensors.index.json?
[[nodiscard]] bool HoldsCheckpoint(const std::string& folder);

// Reads the index, if there is one, and the header of each shard. A file may end behind its header,
// as if only that had been downloaded. Throws InputError for damaged or contradicting files: a
// tensor that the index puts into a shard without it, a shape that does not fit its bytes, a file
// that ends inside its weights, a shard outside the folder.
[[nodiscard]] Checkpoint ReadCheckpoint(const std::string& folder);

// What the model and the checkpoint disagree about, one line each, sorted; empty: nothing.
// A tied weight need not be stored. Names may lack the base model's prefix ("transformer.", as
// GPT-2's hub files do) or have one; old norms are called gamma and beta; what Transformers never
// trains (causal masks, rotary frequencies, router corrections) does not count.
[[nodiscard]] std::vector<std::string> CheckpointDifferences(const Model& model,
                                                             const Checkpoint& checkpoint);

// "291 tensors in 4 files: BF16 290, F32 1".
[[nodiscard]] std::string Describe(const Checkpoint& checkpoint);

}  // namespace shardwright
