#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/plan_fields.h"
#include "schedule/plan.h"
#include "schedule/plan_names.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using internal::FieldOf;
using internal::UnitField;

// Above every real run, and low enough that products of sizes stay inside 64 bits.
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxSamples = std::int64_t{1} << 24;
constexpr std::int64_t kMaxAccumulation = 65535;  // Op::micro_batch has 16 bits
constexpr std::int64_t kMaxSequence = std::int64_t{1} << 30;
// Activations of one micro-batch above one exabyte are a mistake, not a job.
constexpr double kMaxActivationBytes = 1e18;

constexpr std::size_t kNoRegion = static_cast<std::size_t>(-1);

void CheckRange(std::int64_t value, std::int64_t min, std::int64_t max, const std::string& where,
                std::string_view field) {
  if (value < min || value > max) {
    throw InputError(FieldOf(where, field), std::to_string(value),
                     "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]");
  }
}

// An option that only another dialect has must keep its default: a silent no-op would mislead.
void CheckForeign(bool is_default, std::string_view dialect, const Plan& plan,
                  const std::string& where, std::string_view field) {
  if (!is_default && NameOf(plan.dialect) != dialect) {
    throw InputError(FieldOf(where, field),
                     "an option of dialect " + std::string(dialect) + " in a plan of dialect " +
                         std::string(NameOf(plan.dialect)),
                     "its default");
  }
}

void CheckForeignOptions(const Plan& plan, const std::string& where) {
  const Plan defaults;
  CheckForeign(plan.backward_prefetch == defaults.backward_prefetch, "fsdp1", plan, where,
               "backward_prefetch");
  CheckForeign(plan.forward_prefetch == defaults.forward_prefetch, "fsdp1", plan, where,
               "forward_prefetch");
  CheckForeign(plan.limit_all_gathers == defaults.limit_all_gathers, "fsdp1", plan, where,
               "limit_all_gathers");
  CheckForeign(plan.use_orig_params == defaults.use_orig_params, "fsdp1", plan, where,
               "use_orig_params");
  CheckForeign(
      plan.bounded_memory == defaults.bounded_memory || plan.dialect == Dialect::kFairscale,
      "fsdp1", plan, where, "bounded_memory");
  CheckForeign(plan.in_flight == defaults.in_flight, "native", plan, where, "in_flight");
  CheckForeign(plan.transfers == defaults.transfers, "native", plan, where, "transfers");
  CheckForeign(plan.moments_piece == defaults.moments_piece, "native", plan, where,
               "moments_piece");
  CheckForeign(plan.first_bucket == defaults.first_bucket, "ddp", plan, where, "first_bucket");
  CheckForeign(plan.bucket == defaults.bucket, "ddp", plan, where, "bucket");
  CheckForeign(plan.find_unused_parameters == defaults.find_unused_parameters, "ddp", plan, where,
               "find_unused_parameters");
  CheckForeign(plan.static_graph == defaults.static_graph, "ddp", plan, where, "static_graph");
  CheckForeign(plan.torch == defaults.torch || IsTorch(plan.dialect), "fsdp2, fsdp1 and ddp", plan,
               where, "torch");
  CheckForeign(plan.reduce_scatter_bucket == defaults.reduce_scatter_bucket, "fairscale", plan,
               where, "reduce_scatter_bucket");
}

// An option of the three ZeRO stages or of some of them.
void CheckForeignZero(bool is_default, bool has_option, std::string_view owners, const Plan& plan,
                      const std::string& where, std::string_view field) {
  if (!is_default && !has_option) {
    throw InputError(FieldOf(where, "zero." + std::string(field)),
                     "an option of " + std::string(owners) + " in a plan of dialect " +
                         std::string(NameOf(plan.dialect)),
                     "its default");
  }
}

void CheckZeroOptions(const Plan& plan, const std::string& where) {
  const ZeroOptions defaults;
  const ZeroOptions& zero = plan.zero;
  const bool any = IsZero(plan.dialect);
  const bool third = plan.dialect == Dialect::kZero3;
  const auto all = [&](bool is_default, std::string_view field) {
    CheckForeignZero(is_default, any, "dialects zero1, zero2 and zero3", plan, where, field);
  };
  all(zero.reduce_bucket == defaults.reduce_bucket, "reduce_bucket");
  all(zero.contiguous_gradients == defaults.contiguous_gradients, "contiguous_gradients");
  all(zero.overlap_comm == defaults.overlap_comm, "overlap_comm");
  all(zero.gradient_reduction == defaults.gradient_reduction, "gradient_reduction");
  const auto first = [&](bool is_default, std::string_view field) {
    CheckForeignZero(is_default, any && !third, "dialects zero1 and zero2", plan, where, field);
  };
  first(zero.allgather_bucket == defaults.allgather_bucket, "allgather_bucket");
  const auto last = [&](bool is_default, std::string_view field) {
    CheckForeignZero(is_default, third, "dialect zero3", plan, where, field);
  };
  last(zero.before_deepspeed_0_6 == defaults.before_deepspeed_0_6, "before_deepspeed_0_6");
  last(zero.prefetch_bucket == defaults.prefetch_bucket, "prefetch_bucket");
  last(zero.max_live_parameters == defaults.max_live_parameters, "max_live_parameters");
  last(zero.max_reuse_distance == defaults.max_reuse_distance, "max_reuse_distance");
  last(zero.persistence_threshold == defaults.persistence_threshold, "persistence_threshold");
  last(zero.sub_group == defaults.sub_group, "sub_group");
  const std::int64_t most = kMaxRanks * kMaxRanks;
  CheckRange(zero.reduce_bucket, 1, most, where, "zero.reduce_bucket");
  CheckRange(zero.allgather_bucket, 0, most, where, "zero.allgather_bucket");
  CheckRange(zero.prefetch_bucket, 0, most, where, "zero.prefetch_bucket");
  CheckRange(zero.max_live_parameters, 0, most, where, "zero.max_live_parameters");
  CheckRange(zero.max_reuse_distance, 0, most, where, "zero.max_reuse_distance");
  CheckRange(zero.persistence_threshold, 0, most, where, "zero.persistence_threshold");
  CheckRange(zero.sub_group, 1, most, where, "zero.sub_group");
}

// A field of the job has no path below the plan that `where` names.
void CheckJobRange(std::int64_t value, std::int64_t min, std::int64_t max, const std::string& where,
                   const std::string& field) {
  if (value < min || value > max) {
    throw InputError(where, "a job with " + field + ' ' + std::to_string(value),
                     "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]");
  }
}

void CheckJob(const Job& job, const std::string& where) {
  CheckJobRange(job.sequence_length, 1, kMaxSequence, where, "sequence_length");
  CheckJobRange(job.global_batch, 0, kMaxSamples * kMaxAccumulation, where, "global_batch");
  CheckJobRange(job.lora_rank, 0, kMaxSequence, where, "lora_rank");
  if (!(job.lora_dropout >= 0.0 && job.lora_dropout < 1.0)) {
    throw InputError(where, "a job with lora_dropout " + std::to_string(job.lora_dropout),
                     "a fraction in [0, 1)");
  }
  if (!(job.memory_margin >= 0.0 && job.memory_margin < 1.0)) {
    throw InputError(where, "a job with memory_margin " + std::to_string(job.memory_margin),
                     "a fraction in [0, 1)");
  }
}

// Units with parameters that learn and others that do not are refused.
void CheckUniformUnits(const Model& model, const Plan& plan, const std::string& where,
                       const std::string& why) {
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const ParamId id : units[u].params) {
      const Parameter& param = model.params[id.value];
      const Parameter& first = model.params[units[u].params[0].value];
      if (param.trainable != first.trainable) {
        throw InputError(UnitField(where, u, "modules"),
                         "trainable and frozen parameters (" + Quoted(first.fqn) + ", " +
                             Quoted(param.fqn) + ")",
                         "all trainable or all frozen " + why);
      }
    }
  }
}

[[noreturn]] void RefuseFormat(const std::string& where, const char* field, std::string_view name,
                               const std::string& expected, const std::string& hint) {
  throw InputError(where, "a job with " + std::string(field) + " " + Quoted(name), expected, hint);
}

// Which dialects update states of this format, or by this optimizer.
void CheckUpdateFormat(const Job& job, const Plan& plan, const std::string& where) {
  const OptimizerSpec& optimizer = job.optimizer;
  const std::string_view states = NameIn(kStateFormatNames, optimizer.states);
  const bool is_adafactor = optimizer.kind == OptimizerKind::kAdafactor;
  if (is_adafactor && plan.dialect != Dialect::kDdp && plan.dialect != Dialect::kFsdp1) {
    RefuseFormat(where, "optimizer.kind", "adafactor", "dialect ddp or fsdp1",
                 "Transformers' Adafactor mixes tensors of its own with those of FSDP2");
  }
  if (is_adafactor &&
      (optimizer.states != StateFormat::kFp32 || optimizer.impl != OptimizerImpl::kForLoop)) {
    RefuseFormat(where, "optimizer.kind", "adafactor", "impl for_loop and states fp32",
                 "Transformers' Adafactor goes from parameter to parameter in fp32");
  }
  if (optimizer.states == StateFormat::kMaster) {
    return;
  }
  if (!IsTorch(plan.dialect)) {
    RefuseFormat(where, "optimizer.states", states, "dialect ddp, fsdp1 or fsdp2",
                 "dialect " + std::string(NameOf(plan.dialect)) + " keeps states as masters");
  }
  const bool is_lion = optimizer.kind == OptimizerKind::kLion &&
                       optimizer.states != StateFormat::kAo8 &&
                       optimizer.states != StateFormat::kAo4;
  if (optimizer.kind != OptimizerKind::kAdam && optimizer.kind != OptimizerKind::kAdamW &&
      !is_lion && !is_adafactor) {
    RefuseFormat(where, "optimizer.states", states, "optimizer adam or adamw",
                 "no other one is known so");
  }
  if (plan.offload.parameters || plan.offload.optimizer ||
      optimizer.matrices != MatrixRule::kNone) {
    RefuseFormat(where, "optimizer.states", states,
                 "updates on the device, without matrices of their own",
                 "packed states are updated where they are");
  }
}

bool RecomputesExperts(const Model& model, const Plan& plan) {
  const auto is_region = [&](const Module& module) {
    return std::any_of(plan.recompute.begin(), plan.recompute.end(),
                       [&](const RecomputeRegion& region) {
                         return region.module == module.fqn &&
                                region.kind == RecomputeKind::kFull && region.keep_every == 1;
                       });
  };
  return std::all_of(model.ops.begin(), model.ops.end(), [&](const ModelOp& op) {
    bool is_inside = model.SpecOf(op).kind != OpKind::kExperts;
    for (ModuleId m = op.module; m.valid() && !is_inside; m = model.modules[m.value].parent) {
      is_inside = is_region(model.modules[m.value]);
    }
    return is_inside;
  });
}

// Which dialects have parameters, and states, of several formats in a unit.
void CheckFormats(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  const std::string_view frozen = NameIn(kFrozenFormatNames, job.frozen_format);
  if (job.frozen_format != FrozenFormat::kMaster && !IsTorch(plan.dialect)) {
    RefuseFormat(where, "frozen_format", frozen, "dialect ddp, fsdp1 or fsdp2",
                 "dialect " + std::string(NameOf(plan.dialect)) + " keeps a unit in one dtype");
  }
  const bool is_nf4 =
      job.frozen_format == FrozenFormat::kNf4 || job.frozen_format == FrozenFormat::kNf4Double;
  if (job.frozen_format > FrozenFormat::kParam && !is_nf4 && !is_ddp) {
    RefuseFormat(where, "frozen_format", frozen, "dialect ddp",
                 "only 4-bit weights of bitsandbytes are sharded");
  }
  if (job.frozen_format != FrozenFormat::kMaster && plan.dialect == Dialect::kFsdp1) {
    CheckUniformUnits(model, plan, where, "with frozen_format " + std::string(frozen));
  }
  const bool learns_all = std::all_of(model.params.begin(), model.params.end(),
                                      [](const Parameter& param) { return param.trainable; });
  if (job.frozen_format != FrozenFormat::kMaster && learns_all) {
    RefuseFormat(where, "frozen_format", frozen, "frozen parameters, or lora_rank",
                 "every parameter learns");
  }
  if (job.lora_magnitudes && plan.dialect != Dialect::kFsdp2 && plan.dialect != Dialect::kZero1 &&
      plan.dialect != Dialect::kZero2 && !is_ddp) {
    RefuseFormat(where, "lora_magnitudes", "true", "dialect ddp, fsdp2, zero1 or zero2",
                 "PEFT's DoRA gathers units of FSDP1 and ZeRO-3 once more for its norms");
  }
  if (!job.lora_saved.empty() && is_ddp && job.frozen_format != FrozenFormat::kMaster &&
      job.precision.master != job.precision.param) {
    RefuseFormat(where, "lora_saved", job.lora_saved.front(), "masters in the dtype of compute",
                 "PEFT leaves whole modules as they are loaded, and makes fp32 of adapters");
  }
  if (job.quantized_experts && job.frozen_format <= FrozenFormat::kParam) {
    RefuseFormat(where, "frozen_format", frozen, "a format of 8 or 4 bits with quantized_experts",
                 "");
  }
  if (job.quantized_experts && !RecomputesExperts(model, plan)) {
    RefuseFormat(where, "quantized_experts", "true", "a fully recomputed region around all experts",
                 "their copies in 16 bits are kept for backward otherwise");
  }
  CheckUpdateFormat(job, plan, where);
}

void CheckAllocator(const AllocatorSettings& allocator, const std::string& where) {
  constexpr Bytes kLeast = 20 * kMiB;  // PyTorch: larger than kLargeBuffer
  const Bytes split = allocator.max_split_size;
  if (split != Bytes(0) &&
      (split <= kLeast || split.value % kMiB.value != 0 || split > 1024 * kGiB)) {
    throw InputError(where, "a job with allocator.max_split_size " + FormatExact(split),
                     "0 B (no limit), or whole MiB above 20 MiB and at most 1 TiB");
  }
  const double threshold = allocator.garbage_collection_threshold;
  if (!(threshold >= 0.0 && threshold < 1.0)) {
    throw InputError(
        where, "a job with allocator.garbage_collection_threshold " + std::to_string(threshold),
        "a fraction in [0, 1)");
  }
}

void CheckSizes(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckRange(plan.shard_size, 1, kMaxRanks, where, "shard_size");
  CheckRange(plan.replicate_size, 1, kMaxRanks, where, "replicate_size");
  CheckRange(plan.micro_batch, 1, kMaxSamples, where, "micro_batch");
  CheckRange(plan.accumulation, 1, kMaxAccumulation, where, "accumulation");
  CheckRange(plan.in_flight, 1, kMaxAccumulation, where, "in_flight");
  CheckRange(plan.moments_piece.value, 1, kMaxRanks * kMaxRanks, where, "moments_piece");
  CheckRange(plan.first_bucket.value, 1, kMaxRanks * kMaxRanks, where, "first_bucket");
  CheckRange(plan.bucket.value, 1, kMaxRanks * kMaxRanks, where, "bucket");
  CheckRange(plan.reduce_scatter_bucket.value, 0, kMaxRanks * kMaxRanks, where,
             "reduce_scatter_bucket");
  if (job.trains_by != TrainsBy::kOwn &&
      (job.mode == JobMode::kForward || model.sequence_length == 0)) {
    throw InputError(where,
                     "a job with trains_by " + std::string(NameIn(kTrainsByNames, job.trains_by)) +
                         (job.mode == JobMode::kForward ? " and mode forward"
                                                        : " and a model without sequences"),
                     "mode train, and answers of tokens");
  }
  if (plan.micro_batch % SamplesPerExample(job.trains_by) != 0) {
    throw InputError(FieldOf(where, "micro_batch"), std::to_string(plan.micro_batch),
                     "an even number, since job.trains_by " +
                         std::string(NameIn(kTrainsByNames, job.trains_by)) +
                         " compares pairs, each of 2 samples");
  }
  const std::int64_t ranks = MeshOf(plan).RankCount();
  if (ranks > kMaxRanks) {
    throw InputError(FieldOf(where, "replicate_size"), std::to_string(plan.replicate_size),
                     "at most " + std::to_string(kMaxRanks) + " ranks in all");
  }
  // Up to 2^64: compared as a double, which is exact for every batch that CheckJob lets through.
  const double batch = static_cast<double>(ranks) * static_cast<double>(plan.accumulation) *
                       static_cast<double>(plan.micro_batch);
  if (job.global_batch > 0 && batch != static_cast<double>(job.global_batch)) {
    throw InputError(where,
                     std::to_string(ranks) + " ranks x micro_batch " +
                         std::to_string(plan.micro_batch) + " x accumulation " +
                         std::to_string(plan.accumulation),
                     "the job's global_batch " + std::to_string(job.global_batch));
  }
  double bytes = 0.0;
  for (const Tensor& tensor : model.tensors) {
    bytes += 8.0 * static_cast<double>(tensor.elements);
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    bytes += 4.0 * static_cast<double>(spec.heads) * static_cast<double>(spec.seq_q) *
             static_cast<double>(spec.seq_k);
  }
  if (bytes * static_cast<double>(plan.micro_batch) > kMaxActivationBytes) {
    throw InputError(FieldOf(where, "micro_batch"), std::to_string(plan.micro_batch),
                     "a micro-batch whose activations stay below 1e18 bytes");
  }
}

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
    if (!is_root && std::count(unit.modules.begin(), unit.modules.end(), "") > 0) {
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

void CheckRecompute(const Model& model, const Plan& plan, const std::string& where) {
  if (plan.recompute.empty()) {
    return;
  }
  if (plan.dialect == Dialect::kZero3 &&
      std::any_of(model.ops.begin(), model.ops.end(),
                  [&](const ModelOp& op) { return model.SpecOf(op).other.stops_gradient; })) {
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
      throw internal::UnknownModule(model, plan.recompute[r].module,
                                    FieldOf(where, "recompute[" + std::to_string(r) + "].module"));
    }
  }
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

// Where gradients change their dtype to wait for a reduction, FSDP2 asks every parameter for one,
// also those of a unit that was never gathered (to_accumulated_grad_if_needed of _fsdp_param.py).
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
    const bool is_called =
        std::any_of(units[u].modules.begin(), units[u].modules.end(), [&](ModuleId m) {
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

// What PyTorch's wrappers and torch.utils.checkpoint cannot do together, or the applier not at all.
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

// What the ZeRO stages and FairScale leave no choice about.
void CheckFixedRules(const Plan& plan, const std::string& where) {
  const std::string dialect = "dialect " + std::string(NameOf(plan.dialect));
  if (IsZero(plan.dialect) && plan.sync != SyncMode::kEvery) {
    throw InputError(FieldOf(where, "sync"), Quoted(NameIn(kSyncNames, plan.sync)), "\"every\"",
                     dialect +
                         " has no such choice: zero1 reduces on the last micro-batch, zero2 "
                         "and zero3 on each");
  }
  if ((plan.dialect == Dialect::kZero1 || plan.dialect == Dialect::kZero2) &&
      plan.offload.parameters) {
    throw InputError(FieldOf(where, "offload.parameters"), "true", "false",
                     dialect + " keeps parameters on the device");
  }
  if (plan.dialect == Dialect::kFairscale && plan.replicate_size > 1) {
    throw InputError(FieldOf(where, "replicate_size"), std::to_string(plan.replicate_size), "1",
                     dialect + " shards over all ranks");
  }
}

void CheckDialect(const Plan& plan, const std::string& where) {
  CheckForeignOptions(plan, where);
  CheckZeroOptions(plan, where);
  CheckFixedRules(plan, where);
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  if (is_ddp && plan.shard_size != 1) {
    throw InputError(FieldOf(where, "shard_size"), std::to_string(plan.shard_size), "1",
                     "dialect ddp replicates; set replicate_size");
  }
  if (is_ddp && plan.offload.parameters) {
    throw InputError(FieldOf(where, "offload.parameters"), "true", "false",
                     "dialect ddp keeps parameters on the device");
  }
  if (plan.offload.optimizer && plan.dialect != Dialect::kZero3) {
    CheckForeign(false, "native", plan, where, "offload.optimizer");
  }
  CheckForeign(!plan.offload.moments, "native", plan, where, "offload.moments");
  if (plan.offload.moments && (plan.offload.parameters || plan.offload.optimizer)) {
    throw InputError(FieldOf(where, "offload.moments"), "true", "false",
                     "the moments go wherever the optimizer goes");
  }
  if (plan.sync == SyncMode::kReplicateLast) {
    const std::string field = FieldOf(where, "sync");
    if (plan.replicate_size == 1) {
      throw InputError(field, "\"replicate_last\"", "a replicate_size above 1 with it");
    }
    if (!FactsOf(plan).has_groups) {
      throw InputError(field, "\"replicate_last\"", "\"every\" or \"last\"",
                       "dialect " + std::string(NameOf(plan.dialect)) + " cannot delay it");
    }
  }
}

// What torch does in a static graph's first backward pass it does in the first of all, synced or
// not.
void CheckStaticGraph(const Job& job, const Plan& plan, const std::string& where) {
  if (plan.static_graph && job.mode == JobMode::kTrain && plan.accumulation > 1 &&
      plan.replicate_size > 1 && plan.sync == SyncMode::kLast) {
    throw InputError(FieldOf(where, "static_graph"),
                     "true with " + std::to_string(plan.accumulation) +
                         " micro-batches that reduce on the last one",
                     "sync \"every\", or find_unused_parameters",
                     "torch fails with no_sync before its first reduction: expect_autograd_hooks_ "
                     "INTERNAL ASSERT FAILED");
  }
}

// "Limitations" of FullyShardedDataParallel's documentation (torch 2.13).
void CheckOffloadedSums(const Job& job, const Plan& plan, const std::string& where) {
  if (!FactsOf(plan).adds_on_host && plan.offload.parameters && job.mode == JobMode::kTrain &&
      plan.accumulation > 1 && plan.sync == SyncMode::kEvery) {
    throw InputError(
        FieldOf(where, "offload.parameters"),
        "true with " + std::to_string(plan.accumulation) + " micro-batches that reduce each",
        "sync \"last\", or one micro-batch",
        "FSDP1 adds nothing to gradients that are on the host: a micro-batch's take "
        "the place of those of the one before");
  }
}

// FSDP1 without use_orig_params and FairScale flatten a unit into one parameter, which is trainable
// or not.
void CheckUniformGrad(const Model& model, const Plan& plan, const std::string& where) {
  if (plan.dialect == Dialect::kFsdp1 && !plan.use_orig_params) {
    CheckUniformUnits(model, plan, where, "with use_orig_params false");
  } else if (plan.dialect == Dialect::kFairscale) {
    CheckUniformUnits(model, plan, where, "under dialect fairscale");
  }
}

// What a unit in full precision may hold, and who has such units.
void CheckFullPrecision(const Model& model, const Plan& plan, const std::string& where) {
  const auto has_any = [](const UnitPlan& unit) { return unit.full_precision; };
  if (std::none_of(plan.units.begin(), plan.units.end(), has_any)) {
    return;
  }
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (!units[u].full_precision) {
      continue;
    }
    const std::string field = UnitField(where, u, "full_precision");
    if (plan.dialect == Dialect::kDdp || IsZero(plan.dialect)) {
      throw InputError(field, "true", "false",
                       plan.dialect == Dialect::kDdp
                           ? "dialect ddp has no units; autocast leaves batch norms alone"
                           : "DeepSpeed casts the whole module");
    }
    for (const ParamId id : units[u].params) {
      if (!model.params[id.value].full_precision) {
        throw InputError(field, "true for " + Quoted(model.params[id.value].fqn),
                         "parameters that the model marks full_precision, and no others",
                         "give its module another unit");
      }
    }
  }
}

// Expert parallel as torchtitan has it, around FSDP2: what ranks share out is a unit of its own.
void CheckExperts(const Model& model, const Plan& plan, const std::string& where) {
  const std::string field = FieldOf(where, "expert_size");
  CheckRange(plan.expert_size, 1, kMaxRanks, where, "expert_size");
  const auto refuse = [&](const std::string& expected, const std::string& hint = "") {
    throw InputError(field, std::to_string(plan.expert_size), expected, hint);
  };
  std::int64_t parts = 1;
  for (const Parameter& param : model.params) {
    parts = std::max(parts, param.parts);
  }
  if (plan.expert_size > 1 && (plan.dialect != Dialect::kFsdp2 || plan.offload.parameters)) {
    refuse("1", "experts are shared out under dialect fsdp2 alone, without offloaded parameters");
  }
  if (parts != plan.expert_size) {
    refuse(std::to_string(parts), "the model has one of so many parts of its experts");
  }
  if (plan.expert_size == 1) {
    return;
  }
  if (!MeshOf(plan).SplitsInto(plan.expert_size)) {
    refuse("a divisor of shard_size " + std::to_string(plan.shard_size));
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
    if (!std::all_of(units[u].params.begin(), units[u].params.end(), is_first)) {
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

// No published code was found that shards what Muon and SOAP need whole.
void CheckMatrices(const Job& job, const Plan& plan, const std::string& where) {
  if (job.optimizer.matrices != MatrixRule::kNone && plan.dialect != Dialect::kDdp) {
    throw InputError(where,
                     "a job whose optimizer updates matrices by " +
                         std::string(NameIn(kMatrixRuleNames, job.optimizer.matrices)) +
                         " in a plan of dialect " + std::string(NameOf(plan.dialect)),
                     "dialect ddp, or matrices none");
  }
}

}  // namespace

void ValidatePlan(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckJob(job, where);
  CheckAllocator(job.allocator, where);
  CheckFormats(model, job, plan, where);
  CheckSizes(model, job, plan, where);
  CheckExperts(model, plan, where);
  CheckDialect(plan, where);
  CheckUnits(plan, where);
  CheckRecompute(model, plan, where);
  CheckFsdp(model, plan, where);
  CheckUncalledUnits(model, job, plan, where);
  CheckUniformGrad(model, plan, where);
  CheckFullPrecision(model, plan, where);
  CheckMatrices(job, plan, where);
  CheckStaticGraph(job, plan, where);
  CheckOffloadedSums(job, plan, where);
  CheckExpertUnits(model, plan, where);
}

}  // namespace shardwright
