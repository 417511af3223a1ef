#include <array>
#include <optional>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/first_weights.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/import.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/checkpoint/safetensors.h"
#include "models/loader.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

Json InspectionJson(const Checkpoint& checkpoint) {
  const Manifest& m = checkpoint.manifest();
  Json json = ReportHead("shardwright-checkpoint-inspection");
  json["folder"] = checkpoint.folder();
  json["model"] = m.model;
  json["dialect"] = m.dialect;
  json["shard_size"] = m.shard_size;
  json["replicate_size"] = m.replicate_size;
  json["optimizer"] = NameIn(kOptimizerNames, m.optimizer);
  json["step"] = m.step;
  json["tensors"] = Mapped<Json>(m.tensors, [&](const SavedTensor& tensor) -> Json {
    return {
        {"name", tensor.name}, {"dtype", SafetensorsName(tensor.dtype)}, {"shape", tensor.shape}};
  });
  json["files"] = Mapped<Json>(m.files, [&](const SavedFile& file) -> Json {
    return {{"name", file.name}, {"size_bytes", file.bytes}};
  });
  return json;
}

std::string InspectionText(const Checkpoint& checkpoint) {
  const Manifest& m = checkpoint.manifest();
  std::int64_t parameters = 0, elements = 0, states = 0, buffers = 0;
  Bytes bytes{0};
  for (const SavedTensor& tensor : m.tensors) {
    parameters += tensor.kind == TensorKind::kParameter ? 1 : 0;
    elements += tensor.kind == TensorKind::kParameter ? tensor.Elements() : 0;
    states += tensor.kind == TensorKind::kState ? 1 : 0;
    buffers += tensor.kind == TensorKind::kBuffer ? 1 : 0;
  }
  for (const SavedFile& file : m.files) {
    bytes += Bytes(file.bytes);
  }
  Table table({kLeft, kLeft});
  table.Row({"model", m.model});
  table.Row({"steps done", WithCommas(m.step)});
  table.Row({"saved by", m.dialect + ", shard size " + std::to_string(m.shard_size) +
                             ", replicas " + std::to_string(m.replicate_size)});
  table.Row({"optimizer", std::string(NameIn(kOptimizerNames, m.optimizer))});
  table.Row({"parameters", WithCommas(elements) + " in " + WithCommas(parameters) + " tensors"});
  table.Row({"optimizer states", WithCommas(states) + " tensors"});
  table.Row({"running statistics", WithCommas(buffers) + " tensors"});
  table.Row({"files", WithCommas(static_cast<std::int64_t>(m.files.size())) + ", " + Format(bytes) +
                          ", checksums right"});
  return checkpoint.folder() + "\n" + table.Text(2);
}

std::optional<DType> ReadDType(const Arguments& arguments) {
  std::optional<DType> dtype;
  arguments.Set("--dtype", dtype, [](const Flag& flag) {
    return static_cast<DType>(ReadChoice(flag, kTrainingDTypeNames));
  });
  return dtype;
}

enum class Action : std::uint8_t { kInspect, kExport, kImport };

// What of the flags goes with the action.
void CheckFlags(const Arguments& arguments, Action action) {
  const auto refuse = [&](bool allowed, const char* flag, const char* whose) {
    if (!allowed && arguments.Get(flag).is_given()) {
      throw UsageError(std::string(flag) + " is of checkpoint " + whose);
    }
  };
  refuse(action != Action::kInspect, "--output", "export and import");
  refuse(action == Action::kExport, "--dtype", "export");
  refuse(action == Action::kExport, "--transformers", "export");
  refuse(action == Action::kExport, "--adapters", "export");
  refuse(action == Action::kImport, "--model", "import");
  if (action != Action::kInspect && !arguments.Get("--output").is_given()) {
    throw UsageError(action == Action::kExport ? "checkpoint export needs --output FILE"
                                               : "checkpoint import needs --output FOLDER");
  }
}

int RunCheckpointImport(const Arguments& arguments) {
  const std::string from = arguments.Get("FOLDER").text;
  std::string spec = from;
  arguments.SetText("--model", spec);
  const Model model = LoadModel(spec);
  const HubWeights weights(from, model);
  const Checkpoint checkpoint(ImportWeights(weights, model, arguments.Get("--output").text));
  WarnOfUnused(from, weights);
  arguments.Print(arguments.IsJson() ? InspectionJson(checkpoint).dump(2) + "\n"
                                     : InspectionText(checkpoint));
  return kExitOk;
}

}  // namespace

int CheckpointCommand(const Arguments& arguments) {
  static constexpr std::array<std::string_view, 3> kActions = {"inspect", "export", "import"};
  const auto action = static_cast<Action>(ReadChoice(arguments.Get("ACTION"), kActions));
  CheckFlags(arguments, action);
  if (action == Action::kImport) {
    return RunCheckpointImport(arguments);
  }
  const bool exports = action == Action::kExport;
  const Flag output = arguments.Get("--output");
  ExportOptions options{.dtype = ReadDType(arguments)};
  arguments.SetChoice("--transformers", kHubNamesNames, options.names);
  static constexpr std::array<std::string_view, 2> kAdapters = {"keep", "merge"};
  std::size_t adapters = 0;
  arguments.SetChoice("--adapters", kAdapters, adapters);
  options.merges_adapters = adapters == 1;
  const std::string given = arguments.Get("FOLDER").text;
  const std::string folder = FindLatestCheckpoint(given);
  if (folder.empty()) {
    throw InputError(given, "no finished checkpoint", "a checkpoint or a folder of checkpoints");
  }
  std::optional<Checkpoint> opened;
  OpenOrOfferOlder(folder, "", [&] { opened.emplace(folder).Verify(); });
  const Checkpoint& checkpoint = *opened;
  if (exports) {
    ExportCheckpoint(checkpoint, output.text, options);
  }
  if (arguments.IsJson()) {
    arguments.Print(InspectionJson(checkpoint).dump(2) + "\n");
  } else if (!exports) {
    arguments.Print(InspectionText(checkpoint));
  }
  return kExitOk;
}

}  // namespace shardwright
