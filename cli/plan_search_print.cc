#include <string>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_search.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "schedule/dialect_facts.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// Rows of long lists in the report for people.
constexpr std::size_t kMostRows = 8;

// "3.1 % of the GPU's memory is left free for the error of this prediction; ...".
std::string MarginText(const SearchedPlan& searched) {
  const Job& job = searched.file.job;
  const bool is_default =
      job.memory_margin == DefaultMargin(searched.file.cluster, searched.file.profile);
  return Percent(job.memory_margin) + " of the GPU's memory is left free" +
         (is_default ? " for the error of this prediction; --memory-margin says otherwise" : "");
}

std::string PlanRows(const SearchedPlan& searched) {
  const SearchResult& r = searched.result;
  const Candidate& chosen = r.candidates[r.best.index];
  Table table({kLeft, kLeft});
  table.Row({"plan", chosen.family + ": " + chosen.label});
  const double band = searched.confidence.band * r.best.step_time.value;
  table.Row({"step time", Format(r.best.step_time) + " +- " + Format(Seconds(band))});
  if (!searched.confidence.text.empty()) {  // empty: interrupted
    table.Row({"how sure", HowSure(searched.confidence)});
  }
  table.Row(
      {"lower bound",
       Format(r.lower_bound) + ": no " + std::string(NameOf(searched.file.plan.dialect)) +
           " plan of this search takes less, so at most " + Percent(r.proven_gap) +
           " of the step could be saved" +
           (FactsOf(searched.file.plan).is_zero ? " (ZeRO's communication is not counted)" : "")});
  const bool is_piped = searched.file.plan.pipeline_size > 1;
  if (is_piped) {
    table.Row({"bubble", Percent(r.best.bubble.value / r.best.step_time.value) +
                             " of the step: GPUs wait for other stages, in the mean of all"});
  }
  table.Row(
      {"memory", Format(chosen.Needs()) + " of " + Format(r.memory_limit) + " per GPU" +
                     (is_piped ? " of the fullest stage; PyTorch's allocator keeps more" : "")});
  if (searched.is_explained && !is_piped) {
    const bool has_arena = FactsOf(searched.file.plan).has_arena;
    table.Row({"", Format(r.best.reserved) +
                       (has_arena ? " in the arena, " : " reserved by PyTorch's allocator, ") +
                       Format(r.best.peak.total) + " of it allocated at the peak; " +
                       Format(r.best.outside) + " outside the allocator"});
  }
  if (searched.file.job.memory_margin > 0 && searched.is_explained) {
    table.Row({"margin", MarginText(searched)});
  }
  if (r.best.retries > 0) {
    table.Row({"warning", "the allocator runs out of memory " + WithCommas(r.best.retries) +
                              " times per step and gives back what it keeps; of the plans "
                              "that fit without none was found, or they take half as long again"});
  }
  if (r.best.host_memory > Bytes(0)) {
    table.Row({"host memory", Format(r.best.host_memory) + " per node"});
  }
  if (searched.offload_time) {
    const double gain = 1 - searched.offload_time->value / r.best.step_time.value;
    table.Row({"offloading", Format(*searched.offload_time) + ", " + Percent(gain) +
                                 " less, which is within the error of this prediction; --offload "
                                 "parameters searches such plans"});
  }
  if (searched.native_time && *searched.native_time < r.best.step_time) {
    const double gain = 1 - searched.native_time->value / r.best.step_time.value;
    table.Row({"native", Format(*searched.native_time) + ", " + Percent(gain) +
                             " less, with the same choices under Shardwright's own schedule; "
                             "--dialect native plans it"});
  }
  return table.WrappedText(2);
}

std::string FixesText(const std::vector<Fix>& fixes) {
  if (fixes.empty()) {
    return "No single change that was tried makes it fit.\n";
  }
  Table table({kLeft, kRight, kRight, kLeft});
  for (const Fix& fix : fixes) {
    table.Row({fix.change, Format(fix.step_time), Format(fix.memory), fix.label});
  }
  return "Each of these alone makes it fit (step time, memory per GPU)\n" + table.WrappedText(2);
}

std::string FloorText(const SearchResult& r) {
  const Candidate& c = r.floor.candidate;
  const Bytes host = r.floor.host_deficit;
  std::string text = "No plan fits into " + Format(r.memory_limit) + " per GPU" +
                     (host > Bytes(0) ? " and the nodes' host memory" : "") + ".\n";
  if (c.label.empty()) {
    return text;
  }
  text += "The least memory found is " + Format(c.memory) + " per GPU: " + c.family + ", " +
          c.label + "\n";
  text = Wrapped(text, kReportWidth, 2);
  if (c.status == CandidateStatus::kOverHost) {
    text += "It takes " + Format(c.host_memory) + " of page-locked host memory per node, " +
            Format(c.deficit) + " too much.\n";
  } else if (host > Bytes(0)) {
    text += "Plans that offload take at least " + Format(host) +
            " of page-locked host memory per node too much.\n";
  }
  Table table({kLeft, kRight});
  for (std::size_t i = 0; i < kCategoryCount; ++i) {
    if (r.floor.peak.by_category[i] > Bytes(0)) {
      table.Row(
          {std::string(NameOf(static_cast<Category>(i))), Format(r.floor.peak.by_category[i])});
    }
  }
  table.Row({"outside the allocator", Format(r.floor.outside)});
  return text + table.Text(2);
}

// The front: the fastest plan of each memory limit.
std::string FrontRows(const SearchResult& r, bool is_whole) {
  Table table({kLeft, kRight, kRight, kLeft});
  const std::size_t rows = is_whole ? r.pareto.size() : std::min(r.pareto.size(), kMostRows);
  for (std::size_t i = 0; i < rows; ++i) {
    const Candidate& c = r.candidates[r.pareto[i]];
    const bool is_chosen = r.is_feasible && r.pareto[i] == r.best.index;
    const std::string why = is_chosen           ? " (this plan)"
                            : c.why_not.empty() ? ""
                                                : " (" + c.why_not + ")";
    table.Row({c.family, Format(c.step_time), Format(c.Needs()), c.label + why});
  }
  return r.pareto.empty() ? "" : "\nTime against memory\n" + table.WrappedText(2);
}

// Reasons of RejectedFamily in plain words.
std::string ReasonWords(const std::string& reason) {
  return reason == "memory"        ? "does not fit"
         : reason == "host memory" ? "does not fit the host"
         : reason == "bound"       ? "cannot be faster"
         : reason == "within 1 %"  ? "no simpler, 1 % faster at most"
                                   : reason;
}

std::string RejectedRows(const SearchResult& r) {
  Table rejected({kLeft, kLeft, kRight, kLeft});
  std::vector<RejectedFamily> families = r.rejected;
  StableSort(families, [](const auto& x, const auto& y) { return x.family < y.family; });
  std::string before;
  for (const RejectedFamily& f : families) {
    std::string detail;
    if (f.best_time.value > 0) {
      detail = "best " + Format(f.best_time);
    } else if (f.reason == "bound") {
      detail = "none below " + Format(f.bound);
    }
    if (f.least_deficit > Bytes(0)) {
      detail += (detail.empty() ? "" : ", ") + std::string("at least ") + Format(f.least_deficit) +
                " missing";
    }
    const std::string name = f.family == before ? "" : f.family;
    rejected.Row({name, ReasonWords(f.reason), WithCommas(f.count), detail});
    before = f.family;
  }
  return "\nNot chosen: how many plans, and why\n" + rejected.WrappedText(2);
}

Json CandidateJson(const Candidate& c) {
  Json json;
  json["family"] = c.family;
  json["label"] = c.label;
  json["status"] = NameOf(c.status);
  json["step_time_s"] = c.step_time.value;
  json["memory_bytes"] = c.Needs().value;
  if (!c.why_not.empty()) {
    json["why_not"] = c.why_not;
  }
  json["host_memory_bytes"] = c.host_memory.value;
  json["lower_bound_s"] = c.bound.value;
  json["memory_bound_bytes"] = c.memory_bound.value;
  json["deficit_bytes"] = c.deficit.value;
  return json;
}

Json MemoryJson(const MemoryPeak& peak, Bytes outside) {
  Json json;
  for (std::size_t i = 0; i < kCategoryCount; ++i) {
    json[std::string(NameOf(static_cast<Category>(i)))] = peak.by_category[i].value;
  }
  json["allocated"] = peak.total.value;
  json["outside"] = outside.value;
  return json;
}

void AddChosen(const SearchedPlan& searched, Json& json) {
  const SearchResult& r = searched.result;
  const Plan& plan = searched.file.plan;
  AddMesh(plan, json);
  json["units"] = plan.units.size();
  json["family"] = r.candidates[r.best.index].family;
  json["label"] = r.candidates[r.best.index].label;
  json["step_time_s"] = r.best.step_time.value;
  json["step_time_band"] = searched.confidence.band;
  json["profile"] = searched.file.profile.name;
  json["confidence"] = searched.confidence.text;
  json["lower_bound_s"] = r.lower_bound.value;
  json["proven_gap"] = r.proven_gap;
  json["memory"] = MemoryJson(r.best.peak, r.best.outside);
  json["memory"]["reserved"] = r.best.reserved.value;
  json["memory_bytes"] = r.candidates[r.best.index].Needs().value;
  json["memory_margin"] = searched.file.job.memory_margin;
  json["retries_per_step"] = r.best.retries;
  if (searched.offload_time) {
    json["offload_step_time_s"] = searched.offload_time->value;
  }
  if (searched.native_time) {
    json["native_step_time_s"] = searched.native_time->value;
  }
  json["host_memory_bytes"] = r.best.host_memory.value;
  if (plan.pipeline_size > 1) {
    json["bubble_fraction"] = r.best.bubble.value / r.best.step_time.value;
  }
}

// `with_plans`: each with its choices, as they stand under "plan" of a plan file.
Json FrontJson(const SearchedPlan& searched, bool with_plans) {
  Json json = Json::array();
  PlanFile file = searched.file;
  for (const std::size_t i : searched.result.pareto) {
    const Candidate& c = searched.result.candidates[i];
    json.push_back(CandidateJson(c));
    if (with_plans) {
      file.plan = c.plan;
      json.back()["plan"] = ParseOrdered(PlanFileJson(file), "plan")["plan"];
    }
  }
  return json;
}

}  // namespace

std::string SearchText(const SearchedPlan& searched, const std::string& output) {
  const SearchResult& r = searched.result;
  PlanFile file = searched.file;
  std::string text = TitleOf(file) + "\n";
  text += r.is_feasible ? PlanRows(searched) : FloorText(r) + FixesText(searched.fixes);
  text += BaselinesText(searched) + NodeCountsText(searched) + ExplanationText(searched);
  if (searched.is_explained || searched.whole_front) {
    text += FrontRows(r, searched.whole_front) + RejectedRows(r);
  }
  text += "\n" + WithCommas(r.simulated) + " plans simulated in " + Format(r.search_time) + ", " +
          WithCommas(r.pruned_by_memory + r.pruned_by_time) +
          " kinds of plans ruled out by bounds" + (r.is_complete ? "" : "; stopped early") +
          (searched.is_explained ? "" : "; --explain says why each was not chosen") + "\n";
  return r.is_feasible && !output.empty() ? text + "Wrote " + output + "\n" : text;
}

Json FixesJson(const std::vector<Fix>& fixes) {
  return Mapped<Json>(fixes, [&](const Fix& fix) -> Json {
    return {{"change", fix.change},
            {"step_time_s", fix.step_time.value},
            {"memory_bytes", fix.memory.value},
            {"label", fix.label}};
  });
}

std::string SearchJson(const SearchedPlan& searched, const std::string& output) {
  const SearchResult& r = searched.result;
  const PlanFile& file = searched.file;
  Json json = ReportHead("shardwright-plan-summary");
  json["file"] = output;
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["ranks"] = file.cluster.RankCount();
  json["global_batch"] = file.job.global_batch;
  json["sequence_length"] = file.job.sequence_length;
  json["feasible"] = r.is_feasible;
  json["memory_limit_bytes"] = r.memory_limit.value;
  if (r.is_feasible) {
    AddChosen(searched, json);
  } else {
    json["floor"] = CandidateJson(r.floor.candidate);
    json["floor"]["host_deficit_bytes"] = r.floor.host_deficit.value;
    json["floor"]["memory"] = MemoryJson(r.floor.peak, r.floor.outside);
    json["fixes"] = FixesJson(searched.fixes);
  }
  json["search_s"] = r.search_time.value;
  json["complete"] = r.is_complete;
  json["candidates"] = {{"simulated", r.simulated},
                        {"pruned_by_memory", r.pruned_by_memory},
                        {"pruned_by_time", r.pruned_by_time}};
  json["pareto"] = FrontJson(searched, output.empty());
  json["rejected"] = Mapped<Json>(r.rejected, [&](const RejectedFamily& f) -> Json {
    return {{"family", f.family},
            {"reason", f.reason},
            {"count", f.count},
            {"best_time_s", f.best_time.value},
            {"lower_bound_s", f.bound.value},
            {"least_deficit_bytes", f.least_deficit.value}};
  });
  AddBaselinesJson(searched, json);
  AddNodeCountsJson(searched, json);
  AddExplanationJson(searched, json);
  if (r.is_feasible && output.empty()) {
    json["plan_file"] = ParseOrdered(PlanFileJson(file), "plan");
  }
  return json.dump(2) + "\n";
}

}  // namespace shardwright
