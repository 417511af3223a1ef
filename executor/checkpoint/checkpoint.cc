#include "executor/checkpoint/checkpoint.h"

#include <filesystem>
#include <functional>
#include <map>
#include <utility>

#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/checkpoint/adapters.h"
#include "executor/checkpoint/elements.h"
#include "executor/checkpoint/output_file.h"
#include "executor/checkpoint/safetensors.h"
#include "executor/checkpoint/save.h"
#include "executor/data/mapped_file.h"
#include "models/cut_experts.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

std::string PathIn(const std::string& folder, const std::string& name) {
  return (std::filesystem::path(folder) / name).string();
}

// Where a stretch's elements lie.
struct StretchPlace {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  const std::byte* data = nullptr;
};

}  // namespace

struct Checkpoint::Files {
  std::vector<std::unique_ptr<MappedFile>> mapped;
  std::map<std::string, std::vector<StretchPlace>> places;  // by tensor, ascending
  std::map<std::string, std::size_t> tensors;               // index in the manifest
};

Checkpoint::~Checkpoint() = default;

Checkpoint::Checkpoint(const std::string& folder)
    : folder_(folder), files_(std::make_unique<Files>()) {
  const std::string file = PathIn(folder, kManifestName);
  if (!Exists(file)) {
    throw InputError(folder, std::string("no ") + kManifestName, "a finished checkpoint");
  }
  manifest_ = ParseManifest(ReadTextFile(file), file);
  if (const auto step = StepIn(folder); step && *step != manifest_.step) {
    throw InputError(file, "step " + std::to_string(manifest_.step),
                     std::to_string(*step) + ", as the folder's name says",
                     "the folder was renamed or copied");
  }
  for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) {
    if (!files_->tensors.emplace(manifest_.tensors[t].name, t).second) {
      throw InputError(file, "tensor " + Quoted(manifest_.tensors[t].name) + " twice", "once");
    }
  }
  for (const SavedFile& saved : manifest_.files) {
    AddFile(saved);
  }
  for (const SavedTensor& tensor : manifest_.tensors) {
    std::vector<StretchPlace>& places = files_->places[tensor.name];
    SortAll(places, [](const StretchPlace& a, const StretchPlace& b) {
      return std::pair(a.begin, a.count) < std::pair(b.begin, b.count);
    });
    std::int64_t position = 0;
    std::size_t in_order = 0;
    while (in_order < places.size() && places[in_order].begin == position) {
      position += places[in_order++].count;
    }
    if (in_order < places.size() || position != tensor.Elements()) {
      throw InputError(file,
                       "stretches of " + Quoted(tensor.name) + " that end at element " +
                           std::to_string(position),
                       "stretches that cover all " + std::to_string(tensor.Elements()) + " once");
    }
  }
}

void Checkpoint::AddFile(const SavedFile& saved) {
  const std::string path = PathIn(folder_, saved.name);
  files_->mapped.push_back(std::make_unique<MappedFile>(path));
  const MappedFile& mapped = *files_->mapped.back();
  if (std::ssize(mapped.bytes()) != saved.bytes) {
    throw InputError(path, std::to_string(mapped.bytes().size()) + " bytes",
                     std::to_string(saved.bytes) + ", as the manifest says");
  }
  const SafetensorsHeader header = ReadSafetensorsHeader(path);
  std::map<std::string, const SafetensorsEntry*> entries;
  for (const SafetensorsEntry& entry : header.entries) {
    entries[entry.name] = &entry;
  }
  const auto fail = [&](const SavedTensor& tensor, std::int64_t count) {
    throw InputError(path,
                     "no " + std::to_string(count) + " elements of " + Quoted(tensor.name) +
                         " in " + SafetensorsName(tensor.dtype),
                     "what the manifest says");
  };
  std::map<std::string, std::int64_t> ends;  // of a tensor's stretches so far, in bytes
  for (const SavedStretch& stretch : saved.stretches) {
    const auto found = entries.find(stretch.tensor);
    const SavedTensor& tensor = Find(stretch.tensor);
    const std::int64_t bytes = stretch.count * SizeOf(tensor.dtype);
    std::int64_t& end = ends[stretch.tensor];
    if (found == entries.end() || found->second->dtype != tensor.dtype ||
        bytes > found->second->end - found->second->begin - end) {
      fail(tensor, stretch.count);
    }
    files_->places[stretch.tensor].push_back(
        {stretch.begin, stretch.count,
         mapped.At(header.data_begin + found->second->begin + end, bytes)});
    end += bytes;
  }
  for (const auto& [name, end] : ends) {
    if (end != entries[name]->end - entries[name]->begin) {
      fail(Find(name), end / SizeOf(Find(name).dtype));
    }
  }
}

const SavedTensor& Checkpoint::Find(const std::string& name) const {
  const auto found = files_->tensors.find(name);
  if (found == files_->tensors.end()) {
    std::vector<std::string> names = Mapped<std::string>(manifest_.tensors, &SavedTensor::name);
    throw InputError(folder_, "no tensor " + Quoted(name), "one of that name",
                     DidYouMean(name, names));
  }
  return manifest_.tensors[found->second];
}

void Checkpoint::Verify(std::size_t part, std::size_t parts) const {
  for (std::size_t i = part; i < manifest_.files.size(); i += parts) {
    const std::span<const std::byte> bytes = files_->mapped[i]->bytes();
    const std::uint32_t crc = Crc32(0, bytes.data(), static_cast<std::int64_t>(bytes.size()));
    if (crc != manifest_.files[i].crc) {
      throw InputError(PathIn(folder_, manifest_.files[i].name), "CRC-32 " + ChecksumText(crc),
                       ChecksumText(manifest_.files[i].crc) + ", as the manifest says",
                       "the file is damaged");
    }
  }
}

void Checkpoint::Read(const std::string& name, std::int64_t begin, std::int64_t count, DType dtype,
                      void* out) const {
  const SavedTensor& tensor = Find(name);
  SW_CHECK(begin >= 0 && count >= 0, name);
  if (count > tensor.Elements() - begin) {
    throw InputError(folder_ + ": tensor " + Quoted(name),
                     std::to_string(tensor.Elements()) + " elements",
                     "at least " + std::to_string(begin + count) + ", as the model has");
  }
  const bool is_count = tensor.dtype == DType::kInt64 && dtype == DType::kFp32;
  if (dtype != tensor.dtype && !is_count && !(IsFloat(dtype) && IsFloat(tensor.dtype))) {
    throw InputError(folder_ + ": tensor " + Quoted(name),
                     IsFloat(tensor.dtype) ? "floating-point numbers" : "integers",
                     IsFloat(dtype) ? "floating-point numbers" : "integers");
  }
  const std::vector<StretchPlace>& places = files_->places.at(name);
  auto place =
      std::upper_bound(places.begin(), places.end(), begin,
                       [](std::int64_t at, const StretchPlace& p) { return at < p.begin; });
  while (count > 0) {
    const StretchPlace& from = *std::prev(place);
    const std::int64_t skip = begin - from.begin;
    const std::int64_t here = std::min(count, from.count - skip);
    SW_CHECK(skip >= 0 && here >= 0, name);
    ConvertElements(tensor.dtype, from.data + skip * SizeOf(tensor.dtype), dtype,
                    static_cast<std::byte*>(out), here);
    out = static_cast<std::byte*>(out) + here * SizeOf(dtype);
    begin += here;
    count -= here;
    ++place;
  }
}

void CheckFits(const Checkpoint& checkpoint, const Model& model,
               const std::optional<OptimizerKind>& optimizer) {
  std::int64_t storages = 0;
  for (const auto& [id, part] : AllParts(model)) {
    const Parameter& param = model.params[id.value];
    if (param.tied_to.valid()) {
      continue;
    }
    ++storages;
    const std::string fqn = FqnOfPart(model, id, part);
    const SavedTensor& tensor = checkpoint.Find(fqn);
    if (tensor.shape != param.WholeShape()) {
      throw InputError(checkpoint.folder() + ": tensor " + Quoted(fqn),
                       "shape " + ShapeText(tensor.shape),
                       ShapeText(param.WholeShape()) + ", as in " + model.name);
    }
  }
  const auto saved =
      CountOf(checkpoint.manifest().tensors, TensorKind::kParameter, &SavedTensor::kind);
  if (saved != storages) {
    throw InputError(checkpoint.folder(),
                     std::to_string(saved) + " parameters of " + checkpoint.manifest().model,
                     "the " + std::to_string(storages) + " of " + model.name);
  }
  if (optimizer && HasStates(checkpoint.manifest()) &&
      *optimizer != checkpoint.manifest().optimizer) {
    throw InputError(
        checkpoint.folder(),
        "states of " + std::string(NameIn(kOptimizerNames, checkpoint.manifest().optimizer)),
        "states of " + std::string(NameIn(kOptimizerNames, *optimizer)) + ", the plan's optimizer");
  }
}

bool HasStates(const Manifest& manifest) {
  return IsIn(manifest.tensors, TensorKind::kState, &SavedTensor::kind);
}

void CheckContinues(const Checkpoint& checkpoint, const Sampler& sampler) {
  const Sampler& saved = checkpoint.manifest().sampler;
  if (saved.dataset_size == 0) {
    return;
  }
  const auto check = [&](bool equal, const std::string& found, const std::string& expected) {
    if (!equal) {
      throw InputError(checkpoint.folder(), found,
                       expected + ", since a resumed run goes on with the same samples");
    }
  };
  check(saved.dataset_size == sampler.dataset_size,
        "data of " + std::to_string(saved.dataset_size) + " samples",
        std::to_string(sampler.dataset_size));
  check(saved.global_batch == sampler.global_batch,
        "a global batch of " + std::to_string(saved.global_batch),
        std::to_string(sampler.global_batch));
  check(saved.seed == sampler.seed, "seed " + std::to_string(saved.seed),
        std::to_string(sampler.seed));
  check(saved.shuffle == sampler.shuffle, saved.shuffle ? "shuffled data" : "unshuffled data",
        sampler.shuffle ? "shuffled data" : "unshuffled data");
  check(saved.tail == sampler.tail, "another end of the epoch", "the run's epoch_tail");
}

namespace {

// The entry that a tensor gets in an exported file. PyTorch counts batches in an int64 scalar.
SafetensorsEntry ExportedEntry(const HubTensor& tensor, const SavedTensor& first,
                               std::optional<DType> dtype) {
  SafetensorsEntry entry{.name = tensor.name, .dtype = first.dtype, .shape = tensor.shape};
  if (first.kind == TensorKind::kBuffer && first.name.ends_with("num_batches_tracked")) {
    entry.dtype = DType::kInt64;
    entry.shape.clear();
  } else if (dtype && first.kind == TensorKind::kParameter) {
    entry.dtype = *dtype;
  }
  return entry;
}

using ElementReader = std::function<void(const SavedTensor& tensor, std::int64_t begin,
                                         std::int64_t count, DType dtype, void* out)>;

void CopyTensor(const ElementReader& read, const SavedTensor& tensor, DType dtype,
                CheckpointFile& out) {
  if (dtype == DType::kInt64) {
    float count = 0.0F;
    read(tensor, 0, 1, DType::kFp32, &count);
    const auto integer = static_cast<std::int64_t>(count);
    out.Write(&integer, 8);
    return;
  }
  constexpr std::int64_t kChunk = std::int64_t{1} << 20;  // elements
  std::vector<std::byte> buffer(
      static_cast<std::size_t>(std::min(kChunk, tensor.Elements()) * SizeOf(dtype)));
  for (std::int64_t begin = 0; begin < tensor.Elements(); begin += kChunk) {
    const std::int64_t count = std::min(kChunk, tensor.Elements() - begin);
    read(tensor, begin, count, dtype, buffer.data());
    out.Write(buffer.data(), count * SizeOf(dtype));
  }
}

}  // namespace

void ExportCheckpoint(const Checkpoint& checkpoint, const std::string& file,
                      const ExportOptions& options) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const SavedAlias& alias : checkpoint.manifest().aliases) {
    metadata[alias.name] = alias.target;  // as safetensors.torch.save_model notes tied weights
  }
  std::vector<SavedTensor> exported = checkpoint.manifest().tensors;
  std::erase_if(exported, [&](const SavedTensor& tensor) {
    return tensor.kind == TensorKind::kState || (options.merges_adapters && IsAdapter(tensor.name));
  });
  std::optional<MergedWeights> merged;
  if (options.merges_adapters) {
    merged.emplace(checkpoint);
  }
  const ElementReader read = [&](const SavedTensor& tensor, std::int64_t begin, std::int64_t count,
                                 DType dtype, void* out) {
    if (merged) {
      merged->Read(tensor, begin, count, dtype, out);
    } else {
      checkpoint.Read(tensor.name, begin, count, dtype, out);
    }
  };
  std::map<std::string, HubTensor> tensors;
  std::vector<SafetensorsEntry> entries;
  for (const HubTensor& tensor : HubTensorsOf(exported, options.names)) {
    entries.push_back(ExportedEntry(tensor, checkpoint.Find(tensor.parts.front()), options.dtype));
    tensors[tensor.name] = tensor;
  }
  StagedFile staged(file);
  {
    CheckpointFile out(file, staged);
    for (const SafetensorsEntry& entry :
         WriteSafetensorsHeader(out, std::move(entries), metadata)) {
      for (const std::string& part : tensors.at(entry.name).parts) {
        CopyTensor(read, checkpoint.Find(part), entry.dtype, out);
      }
    }
    out.SyncAndClose();
  }
  staged.Commit();
}

std::string FindLatestCheckpoint(const std::string& folder) {
  if (Exists(PathIn(folder, kManifestName))) {
    return folder;
  }
  const std::vector<std::string> finished = FinishedCheckpoints(folder);
  return finished.empty() ? std::string() : finished.back();
}

}  // namespace shardwright
