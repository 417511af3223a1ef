#include <cmath>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/first_weights.h"
#include "cli/flow.h"
#include "cli/lengths_flag.h"
#include "cli/plan_diff.h"
#include "cli/plan_options.h"
#include "cli/plan_search.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "models/cut_experts.h"
#include "models/cut_stage.h"
#include "planner/emitters/emitters.h"
#include "planner/evaluate.h"
#include "planner/fastest_emitted.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan_names.h"
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

// The same for what a search has found, if anything. Returns the exit code.
int ReportSearched(const PlanOptions& options, const Arguments& arguments,
                   const SearchedPlan& searched,
                   const std::function<std::string(const std::string&)>& report,
                   const std::string& imported_from = "") {
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

// Searches, writes the plan and reports.
int RunSearch(const PlanOptions& options, const Arguments& arguments) {
  const SearchedPlan searched = SearchPlan(options, arguments.streams.stop);
  WarnOf(searched.file);
  const auto report = [&](const std::string& output) {
    return options.json ? SearchJson(searched, output) : SearchText(searched, output);
  };
  return ReportSearched(options, arguments, searched, report);
}

// One search of several, each for another dialect.
struct DialectSearch {
  PlanOptions options;
  SearchedPlan searched;

  [[nodiscard]] std::string Name() const { return VariantName(options.plan); }
  // What the objective minimises; infinite: nothing fits.
  [[nodiscard]] double Cost() const {
    const SearchResult& r = searched.result;
    if (!r.is_feasible) {
      return INFINITY;
    }
    return options.objective == Objective::kMemory
               ? static_cast<double>(r.candidates[r.best.index].Needs().value)
               : r.best.step_time.value;
  }
};

// Of a pipeline: " (6.1 % bubble)".
std::string BubbleText(const SearchResult& result) {
  const double bubble = result.best.bubble.value;
  return bubble == 0 ? "" : " (" + Percent(bubble / result.best.step_time.value) + " bubble)";
}

// "fsdp2 is best: 2.38 s; fsdp1 2.58 s, 8.4 % slower; ddp: nothing fits". Of split backward passes
// only what is the best way of as many ranks.
std::string DialectsLine(const std::vector<DialectSearch>& searches) {
  if (!searches.front().searched.result.is_feasible) {
    return "";
  }
  const Seconds best = searches.front().searched.result.best.step_time;
  std::string line = searches.front().Name() + " is best: " + Format(best) +
                     BubbleText(searches.front().searched.result);
  for (std::size_t i = 1; i < searches.size(); ++i) {
    const SearchResult& r = searches[i].searched.result;
    const Plan& plan = searches[i].options.plan;
    const auto is_alike = [&](const DialectSearch& other) {
      return other.options.plan.pipeline_size == plan.pipeline_size;
    };
    if (SplitsBackward(plan.pipeline_schedule) && AnyOf(std::span(searches).first(i), is_alike)) {
      continue;
    }
    const double change = r.is_feasible ? r.best.step_time.value / best.value - 1 : 0;
    line += "; " + searches[i].Name() +
            (r.is_feasible ? " " + Format(r.best.step_time) + BubbleText(r) + ", " +
                                 Percent(std::abs(change)) + (change < 0 ? " faster" : " slower")
                           : ": nothing fits");
  }
  return line + "\n";
}

Json DialectsJson(const std::vector<DialectSearch>& searches) {
  Json json = Json::array();
  for (const DialectSearch& search : searches) {
    const SearchResult& r = search.searched.result;
    json.push_back({{"dialect", NameOf(search.options.plan.dialect)},
                    {"expert_size", search.options.plan.expert_size},
                    {"tensor_size", search.options.plan.tensor_size},
                    {"context_size", search.options.plan.context_size},
                    {"pipeline_size", search.options.plan.pipeline_size},
                    {"pipeline_stages", search.options.plan.pipeline_stages},
                    {"pipeline_schedule",
                     NameIn(kPipelineScheduleNames, search.options.plan.pipeline_schedule)},
                    {"bubble_s", r.best.bubble.value},
                    {"feasible", r.is_feasible},
                    {"step_time_s", r.is_feasible ? Json(r.best.step_time.value) : Json()}});
  }
  return json;
}

constexpr std::string_view kAnyExperts = "ep=any";

// What the arguments ask for with another --shard.
struct Asked {
  PlanOptions options;
  PlanFile file;
};
Asked AskedWith(Arguments arguments, const std::string& shard) {
  arguments.text["--shard"] = shard;
  arguments.text["--dialect"] = std::string(NameOf(Dialect::kFsdp2));
  PlanOptions options = ReadPlanOptions(arguments);
  PlanFile file = MakeJobFile(options);
  return {std::move(options), std::move(file)};
}

// The words that `tp=any` and `cp=any` stand for, `kind` being "tp=" or "cp=": ranks of one node,
// or of all, as many as leave a batch for the others.
std::vector<std::string> PartWords(const Arguments& arguments, const std::string& kind) {
  const std::string text = arguments.Get("--shard").text;
  if (text != kind + "any") {
    throw UsageError("--shard: got " + Quoted(text) + ", expected " + kind +
                     "any alone; shards follow");
  }
  const auto [options, file] = AskedWith(arguments, kind + "1");
  const bool cuts_layers = kind == "tp=";
  const std::int64_t most = cuts_layers ? file.cluster.gpus_per_node : file.cluster.RankCount();
  std::vector<std::string> words;
  for (std::int64_t ranks = 1; most % ranks == 0; ranks *= 2) {
    Mesh cut;
    (cuts_layers ? cut.tensor : cut.context) = ranks;
    if (options.global_batch % DataRanks(file.cluster, cut) == 0) {
      words.push_back(kind + std::to_string(ranks));
    }
  }
  return words.empty() ? std::vector<std::string>{kind + "1"} : words;
}

// The words that `pp=any` stands for: 1, 2, 4, ... ranks with one stage each, and with two, as far
// as the blocks, the ranks and the batch go; backward whole, and split in every way.
std::vector<std::string> PipelineWords(const Arguments& arguments) {
  constexpr std::int64_t kMostStages = 2;  // of a rank
  const std::string text = arguments.Get("--shard").text;
  const std::string others = text.substr(0, text.size() - std::string_view("pp=any").size());
  const auto [options, file] = AskedWith(arguments, others + "pp=1");
  std::vector<std::string> words = {others + "pp=1"};
  Mesh cut = MeshOf(options.plan);
  try {
    for (cut.pipeline = 2;; cut.pipeline *= 2) {
      const std::int64_t passes = options.global_batch / DataRanks(file.cluster, cut);
      for (std::int64_t stages = 1; stages <= kMostStages && passes >= cut.pipeline; ++stages) {
        Model model = file.model;
        CutStage(model, cut.pipeline * stages, 0, cut.pipeline, "--shard");
        const std::string word =
            others + "pp=" + std::to_string(cut.pipeline) + (stages > 1 ? "x2" : "");
        words.push_back(word);
        for (std::size_t s = 0; s < kPipelineScheduleNames.size(); ++s) {
          const auto schedule = static_cast<PipelineSchedule>(s);
          if (SplitsBackward(schedule) && (stages == 2 || !IsVShaped(schedule))) {
            words.push_back(word + ":" + std::string(kPipelineScheduleNames[s]));
          }
        }
      }
    }
  } catch (const InputError& error) {  // more stages than blocks, or than ranks
    if (words.size() == 1) {
      Say("note: no pipelines: " + std::string(error.what()));
    }
    return words;
  }
}

// The words of `--shard` that `ep=any` stands for: 1, 2, 4, ... ranks that share out the experts,
// as far as they divide the ranks and the experts of each layer.
std::vector<std::string> ShardWords(const Arguments& arguments) {
  const std::string text = arguments.Get("--shard").text;
  if (text.find("=any,") != std::string::npos) {
    throw UsageError("--shard: got " + Quoted(text) + ", expected any in its last word alone");
  }
  for (const char* kind : {"tp=", "cp="}) {
    if (text.ends_with(std::string(kind) + "any")) {
      return PartWords(arguments, kind);
    }
  }
  if (text.ends_with("pp=any")) {
    return PipelineWords(arguments);
  }
  if (!text.ends_with(kAnyExperts)) {
    return {text};
  }
  const std::string size = text.substr(0, text.size() - kAnyExperts.size());
  const auto [options, file] = AskedWith(arguments, size + "ep=1");
  const std::int64_t most = MeshOver(file.cluster.RankCount(), MeshOf(options)).Along(Axis::kShard);
  std::vector<std::string> words = {size + "ep=1"};
  for (std::int64_t experts = 2; most % experts == 0; experts *= 2) {
    try {
      Model model = file.model;
      CutExperts(model, experts, "--shard");
    } catch (const InputError&) {  // too many for the experts, or none that can be shared out
      break;
    }
    words.push_back(size + "ep=" + std::to_string(experts));
  }
  return words;
}

// What a search over several dialects, or several ways to share out experts, tries.
std::vector<Arguments> Variants(const Arguments& arguments) {
  std::vector<Arguments> variants;
  bool has_cut = false;
  const std::string words = arguments.Get("--dialect").text;
  const std::vector<std::string> shards = ShardWords(arguments);
  for (const std::string& dialect :
       words.empty() ? std::vector<std::string>{""} : ReadList(arguments.Get("--dialect"))) {
    for (const std::string& shard : shards) {
      const bool is_cut =
          &shard != &shards.front() ||
          ((shard.starts_with("tp=") || shard.starts_with("cp=")) && !shard.ends_with("p=1"));
      if (!dialect.empty() && dialect != NameOf(Dialect::kFsdp2) && is_cut) {
        continue;  // they share out nothing
      }
      has_cut = has_cut || is_cut;
      Arguments one = arguments;
      one.text["--dialect"] = dialect;
      one.text["--shard"] = shard;
      one.command = variants.empty() ? arguments.command : "";  // notes are said once
      if (dialect == NameOf(Dialect::kNative)) {
        one.text.erase("--allocator");  // it has an arena
      }
      variants.push_back(std::move(one));
    }
  }
  if (shards.size() > 1 && !has_cut) {
    throw UsageError("--shard " + arguments.Get("--shard").text + ": got --dialect " + words +
                     ", expected fsdp2 among them, which alone is searched so");
  }
  return variants;
}

// Searches for each of them; the best plan of all is written.
int RunVariants(const Arguments& arguments) {
  std::vector<DialectSearch> searches;
  for (const Arguments& one : Variants(arguments)) {
    DialectSearch search{ReadPlanOptions(one), {}};
    ReadSearchOptions(one, search.options);
    if (!search.options.search || search.options.objective == Objective::kCost) {
      const bool is_dialects = arguments.Get("--dialect").text.find(',') != std::string::npos;
      throw UsageError(
          std::string(is_dialects ? "--dialect" : "--shard: ep=any, tp=any, cp=any, pp=any") +
          (search.options.search ? ": several are for a search of one number of nodes"
                                 : ": a search compares several; add --search and --global-batch"));
    }
    searches.push_back(std::move(search));
  }
  // Of ranks that cut layers or tokens, more than those that cannot cannot, either.
  for (auto search = searches.begin(); search != searches.end(); ++search) {
    try {
      search->searched = SearchPlan(search->options, arguments.streams.stop);
    } catch (const InputError& error) {
      const Plan& plan = search->options.plan;
      const bool is_piped = plan.pipeline_size > 1;
      if (search == searches.begin() || (!is_piped && plan.tensor_size * plan.context_size == 1)) {
        throw;
      }
      if (!is_piped || !SplitsBackward(plan.pipeline_schedule)) {
        Say("note: not " + search->Name() + (is_piped ? ": " : " or more: ") + error.what());
      }
      search = searches.erase(search, is_piped ? search + 1 : searches.end()) - 1;
    }
    if (search->searched.is_interrupted) {
      break;
    }
  }
  // An interrupt ends them all; nothing is said of those that had not begun.
  const auto stopped =
      FindIf(searches, [](const DialectSearch& search) { return search.searched.is_interrupted; });
  if (stopped != searches.end()) {
    searches.erase(stopped + 1, searches.end());
  }
  StableSortBy(searches, &DialectSearch::Cost);
  const DialectSearch& best = searches.front();
  WarnOf(best.searched.file);
  return ReportSearched(best.options, arguments, best.searched, [&](const std::string& output) {
    if (best.options.json) {
      Json json = ParseOrdered(SearchJson(best.searched, output), "plan");
      json["dialects"] = DialectsJson(searches);
      return json.dump(2) + "\n";
    }
    std::string text = SearchText(best.searched, output);
    return text.insert(text.find('\n') + 1, DialectsLine(searches));
  });
}

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

// What would be faster than a run, in the framework that it came from.
int RunFrom(const Arguments& arguments) {
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
    return AgainstRun(ToSeconds(Evaluate(run, run.plan, {.reserved = false}).step_time),
                      searched.result.best.step_time) +
           "\n" + PlanDiffText(run, searched.file) + "\n" + SearchText(searched, output) +
           (emit.empty() ? "" : "As the settings of the run's framework: " + emit + "\n");
  };
  return ReportSearched(options, arguments, searched, report,
                        target == nullptr ? "" : imported_from);
}

}  // namespace

int PlanCommand(const Arguments& typed) {
  const Arguments given = WithLongest(typed);
  const std::string output = given.Get("--output").text;
  if (given.Get("--lengths").is_given() && !given.IsJson() && (output.empty() || output == "-")) {
    throw UsageError("--lengths: the plan goes to standard output; give -o FILE");
  }
  if (given.Get("--from").is_given()) {
    return RunFrom(given);
  }
  if (given.Get("--dialect").text.find(',') != std::string::npos ||
      given.Get("--shard").text.find("=any") != std::string::npos) {
    return RunVariants(given);
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
