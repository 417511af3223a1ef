// Several searches in place of one: `--dialect fsdp2,fsdp1`, `--shard pp=any`.

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/flow.h"
#include "cli/plan_command.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_experts.h"
#include "models/cut_stage.h"
#include "planner/space.h"
#include "schedule/plan_names.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

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
                     "any alone: the search itself shards over the ranks that are left");
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
// as the blocks, the ranks and the batch go; behind them those whose backward is split.
std::vector<std::string> PipelineWords(const Arguments& arguments) {
  constexpr std::int64_t kMostStages = 2;  // of a rank
  const std::string text = arguments.Get("--shard").text;
  const std::string others = text.substr(0, text.size() - std::string_view("pp=any").size());
  const auto [options, file] = AskedWith(arguments, others + "pp=1");
  std::vector<std::string> words = {others + "pp=1"}, split;
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
            split.push_back(word + ":" + std::string(kPipelineScheduleNames[s]));
          }
        }
      }
    }
  } catch (const InputError& error) {  // more stages than blocks, or than ranks
    if (words.size() == 1) {
      Say("note: no pipelines: " + std::string(error.what()));
    }
    words.insert(words.end(), split.begin(), split.end());
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

// Four searches of split backward passes for each number of ranks: worth it for the best one alone.
bool MayGain(std::span<const DialectSearch> done, const Plan& next) {
  const auto best = std::min_element(
      done.begin(), done.end(),
      [](const DialectSearch& a, const DialectSearch& b) { return a.Cost() < b.Cost(); });
  return !SplitsBackward(next.pipeline_schedule) ||
         best->options.plan.pipeline_size == next.pipeline_size;
}

}  // namespace

int PlanVariants(const Arguments& arguments) {
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
    const auto count = static_cast<std::size_t>(search - searches.begin());
    if (count > 0 && !MayGain(std::span(searches).first(count), search->options.plan)) {
      search = searches.erase(search) - 1;
      continue;
    }
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

}  // namespace shardwright
