// Changes with which a job fits that does not. Each is tried alone, by a search that stops at the
// first plan that fits (effort 0).
//
// Example: the order for `--dialect fsdp2 --recompute none` on one node. First "without
// --recompute", then the dialect's alternative, then expandable segments, 16 loss chunks and bf16
// masters, and last 2, 4, 8, ... nodes until one fits. Each change that helps is reported with its
// time and memory.

#include "planner/fixes.h"

#include <optional>
#include <utility>

#include "core/error.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

// A plan that fits, if a short search finds one.
std::optional<Fix> Try(const Problem& input, SearchOptions options, std::string change) {
  options.effort = 0;
  options.progress = nullptr;
  try {
    const SearchResult result = Search(input, options);
    if (result.is_feasible) {
      const Candidate& chosen = result.candidates[result.best.index];
      return Fix{std::move(change), chosen.step_time, chosen.Needs(),
                 chosen.family + ": " + chosen.label};
    }
  } catch (const InputError&) {  // the changed job has no plans at all
  }
  return std::nullopt;
}

void Add(std::optional<Fix> fix, std::vector<Fix>& fixes) {
  if (fix) {
    fixes.push_back(std::move(*fix));
  }
}

void FreeChoices(const Problem& input, const SearchOptions& options, std::vector<Fix>& fixes) {
  const std::pair<bool FixedChoices::*, const char*> kChoices[] = {
      {&FixedChoices::units, "without --wrap"},
      {&FixedChoices::in_flight, "without --in-flight"},
      {&FixedChoices::transfers, "without --transfers"},
      {&FixedChoices::mesh, "without --shard and --replicate"},
      {&FixedChoices::micro_batch, "without --micro-batch and --accumulation"},
      {&FixedChoices::sync, "without --sync"},
      {&FixedChoices::recompute, "without --recompute"},
      {&FixedChoices::offload, "without --offload"}};
  for (const auto& [member, change] : kChoices) {
    if (options.fixed.*member) {
      SearchOptions freed = options;
      freed.fixed.*member = false;
      Add(Try(input, freed, change), fixes);
    }
  }
  if (options.reshard.is_set) {
    SearchOptions freed = options;
    freed.reshard = ReshardChoice();
    Add(Try(input, freed, "without --reshard"), fixes);
  }
}

void ChangeNumbers(const Problem& input, const SearchOptions& options, std::vector<Fix>& fixes) {
  if (const OptimizerSpec fused = FusedFormOf(input.job.optimizer); fused != input.job.optimizer) {
    Problem changed = input;  // the loop over lists holds a second copy of what it updates
    changed.job.optimizer = fused;
    const bool is_adam = fused.kind == OptimizerKind::kAdam;
    Add(Try(changed, options, is_adam ? "--optimizer adam:fused" : "--optimizer adamw:fused"),
        fixes);
  }
  if (!FactsOf(options.base).has_arena && !input.job.allocator.expandable_segments) {
    Problem changed = input;
    changed.job.allocator.expandable_segments = true;
    Add(Try(changed, options, "--allocator " + AllocatorConf(changed.job.allocator)), fixes);
  }
  constexpr std::int64_t kChunks = 16;  // as Liger has them
  if (input.kernels.loss_chunks < kChunks) {
    Problem changed = input;
    changed.kernels = WithLossChunks(input.kernels, kChunks);
    Add(Try(changed, options, "--loss-chunks " + std::to_string(kChunks)), fixes);
  }
  const Precision bf16 = {DType::kBf16, DType::kBf16, DType::kBf16};
  if (input.job.precision != bf16 && input.job.precision.param == DType::kBf16) {
    Problem changed = input;
    changed.job.precision = bf16;
    Add(Try(changed, options, "--precision bf16"), fixes);
  }
}

void AddNodes(const Problem& input, const SearchOptions& options, std::vector<Fix>& fixes) {
  constexpr std::int64_t kMostTimes = 64;
  for (std::int64_t times = 2; times <= kMostTimes && !options.fixed.mesh; times *= 2) {
    Problem larger = input;
    larger.cluster.node_count *= times;
    std::int64_t& batch = larger.job.global_batch;
    const std::int64_t ranks = DataRanks(larger.cluster, MeshOf(options.base));
    std::string change = "--nodes " + std::to_string(larger.cluster.node_count);
    if (batch % ranks != 0) {
      batch = CeilDiv(batch, ranks) * ranks;
      change += " --global-batch " + std::to_string(batch);
    }
    if (std::optional<Fix> fix = Try(larger, options, change)) {
      fixes.push_back(std::move(*fix));
      return;
    }
  }
}

}  // namespace

std::vector<Fix> FindFixes(const Problem& input, const SearchOptions& options) {
  std::vector<Fix> fixes;
  FreeChoices(input, options, fixes);
  if (const std::optional<Dialect> instead = FactsOf(options.base).instead) {
    SearchOptions other = options;
    other.base.dialect = *instead;
    other.base.in_flight = Plan().in_flight;
    other.fixed.in_flight = false;
    other.base.transfers = Plan().transfers;
    other.fixed.transfers = false;
    Add(Try(input, other, "--dialect " + std::string(NameOf(*instead))), fixes);
  }
  ChangeNumbers(input, options, fixes);
  AddNodes(input, options, fixes);
  return fixes;
}

}  // namespace shardwright
