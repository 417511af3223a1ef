#include "schedule/lower/unit_parts.h"

#include <algorithm>
#include <utility>

#include "schedule/lower/analysis.h"

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

// Are all of them modules of the unit, each by its first name?
bool AreOf(const Model& model, const ResolvedUnit& unit, const std::vector<ModuleId>& modules) {
  return std::all_of(modules.begin(), modules.end(), [&](ModuleId module) {
    return std::any_of(unit.modules.begin(), unit.modules.end(),
                       [&](ModuleId m) { return FirstNameOf(model, m) == module; });
  });
}

std::string NameOf(const Model& model, const ResolvedUnit& unit, ParamId p) {
  return unit.name + "/" + model.params[p.value].fqn;
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

// Per module: some op runs inside of it, and its class is none that only lists others.
std::vector<bool> CalledModules(const Model& model) {
  std::vector<bool> called(model.modules.size(), false);
  for (const ModelOp& op : model.ops) {
    for (ModuleId m = op.module; m.valid() && !called[m.value]; m = model.modules[m.value].parent) {
      called[m.value] = true;
    }
  }
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    called[m] = called[m] && !IsContainer(model.modules[m].class_name);
  }
  return called;
}

// By parameter: the op of which it is one matrix of an expert. None: it is no such matrix.
std::vector<std::uint32_t> ExpertsOf(const Model& model) {
  constexpr std::size_t kTensors = 2;  // of all experts of a layer, as transformers 5 has them
  std::vector<std::uint32_t> experts(model.params.size(), kNoRegion);
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    if (model.SpecOf(op).kind == OpKind::kExperts && op.params.size() > kTensors) {
      for (const ParamId p : op.params) {
        experts[p.value] = i;
      }
    }
  }
  return experts;
}

// Each parameter of the unit alone, but the matrices of a layer's experts together: they are two
// tensors in the framework, or hundreds.
std::vector<std::vector<ParamId>> PartsOf(const ResolvedUnit& unit,
                                          const std::vector<std::uint32_t>& experts) {
  std::vector<std::vector<ParamId>> parts;
  for (const ParamId p : unit.params) {
    const std::uint32_t op = experts[p.value];
    if (parts.empty() || op == kNoRegion || experts[parts.back().back().value] != op) {
      parts.emplace_back();
    }
    parts.back().push_back(p);
  }
  return parts;
}

}  // namespace

std::vector<ResolvedUnit> SplitByParameters(const Model& model, std::vector<ResolvedUnit> units) {
  const std::vector<std::vector<ModuleId>> owners = OwnersOf(model);
  const std::vector<bool> behind = ReadBehindOthers(model);
  const std::vector<std::uint32_t> experts = ExpertsOf(model);
  const std::size_t planned = units.size();
  for (std::size_t u = 0; u < planned; ++u) {
    const ResolvedUnit unit = units[u];
    const bool stays = std::any_of(unit.params.begin(), unit.params.end(), [&](ParamId p) {
      return owners[p.value].size() > 1 && behind[p.value];
    });
    if (stays) {
      continue;
    }
    for (std::vector<ParamId>& params : PartsOf(unit, experts)) {
      const ParamId p = params.front();
      ResolvedUnit part = unit;
      part.params = std::move(params);
      if (part.params.size() == 1 && AreOf(model, unit, owners[p.value])) {
        part.modules = OuterOnes(model, owners[p.value]);
      }
      if (p == unit.params.front()) {
        units[u] = part;
      } else {
        part.name = NameOf(model, unit, p);
        units.push_back(part);
      }
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const ResolvedUnit& x, const ResolvedUnit& y) {
    return x.params.empty() || y.params.empty() ? x.params.size() > y.params.size()
                                                : x.params.front() < y.params.front();
  });
  return units;
}

std::vector<ResolvedUnit> CallsOfOthers(const Model& model,
                                        const std::vector<ResolvedUnit>& units) {
  std::vector<bool> called = CalledModules(model), known(model.modules.size(), false);
  for (const ResolvedUnit& unit : units) {
    for (const ModuleId m : unit.modules) {
      known[FirstNameOf(model, m).value] = true;
      const bool is_leaf = std::any_of(unit.params.begin(), unit.params.end(), [&](ParamId p) {
        const ModuleId owner = FirstNameOf(model, model.params[p.value].module);
        return owner != m && IsInside(model, owner, m);
      });
      for (std::size_t inner = m.value + 1; is_leaf && inner < model.modules.size(); ++inner) {
        called[inner] = called[inner] && !IsInside(model, ModuleId(inner), m);
      }
    }
  }
  for (const ModelOp& op : model.ops) {  // of modules that read what others have
    known[FirstNameOf(model, op.module).value] =
        known[FirstNameOf(model, op.module).value] || !op.params.empty();
  }
  std::vector<ResolvedUnit> calls;
  std::vector<std::size_t> call_of(model.modules.size(), units.size() + model.modules.size());
  for (std::uint32_t m = 0; m < model.modules.size(); ++m) {
    const std::uint32_t first = FirstNameOf(model, ModuleId(m)).value;
    if (!called[m] || known[first]) {
      continue;
    }
    if (call_of[first] >= calls.size()) {
      call_of[first] = calls.size();
      calls.push_back({model.modules[first].fqn, {}, {}, false, kOnlyCalls});
    }
    calls[call_of[first]].modules.push_back(ModuleId(m));
  }
  return calls;
}

}  // namespace shardwright
