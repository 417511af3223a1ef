#include "models/loader.h"

#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/embedded.h"
#include "core/error.h"
#include "core/files.h"
#include "core/ranges.h"
#include "models/checkpoint_folder.h"
#include "models/internal/hf_config.h"
#include "models/internal/model_file.h"
#include "models/internal/zoo_names.h"
#include "models/model_types.h"
#include "models/model_zoo.h"

namespace shardwright {
namespace {

// The rows of a model type table. Checks the header of the file.
JsonValue TypesOf(const JsonValue& file) {
  constexpr std::int64_t kVersion = 1;
  file.AllowOnly({"format", "version", "types"});
  (void)file.At("format").AsChoice({"shardwright-model-types"});
  if (file.At("version").AsInt() != kVersion) {
    throw file.At("version").Error("version 1, the only one that this program knows");
  }
  return file.At("types");
}

const JsonValue& BuiltinTypes() {
  static const JsonValue types = [] {
    const EmbeddedFile& file = EmbeddedModelTypes().front();
    return TypesOf(JsonValue::Parse(file.text, std::string(file.path)));
  }();
  return types;
}

// The row of a built-in type, or nothing. The table has each between lines of its own, so that one
// row is parsed and not all.
std::optional<JsonValue> FindBuiltin(const std::string& name) {
  const EmbeddedFile& file = EmbeddedModelTypes().front();
  const std::string key = "\n    \"" + name + "\": ";
  const std::size_t begin = file.text.find(key);
  if (begin == std::string_view::npos) {
    return std::nullopt;
  }
  std::string_view row = file.text.substr(begin + key.size());
  row = row.substr(0, std::min(row.find("\n    \""), row.find("\n  }")));
  row = row.substr(0, row.rfind('}') + 1);
  return JsonValue::Parse(row, std::string(file.path) + ", " + name);
}

// The row of `type`: the user's file first, then the built-in table.
JsonValue FindRow(const JsonValue& type, const std::optional<JsonValue>& extra) {
  const std::string name = type.AsString();
  std::optional<JsonValue> row = extra ? extra->Find(name) : std::nullopt;
  row = row ? row : FindBuiltin(name);
  if (row) {
    return *row;
  }
  std::vector<std::string> known = BuiltinTypes().Keys();
  if (extra) {
    const std::vector<std::string> more = extra->Keys();
    known.insert(known.end(), more.begin(), more.end());
    SortAll(known);
  }
  throw type.Error("one of " + std::to_string(known.size()) +
                       " known types, or the model.json that \"shardwright export " +
                       type.path().file() +
                       " --seq 2048 -o model.json\" writes (of images: --image 224)",
                   DidYouMean(name, known));
}

Model BuildFromConfig(const JsonValue& config, const JsonValue& row, const std::string& type,
                      const std::string& name, const LoadOptions& options) {
  const HfConfig reader(config, row.At("defaults"));
  Model model =
      BuildTemplate({.config = reader, .row = row, .options = options, .name = name, .type = type});
  model.initializer = ReadInitializer(reader);
  for (std::string& warning : reader.Misspelt()) {
    model.warnings.push_back(std::move(warning));
  }
  return model;
}

Model ModelFromConfig(const JsonValue& config, const std::string& name,
                      const LoadOptions& options) {
  std::optional<JsonValue> extra;
  if (!options.model_types_file.empty()) {
    extra = TypesOf(JsonValue::ReadFile(options.model_types_file));
  }
  const JsonValue type = config.At("model_type");
  const JsonValue row = FindRow(type, extra);
  if (const std::optional<JsonValue> text_type = row.Find("text_type")) {
    // A vision-language model: the language model is nested.
    Model model = BuildFromConfig(config.At("text_config"), FindRow(*text_type, extra),
                                  text_type->AsString(), name, options);
    model.warnings.push_back(config.path().str() + ": " + type.AsString() +
                             " also has a vision tower; only its language model is built, under "
                             "the names of the text-only class");
    return model;
  }
  return BuildFromConfig(config, row, type.AsString(), name, options);
}

const EmbeddedFile* FindInZoo(std::string_view name) {
  const std::span<const EmbeddedFile> zoo = EmbeddedModelZoo();
  const auto found = FindIn(zoo, name, &EmbeddedFile::name);
  return found == zoo.end() ? nullptr : &*found;
}

bool IsPath(std::string_view spec) {
  return spec.find('/') != std::string_view::npos || spec.ends_with(".json") ||
         spec.ends_with(".safetensors");
}

// "ORG/NAME" as the Hugging Face hub writes it.
bool LooksLikeHubId(std::string_view spec) {
  const std::size_t slash = spec.find('/');
  const auto is_allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.' || c == '/';
  };
  return slash != std::string_view::npos && slash > 0 && slash + 1 < spec.size() &&
         spec.find('/', slash + 1) == std::string_view::npos && spec.front() != '.' &&
         !spec.ends_with(".json") && AllOf(spec, is_allowed);
}

// "llama-3" and "8b" of "llama-3-8b-instruct"; no size where no part is a number of parameters.
std::pair<std::string, std::string> FamilyAndSize(const std::string& name) {
  static constexpr std::string_view kDigits = "0123456789.";
  for (std::size_t begin = name.find('-'); begin != std::string::npos;
       begin = name.find('-', begin + 1)) {
    const std::size_t end = name.find_first_not_of(kDigits, begin + 1);
    const bool is_size = end != std::string::npos && end > begin + 1 &&
                         (name[end] == 'b' || name[end] == 'm') &&
                         (end + 1 == name.size() || name[end + 1] == '-');
    if (is_size) {
      return {name.substr(0, begin), name.substr(begin + 1, end - begin)};
    }
  }
  return {name, ""};
}

// Another size of the same family, or another spelling of it: no other generation.
bool IsNear(const std::string& spelled, const std::string& known) {
  const auto [family, size] = FamilyAndSize(spelled);
  const auto [other, its] = FamilyAndSize(known);
  const auto digits = [](std::string text) {
    std::erase_if(text, [](char c) { return c < '0' || c > '9'; });
    return text;
  };
  const auto sees = [](const std::string& text) { return text.ends_with("-vl"); };
  return size.empty() || family == other ||
         (size == its && digits(family) == digits(other) && sees(family) == sees(other));
}

[[noreturn]] void FailUnknown(const std::string& spec) {
  const std::string found = "\"" + spec + "\"";
  if (LooksLikeHubId(spec)) {
    const std::string folder = spec.substr(spec.find('/') + 1);
    throw InputError("model", found + ", which is no file here but looks like a hub id",
                     "a local file or a zoo name",
                     "download its configuration with: hf download " + spec +
                         " config.json --local-dir " + folder);
  }
  std::vector<std::string> zoo = ZooNames();
  std::erase_if(zoo, [&](const std::string& name) { return !IsNear(spec, name); });
  // "gpt2-small" begins with "gpt2".
  const auto whole =
      FindIf(zoo, [&](const std::string& name) { return spec.starts_with(name + "-"); });
  const std::string hint =
      whole == zoo.end() ? DidYouMean(spec, zoo) : "did you mean \"" + *whole + "\"?";
  throw InputError("model", found,
                   "a zoo name (shardwright list models), a config.json, a folder with one, or a "
                   "model.json",
                   hint);
}

// The folder of a checkpoint that `spec` names, by itself or by a file of weights in it.
std::optional<std::filesystem::path> CheckpointFolder(const std::string& spec) {
  const std::filesystem::path path(spec);
  if (IsFolder(path)) {
    return path;
  }
  const bool weights = spec.ends_with(".safetensors") || spec.ends_with(".safetensors.index.json");
  if (weights && Exists(path)) {
    return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  }
  return std::nullopt;
}

// The file that `spec` names as a path, if there is one.
std::optional<std::filesystem::path> FindFile(const std::string& spec) {
  const std::filesystem::path path(spec);
  if (const std::optional<std::filesystem::path> folder = CheckpointFolder(spec)) {
    if (HoldsCheckpoint(folder->string()) && !Exists(*folder / "config.json")) {
      throw InputError(folder->string(), "a folder without config.json",
                       "the configuration beside the weights, whose files do not name the model's "
                       "class");
    }
    return *folder / "config.json";
  }
  return Exists(path) ? std::optional(path) : std::nullopt;
}

Model LoadFile(const std::filesystem::path& path, const LoadOptions& options) {
  std::string name = path.stem().string();
  if (path.filename() == "config.json" || path.filename() == "model.json") {
    // The folder is named after the model, the file in it is not.
    std::error_code error;
    const auto folder = std::filesystem::weakly_canonical(path, error).parent_path().filename();
    name = folder.empty() ? name : folder.string();
  }
  return ModelFromJson(JsonValue::ReadFile(path.string()), name, options);
}

// A few of the differences as warnings; `shardwright inspect` lists all.
void WarnAboutCheckpoint(const std::string& folder, Model* model) {
  constexpr std::size_t kShown = 3;
  if (!HoldsCheckpoint(folder)) {
    return;
  }
  const std::vector<std::string> found = CheckpointDifferences(*model, ReadCheckpoint(folder));
  for (std::size_t i = 0; i < std::min(kShown, found.size()); ++i) {
    model->warnings.push_back(folder + ": " + found[i]);
  }
  if (found.size() > kShown) {
    model->warnings.push_back(folder + ": " + std::to_string(found.size() - kShown) +
                              " more differences between checkpoint and configuration: "
                              "shardwright inspect " +
                              folder);
  }
}

JsonValue ParseZoo(const EmbeddedFile& file) {
  return JsonValue::Parse(file.text, std::string(file.path));
}

}  // namespace

Model ModelFromJson(const JsonValue& json, const std::string& name, const LoadOptions& options) {
  if (json.IsObject() && json.Find("format")) {
    return ReadModelFile(json, name, options);
  }
  return ModelFromConfig(json, name, options);
}

Model LoadModel(const std::string& spec, const LoadOptions& options) {
  const bool is_path = IsPath(spec);
  const auto from_zoo = [&](const EmbeddedFile& zoo) {
    return ModelFromJson(ParseZoo(zoo), std::string(zoo.name), options);
  };
  if (const EmbeddedFile* zoo = is_path ? nullptr : FindInZoo(spec)) {
    return from_zoo(*zoo);
  }
  if (const std::optional<std::filesystem::path> file = FindFile(spec)) {
    Model model = LoadFile(*file, options);
    if (const std::optional<std::filesystem::path> folder = CheckpointFolder(spec)) {
      WarnAboutCheckpoint(folder->string(), &model);
    }
    return model;
  }
  if (spec.ends_with(".json")) {
    throw InputError(spec, "no such file", "a config.json or a model.json");
  }
  if (!is_path || LooksLikeHubId(spec)) {
    if (const EmbeddedFile* zoo = FindInZoo(ZooModelOf(spec))) {
      Model model = from_zoo(*zoo);
      model.warnings.push_back("model " + spec + " is taken as " + model.name + " of the zoo");
      return model;
    }
  }
  FailUnknown(spec);
}

std::string ModelFile(const std::string& spec) {
  const bool is_path = IsPath(spec);
  if (!is_path && FindInZoo(spec) != nullptr) {
    return "";
  }
  const std::optional<std::filesystem::path> file = FindFile(spec);
  return file ? file->string() : "";
}

std::string ZooModelOf(const std::string& name) {
  return internal::ZooNameOf(name, ZooNames());
}

std::vector<std::string> ZooNames() {
  return NamesOf(EmbeddedModelZoo());
}

std::vector<ZooEntry> ListModels() {
  std::vector<ZooEntry> entries;
  for (const EmbeddedFile& file : EmbeddedModelZoo()) {
    const JsonValue json = ParseZoo(file);
    const Model model = ModelFromJson(json, std::string(file.name));
    const std::optional<JsonValue> source = json.Find("_source");
    entries.push_back({.name = std::string(file.name),
                       .type = model.type,
                       .parameters = CountParameters(model),
                       .source = source ? source->AsString() : std::string()});
  }
  SortBy(entries, &ZooEntry::name);
  return entries;
}

}  // namespace shardwright
