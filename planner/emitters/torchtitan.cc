#include "planner/emitters/torchtitan.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <string_view>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_context.h"
#include "planner/emitters/emitters.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using S = TorchtitanSettings;

// Selective checkpointing "op" keeps every second matmul and attention (distributed/
// activation_checkpoint.py).
constexpr std::int64_t kSelectiveKeepsEvery = 2;
// replicate(bucket_cap_mb=100) in its apply_ddp.
constexpr Bytes kDdpBucket = 100 * kMiB;
// The plan knows that there are a learning rate and a weight decay, not their values.
constexpr double kSomeLearningRate = 3e-4;
constexpr double kSomeWeightDecay = 0.1;

DType ReadDType(const std::optional<std::string>& name, DType by_default, const std::string& where,
                std::string_view key) {
  if (!name) {
    return by_default;
  }
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    if (*name == LongNameOf(dtype)) {
      return dtype;
    }
  }
  RefuseSetting(where, key, *name, "float32 or bfloat16");
}

// Its name of a Hugging Face model type.
std::string ModelName(const std::string& type) {
  return type == "llama" ? "llama3" : type == "qwen3_moe" ? "qwen3" : type;
}

bool HasModel(const std::string& name) {
  constexpr std::array<std::string_view, 3> kModels = {"llama3", "qwen3", "deepseek_v3"};
  return IsIn(kModels, name);
}

// "llama-3.1-8b" -> "8B", "qwen3-30b-a3b" -> "30B-A3B".
std::string FlavorOf(const std::string& model) {
  std::size_t dash = model.rfind('-');
  const bool is_active = dash != std::string::npos && dash > 0 && dash + 2 < model.size() &&
                         model[dash + 1] == 'a' && std::isdigit(model[dash + 2]) != 0;
  dash = is_active ? model.rfind('-', dash - 1) : dash;
  std::string flavor = model == "deepseek-v3" ? "671b" : model.substr(dash + 1);
  std::transform(flavor.begin(), flavor.end(), flavor.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return flavor;
}

void SetRecompute(const PlanFile& file, S& s) {
  const Plan& plan = file.plan;
  s.activation_checkpoint_mode = "none";
  if (plan.recompute.empty()) {
    return;
  }
  if (plan.recompute[0].kind == RecomputeKind::kSelective) {
    s.activation_checkpoint_mode = "selective";
    s.selective_ac_option = "op";
    return;
  }
  const std::size_t blocks = BlocksOf(file.model).size();
  const std::size_t step = std::max<std::size_t>(1, blocks / plan.recompute.size());
  if (step == 1) {
    s.activation_checkpoint_mode = "full";
  } else {
    s.activation_checkpoint_mode = "selective";
    s.selective_ac_option = std::to_string(step);
  }
}

// "always" when [norm, output] is freed too, "never" when blocks are not, "default" otherwise.
std::string ReshardName(const PlanFile& file) {
  const Model& model = file.model;
  bool blocks_free = true, all_free = true;
  for (const UnitPlan& unit : file.plan.units) {
    const bool frees = unit.reshard.kind != Reshard::Kind::kNever;
    const bool is_root = unit.modules[0].empty();
    const bool is_block = !is_root && IsBlock(model, FindModule(model, unit.modules[0]));
    blocks_free = blocks_free && (frees || !is_block);
    all_free = all_free && (frees || is_root);
  }
  const bool has_tail =
      AnyOf(file.plan.units, [](const UnitPlan& unit) { return unit.modules.size() > 1; });
  return !blocks_free ? "never" : all_free && has_tail ? "always" : "default";
}

void ApplyRecompute(const S& s, const std::string& where, PlanFile& file) {
  const Model& model = file.model;
  const std::string mode = s.activation_checkpoint_mode.value_or("selective");
  const std::string option = s.selective_ac_option.value_or("2");
  file.plan.recompute.clear();
  if (mode == "none") {
    return;
  }
  if (mode != "full" && mode != "selective") {
    throw InputError(where + ": activation_checkpoint.mode", "\"" + mode + "\"",
                     "none, full or selective");
  }
  std::vector<RecomputeRegion> all = FullRecompute(model, BlocksOf(model));
  if (mode == "selective" && option == "op") {
    for (RecomputeRegion& region : all) {
      region.kind = RecomputeKind::kSelective;
      region.keep_every = kSelectiveKeepsEvery;
    }
  }
  std::size_t step = 1;
  if (mode == "selective" && option != "op") {
    const auto [end, error] = std::from_chars(option.data(), option.data() + option.size(), step);
    if (error != std::errc() || end != option.data() + option.size() || step == 0) {
      throw InputError(where + ": activation_checkpoint.selective_ac_option", "\"" + option + "\"",
                       "\"op\" or a positive integer");
    }
  }
  // It counts layers from 1 and checkpoints those that N divides, whatever their index.
  for (std::size_t i = step - 1; i < all.size(); i += step) {
    file.plan.recompute.push_back(all[i]);
  }
}

void ApplyUnits(const S& s, const std::string& where, PlanFile& file) {
  const std::string policy = s.fsdp_reshard_after_forward.value_or("default");
  if (policy != "default" && policy != "always" && policy != "never") {
    throw InputError(where + ": parallelism.fsdp_reshard_after_forward", "\"" + policy + "\"",
                     "default, always or never");
  }
  const bool never = policy == "never" || (policy == "default" && file.plan.pipeline_size > 1);
  ReshardChoice reshard;
  reshard.is_set = never || policy == "always";
  reshard.reshard.kind = never ? Reshard::Kind::kNever : Reshard::Kind::kAlways;
  const WrapSpec spec = {WrapSpec::Kind::kTorchtitan, 0, ""};
  file.plan.units = Wrap(file.model, spec, reshard, Dialect::kFsdp2, where);
  file.plan.units.back().reshard.kind = Reshard::Kind::kNever;  // fully_shard's own choice
  AddExpertUnits(file.model, file.plan.units);
}

// Of the ring that torchtitan 0.2 has with SDPA, by default "allgather". "none" is our word for
// 0.3, which gathers keys and values for FlexAttention and has no ring.
const char* RotateName(ContextMethod method) {
  return method == ContextMethod::kRing         ? "alltoall"
         : method == ContextMethod::kRingGather ? "allgather"
                                                : "none";
}

// torch.distributed.pipelining's names, by PipelineSchedule.
constexpr std::array<std::string_view, 7> kSchedules = {
    "GPipe",         "1F1B",     "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
    "ZBVZeroBubble", "DualPipeV"};

// As pipeline_llm in torchtitan's distributed/pipeline_parallel.py counts the stages.
void ApplyPipeline(const S& s, const std::string& key, PlanFile& file) {
  Plan& plan = file.plan;
  plan.pipeline_size = s.pipeline_parallel_degree.value_or(1);
  if (plan.pipeline_size < 1) {
    throw InputError(key + "pipeline_parallel_degree", std::to_string(plan.pipeline_size),
                     "at least 1");
  }
  if (plan.pipeline_size == 1) {
    return;
  }
  plan.pipeline_schedule = PipelineScheduleNamed(s.pipeline_parallel_schedule.value_or("1F1B"),
                                                 key + "pipeline_parallel_schedule");
  const std::int64_t edge = s.pipeline_parallel_first_stage_less_layers.value_or(1);
  const std::int64_t last = s.pipeline_parallel_last_stage_less_layers.value_or(1);
  if (edge < 0 || edge > 1 || last != edge) {
    throw InputError(key + "pipeline_parallel_last_stage_less_layers", std::to_string(last),
                     "that of the first stage (" + std::to_string(edge) + "), 0 or 1 for both");
  }
  plan.pipeline_edge_layers = edge;
  const std::int64_t all = std::ssize(BlocksOf(file.model)) + 2 * edge;
  SetStages(all, s.pipeline_parallel_layers_per_stage.value_or(0), "",
            key + "pipeline_parallel_layers_per_stage", plan);
  plan.sync = SyncMode::kLast;
}

void ApplyMesh(const S& s, const std::string& where, PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  const std::int64_t replicate = s.data_parallel_replicate_degree.value_or(1);
  const std::int64_t given = s.data_parallel_shard_degree.value_or(-1);
  const std::int64_t tensor = s.tensor_parallel_degree.value_or(1);
  const std::int64_t context = s.context_parallel_degree.value_or(1);
  const std::string key = where + ": parallelism.";
  const bool is_loss_whole = s.disable_loss_parallel.value_or(false);
  if (tensor < 1 || (tensor > 1 && is_loss_whole)) {
    throw InputError(key + (tensor < 1 ? "tensor_parallel_degree" : "disable_loss_parallel"),
                     tensor < 1 ? std::to_string(tensor) : "true",
                     tensor < 1 ? "at least 1" : "false beside tensor_parallel_degree");
  }
  if (context < 1 || context > ranks) {
    throw InputError(key + "context_parallel_degree", std::to_string(context),
                     "1 to " + std::to_string(ranks));
  }
  ApplyPipeline(s, key, file);
  const std::int64_t stages = file.plan.pipeline_size;
  const Mesh mesh = MeshOver(ranks, {.size = {replicate, given == -1 ? 0 : given * context},
                                     .tensor = tensor,
                                     .pipeline = stages});
  const std::int64_t shard = mesh.Along(Axis::kShard);
  const bool is_possible = replicate >= 1 && replicate <= ranks && given != 0 && shard >= 1 &&
                           shard <= ranks && shard % context == 0 && tensor <= ranks &&
                           stages <= ranks;
  if (tensor > 1 && replicate > 1 && shard == 1) {
    throw InputError(key + "tensor_parallel_degree", std::to_string(tensor),
                     "1 without shards: torchtitan's DDP has one dimension");
  }
  if (!is_possible || mesh.RankCount() != ranks) {
    throw InputError(where + ": parallelism",
                     "replicate degree " + std::to_string(replicate) + ", shard degree " +
                         std::to_string(given) +
                         (tensor > 1 ? ", tensor degree " + std::to_string(tensor) : "") +
                         (context > 1 ? ", context degree " + std::to_string(context) : "") +
                         (stages > 1 ? ", pipeline degree " + std::to_string(stages) : ""),
                     "a product of " + std::to_string(ranks) + " ranks");
  }
  file.plan.replicate_size = replicate;
  file.plan.shard_size = shard;
  file.plan.expert_size = s.expert_parallel_degree.value_or(1);
  file.plan.tensor_size = tensor;
  file.plan.tensor_async = s.enable_async_tensor_parallel.value_or(false) && tensor > 1;
  file.plan.context_size = context;
  file.plan.context_method = ContextMethod::kGather;
  if (context > 1) {
    const std::string rotate = s.context_parallel_rotate_method.value_or("allgather");
    file.plan.context_method = rotate == "alltoall"    ? ContextMethod::kRing
                               : rotate == "allgather" ? ContextMethod::kRingGather
                                                       : ContextMethod::kGather;
    if (rotate != RotateName(file.plan.context_method)) {
      throw InputError(key + "context_parallel_rotate_method", Quoted(rotate),
                       "\"allgather\" or \"alltoall\"");
    }
  }
  CutForPlan(file.model, file.job, file.plan,
             {key + "expert_parallel_degree", key + "tensor_parallel_degree",
              key + "context_parallel_degree"});
}

void ApplyBatch(const S& s, const std::string& where, PlanFile& file) {
  Plan& plan = file.plan;
  const std::int64_t ranks = MeshOf(plan).DataCount();
  plan.micro_batch = s.local_batch_size.value_or(8);
  const std::int64_t given = s.global_batch_size.value_or(-1);
  const std::int64_t pass = ranks * plan.micro_batch;
  if (given != -1 && (given < pass || given % pass != 0)) {
    throw InputError(where + ": training.global_batch_size", std::to_string(given),
                     "a multiple of " + std::to_string(ranks) + " ranks x local_batch_size " +
                         std::to_string(plan.micro_batch));
  }
  plan.accumulation = given == -1 ? 1 : given / pass;
  file.job.global_batch = pass * plan.accumulation;
  if (plan.pipeline_size > 1) {
    const std::int64_t size = s.pipeline_parallel_microbatch_size.value_or(1);
    if (plan.accumulation > 1) {
      throw InputError(where + ": training.global_batch_size", std::to_string(given),
                       std::to_string(pass) +
                           ", which one pass of the pipeline has: passes "
                           "behind one another cannot be predicted");
    }
    if (size < 1 || plan.micro_batch % size != 0) {
      throw InputError(where + ": parallelism.pipeline_parallel_microbatch_size",
                       std::to_string(size),
                       "a divisor of local_batch_size " + std::to_string(plan.micro_batch));
    }
    plan.accumulation = plan.micro_batch / size;
    plan.micro_batch = size;
  }
}

void ApplyOptimizer(const S& s, OptimizerSpec& optimizer) {
  const std::string kind = s.optimizer.value_or("AdamW");
  const std::string impl = s.implementation.value_or("fused");
  optimizer.kind = kind == "Adam" ? OptimizerKind::kAdam : OptimizerKind::kAdamW;
  optimizer.impl = impl == "fused"     ? OptimizerImpl::kFused
                   : impl == "foreach" ? OptimizerImpl::kForeach
                                       : OptimizerImpl::kForLoop;
  optimizer.weight_decay = s.weight_decay.value_or(kSomeWeightDecay) > 0.0;
}

constexpr std::string_view kFloat8 = "quantize.linear.float8";
constexpr std::string_view kVocabulary = "output";  // the one linear layer that is left out

void SetFloat8(Fp8Products fp8, S& s) {
  if (fp8 == Fp8Products::kNone) {
    return;
  }
  s.converters = {std::string(kFloat8)};
  s.float8_leaves_out = {std::string(kVocabulary)};
  if (GathersFp8(fp8)) {  // beside a recipe it is refused
    s.float8_gathers = true;
    s.float8_precomputes = fp8 == Fp8Products::kPrecomputed;
  } else {
    s.float8_recipe = fp8 == Fp8Products::kPerRow ? "rowwise" : "tensorwise";
  }
}

// In a plan the linear layers of blocks multiply in fp8, all of them and no others.
void CheckFloat8(const S& s, const std::string& where) {
  const std::vector<std::string> left_out =
      s.float8_leaves_out.value_or(std::vector<std::string>());
  if (left_out.size() != 1 || left_out.front() != kVocabulary) {
    throw InputError(where + ": quantize.linear.float8.filter_fqns",
                     '[' + Listed(left_out, Quoted) + ']',
                     "[\"output\"]: all linear layers but the vocabulary's");
  }
  if (s.float8_gathers.value_or(false) && s.float8_recipe.value_or("tensorwise") != "tensorwise") {
    throw InputError(where + ": quantize.linear.float8.enable_fsdp_float8_all_gather",
                     "true with " + Quoted(*s.float8_recipe), "false, or no recipe_name",
                     "torchao gathers weights in fp8 with one scale per tensor alone");
  }
}

Fp8Products Float8Of(const S& s, bool is_ddp, const std::string& where) {
  const std::vector<std::string> converters = s.converters.value_or(std::vector<std::string>());
  for (const std::string& converter : converters) {
    if (converter != kFloat8) {
      throw InputError(where + ": model.converters", '"' + converter + '"',
                       '"' + std::string(kFloat8) + "\", or none");
    }
  }
  const std::string recipe = s.float8_recipe.value_or("tensorwise");
  if (converters.empty()) {
    return Fp8Products::kNone;
  }
  CheckFloat8(s, where);
  if (recipe != "tensorwise" && recipe != "rowwise") {
    throw InputError(where + ": quantize.linear.float8.recipe_name", '"' + recipe + '"',
                     "\"tensorwise\" or \"rowwise\"");
  }
  return recipe == "rowwise"                           ? Fp8Products::kPerRow
         : is_ddp || !s.float8_gathers.value_or(false) ? Fp8Products::kPerTensor
         : s.float8_precomputes.value_or(false)        ? Fp8Products::kPrecomputed
                                                       : Fp8Products::kGathered;
}

}  // namespace

PipelineSchedule PipelineScheduleNamed(const std::string& name, const std::string& where) {
  const auto found = std::find_if(kSchedules.begin(), kSchedules.end(), [&](std::string_view one) {
    return LowerCase(std::string(one)) == LowerCase(name);
  });
  if (found == kSchedules.end()) {
    throw InputError(where, Quoted(name),
                     "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
                     "ZBVZeroBubble or DualPipeV");
  }
  return static_cast<PipelineSchedule>(found - kSchedules.begin());
}

void SetStages(std::int64_t all, std::int64_t layers, const std::string& round,
               const std::string& where, Plan& plan) {
  const bool has_several = plan.pipeline_schedule > PipelineSchedule::k1F1B;
  plan.pipeline_stages = has_several ? 2 : 1;
  if (layers == 0) {
    return;
  }
  const std::int64_t stages = (all + layers - 1) / layers;
  const bool is_even = stages % plan.pipeline_size == 0;
  plan.pipeline_stages = stages / plan.pipeline_size + (!is_even && round == "up" ? 1 : 0);
  if ((!is_even && round != "up" && round != "down") ||
      plan.pipeline_stages < (has_several ? 2 : 1) || (!has_several && plan.pipeline_stages > 1)) {
    throw InputError(where, std::to_string(layers),
                     "a part of the " + std::to_string(all) +
                         " layers (of torchtitan: with embedding and head) that makes " +
                         (has_several ? "several stages" : "one stage") + " for each of " +
                         std::to_string(plan.pipeline_size) + " ranks");
  }
}

TorchtitanSettings ToTorchtitan(const PlanFile& file) {
  const Plan& plan = file.plan;
  const Job& job = file.job;
  S s;
  s.model_name = ModelName(file.model.type);
  s.model_flavor = FlavorOf(file.model.name);
  s.optimizer = job.optimizer.kind == OptimizerKind::kAdam ? "Adam" : "AdamW";
  s.learning_rate = kSomeLearningRate;
  s.weight_decay = job.optimizer.weight_decay ? kSomeWeightDecay : 0.0;
  s.implementation = job.optimizer.impl == OptimizerImpl::kFused     ? "fused"
                     : job.optimizer.impl == OptimizerImpl::kForeach ? "foreach"
                                                                     : "for-loop";
  s.local_batch_size = plan.micro_batch;
  s.global_batch_size = MeshOf(plan).DataCount() * plan.micro_batch * plan.accumulation;
  s.seq_len = job.sequence_length;
  s.max_norm = 1.0;
  const auto nearest = [](DType dtype) {
    return LongNameOf(dtype == DType::kFp16 ? DType::kBf16 : dtype);
  };
  s.dtype = nearest(job.precision.master);
  s.mixed_precision_param = nearest(job.precision.param);
  s.mixed_precision_reduce = "float32";
  s.enable_cpu_offload = plan.offload.parameters;
  s.data_parallel_replicate_degree = plan.replicate_size;
  s.data_parallel_shard_degree = MeshOf(plan).DataShards();
  if (plan.expert_size > 1) {
    s.expert_parallel_degree = plan.expert_size;
  }
  if (plan.tensor_size > 1) {
    s.tensor_parallel_degree = plan.tensor_size;
    s.enable_async_tensor_parallel = plan.tensor_async;
  }
  if (plan.context_size > 1) {
    s.context_parallel_degree = plan.context_size;
    s.context_parallel_rotate_method = RotateName(plan.context_method);
  }
  if (plan.pipeline_size > 1) {
    s.pipeline_parallel_degree = plan.pipeline_size;
    s.pipeline_parallel_schedule = kSchedules.at(static_cast<std::size_t>(plan.pipeline_schedule));
    s.pipeline_parallel_microbatch_size = plan.micro_batch;
    s.local_batch_size = plan.micro_batch * plan.accumulation;
    const std::int64_t layers = std::ssize(BlocksOf(file.model)) + 2 * plan.pipeline_edge_layers;
    if (plan.pipeline_edge_layers != 1) {
      s.pipeline_parallel_first_stage_less_layers = plan.pipeline_edge_layers;
      s.pipeline_parallel_last_stage_less_layers = plan.pipeline_edge_layers;
    }
    const std::int64_t stages = plan.pipeline_size * plan.pipeline_stages;
    if (plan.pipeline_stages > 2) {
      s.pipeline_parallel_layers_per_stage = (layers + stages - 1) / stages;
    }
  }
  s.fsdp_reshard_after_forward = ReshardName(file);
  SetRecompute(file, s);
  s.compile = file.kernels.fused_elementwise;
  if (*s.compile && !file.kernels.fused_loss) {
    s.components = {"model"};
  }
  SetFloat8(file.kernels.fp8, s);
  return s;
}

void ApplyTorchtitan(const TorchtitanSettings& settings, const std::string& where, PlanFile& file) {
  const std::int64_t replicate = settings.data_parallel_replicate_degree.value_or(1);
  const bool is_ddp = replicate > 1 && replicate * settings.pipeline_parallel_degree.value_or(1) ==
                                           file.cluster.RankCount();
  file.plan = WithDialect(file.plan, is_ddp ? Dialect::kDdp : Dialect::kFsdp2);
  file.plan.sync = SyncMode::kEvery;
  ApplyMesh(settings, where, file);
  ApplyBatch(settings, where, file);
  if (is_ddp) {
    file.plan.units = {RootUnitOf(Reshard::Kind::kNever)};
    file.plan.bucket = kDdpBucket;
  } else {
    ApplyUnits(settings, where, file);
  }
  ApplyRecompute(settings, where, file);
  file.plan.offload = {};
  file.plan.offload.parameters = !is_ddp && settings.enable_cpu_offload.value_or(false);
  Precision& precision = file.job.precision;
  precision.master = ReadDType(settings.dtype, DType::kFp32, where, "training.dtype");
  precision.param = ReadDType(settings.mixed_precision_param, DType::kBf16, where,
                              "training.mixed_precision_param");
  precision.reduce = ReadDType(settings.mixed_precision_reduce, DType::kFp32, where,
                               "training.mixed_precision_reduce");
  ApplyOptimizer(settings, file.job.optimizer);
  file.job.clip_gradients = true;
  file.job.allocator = {.expandable_segments = true};  // run_train.sh exports it
  file.kernels.fp8 = Float8Of(settings, is_ddp, where);
}

namespace {

// The same settings for 0.3, which is configured by Python functions. It checkpoints every block or
// none; every N-th is a choice of the TOML versions.
std::string Recipe(const S& s) {
  const auto flag = [](bool value) { return std::string(value ? "True" : "False"); };
  const bool by_op = s.selective_ac_option.value_or("") == "op";
  const std::string recompute = *s.activation_checkpoint_mode == "none" ? "None"
                                : by_op                                 ? "SelectiveAC.Config()"
                                                                        : "FullAC.Config()";
  std::string text = R"("""Written by shardwright emit for torchtitan 0.3.

In the config_registry of a model:

    def planned() -> Trainer.Config:
        return apply_plan(llama3_8b())
"""

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401


def apply_plan(config):
    """Sets in a Trainer.Config what the plan says, and returns it."""
)";
  const auto line = [&](const std::string& name, const std::string& value) {
    text += "    config." + name + " = " + value + "\n";
  };
  line("training.local_batch_size", std::to_string(*s.local_batch_size));
  line("training.global_batch_size", std::to_string(*s.global_batch_size));
  line("training.seq_len", std::to_string(*s.seq_len));
  line("training.dtype", "\"" + *s.dtype + "\"");
  line("training.mixed_precision_param", "\"" + *s.mixed_precision_param + "\"");
  line("training.mixed_precision_reduce", "\"" + *s.mixed_precision_reduce + "\"");
  line("training.enable_cpu_offload", flag(*s.enable_cpu_offload));
  line("parallelism.data_parallel_replicate_degree",
       std::to_string(*s.data_parallel_replicate_degree));
  line("parallelism.data_parallel_shard_degree", std::to_string(*s.data_parallel_shard_degree));
  if (s.expert_parallel_degree) {
    line("parallelism.expert_parallel_degree", std::to_string(*s.expert_parallel_degree));
  }
  if (s.tensor_parallel_degree) {
    line("parallelism.tensor_parallel_degree", std::to_string(*s.tensor_parallel_degree));
  }
  if (s.context_parallel_degree) {
    line("parallelism.context_parallel_degree", std::to_string(*s.context_parallel_degree));
  }
  line("parallelism.fsdp_reshard_after_forward", "\"" + *s.fsdp_reshard_after_forward + "\"");
  line("activation_checkpoint", recompute);
  line("compile.enable", flag(*s.compile));
  if (s.components) {
    line("compile.components", "[\"model\"]");
  }
  return text + "    return config\n";
}

}  // namespace

Emission EmitTorchtitan(const PlanFile& file, const EmitOptions& options) {
  (void)options;  // torchtitan has its own launcher
  Emission emission;
  emission.as_emitted = file;
  const S settings = ToTorchtitan(file);
  ApplyTorchtitan(settings, "torchtitan.toml", emission.as_emitted);
  emission.has_allocator = emission.has_sequence = true;
  emission.losses = FindLosses(file, emission.as_emitted, "torchtitan");
  if (!HasModel(*settings.model_name)) {
    emission.by_hand.push_back("torchtitan has no model of type " + file.model.type +
                               ": register one");
  } else {
    emission.by_hand.push_back("check that flavor " + *settings.model_flavor + " is " +
                               file.model.name);
  }
  emission.by_hand.emplace_back(
      "set the learning rate and the weight decay; those in the file "
      "stand for any");
  // 0.2 has rings alone, and 0.3 none.
  const bool is_cut = file.plan.context_size > 1, is_ring = IsRing(file.plan.context_method);
  if (!is_cut || is_ring) {
    emission.by_hand.push_back("start it with: NGPU=" + std::to_string(file.cluster.gpus_per_node) +
                               " CONFIG_FILE=torchtitan.toml ./run_train.sh");
    emission.files.push_back(
        {"torchtitan.toml",
         SettingsAsToml(ListSettings<TorchtitanSettings>(TorchtitanRows(), settings),
                        "Written by shardwright emit for torchtitan up to 0.2.2.")});
  }
  if ((!is_cut || !is_ring) && file.plan.pipeline_size == 1) {
    emission.files.push_back({"torchtitan_recipe.py", Recipe(settings)});
  }
  return emission;
}

}  // namespace shardwright
