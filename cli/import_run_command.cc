#include <utility>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_options.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "planner/importers/run_settings.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// What the command line, not a file, decided or left to a default.
using Assumptions = std::vector<Assumption>;

// A flag that only stands in where the files are silent.
std::int64_t Fallback(const Arguments& arguments, const std::string& flag, std::int64_t from_file,
                      std::int64_t by_default, Assumptions& assumed) {
  std::int64_t value = 0;
  arguments.SetCount(flag, kMaxSequence, value);
  if (value != 0 && from_file != 0 && value != from_file) {
    throw InputError(flag + ": got " + std::to_string(value) + ", but the files say " +
                     std::to_string(from_file));
  }
  if (value == 0 && from_file == 0 && by_default != 0) {
    assumed.push_back({flag, std::to_string(by_default)});
  }
  return value != 0 ? value : from_file != 0 ? from_file : by_default;
}

// The plan flags with which the base of the plan is made.
Arguments BaseArguments(const Arguments& arguments, const RunFacts& facts, Assumptions& assumed) {
  Arguments base;
  base.command = "plan";
  base.text = {facts.plan_flags.begin(), facts.plan_flags.end()};
  for (const char* flag : {"--model", "--cluster", "--kernel-set", "--attention", "--loss-chunks",
                           "--profile", "--optimizer", "--recompute", "--precision"}) {
    if (arguments.Get(flag).is_given()) {
      base.text[flag] = arguments.Get(flag).text;
    }
  }
  if (base.text.count("--model") == 0) {
    if (facts.model.empty()) {
      throw UsageError("--model is required: these files do not name a model of the zoo");
    }
    base.text["--model"] = facts.model;
    if (facts.config.empty()) {
      assumed.push_back({"--model", facts.model});
    }
  }
  if (base.text.count("--kernel-set") == 0) {
    base.text["--kernel-set"] = facts.kernel_set;
    assumed.push_back({"--kernel-set", facts.kernel_set});
  }
  if (!facts.attention.empty()) {
    base.text.emplace("--attention", facts.attention);
  }
  if (facts.loss_chunks > 0) {
    base.text.emplace("--loss-chunks", std::to_string(facts.loss_chunks));
  }
  if (base.text.count("--optimizer") == 0 && !facts.has_optimizer) {
    assumed.push_back({"--optimizer", "adamw:foreach"});
  }
  if (base.text.count("--recompute") == 0 && !facts.has_recompute) {
    assumed.push_back({"--recompute", "none"});
  }
  if (base.text.count("--precision") == 0 && !facts.has_precision) {
    base.text["--precision"] = "fp32";
    assumed.push_back({"--precision", "fp32"});
  }
  const auto set = [&](const char* flag, std::int64_t from_file, std::int64_t by_default) {
    const std::int64_t value = Fallback(arguments, flag, from_file, by_default, assumed);
    if (value != 0) {
      base.text[flag] = std::to_string(value);
    }
  };
  set("--nodes", facts.nodes, 0);
  set("--gpus", facts.gpus_per_node, 0);
  set("--seq", facts.sequence_length, 0);
  if (facts.plan_flags.empty()) {
    set("--micro-batch", 0, 0);
    set("--accumulation", 0, 0);
  }
  if (!facts.has_micro_batch && base.text.count("--micro-batch") == 0) {
    assumed.push_back({"--micro-batch", "1"});
  }
  if (!facts.has_accumulation && base.text.count("--accumulation") == 0) {
    assumed.push_back({"--accumulation", "1"});
  }
  return base;
}

// A flag that a file overrules would be ignored without a word.
void RefuseOverruled(const Arguments& arguments, const RunFacts& facts) {
  const auto refuse = [&](bool has, const char* flag) {
    if (has && arguments.Get(flag).is_given()) {
      throw UsageError(std::string(flag) + ": the files of this run decide it");
    }
  };
  refuse(facts.has_micro_batch, "--micro-batch");
  refuse(facts.has_accumulation, "--accumulation");
  refuse(facts.has_optimizer, "--optimizer");
  refuse(facts.has_recompute, "--recompute");
  refuse(facts.has_precision, "--precision");
}

// What neither a flag nor a file says and the base of the plan took by itself.
void AppendDefaults(const Arguments& arguments, const RunFacts& facts, const PlanFile& file,
                    Assumptions& assumed) {
  const auto add = [&](const char* flag, bool is_said, const std::string& value) {
    if (!is_said && !arguments.Get(flag).is_given()) {
      assumed.push_back({flag, value});
    }
  };
  add("--nodes", facts.nodes > 0, std::to_string(file.cluster.node_count));
  add("--gpus", facts.gpus_per_node > 0, std::to_string(file.cluster.gpus_per_node));
  add("--profile", false, file.profile.name);
  if (file.model.sequence_length > 0) {
    add("--seq", facts.sequence_length > 0, std::to_string(file.job.sequence_length));
  }
}

// Entries "<file>: <key>", those of a file one behind the other.
void AppendKeys(const std::string& title, const std::vector<std::string>& entries,
                std::string& text) {
  constexpr std::size_t kWidth = 100;
  constexpr std::string_view kBetween = ": ";
  if (entries.empty()) {
    return;
  }
  text += (text.empty() ? "" : "\n") + title + ":\n";
  std::string file, line;
  const auto end_line = [&] {
    text += line.empty() ? "" : line + "\n";
    line.clear();
  };
  for (const std::string& entry : entries) {
    const std::size_t colon = entry.rfind(kBetween);
    const std::string key = PrintableLine(entry.substr(colon + kBetween.size()));
    if (entry.substr(0, colon) != file) {
      end_line();
      file = entry.substr(0, colon);
      line = "  " + PrintableLine(file) + ": " + key;
      continue;
    }
    line += ",";
    if (line.size() + key.size() + 2 > kWidth) {
      end_line();
      line = "   ";
    }
    line += " " + key;
  }
  end_line();
}

std::string ReportText(const RunSettings& run, const PlanFile& file, const Assumptions& assumed) {
  const Plan& plan = file.plan;
  std::string text;
  AppendKeys("Not known, and taken to change nothing in a plan", run.unknown, text);
  text += (text.empty() ? "" : "\n") + run.framework + ": " + TitleOf(file) + "\n";
  text += "  ranks " + std::to_string(file.cluster.RankCount()) + " = " + MeshText(plan) +
          ", micro-batch " + std::to_string(plan.micro_batch) + ", accumulation " +
          std::to_string(plan.accumulation) + ", " + std::to_string(plan.units.size()) +
          " units, " + std::to_string(plan.recompute.size()) + " recomputed regions\n";
  if (!assumed.empty()) {
    text +=
        "\nAssumed, since the files do not say it (a flag, or the key in the file, says "
        "otherwise):\n";
    Table table({Table::Align::kLeft, Table::Align::kLeft});
    for (const Assumption& assumption : assumed) {
      table.Row({assumption.key, assumption.value});
    }
    text += table.Text(2);
  }
  AppendKeys("Read and left out, since nothing in a plan depends on it", run.left_out, text);
  return text;
}

std::string ReportJson(const RunSettings& run, const PlanFile& file, const Assumptions& assumed) {
  Json json = ReportHead("shardwright-imported-run");
  json["unknown"] = run.unknown;
  json["framework"] = run.framework;
  json["files"] = run.files;
  json["assumed"] = Json::object();
  for (const Assumption& assumption : assumed) {
    json["assumed"][assumption.key] = assumption.value;
  }
  json["left_out"] = run.left_out;
  json["plan"] = ParseOrdered(PlanFileJson(file, run.target), "plan");
  return json.dump(2) + "\n";
}

// Before the files are read.
void CheckImportFlags(const Arguments& arguments) {
  arguments.Require("--cluster");
  std::int64_t count = 0;
  for (const char* flag :
       {"--nodes", "--gpus", "--seq", "--micro-batch", "--accumulation", "--loss-chunks"}) {
    arguments.SetCount(flag, kMaxSequence, count);
  }
  AttentionImpl attention = AttentionImpl::kFlash;
  arguments.SetChoice("--attention", kAttentionNames, attention);
  OptimizerSpec optimizer;
  arguments.Set("--optimizer", optimizer, ReadOptimizer);
  RecomputeChoice recompute;
  arguments.Set("--recompute", recompute, ReadRecompute);
  Precision precision;
  arguments.Set("--precision", precision, ReadPrecision);
}

// Adapters as the files say them, on the modules that the model has.
PlanOptions WithAdapters(PlanOptions options, const Adapters& adapters, Assumptions& assumed) {
  if (adapters.rank == 0) {
    return options;
  }
  options.job.lora_rank = adapters.rank;
  options.job.lora_alpha = adapters.alpha;
  options.job.lora_dropout = adapters.dropout;
  options.job.lora_saved = adapters.saved;
  options.job.lora_magnitudes = adapters.has_magnitudes;
  options.job.lora_targets = adapters.targets;
  options.job.lora_targets = UsualLoraTargets(options);
  std::string names;
  for (const std::string& target : options.job.lora_targets) {
    names += (names.empty() ? "" : ",") + target;
  }
  if (adapters.targets.empty()) {
    assumed.push_back({"--lora-targets", names});
  }
  return options;
}

PlanOptions WithTrainsBy(PlanOptions options, const RunFacts& facts) {
  options.job.trains_by = facts.trains_by;
  options.job.rollout = facts.rollout;
  // Of a base that any number of ranks takes; the file has its own.
  options.plan.micro_batch *= facts.trains_by == TrainsBy::kGrpo
                                  ? facts.rollout.generations
                                  : SamplesPerExample(facts.trains_by);
  return options;
}

}  // namespace

int ImportRunCommand(const Arguments& arguments) {
  CheckImportFlags(arguments);
  const RunSettings run = ReadRun(arguments.lists.at("FILE"));
  const RunFacts facts = FactsOf(run);
  RefuseOverruled(arguments, facts);
  Assumptions assumed;
  PlanOptions base = WithTrainsBy(ReadPlanOptions(BaseArguments(arguments, facts, assumed)), facts);
  base.model_json = arguments.Get("--model").is_given() ? "" : facts.config;
  PlanFile file = MakePlanFile(WithAdapters(base, facts.adapters, assumed));
  AppendDefaults(arguments, facts, file, assumed);
  ApplyRun(run, file);
  CheckPlan(file, file.plan, "the imported plan");
  for (Assumption& assumption : AssumptionsOf(run, file)) {
    assumed.push_back(std::move(assumption));
  }
  WarnOf(file);
  const std::string output = arguments.Get("--output").text;
  std::string report =
      arguments.IsJson() ? ReportJson(run, file, assumed) : ReportText(run, file, assumed);
  if (output == "-" && !arguments.IsJson()) {
    arguments.PrintFile(PlanFileJson(file, run.target), report);
    return kExitOk;
  }
  if (!output.empty() && output != "-") {
    WriteFileAtomically(output, PlanFileJson(file, run.target));
    report += arguments.IsJson() ? "" : "Wrote " + output + "\n";
  }
  arguments.Print(report);
  return kExitOk;
}

}  // namespace shardwright
