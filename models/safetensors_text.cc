#include "models/safetensors_text.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "core/files.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMaxHeader = 100'000'000;  // the reference implementation's limit

constexpr std::array<std::pair<std::string_view, std::int64_t>, 22> kBits = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

}  // namespace

SafetensorsText ReadSafetensorsText(const std::string& file) {
  InputFile in(file, "a safetensors file");
  SafetensorsText raw;
  raw.file_size = in.size();
  std::array<unsigned char, 8> length_bytes{};
  if (raw.file_size < 8 || in.Read(length_bytes.data(), 8) < 8) {
    throw InputError(file, std::to_string(raw.file_size) + " bytes",
                     "a safetensors file, which has at least 8");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) {
    length = length << 8 | length_bytes[i];
  }
  if (length > static_cast<std::uint64_t>(kMaxHeader)) {
    throw InputError(file, "a header of " + std::to_string(length) + " bytes", "at most 100000000");
  }
  if (static_cast<std::int64_t>(length) > raw.file_size - 8) {
    throw InputError(file, "a header of " + std::to_string(length) + " bytes",
                     "at most the " + std::to_string(raw.file_size - 8) + " that follow");
  }
  raw.text.resize(length);
  if (in.Read(raw.text.data(), length) < length) {
    throw InputError(file, "the end of the file",
                     "a header of " + std::to_string(length) + " bytes");
  }
  if (!raw.text.starts_with('{')) {
    throw InputError(file, "a header that does not begin with '{'", "a JSON object");
  }
  return raw;
}

std::int64_t SafetensorsBits(std::string_view dtype) {
  for (const auto& [name, bits] : kBits) {
    if (name == dtype) {
      return bits;
    }
  }
  return 0;
}

}  // namespace shardwright
