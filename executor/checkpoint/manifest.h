#pragma once

// What a checkpoint says about itself: manifest.json, written last. docs/training.md has an
// example.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/units.h"
#include "executor/data/sampler.h"
#include "executor/optimizer.h"

namespace shardwright {

inline constexpr const char* kManifestName = "manifest.json";
// What names of optimizer states begin with: "optimizer.exp_avg.<parameter>".
inline constexpr const char* kStatePrefix = "optimizer.";

// Eight hexadecimal digits.
[[nodiscard]] std::string ChecksumText(std::uint32_t crc);

// A parameter, an optimizer state ("optimizer.exp_avg.<parameter>") or a running statistic.
enum class TensorKind : std::uint8_t { kParameter, kState, kBuffer };

struct SavedTensor {
  std::string name;
  TensorKind kind = TensorKind::kParameter;
  DType dtype = DType::kFp32;
  std::vector<std::int64_t> shape;

  [[nodiscard]] std::int64_t Elements() const;
  bool operator==(const SavedTensor&) const = default;
};

// Elements [begin, begin + count) of a tensor, in row-major order.
struct SavedStretch {
  std::string tensor;
  std::int64_t begin = 0;
  std::int64_t count = 0;

  bool operator==(const SavedStretch&) const = default;
};

// One rank's file; it holds each stretch under its tensor's name.
struct SavedFile {
  std::string name;
  std::int64_t bytes = 0;
  std::uint32_t crc = 0;
  std::vector<SavedStretch> stretches;

  bool operator==(const SavedFile&) const = default;
};

// A second name of a parameter (tied weights).
struct SavedAlias {
  std::string name;
  std::string target;

  bool operator==(const SavedAlias&) const = default;
};

// A name and a value in words, of what a run was told.
using SavedSetting = std::pair<std::string, std::string>;

struct Manifest {
  std::string run;  // the id of the run that saved it; empty: of before runs had one
  std::vector<SavedSetting> settings;  // that a resumed run may change, each name once
  std::string model;                   // Model::name
  std::string dialect;                 // what wrote it; any other may read it
  std::int64_t shard_size = 1;
  std::int64_t replicate_size = 1;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  std::int64_t step = 0;    // steps done; the next one has this number
  std::int64_t update = 0;  // updates done: steps that no overflow made void
  LossScaler loss_scaler;
  Sampler sampler;
  std::vector<SavedTensor> tensors;
  std::vector<SavedAlias> aliases;
  std::vector<SavedFile> files;

  bool operator==(const Manifest&) const = default;
};

// The document; its last field is a checksum of all before it.
[[nodiscard]] std::string ManifestJson(const Manifest& manifest);
// Throws InputError naming `file`, also when the checksum is wrong.
[[nodiscard]] Manifest ParseManifest(std::string_view text, const std::string& file);

}  // namespace shardwright
