#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/first_weights.h"
#include "cli/flow.h"
#include "cli/plan_options.h"
#include "cli/plan_search.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/printable.h"
#include "planner/evaluate.h"
#include "planner/warnings.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::string Summary(const PlanFile& file, const Program& program, const std::string& output) {
  const Plan& plan = file.plan;
  std::int64_t largest = 0;
  for (const UnitInfo& unit : program.units) {
    largest = std::max(largest, unit.padded_elements);
  }
  Table table({kLeft, kLeft});
  table.Row({"parameters", WithCommas(CountParameters(file.model.model))});
  table.Row({"trainable", WithCommas(CountParameters(file.model.model, true))});
  table.Row({"units", WithCommas(static_cast<std::int64_t>(plan.units.size())) + ", the largest " +
                          WithCommas(largest) + " parameters"});
  table.Row({"ranks", WithCommas(plan.shard_size * plan.replicate_size) + " = shard " +
                          WithCommas(plan.shard_size) + " x replicate " +
                          WithCommas(plan.replicate_size)});
  table.Row({"batch", WithCommas(file.job.global_batch) + " = ranks x micro-batch " +
                          WithCommas(plan.micro_batch) + " x accumulation " +
                          WithCommas(plan.accumulation)});
  table.Row({"sequence", WithCommas(file.job.sequence_length)});
  table.Row({"program", WithCommas(static_cast<std::int64_t>(program.step.size())) +
                            " ops per step, verified"});
  return TitleOf(file) + "\n" + table.Text(2) + (output.empty() ? "" : "Wrote " + output + "\n");
}

// `output` empty: the plan is in the summary itself, as in SearchJson.
std::string SummaryJson(const PlanFile& file, const Program& program, const std::string& output) {
  Json json;
  json["schema"] = "shardwright-plan-summary";
  json["schema_version"] = 1;
  json["file"] = output;
  json["model"] = file.model.model.name;
  json["parameters"] = CountParameters(file.model.model);
  json["trainable_parameters"] = CountParameters(file.model.model, true);
  json["cluster"] = file.cluster.name;
  json["ranks"] = file.cluster.RankCount();
  json["dialect"] = NameOf(file.plan.dialect);
  json["shard_size"] = file.plan.shard_size;
  json["replicate_size"] = file.plan.replicate_size;
  json["micro_batch"] = file.plan.micro_batch;
  json["accumulation"] = file.plan.accumulation;
  json["global_batch"] = file.job.global_batch;
  json["sequence_length"] = file.job.sequence_length;
  json["units"] = file.plan.units.size();
  json["step_ops"] = program.step.size();
  if (output.empty()) {
    json["plan_file"] = Json::parse(PlanFileJson(file));
  }
  return json.dump(2) + "\n";
}

constexpr const char* kAbout = R"(Writes a plan: a model, a cluster and all choices in between.
With --search, or with --global-batch and no flag that chooses, it finds the fastest plan that fits.

Examples:
  shardwright plan --model llama-3-70b --cluster dgx-h100 --nodes 128 --seq 8192 \
    --global-batch 1024 -o plan.json
  shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2..32 --seq 8192 \
    --global-batch 512 --objective cost --token-budget 1e12 -o plan.json
  shardwright plan --model llama-3-8b --cluster dgx-h100 --nodes 2 --seq 8192 -o plan.json
  shardwright plan --model llama-3-70b --cluster dgx-h100 --nodes 128 --seq 8192 \
    --micro-batch 1 --global-batch 1024 --dialect fsdp2 --recompute full --wrap block -o p.json
  shardwright plan --model llama-2-7b --cluster "a100-80 x8, nvlink 300 GB/s, nic 8x200 Gbit/s" \
    --wrap size:1e8 --dialect fsdp1 | shardwright simulate -)";

// FSDP1 computes gradients of frozen weights that share a flat parameter with trainable ones.
void WarnOfFrozenBesideTrainable(const PlanFile& file) {
  if (file.plan.dialect != Dialect::kFsdp1 || file.job.mode != JobMode::kTrain) {
    return;
  }
  const Model& model = file.model.model;
  std::size_t mixed = 0;
  std::string first;
  for (const ResolvedUnit& unit : ResolveUnits(model, file.plan, "plan")) {
    const auto trainable = std::count_if(unit.params.begin(), unit.params.end(), [&](ParamId p) {
      return model.params[p.value].trainable;
    });
    if (trainable > 0 && static_cast<std::size_t>(trainable) < unit.params.size()) {
      first = mixed++ == 0 ? unit.name : first;
    }
  }
  if (mixed > 0) {
    Warn("in " + std::to_string(mixed) + " units such as " + first +
         " FSDP1 computes the weight gradients of frozen parameters, too, since they share a flat "
         "parameter with trainable ones; --dialect fsdp2 does not, nor do units of their own");
  }
}

// Writes the plan where --output says; --json on standard output has it inside the report.
void Report(const PlanOptions& options, const Arguments& arguments, const PlanFile& file,
            const std::function<std::string(const std::string&)>& report) {
  const bool is_inside = options.json && (options.output.empty() || options.output == "-");
  arguments.Deliver(options.output, "plan", is_inside ? report("") : PlanFileJson(file), report);
}

// Searches, writes the plan and reports.
int RunSearch(const PlanOptions& options, const Arguments& arguments) {
  const SearchedPlan searched = SearchPlan(options, arguments.streams.stop);
  for (const std::string& warning : WarningsOf(searched.file)) {
    Warn(warning);
  }
  const auto report = [&](const std::string& output) {
    return options.json ? SearchJson(searched, output) : SearchText(searched, output);
  };
  if (!searched.result.is_feasible) {
    if (searched.is_interrupted) {
      SayLines("interrupted: no plan was found so far\n");
      return kExitInterrupted;
    }
    arguments.Print(report(""));
    return kExitNo;
  }
  Report(options, arguments, searched.file, report);
  return kExitOk;
}

std::span<const FlagRow> Flags() {
  static const std::vector<FlagRow> flags = [] {
    std::vector<FlagRow> rows(PlanFlags().begin(), PlanFlags().end());
    rows.insert(rows.end(), SearchFlags().begin(), SearchFlags().end());
    return rows;
  }();
  return flags;
}

int RunPlan(const Arguments& given) {
  Arguments arguments = given;
  std::vector<std::int64_t> node_counts = TakeNodeCounts(arguments);
  PlanOptions options = ReadPlanOptions(arguments);
  options.node_counts = std::move(node_counts);
  ReadSearchOptions(arguments, options);
  if (options.search) {
    const int code = RunSearch(options, arguments);
    NoteWeightsBeside(options.model);
    return code;
  }
  const PlanFile file = MakePlanFile(options);
  for (const std::string& warning : WarningsOf(file)) {
    Warn(warning);
  }
  WarnOfFrozenBesideTrainable(file);
  // Lowered here too, so that a plan that its dialect cannot express is never written.
  const Program program = LowerAndVerify(file);
  Report(options, arguments, file, [&](const std::string& output) {
    return options.json ? SummaryJson(file, program, output) : Summary(file, program, output);
  });
  NoteWeightsBeside(options.model);
  return kExitOk;
}

}  // namespace

extern const Command kPlanCommand;
const Command kPlanCommand = {"plan", kAbout, {}, Flags(), SearchSwitches(), RunPlan};

}  // namespace shardwright
