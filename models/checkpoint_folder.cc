#include "models/checkpoint_folder.h"

#include <array>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/safetensors_text.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// base_model_prefix of the classes that the loader knows: with it in front, or without it, a name
// means the same parameter.
constexpr std::array<std::string_view, 6> kPrefixes = {"model.", "transformer.", "gpt_neox.",
                                                       "bert.",  "vit.",         "language_model."};

// Stored, but no parameter of the module.
constexpr std::array<std::string_view, 8> kNotTrained = {
    ".attn.bias",      ".masked_bias",        ".rotary_emb.inv_freq",
    ".attention.bias", ".position_ids",       ".e_score_correction_bias",
    "_scale_inv",      ".num_batches_tracked"};

// Where the tensor's bytes end, counted from the end of the header.
std::int64_t ReadTensor(const JsonValue& json, CheckpointTensor* tensor) {
  json.AllowOnly({"dtype", "shape", "data_offsets"});
  tensor->dtype = json.At("dtype").AsString();
  std::int64_t bits = SafetensorsBits(tensor->dtype);
  if (bits == 0) {
    throw json.At("dtype").Error("a dtype of safetensors, such as BF16 or F32");
  }
  const JsonValue shape = json.At("shape");
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t size = shape[d].AsInt(0, kMaxBytes);
    tensor->shape.push_back(size);
    if (size > 0 && bits > kMaxBytes / size) {
      throw shape.Error("a shape of at most 2^47 bytes");
    }
    bits *= size;
  }
  const JsonValue offsets = json.At("data_offsets");
  if (offsets.size() != 2) {
    throw offsets.Error("two offsets");
  }
  const std::int64_t begin = offsets[0].AsInt(0, kMaxBytes);
  const std::int64_t end = offsets[1].AsInt(0, kMaxBytes);
  if ((end - begin) * 8 != bits) {
    throw offsets.Error("offsets " + std::to_string(bits / 8) + " apart, as dtype and shape need");
  }
  return end;
}

// The tensors of one file.
std::map<std::string, CheckpointTensor> ReadShard(const std::string& file) {
  const SafetensorsText raw = ReadSafetensorsText(file);
  const JsonValue json = JsonValue::Parse(raw.text, file);
  std::map<std::string, CheckpointTensor> tensors;
  std::int64_t end = 0;
  for (const std::string& name : json.Keys()) {
    if (name != kSafetensorsMetadata) {
      end = std::max(end, ReadTensor(json.At(name), &tensors[name]));
    }
  }
  const std::int64_t header = 8 + static_cast<std::int64_t>(raw.text.size());
  if (raw.file_size != header && raw.file_size < header + end) {
    throw InputError(file, std::to_string(raw.file_size) + " bytes",
                     std::to_string(header + end) + ", as its header says, or " +
                         std::to_string(header) + " for a header alone");
  }
  return tensors;
}

// Shard -> tensors that the index puts there.
std::map<std::string, std::set<std::string>> ReadIndex(const JsonValue& index) {
  std::map<std::string, std::set<std::string>> shards;
  const JsonValue map = index.At("weight_map");
  for (const std::string& tensor : map.Keys()) {
    const std::string file = map.At(tensor).AsString();
    if (file.empty() || file.find('/') != std::string::npos || file.front() == '.') {
      throw map.At(tensor).Error("the name of a file in the same folder");
    }
    shards[file].insert(tensor);
  }
  if (shards.empty()) {
    throw map.Error("at least one tensor");
  }
  return shards;
}

void ReadShards(const std::filesystem::path& folder, const JsonValue& index,
                HubCheckpoint* checkpoint) {
  for (const auto& [file, names] : ReadIndex(index)) {
    const std::string path = (folder / file).string();
    if (!Exists(path)) {
      checkpoint->absent_files.push_back(file);
      for (const std::string& name : names) {
        checkpoint->tensors[name] = {};
      }
      continue;
    }
    ++checkpoint->file_count;
    std::map<std::string, CheckpointTensor> shard = ReadShard(path);
    for (const std::string& name : names) {
      const auto found = shard.find(name);
      if (found == shard.end()) {
        throw index.At("weight_map").At(name).Error("a file that holds this tensor");
      }
      checkpoint->tensors[name] = std::move(found->second);
    }
  }
}

}  // namespace

bool IsTrainedName(std::string_view name) {
  return NoneOf(kNotTrained, [&](std::string_view suffix) { return name.ends_with(suffix); });
}

std::string ModernName(std::string name) {
  for (const auto& [old_end, new_end] :
       {std::pair<std::string_view, std::string_view>{"LayerNorm.gamma", "LayerNorm.weight"},
        {"LayerNorm.beta", "LayerNorm.bias"}}) {
    if (name.ends_with(old_end)) {
      name.replace(name.size() - old_end.size(), old_end.size(), new_end);
    }
  }
  return name;
}

std::string FindStoredName(const std::set<std::string>& names, const std::string& fqn) {
  if (names.count(fqn) != 0) {
    return fqn;
  }
  for (const std::string_view prefix : kPrefixes) {
    if (fqn.starts_with(prefix) && names.count(fqn.substr(prefix.size())) != 0) {
      return fqn.substr(prefix.size());
    }
    if (const std::string longer = std::string(prefix) + fqn; names.count(longer) != 0) {
      return longer;
    }
  }
  return "";
}

std::map<std::string, std::set<std::string>> PartsOf(const std::string& folder) {
  const std::filesystem::path path(folder);
  if (Exists(path / kSingle)) {  // which Transformers reads first, too
    return {{kSingle, {}}};
  }
  return ReadIndex(JsonValue::ReadFile((path / kIndex).string()));
}

bool HoldsCheckpoint(const std::string& folder) {
  const std::filesystem::path path(folder);
  return Exists(path / kSingle) || Exists(path / kIndex);
}

HubCheckpoint ReadCheckpoint(const std::string& folder) {
  HubCheckpoint checkpoint;
  const std::filesystem::path path(folder);
  if (!Exists(path / kSingle)) {
    ReadShards(path, JsonValue::ReadFile((path / kIndex).string()), &checkpoint);
  } else {
    checkpoint.tensors = ReadShard((path / kSingle).string());
    checkpoint.file_count = 1;
  }
  return checkpoint;
}

std::vector<std::string> CheckpointDifferences(const Model& model,
                                               const HubCheckpoint& checkpoint) {
  std::map<std::string, const CheckpointTensor*> stored;
  std::set<std::string> names;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    stored[ModernName(name)] = &tensor;
    names.insert(ModernName(name));
  }
  std::vector<std::string> differences;
  std::set<std::string> used;
  for (const Parameter& param : model.params) {
    const std::string name = FindStoredName(names, param.fqn);
    if (name.empty()) {
      if (!param.tied_to.valid()) {
        differences.push_back(param.fqn + ": not in the checkpoint");
      }
      continue;
    }
    used.insert(name);
    const CheckpointTensor& tensor = *stored[name];
    if (!tensor.dtype.empty() && tensor.shape != param.shape) {
      differences.push_back(param.fqn + ": " + ShapeText(tensor.shape) + " in the checkpoint, " +
                            ShapeText(param.shape) + " in the model");
    }
  }
  for (const auto& [name, tensor] : stored) {
    if (used.count(name) == 0 && IsTrainedName(name)) {
      differences.push_back(name + ": only in the checkpoint");
    }
  }
  for (const std::string& file : checkpoint.absent_files) {
    differences.push_back(file +
                          ": not in the folder, so only the names of its tensors were "
                          "compared");
  }
  SortAll(differences);
  return differences;
}

std::string Describe(const HubCheckpoint& checkpoint) {
  std::map<std::string, std::int64_t> dtypes;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    if (!tensor.dtype.empty()) {
      ++dtypes[tensor.dtype];
    }
  }
  std::string text = std::to_string(checkpoint.tensors.size()) + " tensors in " +
                     std::to_string(checkpoint.file_count) +
                     (checkpoint.file_count == 1 ? " file" : " files");
  const char* separator = ": ";
  for (const auto& [dtype, count] : dtypes) {
    text += separator + dtype + " " + std::to_string(count);
    separator = ", ";
  }
  return text;
}

}  // namespace shardwright
