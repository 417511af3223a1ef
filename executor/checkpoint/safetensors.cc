#include "executor/checkpoint/safetensors.h"

#include <array>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "models/safetensors_text.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;

constexpr std::pair<DType, const char*> kNames[] = {
    {DType::kFp32, "F32"},    {DType::kBf16, "BF16"}, {DType::kFp16, "F16"},
    {DType::kFp8, "F8_E4M3"}, {DType::kFp64, "F64"},  {DType::kInt64, "I64"},
    {DType::kInt32, "I32"},   {DType::kUint8, "U8"},  {DType::kBool, "BOOL"}};

SafetensorsEntry ReadEntry(const std::string& name, const JsonValue& json) {
  json.AllowOnly({"dtype", "shape", "data_offsets"});
  SafetensorsEntry entry{.name = name};
  const JsonValue dtype = json.At("dtype");
  if (!FromSafetensorsName(dtype.AsString(), entry.dtype)) {
    throw dtype.Error("one of F32, BF16, F16, F8_E4M3, F64, I64, I32, U8, BOOL");
  }
  const JsonValue shape = json.At("shape");
  std::int64_t bytes = SizeOf(entry.dtype);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t size = shape[d].AsInt(0, kMaxBytes);
    entry.shape.push_back(size);
    if (size > 0 && bytes > kMaxBytes / size) {
      throw shape.Error("a shape of at most 2^50 bytes");
    }
    bytes *= size;
  }
  const JsonValue offsets = json.At("data_offsets");
  if (offsets.size() != 2) {
    throw offsets.Error("two offsets");
  }
  entry.begin = offsets[0].AsInt(0, kMaxBytes);
  entry.end = offsets[1].AsInt(0, kMaxBytes);
  if (entry.end - entry.begin != bytes) {
    throw offsets.Error("offsets " + std::to_string(bytes) + " apart, as dtype and shape need");
  }
  return entry;
}

}  // namespace

std::int64_t SafetensorsEntry::Elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

const char* SafetensorsName(DType dtype) {
  for (const auto& [type, name] : kNames) {
    if (type == dtype) {
      return name;
    }
  }
  SW_CHECK(false, "a dtype without a safetensors name");
  return "";
}

bool FromSafetensorsName(const std::string& name, DType& dtype) {
  for (const auto& [type, candidate] : kNames) {
    if (name == candidate) {
      dtype = type;
      return true;
    }
  }
  return false;
}

SafetensorsHeader ReadSafetensorsHeader(const std::string& file) {
  const SafetensorsText raw = ReadSafetensorsText(file);
  SafetensorsHeader header;
  header.data_begin = 8 + static_cast<std::int64_t>(raw.text.size());
  const JsonValue json = JsonValue::Parse(raw.text, file);
  for (const std::string& name : json.Keys()) {
    const JsonValue value = json.At(name);
    if (name != kSafetensorsMetadata) {
      header.entries.push_back(ReadEntry(name, value));
      continue;
    }
    for (const std::string& key : value.Keys()) {
      header.metadata[key] = value.At(key).AsString();
    }
  }
  // By bytes; entries without bytes stand before what begins at the same place.
  StableSort(header.entries, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::int64_t position = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != position) {
      throw InputError(
          file + ": " + entry.name + ".data_offsets[0]", std::to_string(entry.begin),
          std::to_string(position) + ", since tensors leave no holes and do not overlap");
    }
    position = entry.end;
  }
  if (header.data_begin + position != raw.file_size) {
    throw InputError(file, std::to_string(raw.file_size) + " bytes",
                     std::to_string(header.data_begin + position) + ", as its header says");
  }
  return header;
}

std::vector<SafetensorsEntry> WriteSafetensorsHeader(
    CheckpointFile& out, std::vector<SafetensorsEntry> entries,
    const std::map<std::string, std::string>& metadata) {
  SortAll(entries, [](const auto& a, const auto& b) {
    return std::pair(-SizeOf(a.dtype), a.name) < std::pair(-SizeOf(b.dtype), b.name);
  });
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    json[std::string(kSafetensorsMetadata)] = metadata;
  }
  std::int64_t position = 0;
  for (SafetensorsEntry& entry : entries) {
    entry.begin = position;
    entry.end = position + entry.Elements() * SizeOf(entry.dtype);
    position = entry.end;
    json[entry.name] = {{"dtype", SafetensorsName(entry.dtype)},
                        {"shape", entry.shape},
                        {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.resize(static_cast<std::size_t>(RoundUp(static_cast<std::int64_t>(text.size()), 8)), ' ');
  std::array<unsigned char, 8> length{};
  for (std::size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  }
  out.Write(length.data(), 8);
  out.Write(text.data(), static_cast<std::int64_t>(text.size()));
  return entries;
}

}  // namespace shardwright
