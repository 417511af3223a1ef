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
#include "models/cut_context.h"
#include "planner/emitters/deepspeed.h"
#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower/optimizer.h"
#include "schedule/torch_rules.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// In-flight limits of native plans, the usual one first.
constexpr std::array<std::int64_t, 5> kInFlightLimits = {2, 1, 3, 4, 6};

// 12 gives 1, 2, 3, 4, 6, 12. O(sqrt(n)).
std::vector<std::int64_t> DivisorsOf(std::int64_t n) {
  std::vector<std::int64_t> low, high;
  for (std::int64_t d = 1; d * d <= n; ++d) {
    if (n % d == 0) {
      low.push_back(d);
      if (d != n / d) {
        high.push_back(n / d);
      }
    }
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

// The divisors of the ranks, unless the plan fixes the mesh or the dialect has one mesh only. With
// experts shared out over e ranks, multiples of e.
std::vector<std::int64_t> ShardSizes(const Problem& input, const SearchOptions& options) {
  const std::int64_t context = options.base.context_size;
  const std::int64_t ranks = DataRanks(input.cluster, MeshOf(options.base)) * context;
  if (options.fixed.mesh) {
    return {options.base.shard_size};
  }
  switch (FactsOf(options.base).mesh) {
    case MeshChoice::kReplicas:
      return {1};
    case MeshChoice::kOneShardGroup:
      return {ranks};
    case MeshChoice::kAny:
      break;
  }
  std::vector<std::int64_t> sizes = DivisorsOf(ranks);
  std::erase_if(sizes, [&](std::int64_t size) {
    const bool is_ring = IsRing(options.base.context_method);
    return size % options.base.expert_size != 0 || size % context != 0 || (is_ring && size < ranks);
  });
  if (sizes.empty()) {
    throw InputError("--shard: ep", std::to_string(options.base.expert_size),
                     "a divisor of the " + std::to_string(ranks) + " ranks");
  }
  return sizes;
}

// Each set of things that may live on the host: nothing, the optimizer, its moments or the
// parameters, each alone, and each of these with activations as well. Packed states stay on the
// device. Moments are left out if all of them would be in flight at once anyway.
std::vector<Offload> Offloads(const Problem& input, const SearchOptions& options,
                              std::int64_t shard_size) {
  if (options.fixed.offload) {
    return {options.base.offload};
  }
  const Offload can = options.base.tensor_size > 1 ? Offload() : FactsOf(options.base).offload;
  const bool is_train = input.job.mode == JobMode::kTrain;
  const bool is_packed = input.job.optimizer.states != StateFormat::kMaster;
  std::vector<Offload> choices = {{}};
  if (can.optimizer && is_train && !is_packed) {
    choices.push_back({.optimizer = true});
  }
  if (can.moments && is_train && !is_packed) {
    // Moments that would all be in flight at once are not offloaded.
    const std::int64_t moments = StateCount(input.job.optimizer.kind) *
                                 CountParameters(input.model, true) / shard_size *
                                 SizeOf(input.job.precision.master);
    if (moments > MostMomentsInFlight(options).value) {
      choices.push_back({.moments = true});
    }
  }
  if (can.parameters && !(is_packed && is_train) && options.base.expert_size == 1) {
    choices.push_back({.parameters = true});
  }
  if (is_train && can.activations) {
    const std::size_t count = choices.size();
    for (std::size_t i = 0; i < count; ++i) {
      choices.push_back(choices[i]);
      choices.back().activations = true;
    }
  }
  return choices;
}

std::vector<SyncMode> SyncModes(const OuterChoice& outer, const Problem& input,
                                const SearchOptions& options) {
  const DialectFacts& facts = FactsOf(options.base);
  if (options.fixed.sync) {
    return {options.base.sync};
  }
  if (outer.accumulation == 1 || !facts.skips_sync || input.job.mode == JobMode::kForward) {
    return {SyncMode::kEvery};
  }
  if (outer.replicate_size > 1 && outer.shard_size > 1 && facts.has_groups) {
    return {SyncMode::kEvery, SyncMode::kReplicateLast, SyncMode::kLast};
  }
  return {SyncMode::kEvery, SyncMode::kLast};
}

// Otherwise CheckOffloadedSums of check_plan_options.cc refuses the plan.
bool AddsUp(const OuterChoice& outer, const Problem& input, const SearchOptions& options) {
  return FactsOf(options.base).adds_on_host || input.job.mode == JobMode::kForward ||
         !outer.offload.parameters || outer.accumulation == 1 || outer.sync != SyncMode::kEvery;
}

std::vector<OuterChoice> OuterChoices(const Problem& input, const SearchOptions& options) {
  const std::int64_t ranks = DataRanks(input.cluster, MeshOf(options.base));
  const std::int64_t batch = input.job.global_batch;
  const std::int64_t samples = SamplesPerExample(input.job.trains_by);
  if (batch <= 0 || batch % (ranks * samples) != 0) {
    throw InputError("job", "a global batch of " + std::to_string(batch),
                     "a multiple of the " + std::to_string(ranks) + " ranks" +
                         (samples > 1 ? " x 2 samples of a pair" : ""));
  }
  const std::int64_t per_rank = batch / ranks;
  std::vector<std::int64_t> micro_batches = DivisorsOf(per_rank);
  if (options.fixed.micro_batch) {
    if (per_rank % options.base.micro_batch != 0) {
      throw InputError("job", "micro-batches of " + std::to_string(options.base.micro_batch),
                       "a divisor of the " + std::to_string(per_rank) + " samples per rank");
    }
    micro_batches = {options.base.micro_batch};
  }
  Pipeline pipeline = PipelineOf(options.base);
  std::erase_if(micro_batches, [&](std::int64_t micro_batch) {
    pipeline.micro_batches = per_rank / micro_batch;
    return pipeline.ranks > 1 && !WhyNot(pipeline).empty();
  });
  if (micro_batches.empty()) {
    throw InputError("job", std::to_string(per_rank) + " samples per data-parallel rank",
                     WhyNot(pipeline));
  }
  std::vector<OuterChoice> result;
  for (const std::int64_t shard : ShardSizes(input, options)) {
    for (const std::int64_t micro_batch : micro_batches) {
      if (micro_batch % samples != 0) {
        continue;  // ValidatePlan refuses half a pair
      }
      constexpr std::int64_t kMostMicroBatches = 65535;  // Op::micro_batch has 16 bits
      if (per_rank / micro_batch > kMostMicroBatches) {
        continue;
      }
      OuterChoice outer;
      outer.shard_size = shard;
      outer.tensor_size = options.base.tensor_size;
      outer.context_size = options.base.context_size;
      outer.replicate_size =
          MeshOver(ranks * outer.context_size, {{0, shard}}).Along(Axis::kReplicate);
      outer.micro_batch = micro_batch;
      outer.accumulation = per_rank / micro_batch;
      for (const SyncMode sync : SyncModes(outer, input, options)) {
        outer.sync = sync;
        for (const Offload& offload : Offloads(input, options, shard)) {
          outer.offload = offload;
          if (AddsUp(outer, input, options)) {
            result.push_back(outer);
          }
        }
      }
    }
  }
  return result;
}

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
  if (!options.fixed.recompute && !space.blocks.empty() && input.job.mode == JobMode::kTrain) {
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

int CountOf(const Offload& offload) {
  return static_cast<int>(offload.parameters) + static_cast<int>(offload.optimizer) +
         static_cast<int>(offload.activations) + static_cast<int>(offload.moments);
}

Bytes MostMomentsInFlight(const SearchOptions& options) {
  const std::int64_t most = *std::max_element(kInFlightLimits.begin(), kInFlightLimits.end());
  return options.base.moments_piece * std::max(options.base.in_flight, most);
}

std::string FamilyName(const OuterChoice& outer, const SearchOptions& options) {
  std::string name;
  if (FactsOf(options.base).is_zero) {
    name = NameOf(options.base.dialect);
  } else if (outer.shard_size == 1) {
    name = outer.tensor_size > 1 ? "tensor" : "ddp";
  } else {
    name = outer.replicate_size == 1 ? "sharded" : "hybrid";
  }
  if (options.base.pipeline_size > 1) {
    name += " x pipeline " + std::to_string(options.base.pipeline_size) +
            (options.base.pipeline_stages > 1 ? "x" + std::to_string(options.base.pipeline_stages)
                                              : "");
  }
  std::string offload;
  const auto add = [&](bool is_on, const char* what) {
    if (is_on) {
      offload += (offload.empty() ? ", " : " and ") + std::string(what);
    }
  };
  add(outer.offload.parameters, "parameters");
  add(outer.offload.optimizer, "optimizer");
  add(outer.offload.activations, "activations");
  add(outer.offload.moments, "moments");
  return offload.empty() ? name : name + offload + " on the host";
}

std::vector<Group> GroupsOf(const OuterChoice& outer) {
  const GroupShape shard = MeshOf(outer).Of({Axis::kShard});
  const GroupShape replicate = MeshOf(outer).Of({Axis::kReplicate});
  return {{"shard", shard.size, shard.stride}, {"replicate", replicate.size, replicate.stride}};
}

std::string LabelOf(const OuterChoice& outer) {
  return "shard " + std::to_string(outer.shard_size) + " x replicate " +
         std::to_string(outer.replicate_size) +
         (outer.tensor_size > 1 ? " x tensor " + std::to_string(outer.tensor_size) : "") +
         (outer.context_size > 1 ? ", context " + std::to_string(outer.context_size) : "") +
         ", micro-batch " + std::to_string(outer.micro_batch) + " x " +
         std::to_string(outer.accumulation);
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

bool Is(const OuterChoice& outer, const Plan& plan) {
  return outer.shard_size == plan.shard_size && outer.replicate_size == plan.replicate_size &&
         outer.micro_batch == plan.micro_batch && outer.accumulation == plan.accumulation &&
         outer.sync == plan.sync && outer.offload == plan.offload;
}

void SetOuter(const OuterChoice& outer, Plan& plan) {
  plan.shard_size = outer.shard_size;
  plan.replicate_size = outer.replicate_size;
  plan.micro_batch = outer.micro_batch;
  plan.accumulation = outer.accumulation;
  plan.sync = outer.sync;
  plan.offload = outer.offload;
}

std::int64_t DataRanks(const Cluster& cluster, const Mesh& cut) {
  const std::int64_t ranks = cluster.RankCount();
  const Mesh mesh = MeshOver(
      ranks,
      {.size = {1, 0}, .tensor = cut.tensor, .context = cut.context, .pipeline = cut.pipeline});
  const bool is_whole = mesh.RankCount() == ranks;
  if (!is_whole || !mesh.SplitsInto(cut.context)) {
    const std::int64_t cut_by = cut.tensor * cut.pipeline;
    const auto [kind, size] = is_whole            ? std::pair("cp", cut.context)
                              : cut.tensor == 1   ? std::pair("pp", cut.pipeline)
                              : cut.pipeline == 1 ? std::pair("tp", cut.tensor)
                                                  : std::pair("tp x pp", cut_by);
    throw InputError(std::string("--shard: ") + kind, std::to_string(size),
                     "a divisor of the " + std::to_string(is_whole ? mesh.CopyCount() : ranks) +
                         (is_whole && cut_by > 1 ? " ranks that tp and pp leave" : " ranks"));
  }
  return mesh.DataCount();
}

Plan OuterPlan(const OuterChoice& outer, const SearchOptions& options) {
  Plan plan = options.base;
  SetOuter(outer, plan);
  plan.units.clear();
  if (!options.fixed.recompute) {
    plan.recompute.clear();
  }
  return plan;
}

void AppendRegions(const RecomputePattern& pattern, const std::string& fqn,
                   std::vector<RecomputeRegion>& regions) {
  for (RecomputeRegion region : pattern.regions) {
    region.module = region.module.empty() ? fqn : fqn + '.' + region.module;
    regions.push_back(std::move(region));
  }
}

}  // namespace shardwright
