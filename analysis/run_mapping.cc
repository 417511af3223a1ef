#include "analysis/run_mapping.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "analysis/cluster_of_run.h"
#include "analysis/model_of_run.h"
#include "analysis/stack.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "models/kernel_set.h"
#include "schedule/wrap.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

// The column param_dtype is a sentence; the first key that it contains decides.
Precision PrecisionOf(const MeasuredRun& run, const Stack& stack, std::vector<std::string>& notes) {
  const std::string& text = run.param_dtype;
  constexpr auto kBf16 = DType::kBf16;
  constexpr auto kFp32 = DType::kFp32;
  constexpr auto kFp16 = DType::kFp16;
  // HF keeps masters in the dtype of the checkpoint when there is one GPU and so no FSDP.
  const bool is_pure_on_one = Contains(text, "pure bf16 on 1 GPU") && run.gpus == 1;
  const bool is_torchtune =
      Contains(run.framework, "torchtune") || Contains(run.framework, "litgpt");
  if (text.starts_with("pure fp16")) {
    return {kFp16, kFp16, kFp16};
  }
  if (text.starts_with("pure bf16") || is_pure_on_one || Contains(text, "bf16 states") ||
      Contains(text, "bf16-true") || (is_torchtune && text.starts_with("bf16"))) {
    return {kBf16, kBf16, kBf16};
  }
  if (Contains(text, "MP mode PURE")) {
    return {kFp32, kBf16, kBf16};
  }
  if (Contains(text, "MP mode DEFAULT") || Contains(text, "fp32 reduce")) {
    return {kFp32, kBf16, kFp32};
  }
  if (text.starts_with("fp16") || Contains(text, "fp16")) {
    return {kFp32, kFp16, kFp16};
  }
  if (text == "fp32") {
    return {kFp32, kFp32, kFp32};
  }
  if (text.empty()) {
    notes.emplace_back("dtypes not stated: bf16 with fp32 masters");
  }
  return {kFp32, kBf16, stack.reduce};
}

OptimizerSpec OptimizerOf(const MeasuredRun& run, const Stack& stack,
                          std::vector<std::string>& notes) {
  OptimizerSpec spec;
  spec.impl = stack.optimizer;
  const std::string& text = run.optimizer;
  if (Contains(text, "Muon")) {
    spec.matrices =
        Contains(text, "distributed") ? MatrixRule::kMuonDistributed : MatrixRule::kMuon;
  } else if (Contains(text, "SOAP")) {
    spec.matrices = MatrixRule::kSoap;
  } else if (Contains(text, "SGD")) {
    spec.kind = OptimizerKind::kSgd;
  } else if (text == "Adam") {
    spec.kind = OptimizerKind::kAdam;
  } else if (!text.empty() && !Contains(text, "AdamW") && !Contains(text, "adam")) {
    notes.push_back("optimizer " + text + " taken as AdamW");
  }
  if (Contains(text, "foreach")) {
    spec.impl = OptimizerImpl::kForeach;
  } else if (Contains(text, "fused")) {
    spec.impl = OptimizerImpl::kFused;
  }
  return spec;
}

Offload OffloadOf(const MeasuredRun& run, const Stack& stack) {
  const std::string& text = run.offload;
  Offload offload;
  if (text.starts_with("n")) {
    offload.activations = Contains(text, "checkpoints to CPU") ||
                          (stack.checkpoints_on_host && run.checkpointing.starts_with("full"));
    return offload;
  }
  offload.parameters = Contains(text, "param") || text.starts_with("y");
  offload.optimizer = Contains(text, "optimizer") && !offload.parameters;
  offload.activations = Contains(text, "activation") || Contains(text, "checkpoints");
  return offload;
}

// Every block, or of each stretch of blocks the part `fraction`, evenly spread: block i when
// floor((i + 1) * fraction) > floor(i * fraction), as fms-fsdp and torchtitan choose them.
void KeepFraction(double fraction, std::vector<RecomputeRegion>& regions) {
  std::vector<RecomputeRegion> kept;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    // A small surplus, so that 3 * (1 / 3) counts as 1.
    constexpr double kRounding = 1e-9;
    const auto index = static_cast<double>(i);
    if (std::floor((index + 1) * fraction + kRounding) > std::floor(index * fraction + kRounding)) {
      kept.push_back(regions[i]);
    }
  }
  regions = kept;
}

// Which blocks are computed twice follows from the published ratio of hardware to model FLOPs:
// full recomputation adds one forward pass to three, so hfu / mfu = 1 + fraction / 3.
double RecomputedFraction(const MeasuredRun& run, std::vector<std::string>& notes) {
  if (run.hfu_percent <= 0 || run.mfu_percent <= 0) {
    notes.emplace_back("which blocks are recomputed is not stated: every second");
    return 0.5;
  }
  return std::clamp(3 * (run.hfu_percent / run.mfu_percent - 1), 0.0, 1.0);
}

std::vector<RecomputeRegion> RecomputeOf(const MeasuredRun& run, const Stack& stack,
                                         const Model& model, std::vector<std::string>& notes) {
  const std::string text =
      run.checkpointing.empty() && stack.recomputes ? "full" : run.checkpointing;
  if (run.checkpointing.empty()) {
    notes.push_back("activation checkpointing not stated: " + (text.empty() ? "none" : text));
  }
  if (text.empty()) {
    return {};
  }
  if (text.starts_with("none")) {
    return {};
  }
  constexpr std::string_view kWhere = "activation_checkpointing";
  if (text.starts_with("full")) {
    return RecomputeBlocks(model, RecomputeKind::kFull, 1, std::string(kWhere));
  }
  if (Contains(text, "every")) {
    std::vector<RecomputeRegion> regions =
        RecomputeBlocks(model, RecomputeKind::kFull, 1, std::string(kWhere));
    KeepFraction(Contains(text, "2nd") ? 0.5 : RecomputedFraction(run, notes), regions);
    return regions;
  }
  // MaxText's policies keep the results of all projections and, with "flash", the attention's.
  if (text.starts_with("selective (minimal")) {
    return RecomputeBlocks(model, RecomputeKind::kSelective, 1, std::string(kWhere));
  }
  if (text.starts_with("selective")) {
    if (!Contains(text, "per-op")) {
      notes.push_back(text + " taken as torchtitan's per-op rule");
    }
    return RecomputeBlocks(model, RecomputeKind::kSelective, 2, std::string(kWhere));
  }
  throw InputError(kWhere, '"' + text + '"', "none, full or selective");
}

// Whose rules the run followed.
Dialect DialectOf(const MeasuredRun& run, const Stack& stack, std::int64_t ranks) {
  const std::string& text = run.parallelism;
  if (ranks > 1 && Contains(text, "zero1")) {
    return Dialect::kZero1;
  }
  if (ranks == 1 || text.starts_with("single") || text.starts_with("ddp")) {
    return Dialect::kDdp;
  }
  if (text.starts_with("zero2")) {
    return Dialect::kZero2;
  }
  if (text.starts_with("zero3")) {
    return Dialect::kZero3;
  }
  if (!text.starts_with("fsdp") && !text.starts_with("hsdp")) {
    throw InputError("parallelism", '"' + text + '"', "single, ddp, fsdp, hsdp or zero1 to zero3");
  }
  return stack.dialect;
}

// The 8 of "ddp+zero1(group 8)"; 0 where there is no such text.
std::int64_t ShardGroupOf(const std::string& text) {
  constexpr std::string_view kKey = "(group ";
  const std::size_t at = text.find(kKey);
  return at == std::string::npos ? 0 : std::strtoll(text.c_str() + at + kKey.size(), nullptr, 10);
}

// Dialect, shards, copies.
void SetSharding(const MeasuredRun& run, const Stack& stack, const Cluster& cluster, Plan& plan,
                 std::vector<std::string>& notes) {
  const std::int64_t ranks = cluster.RankCount();
  plan.dialect = DialectOf(run, stack, ranks);
  plan.shard_size = ranks;
  if (plan.dialect == Dialect::kDdp) {
    plan.shard_size = 1;
  } else if (run.parallelism.starts_with("hsdp") || Contains(run.sharding, "HYBRID")) {
    plan.shard_size = cluster.gpus_per_node;
  } else if (plan.dialect == Dialect::kZero1) {
    const std::int64_t group = ShardGroupOf(run.parallelism);
    plan.shard_size = group > 0 && ranks % group == 0 ? group : ranks;
  }
  plan.replicate_size = ranks / plan.shard_size;
  if (IsZero(plan.dialect) && plan.dialect != Dialect::kZero3 && plan.offload.parameters) {
    notes.push_back(std::string(NameOf(plan.dialect)) + " with offload taken as fsdp2");
    plan.dialect = Dialect::kFsdp2;
  }
}

// DeepSpeed's "reduce_scatter" was off unless asked for between its pull requests 971 (April 2021)
// and 1058; a log of May 2021 prints it as false with stage 3.
bool AllReducesByDefault(std::string_view date) {
  return date >= "2021-04" && date < "2021-07";
}

// DeepSpeed's sizes and streams.
void SetZero(const MeasuredRun& run, const Stack& stack, Plan& plan) {
  if (plan.dialect != Dialect::kZero3) {
    return;
  }
  if (stack.sizes_by_hidden) {
    plan.zero.reduce_bucket = run.hidden * run.hidden;
    plan.zero.prefetch_bucket = run.hidden * run.hidden * 9 / 10;
    plan.zero.persistence_threshold = 10 * run.hidden;
  }
  if (stack.waits_for_gathers) {
    plan.zero.overlap_comm = Overlap::kOff;
    plan.zero.prefetch_bucket = 0;
    plan.zero.before_deepspeed_0_6 = true;
    if (AllReducesByDefault(run.date)) {
      plan.zero.gradient_reduction = GradientReduction::kAllReduce;
    }
    // Nothing was kept for later while more than max_live_parameters were gathered, as they are
    // with a weight of that size (`_keep_for_later` of DeepSpeed 0.3 and 0.4).
    if (run.hidden * run.ffn_hidden > plan.zero.max_live_parameters) {
      plan.zero.max_reuse_distance = 0;
    }
  }
}

// PyTorch's all_gather and reduce_scatter of lists: Python makes a tensor per rank, then C++ starts
// a copy of each, while the device waits. That is time per collective.
void AddTensorLists(std::int64_t ranks, Profile& profile) {
  const HostProfile& host = profile.host;
  const Seconds each = host.op_issue.value + host.kernel_launch.value;
  for (TransportProfile& transport : profile.transports) {
    for (ProtocolProfile& protocol : transport.protocols) {
      protocol.base_latency.value += each * static_cast<double>(ranks);
    }
  }
}

void SetBatch(const MeasuredRun& run, std::int64_t ranks, Job& job, Plan& plan,
              std::vector<std::string>& notes) {
  plan.micro_batch = run.micro_batch;
  plan.accumulation = std::max<std::int64_t>(run.accumulation, 1);
  if (plan.micro_batch == 0) {
    if (run.global_batch == 0 || run.global_batch % (ranks * plan.accumulation) != 0) {
      throw InputError("microbatch_per_gpu", "nothing", "samples per GPU and pass");
    }
    plan.micro_batch = run.global_batch / (ranks * plan.accumulation);
    notes.emplace_back("micro-batch from the global batch");
  }
  job.global_batch = ranks * plan.micro_batch * plan.accumulation;
  if (run.global_batch > 0 && run.global_batch != job.global_batch) {
    notes.push_back("global batch is " + std::to_string(job.global_batch) +
                    " by micro-batch and accumulation, the row says " +
                    std::to_string(run.global_batch));
  }
}

void SetUnits(const MeasuredRun& run, const Stack& stack, const Model& model, const Job& job,
              Plan& plan) {
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  ReshardChoice reshard;
  if (Contains(run.sharding, "SHARD_GRAD_OP") || Contains(run.sharding, "never")) {
    reshard = {.is_set = true, .reshard = {.kind = Reshard::Kind::kNever, .group = 0}};
  }
  if (is_ddp) {
    reshard = {};
  }
  const std::string where = "parallelism";
  const bool by_dialect = is_ddp || IsZero(plan.dialect);
  const WrapSpec wrap = ParseWrap(by_dialect ? DefaultWrap(plan.dialect) : stack.wrap, where);
  plan.units = Wrap(model, wrap, reshard, plan.dialect, where);
  for (UnitPlan& unit : plan.units) {
    unit.gap = stack.holds_table ? Gap::kHold : unit.gap;
  }
  KeepFullPrecision(model, job.precision, plan);
}

// Everything that has no fully sharded data parallel meaning.
void CheckParallelism(const MeasuredRun& run) {
  if (!run.problem.empty()) {
    throw InputError(run.problem);
  }
  if (!run.data_parallel_only) {
    throw InputError("parallelism", '"' + run.parallelism + '"', "data parallelism only");
  }
  static constexpr std::array<std::string_view, 8> kKnown = {"SHARD",  "FSDP",   "fsdp", "ZeRO-1",
                                                             "ZeRO-2", "ZeRO-3", "full", "never"};
  const auto is_known = [&](std::string_view word) { return Contains(run.sharding, word); };
  if (!run.sharding.empty() && std::none_of(kKnown.begin(), kKnown.end(), is_known)) {
    throw InputError("sharding_strategy", '"' + run.sharding + '"',
                     "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, FSDP or ZeRO-1 to ZeRO-3");
  }
}

// What plans cannot say.
void CheckOptimizer(const MeasuredRun& run) {
  if (Contains(run.param_dtype, "8-bit") || Contains(run.param_dtype, "optimizer-in-bwd")) {
    throw InputError("param_dtype", '"' + run.param_dtype + '"',
                     "states in the masters' dtype, updated after backward");
  }
  static constexpr std::array<std::string_view, 5> kKnown = {"Adam", "adam", "SGD", "SOAP", "Muon"};
  const auto is_known = [&](std::string_view word) { return Contains(run.optimizer, word); };
  if (!run.optimizer.empty() && std::none_of(kKnown.begin(), kKnown.end(), is_known)) {
    throw InputError("optimizer", '"' + run.optimizer + '"', "AdamW, Adam, SGD, SOAP or Muon");
  }
}

// The kernel that the row names, where it names one, instead of the stack's.
void SetAttention(const MeasuredRun& run, const Stack& stack, KernelSetOptions& kernels) {
  static constexpr std::array<std::string_view, 5> kFused = {"flash", "triton", "sdpa", "flex",
                                                             "xformers"};
  static constexpr std::array<std::string_view, 3> kWritten = {"torch", "eager", "math"};
  const auto is_named = [&](std::string_view word) { return Contains(run.attention_kernel, word); };
  if (is_named("cudnn")) {
    kernels.attention = AttentionImpl::kCudnn;
  } else if (is_named("sdpa") && stack.sdpa != AttentionImpl::kFlash) {
    kernels.attention = stack.sdpa;
  } else if (std::any_of(kFused.begin(), kFused.end(), is_named)) {
    kernels.attention = IsFused(kernels.attention) ? kernels.attention : AttentionImpl::kFlash;
  } else if (std::any_of(kWritten.begin(), kWritten.end(), is_named)) {
    kernels.attention = AttentionImpl::kMaterialized;
  }
}

// The column; where samples differ in length and none is given, the mean by what was measured; of
// GPT-2, which is trained on as many tokens as it has positions, those.
std::int64_t TokensPerSample(const MeasuredRun& run, std::vector<std::string>& notes) {
  if (run.sequence_length > 0) {
    return run.sequence_length;
  }
  const double samples = static_cast<double>(run.micro_batch) *
                         static_cast<double>(std::max<std::int64_t>(run.accumulation, 1));
  const double tokens = run.step_time_s * run.tokens_per_s_per_gpu;  // per GPU and step
  const double average = samples > 0 ? std::round(tokens / samples) : 0;
  if (average < 1 && (run.model_name.starts_with("GPT-2") || run.model_name.starts_with("GPT2"))) {
    constexpr std::int64_t kPositions = 1024;  // n_positions of its config.json
    notes.push_back("tokens per sample not stated: GPT-2's " + std::to_string(kPositions));
    return kPositions;
  }
  if (average < 1 || average > static_cast<double>(JsonValue::kMaxCount)) {
    throw InputError("seq_len", "nothing",
                     "tokens per sample, or the step time and throughput that tell them");
  }
  notes.emplace_back("tokens per sample not stated: their mean, by step time and throughput");
  return static_cast<std::int64_t>(average);
}

// Without `profile`: the default one.
void FillPlan(MeasuredRun run, const Profile* profile, PlanFile& file,
              std::vector<std::string>& notes) {
  CheckParallelism(run);
  const Stack& stack = FindStack(run);
  run.sequence_length = TokensPerSample(run, notes);
  file.job.sequence_length = run.sequence_length;
  file.job.precision = PrecisionOf(run, stack, notes);
  file.job.optimizer = OptimizerOf(run, stack, notes);
  file.cluster = ClusterOfRun(run, notes);
  CheckOptimizer(run);
  file.model = ModelOfRun(run, file.job, stack, notes);
  file.kernels = FindKernelSet(stack.kernel_set, "framework");
  SetAttention(run, stack, file.kernels);
  if (run.compute_dtype == "fp8" || run.compute_dtype == "fp4") {
    const bool by_row =
        Contains(run.param_dtype, "rowwise") && !Contains(run.param_dtype, "rowwise_with_gw_hp");
    file.kernels.fp8 = by_row ? Fp8Products::kPerRow : Fp8Products::kPerTensor;
  }
  file.profile =
      profile != nullptr ? *profile : DefaultProfile(file.cluster.gpu, file.kernels.name);
  if (stack.one_communicator) {
    file.profile.memory.next_communicator.value = Bytes(0);
  }
  Plan& plan = file.plan;
  plan.offload = OffloadOf(run, stack);
  SetSharding(run, stack, file.cluster, plan, notes);
  if (file.job.optimizer.matrices != MatrixRule::kNone && plan.dialect != Dialect::kDdp) {
    notes.push_back("optimizer " + run.optimizer + " of sharded matrices taken as AdamW");
    file.job.optimizer.matrices = MatrixRule::kNone;
  }
  SetZero(run, stack, plan);
  if (stack.waits_for_gathers) {
    AddTensorLists(file.cluster.RankCount(), file.profile);
  }
  plan.sync = run.accumulation > 1 && !IsZero(plan.dialect) ? stack.sync : SyncMode::kEvery;
  if (plan.dialect == Dialect::kFsdp1) {
    plan.backward_prefetch = stack.backward_prefetch;
  }
  SetBatch(run, file.cluster.RankCount(), file.job, plan, notes);
  SetUnits(run, stack, file.model.model, file.job, plan);
  plan.recompute = RecomputeOf(run, stack, file.model.model, notes);
  if (run.compute_dtype == "fp4") {
    notes.emplace_back("fp4 products taken as fp8");
  }
  CheckPlan(file, "plan");
}

MappedRun MapRunWith(const MeasuredRun& run, const Profile* profile) {
  MappedRun mapped;
  try {
    mapped.plan.job.allocator.expandable_segments = FindStack(run).expandable_segments;
    FillPlan(run, profile, mapped.plan, mapped.notes);
  } catch (const InputError& error) {
    mapped.skipped = error.what();
  }
  return mapped;
}

}  // namespace

MappedRun MapRun(const MeasuredRun& run, const std::string& profile) {
  if (profile == "auto") {
    return MapRunWith(run, nullptr);
  }
  return MapRun(run, LoadProfile(profile));
}

MappedRun MapRun(const MeasuredRun& run, const Profile& profile) {
  return MapRunWith(run, &profile);
}

}  // namespace shardwright
