// Units for what mixed precision leaves alone.

#include <set>
#include <string>
#include <vector>

#include "schedule/dialect_facts.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

std::vector<std::string> MarkedModules(const Model& model) {
  std::vector<std::string> marked;
  for (const Module& module : model.modules) {
    if (!module.params.empty() && model.params[module.params.front().value].full_precision) {
      marked.push_back(module.fqn);
    }
  }
  return marked;
}

// Units that hold nothing else go, and are gathered ahead by nobody.
void TakeOut(const std::set<std::string>& modules, std::vector<UnitPlan>& units) {
  std::set<std::string> gone;
  std::erase_if(units, [&](UnitPlan& unit) {
    std::erase_if(unit.modules, [&](const std::string& m) { return modules.contains(m); });
    return unit.modules.empty() && gone.insert(unit.name).second;
  });
  for (UnitPlan& unit : units) {
    for (auto* list : {&unit.forward_prefetch, &unit.backward_prefetch}) {
      std::erase_if(*list, [&](const std::string& name) { return gone.contains(name); });
    }
  }
}

}  // namespace

void KeepFullPrecision(const Model& model, const Precision& precision, Plan& plan) {
  const std::vector<std::string> marked = MarkedModules(model);
  if (marked.empty() || precision.param == precision.master || !FactsOf(plan).frees_units) {
    return;
  }
  const bool is_fsdp1 = plan.dialect == Dialect::kFsdp1;
  TakeOut({marked.begin(), marked.end()}, plan.units);
  const bool has_others = plan.units.size() > 1;
  const Reshard others = has_others ? plan.units.front().reshard : Reshard();
  std::vector<UnitPlan> kept;
  for (const std::string& module : marked) {
    if (kept.empty() || is_fsdp1) {
      UnitPlan& unit = kept.emplace_back();
      unit.name = !is_fsdp1 && marked.size() > 1 ? "full_precision" : module;
      unit.reshard = is_fsdp1 ? others : Reshard{Reshard::Kind::kNever, 0};
      unit.full_precision = true;
    }
    kept.back().modules.push_back(module);
  }
  // Wrapping goes bottom up, and others may hold them inside.
  plan.units.insert(plan.units.begin(), kept.begin(), kept.end());
}

}  // namespace shardwright
