#include "analysis/fit_gate.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/ordered_json.h"
#include "planner/evaluate.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// Sections are the values of the file, but those of the job and the plan are each of theirs.
std::vector<std::string> SectionsOf(const Json& before, const Json& after) {
  std::vector<std::string> sections;
  const auto add = [&](const Json& a, const Json& b, const std::string& prefix) {
    for (const Json* side : {&a, &b}) {
      for (const auto& [key, value] : side->items()) {
        const bool is_new = side == &a || !a.contains(key);
        const bool is_nested = prefix.empty() && (key == "job" || key == "plan");
        if (is_new && !is_nested && a.value(key, Json()) != b.value(key, Json())) {
          sections.push_back(prefix + key);
        }
      }
    }
  };
  add(before, after, "");
  for (const char* outer : {"job", "plan"}) {
    add(before.at(outer), after.at(outer), std::string(outer) + ".");
  }
  return sections;
}

void Restore(const std::string& section, const Json& before, Json& after) {
  const Json* from = &before;
  Json* to = &after;
  std::string key = section;
  if (const std::size_t dot = section.find('.'); dot != std::string::npos) {
    from = &before.at(section.substr(0, dot));
    to = &after.at(section.substr(0, dot));
    key = section.substr(dot + 1);
  }
  if (from->contains(key)) {
    (*to)[key] = from->at(key);
  } else {
    to->erase(key);
  }
}

}  // namespace

std::string_view NameOf(GateMetric metric) {
  static constexpr std::array<std::string_view, kGateMetricCount> kNames = {
      "memory", "step_time", "exposed", "gpu_hours_per_1e9_tokens"};
  return kNames[static_cast<std::size_t>(metric)];
}

GateFigures GateFiguresOf(const PlanFile& file) {
  const Outcome outcome = Evaluate(file, file.plan);
  GateFigures figures;
  const double step = outcome.step_time.value;
  const double rate = outcome.rates.tokens_per_second_per_gpu;
  figures.values = {static_cast<double>(outcome.DeviceTotal().value), step,
                    outcome.exposed_comm.value / step, rate > 0 ? 1e9 / rate / 3600 : 0.0};
  for (const Misfit& misfit : outcome.misfits) {
    figures.misfits.push_back(misfit.text);
  }
  return figures;
}

GateCauses FindCauses(const PlanFile& before, const PlanFile& after) {
  constexpr double kPart = 0.1;
  const Json old_json = ParseOrdered(PlanFileJson(before), "plan");
  const Json new_json = ParseOrdered(PlanFileJson(after), "plan");
  const GateFigures then = GateFiguresOf(before);
  std::array<double, kGateMetricCount> least = GateFiguresOf(after).values;
  for (std::size_t i = 0; i < kGateMetricCount; ++i) {
    least[i] -= kPart * (least[i] - then.values[i]);
  }
  GateCauses causes;
  for (const std::string& section : SectionsOf(old_json, new_json)) {
    Json changed = new_json;
    Restore(section, old_json, changed);
    try {
      const GateFigures figures = GateFiguresOf(ParsePlanFile(changed.dump(), section));
      for (std::size_t i = 0; i < kGateMetricCount; ++i) {
        if (figures.values[i] < least[i]) {
          least[i] = figures.values[i];
          causes[i] = section;
        }
      }
    } catch (const InputError&) {
      continue;  // a choice that only stands together with another
    }
  }
  return causes;
}

}  // namespace shardwright
