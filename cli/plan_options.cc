#include "cli/plan_options.h"

#include <algorithm>
#include <array>

#include "cli/flag_values.h"
#include "cli/sweep_axes.h"
#include "core/printable.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan_names.h"
#include "topologies/gpu_names.h"

namespace shardwright {
namespace {

constexpr std::array<std::string_view, 4> kObjectiveNames = {"time", "memory", "pareto", "cost"};
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 40;
constexpr std::int64_t kMaxAccumulation = 65535;
constexpr std::int64_t kMaxMicroBatch = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLossChunks = std::int64_t{1} << 20;

constexpr std::array<FlagRow, 56> kPlanOptionFlags = {{
    {"--model", "NAME|FILE", "zoo name, config.json, checkpoint folder or model.json (required)",
     FileRole::kRead},
    {"--cluster", "NAME|FILE|TEXT",
     "catalog name, JSON file, or inline: 'h100-80 x8, nvlink 450 GB/s, nic 8x400 Gbit/s' "
     "(required)",
     FileRole::kRead},
    {"--nodes", "N", "nodes in use"},
    {"--gpus", "N", "GPUs in use of each node"},
    {"--kernel-set", "NAME",
     "software stack (default torch-eager, on host ranks shardwright-host)"},
    {"--attention", "flash|materialized|cudnn|flash3|triton|ck",
     "attention's kernels: the framework's fused ones, none that are fused, or those of cuDNN, "
     "FlashAttention-3, Triton or AMD's Composable Kernel (default: the stack's)"},
    {"--loss-chunks", "N",
     "head and loss run in N chunks of rows, as Liger's 16, and no whole logits exist (default: "
     "the "
     "stack's, mostly 1)"},
    {"--profile", "NAME|FILE", "measured efficiencies (default: by GPU and kernel set)",
     FileRole::kRead},
    {"--mode", "train|forward|dpo|dpo_precomputed|orpo|reward",
     "what a step does (default train); the last four train by pairs of answers, each a sample"},
    {"--seq", "N", "tokens per sample (default: the model's, at most 2048)"},
    {"--micro-batch", "N", "samples per rank and pass (default 1, or a pair)"},
    {"--accumulation", "N", "micro-batches per step (default: from --global-batch, or 1)"},
    {"--global-batch", "N", "samples per step over all ranks"},
    {"--sync", "every|last|replicate_last", "which micro-batches reduce gradients (default every)"},
    {"--dialect", "fsdp2|fsdp1|ddp|native|zero1|zero2|zero3|fairscale",
     "whose rules to follow (default fsdp2); of a search also several, such as fsdp1,fsdp2: the "
     "best of them"},
    {"--wrap", "RULE",
     "units: block, torchtitan, accelerate, size:1e8, root, module or a .json file (default block; "
     "zero1, zero2: root; zero3: module); batch norms stay in full precision beside them",
     FileRole::kRead},
    {"--shard", "N", "ranks that share one copy of the parameters (default: all)"},
    {"--replicate", "N", "copies of the parameters (default 1; ddp: all ranks)"},
    {"--reshard", "always|never|N",
     "what units do after forward: free, keep, or keep one copy per N ranks (default: free, but "
     "keep root and [norm, head])"},
    {"--recompute", "none|full[:X]|selective[:N]",
     "activation checkpointing of each block, or of the part X of them; selective keeps attention "
     "and every N-th linear (default none, X 1, N 2)"},
    {"--offload", "LIST",
     "none, or some of parameters,optimizer,activations,moments (default none)"},
    {"--precision", "NAME",
     "bf16-mixed, fp16-mixed, fp32, bf16, or master/param/reduce (default bf16-mixed = "
     "fp32/bf16/fp32); with +fp8 or +fp8-rowwise linear layers of blocks multiply in fp8, scaled "
     "by tensor or by row (fp8 = bf16-mixed+fp8); with +nf4, +nf4_double or +int8 frozen weights "
     "of "
     "linear layers are stored so (nf4 = bf16-mixed+nf4). On GPUs that multiply no bf16 the "
     "default is "
     "fp16-mixed"},
    {"--optimizer", "NAME[:IMPL[:MATRICES]]",
     "sgd, momentum, adam, adamw, adadelta, lion or adafactor; foreach, fused or for_loop (default "
     "adamw:foreach); "
     "what updates the blocks' matrices instead: muon, muon_distributed or soap (ddp only). Or a "
     "word "
     "of Transformers: adamw_bnb_8bit, paged_adamw_8bit, paged_adamw_32bit, adamw_torch_8bit, "
     "adamw_torch_4bit and others"},
    {"--weight-decay", "on|off", "(default on)"},
    {"--clip", "on|off", "gradient clipping by global norm (default on)"},
    {"--frozen", "GLOBS", "parameters without gradient, such as 'model.embed_tokens.*'"},
    {"--lora-rank", "N", "rank of LoRA adapters; everything else is frozen"},
    {"--lora-alpha", "X", "what adapters add is scaled by X / rank (default: by 1)"},
    {"--lora-targets", "GLOBS", "linear modules that get adapters; all-linear: all but the head"},
    {"--memory-margin,--mem-margin", "X",
     "fraction of device memory to leave free (default 0; of a search: the error of the prediction "
     "of memory)"},
    {"--allocator", "CONF",
     "settings of PyTorch's caching allocator, as PYTORCH_ALLOC_CONF has them: "
     "expandable_segments:True,max_split_size_mb:N,garbage_collection_threshold:X,"
     "pinned_max_round_threshold_mb:N (default none)"},
    {"--torch", "2.13|2.8|2.6",
     "fsdp2, fsdp1, ddp: the release of PyTorch whose rules are followed (default 2.13)"},
    {"--backward-prefetch", "pre|post|none", "fsdp1 (default pre)"},
    {"--forward-prefetch", "on|off", "fsdp1 (default off)"},
    {"--limit-all-gathers", "on|off", "fsdp1 (default on)"},
    {"--use-orig-params", "on|off", "fsdp1 (default on)"},
    {"--bounded-memory", "on|off",
     "fsdp1, fairscale: wait, so that fixed offsets can be used again (default off)"},
    {"--in-flight", "N", "native: gathered units alive at once (default 2)"},
    {"--transfers", "at_once|in_turn",
     "native: gathers and reductions run as soon as they can, or one after another, each from a "
     "large product on (default at_once)"},
    {"--first-bucket", "SIZE", "ddp (default '1 MiB')"},
    {"--bucket", "SIZE", "ddp (default '25 MiB')"},
    {"--find-unused-parameters", "on|off", "ddp (default off)"},
    {"--static-graph", "on|off", "ddp (default off)"},
    {"--reduce-scatter-bucket", "SIZE", "fairscale (default '25 MiB')"},
    {"--reduce-bucket", "N", "zero1-3: elements that are reduced at once (default 5e8)"},
    {"--contiguous-gradients", "on|off",
     "zero1-3: gradients are copied into a bucket (default on)"},
    {"--overlap-comm", "on|off", "zero1-3 (default on for zero3, off for zero1 and zero2)"},
    {"--gradient-reduction", "all_reduce|reduce_scatter",
     "zero1-3 (default all_reduce for zero1 and zero2, reduce_scatter for zero3)"},
    {"--allgather-bucket", "N", "zero1, zero2: elements per gather of weights (default 0: all)"},
    {"--before-deepspeed-0-6", "on|off",
     "zero3: buckets, partitions and gathers as before DeepSpeed 0.6 (default off)"},
    {"--prefetch-bucket", "N", "zero3: elements that a fetch requests ahead (default 5e7)"},
    {"--max-live-parameters", "N", "zero3: no prefetch beyond these elements (default 1e9)"},
    {"--max-reuse-distance", "N", "zero3: kept if used again within these elements (default 1e9)"},
    {"--persistence-threshold", "N", "zero3: smaller parameters stay gathered (default 1e5)"},
    {"--sub-group", "N", "zero3: sharded elements that are updated at once (default 1e9)"},
    {"--output,-o", "FILE",
     "where the plan goes (default: a pipe gets it, a terminal what there is to say of it)",
     FileRole::kWrite},
}};

constexpr std::array<FlagRow, 6> kSearchFlags = {{
    {"--from", "PLAN",
     "search: the plan of a run (of import-run, say): its model, cluster, kernel set, precision, "
     "optimizer, sequence and batch stay, what is faster is printed with the difference",
     FileRole::kRead},
    {"--objective", "time|memory|pareto|cost",
     "search: what is least; pareto: the whole front of time against memory; cost: GPU-hours over "
     "the node counts of --nodes, which then takes lists and ranges such as 8..128 (default time)"},
    {"--token-budget", "N", "search by cost: tokens (images) of the whole run, such as 1e12"},
    {"--mem", "SIZE",
     "search: device memory that plans may use (default: what the device has, less the margin)"},
    {"--keep", "FILE",
     "search: a plan that stays unless another one is more than 1 % better or it does not fit",
     FileRole::kRead},
    {"--threads", "N", "threads of a search; the plan does not depend on it (default: all)"},
}};

constexpr std::array<SwitchRow, 3> kSearchSwitches = {{
    {"--search",
     "find the fastest plan that fits; flags fix what they say (default where --global-batch is "
     "given and none of --micro-batch to --sync, --wrap to --offload, --in-flight, --transfers)"},
    {"--explain", "search: time against memory, why the others were not chosen, and what binds"},
    {"--no-search", "take the defaults of all flags that are not given"},
}};

// Flags that say a choice of the plan.
constexpr std::array<const char*, 11> kChoiceFlags = {
    "--micro-batch", "--accumulation", "--sync",    "--wrap",      "--shard",    "--replicate",
    "--reshard",     "--recompute",    "--offload", "--in-flight", "--transfers"};

void ReadJobFlags(const Arguments& arguments, Job& job) {
  job.sequence_length = 0;
  if (const Flag mode = arguments.Get("--mode"); mode.is_given()) {
    std::vector<std::string_view> words(kJobModeNames.begin(), kJobModeNames.end());
    words.insert(words.end(), kTrainsByNames.begin() + 1, kTrainsByNames.end());
    const std::size_t word = ReadChoice(mode, words);
    job.mode = word == 1 ? JobMode::kForward : JobMode::kTrain;
    job.trains_by = word < 2 ? TrainsBy::kOwn : static_cast<TrainsBy>(word - 1);
  }
  arguments.SetCount("--seq", kMaxSequence, job.sequence_length);
  arguments.Set("--precision", job.precision, ReadPrecision);
  arguments.Set("--precision", job.frozen_format, ReadFrozenFormat);
  arguments.Set("--optimizer", job.optimizer, ReadOptimizer);
  arguments.Set("--weight-decay", job.optimizer.weight_decay, ReadSwitch);
  arguments.Set("--clip", job.clip_gradients, ReadSwitch);
  arguments.Set("--frozen", job.frozen, ReadList);
  arguments.SetCount("--lora-rank", std::int64_t{1} << 20, job.lora_rank);
  arguments.Set("--lora-alpha", job.lora_alpha,
                [](const Flag& flag) { return ReadPositive(flag, kMaxLoraAlpha); });
  arguments.Set("--lora-targets", job.lora_targets, ReadList);
  arguments.Set("--memory-margin", job.memory_margin, ReadFraction);
  arguments.Set("--allocator", job.allocator, ReadAllocator);
}

void SetElements(const Arguments& arguments, const std::string& name, std::int64_t min,
                 std::int64_t& target) {
  arguments.Set(name, target, [min](const Flag& flag) { return ReadWholeNumber(flag, min); });
}

void ReadZeroFlags(const Arguments& arguments, ZeroOptions& zero) {
  SetElements(arguments, "--reduce-bucket", 1, zero.reduce_bucket);
  arguments.Set("--contiguous-gradients", zero.contiguous_gradients, ReadSwitch);
  arguments.Set("--overlap-comm", zero.overlap_comm,
                [](const Flag& flag) { return ReadSwitch(flag) ? Overlap::kOn : Overlap::kOff; });
  arguments.SetChoice("--gradient-reduction", kGradientReductionNames, zero.gradient_reduction);
  SetElements(arguments, "--allgather-bucket", 0, zero.allgather_bucket);
  arguments.Set("--before-deepspeed-0-6", zero.before_deepspeed_0_6, ReadSwitch);
  SetElements(arguments, "--prefetch-bucket", 0, zero.prefetch_bucket);
  SetElements(arguments, "--max-live-parameters", 0, zero.max_live_parameters);
  SetElements(arguments, "--max-reuse-distance", 0, zero.max_reuse_distance);
  SetElements(arguments, "--persistence-threshold", 0, zero.persistence_threshold);
  SetElements(arguments, "--sub-group", 1, zero.sub_group);
}

void ReadPlanFlags(const Arguments& arguments, Plan& plan) {
  arguments.SetChoice("--dialect", kDialectNames, plan.dialect);
  arguments.SetCount("--micro-batch", kMaxMicroBatch, plan.micro_batch);
  arguments.SetChoice("--sync", kSyncNames, plan.sync);
  arguments.Set("--offload", plan.offload, ReadOffload);
  arguments.SetChoice("--torch", kTorchNames, plan.torch);
  arguments.SetChoice("--backward-prefetch", kBackwardPrefetchNames, plan.backward_prefetch);
  arguments.Set("--forward-prefetch", plan.forward_prefetch, ReadSwitch);
  arguments.Set("--limit-all-gathers", plan.limit_all_gathers, ReadSwitch);
  arguments.Set("--use-orig-params", plan.use_orig_params, ReadSwitch);
  arguments.Set("--bounded-memory", plan.bounded_memory, ReadSwitch);
  arguments.SetCount("--in-flight", kMaxAccumulation, plan.in_flight);
  arguments.SetChoice("--transfers", kTransfersNames, plan.transfers);
  arguments.Set("--first-bucket", plan.first_bucket, ReadBytes);
  arguments.Set("--bucket", plan.bucket, ReadBytes);
  arguments.Set("--find-unused-parameters", plan.find_unused_parameters, ReadSwitch);
  arguments.Set("--static-graph", plan.static_graph, ReadSwitch);
  arguments.Set("--reduce-scatter-bucket", plan.reduce_scatter_bucket, ReadBytes);
  ReadZeroFlags(arguments, plan.zero);
}

void ReadCostOptions(const Arguments& arguments, PlanOptions& options) {
  const bool by_cost = options.objective == Objective::kCost;
  const bool has_budget = arguments.Get("--token-budget").is_given();
  if (by_cost != has_budget) {
    throw UsageError(by_cost ? "--objective cost needs --token-budget"
                             : "--token-budget: only --objective cost has it");
  }
  if (!by_cost) {
    return;
  }
  if (options.node_counts.empty() || options.global_batch == 0) {
    throw UsageError("--objective cost needs --nodes and --global-batch");
  }
  if (arguments.Get("--replicate").is_given()) {
    throw UsageError("--replicate: follows from --nodes and --shard with --objective cost");
  }
  SetElements(arguments, "--token-budget", 1, options.token_budget);
}

}  // namespace

std::span<const FlagRow> PlanFlags() {
  return kPlanOptionFlags;
}

std::span<const FlagRow> SearchFlags() {
  return kSearchFlags;
}

std::span<const SwitchRow> SearchSwitches() {
  return kSearchSwitches;
}

std::vector<std::int64_t> TakeNodeCounts(Arguments& arguments) {
  const Flag nodes = arguments.Get("--nodes");
  if (!nodes.is_given()) {
    return {};
  }
  if (arguments.Get("--objective").text != "cost") {
    if (nodes.text.find_first_of(",.") != std::string::npos) {
      throw UsageError("--nodes: got \"" + nodes.text +
                       "\", expected one number; several need --objective cost");
    }
    return {};
  }
  std::vector<std::int64_t> counts = ReadCounts(nodes, kMaxRanks);
  arguments.text["--nodes"] = std::to_string(counts.front());
  return counts;
}

namespace {

// Choices that the dialect does not have.
void CheckChoices(const PlanOptions& options, const Arguments& arguments) {
  const Dialect dialect = options.plan.dialect;
  if (dialect == Dialect::kDdp && options.wrap && options.wrap->kind != WrapSpec::Kind::kRoot) {
    throw UsageError("--wrap: got \"" + arguments.Get("--wrap").text +
                     "\", expected root; dialect ddp has no units");
  }
  if (dialect == Dialect::kDdp && options.reshard.is_set) {
    throw UsageError("--reshard: dialect ddp does not shard");
  }
  if (IsZero(dialect) && options.reshard.is_set) {
    throw UsageError("--reshard: dialect " + std::string(NameOf(dialect)) +
                     " has no such choice: its stage decides what stays gathered");
  }
}

}  // namespace

PlanOptions ReadPlanOptions(const Arguments& arguments) {
  arguments.Require("--model");
  arguments.Require("--cluster");
  PlanOptions options;
  options.model = arguments.Get("--model").text;
  options.cluster = arguments.Get("--cluster").text;
  if (const GpuName name = ReadGpuName(options.cluster.substr(0, options.cluster.find(',')));
      !name.assumed.empty()) {
    Say("note: " + name.assumed + "; --cluster names it");
  }
  arguments.SetText("--kernel-set", options.kernel_set);
  arguments.Set("--attention", options.attention, [](const Flag& flag) {
    return static_cast<AttentionImpl>(ReadChoice(flag, kAttentionNames));
  });
  arguments.SetCount("--loss-chunks", kMaxLossChunks, options.loss_chunks);
  arguments.Set("--precision", options.fp8, ReadFp8Products);
  options.has_precision = arguments.Get("--precision").is_given();
  arguments.SetText("--profile", options.profile);
  arguments.Set("--wrap", options.wrap, ReadWrap);
  options.output = arguments.Get("--output").text;
  arguments.SetCount("--nodes", kMaxRanks, options.nodes);
  arguments.SetCount("--gpus", kMaxRanks, options.gpus);
  arguments.SetCount("--global-batch", kMaxBatch, options.global_batch);
  arguments.SetCount("--shard", kMaxRanks, options.shard_size);
  arguments.SetCount("--replicate", kMaxRanks, options.replicate_size);
  arguments.SetCount("--accumulation", kMaxAccumulation, options.accumulation);
  arguments.Set("--reshard", options.reshard, ReadReshard);
  RecomputeChoice recompute;
  arguments.Set("--recompute", recompute, ReadRecompute);
  options.recompute = recompute.is_on;
  options.recompute_kind = recompute.kind;
  options.keep_every = recompute.keep_every;
  options.recompute_part = recompute.part;
  ReadJobFlags(arguments, options.job);
  options.plan.micro_batch = SamplesPerExample(options.job.trains_by);
  ReadPlanFlags(arguments, options.plan);
  CheckChoices(options, arguments);
  CheckAllocatorFlag(arguments, options.plan);
  options.json = arguments.IsJson();
  return options;
}

void CheckAllocatorFlag(const Arguments& arguments, const Plan& plan) {
  if (arguments.Get("--allocator").is_given() && FactsOf(plan).has_arena) {
    throw UsageError("--allocator: " + std::string(NameOf(plan.dialect)) +
                     " has one arena and no caching allocator");
  }
}

void ReadSearchOptions(const Arguments& arguments, PlanOptions& options) {
  const auto given = [&](const char* name) { return arguments.Get(name).is_given(); };
  options.fixed.mesh = given("--shard") || given("--replicate");
  options.fixed.micro_batch = given("--micro-batch") || given("--accumulation");
  options.has_micro_batch = given("--micro-batch");
  options.fixed.sync = given("--sync");
  options.fixed.units = given("--wrap");
  options.fixed.recompute = given("--recompute");
  options.fixed.offload = given("--offload");
  options.fixed.in_flight = given("--in-flight");
  options.fixed.transfers = given("--transfers");
  options.fixed.prefetch = given("--backward-prefetch") || given("--forward-prefetch");
  const bool says_nothing = std::none_of(kChoiceFlags.begin(), kChoiceFlags.end(), given);
  if (arguments.Has("--search") && arguments.Has("--no-search")) {
    throw UsageError("--search --no-search: got both, expected one of them");
  }
  options.search = arguments.Has("--search") ||
                   (!arguments.Has("--no-search") && given("--global-batch") && says_nothing);
  options.has_dialect = given("--dialect");
  options.has_margin = given("--memory-margin") || given("--mem");
  if (options.search && options.plan.dialect == Dialect::kFsdp1 && !given("--use-orig-params")) {
    // Off by default in PyTorch; flat parameters with frozen parts need it.
    options.plan.use_orig_params = options.job.lora_rank > 0 || !options.job.frozen.empty();
  }
  arguments.SetChoice("--objective", kObjectiveNames, options.objective);
  arguments.Set("--mem", options.memory_limit, ReadBytes);
  if (given("--mem") && given("--memory-margin")) {
    throw UsageError("--mem --memory-margin: got both, expected one of them");
  }
  constexpr std::int64_t kMostThreads = 1024;
  arguments.SetCount("--threads", kMostThreads, options.threads);
  options.explain = arguments.Has("--explain");
  arguments.SetText("--keep", options.keep);
  for (const char* name : {"--objective", "--mem", "--token-budget", "--keep", "--explain"}) {
    const bool is_given = name == std::string_view("--explain") ? options.explain : given(name);
    if (!options.search && is_given) {
      throw UsageError(std::string(name) + ": only a search has it; add --search");
    }
  }
  ReadCostOptions(arguments, options);
}

}  // namespace shardwright
