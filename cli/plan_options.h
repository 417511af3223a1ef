#pragma once

// The flags of `shardwright plan` as values. Whether a model or a file exists is found out later.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "planner/search.h"
#include "schedule/plan.h"
#include "schedule/wrap.h"

namespace shardwright {

struct PlanOptions {
  std::string model;
  std::string model_json;  // the text of what it names; empty: of the zoo or a file
  std::string cluster;
  std::int64_t nodes = 0;                        // 0: what the cluster says
  std::int64_t gpus = 0;                         // per node; 0: what the cluster says
  std::string kernel_set;                        // empty: the cluster's usual one
  std::optional<AttentionImpl> attention;        // none: the kernel set's
  std::optional<AttentionImpl> stack_attention;  // what the stack calls on NVIDIA's GPUs
  std::int64_t loss_chunks = 0;                  // 0: the kernel set's
  std::optional<Fp8Products> fp8;                // likewise
  bool has_precision = true;        // false: job.precision, in fp16 where the GPU has no bf16
  std::string profile;              // empty: the default of GPU and kernel set
  std::int64_t global_batch = 0;    // 0: ranks x micro-batch x accumulation
  std::int64_t shard_size = 0;      // 0: follows from ranks and replicate_size
  std::int64_t replicate_size = 0;  // 0: follows from ranks and shard_size
  std::int64_t accumulation = 0;    // 0: follows from global_batch, or 1
  std::optional<WrapSpec> wrap;     // none: the dialect's DefaultWrap
  ReshardChoice reshard;
  bool recompute = false;
  RecomputeKind recompute_kind = RecomputeKind::kFull;
  std::int64_t keep_every = 1;
  double recompute_part = 1;
  // Everything that is copied into the plan as it is. job.sequence_length 0: the model's default.
  Job job;
  Plan plan;
  std::string output;  // a file, "-" for standard output, empty: not given
  bool json = false;

  // What no flag says is searched for; the rest is fixed.
  bool search = false;
  FixedChoices fixed;
  bool has_micro_batch = false;  // given by a flag
  bool has_dialect = false;      // the same
  bool has_margin = false;       // the same, or the limit itself; otherwise DefaultMargin
  Objective objective = Objective::kTime;
  Bytes memory_limit{0};     // 0: what the device has
  std::int64_t threads = 0;  // 0: all
  bool explain = false;
  std::string keep;                       // a plan file; empty: none
  std::vector<std::int64_t> node_counts;  // Objective::kCost: those to compare
  std::int64_t token_budget = 0;          // Objective::kCost
};

// The node counts of --nodes, which is a list with --objective cost, and the first of them alone
// in `arguments`; without that objective nothing.
[[nodiscard]] std::vector<std::int64_t> TakeNodeCounts(Arguments& arguments);

// Throws UsageError for --allocator with a plan that has no caching allocator.
void CheckAllocatorFlag(const Arguments& arguments, const Plan& plan);
// Throws UsageError for values that no plan can have. What is about a search is left as it is.
[[nodiscard]] PlanOptions ReadPlanOptions(const Arguments& arguments);
// Reads what is about a search, and whether there is one at all, into `options`, which
// ReadPlanOptions made of the same arguments.
void ReadSearchOptions(const Arguments& arguments, PlanOptions& options);

}  // namespace shardwright
