#include "schedule/plan.h"

#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/plan_fields.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

constexpr std::size_t kNoUnit = static_cast<std::size_t>(-1);

using internal::FieldOf;
using internal::UnitField;

// Module FQN -> module.
using ModuleIndex = std::map<std::string_view, ModuleId>;

ModuleIndex IndexModules(const Model& model) {
  ModuleIndex index;
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    index.emplace(model.modules[i].fqn, ModuleId(i));
  }
  return index;
}

// Which unit of the plan names each module itself; kNoUnit where none does.
std::vector<std::size_t> UnitsNamingModules(const Model& model, const Plan& plan,
                                            const ModuleIndex& index, const std::string& where) {
  std::vector<std::size_t> named_by(model.modules.size(), kNoUnit);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t m = 0; m < plan.units[u].modules.size(); ++m) {
      const std::string& fqn = plan.units[u].modules[m];
      const std::string field = UnitField(where, u, "modules[" + std::to_string(m) + "]");
      const auto found = index.find(fqn);
      if (found == index.end()) {
        throw internal::UnknownModule(model, fqn, field);
      }
      std::size_t& owner = named_by[FirstNameOf(model, found->second).value];
      if (owner != kNoUnit) {
        throw InputError(field, Quoted(fqn), "a module that no other entry names",
                         "unit " + Quoted(plan.units[owner].name) + " has it already");
      }
      owner = u;
    }
  }
  for (std::size_t m = 0; m < model.modules.size(); ++m) {  // a module has its unit by every name
    named_by[m] = named_by[FirstNameOf(model, ModuleId(m)).value];
  }
  return named_by;
}

// The unit that holds the parameters registered directly in each module: that of the nearest
// ancestor (or itself) that a unit names. Modules are stored in pre-order, parents first.
std::vector<std::size_t> UnitsOfModules(const Model& model,
                                        const std::vector<std::size_t>& named_by) {
  std::vector<std::size_t> unit_of(model.modules.size(), kNoUnit);
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const ModuleId parent = model.modules[m].parent;
    if (named_by[m] != kNoUnit) {
      unit_of[m] = named_by[m];
    } else if (m > 0) {  // a second tree, of a reference, belongs to the root's unit
      unit_of[m] = unit_of[parent.valid() ? parent.value : 0];
    }
  }
  return unit_of;
}

void CheckParameters(const Model& model, const Plan& plan, const std::vector<std::size_t>& unit_of,
                     const std::string& where) {
  const std::string units = FieldOf(where, "units");
  for (const Parameter& param : model.params) {
    const std::size_t unit = unit_of[param.module.value];
    if (unit == kNoUnit) {
      throw InputError(units, "no unit for parameter " + Quoted(param.fqn),
                       "units that cover every parameter",
                       "add the unit {\"name\": \"root\", \"modules\": [\"\"]}");
    }
    if (!param.tied_to.valid()) {
      continue;
    }
    const Parameter& storage = model.params[param.tied_to.value];
    const std::size_t other = unit_of[storage.module.value];
    if (other != unit) {
      throw InputError(
          units,
          "tied parameters " + Quoted(storage.fqn) + " in unit " + Quoted(plan.units[other].name) +
              " and " + Quoted(param.fqn) + " in unit " + Quoted(plan.units[unit].name),
          "both in one unit", "list both modules in one unit, or leave both to the root");
    }
  }
}

// Collects the parameters of one unit after the other. A module that another unit names ends the
// walk: it and all below belong to that unit or to units further in.
class ParameterWalk {
 public:
  ParameterWalk(const Model& model, const std::vector<std::size_t>& named_by, bool children_first)
      : model_(model),
        named_by_(named_by),
        children_first_(children_first),
        seen_(model.params.size(), false) {}

  void Visit(ModuleId id) {
    const Module& module = model_.modules[id.value];
    if (!children_first_) {
      TakeParameters(module);
    }
    for (const ModuleId child : module.children) {
      if (named_by_[child.value] == kNoUnit) {
        Visit(child);
      }
    }
    if (children_first_) {
      TakeParameters(module);
    }
    for (std::size_t m = 1; id == ModuleId(0) && m < model_.modules.size(); ++m) {
      if (!model_.modules[m].parent.valid() && named_by_[m] == kNoUnit) {
        Visit(ModuleId(m));
      }
    }
  }

  [[nodiscard]] std::vector<ParamId> Take() { return std::exchange(params_, {}); }

 private:
  // A storage joins where it is seen first, under whatever name that is.
  void TakeParameters(const Module& module) {
    for (const ParamId id : module.params) {
      const ParamId tied_to = model_.params[id.value].tied_to;
      const ParamId storage = tied_to.valid() ? tied_to : id;
      if (!seen_[storage.value]) {
        seen_[storage.value] = true;
        params_.push_back(storage);
      }
    }
  }

  const Model& model_;
  const std::vector<std::size_t>& named_by_;
  bool children_first_;
  std::vector<bool> seen_;
  std::vector<ParamId> params_;
};

void CheckPrefetchNames(const Plan& plan, const std::string& where) {
  std::vector<std::string> names = Mapped<std::string>(plan.units, &UnitPlan::name);
  const std::set<std::string_view> known(names.begin(), names.end());
  const auto check = [&](const std::vector<std::string>& list, std::size_t u, const char* field) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!known.contains(list[i])) {
        throw InputError(UnitField(where, u, field + ("[" + std::to_string(i) + "]")),
                         Quoted(list[i]), "the name of a unit", DidYouMean(list[i], names));
      }
    }
  };
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    check(plan.units[u].forward_prefetch, u, "forward_prefetch");
    check(plan.units[u].backward_prefetch, u, "backward_prefetch");
  }
}

}  // namespace

bool IsWide(const Job& job, const Parameter& param) {
  return AnyOf(job.fp32_masters,
               [&](const std::string& glob) { return MatchesGlob(glob, param.fqn); });
}

std::string AllocatorConf(const AllocatorSettings& settings) {
  std::string text;
  const auto add = [&](const std::string& setting) { text += (text.empty() ? "" : ",") + setting; };
  if (settings.expandable_segments) {
    add("expandable_segments:True");
  }
  if (settings.max_split_size > Bytes(0)) {
    add("max_split_size_mb:" + std::to_string(settings.max_split_size.value / kMiB.value));
  }
  if (settings.garbage_collection_threshold > 0) {
    add("garbage_collection_threshold:" + Fixed(settings.garbage_collection_threshold, "%.6g"));
  }
  if (settings.pinned_max_round_mib > 0) {
    add("pinned_max_round_threshold_mb:" + std::to_string(settings.pinned_max_round_mib));
  }
  return text;
}

std::string_view NameOf(Dialect dialect) {
  return NameIn(kDialectNames, dialect);
}

bool ScattersGradients(const Plan& plan) {
  return plan.zero.gradient_reduction == GradientReduction::kDefault
             ? plan.dialect == Dialect::kZero3
             : plan.zero.gradient_reduction == GradientReduction::kReduceScatter;
}

bool IsZero(Dialect dialect) {
  return FactsOf(dialect).is_zero;
}

bool IsTorch(Dialect dialect) {
  return dialect == Dialect::kFsdp2 || dialect == Dialect::kFsdp1 || dialect == Dialect::kDdp;
}

std::vector<ResolvedUnit> ResolveUnits(const Model& model, const Plan& plan,
                                       const std::string& where) {
  const ModuleIndex index = IndexModules(model);
  const std::vector<std::size_t> named_by = UnitsNamingModules(model, plan, index, where);
  CheckParameters(model, plan, UnitsOfModules(model, named_by), where);
  CheckPrefetchNames(plan, where);

  // FSDP2 collects modules by post-order, FSDP1's FlatParameter by pre-order; DDP and DeepSpeed
  // follow named_parameters(), which is pre-order, and native follows FSDP1.
  const bool children_first = plan.dialect == Dialect::kFsdp2;
  std::vector<ResolvedUnit> units;
  units.reserve(plan.units.size());
  ParameterWalk walk(model, named_by, children_first);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    ResolvedUnit unit;
    unit.name = plan.units[u].name;
    unit.full_precision = plan.units[u].full_precision;
    unit.planned = static_cast<std::uint32_t>(u);
    for (const std::string& fqn : plan.units[u].modules) {
      unit.modules.push_back(index.at(fqn));
      walk.Visit(unit.modules.back());
    }
    unit.params = walk.Take();
    units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace shardwright
