// The plans that the search considers, as lists of independent choices.
//
// Example: 8 GPUs, global batch 32, fsdp2, a model of 12 blocks. A rank has 32 / 8 = 4 samples.
//
//   shard sizes    1, 2, 4, 8        micro-batches  1, 2, 4 (accumulation 4, 2, 1)
//   sync           every; with accumulation also last, and with replicas replicate_last
//   offload        nothing, or parameters
//   families       torchtitan, block, root, inside blocks, the first in parts, 2, 3, 4, 6, 8 blocks
//   reshard        always, never, to groups of a node
//   patterns       none, full, selective 1 to 4, and combinations of a block's parts
//
// The outer choices alone (mesh, batch, sync, offload) are some dozens. The inner ones are choices
// per unit and per block, far too many to list. So the search bounds the outer ones and improves
// the inner ones step by step.
//
// A choice that the dialect lacks is left out here, not refused later: DialectFacts says which
// mesh, offload, units and prefetch a framework has.

#include "planner/space.h"

#include <array>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/emitters/deepspeed.h"
#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/dialect_facts.h"
#include "schedule/torch_rules.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// In-flight limits of native plans, the usual one first.
constexpr std::array<std::int64_t, 5> kInFlightLimits = {2, 1, 3, 4, 6};

// Units of `count` neighbouring blocks each; everything else as in `ends`.
// Example: embedding, 5 blocks, head, with count 2: embedding, {0, 1}, {2, 3}, {4}, head.
std::optional<UnitFamily> GroupBlocks(const std::vector<UnitPlan>& ends,
                                      const std::set<std::string>& blocks, std::size_t count) {
  UnitFamily family;
  family.name = std::to_string(count) + " blocks";
  UnitPlan group;
  std::size_t grouped = 0;
  const auto close = [&] {
    if (!group.modules.empty()) {
      family.units.push_back(group);
      group = UnitPlan();
      grouped = 0;
    }
  };
  for (const UnitPlan& unit : ends) {
    const bool is_block = unit.modules.size() == 1 && blocks.contains(unit.modules[0]);
    if (!is_block) {
      close();
      family.units.push_back(unit);
      continue;
    }
    if (group.modules.empty()) {
      group = unit;
    } else {
      group.modules.push_back(unit.modules[0]);
    }
    if (++grouped == count) {
      close();
    }
  }
  return family;
}

// Each child of a block with modules of its own is a unit.
// Example: a block with attention and MLP becomes three units: attention, MLP, and the block with
// the norms that are left.
UnitFamily SplitBlocks(const Model& model, const std::vector<UnitPlan>& ends,
                       const std::set<std::string>& blocks) {
  UnitFamily family;
  family.name = "inside blocks";
  family.is_nested = true;
  for (const UnitPlan& unit : ends) {
    const bool is_block = unit.modules.size() == 1 && blocks.contains(unit.modules[0]);
    if (is_block) {
      const Module& block = model.modules[FindModule(model, unit.modules[0]).value];
      for (const ModuleId child : block.children) {
        const Module& module = model.modules[child.value];
        if (!module.children.empty()) {
          UnitPlan part = unit;
          part.name = module.fqn;
          part.modules = {module.fqn};
          family.units.push_back(part);
        }
      }
    }
    family.units.push_back(unit);
  }
  return family;
}

// Blocks of which parts learn (LoRA): the modules that do are a unit of their own. Nothing where no
// block is mixed.
std::optional<UnitFamily> SplitLearning(const Model& model, const std::vector<UnitPlan>& ends,
                                        const std::set<std::string>& blocks) {
  UnitFamily family;
  family.name = "block, what learns apart";
  family.is_nested = true;
  bool is_mixed = false;
  for (const UnitPlan& unit : ends) {
    const bool is_block = unit.modules.size() == 1 && blocks.contains(unit.modules[0]);
    std::set<std::uint32_t> learning, all;
    for (const Parameter& param : model.params) {
      const std::string& fqn = model.modules[param.module.value].fqn;
      if (is_block && fqn.starts_with(unit.modules[0] + ".")) {
        all.insert(param.module.value);
        if (param.trainable) {
          learning.insert(param.module.value);
        }
      }
    }
    if (!learning.empty() && learning.size() < all.size()) {
      is_mixed = true;
      UnitPlan part = unit;
      part.name += ".learning";
      part.modules.clear();
      for (const std::uint32_t module : learning) {
        part.modules.push_back(model.modules[module].fqn);
      }
      family.units.push_back(std::move(part));
    }
    family.units.push_back(unit);
  }
  return is_mixed ? std::optional(std::move(family)) : std::nullopt;
}

// Moves the beginning of the first block into the unit before it: the children up to and with the
// first one that has modules inside. The rest of the block is a unit. The unit gathered first is
// also reduced last, and both run beside nothing; now they carry more in one message. Returns
// nothing if the block has parameters of its own, or no such parts.
std::optional<UnitFamily> JoinFirstPart(const Model& model, const std::vector<UnitPlan>& ends,
                                        const std::string& block) {
  const ModuleId id = FindModule(model, block);
  std::vector<std::string> first, rest;  // children in the order in which they run
  std::set<std::uint32_t> seen;
  bool is_first = true;
  for (const ModelOp& op : model.ops) {
    ModuleId child = op.module;
    while (child.valid() && model.modules[child.value].parent != id) {
      child = model.modules[child.value].parent;
    }
    if (op.module == id && !op.params.empty()) {
      return std::nullopt;
    }
    if (child.valid() && seen.insert(child.value).second) {
      (is_first ? first : rest).push_back(model.modules[child.value].fqn);
      is_first = is_first && model.modules[child.value].children.empty();
    }
  }
  UnitFamily family;
  family.name = "block, the first in parts";
  family.is_nested = true;
  for (const UnitPlan& unit : ends) {
    const bool is_block = unit.modules.size() == 1 && unit.modules[0] == block;
    if (!is_block) {
      family.units.push_back(unit);
      continue;
    }
    if (family.units.empty() || rest.empty()) {
      return std::nullopt;
    }
    UnitPlan& before = family.units.back();
    before.modules.insert(before.modules.end(), first.begin(), first.end());
    family.units.push_back(unit);
    family.units.back().name = rest.back();
    family.units.back().modules = rest;
  }
  return family;
}

// Does some unit hold parameters that learn beside frozen ones, where that is refused? FSDP1
// without use_orig_params flattens a unit into one parameter, and it keeps a unit in one dtype.
bool MixesInVain(const Problem& input, const SearchOptions& options,
                 const std::vector<ResolvedUnit>& units) {
  const bool is_refused =
      options.base.dialect == Dialect::kFsdp1 &&
      (!options.base.use_orig_params || input.job.frozen_format != FrozenFormat::kMaster);
  return is_refused && AnyOf(units, [&](const ResolvedUnit& unit) {
           const auto learns = [&](ParamId p) { return input.model.params[p.value].trainable; };
           return std::any_of(unit.params.begin(), unit.params.end(), learns) &&
                  !std::all_of(unit.params.begin(), unit.params.end(), learns);
         });
}

// PEFT's policy: the blocks, and inside them each module that learns.
UnitFamily LearningApart(const Model& model) {
  std::vector<ModuleId> modules = BlocksOf(model);
  const std::vector<ModuleId> leaves = LearningLeaves(model);
  modules.insert(modules.end(), leaves.begin(), leaves.end());
  UnitFamily family = {"learning apart", UnitsOfModules(model, modules), true};
  family.units.push_back(RootUnitOf(Reshard::Kind::kAlways));
  return family;
}

// Families whose units the dialect or the model cannot have are left out.
// Equal units under another name are added once.
void AddFamily(const Problem& input, const SearchOptions& options, UnitFamily family,
               std::vector<UnitFamily>& families) {
  const std::size_t units = family.units.size();
  AddExpertUnits(input.model, family.units);
  if (family.units.size() > units) {
    family.is_nested = true;
    family.name += " and experts";
  }
  Plan probe = options.base;
  probe.units = family.units;
  const bool is_known = IsIn(families, family.units, &UnitFamily::units);
  if (is_known) {
    return;
  }
  try {
    // Tied parameters may forbid a cut.
    if (MixesInVain(input, options, ResolveUnits(input.model, probe, "plan"))) {
      return;
    }
  } catch (const InputError&) {
    return;
  }
  families.push_back(std::move(family));
}

// Is a module of one unit, the root's aside, inside a module of another?
bool HasModulesInside(const std::vector<UnitPlan>& units) {
  std::set<std::string> modules;
  for (const UnitPlan& unit : units) {
    modules.insert(unit.modules.begin(), unit.modules.end());
  }
  return AnyOf(modules, [&](const std::string& module) {
    for (std::size_t dot = module.rfind('.'); dot != std::string::npos && dot > 0;
         dot = module.rfind('.', dot - 1)) {
      if (modules.contains(module.substr(0, dot))) {
        return true;
      }
    }
    return false;
  });
}

std::optional<UnitFamily> TryWrap(const Problem& input, const SearchOptions& options,
                                  const std::string& rule) {
  try {
    UnitFamily family;
    family.name = rule;
    family.units =
        Wrap(input.model, ParseWrap(rule, "units"), options.reshard, options.base.dialect, "units");
    family.is_nested = rule == "module" && HasModulesInside(family.units);
    return family;
  } catch (const InputError&) {  // a model without blocks, or groups that the dialect cannot have
    return std::nullopt;
  }
}

std::vector<UnitFamily> Families(const Problem& input, const SearchOptions& options,
                                 const std::vector<std::string>& blocks) {
  if (options.fixed.units) {
    return {{"given", options.base.units, false}};
  }
  const DialectFacts& facts = FactsOf(options.base);
  std::vector<UnitFamily> families;
  std::vector<std::string> rules = {"torchtitan", "block", "root"};
  if (blocks.empty()) {
    const std::int64_t all = CountParameters(input.model);
    for (const std::int64_t parts : {64, 16, 8, 4, 2}) {
      rules.push_back("size:" + std::to_string(std::max<std::int64_t>(1, all / parts)));
    }
    rules.emplace_back("module");
  }
  if (facts.wraps_only_so) {
    rules = {std::string(facts.default_wrap)};
  }
  std::vector<UnitPlan> ends;
  for (const std::string& rule : rules) {
    if (std::optional<UnitFamily> family = TryWrap(input, options, rule)) {
      const std::vector<UnitPlan> units = family->units;
      AddFamily(input, options, std::move(*family), families);
      ends = ends.empty() && !families.empty() ? units : ends;
    }
  }
  if (facts.has_leaf_modules && !blocks.empty()) {
    AddFamily(input, options,
              {"block", FetchedUnits(input.model, input.model.block_classes), false}, families);
  }
  if (options.base.dialect == Dialect::kFsdp1 && input.job.lora_rank > 0 && !blocks.empty()) {
    AddFamily(input, options, LearningApart(input.model), families);
  }
  if (!facts.groups_modules || ends.empty() || blocks.size() < 2) {
    return families;
  }
  const std::set<std::string> block_set(blocks.begin(), blocks.end());
  AddFamily(input, options, SplitBlocks(input.model, ends, block_set), families);
  if (std::optional<UnitFamily> family = JoinFirstPart(input.model, ends, blocks.front())) {
    AddFamily(input, options, std::move(*family), families);
  }
  if (facts.reduces_frozen) {
    if (std::optional<UnitFamily> family = SplitLearning(input.model, ends, block_set)) {
      AddFamily(input, options, std::move(*family), families);
    }
  }
  for (const std::size_t count : {2U, 3U, 4U, 6U, 8U, 16U}) {
    if (count < blocks.size()) {
      AddFamily(input, options, *GroupBlocks(ends, block_set, count), families);
    }
  }
  return families;
}

std::string NameOfRegion(const RecomputeRegion& region) {
  const std::string kind = region.kind == RecomputeKind::kFull
                               ? "full"
                               : "selective:" + std::to_string(region.keep_every);
  return region.module.empty() ? kind : kind + ' ' + region.module;
}

RecomputePattern PatternOf(std::vector<RecomputeRegion> regions) {
  RecomputePattern pattern;
  pattern.name = regions.empty() ? "none" : Listed(regions, NameOfRegion);
  pattern.regions = std::move(regions);
  return pattern;
}

// Ways to checkpoint a block: as a whole, or its children that have modules of their own, each in
// every way.
// A block with two such children has 1 + 5 patterns as a whole and 6 x 6 - 1 of its parts: 41.
std::vector<RecomputePattern> PatternsOf(const Model& model, const std::string& block) {
  constexpr std::int64_t kMostKeepEvery = 4;
  std::vector<RecomputePattern> patterns = {PatternOf({})};
  const Module& module = model.modules[FindModule(model, block).value];
  const auto kinds_of = [&](const std::string& name) {
    std::vector<RecomputeRegion> kinds = {{name, RecomputeKind::kFull, 1}};
    for (std::int64_t keep = 1; keep <= kMostKeepEvery; ++keep) {
      kinds.push_back({name, RecomputeKind::kSelective, keep});
    }
    return kinds;
  };
  for (const RecomputeRegion& region : kinds_of("")) {
    patterns.push_back(PatternOf({region}));
  }
  std::vector<std::vector<RecomputeRegion>> sets = {{}};
  std::size_t nested = 0;
  for (const ModuleId child : module.children) {
    const Module& inner = model.modules[child.value];
    constexpr std::size_t kMostNested = 2;  // more would multiply the patterns
    if (inner.children.empty() || nested == kMostNested) {
      continue;
    }
    ++nested;
    const std::size_t count = sets.size();
    for (const RecomputeRegion& region : kinds_of(inner.fqn.substr(block.size() + 1))) {
      for (std::size_t i = 0; i < count; ++i) {
        sets.push_back(sets[i]);
        sets.back().push_back(region);
      }
    }
  }
  for (std::size_t i = 1; i < sets.size(); ++i) {
    patterns.push_back(PatternOf(sets[i]));
  }
  return patterns;
}

}  // namespace

// Cheap: no program is lowered here. ResolveUnits runs once per family, to leave out cuts that tied
// parameters forbid.
Space MakeSpace(const Problem& input, const SearchOptions& options) {
  Space space;
  space.outer = OuterChoices(input, options);
  for (const ModuleId block : BlocksOf(input.model)) {
    space.blocks.push_back(input.model.modules[block.value].fqn);
  }
  space.families = Families(input, options, space.blocks);
  const DialectFacts& facts = FactsOf(options.base);
  space.recomputes_all_or_none = !facts.checkpoints_blocks;
  space.patterns = {PatternOf({})};
  if (!options.fixed.recompute && !space.blocks.empty() && input.job.mode == JobMode::kTrain &&
      !SplitsBackward(options.base.pipeline_schedule)) {
    if (space.recomputes_all_or_none) {
      space.patterns.push_back(PatternOf({{"", RecomputeKind::kFull, 1}}));
    } else {
      space.patterns = PatternsOf(input.model, space.blocks.back());
    }
  }
  if (!options.fixed.units && !options.reshard.is_set && facts.frees_units) {
    space.reshards = {{Reshard::Kind::kAlways, 0}, {Reshard::Kind::kNever, 0}};
    if (facts.has_groups && options.base.tensor_size == 1) {
      space.reshards.push_back({Reshard::Kind::kToGroup, input.cluster.gpus_per_node});
    }
  }
  space.in_flight = {options.base.in_flight};
  if (facts.early_gathers == EarlyGathers::kInFlight && !options.fixed.in_flight) {
    space.in_flight.assign(kInFlightLimits.begin(), kInFlightLimits.end());
  }
  return space;
}

Bytes MostMomentsInFlight(const SearchOptions& options) {
  const std::int64_t most = *std::max_element(kInFlightLimits.begin(), kInFlightLimits.end());
  return options.base.moments_piece * std::max(options.base.in_flight, most);
}

bool CanRecompute(const Plan& plan) {
  if (FactsOf(plan).selective_meets_units || !RulesOf(plan.torch).counts_hooks) {
    return true;
  }
  std::set<std::string> selective;
  for (const RecomputeRegion& region : plan.recompute) {
    if (region.kind == RecomputeKind::kSelective) {
      selective.insert(region.module);
    }
  }
  const auto is_inside = [&](const std::string& module) {
    for (std::size_t dot = module.rfind('.'); dot != std::string::npos && dot > 0;
         dot = module.rfind('.', dot - 1)) {
      if (selective.contains(module.substr(0, dot))) {
        return true;
      }
    }
    return false;
  };
  return selective.empty() || NoneOf(plan.units, [&](const UnitPlan& unit) {
           return std::any_of(unit.modules.begin(), unit.modules.end(), is_inside);
         });
}

void AppendRegions(const RecomputePattern& pattern, const std::string& fqn,
                   std::vector<RecomputeRegion>& regions) {
  for (RecomputeRegion region : pattern.regions) {
    region.module = region.module.empty() ? fqn : fqn + '.' + region.module;
    regions.push_back(std::move(region));
  }
}

}  // namespace shardwright
