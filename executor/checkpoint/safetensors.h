#pragma once

// The safetensors format (huggingface/safetensors, README "Format"): eight bytes with the length of
// a JSON header, the header, then the tensors' bytes without holes.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/units.h"
#include "executor/checkpoint/output_file.h"

namespace shardwright {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFp32;
  std::vector<std::int64_t> shape = {};  // row-major; empty: a scalar
  std::int64_t begin = 0;                // first byte, counted from the end of the header
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t Elements() const;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in the order of their bytes
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::int64_t data_begin = 0;                  // byte of the file where the tensors begin
};

// Reads and checks a header against the whole file: lengths, dtypes, shapes, and that the tensors
// fill the rest without holes or overlaps. Throws InputError. Reads no tensor.
[[nodiscard]] SafetensorsHeader ReadSafetensorsHeader(const std::string& file);

// Sorts entries as the reference implementation does (wide dtypes first, then by name), gives them
// their bytes, and writes length and header. The tensors must follow in that order.
[[nodiscard]] std::vector<SafetensorsEntry> WriteSafetensorsHeader(
    CheckpointFile& out, std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::string>& metadata);

// "F32", "BF16", ... and back; FromSafetensorsName returns false for a dtype that we have no name
// for.
[[nodiscard]] const char* SafetensorsName(DType dtype);
[[nodiscard]] bool FromSafetensorsName(const std::string& name, DType& dtype);

}  // namespace shardwright
