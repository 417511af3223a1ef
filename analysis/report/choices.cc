#include "analysis/report/choices.h"

#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

namespace shardwright {
namespace {

void RequireSchema(const JsonValue& json, std::string_view schema, std::string_view source) {
  const std::optional<JsonValue> found = json.Find("schema");
  if (!found || !found->IsString() || found->AsString() != schema) {
    throw json.Error("what " + std::string(source) + " prints");
  }
}

// What is offloaded is in the family's name alone.
std::string LabelOf(const JsonValue& plan) {
  return plan.At("family").AsString() + ": " + plan.At("label").AsString();
}

// Among ties the search may choose a plan that another one beats: one that offloads less.
std::optional<ConsideredPlan> ChosenOf(const JsonValue& search) {
  if (!search.Find("label")) {
    return std::nullopt;  // no plan fits
  }
  const JsonValue memory = search.At("memory");
  ConsideredPlan plan;
  plan.label = LabelOf(search);
  plan.step_time = Seconds(search.At("step_time_s").AsDouble());
  plan.memory = Bytes(memory.At("allocated").AsInt() + memory.At("outside").AsInt());
  plan.is_chosen = true;
  return plan;
}

std::string SweepLabel(const JsonValue& row) {
  std::string label;
  for (const auto& [key, name] :
       {std::pair("nodes", "nodes"), std::pair("micro_batch", "micro-batch"),
        std::pair("sequence", "sequence"), std::pair("shard_size", "shard")}) {
    label +=
        (label.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(row.At(key).AsInt());
  }
  const auto mesh = row.Find("mesh");  // absent until 2026-11-30
  label += mesh && !mesh->AsString().empty() ? ", " + mesh->AsString() : "";
  const double bandwidth = row.At("bandwidth_factor").AsDouble();
  return bandwidth == 1.0 ? label : label + ", bandwidth x " + row.At("bandwidth_factor").Shown();
}

}  // namespace

void ReadSearch(const JsonValue& search, Choices& choices) {
  RequireSchema(search, "shardwright-plan-summary", "shardwright plan --json");
  const std::optional<ConsideredPlan> chosen = ChosenOf(search);
  const JsonValue pareto = search.At("pareto");
  bool is_shown = !chosen;
  for (std::size_t i = 0; i < pareto.size(); ++i) {
    ConsideredPlan plan;
    plan.label = LabelOf(pareto[i]);
    plan.step_time = Seconds(pareto[i].At("step_time_s").AsDouble());
    plan.memory = Bytes(pareto[i].At("memory_bytes").AsInt());
    plan.is_chosen = chosen && chosen->label == plan.label;
    if (!is_shown && chosen->step_time < plan.step_time) {
      choices.pareto.push_back(*chosen);
      is_shown = true;
    }
    is_shown = is_shown || plan.is_chosen;
    choices.pareto.push_back(std::move(plan));
  }
  if (!is_shown) {
    choices.pareto.push_back(*chosen);
  }
  const JsonValue rejected = search.At("rejected");
  for (std::size_t i = 0; i < rejected.size(); ++i) {
    choices.rejected.push_back(
        {rejected[i].At("family").AsString(), rejected[i].At("reason").AsString(),
         rejected[i].At("count").AsInt(), Seconds(rejected[i].At("best_time_s").AsDouble()),
         Bytes(rejected[i].At("least_deficit_bytes").AsInt())});
  }
}

void ReadSweep(const JsonValue& sweep, Choices& choices) {
  RequireSchema(sweep, "shardwright-sweep", "shardwright sweep --json");
  const JsonValue rows = sweep.At("rows");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].Find("step_time_s")) {
      continue;  // no such plan, or not predicted
    }
    ConsideredPlan plan;
    plan.label = SweepLabel(rows[i]) + (rows[i].At("fits").AsBool() ? "" : " (does not fit)");
    plan.step_time = Seconds(rows[i].At("step_time_s").AsDouble());
    plan.memory = Bytes(rows[i].At("device_bytes").AsInt());
    choices.what_if.push_back(std::move(plan));
  }
}

}  // namespace shardwright
