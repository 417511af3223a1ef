// Cuts the plan's units into DeepSpeed's: one for each parameter, and one for each call of a module
// without parameters.
//
// Example: a unit "b" with a linear layer (weight, bias) and a norm (weight), and a dropout outside
// of any unit. SplitByParameters returns "b", "b/b.fc.bias" and "b/b.norm.weight"; "b" has only the
// first parameter left. CallsOfOthers adds "dropout" without parameters. DeepSpeed requests
// parameters ahead at each call of a module, so the call of the dropout is a moment at which it
// fetches.

#include "schedule/lower/unit_parts.h"

#include <set>
#include <utility>

#include "core/budget.h"
#include "core/ranges.h"
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
    SortAll(of);
    of.erase(std::unique(of.begin(), of.end()), of.end());
  }
  return owners;
}

// The unit's modules, each by its first name.
std::set<ModuleId> FirstNames(const Model& model, const ResolvedUnit& unit) {
  std::set<ModuleId> names;
  for (const ModuleId m : unit.modules) {
    names.insert(FirstNameOf(model, m));
  }
  return names;
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
// Example: 8 experts of 3 matrices each are 24 neighbours with the same op, so they are one part.
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

// For each unit of the plan: its parts, each with the modules whose hooks fetch it. A part whose
// parameter only the unit's own modules register gets exactly these modules. Any other part keeps
// all modules of the unit. The result is in the order of first parameters, in which DeepSpeed lays
// out partitions; sub-groups and persistent parameters depend on that order.
std::vector<ResolvedUnit> SplitByParameters(const Model& model, std::vector<ResolvedUnit> units) {
  const std::vector<std::vector<ModuleId>> owners = OwnersOf(model);
  const std::vector<bool> behind = ReadBehindOthers(model);
  const std::vector<std::uint32_t> experts = ExpertsOf(model);
  const std::size_t planned = units.size();
  constexpr std::int64_t kMostCalls = 16'000'000;  // of 4 bytes
  Budget calls("plan: units", "pairs of a unit's module and parameter", kMostCalls);
  for (std::size_t u = 0; u < planned; ++u) {
    ResolvedUnit unit = units[u];
    const bool stays = AnyOf(
        unit.params, [&](ParamId p) { return owners[p.value].size() > 1 && behind[p.value]; });
    if (stays) {
      continue;
    }
    const std::set<ModuleId> named = FirstNames(model, unit);
    std::vector<std::vector<ParamId>> parts = PartsOf(unit, experts);
    unit.params.clear();
    for (std::vector<ParamId>& params : parts) {
      const std::vector<ModuleId>& of = owners[params.front().value];
      const bool is_own =
          params.size() == 1 && AllOf(of, [&](ModuleId m) { return named.contains(m); });
      calls.Take(std::ssize(is_own ? of : unit.modules));
      ResolvedUnit part =
          is_own
              ? ResolvedUnit{unit.name, OuterOnes(model, of), {}, unit.full_precision, unit.planned}
              : unit;
      part.params = std::move(params);
      if (part.params.front() == units[u].params.front()) {
        units[u] = std::move(part);
      } else {
        part.name = NameOf(model, unit, part.params.front());
        units.push_back(std::move(part));
      }
    }
  }
  StableSort(units, [](const ResolvedUnit& x, const ResolvedUnit& y) {
    return x.params.empty() || y.params.empty() ? x.params.size() > y.params.size()
                                                : x.params.front() < y.params.front();
  });
  return units;
}

// Stage 1 finds modules that units name, and leaves: modules around a parameter whose unit names
// them. Stage 2 drops all that lies inside a leaf, since DeepSpeed puts no hooks there. Stage 3
// drops modules whose ops read parameters. The rest that is called becomes a unit without
// parameters, one for all names of a module. O(modules * depth + ops).
std::vector<ResolvedUnit> CallsOfOthers(const Model& model,
                                        const std::vector<ResolvedUnit>& units) {
  std::vector<bool> called = CalledModules(model), known(model.modules.size(), false);
  std::vector<bool> leaves(model.modules.size(), false);
  std::vector<std::size_t> named_by(model.modules.size(), units.size());  // the last unit so far
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const ModuleId m : units[u].modules) {
      known[FirstNameOf(model, m).value] = true;
      named_by[m.value] = u;
    }
    for (const ParamId p : units[u].params) {
      const ModuleId owner = FirstNameOf(model, model.params[p.value].module);
      for (ModuleId m = model.modules[owner.value].parent; m.valid();
           m = model.modules[m.value].parent) {
        leaves[m.value] = leaves[m.value] || named_by[m.value] == u;
      }
    }
  }
  for (std::size_t inner = 1; inner < model.modules.size(); ++inner) {  // parents come first
    const ModuleId parent = model.modules[inner].parent;
    const bool is_in_leaf = parent.valid() && leaves[parent.value];
    called[inner] = called[inner] && !is_in_leaf;
    leaves[inner] = leaves[inner] || is_in_leaf;
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
