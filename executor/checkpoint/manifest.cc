#include "executor/checkpoint/manifest.h"

#include <array>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "executor/checkpoint/output_file.h"
#include "executor/checkpoint/safetensors.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 3> kKindNames = {"parameter", "state", "buffer"};
constexpr std::string_view kChecksumField = ",\n \"manifest_crc32\": \"";

std::uint32_t ReadHex(const JsonValue& json) {
  const std::string text = json.AsString();
  if (text.size() != 8 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw json.Error("eight hexadecimal digits");
  }
  return static_cast<std::uint32_t>(std::stoul(text, nullptr, 16));
}

Json TensorsJson(const Manifest& manifest) {
  return Mapped<Json>(manifest.tensors, [&](const SavedTensor& tensor) -> Json {
    return {{"name", tensor.name},
            {"kind", NameIn(kKindNames, tensor.kind)},
            {"dtype", SafetensorsName(tensor.dtype)},
            {"shape", tensor.shape}};
  });
}

Json FilesJson(const Manifest& manifest) {
  Json files = Json::array();
  for (const SavedFile& file : manifest.files) {
    Json stretches = Mapped<Json>(file.stretches, [&](const SavedStretch& stretch) -> Json {
      return {{"tensor", stretch.tensor}, {"begin", stretch.begin}, {"count", stretch.count}};
    });
    files.push_back({{"name", file.name},
                     {"size_bytes", file.bytes},
                     {"crc32", ChecksumText(file.crc)},
                     {"stretches", std::move(stretches)}});
  }
  return files;
}

SavedTensor ReadTensor(const JsonValue& json) {
  json.AllowOnly({"name", "kind", "dtype", "shape"});
  SavedTensor tensor;
  tensor.name = json.At("name").AsString();
  tensor.kind = static_cast<TensorKind>(json.At("kind").AsChoice(kKindNames));
  if (!FromSafetensorsName(json.At("dtype").AsString(), tensor.dtype)) {
    throw json.At("dtype").Error("a dtype such as F32");
  }
  const JsonValue shape = json.At("shape");
  std::int64_t elements = 1;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t size = shape[d].AsInt();
    tensor.shape.push_back(size);
    if (size > 0 && elements > JsonValue::kMaxCount / size) {
      throw shape.Error("at most 2^50 elements");
    }
    elements *= size;
  }
  return tensor;
}

SavedFile ReadFileEntry(const JsonValue& json) {
  json.AllowOnly({"name", "size_bytes", "crc32", "stretches"});
  SavedFile file;
  file.name = json.At("name").AsString();
  // The file lies in the checkpoint's folder, whatever the manifest says.
  if (file.name.empty() || file.name.find('/') != std::string::npos || file.name == "..") {
    throw json.At("name").Error("a file name without a folder");
  }
  file.bytes = json.At("size_bytes").AsInt();
  file.crc = ReadHex(json.At("crc32"));
  const JsonValue stretches = json.At("stretches");
  for (std::size_t i = 0; i < stretches.size(); ++i) {
    stretches[i].AllowOnly({"tensor", "begin", "count"});
    file.stretches.push_back({stretches[i].At("tensor").AsString(),
                              stretches[i].At("begin").AsInt(), stretches[i].At("count").AsInt()});
  }
  return file;
}

void CheckChecksum(std::string_view text, const JsonValue& json, const std::string& file) {
  const std::size_t end = text.rfind(kChecksumField);
  const std::uint32_t expected = ReadHex(json.At("manifest_crc32"));
  const std::uint32_t found = end == std::string_view::npos
                                  ? ~expected
                                  : Crc32(0, text.data(), static_cast<std::int64_t>(end));
  if (found != expected) {
    throw InputError(file, "CRC-32 " + ChecksumText(found),
                     ChecksumText(expected) + ", as its last field says",
                     "the manifest is damaged");
  }
}

Sampler ReadSampler(const JsonValue& json) {
  json.AllowOnly({"dataset_size", "global_batch", "seed", "shuffle", "tail"});
  Sampler sampler;
  sampler.dataset_size = json.At("dataset_size").AsInt();
  sampler.global_batch = json.At("global_batch").AsInt(1);
  sampler.seed = static_cast<std::uint64_t>(json.At("seed").AsInt(0, std::int64_t{1} << 60));
  sampler.shuffle = json.At("shuffle").AsBool();
  sampler.tail = static_cast<EpochTail>(json.At("tail").AsChoice(kTailNames));
  return sampler;
}

}  // namespace

std::string ChecksumText(std::uint32_t crc) {
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", crc);
  return text.data();
}

std::int64_t SavedTensor::Elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::string ManifestJson(const Manifest& manifest) {
  Json json;
  json["format"] = "shardwright-checkpoint";
  json["version"] = 1;
  json["run"] = manifest.run;
  json["settings"] = Json::object();
  for (const auto& [name, value] : manifest.settings) {
    json["settings"][name] = value;
  }
  json["model"] = manifest.model;
  json["dialect"] = manifest.dialect;
  json["shard_size"] = manifest.shard_size;
  json["replicate_size"] = manifest.replicate_size;
  json["optimizer"] = NameIn(kOptimizerNames, manifest.optimizer);
  json["step"] = manifest.step;
  json["update"] = manifest.update;
  json["loss_scaler"] = {{"scale", manifest.loss_scaler.scale},
                         {"good_steps", manifest.loss_scaler.good_steps}};
  json["sampler"] = {{"dataset_size", manifest.sampler.dataset_size},
                     {"global_batch", manifest.sampler.global_batch},
                     {"seed", manifest.sampler.seed},
                     {"shuffle", manifest.sampler.shuffle},
                     {"tail", NameIn(kTailNames, manifest.sampler.tail)}};
  json["tensors"] = TensorsJson(manifest);
  json["aliases"] = Mapped<Json>(manifest.aliases, [&](const SavedAlias& alias) -> Json {
    return {{"name", alias.name}, {"target", alias.target}};
  });
  json["files"] = FilesJson(manifest);
  std::string text = json.dump(1);
  text.resize(text.size() - 2);  // "\n}"
  const std::uint32_t crc = Crc32(0, text.data(), static_cast<std::int64_t>(text.size()));
  return text + std::string(kChecksumField) + ChecksumText(crc) + "\"\n}\n";
}

Manifest ParseManifest(std::string_view text, const std::string& file) {
  const JsonValue json = JsonValue::Parse(text, file);
  json.AllowOnly({"format", "version", "run", "settings", "model", "dialect", "shard_size",
                  "replicate_size", "optimizer", "step", "update", "loss_scaler", "sampler",
                  "tensors", "aliases", "files", "manifest_crc32"});
  static constexpr std::array<std::string_view, 1> kFormats = {"shardwright-checkpoint"};
  (void)json.At("format").AsChoice(kFormats);
  (void)json.At("version").AsInt(1, 1);
  CheckChecksum(text, json, file);
  Manifest manifest;
  if (const std::optional<JsonValue> run = json.Find("run")) {
    manifest.run = run->AsString();
  }
  if (const std::optional<JsonValue> settings = json.Find("settings")) {
    for (const std::string& name : settings->Keys()) {
      manifest.settings.emplace_back(name, settings->At(name).AsString());
    }
  }
  manifest.model = json.At("model").AsString();
  manifest.dialect = json.At("dialect").AsString();
  manifest.shard_size = json.At("shard_size").AsInt(1);
  manifest.replicate_size = json.At("replicate_size").AsInt(1);
  manifest.optimizer = static_cast<OptimizerKind>(json.At("optimizer").AsChoice(kOptimizerNames));
  manifest.step = json.At("step").AsInt();
  manifest.update = json.At("update").AsInt();
  manifest.loss_scaler.scale = json.At("loss_scaler").At("scale").AsDouble();
  manifest.loss_scaler.good_steps = json.At("loss_scaler").At("good_steps").AsInt();
  manifest.sampler = ReadSampler(json.At("sampler"));
  const JsonValue tensors = json.At("tensors");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    manifest.tensors.push_back(ReadTensor(tensors[i]));
  }
  const JsonValue aliases = json.At("aliases");
  for (std::size_t i = 0; i < aliases.size(); ++i) {
    manifest.aliases.push_back(
        {aliases[i].At("name").AsString(), aliases[i].At("target").AsString()});
  }
  const JsonValue files = json.At("files");
  for (std::size_t i = 0; i < files.size(); ++i) {
    manifest.files.push_back(ReadFileEntry(files[i]));
  }
  return manifest;
}

}  // namespace shardwright
