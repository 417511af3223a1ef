#pragma once

// Reading a checkpoint: any range of any tensor, whatever cut it was saved in.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/units.h"
#include "executor/checkpoint/hub_names.h"
#include "executor/checkpoint/manifest.h"
#include "models/model.h"

namespace shardwright {

class Checkpoint {
 public:
  // Opens a finished checkpoint's folder. Checks the manifest, that every file is there with its
  // size and header, and that the stretches cover every tensor exactly once. Throws InputError.
  explicit Checkpoint(const std::string& folder);
  ~Checkpoint();
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // Reads every byte and compares checksums. Throws InputError for the first damaged file. Several
  // processes may share the work: this one reads every `parts`-th file from `part` on.
  void Verify(std::size_t part = 0, std::size_t parts = 1) const;

  [[nodiscard]] const std::string& folder() const { return folder_; }
  [[nodiscard]] const Manifest& manifest() const { return manifest_; }
  // The tensor with this name. Throws InputError with the nearest one.
  [[nodiscard]] const SavedTensor& Find(const std::string& name) const;
  // Elements [begin, begin + count) of a tensor as `dtype` (fp32, bf16 or fp16, or the tensor's
  // own). May be called from several threads. O(count + log stretches).
  void Read(const std::string& name, std::int64_t begin, std::int64_t count, DType dtype,
            void* out) const;

 private:
  struct Files;
  void AddFile(const SavedFile& saved);

  std::string folder_;
  Manifest manifest_;
  std::unique_ptr<Files> files_;
};

// Throws InputError when the checkpoint's parameters are not those of the model, or its optimizer
// (unless nothing: forward only) is not the job's. Dtypes may differ: values are rounded.
void CheckFits(const Checkpoint& checkpoint, const Model& model,
               const std::optional<OptimizerKind>& optimizer);

// Throws InputError when a run with this sampler would not go on where the checkpoint's run was;
// behind an imported checkpoint, which knows of no data, any sampler begins.
void CheckContinues(const Checkpoint& checkpoint, const Sampler& sampler);

struct ExportOptions {
  std::optional<DType> dtype = {};       // of the parameters; nothing: as saved
  HubNames names = HubNames::kModules5;  // of models that Transformers knows
  bool merges_adapters = false;          // into the weights; else they are tensors of their own
};

// Writes all parameters and running statistics into one safetensors file. The file
// appears whole or not at all. Holds only a few MiB in memory. Throws InputError or
// EnvironmentError.
void ExportCheckpoint(const Checkpoint& checkpoint, const std::string& file,
                      const ExportOptions& options);

// Does it hold optimizer states? Imported weights have none.
[[nodiscard]] bool HasStates(const Manifest& manifest);

// The newest finished checkpoint in a folder of checkpoints; empty when there is none. A folder
// that is a checkpoint itself is its own newest.
[[nodiscard]] std::string FindLatestCheckpoint(const std::string& folder);

}  // namespace shardwright
