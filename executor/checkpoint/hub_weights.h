#pragma once

// Weights that others have trained: safetensors files as the hub has them, perhaps with optimizer
// states.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "executor/checkpoint/hub_names.h"
#include "executor/checkpoint/manifest.h"
#include "executor/data/mapped_file.h"
#include "executor/optimizer.h"
#include "models/model.h"

namespace shardwright {

// The metadata of a safetensors file that also holds states, as "optimizer.exp_avg.<parameter>":
// whose they are, and the updates that were done.
inline constexpr const char* kOptimizerKey = "shardwright.optimizer";
inline constexpr const char* kUpdatesKey = "shardwright.updates";

class HubWeights {
 public:
  // `path`: a safetensors file, or a folder with model.safetensors or with an index and the parts
  // that it names. Finds every parameter of the model, under the names of Transformers 4 or 5, with
  // or without the base model's prefix, and the running statistics. What the model adds to them
  // (adapters) need not be there. Throws InputError for a file that cannot be read, a parameter
  // that is missing or has another shape.
  HubWeights(const std::string& path, const Model& model);

  // Elements of one of the model's tensors, converted as Checkpoint::Read does; false: it is not
  // there. May be called from several threads.
  [[nodiscard]] bool Read(const std::string& name, std::int64_t begin, std::int64_t count,
                          DType dtype, void* out) const;

  struct Found {
    SavedTensor tensor;               // ours, in the dtype of the file
    const std::byte* data = nullptr;  // all of its elements
  };
  // By our name.
  [[nodiscard]] const std::map<std::string, Found>& found() const { return found_; }
  // Tensors of the files that no parameter takes.
  [[nodiscard]] const std::vector<std::string>& unused() const { return unused_; }
  // Of the bytes of all files (ContentChecksum).
  [[nodiscard]] std::uint32_t Checksum() const;
  [[nodiscard]] std::int64_t file_count() const { return std::ssize(files_); }
  // Whose states the files hold; nothing: none, whatever tensors are there.
  [[nodiscard]] const std::optional<OptimizerKind>& optimizer() const { return optimizer_; }
  [[nodiscard]] std::int64_t updates() const { return updates_; }

 private:
  struct Stored {
    DType dtype = DType::kFp32;
    std::vector<std::int64_t> shape;
    const std::byte* data = nullptr;
  };
  void Open(const std::string& file, const std::set<std::string>* names);
  void ReadMetadata(const std::string& file, const std::map<std::string, std::string>& metadata);
  using Own = std::map<std::string, const SavedTensor*>;  // the model's tensors by name
  void Match(const Model& model);
  void Take(const HubTensor& tensor, const std::string& name, const Own& own);

  const std::string path_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, Stored> stored_;  // by the name in the file, modernised
  std::map<std::string, Found> found_;
  std::vector<std::string> unused_;
  std::optional<OptimizerKind> optimizer_;
  std::int64_t updates_ = 0;
};

}  // namespace shardwright
