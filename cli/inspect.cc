#include <filesystem>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/module_tree.h"
#include "cli/pipeline_print.h"
#include "cli/planned_units.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text.h"
#include "models/checkpoint_folder.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "models/totals.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "schedule/plan_names.h"
#include "schedule/print.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "traces/check.h"
#include "traces/chrome_read.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

struct InspectOptions {
  std::string target;                 // a file, a folder, "-" or a name
  std::function<std::string()> read;  // what "-" is
  bool json = false;
  bool program = false;              // print the whole program of a plan
  std::string trace;                 // of the plan that `target` is; empty: none
  std::int64_t sequence_length = 0;  // of a model; 0: its default
};

// Both forms of a result; the other one stays empty.
struct Report {
  std::string text;
  Json json;
  int exit_code = kExitOk;
};

Json Header(const char* kind) {
  Json json = ReportHead("shardwright-inspection");
  json["kind"] = kind;
  return json;
}

LoadOptions ModelOptions(const InspectOptions& options) {
  LoadOptions load;
  load.sequence_length = options.sequence_length;
  return load;
}

// What PyTorch would multiply and keep in a step without sharding, by kernel set and dtype.
Json TotalsOfSets(const Model& model) {
  Json rows = Json::array();
  for (const char* set : {"torch-eager", "hf-trainer"}) {
    for (const DType compute : {DType::kBf16, DType::kFp32}) {
      for (const std::int64_t batch : {1, 2}) {
        const ModelTotals totals =
            TotalsOf(model, batch, compute, FindKernelSet(set, "kernel set"));
        rows.push_back({{"kernel_set", set},
                        {"dtype", compute == DType::kBf16 ? "bf16" : "fp32"},
                        {"batch", batch},
                        {"forward_flops", totals.forward.value},
                        {"backward_flops", totals.backward.value},
                        {"saved_bytes", totals.saved.value}});
      }
    }
  }
  return rows;
}

// As in a model.json: a list only where there are several.
Json BlockClasses(const Model& model) {
  if (model.block_classes.size() > 1) {
    return Json(model.block_classes);
  }
  return Json(Listed(model.block_classes));
}

Report InspectModel(const Model& model, bool as_json) {
  for (const std::string& warning : model.warnings) {
    Warn(warning);
  }
  const std::int64_t parameters = CountParameters(model);
  const double flops = ConventionFlopsPerSample(model).value;
  if (!as_json) {
    Table table({kLeft, kLeft});
    table.Row({"type", model.type});
    table.Row({"block class", model.block_classes.empty() ? "none" : Listed(model.block_classes)});
    table.Row({"parameters", WithCommas(parameters)});
    table.Row({"tokens per sample", WithCommas(model.tokens_per_sample)});
    table.Row({"training FLOPs per sample", WithCommas(static_cast<std::int64_t>(flops))});
    table.Row({"ops", WithCommas(static_cast<std::int64_t>(model.ops.size()))});
    return {.text = PrintableLine(model.name) + "\n" + table.Text(2) + "\n" +
                    ModuleTree(model, PlainNotes(model)),
            .json = {}};
  }
  Json json = Header("model");
  json["name"] = model.name;
  json["type"] = model.type;
  json["block_class"] = BlockClasses(model);
  json["parameter_count"] = parameters;
  json["trainable_parameter_count"] = CountParameters(model, true);
  json["sequence_length"] = model.sequence_length;
  json["tokens_per_sample"] = model.tokens_per_sample;
  json["convention_flops_per_sample"] = flops;
  json["ops"] = model.ops.size();
  json["one_gpu"] = TotalsOfSets(model);
  json["parameters"] = Json::array();
  for (const Parameter& param : model.params) {
    const bool is_tied = param.tied_to.valid();
    json["parameters"].push_back(
        {{"fqn", param.fqn},
         {"shape", param.shape},
         {"trainable", param.trainable},
         {"tied_to", is_tied ? Json(model.params[param.tied_to.value].fqn) : Json(nullptr)}});
  }
  return {.text = "", .json = std::move(json)};
}

// A checkpoint: the model of its config.json, and how the files of weights differ from it.
Report InspectCheckpoint(const std::string& folder, const InspectOptions& options) {
  const std::string config = (std::filesystem::path(folder) / "config.json").string();
  const Model model = LoadModel(config, ModelOptions(options));
  const HubCheckpoint checkpoint = ReadCheckpoint(folder);
  const std::vector<std::string> differences = CheckpointDifferences(model, checkpoint);
  Report report = InspectModel(model, options.json);
  if (options.json) {
    report.json["checkpoint"] = {{"tensors", checkpoint.tensors.size()},
                                 {"files", checkpoint.file_count},
                                 {"absent_files", checkpoint.absent_files},
                                 {"differences", differences}};
    return report;
  }
  report.text += "\ncheckpoint: " + Describe(checkpoint) + "\n";
  for (const std::string& difference : differences) {
    report.text += "  " + difference + "\n";
  }
  report.text += differences.empty() ? "  names and shapes are those of config.json\n" : "";
  return report;
}

Report InspectCluster(const Cluster& cluster, bool as_json) {
  if (as_json) {
    Json json = Header("cluster");
    json["cluster"] = Json::parse(ClusterJson(cluster));
    return {.text = "", .json = std::move(json)};
  }
  Table table({kLeft, kLeft});
  table.Row({"nodes", WithCommas(cluster.node_count)});
  table.Row({"GPUs", WithCommas(cluster.RankCount()) + " = " + WithCommas(cluster.gpus_per_node) +
                         " per node"});
  table.Row({"GPU", cluster.gpu.full_name});
  table.Row({"GPU memory", Format(cluster.gpu.memory.value) + ", usable " +
                               Format(cluster.gpu.usable_memory.value)});
  table.Row({"GPU memory bandwidth", Format(cluster.gpu.memory_bandwidth.value)});
  if (const std::optional<FlopsPerSecond> peak = PeakFlops(cluster.gpu, MathType::kBf16)) {
    table.Row({"bf16 dense peak", Format(*peak)});
  }
  table.Row({"host memory per node", Format(cluster.node.host_memory)});
  table.Row({"components per node",
             WithCommas(static_cast<std::int64_t>(cluster.node.components.size())) + ", " +
                 WithCommas(static_cast<std::int64_t>(cluster.node.links.size())) + " links"});
  table.Row({"network", cluster.network});
  if (cluster.SharedCores() > 0) {
    table.Row({cluster.machine_cores > 0 ? "cores of the machine of all nodes" : "cores per node",
               CoresText(cluster.SharedCores())});
  }
  for (const FabricLevel& level : cluster.fabric) {
    table.Row({"fabric level " + level.name,
               level.group_nodes == 0 ? std::string("all nodes")
                                      : WithCommas(level.group_nodes) +
                                            " nodes, 1:" + Fixed(level.oversubscription, "%g") +
                                            " towards the outside"});
  }
  return {.text = PrintableLine(cluster.name + ": " + cluster.description) + "\n" + table.Text(2),
          .json = {}};
}

Report InspectProfile(const Profile& profile, bool as_json) {
  Json json = Header("profile");
  json["profile"] = Json::parse(ProfileJson(profile));
  if (as_json) {
    return {.text = "", .json = std::move(json)};
  }
  return {.text = PrintableLine(profile.name + ": " + profile.description) + "\n" +
                  json["profile"].dump(2) + "\n",
          .json = {}};
}

Json UnitsJson(const PlanFile& file, const Program& program) {
  Json units = Json::array();
  const std::vector<UnitInfo> infos = PlannedUnits(file.plan, program);
  for (std::size_t u = 0; u < file.plan.units.size(); ++u) {
    const UnitPlan& unit = file.plan.units[u];
    const UnitInfo& info = infos[u];
    const bool is_group = unit.reshard.kind == Reshard::Kind::kToGroup;
    units.push_back({{"name", unit.name},
                     {"modules", unit.modules},
                     {"reshard", is_group ? Json(unit.reshard.group)
                                          : Json(NameIn(kReshardNames, unit.reshard.kind))},
                     {"elements", info.elements},
                     {"padded_elements", info.padded_elements},
                     {"shard_elements", info.shard_elements}});
  }
  return units;
}

// What a trace of the plan says, and whether its program could have produced it.
Report InspectTrace(const PlanFile& file, const InspectOptions& options) {
  const Program program = LowerAndVerify(file);
  const Trace trace = ReadChromeTrace(options.trace, program);
  const std::vector<std::string> findings = CheckTrace(program, trace);
  std::set<std::uint32_t> steps;
  std::set<Rank> ranks;
  for (const Span& span : trace.spans) {
    steps.insert(span.step);
    ranks.insert(span.rank);
  }
  Report report;
  report.exit_code = findings.empty() ? kExitOk : kExitNo;
  if (!options.json) {
    Table table({kLeft, kRight});
    table.Row({"steps", WithCommas(static_cast<std::int64_t>(steps.size()))});
    table.Row({"ranks", WithCommas(static_cast<std::int64_t>(ranks.size()))});
    table.Row({"spans", WithCommas(static_cast<std::int64_t>(trace.spans.size()))});
    table.Row({"memory samples", WithCommas(static_cast<std::int64_t>(trace.memory.size()))});
    report.text = options.trace + ", a trace of " + TitleOf(file) + "\n" + table.Text(2);
    for (const std::string& finding : findings) {
      report.text += "contradiction: " + finding + "\n";
    }
    report.text += findings.empty() ? "agrees with its program\n" : "";
    return report;
  }
  report.json = Header("trace");
  report.json["steps"] = steps.size();
  report.json["ranks"] = ranks.size();
  report.json["spans"] = trace.spans.size();
  report.json["memory_samples"] = trace.memory.size();
  report.json["contradictions"] = findings;
  return report;
}

Report InspectPlan(const PlanFile& file, const InspectOptions& options) {
  if (file.plan.pipeline_size > 1) {
    const std::string text = StagesText(file, options.program);
    Json json = Header("plan");
    AddMesh(file.plan, json);
    json["stages"]["text"] = text;
    return {.text = TitleOf(file) + "\n\n" + text, .json = std::move(json)};
  }
  const Program program = LowerAndVerify(file);
  if (!options.json) {
    std::string text = TitleOf(file) + "\n\n";
    if (options.program) {
      return {.text = text + Print(program), .json = {}};
    }
    text += ModuleTree(file.model, PlanNotes(file.model, file.plan, program));
    return {.text = text + "\n" + PrintSummary(program), .json = {}};
  }
  Json json = Header("plan");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["nodes"] = file.cluster.node_count;
  json["ranks"] = file.cluster.RankCount();
  json["profile"] = file.profile.name;
  json["kernel_set"] = file.kernels.name;
  AddMesh(file.plan, json);
  json["units"] = UnitsJson(file, program);
  json["program"] = {{"init_ops", program.init.size()},
                     {"warmup_ops", program.warmup.size()},
                     {"step_ops", program.step.size()},
                     {"buffers", program.buffers.size()}};
  if (options.program) {
    json["program"]["text"] = Print(program);
  }
  return {.text = "", .json = std::move(json)};
}

InputError TraceAlone(const std::string& name) {
  return {name, "a trace", "a trace together with its plan",
          "shardwright inspect PLAN --trace " + name};
}

// A document, by what it says it is; one without "format" is a Hugging Face configuration.
Report InspectDocument(const std::string& text, const std::string& name,
                       const InspectOptions& options) {
  const JsonValue json = JsonValue::Parse(text, name);
  const std::optional<JsonValue> format =
      json.IsObject() ? json.Find("format") : std::optional<JsonValue>();
  if (!options.trace.empty() && (!format || format->AsString() != "shardwright-plan")) {
    throw InputError(name, "a document that is no plan", "the plan of the trace with --trace");
  }
  if (!format && json.IsObject() && json.Find("traceEvents")) {
    throw TraceAlone(name);
  }
  if (!format) {
    if (json.IsObject() && (json.Find("model_type") || json.Find("text_config"))) {
      return InspectModel(ModelFromJson(json, name, ModelOptions(options)), options.json);
    }
    throw InputError(name, "a document without \"format\" or \"model_type\"",
                     "a plan, cluster, profile, model.json or Hugging Face config.json");
  }
  switch (format->AsChoice(
      {"shardwright-plan", "shardwright-cluster", "shardwright-profile", "shardwright-model"})) {
    case 0:
      return options.trace.empty() ? InspectPlan(ParsePlanFile(text, name), options)
                                   : InspectTrace(ParsePlanFile(text, name), options);
    case 1:
      return InspectCluster(ParseCluster(text, name), options.json);
    case 2:
      return InspectProfile(ParseProfile(text, name), options.json);
    default:
      return InspectModel(ModelFromJson(json, name, ModelOptions(options)), options.json);
  }
}

template <class List, class Name>
bool Contains(const List& list, std::string_view wanted, Name name, std::vector<std::string>& all) {
  bool found = false;
  for (const auto& entry : list) {
    all.emplace_back(name(entry));
    found = found || all.back() == wanted;
  }
  return found;
}

Report InspectName(const std::string& name, const InspectOptions& options) {
  const auto itself = [](const std::string& text) { return text; };
  const auto its_name = [](const auto& entry) { return entry.name; };
  std::vector<std::string> names;
  if (Contains(ZooNames(), name, itself, names)) {
    return InspectModel(LoadModel(name, ModelOptions(options)), options.json);
  }
  if (Contains(ListClusters(), name, its_name, names) || name.find(',') != std::string::npos) {
    return InspectCluster(LoadCluster(name), options.json);
  }
  if (Contains(ListProfiles(), name, itself, names)) {
    return InspectProfile(LoadProfile(name), options.json);
  }
  if (!ZooModelOf(name).empty()) {
    return InspectModel(LoadModel(name, ModelOptions(options)), options.json);
  }
  throw InputError("inspect", '"' + name + '"',
                   "a file, a folder with a config.json, or the name of a model, cluster or "
                   "profile",
                   DidYouMean(name, names));
}

Report Inspect(const InspectOptions& options) {
  const std::string& target = options.target;
  if (target == "-") {
    return InspectDocument(options.read(), "standard input", options);
  }
  const bool is_folder = IsFolder(target);
  if (is_folder || target.ends_with(".safetensors") ||
      target.ends_with(".safetensors.index.json")) {
    const std::filesystem::path path(target);
    const std::string parent = path.parent_path().string();
    const std::string folder = is_folder ? target : parent.empty() ? "." : parent;
    if (HoldsCheckpoint(folder)) {
      return InspectCheckpoint(folder, options);
    }
    return InspectModel(LoadModel(target, ModelOptions(options)), options.json);
  }
  if (target.ends_with(".gz")) {
    throw TraceAlone(target);
  }
  if (target.ends_with(".json") || Exists(target)) {
    return InspectDocument(ReadTextFile(target), target, options);
  }
  if (!options.trace.empty()) {
    throw InputError("inspect", '"' + target + '"', "the plan file of the trace with --trace");
  }
  return InspectName(target, options);
}

}  // namespace

int InspectCommand(const Arguments& arguments) {
  InspectOptions options;
  options.target = arguments.Get("TARGET").text;
  options.read = arguments.streams.read;
  options.json = arguments.IsJson();
  options.program = arguments.Has("--program");
  arguments.SetText("--trace", options.trace);
  arguments.SetCount("--seq", kMaxSequence, options.sequence_length);
  const Report report = Inspect(options);
  arguments.Print(options.json ? report.json.dump(2) + "\n" : report.text);
  return report.exit_code;
}

}  // namespace shardwright
