#include "planner/emitters/unit_classes.h"

#include <cstddef>
#include <map>
#include <set>

#include "core/ranges.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

void AppendPostOrder(const Model& model, ModuleId id, const std::set<std::string>& classes,
                     std::vector<ModuleId>& out) {
  const Module& module = model.modules[id.value];
  for (const ModuleId child : module.children) {
    AppendPostOrder(model, child, classes, out);
  }
  if (id != ModuleId(0) && classes.count(module.class_name) > 0) {
    out.push_back(id);
  }
}

}  // namespace

std::vector<std::string> UnitClasses(const Model& model, const std::vector<UnitPlan>& units) {
  std::set<std::string> alone;
  for (const UnitPlan& unit : units) {
    if (unit.modules.size() == 1 && !unit.modules[0].empty() && !unit.full_precision) {
      alone.insert(unit.modules[0]);
    }
  }
  std::map<std::string, bool> every_instance;
  for (std::size_t m = 1; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    const bool is_unit = alone.count(module.fqn) > 0;
    const auto [it, is_new] = every_instance.emplace(module.class_name, is_unit);
    it->second = it->second && is_unit;
  }
  std::vector<std::string> classes;
  for (const auto& [name, all] : every_instance) {
    if (all) {
      classes.push_back(name);
    }
  }
  return classes;
}

std::vector<std::string> NoSplitClasses(const Model& model) {
  std::vector<std::string> classes;
  for (const char* embeddings : {"BertEmbeddings", "ViTEmbeddings"}) {
    const bool has = IsIn(model.modules, embeddings, &Module::class_name);
    if (has) {
      classes.emplace_back(embeddings);
    }
  }
  classes.insert(classes.end(), model.block_classes.begin(), model.block_classes.end());
  return classes;
}

std::int64_t HiddenSize(const Model& model) {
  const std::vector<ModuleId> blocks = InstancesOf(model, model.block_classes);
  std::int64_t widest = 0;
  for (std::size_t m = 1; !blocks.empty() && m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    if (module.class_name.find("Norm") == std::string::npos ||
        !IsInside(model, ModuleId(m), blocks.back())) {
      continue;
    }
    for (const ParamId param : module.params) {
      widest = std::max(widest, model.params[param.value].Elements());
    }
  }
  return widest;
}

std::vector<ModuleId> InstancesOf(const Model& model, const std::vector<std::string>& classes) {
  std::vector<ModuleId> modules;
  AppendPostOrder(model, ModuleId(0), {classes.begin(), classes.end()}, modules);
  return modules;
}

std::vector<UnitPlan> UnitsOfModules(const Model& model, const std::vector<ModuleId>& modules) {
  std::vector<UnitPlan> units;
  for (const ModuleId id : modules) {
    UnitPlan unit;
    unit.name = model.modules[id.value].fqn;
    unit.modules = {unit.name};
    units.push_back(unit);
  }
  return units;
}

UnitPlan RootUnitOf(Reshard::Kind reshard) {
  UnitPlan root;
  root.name = "root";
  root.modules = {""};
  root.reshard.kind = reshard;
  return root;
}

std::vector<RecomputeRegion> FullRecompute(const Model& model,
                                           const std::vector<ModuleId>& modules) {
  std::vector<RecomputeRegion> regions;
  for (const ModuleId id : modules) {
    const bool is_inner =
        AnyOf(modules, [&](ModuleId other) { return other != id && IsInside(model, id, other); });
    if (!is_inner) {
      RecomputeRegion region;
      region.module = model.modules[id.value].fqn;
      regions.push_back(region);
    }
  }
  return regions;
}

bool RecomputesEveryBlock(const Model& model, const Plan& plan) {
  std::set<std::string> planned;
  for (const RecomputeRegion& region : plan.recompute) {
    if (region.kind != RecomputeKind::kFull) {
      return false;
    }
    planned.insert(region.module);
  }
  std::set<std::string> blocks;
  for (const ModuleId block : BlocksOf(model)) {
    blocks.insert(model.modules[block.value].fqn);
  }
  return !blocks.empty() && planned == blocks;
}

}  // namespace shardwright
