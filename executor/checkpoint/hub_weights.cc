#include "executor/checkpoint/hub_weights.h"

#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/checkpoint/adapters.h"
#include "executor/checkpoint/elements.h"
#include "executor/checkpoint/safetensors.h"
#include "executor/checkpoint/state.h"
#include "models/checkpoint_folder.h"

namespace shardwright {
namespace {

// The model's tensors, with the states of `optimizer`, if any; shapes and names count.
std::vector<SavedTensor> TensorsOf(const Model& model,
                                   const std::optional<OptimizerKind>& optimizer) {
  Manifest manifest;
  Job job;
  job.mode = optimizer ? JobMode::kTrain : JobMode::kForward;
  job.optimizer.kind = optimizer.value_or(job.optimizer.kind);
  DescribeState(model, job, manifest);
  return manifest.tensors;
}

std::string Several(const std::vector<std::string>& names) {
  std::string text = '"' + names.front() + '"';
  if (names.size() > 1) {
    text += " and " + std::to_string(names.size() - 1) + " more";
  }
  return text;
}

// A scalar is a tensor of one element.
bool SameShape(const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  static const std::vector<std::int64_t> kOne = {1};
  return (a.empty() ? kOne : a) == (b.empty() ? kOne : b);
}

}  // namespace

HubWeights::HubWeights(const std::string& path, const Model& model) : path_(path) {
  if (!IsFolder(path)) {
    Open(path, nullptr);
  } else if (!HoldsCheckpoint(path)) {
    throw InputError(path, "no weights",
                     "a folder with model.safetensors or model.safetensors.index.json");
  } else {
    const std::filesystem::path folder(path);
    const std::map<std::string, std::set<std::string>> parts = PartsOf(path);
    for (const auto& [file, names] : parts) {
      Open((folder / file).string(), names.empty() ? nullptr : &names);
    }
  }
  Match(model);
}

// `names`: those that the index puts there; null: all.
void HubWeights::Open(const std::string& file, const std::set<std::string>* names) {
  const SafetensorsHeader header = ReadSafetensorsHeader(file);
  ReadMetadata(file, header.metadata);
  files_.push_back(std::make_unique<MappedFile>(file));
  const MappedFile& mapped = *files_.back();
  std::set<std::string> here;
  for (const SafetensorsEntry& entry : header.entries) {
    if (names == nullptr || names->contains(entry.name)) {
      here.insert(entry.name);
      stored_[ModernName(entry.name)] = {
          entry.dtype, entry.shape,
          mapped.At(header.data_begin + entry.begin, entry.end - entry.begin)};
    }
  }
  for (const std::string& name : names != nullptr ? *names : here) {
    if (!here.contains(name)) {
      throw InputError(file, "no tensor \"" + name + '"',
                       "what model.safetensors.index.json puts there");
    }
  }
}

void HubWeights::ReadMetadata(const std::string& file,
                              const std::map<std::string, std::string>& metadata) {
  const auto kind = metadata.find(kOptimizerKey);
  if (kind == metadata.end()) {
    return;
  }
  const auto name = FindIn(kOptimizerNames, kind->second);
  if (name == kOptimizerNames.end()) {
    throw InputError(file + ": metadata " + kOptimizerKey, '"' + kind->second + '"',
                     "the name of an optimizer, such as \"adamw\"");
  }
  optimizer_ = static_cast<OptimizerKind>(name - kOptimizerNames.begin());
  const auto count = metadata.find(kUpdatesKey);
  const std::string text = count == metadata.end() ? "" : count->second;
  updates_ = IntegerIn(text).value_or(-1);
  if (updates_ < 0 || updates_ > JsonValue::kMaxCount) {
    throw InputError(file + ": metadata " + kUpdatesKey, Quoted(text),
                     "the number of updates that were done");
  }
}

// Gives the model's tensors that `tensor` is made of their elements in the file's tensor `name`.
void HubWeights::Take(const HubTensor& tensor, const std::string& name, const Own& own) {
  const Stored& stored = stored_.at(name);
  const DType dtype = stored.dtype;
  const std::string where = path_ + ": tensor \"" + name + '"';
  if (!SameShape(stored.shape, tensor.shape)) {
    throw InputError(where, "shape " + ShapeText(stored.shape),
                     ShapeText(tensor.shape) + ", as the model has");
  }
  const std::byte* data = stored.data;
  for (const std::string& part : tensor.parts) {
    const SavedTensor& mine = *own.at(part);
    const bool is_count = mine.kind == TensorKind::kBuffer && dtype == DType::kInt64;
    if (!IsFloat(dtype) && !is_count) {
      throw InputError(where, SafetensorsName(dtype), "F32, BF16 or F16");
    }
    found_[part] = {{mine.name, mine.kind, dtype, mine.shape}, data};
    data += mine.Elements() * SizeOf(dtype);
  }
}

void HubWeights::Match(const Model& model) {
  const std::vector<SavedTensor> wanted = TensorsOf(model, optimizer_);
  Own own;
  for (const SavedTensor& tensor : wanted) {
    own[tensor.name] = &tensor;
  }
  std::set<std::string> names, used;
  for (const auto& [name, stored] : stored_) {
    names.insert(name);
  }
  for (const HubNames style : {HubNames::kHub, HubNames::kModules5}) {
    for (const HubTensor& tensor : HubTensorsOf(wanted, style)) {
      const std::string name = FindStoredName(names, tensor.name);
      if (!name.empty() && found_.count(tensor.parts.front()) == 0) {
        Take(tensor, name, own);
        used.insert(name);
      }
    }
  }
  // Of tied parameters files may have any one; a second one is the same again.
  for (const Parameter& param : model.params) {
    if (!param.tied_to.valid()) {
      continue;
    }
    const std::string name = FindStoredName(names, param.fqn);
    const std::string& target = model.params[param.tied_to.value].fqn;
    if (!name.empty() && found_.count(target) == 0) {
      Take({name, param.WholeShape(), {target}}, name, own);
    }
    used.insert(name);
  }
  for (const std::string& name : names) {
    if (used.count(name) == 0 && IsTrainedName(name)) {
      unused_.push_back(name);
    }
  }
  std::vector<std::string> missing;
  for (const SavedTensor& tensor : wanted) {
    // Adapters are added to a model whose weights are there already.
    if (tensor.kind == TensorKind::kParameter && found_.count(tensor.name) == 0 &&
        !IsAdapter(tensor.name)) {
      missing.push_back(tensor.name);
    }
  }
  if (!missing.empty()) {
    throw InputError(path_, "no tensor " + Several(missing), "every parameter of " + model.name,
                     DidYouMean(missing.front(), unused_));
  }
}

std::uint32_t HubWeights::Checksum() const {
  std::uint32_t crc = 0;
  for (const std::unique_ptr<MappedFile>& file : files_) {
    crc = ContentChecksum(file->bytes(), crc);
  }
  return crc;
}

bool HubWeights::Read(const std::string& name, std::int64_t begin, std::int64_t count, DType dtype,
                      void* out) const {
  const auto found = found_.find(name);
  if (found == found_.end()) {
    return false;
  }
  const auto& [tensor, data] = found->second;
  SW_CHECK(begin >= 0 && begin + count <= tensor.Elements(), name);
  ConvertElements(tensor.dtype, data + begin * SizeOf(tensor.dtype), dtype,
                  static_cast<std::byte*>(out), count);
  return true;
}

}  // namespace shardwright
