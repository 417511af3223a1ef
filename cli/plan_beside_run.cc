// `plan --from RUN`: a search that starts from the plan of a run, and changes no more than asked.

#include <utility>

#include <nlohmann/json.hpp>

#include "cli/flow.h"
#include "cli/plan_command.h"
#include "cli/plan_diff.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/emitters/emitters.h"
#include "planner/evaluate.h"
#include "planner/fastest_emitted.h"
#include "schedule/dialect_facts.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// The flags of what may differ from the run of --from.
std::vector<std::string> FlagsBesideRun() {
  std::vector<FlagRow> flags = LoadCommand("plan").flags;
  std::erase_if(flags, [](const FlagRow& flag) { return !flag.beside_run; });
  return Mapped<std::string>(flags, LongName);
}

void CheckFlagsBesideRun(const Arguments& arguments) {
  const std::vector<std::string> free = FlagsBesideRun();
  for (const auto& [name, value] : arguments.text) {
    if (!IsIn(free, name) && !value.empty()) {
      throw UsageError(name + ": the run of --from says it; without --from every flag counts");
    }
  }
  if (arguments.Get("--objective").text == "cost") {
    throw UsageError("--objective cost: the run of --from has one number of nodes");
  }
  if (arguments.Has("--no-search")) {
    throw UsageError("--no-search: --from searches");
  }
  const std::string& shard = arguments.Get("--shard").text;
  if (shard.find("ep=") != std::string::npos || shard.find("tp=") != std::string::npos) {
    throw UsageError("--shard: the run of --from says who shares out experts or cuts layers");
  }
}

// Choices that flags do not fix start from those of the run.
PlanOptions OptionsBesideRun(const Arguments& given, const PlanFile& run) {
  Arguments arguments = given;
  arguments.text["--model"] = run.model.name;  // not looked at
  arguments.text["--cluster"] = run.cluster.name;
  if (!given.Get("--dialect").is_given()) {
    arguments.text["--dialect"] = std::string(NameOf(run.plan.dialect));
  }
  arguments.switches.insert("--search");
  PlanOptions options = ReadPlanOptions(arguments);
  ReadSearchOptions(arguments, options);
  const Plan typed = options.plan;
  const bool is_cut =
      run.plan.expert_size > 1 || run.plan.tensor_size > 1 || run.plan.context_size > 1;
  if (is_cut && typed.dialect != run.plan.dialect) {
    throw UsageError(
        "--dialect " + std::string(NameOf(typed.dialect)) +
        ": the run of --from shares out experts or cuts layers or tokens, which fsdp2 alone does");
  }
  // The options of one dialect are no plan of another one.
  options.plan =
      typed.dialect == run.plan.dialect ? run.plan : WithDialect(run.plan, typed.dialect);
  const FixedChoices& fixed = options.fixed;
  const auto take = [&](bool is_fixed, auto member) {
    if (is_fixed) {
      options.plan.*member = typed.*member;
    }
  };
  take(fixed.micro_batch, &Plan::micro_batch);
  take(fixed.sync, &Plan::sync);
  take(fixed.offload, &Plan::offload);
  take(fixed.in_flight, &Plan::in_flight);
  take(fixed.transfers, &Plan::transfers);
  take(fixed.prefetch, &Plan::backward_prefetch);
  take(fixed.prefetch, &Plan::forward_prefetch);
  options.plan.keeps_gathered = typed.keeps_gathered;  // which a search has not
  return options;
}

// Does no flag ask for another plan than the run's?
bool AsksForFasterOnly(const Arguments& arguments) {
  return NoneOf(FlagsBesideRun(), [&](const std::string& name) {
    return name != "--from" && name != "--output" && name != "--threads" &&
           arguments.Get(name).is_given();
  });
}

// The run's job with what flags change of it.
PlanFile JobBesideRun(const Arguments& arguments, const PlanOptions& options, PlanFile file) {
  if (!options.kernel_set.empty()) {
    file.kernels = FindKernelSet(options.kernel_set, "--kernel-set");
    file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  }
  SetAttention(options, file);
  SetLossChunks(options, file);
  if (!options.profile.empty()) {
    file.profile = LoadProfile(options.profile);
  }
  if (options.global_batch > 0) {
    file.job.global_batch = options.global_batch;
  }
  arguments.Set("--allocator", file.job.allocator, ReadAllocator);
  if (FactsOf(options.plan).has_arena) {
    file.job.allocator = AllocatorSettings();
  }
  if (arguments.Get("--memory-margin").is_given()) {
    file.job.memory_margin = options.job.memory_margin;
  } else if (file.job.memory_margin == 0 && options.memory_limit == Bytes(0)) {
    file.job.memory_margin = DefaultMargin(file.cluster, file.profile);
  }
  return file;
}

// "Faster than the run: 1.83 s -> 1.61 s (-12.0 %)".
std::string AgainstRun(Seconds run, Seconds best) {
  constexpr double kSame = 0.001;
  const double change = best.value / run.value - 1;
  if (change > -kSame) {
    return "Nothing that was found is faster than the run, " + Format(run) + " a step.\n";
  }
  return "Faster than the run: " + Format(run) + " -> " + Format(best) + " a step (-" +
         Percent(-change) + ")\n";
}

// The target that the run's settings came from; null: the plan file does not say it, or another
// dialect is asked for.
const Emitter* TargetOf(const Arguments& arguments, const std::string& imported_from) {
  if (imported_from.empty() || arguments.Get("--dialect").is_given()) {
    return nullptr;
  }
  std::vector<std::string> names;
  for (const Emitter& emitter : Emitters()) {
    if (emitter.name == imported_from) {
      return &emitter;
    }
    names.emplace_back(emitter.name);
  }
  throw InputError("imported_from", Quoted(imported_from), "one of " + Listed(names, Quoted));
}

}  // namespace

int PlanBesideRun(const Arguments& arguments) {
  CheckFlagsBesideRun(arguments);
  const std::string given = arguments.Get("--from").text;
  const bool is_stream = given == "-";
  const std::string name = is_stream ? arguments.streams.source : given;
  const std::string text = is_stream ? arguments.streams.read() : ReadTextFile(given);
  const PlanFile run = ParsePlanFile(text, name);
  const std::string imported_from = ImportedFrom(text, name);
  const Emitter* target = TargetOf(arguments, imported_from);
  const PlanOptions options = OptionsBesideRun(arguments, run);
  const PlanFile job = JobBesideRun(arguments, options, run);
  SearchedPlan searched = SearchPlanOf(job, options, arguments.streams.stop);
  bool is_expressed = true;
  if (target != nullptr && searched.result.is_feasible) {
    if (auto emitted = FastestEmitted(run.plan, *target, searched.file, searched.result)) {
      searched.file = *std::move(emitted);
      searched.native_time.reset();
    } else {
      is_expressed = false;
    }
  }
  if (AsksForFasterOnly(arguments) && KeepRun(run, searched.result)) {
    searched.file = run;
    searched.native_time.reset();
  } else if (!is_expressed) {
    Warn("no plan found fits as " + imported_from +
         " would run it; the answer may need choices that its settings cannot say");
    target = nullptr;
  }
  WarnOf(searched.file);
  const auto report = [&](const std::string& output) {
    if (!searched.result.is_feasible) {
      return options.json ? SearchJson(searched, output) : SearchText(searched, output);
    }
    const std::string emit = target == nullptr
                                 ? ""
                                 : "shardwright emit " +
                                       (output.empty() ? "FILE" : PrintableLine(output)) +
                                       " --to " + imported_from + " -o run/";
    if (options.json) {
      Json json = ParseOrdered(SearchJson(searched, output), "plan");
      json["from_run"] = ParseOrdered(PlanDiffJson(run, searched.file), "plan");
      json["from_run"]["emit"] = emit;
      return json.dump(2) + "\n";
    }
    return AgainstRun(Evaluate(run, run.plan, {.reserved = false}).step_time,
                      searched.result.best.step_time) +
           "\n" + PlanDiffText(run, searched.file) + "\n" + SearchText(searched, output) +
           (emit.empty() ? "" : "As the settings of the run's framework: " + emit + "\n");
  };
  return ReportSearched(options, arguments, searched, report,
                        target == nullptr ? "" : imported_from);
}

}  // namespace shardwright
