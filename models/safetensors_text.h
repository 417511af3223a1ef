#pragma once

// The front of a safetensors file (huggingface/safetensors, README "Format"): eight bytes with the
// length of a JSON header, then the header. Weights are never read.

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright {

inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";

struct SafetensorsText {
  std::int64_t file_size = 0;  // bytes
  std::string text;            // the header: a JSON object, perhaps padded with spaces
};

// Reads the header's text. Throws InputError for a file that cannot be read, a header beyond the
// file's end or above 100,000,000 bytes (the reference implementation's limit), and one that does
// not begin with '{'.
[[nodiscard]] SafetensorsText ReadSafetensorsText(const std::string& file);

// Bits per element of a dtype as safetensors names it ("BF16": 16, "F4": 4); 0: no such dtype.
[[nodiscard]] std::int64_t SafetensorsBits(std::string_view dtype);

}  // namespace shardwright
