// Recipes of NVIDIA NeMo Automodel (commit of 2026-08-22): components/distributed/{config,
// parallelizer}.py for what FSDP2 cuts, components/moe/parallelizer.py for mixtures whose experts
// ranks share out.

#include <algorithm>
#include <string>
#include <utility>

#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_stage.h"
#include "planner/emitters/emission.h"
#include "planner/emitters/torchtitan.h"
#include "planner/emitters/unit_classes.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/read_trainer.h"
#include "planner/importers/setting_keys.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 24;
constexpr std::int64_t kGpusPerNode = 8;  // at most, where a file says ranks and no nodes

// The value at "a.b.c"; none: a key is not there, or null.
std::optional<JsonValue> At(const JsonValue& root, std::string_view path) {
  std::optional<JsonValue> value = root;
  for (std::size_t begin = 0; value && begin < path.size();) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    value = value->IsObject() ? value->Find(path.substr(begin, end - begin)) : std::nullopt;
    begin = end + 1;
  }
  return value;
}

bool IsTrue(const JsonValue& root, std::string_view path, bool by_default = false) {
  const auto value = At(root, path);
  return value ? value->AsBool() : by_default;
}

std::string TextAt(const JsonValue& root, std::string_view path) {
  const auto value = At(root, path);
  return value && value->IsString() ? value->AsString() : "";
}

// The class or function that `_target_` of a table names: "torch.optim.Adam" is "Adam".
std::string TargetAt(const JsonValue& root, const std::string& path) {
  const std::string target = TextAt(root, path + "._target_");
  return target.substr(target.rfind('.') + 1);
}

// A degree; "none" is 1.
std::int64_t DegreeAt(const JsonValue& root, std::string_view path) {
  const auto value = At(root, path);
  const bool is_none = !value || (value->IsString() && LowerCase(value->AsString()) == "none");
  return is_none ? 0 : value->AsInt(0, kMost);
}

// Automodel has models of its own for these, which no Liger kernel enters
// (_transformers/registry.py); told by the beginning of the checkpoint's name.
bool IsOwnModel(const std::string& name) {
  const std::vector<std::string> own = SettingKeys::Words("own_models");
  const std::string last = LowerCase(name.substr(name.rfind('/') + 1));
  return AnyOf(own, [&](const std::string& word) { return last.starts_with(word); });
}

// Transformer Engine's FusedAdam keeps states in fp32 and, if told so, the half of fp32 masters
// that bf16 weights have not; FlashAdamW keeps 8 or 16 bits more of each weight, and states in 8.
OptimizerSpec OptimizerOf(const JsonValue& root, DType& master) {
  OptimizerSpec spec;
  const std::string name = TargetAt(root, "optimizer");
  const std::string target = TextAt(root, "optimizer._target_");
  const auto decay = At(root, "optimizer.weight_decay");
  const bool is_flash = target == "flashoptim.FlashAdamW";
  if (is_flash || (name == "FusedAdam" && target.starts_with("transformer_engine."))) {
    const bool has_masters = is_flash || IsTrue(root, "optimizer.master_weights");
    master = has_masters ? DType::kFp32 : master;
    spec.states = is_flash                 ? StateFormat::kAo8
                  : master == DType::kFp32 ? StateFormat::kMaster
                                           : StateFormat::kFp32;
    spec.weight_decay = decay ? decay->AsDouble() > 0.0 : is_flash;
    const bool is_adam_w = IsTrue(root, "optimizer.adam_w_mode", true);
    spec.kind = is_adam_w ? OptimizerKind::kAdamW : OptimizerKind::kAdam;
    spec.impl = OptimizerImpl::kFused;
    return spec;
  }
  if (!target.starts_with("torch.optim.") || (name != "Adam" && name != "AdamW")) {
    throw root.At("optimizer")
        .At("_target_")
        .Error("torch.optim.Adam or AdamW, Transformer Engine's FusedAdam or FlashAdamW, since " +
               name + " cannot be predicted");
  }
  spec.kind = name == "Adam" ? OptimizerKind::kAdam : OptimizerKind::kAdamW;
  spec.impl = IsTrue(root, "optimizer.fused")            ? OptimizerImpl::kFused
              : !IsTrue(root, "optimizer.foreach", true) ? OptimizerImpl::kForLoop
                                                         : OptimizerImpl::kForeach;
  spec.weight_decay = decay ? decay->AsDouble() > 0.0 : spec.kind == OptimizerKind::kAdamW;
  return spec;
}

// The dtype that the weights are loaded in; checkpoints of today are bf16.
DType MasterOf(const JsonValue& root) {
  std::string name = TextAt(root, "model.torch_dtype");
  name = name.substr(name.rfind('.') + 1);
  if (name == "float32" || name == "fp32") {
    return DType::kFp32;
  }
  if (name.empty() || name == "auto" || name == "bf16" || name == "bfloat16") {
    return DType::kBf16;
  }
  throw root.At("model")
      .At("torch_dtype")
      .Error("bf16, float32 or auto, since weights in " + name + " cannot be predicted");
}

// Adapters hold the base in the dtype that it was loaded in; a pattern is one of whole names.
void ReadPeft(const JsonValue& root, TrainerFile& file) {
  const auto peft = root.Find("peft");
  const bool is_nf4 = IsTrue(root, "quantization.load_in_4bit");
  if (!peft) {
    if (is_nf4) {
      throw root.At("quantization")
          .Error(
              "a table peft beside it, since quantized weights without adapters cannot be "
              "predicted");
    }
    return;
  }
  const FrozenFormat base = !is_nf4 ? FrozenFormat::kParam
                            : IsTrue(root, "quantization.bnb_4bit_use_double_quant")
                                ? FrozenFormat::kNf4Double
                                : FrozenFormat::kNf4;
  Adapters& adapters = file.script.adapters;
  adapters = ReadAdapters(*peft, "automodel", base);
  const auto names_at = [&](const char* key) {
    const auto value = peft->Find(key);
    return value ? NamesIn(*value) : std::vector<std::string>();
  };
  const std::vector<std::string> names = names_at("target_modules");
  const std::vector<std::string> left_out = names_at("exclude_modules");
  adapters.targets.insert(adapters.targets.end(), names.begin(), names.end());
  // Automodel's own stacks of experts are adapted by names alone; others' are no modules to it.
  for (std::size_t i = 0; i < names.size() && file.script.automodel->is_own; ++i) {
    adapters.targets.push_back(names[i] + '@' + std::to_string(adapters.rank) +
                               (IsTrue(*peft, "moe_rank_scaling") ? "/k" : ""));
  }
  if (IsTrue(*peft, "match_all_linear") || (adapters.targets.empty() && !left_out.empty())) {
    adapters.targets = {"*"};
    for (const std::string& glob : left_out) {  // of whole names
      adapters.targets.push_back('!' + glob);
      adapters.targets.push_back("!*." + glob);
    }
  } else if (adapters.targets.empty()) {
    adapters.targets = {"*_proj"};
  }
}

// components/quantization/fp8.py: another recipe than tensorwise hides the other keys.
Fp8Products Fp8Of(const JsonValue& root) {
  if (!IsTrue(root, "fp8.enabled")) {
    return Fp8Products::kNone;
  }
  const std::string recipe = TextAt(root, "fp8.recipe_name");
  const auto filter = At(root, "fp8.filter_fqns");
  const bool is_head = filter && filter->size() == 1 && (*filter)[0].AsString() == "lm_head";
  if (!is_head || (!recipe.empty() && recipe != "tensorwise" && recipe != "rowwise")) {
    throw root.At("fp8").Error(
        "recipe_name tensorwise or rowwise and filter_fqns [lm_head], since other products in fp8 "
        "cannot be predicted");
  }
  return recipe == "rowwise"                                            ? Fp8Products::kPerRow
         : !IsTrue(root, "fp8.enable_fsdp_float8_all_gather")           ? Fp8Products::kPerTensor
         : IsTrue(root, "fp8.precompute_float8_dynamic_scale_for_fsdp") ? Fp8Products::kPrecomputed
                                                                        : Fp8Products::kGathered;
}

void ReadLoss(const JsonValue& root, TrainerFile& file) {
  const std::string loss = TargetAt(root, "loss_fn");
  if (loss == "FusedLinearCrossEntropy") {  // Cut Cross Entropy, which holds no logits
    file.script.loss_rows = kLossRows;
  } else if (loss.empty() || loss == "MaskedCrossEntropy" || loss == "TEParallelCrossEntropy") {
    file.script.loss_chunks = 1;
    if (loss.starts_with("TE")) {
      file.script.assumed.push_back({"loss_fn._target_", "MaskedCrossEntropy, which keeps more"});
    }
  } else {
    throw root.At("loss_fn")
        .At("_target_")
        .Error("MaskedCrossEntropy or FusedLinearCrossEntropy, since " + loss +
               " cannot be predicted");
  }
}

// Before anything else is looked at: the keys of other recipes are others.
void CheckRecipe(const JsonValue& root) {
  const auto recipe = root.Find("recipe");
  const std::string name = !recipe              ? "TrainFinetuneRecipeForNextTokenPrediction"
                           : recipe->IsObject() ? TargetAt(root, "recipe")
                                                : recipe->AsString();
  if (name != "TrainFinetuneRecipeForNextTokenPrediction" &&
      name != "BenchmarkingRecipeForNextTokenPrediction") {
    throw recipe->Error(
        "TrainFinetuneRecipeForNextTokenPrediction or BenchmarkingRecipeForNextTokenPrediction, "
        "since a recipe of another kind of model or loss is not read");
  }
}

// Pipelines and cut tokens are torch's; with Transformer Engine's attention tokens go round a ring.
void ReadMesh(const JsonValue& root, AutomodelFacts& facts) {
  const std::string where = "distributed.";
  const auto size = [&](const char* key) {
    return std::max<std::int64_t>(1, DegreeAt(root, where + key));
  };
  Plan& mesh = facts.mesh;
  mesh.replicate_size = size("dp_replicate_size");
  mesh.expert_size = size("ep_size");
  mesh.tensor_size = size("tp_size");
  mesh.context_size = mesh.shard_size = size("cp_size");
  mesh.pipeline_size = size("pp_size");
  mesh.micro_batch = size("pipeline.pp_microbatch_size");
  if (const std::int64_t data = DegreeAt(root, "distributed.dp_size"); data > 0) {
    Mesh all = MeshOf(mesh);
    all.size[0] = data;
    facts.ranks = all.RankCount();
  }
  if (mesh.context_size > 1) {
    const bool is_te = TextAt(root, "model.backend.attn") == "te" ||
                       TextAt(root, "model.attn_implementation") == "te";
    mesh.context_method = is_te ? ContextMethod::kRing : ContextMethod::kRingGather;
  }
  const std::string schedule = TextAt(root, "distributed.pipeline.pp_schedule");
  if (mesh.pipeline_size > 1 && !schedule.empty()) {
    mesh.pipeline_schedule =
        PipelineScheduleNamed(schedule, root.path().str() + ": distributed.pipeline.pp_schedule");
  }
  facts.stage_layers = DegreeAt(root, "distributed.pipeline.layers_per_stage");
  facts.stage_round = TextAt(root, "distributed.pipeline.round_virtual_stages_to_pp_multiple");
}

// What the generic layer of settings has no words for.
AutomodelFacts FactsOf(const JsonValue& root, const std::string& model) {
  AutomodelFacts facts;
  facts.is_own = IsOwnModel(model) && !IsTrue(root, "model.force_hf");
  ReadMesh(root, facts);
  facts.prefetches = IsTrue(root, "distributed.enable_fsdp2_prefetch");
  const auto recompute = At(root, "distributed.activation_checkpointing");
  if (recompute && recompute->IsString() && recompute->AsString() != "full") {
    throw recompute->Error(
        "true, false or full, since selective recomputation by Automodel's list "
        "cannot be predicted");
  }
  facts.recomputes = recompute && (recompute->IsString() || recompute->AsBool());
  auto reshard = At(root, "distributed.reshard_after_forward");
  if (!reshard && facts.mesh.expert_size > 1) {
    reshard = At(root, "distributed.moe.reshard_after_forward");
  }
  if (reshard) {
    facts.reshards = reshard->AsBool();
  }
  facts.master = MasterOf(root);
  facts.optimizer = OptimizerOf(root, facts.master);
  facts.fp8 = Fp8Of(root);
  facts.keeps_gathered = facts.is_own && facts.mesh.pipeline_size == 1 &&
                         IsTrue(root, "model.backend.enable_fsdp_optimizations");
  facts.fp32_logits = IsTrue(root, "loss_fn.fp32_upcast", true) ||
                      TextAt(root, "distributed.mp_policy.output_dtype") == "float32";
  return facts;
}

// A mixture's outermost module, if FSDP has it, is told when to reduce (get_sync_ctx of
// distributed/utils.py); otherwise moe/fsdp_mixin.py tells the parts, if it is on.
bool ReducesEachPass(const JsonValue& root, const AutomodelFacts& facts) {
  const bool is_told = facts.mesh.expert_size == 1 || facts.mesh.pipeline_size > 1 ||
                       IsTrue(root, "distributed.moe.wrap_outer_model", true);
  return is_told ? !IsTrue(root, "distributed.defer_fsdp_grad_sync", true) : !facts.keeps_gathered;
}

// Layers, and where experts are shared out, experts, embedding and head as well; tied ones are the
// root's. The root and, of layers alone, the last one keep what they gathered.
std::vector<UnitPlan> UnitsOf(const AutomodelFacts& facts, const Model& model,
                              const std::string& where) {
  const bool is_shared = facts.mesh.expert_size > 1, is_staged = facts.mesh.pipeline_size > 1;
  const bool is_tied = AnyOf(model.params, [](const Parameter& p) { return p.tied_to.valid(); });
  const bool reshards = facts.reshards.value_or(!is_shared && !is_staged);
  const Reshard::Kind kind = reshards ? Reshard::Kind::kAlways : Reshard::Kind::kNever;
  const WrapSpec::Kind rule =
      is_shared && !is_tied ? WrapSpec::Kind::kTorchtitan : WrapSpec::Kind::kBlock;
  std::vector<UnitPlan> units =
      Wrap(model, {rule, 0, ""}, {true, {kind, 0}}, Dialect::kFsdp2, where);
  for (UnitPlan& unit : units) {
    unit.modules = {unit.modules.back()};  // the head without the norm before it
    unit.name = unit.modules.front().empty() ? unit.name : unit.modules.front();
  }
  if (is_shared) {
    AddExpertUnits(model, units);
    for (UnitPlan& unit : units) {
      unit.forward_prefetch.clear();
      unit.backward_prefetch.clear();
    }
    return units;
  }
  units.back().reshard.kind = Reshard::Kind::kNever;
  const std::size_t layers = units.size() - 1;
  if (!facts.reshards) {
    units[layers - 1].reshard.kind = Reshard::Kind::kNever;
  }
  constexpr std::size_t kBehind = 2;  // fsdp2_backward_prefetch_depth
  for (std::size_t i = 0; facts.prefetches && reshards && i < layers; ++i) {
    if (i + 1 < layers) {
      units[i].forward_prefetch = {units[i + 1].name};
    }
    for (std::size_t back = 1; back <= std::min(i, kBehind); ++back) {
      units[i].backward_prefetch.push_back(units[i - back].name);
    }
  }
  return units;
}

// Of its own models mixer, products and norms are checkpointed each by itself, of others layers.
std::vector<RecomputeRegion> RecomputeOf(const AutomodelFacts& facts, const Model& model) {
  if (!facts.recomputes) {
    return {};
  }
  const std::vector<std::string> words = SettingKeys::Words("recomputed_parts");
  std::vector<ModuleId> modules = BlocksOf(model);
  if (facts.is_own && facts.mesh.expert_size == 1) {
    std::vector<ModuleId> parts;
    for (const ModuleId block : modules) {
      for (const ModuleId child : model.modules[block.value].children) {
        if (IsIn(words, model.modules[child.value].name)) {
          parts.push_back(child);
        }
      }
    }
    modules = std::move(parts);
  }
  return FullRecompute(model, modules);
}

}  // namespace

void ApplyAutomodel(const AutomodelFacts& facts, const std::string& where, PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  if (facts.ranks > 0 && facts.ranks != ranks) {
    throw InputError(where + ": distributed.dp_size", std::to_string(facts.ranks),
                     "the " + std::to_string(ranks) + " GPUs of the cluster");
  }
  const std::string key = where + ": distributed.";
  Mesh mesh = MeshOf(facts.mesh);
  const std::int64_t least = mesh.RankCount();
  mesh.size[1] = 0;  // the rest of the ranks
  mesh = MeshOver(ranks, mesh);
  const bool is_full = mesh.RankCount() == ranks && mesh.SplitsInto(mesh.context);
  if (!is_full || !mesh.SplitsInto(mesh.expert)) {
    throw InputError(key + (is_full ? "ep_size" : "*_size"),
                     std::to_string(is_full ? mesh.expert : least),
                     "a divisor of the " + std::to_string(ranks) + " GPUs of the cluster");
  }
  if (mesh.tensor > 1 && !IsIn(file.model.modules, "q_proj", &Module::name)) {
    throw InputError(key + "tp_size", std::to_string(mesh.tensor),
                     "1, since no plan of Automodel's cuts attention without q_proj");
  }
  const Offload offload = file.plan.offload;
  file.plan = facts.mesh;
  file.plan.offload = offload;
  file.plan.shard_size = mesh.Along(Axis::kShard);
  if (mesh.pipeline > 1) {
    file.plan.pipeline_edge_layers = 0;
    SetStages(std::ssize(BlocksOf(file.model)), facts.stage_layers, facts.stage_round,
              key + "pipeline.layers_per_stage", file.plan);
    Model first = file.model;
    CutStage(first, mesh.pipeline * file.plan.pipeline_stages, 0, mesh.pipeline, key + "pp_size",
             0);
  }
  CutForPlan(file.model, file.job, file.plan, {key + "ep_size", key + "tp_size", key + "cp_size"});
  file.plan.units = UnitsOf(facts, file.model, where);
  file.plan.keeps_gathered = facts.keeps_gathered && AnyOf(file.model.ops, [&](const ModelOp& op) {
                               return file.model.SpecOf(op).kind == OpKind::kExperts;
                             });
  file.kernels.fp32_logits = facts.fp32_logits;
  file.plan.recompute = RecomputeOf(facts, file.model);
  file.job.precision = {.master = facts.master, .param = DType::kBf16, .reduce = DType::kFp32};
  file.kernels.fp8 = ranks == 1 && GathersFp8(facts.fp8) ? Fp8Products::kPerTensor : facts.fp8;
  if (ranks == 1) {  // nothing is wrapped, and nothing cast
    file.plan = WithDialect(file.plan, Dialect::kDdp);
    file.plan.units = {RootUnitOf(Reshard::Kind::kNever)};
    file.plan.offload = {};
    file.job.precision = {.master = facts.master, .param = facts.master, .reduce = facts.master};
  }
}

TrainerFile ReadAutomodel(const JsonValue& root) {
  CheckRecipe(root);
  TrainerFile file;
  file.result = ReadSettings<TrainerSettings>(root, TrainerRows(), SettingKeys::Of("automodel"));
  TrainerSettings& s = file.result.settings;
  s.bf16 = s.fsdp = true;
  s.gradient_checkpointing = false;  // see RecomputeOf
  s.version = 2;
  s.auto_wrap_policy = "TRANSFORMER_BASED_WRAP";
  s.cpu_offload = TargetAt(root, "distributed.offload_policy") == "CPUOffloadPolicy";
  s.torch_compile = IsTrue(root, "compile.enabled") || IsTrue(root, "distributed.enable_compile");
  if (!s.per_device_train_batch_size) {
    s.per_device_train_batch_size = 1;
    file.script.assumed.push_back({"step_scheduler.local_batch_size", "1"});
  }
  ScriptFacts& script = file.script;
  for (const char* path : {"model.pretrained_model_name_or_path", "model.config.name_or_path",
                           "model.config.pretrained_model_name_or_path"}) {
    script.model = script.model.empty() ? TextAt(root, path) : script.model;
  }
  script.automodel = FactsOf(root, script.model);
  s.sync_each_batch = ReducesEachPass(root, *script.automodel);
  s.use_liger_kernel = !script.automodel->is_own && IsTrue(root, "model.use_liger_kernel", true);
  const auto batch = At(root, "step_scheduler.global_batch_size");
  constexpr std::int64_t kBatch = 32;  // StepSchedulerConfig's own
  script.global_batch = batch ? batch->AsInt(1, kMost) : kBatch;
  script.nodes = DegreeAt(root, "benchmark.num_nodes");
  if (const std::int64_t ranks = script.automodel->ranks;
      ranks > 0 && (script.nodes > 0 || ranks <= kGpusPerNode)) {
    const std::int64_t nodes = std::max<std::int64_t>(script.nodes, 1);
    script.gpus_per_node = MeshOver(ranks, {{nodes, 0}}).Along(Axis::kShard);
  }
  script.has_bf16_weights = script.recomputes_by_itself = true;
  for (const char* path : {"dataset.max_length", "dataset.seq_len", "dataset.seq_length",
                           "packed_sequence.packed_sequence_size"}) {
    script.sequence_length = std::max(script.sequence_length, DegreeAt(root, path));
  }
  if (const auto dispatcher = At(root, "model.backend.dispatcher")) {
    const std::string name = dispatcher->AsString();
    if (name == "mok") {
      throw dispatcher->Error(
          "torch, deepep, hybridep or uccl_ep, since a megakernel of experts "
          "cannot be predicted");
    }
    if (name != "torch") {
      script.assumed.push_back({"model.backend.dispatcher", "NCCL's all-to-all, not " + name});
    }
  }
  if (const std::string dtype = TextAt(root, "model.torch_dtype");
      dtype.empty() || dtype == "auto") {
    script.assumed.push_back({"model.torch_dtype", "bfloat16"});
  }
  const std::string attention = TextAt(root, "model.attn_implementation");
  if (!attention.empty() && attention != "eager" && attention != "sdpa" && attention != "te" &&
      !attention.starts_with("flash_attention_")) {
    throw root.At("model")
        .At("attn_implementation")
        .Error("eager, sdpa, te or flash_attention_2, since attention by " + attention +
               " cannot be predicted");
  }
  script.attention = attention == "eager" ? "materialized" : "";
  ReadPeft(root, file);
  if (script.adapters.rank > 0 && script.automodel->mesh.tensor_size > 1) {
    script.assumed.push_back(
        {"distributed.tp_size", "one matrix of each adapter whole, not both cut by ranks"});
  }
  ReadLoss(root, file);
  return file;
}

}  // namespace shardwright
