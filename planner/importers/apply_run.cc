// From settings to job and plan, by the functions that emitters check themselves with.

#include <algorithm>
#include <array>
#include <set>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/emitters/emission.h"
#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/unit_classes.h"
#include "planner/importers/read_trainer.h"
#include "planner/importers/run_settings.h"
#include "planner/importers/setting_keys.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

void ApplyDdp(const std::string& mixed_precision, PlanFile& file) {
  file.plan = WithDialect(file.plan, Dialect::kDdp);
  file.plan.shard_size = 1;
  file.plan.replicate_size = file.cluster.RankCount();
  file.plan.units = {RootUnitOf(Reshard::Kind::kNever)};
  file.plan.offload = {};
  const DType param = mixed_precision == "bf16"   ? DType::kBf16
                      : mixed_precision == "fp16" ? DType::kFp16
                                                  : DType::kFp32;
  file.job.precision = {.master = DType::kFp32, .param = param, .reduce = DType::kFp32};
}

void RecomputeBlocks(PlanFile& file) {
  const Model& model = file.model;
  if (!model.block_classes.empty()) {
    file.plan.recompute = FullRecompute(model, BlocksOf(model));
  }
}

bool IsAuto(const DeepSpeedSettings& s, std::string_view key) {
  return IsIn(s.autos, key);
}

template <class T>
void Fill(std::optional<T>& slot, const std::optional<T>& value) {
  if (!slot) {
    slot = value;
  }
}

// What the other files of the run say of what DeepSpeed's leaves open or calls "auto".
DeepSpeedSettings Merged(const RunSettings& run) {
  DeepSpeedSettings s = *run.deepspeed;
  if (run.trainer) {
    const TrainerSettings& t = *run.trainer;
    Fill(s.train_micro_batch_size_per_gpu, t.per_device_train_batch_size);
    // What is neither there nor "auto" is DeepSpeed's default, whatever the Trainer is told.
    if (IsAuto(s, "gradient_accumulation_steps")) {
      Fill(s.gradient_accumulation_steps, t.gradient_accumulation_steps);
    }
    if (IsAuto(s, "gradient_clipping")) {
      Fill(s.gradient_clipping, t.max_grad_norm);
    }
    if (IsAuto(s, "optimizer.params.weight_decay")) {
      Fill(s.weight_decay, t.weight_decay);
    }
    Fill(s.bf16, t.bf16);
    Fill(s.fp16, t.fp16);
  }
  if (run.accelerate && run.accelerate->mixed_precision) {
    Fill(s.bf16, std::optional<bool>(*run.accelerate->mixed_precision == "bf16"));
    Fill(s.fp16, std::optional<bool>(*run.accelerate->mixed_precision == "fp16"));
  }
  return s;
}

// Sizes that Accelerate and the Trainer make of the model's hidden_size.
void FillSizes(const std::string& where, const Model& model, DeepSpeedSettings& s) {
  constexpr std::string_view kReduce = "zero_optimization.reduce_bucket_size";
  constexpr std::string_view kPrefetch = "zero_optimization.stage3_prefetch_bucket_size";
  constexpr std::string_view kPersistence = "zero_optimization.stage3_param_persistence_threshold";
  const std::int64_t hidden = HiddenSize(model);
  const auto fill = [&](std::string_view key, std::optional<std::int64_t>& slot,
                        std::int64_t value) {
    if (!IsAuto(s, key)) {
      return;
    }
    if (hidden == 0) {
      throw InputError(where + ": " + std::string(key), "\"auto\"",
                       "a number, since " + model.name + " has no hidden_size");
    }
    Fill(slot, std::optional(value));
  };
  fill(kReduce, s.reduce_bucket_size, hidden * hidden);
  const double part = 0.9 * static_cast<double>(hidden) * static_cast<double>(hidden);
  fill(kPrefetch, s.prefetch_bucket_size, static_cast<std::int64_t>(part));
  fill(kPersistence, s.param_persistence_threshold, 10 * hidden);
}

// Merged, and what Accelerate and the Trainer take where nobody says anything.
DeepSpeedSettings Resolved(const RunSettings& run, const PlanFile& file) {
  DeepSpeedSettings s = Merged(run);
  if (run.trainer) {
    Fill(s.train_micro_batch_size_per_gpu, std::optional<std::int64_t>(8));
  }
  if (IsAuto(s, "gradient_clipping")) {
    Fill(s.gradient_clipping, std::optional(1.0));
  }
  if (IsAuto(s, "zero_stage")) {
    Fill(s.stage, std::optional<std::int64_t>(2));
  }
  if (IsAuto(s, "zero_optimization.stage")) {
    if (!run.trainer && !run.accelerate) {
      throw InputError(run.files.back() + ": zero_optimization.stage", "\"auto\"",
                       "0, 1, 2 or 3, since no other file of the run says it");
    }
    Fill(s.stage, std::optional<std::int64_t>(2));  // DeepSpeedPlugin's
  }
  // Nobody who would fill it in: what the plan was begun with.
  if (!run.trainer && !run.accelerate && (IsAuto(s, "bf16.enabled") || IsAuto(s, "fp16.enabled"))) {
    const DType param = file.job.precision.param;
    Fill(s.bf16, std::optional(param == DType::kBf16));
    Fill(s.fp16, std::optional(param == DType::kFp16));
  }
  FillSizes(run.files.back(), file.model, s);
  return s;
}

void ApplyMergedDeepSpeed(const RunSettings& run, PlanFile& file) {
  DeepSpeedSettings s = Resolved(run, file);
  const std::int64_t ranks = file.cluster.RankCount();
  // Of the three sizes two may be given; DeepSpeed works out the third.
  if (s.train_batch_size) {
    const std::int64_t given = *s.train_batch_size;
    if (!s.train_micro_batch_size_per_gpu && !s.gradient_accumulation_steps) {
      s.train_micro_batch_size_per_gpu = given / ranks;
    } else if (!s.train_micro_batch_size_per_gpu) {
      s.train_micro_batch_size_per_gpu = given / ranks / *s.gradient_accumulation_steps;
    } else if (!s.gradient_accumulation_steps) {
      s.gradient_accumulation_steps = given / ranks / *s.train_micro_batch_size_per_gpu;
    }
    const std::int64_t micro = *s.train_micro_batch_size_per_gpu;
    const std::int64_t steps = s.gradient_accumulation_steps.value_or(1);
    if (micro < 1 || steps < 1 || micro * steps * ranks != given) {
      throw InputError(run.files.back() + ": train_batch_size", std::to_string(given),
                       std::to_string(ranks) + " ranks x train_micro_batch_size_per_gpu " +
                           std::to_string(micro) + " x gradient_accumulation_steps " +
                           std::to_string(steps));
    }
  }
  const std::int64_t stage = s.stage.value_or(0);
  if (stage < 0 || stage > 3) {
    throw InputError(run.files.back() + ": zero_optimization.stage", std::to_string(stage),
                     "0, 1, 2 or 3");
  }
  const std::int64_t mics = s.mics_shard_size.value_or(-1);
  if (mics == 0 || mics < -1 || (mics > 0 && MeshOver(ranks, {{0, mics}}).RankCount() != ranks)) {
    throw InputError(run.files.back() + ": zero_optimization.mics_shard_size", std::to_string(mics),
                     "-1 or a divisor of the " + std::to_string(ranks) + " ranks");
  }
  ApplyDeepSpeed(s, file);
}

bool IsAccelerateFsdp(const RunSettings& run) {
  return run.accelerate && run.accelerate->distributed_type == "FSDP";
}

// Tokens are cut among ranks that FSDP takes for data-parallel ones.
std::int64_t ContextOf(const RunSettings& run) {
  const std::int64_t of_trainer = run.trainer ? run.trainer->context_size.value_or(1) : 1;
  return run.accelerate ? run.accelerate->context_size.value_or(of_trainer) : of_trainer;
}

void ApplyContext(const RunSettings& run, PlanFile& file) {
  Plan& plan = file.plan;
  if (const std::int64_t size = ContextOf(run); size > 1) {
    plan.context_size = size;
    plan.context_method = run.script.context_method;
    const char* const key = run.script.is_llamafactory_v1 ? "cp_size"
                            : !run.accelerate             ? "context_parallel_size"
                                                          : "parallelism_config_cp_size";
    const std::string where = run.files.front() + ": " + key;
    CutForPlan(file.model, file.job, plan, {where, where, where});
    file.job.global_batch = MeshOf(plan).DataCount() * plan.micro_batch * plan.accumulation;
  }
}

// axolotl's: the size that is not said is what the other one leaves of the ranks.
HfFsdp WithMesh(HfFsdp fsdp, const RunSettings& run, const PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  const std::int64_t shard = run.script.dp_shard * ContextOf(run);
  const std::int64_t replicate = run.script.dp_replicate;
  if (std::max(shard, replicate) == 0) {
    return fsdp;
  }
  const Mesh mesh = MeshOver(ranks, {{replicate, shard}});
  fsdp.dp_shard = std::max<std::int64_t>(1, mesh.Along(Axis::kShard));
  fsdp.dp_replicate = std::max<std::int64_t>(1, mesh.Along(Axis::kReplicate));
  if (mesh.RankCount() != ranks || (fsdp.version != 2 && fsdp.dp_replicate > 1)) {
    throw InputError(
        run.trainer_file + ": dp_shard_size x dp_replicate_size",
        std::to_string(fsdp.dp_shard) + " x " + std::to_string(fsdp.dp_replicate),
        "a product of the " + std::to_string(ranks) + " GPUs of the cluster, with fsdp_version 2");
  }
  return fsdp;
}

// As Accelerate does, which would not start.
void ApplyFsdp(const HfFsdp& fsdp, const std::string& where, const char* key, PlanFile& file) {
  const Model& model = file.model;
  for (const std::string& name : fsdp.layer_classes) {
    if (InstancesOf(model, {name}).empty()) {
      throw InputError(
          where + ": fsdp_config." + key, "\"" + name + "\"",
          "a class of " + model.name + "'s modules" +
              (model.block_classes.empty() ? "" : ", such as " + model.block_classes[0]));
    }
  }
  ApplyHfFsdp(fsdp, file);
}

// What becomes of the base below adapters: FSDP under Accelerate upcasts what learns alone, and
// DeepSpeed keeps the base beside masters of what learns.
void ApplyAdapters(const RunSettings& run, PlanFile& file) {
  const Adapters& adapters = run.script.adapters;
  if (adapters.rank == 0) {
    return;
  }
  const bool is_quantized = adapters.base > FrozenFormat::kParam;
  const std::string& place = run.trainer_file.empty() ? run.files.front() : run.trainer_file;
  const auto refuse = [&](const std::string& what, const char* other = "FSDP2 or no FSDP") {
    throw InputError(place + ": adapters", what,
                     std::string(other) + ", since " + what + " cannot be predicted");
  };
  if (adapters.has_magnitudes && run.script.is_llamafactory_v1) {
    refuse("DoRA with units of adapters' own");
  }
  if (adapters.has_magnitudes &&
      (file.plan.dialect == Dialect::kFsdp1 || file.plan.dialect == Dialect::kZero3)) {
    refuse("DoRA under FSDP1 or ZeRO-3");
  }
  if (run.deepspeed && is_quantized) {
    refuse("quantized weights under DeepSpeed");
  }
  const bool is_nf4 =
      adapters.base == FrozenFormat::kNf4 || adapters.base == FrozenFormat::kNf4Double;
  if (file.plan.dialect != Dialect::kDdp && is_quantized && !is_nf4) {
    refuse("weights in 8 bits under FSDP");
  }
  file.job.quantized_experts = adapters.quantizes_experts && is_quantized;
  // PEFT makes fp32 of adapters alone; FSDP under Accelerate and DeepSpeed of all that learns.
  const bool is_mixed = adapters.base != FrozenFormat::kMaster &&
                        file.job.precision.master == DType::kFp32 &&
                        (file.plan.dialect == Dialect::kDdp || run.script.is_llamafactory_v1);
  if (!adapters.saved.empty() && is_mixed) {
    if (file.plan.dialect != Dialect::kDdp || file.job.precision.param != DType::kBf16) {
      refuse("whole modules in 16 bits beside adapters in fp32",
             "no modules_to_save, or FSDP by Accelerate");
    }
    file.job.precision.master = DType::kBf16;
    file.job.fp32_masters = {"*.lora_*"};
  }
  const bool is_kept = IsTorch(file.plan.dialect) || run.script.HasOwnTrainer();
  file.job.frozen_format = is_kept || is_quantized ? adapters.base : FrozenFormat::kMaster;
}

// Version 1 of LLaMA-Factory wraps by itself (plugins/trainer_plugins/distributed/fsdp2.py): what
// learns of adapters, the layers, an embedding that is not tied, and the rest, which goes after
// forward as the others do. It upcasts nothing but adapters, and reduces in fp32.
void ApplyLlamaFactoryV1(const RunSettings& run, PlanFile& file) {
  const Model& model = file.model;
  const Reshard::Kind reshard = run.trainer->reshard_after_forward.value_or(true)
                                    ? Reshard::Kind::kAlways
                                    : Reshard::Kind::kNever;
  std::vector<ModuleId> modules = InstancesOf(model, model.block_classes);
  const auto is_tied = [](const Parameter& param) { return param.tied_to.valid(); };
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kEmbedding &&
        std::none_of(model.params.begin(), model.params.end(), is_tied)) {
      modules.push_back(FirstNameOf(model, op.module));
    }
  }
  if (file.job.lora_rank > 0) {
    const std::vector<ModuleId> leaves = LearningLeaves(model);
    modules.insert(modules.end(), leaves.begin(), leaves.end());
  }
  std::sort(modules.begin(), modules.end());
  modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
  file.plan.units = UnitsOfModules(model, modules);
  for (UnitPlan& unit : file.plan.units) {
    unit.reshard.kind = reshard;
  }
  file.plan.units.push_back(RootUnitOf(reshard));
  const DType param = run.trainer->bf16.value_or(true) ? DType::kBf16 : DType::kFp32;
  const bool upcasts = file.job.lora_rank > 0 || run.script.layers;  // adapters; what learns
  file.job.precision = {upcasts ? DType::kFp32 : DType::kBf16, param, DType::kFp32};
}

// Files count pairs. Nobody upcasts a reference or other weights that do not learn.
void ApplyPairs(const RunSettings& run, PlanFile& file) {
  const std::int64_t samples = SamplesPerExample(file.job.trains_by);
  file.plan.micro_batch *= samples;
  file.job.global_batch *= samples;
  const Precision& precision = file.job.precision;
  const bool is_partly =
      HasReference(file.job.trains_by, file.job.rollout) || !file.job.frozen.empty();
  if (is_partly && run.script.adapters.rank == 0 &&
      (run.script.has_bf16_weights || run.script.layers) && IsTorch(file.plan.dialect) &&
      precision.master != precision.param) {
    file.job.frozen_format = FrozenFormat::kParam;
  }
}

// Of trainers that count samples of all ranks: as many micro-batches as these make.
void ApplyGlobalBatch(const RunSettings& run, PlanFile& file) {
  if (run.script.global_batch == 0) {
    return;
  }
  Plan& plan = file.plan;
  const std::int64_t ranks = MeshOf(plan).DataCount(), pass = ranks * plan.micro_batch;
  const bool is_staged = plan.pipeline_size > 1;  // then one pass has several micro-batches
  const std::int64_t micro = is_staged ? run.script.automodel->mesh.micro_batch : plan.micro_batch;
  if (run.script.global_batch % pass != 0 || plan.micro_batch % micro != 0) {
    throw InputError(run.trainer_file + (run.script.automodel ? ": step_scheduler." : ": ") +
                         "global_batch_size",
                     std::to_string(run.script.global_batch),
                     "a multiple of " + std::to_string(pass) + ", which one pass of all ranks has" +
                         (is_staged ? " in micro-batches of " + std::to_string(micro) : ""));
  }
  if (is_staged && plan.micro_batch < micro * plan.pipeline_size) {
    throw InputError(run.trainer_file + ": step_scheduler.local_batch_size",
                     std::to_string(plan.micro_batch),
                     std::to_string(plan.pipeline_size) + " micro-batches of " +
                         std::to_string(micro) + " or more, one for each rank of the pipeline");
  }
  plan.micro_batch = micro;
  plan.accumulation = run.script.global_batch / (ranks * micro);
  const bool is_last =
      (is_staged || plan.accumulation > 1) && !run.trainer->sync_each_batch.value_or(false);
  plan.sync = is_last ? SyncMode::kLast : SyncMode::kEvery;
  file.job.global_batch = run.script.global_batch;
}

void ApplyHf(const RunSettings& run, PlanFile& file) {
  const std::string& where = run.files.front();
  if (run.script.has_bf16_weights && run.script.adapters.rank == 0) {
    file.job.precision.master = DType::kBf16;  // mixed precision upcasts it
  }
  if (run.deepspeed) {
    ApplyMergedDeepSpeed(run, file);
    if (run.trainer && !run.deepspeed->optimizer) {
      ApplyTrainerOptimizer(*run.trainer, file.job);
    }
  } else if (IsAccelerateFsdp(run)) {
    HfFsdp fsdp = FromAccelerate(*run.accelerate, where);
    const bool bf16 = run.trainer && run.trainer->bf16.value_or(false);
    if (bf16 || (run.trainer && run.trainer->fp16.value_or(false))) {
      fsdp.mixed_precision = bf16 ? "bf16" : "fp16";  // the Trainer hands it to Accelerate
    }
    ApplyFsdp(fsdp, where, "fsdp_transformer_layer_cls_to_wrap", file);
  } else if (run.trainer && run.trainer->fsdp.value_or(false)) {
    ApplyFsdp(WithMesh(FromTrainer(*run.trainer, where), run, file), where,
              "transformer_layer_cls_to_wrap", file);
    if (run.script.is_llamafactory_v1) {
      ApplyLlamaFactoryV1(run, file);
    } else if (run.script.automodel) {
      ApplyAutomodel(*run.script.automodel, where, file);
    }
  } else {
    const bool bf16 = run.trainer && run.trainer->bf16.value_or(false);
    const bool fp16 = run.trainer && run.trainer->fp16.value_or(false);
    ApplyDdp(bf16             ? "bf16"
             : fp16           ? "fp16"
             : run.accelerate ? run.accelerate->mixed_precision.value_or("no")
                              : "no",
             file);
    // FSDP under Accelerate and DeepSpeed make fp32 of the weights; nobody does here.
    const bool loads_bf16 =
        run.script.adapters.rank > 0 ? run.script.has_bf16_adapters : run.script.has_bf16_weights;
    const DType param = file.job.precision.param;
    if (loads_bf16 &&
        (param == DType::kBf16 || (param == DType::kFp32 && run.script.adapters.rank == 0))) {
      file.job.precision = {.master = DType::kBf16, .param = DType::kBf16, .reduce = DType::kBf16};
      for (const std::string& glob : run.script.fp32_masters) {
        if (AnyOf(file.model.params,
                  [&](const Parameter& p) { return MatchesGlob(glob, p.fqn); })) {
          file.job.fp32_masters.push_back(glob);
        }
      }
    }
  }
  ApplyContext(run, file);
  ApplyAdapters(run, file);
  if (!run.trainer) {
    return;
  }
  if (!run.deepspeed) {
    ApplyTrainer(*run.trainer, file);
  }
  if (run.trainer->gradient_checkpointing.value_or(false)) {
    RecomputeBlocks(file);
  }
  ApplyGlobalBatch(run, file);
  if (run.script.automodel) {
    file.job.optimizer = run.script.automodel->optimizer;
  }
  ApplyPairs(run, file);
  file.plan.offload.activations |= run.script.offloads_activations;
  const bool is_whole = file.job.optimizer.states == StateFormat::kMaster;
  if (!is_whole && (file.plan.offload.parameters || file.plan.offload.optimizer)) {
    throw InputError(run.trainer_file + ": optim", run.trainer->optim.value_or(""),
                     "adamw_torch, since states in 8 or 4 bits beside offload cannot be predicted");
  }
}

void CheckCounts(const RunSettings& run, const PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  const auto check = [&](const std::optional<std::int64_t>& given, const char* key) {
    if (given && *given != ranks) {
      throw InputError(run.files.front() + ": " + key, std::to_string(*given),
                       "the " + std::to_string(ranks) + " GPUs of the cluster");
    }
  };
  if (run.accelerate) {
    check(run.accelerate->num_processes, "num_processes");
  }
  if (run.accelerate && run.accelerate->dp_shard_size) {
    const Mesh mesh = {{run.accelerate->dp_replicate_size.value_or(1),
                        *run.accelerate->dp_shard_size * ContextOf(run)}};
    check(mesh.RankCount(), "parallelism_config: product of the sizes");
  }
}

std::string ValueText(const SettingValue& value) {
  std::string text = SettingsAsJson({{"v", value}});
  const std::size_t begin = text.find(':') + 2;
  text = text.substr(begin, text.rfind('}') - begin);
  text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
  return text;
}

// What the nearest settings of the plan say and the given ones do not.
template <class S>
void AppendUnset(std::span<const SettingRow<S>> rows, const S& given, const S& nearest,
                 std::vector<Assumption>& list) {
  std::set<std::string> set;
  for (const Setting& setting : ListSettings<S>(rows, given)) {
    set.insert(setting.key);
  }
  for (const std::string& silent : SettingKeys::Words("silent")) {
    set.insert(silent);
  }
  for (const Setting& setting : ListSettings<S>(rows, nearest)) {
    if (set.count(setting.key) == 0) {
      list.push_back({setting.key, ValueText(setting.value)});
    }
  }
}

// A table deepspeed_config of Accelerate has names of its own.
void NameInlineKeys(const RunSettings& run, std::vector<Assumption>& list) {
  if (!run.accelerate || run.accelerate->deepspeed_config_file ||
      !IsAuto(*run.deepspeed, "zero_stage")) {
    return;
  }
  for (Assumption& assumption : list) {
    if (assumption.key == "zero_optimization.stage") {
      assumption.key = "deepspeed_config.zero_stage";
    } else if (assumption.key == "gradient_clipping" ||
               assumption.key == "gradient_accumulation_steps") {
      assumption.key.insert(0, "deepspeed_config.");
    }
  }
}

// The classes that stand for the model's own.
HfFsdp WithLayers(HfFsdp fsdp, const PlanFile& file) {
  if (fsdp.has_layers_of_model) {
    fsdp.layer_classes = NoSplitClasses(file.model);
  }
  return fsdp;
}

// Under DeepSpeed its file says the rest; without FSDP what is said of FSDP is nothing.
void AppendTrainer(const RunSettings& run, const PlanFile& file, std::vector<Assumption>& list) {
  const TrainerSettings& t = *run.trainer;
  if (!t.gradient_checkpointing) {
    list.push_back({"gradient_checkpointing", "false"});
  }
  if (run.deepspeed) {
    if (!run.deepspeed->optimizer && !t.optim) {
      list.push_back({"optim", "\"adamw_torch_fused\""});
    }
    return;
  }
  if (run.script.HasOwnTrainer()) {
    return;  // which has not these keys
  }
  const bool is_fsdp = t.fsdp.value_or(false);
  if (!t.fsdp && !IsAccelerateFsdp(run)) {
    list.push_back({"fsdp", "false"});
  }
  std::vector<Assumption> unset;
  const HfFsdp fsdp =
      is_fsdp ? WithLayers(FromTrainer(t, run.files.front()), file) : HfFsdpOf(file);
  AppendUnset(TrainerRows(), t, ToTrainer(fsdp, file), unset);
  for (Assumption& assumption : unset) {
    if (is_fsdp || !assumption.key.starts_with("fsdp")) {
      list.push_back(std::move(assumption));
    }
  }
}

// Each pass of a pipeline behind the first adds a bubble that one pass of all has not.
void AppendPasses(const Plan& plan, std::int64_t local_batch, std::vector<Assumption>& list) {
  const std::int64_t bubble = plan.pipeline_size - 1,
                     work = plan.pipeline_stages * plan.accumulation;
  const std::int64_t passes = plan.micro_batch * plan.accumulation / local_batch;
  if (bubble > 0 && passes > 1) {
    const std::int64_t percent = 100 * (passes - 1) * bubble / (work + bubble);
    list.push_back({"step_scheduler.global_batch_size",
                    "as one pass of the pipeline; " + std::to_string(passes) +
                        " passes take about " + std::to_string(percent) + " % longer"});
  }
}

// A precision that no file says is fp32.
void AppendPrecision(const RunSettings& run, const PlanFile& file, std::vector<Assumption>& list) {
  const bool is_hf = run.trainer || run.deepspeed;
  const bool said = (run.trainer && (run.trainer->bf16 || run.trainer->fp16)) ||
                    (run.deepspeed && (run.deepspeed->bf16 || run.deepspeed->fp16)) ||
                    (run.accelerate && run.accelerate->mixed_precision);
  constexpr std::array kKeys = {"mixed_precision", "bf16.enabled", "fp16.enabled"};
  const bool listed = AnyOf(list, [&](const Assumption& a) { return IsIn(kKeys, a.key); });
  if (is_hf && !said && !listed) {
    const bool bf16 = file.job.precision.param == DType::kBf16;
    list.push_back({run.trainer ? "bf16" : "bf16.enabled", bf16 ? "true" : "false"});
  }
}

}  // namespace

void CheckSizes(const RunSettings& run) {
  constexpr std::int64_t kMostSamples = std::int64_t{1} << 20;
  constexpr std::int64_t kMostSteps = 65535;
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
  constexpr std::int64_t kMostMib = std::int64_t{1} << 20;
  const auto check = [&](const std::optional<std::int64_t>& given, std::int64_t most,
                         const char* key) {
    if (given && (*given < 1 || *given > most)) {
      throw InputError(run.files.front() + ": " + key, std::to_string(*given),
                       "an integer in [1, " + std::to_string(most) + "]");
    }
  };
  if (const auto& t = run.torchtitan) {
    check(t->local_batch_size, kMostSamples, "training.local_batch_size");
    check(t->seq_len, kMostTokens, "training.seq_len");
    check(t->pipeline_parallel_layers_per_stage, kMostRanks,
          "parallelism.pipeline_parallel_layers_per_stage");
  }
  if (const auto& d = run.deepspeed) {
    check(d->train_micro_batch_size_per_gpu, kMostSamples, "train_micro_batch_size_per_gpu");
    check(d->gradient_accumulation_steps, kMostSteps, "gradient_accumulation_steps");
  }
  if (const auto& t = run.trainer) {
    check(t->per_device_train_batch_size, kMostSamples, "per_device_train_batch_size");
    check(t->gradient_accumulation_steps, kMostSteps, "gradient_accumulation_steps");
    check(t->bucket_cap_mb, kMostMib, "ddp_bucket_cap_mb");
    check(t->context_size, kMostRanks, "context_parallel_size");
  }
  if (const auto& a = run.accelerate) {
    check(a->num_processes, kMostRanks, "num_processes");
    check(a->num_machines, kMostRanks, "num_machines");
    check(a->context_size, kMostRanks, "parallelism_config.parallelism_config_cp_size");
    check(a->dp_shard_size, kMostRanks, "parallelism_config.parallelism_config_dp_shard_size");
    check(a->dp_replicate_size, kMostRanks,
          "parallelism_config.parallelism_config_dp_replicate_size");
  }
}

void ApplyRun(const RunSettings& run, PlanFile& file) {
  if (!run.script.plan_flags.empty()) {
    return;  // the plan was made with them
  }
  CheckCounts(run, file);
  ApplyUnfrozen(run.script, run.trainer_file, file);
  if (run.torchtitan) {
    ApplyTorchtitan(*run.torchtitan, run.files.front(), file);
  } else {
    ApplyHf(run, file);
  }
}

std::vector<Assumption> AssumptionsOf(const RunSettings& run, const PlanFile& file) {
  std::vector<Assumption> list;
  if (run.torchtitan) {
    AppendUnset(TorchtitanRows(), *run.torchtitan, ToTorchtitan(file), list);
    list.push_back({"PYTORCH_ALLOC_CONF", AllocatorConf(file.job.allocator)});
  } else if (run.deepspeed) {
    AppendUnset(DeepSpeedRows(), Merged(run), ToDeepSpeed(file), list);
    NameInlineKeys(run, list);
    if (run.trainer && run.trainer->optim) {
      std::erase_if(list, [](const Assumption& a) {
        return a.key == "optimizer.type" || a.key == "optimizer.params.torch_adam";
      });
    }
  } else if (IsAccelerateFsdp(run)) {
    const HfFsdp fsdp = WithLayers(FromAccelerate(*run.accelerate, run.files.front()), file);
    AppendUnset(AccelerateRows(), *run.accelerate, ToAccelerate(fsdp, file.cluster), list);
  } else if (run.accelerate && !run.trainer && !run.accelerate->mixed_precision) {
    list.push_back({"mixed_precision", "\"no\""});
  }
  list.insert(list.end(), run.script.assumed.begin(), run.script.assumed.end());
  if (run.trainer) {
    if (SamplesPerExample(file.job.trains_by) > 1) {
      list.push_back({"samples", "each answer of a pair"});
    }
    AppendTrainer(run, file, list);
    AppendPasses(file.plan, run.trainer->per_device_train_batch_size.value_or(8), list);
  }
  AppendPrecision(run, file, list);
  return list;
}

}  // namespace shardwright
