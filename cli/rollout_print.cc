#include "cli/rollout_print.h"

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/text.h"

namespace shardwright {

void AddPhases(const PlanFile& file, const RolloutPhases& p, Table& table) {
  const Rollout& rollout = file.job.rollout;
  const std::string told = "--mode grpo,seconds=X says it";
  table.Row({"generation", !p.generation ? "not known, and not in the step: " + told
                           : p.least.value < p.most.value
                               ? "about " + Format(*p.generation) + ", " + Format(p.least) +
                                     " to " + Format(p.most) + "; " + told
                               : Format(*p.generation) + ", as --mode says"});
  if (p.engine > Bytes(0)) {
    table.Row({"engine",
               Format(p.engine) + " of each GPU" + (rollout.sleeps ? " while it generates" : "") +
                   ", " + Format(p.cache) + " of it for keys and values of " +
                   WithCommas(p.concurrent) + " samples; it generates " + WithCommas(p.samples)});
  }
  if (p.weights > Seconds(0)) {
    table.Row({"weights to engine", Format(p.weights)});
  }
  if (p.log_probabilities > Seconds(0)) {
    table.Row({"log-probabilities", Format(p.log_probabilities)});
  }
  table.Row({"learning", Format(p.learning)});
  table.Row({"generations per step", Fixed(p.generations_per_step, "%.3g")});
}

nlohmann::ordered_json PhasesJson(const RolloutPhases& p) {
  using Json = nlohmann::ordered_json;
  return {{"step_s", p.step.value},
          {"generation_s", p.generation ? Json(p.generation->value) : Json()},
          {"generation_least_s", p.least.value},
          {"generation_most_s", p.most.value},
          {"weights_s", p.weights.value},
          {"log_probabilities_s", p.log_probabilities.value},
          {"learning_s", p.learning.value},
          {"generations_per_step", p.generations_per_step},
          {"engine_bytes", p.engine.value},
          {"engine_cache_bytes", p.cache.value},
          {"samples", p.samples},
          {"samples_at_once", p.concurrent}};
}

std::string WithPhases(const Arguments& arguments, const PlanFile& file, Seconds step_time,
                       std::string report) {
  const std::optional<RolloutPhases> phases = PhasesOf(file, step_time);
  if (!phases) {
    return report;
  }
  if (arguments.IsJson()) {
    nlohmann::ordered_json json = ParseOrdered(report, "report");
    json["phases"] = PhasesJson(*phases);
    return json.dump(2) + "\n";
  }
  Table table({Table::Align::kLeft, Table::Align::kLeft});
  AddPhases(file, *phases, table);
  return report + "\nA step with its generation: " + Format(phases->step) + "\n" + table.Text(2);
}

}  // namespace shardwright
