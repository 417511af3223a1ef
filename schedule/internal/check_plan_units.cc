#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/check_plan.h"
#include "schedule/lower/fetch_order.h"
#include "topologies/mesh.h"

namespace shardwright::internal {
namespace {

constexpr std::size_t kNoRegion = static_cast<std::size_t>(-1);

void CheckReshard(const UnitPlan& unit, std::size_t u, const Plan& plan, const std::string& where) {
  const std::string field = UnitField(where, u, "reshard");
  if (IsZero(plan.dialect) && unit.reshard.kind == Reshard::Kind::kNever) {
    throw InputError(field, "\"never\"", "\"always\"",
                     "dialect " + std::string(NameOf(plan.dialect)) +
                         " has no such choice: its stage decides what stays gathered");
  }
  if (unit.reshard.kind != Reshard::Kind::kToGroup) {
    return;
  }
  const std::int64_t group = unit.reshard.group;
  if (plan.tensor_size > 1) {
    throw InputError(field, std::to_string(group), "\"always\" or \"never\"",
                     "ranks cut layers (tensor_size)");
  }
  if (!FactsOf(plan).has_groups) {
    throw InputError(
        field, std::to_string(group), "\"always\" or \"never\"",
        "dialect " + std::string(NameOf(plan.dialect)) + " cannot reshard to a smaller group");
  }
  if (!MeshOf(plan).SplitsInto(group)) {
    throw InputError(field, std::to_string(group),
                     "a divisor of shard_size " + std::to_string(plan.shard_size));
  }
  if (group == 1 || group == plan.shard_size) {
    throw InputError(
        field, std::to_string(group),
        "a divisor of shard_size between 1 and " + std::to_string(plan.shard_size),
        group == 1 ? "one rank per copy is \"never\"" : "the whole shard group is \"always\"");
  }
}

void CheckPrefetchLists(const UnitPlan& unit, std::size_t u, const Plan& plan,
                        const std::string& where) {
  const auto check = [&](const std::vector<std::string>& list, const char* field) {
    if (list.empty()) {
      return;
    }
    if (!FactsOf(plan).has_groups) {
      throw InputError(
          UnitField(where, u, field), "a list", "none",
          "dialect " + std::string(NameOf(plan.dialect)) + " has no explicit prefetch lists");
    }
    std::set<std::string_view> seen;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string entry = field + ("[" + std::to_string(i) + "]");
      if (list[i] == unit.name) {
        throw InputError(UnitField(where, u, entry), Quoted(list[i]), "another unit");
      }
      if (!seen.insert(list[i]).second) {
        throw InputError(UnitField(where, u, entry), Quoted(list[i]), "each unit once");
      }
    }
  };
  check(unit.forward_prefetch, "forward_prefetch");
  check(unit.backward_prefetch, "backward_prefetch");
}

// Modules without a forward: what is hooked into them never runs.
std::map<std::string_view, std::string_view> Containers(const Model& model) {
  std::vector<bool> runs(model.modules.size(), false);
  for (const ModelOp& op : model.ops) {
    runs[op.module.value] = true;
  }
  std::map<std::string_view, std::string_view> found;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    if (!runs[m] && IsContainer(module.class_name)) {
      found.emplace(module.fqn, module.class_name);
    }
  }
  return found;
}

// Units are wrapped one by one, inner ones first: of two, not each may have a module inside the
// other.
void CheckNesting(const Plan& plan, const std::string& where) {
  std::map<std::string_view, std::size_t> unit_of;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (const std::string& fqn : plan.units[u].modules) {
      unit_of.emplace(fqn, u);
    }
  }
  std::set<std::pair<std::size_t, std::size_t>> inside;  // inner unit, outer unit
  for (const auto& [fqn, u] : unit_of) {
    for (std::size_t dot = fqn.rfind('.'); dot != std::string_view::npos && dot > 0;
         dot = fqn.rfind('.', dot - 1)) {
      const auto outer = unit_of.find(fqn.substr(0, dot));
      if (outer == unit_of.end() || outer->second == u) {
        continue;
      }
      if (inside.contains({outer->second, u})) {
        throw InputError(UnitField(where, u, "modules"),
                         "a module inside of unit " + Quoted(plan.units[outer->second].name) +
                             ", which has one inside of this unit",
                         "one of the two around the other", "fully_shard wraps inner units first");
      }
      inside.emplace(u, outer->second);
    }
  }
}

}  // namespace

void CheckUnits(const Plan& plan, const std::string& where) {
  if (plan.units.empty() || plan.units.back().modules != std::vector<std::string>{""}) {
    throw InputError(FieldOf(where, "units"), "no root unit at the end",
                     "the unit {\"name\": \"root\", \"modules\": [\"\"]} last");
  }
  std::set<std::string_view> names;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const UnitPlan& unit = plan.units[u];
    if (unit.name.empty() || !names.insert(unit.name).second) {
      throw InputError(UnitField(where, u, "name"), Quoted(unit.name),
                       "a name that no other unit has");
    }
    if (unit.modules.empty()) {
      throw InputError(UnitField(where, u, "modules"), "an empty list", "at least one FQN");
    }
    const bool is_root = u + 1 == plan.units.size();
    if (!is_root && CountOf(unit.modules, "") > 0) {
      throw InputError(UnitField(where, u, "modules"), "the root module \"\"",
                       "it in the last unit only");
    }
    if (FactsOf(plan).flat_units && unit.modules.size() > 1) {
      throw InputError(UnitField(where, u, "modules"),
                       std::to_string(unit.modules.size()) + " modules", "one module",
                       "dialect " + std::string(NameOf(plan.dialect)) + " cannot group modules");
    }
    if (unit.gap == Gap::kRegather && plan.dialect != Dialect::kNative &&
        plan.dialect != Dialect::kZero3) {
      throw InputError(UnitField(where, u, "gap"), "\"regather\"", "\"hold\"",
                       "only dialects native and zero3 gather a unit more than once per pass");
    }
    CheckReshard(unit, u, plan, where);
    CheckPrefetchLists(unit, u, plan, where);
  }
  if (plan.dialect == Dialect::kDdp && plan.units.size() > 1) {
    throw InputError(FieldOf(where, "units"), std::to_string(plan.units.size()) + " units",
                     "the root unit alone", "dialect ddp does not shard");
  }
}

void CheckRecompute(const Model& model, const Job& job, const Plan& plan,
                    const std::string& where) {
  if (plan.recompute.empty()) {
    return;
  }
  // A forward of the policy in front has a trace of its own (FetchOrder).
  const bool has_old = RunsPolicyBefore(job);
  const auto own = std::find_if(model.ops.begin(), model.ops.end(), [&](const ModelOp& op) {
    return !has_old || op.called_again == ModuleId(0);
  });
  if (plan.dialect == Dialect::kZero3 && std::any_of(own, model.ops.end(), [&](const ModelOp& op) {
        return model.SpecOf(op).other.stops_gradient;
      })) {
    throw InputError(FieldOf(where, "recompute"), "regions of a model with gradients that stop",
                     "none with them under dialect zero3",
                     "DeepSpeed's gathers are not known then");
  }
  std::map<std::string_view, std::size_t> region_of;
  for (std::size_t r = 0; r < plan.recompute.size(); ++r) {
    const std::string entry = "recompute[" + std::to_string(r) + "]";
    CheckRange(plan.recompute[r].keep_every, 1, kMaxAccumulation, where, entry + ".keep_every");
    if (!region_of.emplace(plan.recompute[r].module, r).second) {
      throw InputError(FieldOf(where, entry + ".module"), Quoted(plan.recompute[r].module),
                       "each module once");
    }
  }
  std::vector<std::size_t> inside(model.modules.size(), kNoRegion);  // nearest region at or above
  std::vector<bool> is_found(plan.recompute.size(), false);
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    inside[m] = module.parent.valid() ? inside[module.parent.value] : kNoRegion;
    const auto region = region_of.find(module.fqn);
    if (region == region_of.end()) {
      continue;
    }
    if (inside[m] != kNoRegion) {
      throw InputError(FieldOf(where, "recompute[" + std::to_string(region->second) + "].module"),
                       Quoted(module.fqn), "regions that do not overlap",
                       "it lies inside " + Quoted(plan.recompute[inside[m]].module));
    }
    inside[m] = region->second;
    is_found[region->second] = true;
  }
  for (std::size_t r = 0; r < plan.recompute.size(); ++r) {
    if (!is_found[r]) {
      throw UnknownModule(model, plan.recompute[r].module,
                          FieldOf(where, "recompute[" + std::to_string(r) + "].module"));
    }
  }
}

void CheckUncalledUnits(const Model& model, const Job& job, const Plan& plan,
                        const std::string& where) {
  if (plan.dialect != Dialect::kFsdp2 || job.mode != JobMode::kTrain ||
      plan.sync != SyncMode::kLast || plan.accumulation == 1 ||
      job.precision.reduce == job.precision.param || !RulesOf(plan.torch).reduces_sharded) {
    return;
  }
  std::vector<bool> runs(model.modules.size(), false);
  for (const ModelOp& op : model.ops) {
    for (ModuleId m = op.module; m.valid() && !runs[m.value]; m = model.modules[m.value].parent) {
      runs[m.value] = true;
    }
  }
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    const bool is_called = AnyOf(units[u].modules, [&](ModuleId m) {
      const ModuleId first = model.modules[m.value].same_as;
      return runs[first.valid() ? first.value : m.value];
    });
    if (!is_called && !units[u].params.empty() && !units[u].full_precision) {
      throw InputError(UnitField(where, u, "modules"),
                       "unit " + Quoted(units[u].name) + ", which nothing calls",
                       "one that runs, with sync \"last\" and a reduce dtype of its own",
                       "torch fails: 'FSDPParam' object has no attribute '_unsharded_param'; "
                       "leave the module to a unit around it");
    }
  }
}

void CheckFsdp(const Model& model, const Plan& plan, const std::string& where) {
  if (plan.dialect != Dialect::kFsdp2 && plan.dialect != Dialect::kFsdp1) {
    return;
  }
  CheckNesting(plan, where);
  if (plan.dialect == Dialect::kFsdp2 && !RulesOf(plan.torch).reshards_root &&
      plan.units.back().reshard.kind != Reshard::Kind::kNever) {
    throw InputError(UnitField(where, plan.units.size() - 1, "reshard"), "a root that is resharded",
                     "\"never\", or torch 2.8 or later", "fully_shard keeps its root until then");
  }
  const std::map<std::string_view, std::string_view> containers = Containers(model);
  const auto check = [&](const std::string& fqn, const std::string& field) {
    if (const auto found = containers.find(fqn); found != containers.end()) {
      throw InputError(field, Quoted(fqn), "modules with a forward",
                       "it is a " + std::string(found->second) + ", which torch never calls");
    }
  };
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t m = 0; m < plan.units[u].modules.size(); ++m) {
      check(plan.units[u].modules[m], UnitField(where, u, "modules[" + std::to_string(m) + "]"));
    }
  }
  for (std::size_t r = 0; r < plan.recompute.size(); ++r) {
    const RecomputeRegion& region = plan.recompute[r];
    const std::string entry = "recompute[" + std::to_string(r) + "]";
    if (region.module.empty()) {
      throw InputError(FieldOf(where, entry + ".module"), "the root module \"\"",
                       "modules inside of it",
                       "the whole model has no parent that could hold a checkpoint wrapper");
    }
    check(region.module, FieldOf(where, entry + ".module"));
  }
}

void CheckExpertUnits(const Model& model, const Plan& plan, const std::string& where) {
  if (plan.expert_size == 1) {
    return;
  }
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto parts = [&](ParamId p) { return model.params[p.value].parts; };
    const auto is_first = [&](ParamId p) { return parts(p) == parts(units[u].params.front()); };
    if (!AllOf(units[u].params, is_first)) {
      throw InputError(UnitField(where, u, "modules"),
                       "experts that ranks share out beside other parameters",
                       "a unit of their own for the experts of each layer");
    }
    if (!units[u].params.empty() && parts(units[u].params.front()) > 1 &&
        plan.units[u].reshard.kind == Reshard::Kind::kToGroup) {
      throw InputError(UnitField(where, u, "reshard"), std::to_string(plan.units[u].reshard.group),
                       "\"always\" or \"never\" for experts that ranks share out");
    }
  }
}

}  // namespace shardwright::internal
