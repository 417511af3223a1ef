#pragma once

// A Hugging Face checkpoint: names, shapes and dtypes from the headers of its safetensors files.
// The weights themselves are never read here (executor/checkpoint/hub_weights.h does).

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/model.h"

namespace shardwright {

struct CheckpointTensor {
  std::string dtype;                     // "BF16", "F32", ...; empty: the file is not here
  std::vector<std::int64_t> shape = {};  // row-major
};

struct HubCheckpoint {
  std::map<std::string, CheckpointTensor> tensors;  // by name
  std::int64_t file_count = 0;                      // shards whose headers were read
  std::vector<std::string> absent_files;            // shards that the index names and nobody has
};

// Does the folder hold model.safetensors or model.safetensors.index.json?
[[nodiscard]] bool HoldsCheckpoint(const std::string& folder);

// The files of the folder's weights, and which tensors the index puts into each; none: it is the
// one file, and all count. Throws InputError for an index that is damaged or leads out of the
// folder.
[[nodiscard]] std::map<std::string, std::set<std::string>> PartsOf(const std::string& folder);

// What a parameter is called in a file with these names: as it is, or with another base model's
// prefix; empty: it is not there. Names must be modern ones.
[[nodiscard]] std::string FindStoredName(const std::set<std::string>& names,
                                         const std::string& fqn);
// Norms of BERT's first files, "LayerNorm.gamma", are weights today.
[[nodiscard]] std::string ModernName(std::string name);
// False: files have it, but it is no parameter of the module.
[[nodiscard]] bool IsTrainedName(std::string_view name);

// Reads the one file, or else the index and the header of each shard. A file may end behind its
// header, as if only that had been downloaded. Throws InputError for damaged or contradicting
// files: a tensor that the index puts into a shard without it, a shape that does not fit its bytes,
// a file that ends inside its weights, a shard outside the folder.
[[nodiscard]] HubCheckpoint ReadCheckpoint(const std::string& folder);

// What the model and the checkpoint disagree about, one line each, sorted; empty: nothing.
// A tied weight need not be stored. Names may lack the base model's prefix ("transformer.", as
// GPT-2's hub files do) or have one; old norms are called gamma and beta; what Transformers never
// trains (causal masks, rotary frequencies, router corrections) does not count.
[[nodiscard]] std::vector<std::string> CheckpointDifferences(const Model& model,
                                                             const HubCheckpoint& checkpoint);

// "291 tensors in 4 files: BF16 290, F32 1".
[[nodiscard]] std::string Describe(const HubCheckpoint& checkpoint);

}  // namespace shardwright
