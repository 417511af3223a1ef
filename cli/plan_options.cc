#include "cli/plan_options.h"

#include <array>

#include "cli/flag_values.h"
#include "cli/stacks.h"
#include "cli/sweep_axes.h"
#include "core/printable.h"
#include "core/ranges.h"
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

// Flags that say a choice of the plan.
constexpr std::array<const char*, 11> kChoiceFlags = {
    "--micro-batch", "--accumulation", "--sync",    "--wrap",      "--shard",    "--replicate",
    "--reshard",     "--recompute",    "--offload", "--in-flight", "--transfers"};

void ReadJobFlags(const Arguments& arguments, Job& job) {
  job.sequence_length = 0;
  if (const Flag mode = arguments.Get("--mode"); mode.is_given()) {
    ReadMode(mode, job);
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

// A kernel set, or the stack that has it.
void ReadKernelSet(const Arguments& arguments, PlanOptions& options) {
  arguments.SetText("--kernel-set", options.kernel_set);
  const std::string word = options.kernel_set;
  if (const auto stack = FindStack(word, "--kernel-set")) {
    options.kernel_set = stack->kernel_set;
    options.stack_attention = stack->attention;
    if (!arguments.command.empty()) {
      Say("note: " + PrintableLine(word) + " is kernel set " + stack->kernel_set +
          (stack->dialect.empty() ? "" : ", and shards as " + stack->dialect));
    }
  } else if (word.find('@') != std::string::npos) {
    std::vector<std::string> names = Mapped<std::string>(Stacks(), &StackRow::name);
    throw InputError("--kernel-set", '"' + word + '"', "a stack of `shardwright list stacks`",
                     DidYouMean(word.substr(0, word.find('@')), names));
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
      !name.assumed.empty() && !arguments.command.empty()) {  // said once, see estimate --solve
    Say("note: " + name.assumed + "; --cluster names it");
  }
  ReadKernelSet(arguments, options);
  arguments.Set("--attention", options.attention, [](const Flag& flag) {
    return static_cast<AttentionImpl>(ReadChoice(flag, kAttentionNames));
  });
  arguments.SetCount("--loss-chunks", kMaxLossChunks, options.loss_chunks);
  arguments.Set("--precision", options.fp8, ReadFp8Products);
  const Flag precision = arguments.Get("--precision");
  options.has_precision = precision.is_given() && !precision.text.starts_with('+');
  arguments.SetText("--profile", options.profile);
  arguments.Set("--wrap", options.wrap, ReadWrap);
  options.output = arguments.Get("--output").text;
  arguments.SetCount("--nodes", kMaxRanks, options.nodes);
  arguments.SetCount("--gpus", kMaxRanks, options.gpus);
  arguments.SetCount("--global-batch", kMaxBatch, options.global_batch);
  ShardChoice shard;
  arguments.Set("--shard", shard, ReadShard);
  options.shard_size = shard.size;
  options.plan.expert_size = shard.experts;
  options.plan.tensor_size = shard.tensor;
  options.plan.tensor_async = shard.tensor_async;
  options.plan.context_size = shard.context;
  options.plan.context_method = shard.context > 1 ? shard.method : ContextMethod::kGather;
  options.plan.pipeline_size = shard.pipeline;
  options.plan.pipeline_stages = shard.stages;
  options.plan.pipeline_edge_layers = shard.edge_layers;
  options.plan.pipeline_schedule = shard.schedule;
  arguments.SetCount("--replicate", kMaxRanks, options.replicate_size);
  arguments.SetCount("--accumulation", kMaxAccumulation, options.accumulation);
  arguments.Set("--reshard", options.reshard, ReadReshard);
  options.plan.keeps_gathered = options.reshard.keeps_gathered;
  RecomputeChoice recompute;
  arguments.Set("--recompute", recompute, ReadRecompute);
  options.recompute = recompute.is_on;
  options.recompute_kind = recompute.kind;
  options.keep_every = recompute.keep_every;
  options.recompute_part = recompute.part;
  ReadJobFlags(arguments, options.job);
  options.plan.micro_batch = SamplesPerExample(options.job.trains_by);
  if (options.job.trains_by == TrainsBy::kReward && options.job.lora_rank > 0) {
    options.job.lora_saved.emplace_back("score");  // PEFT trains the head of SEQ_CLS whole
  }
  ReadPlanFlags(arguments, options.plan);
  if (shard.pipeline > 1) {  // torch's own way, as it has no other
    options.plan.sync = arguments.Get("--sync").is_given() ? options.plan.sync : SyncMode::kLast;
    if (!options.reshard.is_set && options.plan.dialect == Dialect::kFsdp2) {
      options.reshard = {true, {Reshard::Kind::kNever, 0}};
    }
  }
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
  options.fixed.mesh = options.shard_size > 0 || given("--replicate");
  options.fixed.micro_batch = given("--micro-batch") || given("--accumulation");
  options.has_micro_batch = given("--micro-batch");
  options.fixed.sync = given("--sync");
  options.fixed.units = given("--wrap");
  options.fixed.recompute = given("--recompute");
  options.fixed.offload = given("--offload");
  options.fixed.in_flight = given("--in-flight");
  options.fixed.transfers = given("--transfers");
  options.fixed.prefetch = given("--backward-prefetch") || given("--forward-prefetch");
  // Who shares out experts alone leaves the choices to the search.
  const bool says_nothing = NoneOf(kChoiceFlags, [&](const char* flag) {
    return given(flag) && (std::string_view(flag) != "--shard" || options.shard_size > 0);
  });
  if (arguments.Has("--search") && arguments.Has("--no-search")) {
    throw UsageError("--search --no-search: got both, expected one of them");
  }
  options.search = arguments.Has("--search") ||
                   (!arguments.Has("--no-search") && given("--global-batch") && says_nothing);
  if (options.plan.pipeline_size > 1) {  // has no choice of these
    options.fixed.sync = options.fixed.offload = true;
  }
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
