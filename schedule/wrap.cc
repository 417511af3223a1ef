#include "schedule/wrap.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_experts.h"
#include "models/reference.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/model_ends.h"
#include "schedule/internal/plan_json.h"

namespace shardwright {
namespace {

using internal::Ends;
using internal::FindEnds;
using internal::StorageOf;

constexpr std::string_view kRootName = "root";

std::vector<ModuleId> NeededBlocks(const Model& model, const std::string& where) {
  std::vector<ModuleId> blocks = BlocksOf(model);
  if (blocks.empty()) {
    throw InputError(where, "model " + Quoted(model.name) + " without repeated blocks",
                     "a model with a block class",
                     "wrap by size (size:1e8), as one unit (root), or with a file of units");
  }
  return blocks;
}

// Adds the modules that register the same storages under another name: tied parameters must lie in
// one unit. Sorted in registration order, without repetition.
std::vector<ModuleId> WithTied(const Model& model, std::vector<ModuleId> modules) {
  std::set<ParamId> storages;
  for (const ModuleId module : modules) {
    for (const ParamId param : model.modules[module.value].params) {
      storages.insert(StorageOf(model, param));
    }
  }
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    if (storages.count(StorageOf(model, ParamId(i))) > 0) {
      modules.push_back(FirstNameOf(model, model.params[i].module));
    }
  }
  SortAll(modules);
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  return modules;
}

UnitPlan UnitOf(const Model& model, const std::vector<ModuleId>& modules) {
  UnitPlan unit;
  for (const ModuleId id : modules) {
    unit.modules.push_back(model.modules[id.value].fqn);
    unit.name += (unit.name.empty() ? "" : "+") + unit.modules.back();
  }
  return unit;
}

void KeepAfterForward(UnitPlan& unit) {
  unit.reshard.kind = Reshard::Kind::kNever;
}

std::vector<UnitPlan> WrapBlocks(const Model& model, const std::string& where) {
  return Mapped<UnitPlan>(NeededBlocks(model, where),
                          [&](const ModuleId block) { return UnitOf(model, {block}); });
}

// Where units are one module each: embedding, each block, head; what is tied is left to the root.
std::vector<UnitPlan> WrapEndsSingly(const Model& model, const std::string& where) {
  const Ends ends = FindEnds(model, NeededBlocks(model, where));
  std::vector<UnitPlan> units = WrapBlocks(model, where);
  const auto is_alone = [&](ModuleId id) {
    return id.valid() && WithTied(model, {id}).size() == 1;
  };
  if (is_alone(ends.embedding)) {
    units.insert(units.begin(), UnitOf(model, {ends.embedding}));
  }
  if (is_alone(ends.head)) {
    units.push_back(UnitOf(model, {ends.head}));
  }
  return units;
}

// torchtitan: tok_embeddings, each block, [norm, output], root; with tied weights the three ends
// form one group. Accelerate (FSDP2) chooses the same units. Both keep [norm, head] gathered.
std::vector<UnitPlan> WrapEnds(const Model& model, const std::string& where) {
  const Ends ends = FindEnds(model, NeededBlocks(model, where));
  std::vector<ModuleId> tail;
  for (const ModuleId id : {ends.norm, ends.head}) {
    if (id.valid()) {
      tail.push_back(id);
    }
  }
  std::vector<UnitPlan> units;
  if (ends.embedding.valid() && !ends.head_is_tied) {
    units.push_back(UnitOf(model, WithTied(model, {ends.embedding})));
  } else if (ends.embedding.valid()) {
    tail.push_back(ends.embedding);
  }
  const std::vector<UnitPlan> blocks = WrapBlocks(model, where);
  units.insert(units.end(), blocks.begin(), blocks.end());
  if (!tail.empty()) {
    units.push_back(UnitOf(model, WithTied(model, tail)));
    KeepAfterForward(units.back());
  }
  return units;
}

// Modules whose own ops do not run one behind the other, or that are called again.
std::vector<bool> RunsApart(const Model& model) {
  std::vector<bool> apart(model.modules.size(), false);
  std::vector<std::size_t> next(model.modules.size(), 0);  // behind the last op; 0: none yet
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModuleId m = FirstNameOf(model, model.ops[i].module);
    const bool begins = next[m.value] != i || IsCalledAgain(model, i, model.ops[i].module);
    apart[m.value] = apart[m.value] || (next[m.value] > 0 && begins);
    next[m.value] = i + 1;
  }
  return apart;
}

// The modules that share parameters with this one, and with those, and so on: BERT's head has its
// weight from the embedding and its bias from the module that it is in.
std::vector<ModuleId> TiedGroup(const Model& model, ModuleId module) {
  std::vector<ModuleId> group = {module};
  for (std::size_t size = 0; size != group.size();) {
    size = group.size();
    group = WithTied(model, std::move(group));
  }
  return group;
}

// Modules with a parameter that ops of modules beside them read, which DeepSpeed gathers for each
// of those (register_external_parameter). One that the model around it reads is held.
std::vector<bool> LendParameters(const Model& model) {
  std::vector<bool> lends(model.modules.size(), false);
  for (const ModelOp& op : model.ops) {
    for (const ParamId p : op.params) {
      const ModuleId owner = FirstNameOf(model, model.params[StorageOf(model, p).value].module);
      const ModuleId reader = FirstNameOf(model, op.module);
      lends[owner.value] = lends[owner.value] ||
                           (!IsInside(model, reader, owner) && !IsInside(model, owner, reader));
    }
  }
  return lends;
}

// ZeRO-3's hooks sit on every module; what matters are those with parameters of their own, which
// are gathered for each call. Modules that share parameters are one unit, for each of them.
std::vector<UnitPlan> WrapModules(const Model& model, Dialect dialect) {
  std::vector<UnitPlan> units;
  std::vector<bool> taken(model.modules.size(), false);
  const std::vector<bool> apart = RunsApart(model), lends = LendParameters(model);
  std::vector<int> names(model.params.size(), 0);  // per storage
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    ++names[StorageOf(model, ParamId(p)).value];
  }
  const auto is_tied = [&](const ParamId p) { return names[StorageOf(model, p).value] > 1; };
  for (std::size_t m = 1; m < model.modules.size(); ++m) {
    if (model.modules[m].params.empty() || taken[m] || model.modules[m].same_as.valid()) {
      continue;
    }
    const std::vector<ParamId>& params = model.modules[m].params;
    const std::vector<ModuleId> group =
        AnyOf(params, is_tied) ? TiedGroup(model, ModuleId(m)) : std::vector{ModuleId(m)};
    for (const ModuleId id : group) {
      taken[id.value] = true;
    }
    const bool has_root = group.front() == ModuleId(0);
    if (!has_root && (group.size() == 1 || !FactsOf(dialect).flat_units)) {
      units.push_back(UnitOf(model, OuterOnes(model, group)));
      const bool regathers = dialect == Dialect::kZero3
                                 ? group.size() > 1 || apart[m] || lends[m]
                                 : group.size() > 1 && dialect == Dialect::kNative;
      units.back().gap = regathers ? Gap::kRegather : Gap::kHold;
    }
  }
  return units;
}

// PyTorch's size_based_auto_wrap_policy under _recursive_wrap; its default class sets.
class SizeWrap {
 public:
  SizeWrap(const Model& model, std::int64_t min_params)
      : model_(model), min_params_(min_params), seen_(model.params.size(), 0) {}

  // Elements that end up wrapped inside `id`.
  std::int64_t Visit(ModuleId id, bool only_children) {
    const Module& module = model_.modules[id.value];
    if (module.same_as.valid()) {
      return 0;
    }
    ++visit_;
    const std::int64_t total = DistinctElements(id);
    if (total < min_params_ || module.class_name == "MultiheadAttention") {
      return 0;
    }
    const std::int64_t wrapped = Summed<std::int64_t>(
        module.children, [&](const ModuleId child) { return Visit(child, false); });
    if (!only_children && total - wrapped >= min_params_ && !IsContainer(module.class_name)) {
      units_.push_back(UnitOf(model_, {id}));
      return total;
    }
    return wrapped;
  }

  [[nodiscard]] std::vector<UnitPlan> Take() { return std::move(units_); }

 private:
  // Each storage below `id` once.
  std::int64_t DistinctElements(ModuleId id) {
    const Module& module = model_.modules[id.value];
    std::int64_t elements = 0;
    for (const ParamId param : module.params) {
      const ParamId storage = StorageOf(model_, param);
      if (seen_[storage.value] != visit_) {
        seen_[storage.value] = visit_;
        elements += model_.params[storage.value].Elements();
      }
    }
    for (const ModuleId child : module.children) {
      elements += DistinctElements(child);
    }
    return elements;
  }

  const Model& model_;
  std::int64_t min_params_;
  std::vector<std::uint32_t> seen_;  // the visit that counted a storage last
  std::uint32_t visit_ = 0;
  std::vector<UnitPlan> units_;
};

UnitPlan RootUnit() {
  UnitPlan root;
  root.name = kRootName;
  root.modules = {""};
  KeepAfterForward(root);
  return root;
}

void ApplyReshard(const ReshardChoice& choice, Dialect dialect, std::vector<UnitPlan>& units) {
  if (IsZero(dialect)) {
    for (UnitPlan& unit : units) {
      unit.reshard = Reshard();
    }
    return;
  }
  if (!choice.is_set) {
    return;
  }
  for (UnitPlan& unit : units) {
    const bool keeps = unit.reshard.kind == Reshard::Kind::kNever;
    if (choice.reshard.kind != Reshard::Kind::kToGroup || !keeps) {
      unit.reshard = choice.reshard;
    }
  }
}

std::vector<UnitPlan> UnitsFromFile(const std::string& file, bool reshard_is_set, Dialect dialect,
                                    const std::string& where) {
  if (reshard_is_set) {
    throw InputError(where, "--reshard with a file of units", "one of the two",
                     "the file says \"reshard\" for each unit");
  }
  std::vector<UnitPlan> units = internal::ReadUnits(JsonValue::ReadFile(file));
  const bool has_root = AnyOf(units, [](const UnitPlan& unit) {
    return std::count(unit.modules.begin(), unit.modules.end(), "") > 0;
  });
  if (!has_root) {
    units.push_back(RootUnit());
    if (IsZero(dialect)) {
      units.back().reshard = Reshard();
    }
  }
  return units;
}

}  // namespace

WrapSpec ParseWrap(std::string_view text, const std::string& where) {
  static const std::vector<std::string> rules = {"block",    "torchtitan", "accelerate",
                                                 "size:1e8", "root",       "module"};
  WrapSpec spec;
  const std::string word(text);
  if (word.find('/') != std::string::npos || word.ends_with(".json")) {
    spec.kind = WrapSpec::Kind::kFile;
    spec.file = word;
    return spec;
  }
  if (word.starts_with("size:")) {
    spec.kind = WrapSpec::Kind::kSize;
    char* end = nullptr;
    const double value = std::strtod(word.c_str() + 5, &end);
    if (word.size() == 5 || *end != '\0' || !(value >= 1) || std::floor(value) != value ||
        value > static_cast<double>(JsonValue::kMaxCount)) {
      throw InputError(where, Quoted(word), "size:N with N parameters, such as size:1e8");
    }
    spec.min_params = static_cast<std::int64_t>(value);
    return spec;
  }
  constexpr std::array<std::pair<std::string_view, WrapSpec::Kind>, 5> kKinds = {{
      {"block", WrapSpec::Kind::kBlock},
      {"torchtitan", WrapSpec::Kind::kTorchtitan},
      {"accelerate", WrapSpec::Kind::kAccelerate},
      {"root", WrapSpec::Kind::kRoot},
      {"module", WrapSpec::Kind::kModule},
  }};
  for (const auto& [name, kind] : kKinds) {
    if (name == text) {
      spec.kind = kind;
      return spec;
    }
  }
  throw InputError(where, Quoted(word),
                   "block, torchtitan, accelerate, size:N, root, module or a .json file",
                   DidYouMean(word, rules));
}

std::vector<ModuleId> BlocksOf(const Model& model) {
  std::vector<ModuleId> blocks;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    if (IsBlock(model, ModuleId(m)) && !model.modules[m].same_as.valid() &&
        !IsOfReference(model, ModuleId(m))) {
      blocks.emplace_back(m);
    }
  }
  return blocks;
}

std::string_view DefaultWrap(Dialect dialect) {
  return FactsOf(dialect).default_wrap;
}

std::vector<UnitPlan> Wrap(const Model& model, const WrapSpec& spec, const ReshardChoice& reshard,
                           Dialect dialect, const std::string& where) {
  if (dialect == Dialect::kDdp) {
    return {RootUnit()};
  }
  const bool is_flat = FactsOf(dialect).flat_units;
  std::vector<UnitPlan> units;
  switch (spec.kind) {
    case WrapSpec::Kind::kBlock:
      units = WrapBlocks(model, where);
      break;
    case WrapSpec::Kind::kTorchtitan:
      units = is_flat ? WrapEndsSingly(model, where) : WrapEnds(model, where);
      break;
    case WrapSpec::Kind::kAccelerate:
      units = is_flat ? WrapBlocks(model, where) : WrapEnds(model, where);
      break;
    case WrapSpec::Kind::kSize: {
      SizeWrap wrap(model, spec.min_params);
      (void)wrap.Visit(ModuleId(0), true);
      units = wrap.Take();
      break;
    }
    case WrapSpec::Kind::kRoot:
      break;
    case WrapSpec::Kind::kModule:
      units = WrapModules(model, dialect);
      break;
    case WrapSpec::Kind::kFile:
      return UnitsFromFile(spec.file, reshard.is_set, dialect, where);
  }
  AddReferenceUnits(model, spec, dialect, units);
  units.push_back(RootUnit());
  if (dialect == Dialect::kFsdp1) {
    units.back().reshard = Reshard();  // FULL_SHARD, as users give it to all of the model
  }
  ApplyReshard(reshard, dialect, units);
  return units;
}

namespace {

// Units in the order in which they run, each with those inside of it: [[embedding], [block, its
// experts], ..., [norm, head]].
using Stretches = std::vector<std::vector<std::string>>;

void PrefetchNeighbours(const Stretches& stretches, std::vector<UnitPlan>& units) {
  const auto unit = [&](const std::string& name) { return FindIn(units, name, &UnitPlan::name); };
  for (std::size_t i = 0; i + 1 < stretches.size(); ++i) {
    unit(stretches[i].front())->forward_prefetch = stretches[i + 1];
    unit(stretches[i + 1].front())->backward_prefetch = stretches[i];
  }
}

}  // namespace

void AddExpertUnits(const Model& model, std::vector<UnitPlan>& units) {
  std::set<std::string> added;
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind != OpKind::kExperts || !model.SpecOf(op).routed) {
      continue;
    }
    const std::string& fqn = model.modules[ExpertsModule(model, op).value].fqn;
    const auto holds = [&](const std::string& module) {
      return module.empty() || module == fqn || fqn.starts_with(module + ".");
    };
    const auto around = FindIf(units, [&](const UnitPlan& unit) {
      return std::any_of(unit.modules.begin(), unit.modules.end(), holds);
    });
    if (around == units.end() || around->modules == std::vector{fqn}) {
      continue;
    }
    UnitPlan unit = *around;
    unit.name = fqn;
    unit.modules = {fqn};
    if (unit.reshard.kind == Reshard::Kind::kToGroup) {
      unit.reshard = Reshard();
    }
    units.insert(around, std::move(unit));
    added.insert(fqn);
  }
  if (added.empty()) {
    return;
  }
  Stretches stretches;
  std::vector<std::string> inside;
  for (const UnitPlan& unit : units) {
    if (IsOfReference(model, FindModule(model, unit.modules[0]))) {
      continue;  // it runs behind the model, without a backward
    }
    if (added.contains(unit.name)) {
      inside.push_back(unit.name);
    } else if (unit.modules != std::vector<std::string>{""}) {
      stretches.push_back({unit.name});
      stretches.back().insert(stretches.back().end(), inside.begin(), inside.end());
      inside.clear();
    }
  }
  PrefetchNeighbours(stretches, units);
}

void AddReferenceUnits(const Model& model, const WrapSpec& spec, Dialect dialect,
                       std::vector<UnitPlan>& units) {
  const ModuleId root = FindModule(model, kReferenceRoot);
  if (!root.valid() || model.modules[root.value].parent.valid() || dialect == Dialect::kZero1 ||
      dialect == Dialect::kZero2 || spec.kind == WrapSpec::Kind::kModule) {
    return;
  }
  if (dialect != Dialect::kFsdp2 && spec.kind == WrapSpec::Kind::kSize) {
    SizeWrap wrap(model, spec.min_params);
    (void)wrap.Visit(root, true);
    const std::vector<UnitPlan> inside = wrap.Take();
    units.insert(units.end(), inside.begin(), inside.end());
  } else if (dialect != Dialect::kFsdp2 && spec.kind != WrapSpec::Kind::kRoot) {
    for (std::size_t m = root.value; m < model.modules.size(); ++m) {
      if (IsBlock(model, ModuleId(m)) && !model.modules[m].same_as.valid()) {
        units.push_back(UnitOf(model, {ModuleId(m)}));
      }
    }
  }
  units.push_back(UnitOf(model, {root}));
}

std::vector<RecomputeRegion> RecomputeBlocks(const Model& model, RecomputeKind kind,
                                             std::int64_t keep_every, const std::string& where) {
  std::vector<RecomputeRegion> regions;
  for (const ModuleId block : NeededBlocks(model, where)) {
    regions.push_back({model.modules[block.value].fqn, kind, keep_every});
  }
  return regions;
}

}  // namespace shardwright
