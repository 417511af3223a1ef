// The parts of the report of a search that compare: with the usual plans, with other choices, with
// other node counts.

#include <cmath>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/plan_search.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// "1.8 % slower".
std::string SlowerText(Seconds time, Seconds chosen) {
  const double ratio = time.value / chosen.value - 1;
  return Percent(ratio < 0 ? -ratio : ratio) + (ratio < 0 ? " faster" : " slower");
}

std::string FateOf(const Alternative& a, Seconds chosen) {
  std::string text = a.is_simulated ? SlowerText(a.step_time, chosen)
                                    : "not below " + Format(a.step_time) + " (bound)";
  if (!a.fits && a.deficit > Bytes(0)) {
    text = Format(a.deficit) + " missing" + (a.is_simulated ? ", " + text : "");
  }
  return text;
}

// Why a faster baseline was not chosen; empty: it is not faster.
std::string WhyNot(const BaselineResult& baseline, const SearchedPlan& searched) {
  const SearchResult& r = searched.result;
  std::string text;
  if (baseline.outcome->retries_per_step > 0) {
    text = ", with " + WithCommas(baseline.outcome->retries_per_step) + " allocator retries";
  } else if (baseline.outcome->first_retries > 0) {
    text = ", with " + WithCommas(baseline.outcome->first_retries) +
           " allocator retries in the first step";
  }
  if (!r.is_feasible || baseline.outcome->step_time >= r.best.step_time) {
    return text;
  }
  const Dialect dialect = baseline.plan.dialect;
  if (dialect != searched.file.plan.dialect) {
    return text + ", but that is --dialect " + std::string(NameOf(dialect));
  }
  const Bytes more = baseline.outcome->DeviceTotal() - r.candidates[r.best.index].Needs();
  return more > Bytes(0) ? text + ", but needs " + Format(more) + " more" : text;
}

}  // namespace

std::string BaselinesText(const SearchedPlan& searched) {
  if (searched.baselines.empty()) {
    return "";
  }
  Table table({kLeft, kRight, kRight, kLeft});
  const bool is_feasible = searched.result.is_feasible;
  const Seconds chosen = searched.result.best.step_time;
  if (is_feasible) {
    table.Row({"this plan", Format(chosen),
               Format(searched.result.candidates[searched.result.best.index].Needs()), ""});
  }
  for (const BaselineResult& baseline : searched.baselines) {
    const std::string name(NameOf(baseline.baseline));
    if (!baseline.outcome) {
      const Plan& plan = searched.file.plan;
      table.Row({name, "-", "-",
                 plan.tensor_size > 1 || plan.expert_size > 1 || plan.context_size > 1
                     ? "not compared: it neither cuts layers or tokens nor shares out experts"
                     : "cannot be applied"});
      continue;
    }
    const Outcome& outcome = *baseline.outcome;
    const std::string choice = "micro-batch " + std::to_string(baseline.choice.micro_batch) +
                               ", recompute " + std::string(RecomputeName(baseline.choice)) +
                               (baseline.fuses_adam ? ", Adam fused" : "");
    if (!baseline.Fits()) {
      table.Row({name, "-", Format(searched.result.memory_limit + outcome.Excess()),
                 choice + ": over by " + Format(outcome.Excess())});
      continue;
    }
    const Seconds time = outcome.step_time;
    table.Row({name, Format(time), Format(outcome.DeviceTotal()),
               choice + (is_feasible ? ": " + SlowerText(time, chosen) : "") +
                   WhyNot(baseline, searched)});
  }
  return "\nWhat the usual frameworks would do (step time, memory per GPU: reserved and "
         "outside)\n" +
         table.WrappedText(2);
}

std::string ExplanationText(const SearchedPlan& searched) {
  if (!searched.explanation) {
    return "";
  }
  const Explanation& e = *searched.explanation;
  const Seconds chosen = searched.result.best.step_time;
  Table table({kLeft, kLeft, kLeft});
  for (const Alternative& a : e.alternatives) {
    table.Row(
        {a.choice, a.value, FateOf(a, chosen) + (a.is_refitted ? ", the rest refitted" : "")});
  }
  std::string text = "\nThe nearest other choices\n" + table.Text(2);
  Table gains({kLeft, kLeft});
  for (const Sensitivity& s : e.sensitivities) {
    gains.Row({s.what, Percent(s.gain) + " less time"});
  }
  text += "\nWhat binds: with a tenth more of it\n" + gains.Text(2);
  for (const std::string& note : e.notes) {
    text += note + "\n";
  }
  return text;
}

std::string NodeCountsText(const SearchedPlan& searched) {
  if (searched.counts.empty()) {
    return "";
  }
  Table table({kRight, kRight, kRight, kRight, kRight, kLeft});
  table.Row({"nodes", "GPUs", "step time", "days", "GPU-hours", ""});
  constexpr double kSecondsPerDay = 86400;
  for (const NodeCountResult& row : searched.counts) {
    if (!row.Fits()) {
      table.Row({WithCommas(row.nodes), WithCommas(row.ranks), "-", "-", "-", row.refusal});
      continue;
    }
    table.Row({WithCommas(row.nodes), WithCommas(row.ranks), Format(row.result->best.step_time),
               Fixed(row.total.value / kSecondsPerDay, "%.2f"),
               WithCommas(static_cast<std::int64_t>(std::llround(row.gpu_hours))),
               row.nodes == searched.file.cluster.node_count ? "chosen" : ""});
  }
  return "\nNode counts for the token budget\n" + table.Text(2);
}

Json BaselineJson(const BaselineResult& baseline) {
  Json row = {{"name", NameOf(baseline.baseline)}, {"fits", baseline.Fits()}};
  if (!baseline.Fits()) {
    row["reason"] = baseline.refusal;
  }
  if (baseline.outcome) {
    row["micro_batch"] = baseline.choice.micro_batch;
    row["accumulation"] = baseline.choice.accumulation;
    row["recompute"] = RecomputeName(baseline.choice);
    row["step_time_s"] = baseline.outcome->step_time.value;
  }
  return row;
}

void AddBaselinesJson(const SearchedPlan& searched, Json& json) {
  json["baselines"] = Json::array();
  for (const BaselineResult& baseline : searched.baselines) {
    Json row = BaselineJson(baseline);
    if (baseline.outcome) {
      row["memory_bytes"] = baseline.outcome->DeviceTotal().value;
      row["deficit_bytes"] = baseline.outcome->Excess().value;
    }
    json["baselines"].push_back(row);
  }
}

void AddExplanationJson(const SearchedPlan& searched, Json& json) {
  if (!searched.explanation) {
    return;
  }
  Json alternatives =
      Mapped<Json>(searched.explanation->alternatives, [&](const Alternative& a) -> Json {
        return {{"choice", a.choice},
                {"value", a.value},
                {"refitted", a.is_refitted},
                {"simulated", a.is_simulated},
                {"fits", a.fits},
                {"step_time_s", a.step_time.value},
                {"memory_bytes", a.memory.value},
                {"deficit_bytes", a.deficit.value}};
      });
  Json binds = Mapped<Json>(searched.explanation->sensitivities, [&](const Sensitivity& s) -> Json {
    return {{"what", s.what}, {"gain_of_a_tenth", s.gain}};
  });
  json["explanation"] = {
      {"alternatives", alternatives}, {"binds", binds}, {"notes", searched.explanation->notes}};
}

void AddNodeCountsJson(const SearchedPlan& searched, Json& json) {
  if (searched.counts.empty()) {
    return;
  }
  json["node_counts"] = Json::array();
  for (const NodeCountResult& row : searched.counts) {
    Json entry = {{"nodes", row.nodes}, {"ranks", row.ranks}, {"fits", row.Fits()}};
    if (row.Fits()) {
      entry["step_time_s"] = row.result->best.step_time.value;
      entry["steps"] = row.steps;
      entry["total_s"] = row.total.value;
      entry["gpu_hours"] = row.gpu_hours;
    } else {
      entry["reason"] = row.refusal;
    }
    json["node_counts"].push_back(entry);
  }
}

}  // namespace shardwright
