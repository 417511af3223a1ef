#include "schedule/lower/unit_parts.h"

#include <algorithm>
#include <utility>

namespace shardwright {
namespace {

// Per storage the modules that register it under some name, each by its first, sorted.
std::vector<std::vector<ModuleId>> OwnersOf(const Model& model) {
  std::vector<std::vector<ModuleId>> owners(model.params.size());
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    const ParamId tied_to = model.params[p].tied_to;
    std::vector<ModuleId>& of = owners[tied_to.valid() ? tied_to.value : p];
    of.push_back(FirstNameOf(model, model.params[p].module));
  }
  for (std::vector<ModuleId>& of : owners) {
    std::sort(of.begin(), of.end());
    of.erase(std::unique(of.begin(), of.end()), of.end());
  }
  return owners;
}

// A call of a module that holds another one gathers what both of them have.
std::vector<ModuleId> OuterOnes(const Model& model, const std::vector<ModuleId>& modules) {
  std::vector<ModuleId> outer = modules;
  std::erase_if(outer, [&](ModuleId id) {
    return std::any_of(modules.begin(), modules.end(),
                       [&](ModuleId other) { return other != id && IsInside(model, id, other); });
  });
  return outer;
}

std::string NameOf(const Model& model, const ResolvedUnit& unit,
                   const std::vector<ModuleId>& modules) {
  std::string name = unit.name + "/";
  for (const ModuleId m : modules) {
    name += (m == modules.front() ? "" : "+") + model.modules[m.value].fqn;
  }
  return name;
}

// Storages that some op has behind its first parameter, by which its gradients go.
std::vector<bool> ReadBehindOthers(const Model& model) {
  std::vector<bool> behind(model.params.size(), false);
  for (const ModelOp& op : model.ops) {
    for (std::size_t k = 1; k < op.params.size(); ++k) {
      const ParamId tied_to = model.params[op.params[k].value].tied_to;
      behind[(tied_to.valid() ? tied_to : op.params[k]).value] = true;
    }
  }
  return behind;
}

}  // namespace

std::vector<ResolvedUnit> SplitByModules(const Model& model, std::vector<ResolvedUnit> units) {
  const std::vector<std::vector<ModuleId>> owners = OwnersOf(model);
  const std::vector<bool> behind = ReadBehindOthers(model);
  const std::size_t planned = units.size();
  for (std::size_t u = 0; u < planned; ++u) {
    const auto count_shared = [&](bool is_behind) {
      return std::count_if(units[u].params.begin(), units[u].params.end(), [&](ParamId p) {
        return owners[p.value].size() > 1 && behind[p.value] == is_behind;
      });
    };
    if (count_shared(false) == 0 || count_shared(true) > 0 || units[u].modules.size() == 1) {
      continue;
    }
    std::vector<ResolvedUnit> parts;
    for (const ParamId p : units[u].params) {
      const std::vector<ModuleId> modules = OuterOnes(model, owners[p.value]);
      auto part = std::find_if(parts.begin(), parts.end(),
                               [&](const ResolvedUnit& other) { return other.modules == modules; });
      if (part == parts.end()) {
        const std::string name = parts.empty() ? units[u].name : NameOf(model, units[u], modules);
        parts.push_back({name, modules, {}, units[u].full_precision, units[u].planned});
        part = std::prev(parts.end());
      }
      part->params.push_back(p);
    }
    units[u] = parts.front();
    units.insert(units.end(), std::next(parts.begin()), parts.end());
  }
  return units;
}

}  // namespace shardwright
