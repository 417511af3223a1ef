#pragma once

// Job = what the user demands. Plan = what was chosen. A field is in exactly one of the two.
// Lower turns both, with a model and its kernels, into a Program.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "models/trainable.h"
#include "schedule/pipeline.h"
#include "schedule/torch_rules.h"

namespace shardwright {

enum class JobMode : std::uint8_t { kTrain, kForward };

// Dtypes of one training run. Names follow FSDP's MixedPrecision.
struct Precision {
  DType master = DType::kFp32;  // resident shards, optimizer states, .grad (o)
  DType param = DType::kBf16;   // gathered parameters, compute, activations (p)
  DType reduce = DType::kFp32;  // gradient reduction (r)

  bool operator==(const Precision&) const = default;
};

// Dtypes of what a unit holds: full precision means that the master dtype is gathered, computed
// with and reduced.
[[nodiscard]] constexpr Precision UnitPrecision(const Precision& job, bool full_precision) {
  return full_precision ? Precision{job.master, job.master, job.master} : job;
}

enum class OptimizerKind : std::uint8_t {
  kSgd,
  kMomentum,
  kAdam,
  kAdamW,
  kAdadelta,
  kLion,       // arXiv 2302.06675: one state
  kAdafactor,  // Transformers, without a first moment: of a matrix a state per row and per column
};
// How PyTorch runs the update: decides temporaries and launch counts.
enum class OptimizerImpl : std::uint8_t { kForeach, kFused, kForLoop };
// How the matrices of the repeated blocks are updated.
enum class MatrixRule : std::uint8_t {
  kNone,             // as all parameters are
  kMuon,             // every rank orthogonalises all of them
  kMuonDistributed,  // each rank its part, then the updates are summed over the ranks
  kSoap,
};

// How the states are stored; schedule/lower/optimizer.cc has the sizes. Paged ones (managed memory,
// which leaves the device when others need the room) count on the host.
enum class StateFormat : std::uint8_t {
  kMaster,  // in the masters' dtype
  kBnb8,    // bitsandbytes: 8 bits in blocks of 256 elements
  kBnb8Paged,
  kBnb32Paged,
  kAo8,   // torchao: 8 bits in blocks of 256
  kAo4,   // 4 bits in blocks of 128
  kFp32,  // whatever the masters
};

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kAdamW;
  OptimizerImpl impl = OptimizerImpl::kForeach;
  bool weight_decay = true;
  MatrixRule matrices = MatrixRule::kNone;  // ddp only
  StateFormat states = StateFormat::kMaster;

  bool operator==(const OptimizerSpec&) const = default;
};

// How parameters that do not learn are stored. Of the last three only the weights of linear layers
// other than the head are so; the rest is as with kParam.
enum class FrozenFormat : std::uint8_t {
  kMaster,     // as those that learn
  kParam,      // in the dtype of compute
  kInt8,       // bitsandbytes' LLM.int8: a byte per weight and a scale per row
  kNf4,        // 4 bits, and a scale in fp32 per 64 weights
  kNf4Double,  // the scales in 8 bits (double quantisation)
};

inline constexpr double kMaxLoraAlpha = 1e6;

// What PYTORCH_ALLOC_CONF says to PyTorch's caching allocator; the defaults are PyTorch's. Native,
// whose memory is one arena, has none.
struct AllocatorSettings {
  bool expandable_segments = false;
  // MiB: larger blocks of page-locked memory are not rounded up to a power of two, from torch 2.13
  // on; 0: all are.
  std::int32_t pinned_max_round_mib = 0;
  Bytes max_split_size{0};  // whole MiB above 20 MiB; 0: no limit
  // Below 1; 0: off. PyTorch obeys it only where a process's share of the memory is limited
  // (torch.cuda.set_per_process_memory_fraction); here that share is what plans may use.
  double garbage_collection_threshold = 0.0;

  bool operator==(const AllocatorSettings&) const = default;
};

// As the environment variable has it, "expandable_segments:True,max_split_size_mb:512"; empty for
// the defaults.
[[nodiscard]] std::string AllocatorConf(const AllocatorSettings& settings);

struct Job {
  JobMode mode = JobMode::kTrain;
  std::int64_t sequence_length = 2048;  // tokens per sample
  std::int64_t global_batch = 0;        // samples per optimizer step over all ranks; 0: follows
                                        // from micro-batch, accumulation and ranks
  Precision precision;
  OptimizerSpec optimizer;
  bool clip_gradients = true;             // global-norm clipping, on in all recipes we know
  std::vector<std::string> frozen;        // FQN globs of parameters without gradient
  std::int64_t lora_rank = 0;             // 0: no LoRA
  double lora_alpha = 0.0;                // adapters are scaled by alpha / rank; 0: alpha = rank
  std::vector<std::string> lora_targets;  // FQN globs of linear modules that get adapters
  double lora_dropout = 0.0;              // of what the adapters read
  std::vector<std::string> lora_saved;    // globs of modules of which a copy learns whole
  bool lora_magnitudes = false;           // DoRA: the lengths of the weights' rows learn, too
  TrainsBy trains_by = TrainsBy::kOwn;    // what a step trains by
  Rollout rollout;                        // of kGrpo
  FrozenFormat frozen_format = FrozenFormat::kMaster;
  bool quantized_experts = false;  // experts, too, are stored in a frozen format of 8 or 4 bits
  double memory_margin = 0.0;      // fraction of device memory that plans leave free
  AllocatorSettings allocator;

  bool operator==(const Job&) const = default;
};

// Whose rules Lower follows.
enum class Dialect : std::uint8_t {
  kNative,
  kFsdp2,
  kFsdp1,
  kDdp,
  kZero1,  // DeepSpeed: optimizer states and masters are sharded
  kZero2,  // and gradients
  kZero3,  // and parameters
};
[[nodiscard]] std::string_view NameOf(Dialect dialect);
// zero1, zero2 or zero3.
[[nodiscard]] bool IsZero(Dialect dialect);
// PyTorch's own: fsdp2, fsdp1 or ddp.
[[nodiscard]] bool IsTorch(Dialect dialect);

// What happens to a unit's gathered parameters after forward.
struct Reshard {
  enum class Kind : std::uint8_t { kAlways, kNever, kToGroup };
  Kind kind = Kind::kAlways;
  std::int64_t group = 0;  // kToGroup: ranks that share one copy; divides the shard size

  bool operator==(const Reshard&) const = default;
};

// A unit whose modules do not run back to back either holds its parameters from the first to the
// last, or frees and gathers them again for each stretch.
enum class Gap : std::uint8_t { kHold, kRegather };

struct UnitPlan {
  std::string name;                  // unique; the FQN of its only module, or "root"
  std::vector<std::string> modules;  // FQNs; "" is the root module, which takes the leftovers
  Reshard reshard;
  Gap gap = Gap::kHold;
  // Kept out of mixed precision: parameters that the model marks so, and no others.
  bool full_precision = false;
  // Units to gather early, by name. Empty with implicit prefetch: the dialect's own rule.
  std::vector<std::string> forward_prefetch;
  std::vector<std::string> backward_prefetch;

  bool operator==(const UnitPlan&) const = default;
};

enum class RecomputeKind : std::uint8_t { kFull, kSelective };
// One checkpointed region. kFull keeps only the region's inputs; kSelective keeps the outputs of
// compute-intensive ops too (every `keep_every`-th linear; attention always).
struct RecomputeRegion {
  std::string module;  // FQN
  RecomputeKind kind = RecomputeKind::kFull;
  std::int64_t keep_every = 1;

  bool operator==(const RecomputeRegion&) const = default;
};

enum class BackwardPrefetch : std::uint8_t { kPre, kPost, kNone };

// When gradients of an accumulated step are reduced.
enum class SyncMode : std::uint8_t {
  kEvery,          // each micro-batch
  kLast,           // no_sync: unsharded gradients are kept until the last
  kReplicateLast,  // reduce-scatter each micro-batch, all-reduce over replicas on the last
};

// When gathers and reductions of the shard group run.
enum class Transfers : std::uint8_t {
  kAtOnce,  // as soon as what they need is there, beside each other
  kInTurn,  // one after another, each when a large product begins, which they slow least
};

struct Offload {
  bool parameters = false;   // shards, gradients and optimizer live on the host (CPUOffload)
  bool optimizer = false;    // states and update on the host, parameters on the device
  bool activations = false;  // tensors kept for backward travel to the host and back
  bool moments = false;      // states on the host, parameters and update on the device

  bool operator==(const Offload&) const = default;
};

// How the ZeRO stages reduce gradients. Default: zero1 and zero2 all-reduce, zero3 scatters.
enum class GradientReduction : std::uint8_t {
  kDefault,
  kAllReduce,      // buckets are all-reduced, each rank keeps its part (DeepSpeed's stages 1 and 2
                   // since 0.8; stage 3 with "reduce_scatter": false)
  kReduceScatter,  // zero1, zero2: each unit's flat gradient (Megatron, llm.c); zero3: each bucket
};
// Are gathers and reductions issued to streams of their own?
enum class Overlap : std::uint8_t {
  kDefault,
  kOn,
  kOff
};  // default: zero3 on, zero1 and zero2 off

// Options of zero1, zero2 and zero3, named and counted as DeepSpeed's "zero_optimization": sizes
// are in elements, unsharded ones unless it says otherwise; the defaults are those of its code.
struct ZeroOptions {
  // All: gradients are reduced as soon as the next one would make a bucket larger than this.
  std::int64_t reduce_bucket = 500'000'000;
  // All: gradients are copied into one buffer of reduce_bucket elements as they become ready.
  bool contiguous_gradients = true;
  Overlap overlap_comm = Overlap::kDefault;
  GradientReduction gradient_reduction = GradientReduction::kDefault;
  // zero1, zero2.
  std::int64_t allgather_bucket = 0;  // elements per all-gather after the update; 0: all at once
  // zero3.
  // All-reduces take the whole bucket, whatever is in it, and gradients beside it live until the
  // next one; the bucket lives for a backward pass, partitions of gradients from the first
  // reduction to the update; gathers wait for the device, and what they need has a pool.
  bool before_deepspeed_0_6 = false;
  std::int64_t prefetch_bucket = 50'000'000;         // requested ahead by one fetch; 0: nothing
  std::int64_t max_live_parameters = 1'000'000'000;  // no prefetch beyond this many gathered
  std::int64_t max_reuse_distance = 1'000'000'000;   // kept if used again within this many
  std::int64_t persistence_threshold = 100'000;      // parameters up to this size stay gathered
  std::int64_t sub_group = 1'000'000'000;            // sharded elements that are updated at once

  bool operator==(const ZeroOptions&) const = default;
};

struct Plan {
  Dialect dialect = Dialect::kFsdp2;
  std::int64_t shard_size = 1;      // W: ranks that share one copy of the parameters
  std::int64_t replicate_size = 1;  // R: copies; W * R * tensor_size * pipeline_size = ranks
  // Neighbours in a shard group that share the experts of each mixture; the model is cut for them
  // (CutExperts). 1: every rank has all experts, sharded as other parameters are.
  std::int64_t expert_size = 1;
  // Neighbours that cut every layer among them and read the same samples; the model is cut for them
  // (CutTensor).
  std::int64_t tensor_size = 1;
  // Their transfers of tokens run beside the products next to them, part by part (torch's
  // micro-pipeline, "async TP"; Megatron's --tp-comm-overlap).
  bool tensor_async = false;
  // Neighbours in a shard group that have a part of the tokens of the same samples; the model is
  // cut for them (CutContext).
  std::int64_t context_size = 1;
  ContextMethod context_method = ContextMethod::kGather;
  // Ranks that have other layers each, all other sizes being of one of them; the stages are cut
  // when the plan is lowered (LowerStages), and micro-batches are those of `accumulation`.
  std::int64_t pipeline_size = 1;
  std::int64_t pipeline_stages = 1;  // of each of them: every pipeline_size-th
  // As how many blocks the embedding counts, and the head, where stages get equally many.
  std::int64_t pipeline_edge_layers = 1;
  PipelineSchedule pipeline_schedule = PipelineSchedule::k1F1B;
  std::int64_t micro_batch = 1;   // samples
  std::int64_t accumulation = 1;  // micro-batches per optimizer step
  SyncMode sync = SyncMode::kEvery;
  std::vector<UnitPlan> units;  // the root unit (module "") last
  std::vector<RecomputeRegion> recompute;
  Offload offload;

  // fsdp2, fsdp1 and ddp only: the release of PyTorch whose rules are followed.
  TorchRelease torch = TorchRelease::k2_13;

  // fsdp2 only: no unit is freed after a backward pass but the step's last
  // (set_reshard_after_backward). Of three micro-batches, units that `never` free after forward are
  // gathered once.
  bool keeps_gathered = false;

  // fsdp1 only.
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  bool forward_prefetch = false;
  bool limit_all_gathers = true;
  bool use_orig_params = true;

  // fsdp1 only; not torch's, but for running in one arena: compute waits for the reduction of the
  // unit before, so that memory with fixed offsets can be used again. torch's allocator asks the
  // device at run time instead.
  bool bounded_memory = false;

  // native only: gathered units alive at once in each pass, the one computing included.
  std::int64_t in_flight = 2;
  // native only.
  Transfers transfers = Transfers::kAtOnce;
  // native only, with offload.moments: states on their way to the device and back at once; at most
  // in_flight such pieces are on the device.
  Bytes moments_piece = 256 * kMiB;

  // ddp only: bucket caps in bytes (PyTorch: 1 MiB for the first, 25 MiB for the rest).
  Bytes first_bucket = kMiB;
  Bytes bucket = 25 * kMiB;
  // ddp only: what DistributedDataParallel does about parameters without a gradient. The first
  // looks for them in every pass and keeps buckets in the order of registration; the second learns
  // them in the first pass, and rebuilds its buckets a pass later.
  bool find_unused_parameters = false;
  bool static_graph = false;

  // zero1, zero2, zero3 only.
  ZeroOptions zero;

  bool operator==(const Plan&) const = default;
};

// Does DDP let parameters be without a gradient?
[[nodiscard]] inline bool FindsUnused(const Plan& plan) {
  return plan.dialect == Dialect::kDdp && (plan.find_unused_parameters || plan.static_graph);
}

[[nodiscard]] inline Pipeline PipelineOf(const Plan& plan) {
  return {plan.pipeline_schedule, plan.pipeline_size, plan.pipeline_stages, plan.accumulation};
}

// How one parameter belongs to one unit of a plan.
struct ResolvedUnit {
  std::string name;
  std::vector<ModuleId> modules;  // roots of the unit's subtrees
  std::vector<ParamId> params;    // storages, in communication order of the plan's dialect
  bool full_precision = false;
  std::uint32_t planned = 0;  // the entry of Plan::units
};

// Of a plan of a ZeRO dialect: gradients are reduce-scattered, not all-reduced.
[[nodiscard]] bool ScattersGradients(const Plan& plan);

// Assigns every parameter storage to exactly one unit: a unit takes what lies below its modules
// and is not taken by a unit further in (fsdp-semantics: inner first). Throws InputError for an
// unknown FQN (with the nearest), a module in two units, a parameter outside all units, tied
// parameters that fall into different units, and unknown prefetch names. `where` names the plan.
// O(modules * depth + params).
[[nodiscard]] std::vector<ResolvedUnit> ResolveUnits(const Model& model, const Plan& plan,
                                                     const std::string& where);

// Checks what Lower relies on: sizes positive, reshard groups divide the shard size, options of
// other dialects not used, W * R * micro_batch * accumulation = global batch. Throws InputError.
void ValidatePlan(const Model& model, const Job& job, const Plan& plan, const std::string& where);

}  // namespace shardwright
