#include "cli/plan_command.h"

#include <nlohmann/json.hpp>

#include "cli/first_weights.h"
#include "cli/flow.h"
#include "cli/lengths_flag.h"
#include "cli/table.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "simulator/plan_programs.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// How the plan's buffers break a limit; empty: they do not, and the allocator was not asked.
std::string MisfitOf(const PlanFile& file, PlanPrograms& programs) {
  SimulationResult allocated;
  allocated.memory = Simulator(file.cluster, file.profile).Allocated(programs.Largest());
  const Bytes peak = allocated.memory.allocated.DevicePeak().total;
  const auto misfits = FindMisfits(file, file.plan, UsableMemory(file), peak, allocated);
  return misfits.empty() ? "" : misfits.front().text;
}

// What was lowered of a plan, to see that it can be.
struct Lowered {
  std::int64_t largest = 0;  // parameters of a unit
  std::int64_t step_ops = 0;
  std::string note, misfit;  // how buffers break a limit; empty: they do not
};

void Count(const Program& program, Lowered& lowered) {
  for (const UnitInfo& unit : program.units) {
    lowered.largest = std::max(lowered.largest, unit.padded_elements);
  }
}

Lowered LowerPlan(const PlanFile& file) {
  Lowered lowered;
  if (file.plan.pipeline_size > 1) {
    for (const Program& program : LowerAndVerifyStages(file, file.plan)) {
      Count(program, lowered);
      lowered.step_ops += static_cast<std::int64_t>(program.step.size());
    }
    lowered.note = " together, of " + WithCommas(file.plan.pipeline_size) + " stages";
    return lowered;
  }
  PlanPrograms programs({file, file.plan});
  CheckLegal(programs.Largest());
  Count(programs.Largest(), lowered);
  lowered.misfit = MisfitOf(file, programs);
  const std::int64_t micro_batches = programs.Largest().micro_batch_count;  // before others come
  lowered.step_ops = CountStepOps(programs);
  if (micro_batches < file.plan.accumulation) {
    lowered.note = " with " + WithCommas(micro_batches) + " micro-batches";
  }
  return lowered;
}

std::string Summary(const PlanFile& file, const Lowered& lowered, const std::string& output) {
  const Plan& plan = file.plan;
  Table table({kLeft, kLeft});
  table.Row({"parameters", WithCommas(CountParameters(file.model))});
  table.Row({"trainable", WithCommas(CountParameters(file.model, true))});
  table.Row({"units", WithCommas(static_cast<std::int64_t>(plan.units.size())) + ", the largest " +
                          WithCommas(lowered.largest) + " parameters"});
  table.Row({"ranks", WithCommas(MeshOf(plan).RankCount()) + " = " + MeshText(plan)});
  table.Row({"batch", WithCommas(file.job.global_batch) +
                          (plan.context_size > 1 ? " = shard x replicate / context"
                           : plan.tensor_size * plan.pipeline_size > 1 ? " = shard x replicate"
                                                                       : " = ranks") +
                          " x micro-batch " + WithCommas(plan.micro_batch) + " x accumulation " +
                          WithCommas(plan.accumulation)});
  table.Row({"sequence", WithCommas(file.job.sequence_length)});
  if (!lowered.misfit.empty()) {
    table.Row({"memory", lowered.misfit + "; --search finds a plan that fits"});
  }
  table.Row({"program", WithCommas(lowered.step_ops) + " ops per step, verified" + lowered.note});
  return TitleOf(file) + "\n" + table.Text(2) + (output.empty() ? "" : "Wrote " + output + "\n");
}

// `output` empty: the plan is in the summary itself, as in SearchJson.
std::string SummaryJson(const PlanFile& file, const Lowered& lowered, const std::string& output) {
  Json json = ReportHead("shardwright-plan-summary");
  json["file"] = output;
  json["model"] = file.model.name;
  json["parameters"] = CountParameters(file.model);
  json["trainable_parameters"] = CountParameters(file.model, true);
  json["cluster"] = file.cluster.name;
  json["ranks"] = file.cluster.RankCount();
  AddMesh(file.plan, json);
  json["global_batch"] = file.job.global_batch;
  json["sequence_length"] = file.job.sequence_length;
  json["units"] = file.plan.units.size();
  json["misfit"] = lowered.misfit;
  json["step_ops"] = lowered.step_ops;
  if (output.empty()) {
    json["plan_file"] = ParseOrdered(PlanFileJson(file), "plan");
  }
  return json.dump(2) + "\n";
}

// FSDP1 computes gradients of frozen weights that share a flat parameter with trainable ones.
void WarnOfFrozenBesideTrainable(const PlanFile& file) {
  if (file.plan.dialect != Dialect::kFsdp1 || file.job.mode != JobMode::kTrain) {
    return;
  }
  const Model& model = file.model;
  std::size_t mixed = 0;
  std::string first;
  for (const ResolvedUnit& unit : ResolveUnits(model, file.plan, "plan")) {
    const auto trainable =
        CountIf(unit.params, [&](ParamId p) { return model.params[p.value].trainable; });
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
void DeliverPlan(const PlanOptions& options, const Arguments& arguments, const PlanFile& file,
                 const std::function<std::string(const std::string&)>& report,
                 const std::string& imported_from = "") {
  const auto whole = [&](const std::string& output) {
    return WithLengths(arguments, file, report(output));
  };
  const bool is_inside = options.json && (options.output.empty() || options.output == "-");
  arguments.Deliver(options.output, "plan",
                    is_inside ? whole("") : PlanFileJson(file, imported_from), whole);
}

// Searches, writes the plan and reports.
int RunSearch(const PlanOptions& options, const Arguments& arguments) {
  const SearchedPlan searched = SearchPlan(options, arguments.streams.stop);
  WarnOf(searched.file);
  const auto report = [&](const std::string& output) {
    return options.json ? SearchJson(searched, output) : SearchText(searched, output);
  };
  return ReportSearched(options, arguments, searched, report);
}

}  // namespace

int ReportSearched(const PlanOptions& options, const Arguments& arguments,
                   const SearchedPlan& searched,
                   const std::function<std::string(const std::string&)>& report,
                   const std::string& imported_from) {
  if (!searched.result.is_feasible) {
    if (searched.is_interrupted) {
      SayLines("interrupted: no plan was found so far\n");
      return kExitInterrupted;
    }
    arguments.Print(report(""));
    return kExitNo;
  }
  DeliverPlan(options, arguments, searched.file, report, imported_from);
  return kExitOk;
}

int PlanCommand(const Arguments& typed) {
  const Arguments given = WithLongest(typed);
  const std::string output = given.Get("--output").text;
  if (given.Get("--lengths").is_given() && !given.IsJson() && (output.empty() || output == "-")) {
    throw UsageError("--lengths: the plan goes to standard output; give -o FILE");
  }
  if (given.Get("--from").is_given()) {
    return PlanBesideRun(given);
  }
  if (given.Get("--dialect").text.find(',') != std::string::npos ||
      given.Get("--shard").text.find("=any") != std::string::npos) {
    return PlanVariants(given);
  }
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
  WarnOf(file);
  WarnOfFrozenBesideTrainable(file);
  // Lowered here too, so that a plan that its dialect cannot express is never written.
  const Lowered lowered = LowerPlan(file);
  DeliverPlan(options, arguments, file, [&](const std::string& output) {
    return options.json ? SummaryJson(file, lowered, output) : Summary(file, lowered, output);
  });
  NoteWeightsBeside(options.model);
  return kExitOk;
}

}  // namespace shardwright
