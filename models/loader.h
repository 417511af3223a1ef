#pragma once

// From what a user names (a zoo entry, a Hugging Face config.json, a checkpoint folder, our own
// model.json) to a Model.

#include <cstdint>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/model.h"

namespace shardwright {

struct LoadOptions {
  // Tokens per sample. 0: the smaller of the model's longest sequence and 2048 (own model.json: the
  // file's). Encoder-decoder models use it for both sides. A model with learned positions refuses
  // more than it has; MPT instead builds its position table for this length, as llm-foundry does.
  std::int64_t sequence_length = 0;
  // Height and width of square input images, in pixels. 0: the file's. A ViT refuses any other
  // size, because its position table fixes it.
  std::int64_t image_size = 0;
  // A file with further rows of the model type table (format of models/model_types.json). A row
  // replaces a built-in one of the same name. Empty: none.
  std::string model_types_file = {};
};

// Builds the model that `spec` names: a zoo name ("llama-3-8b"), a config.json, a checkpoint folder
// that holds one (also named by a file of weights in it), or a model.json (docs/model_json.md). The
// headers of a checkpoint's weights are compared with the model; differences become warnings. Files
// win over zoo names only when `spec` contains a '/' or ends in ".json" or ".safetensors". Throws
// InputError for anything else, with the nearest zoo name or, for a hub id
// ("tiiuae/falcon-7b"), the exact download command. A hub id that is no path here, and a name in
// other letters, stand for the zoo model of the same sizes: "meta-llama/Llama-3.1-8B-Instruct".
// O(size of the model); milliseconds for 70B parameters.
[[nodiscard]] Model LoadModel(const std::string& spec, const LoadOptions& options = {});

// The file that LoadModel reads for `spec`; empty for a zoo name, and where LoadModel would fail. A
// plan file embeds its text.
[[nodiscard]] std::string ModelFile(const std::string& spec);

// LoadModel from a parsed document. `name` becomes Model::name.
[[nodiscard]] Model ModelFromJson(const JsonValue& json, const std::string& name,
                                  const LoadOptions& options = {});

// The zoo model that a name in other letters, or on the hub, stands for; empty: none.
[[nodiscard]] std::string ZooModelOf(const std::string& name);

// The names of the zoo, sorted. Builds no model.
[[nodiscard]] std::vector<std::string> ZooNames();

struct ZooEntry {
  std::string name;             // what LoadModel accepts
  std::string type;             // Model::type
  std::int64_t parameters = 0;  // CountParameters
  std::string source;           // where the numbers come from
};

// Every model of the zoo, sorted by name. Builds each of them once.
[[nodiscard]] std::vector<ZooEntry> ListModels();

}  // namespace shardwright
