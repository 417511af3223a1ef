// Searches over searches. SearchFront searches under 7 memory limits between the smallest and the
// largest need, in equal ratios. SearchNodes searches once per node count.
//
// Example of node counts: 512 samples of 8,192 tokens per step and a budget of 1e12 tokens are
// 238,419 steps. 4 nodes of 8 take 10 s per step: 662 h and 21,193 GPU-hours. 8 nodes take 5.2 s:
// 344 h and 22,041 GPU-hours. 4 nodes are cheaper by 4 %, more than a tie of 1 %, so CheapestOf
// returns them.

#include "planner/front.h"

#include <cmath>
#include <set>

#include "core/ranges.h"
#include "planner/choose.h"
#include "planner/space.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

bool IsStopped(const SearchOptions& options) {
  return options.stop != nullptr && options.stop->load();
}

// Adds what `other` found under a lower limit to `all`.
void Merge(const SearchResult& other, SearchResult& all) {
  for (const Candidate& c : other.candidates) {
    if (c.status == CandidateStatus::kFits) {
      all.candidates.push_back(c);
    }
  }
  all.simulated += other.simulated;
  all.is_complete = all.is_complete && other.is_complete;
  all.search_time += other.search_time;
}

NodeCountResult SearchCount(const Problem& input, const SearchOptions& options, std::int64_t nodes,
                            std::int64_t tokens) {
  Problem counted = input;
  counted.cluster.node_count = nodes;
  NodeCountResult row;
  row.nodes = nodes;
  row.ranks = counted.cluster.RankCount();
  const Mesh cut = MeshOf(options.base);
  if (!Mesh{{1, row.ranks}}.SplitsInto(cut.tensor * cut.context)) {
    row.refusal = "ranks that cut layers (tp) or tokens (cp) do not divide its ranks";
    return row;
  }
  const std::int64_t data_ranks = DataRanks(counted.cluster, cut);
  const std::int64_t per_step = input.job.global_batch * input.model.tokens_per_sample;
  row.steps = CeilDiv(tokens, std::max<std::int64_t>(per_step, 1));
  if (input.job.global_batch % data_ranks != 0) {
    row.refusal = data_ranks < row.ranks
                      ? "the global batch is no multiple of its data-parallel ranks"
                      : "the global batch is no multiple of its ranks";
    return row;
  }
  if (!Mesh{{1, data_ranks * cut.context}}.SplitsInto(options.base.expert_size)) {
    row.refusal = "ranks that share out experts (ep) do not divide its ranks";
    return row;
  }
  SearchOptions here = options;
  if (options.fixed.mesh) {
    const Mesh mesh =
        MeshOver(row.ranks, {.size = {0, here.base.shard_size}, .tensor = cut.tensor});
    if (mesh.RankCount() != row.ranks) {
      row.refusal = "the shard size does not divide its ranks";
      return row;
    }
    here.base.replicate_size = mesh.Along(Axis::kReplicate);
  }
  row.result = Search(counted, here);
  if (!row.result->is_feasible) {
    row.refusal = "nothing fits";
    return row;
  }
  row.total = Seconds(static_cast<double>(row.steps) * row.result->best.step_time.value);
  constexpr double kSecondsPerHour = 3600;
  row.gpu_hours = row.total.value / kSecondsPerHour * static_cast<double>(row.ranks);
  return row;
}

}  // namespace

SearchResult SearchFront(const Problem& input, const SearchOptions& options) {
  SearchOptions by_time = options;
  by_time.objective = Objective::kTime;
  SearchResult all = Search(input, by_time);
  if (!all.is_feasible || IsStopped(options)) {
    return all;
  }
  SearchOptions by_memory = options;
  by_memory.objective = Objective::kMemory;
  const SearchResult least = Search(input, by_memory);
  Merge(least, all);
  Bytes most(0);
  for (const Candidate& c : all.candidates) {
    most = c.status == CandidateStatus::kFits ? std::max(most, c.Needs()) : most;
  }
  constexpr int kParts = 8;
  const auto low = static_cast<double>(least.candidates[least.best.index].Needs().value);
  const double ratio = static_cast<double>(most.value) / low;
  for (int i = 1; i < kParts && least.is_feasible && !IsStopped(options); ++i) {
    const double limit = low * std::pow(ratio, static_cast<double>(i) / kParts);
    by_time.memory_limit = Bytes(static_cast<std::int64_t>(limit));
    Merge(Search(input, by_time), all);
  }
  std::set<std::string> blocks;
  for (const ModuleId block : BlocksOf(input.model)) {
    blocks.insert(input.model.modules[block.value].fqn);
  }
  FindPareto({options, blocks, input.cluster.gpus_per_node}, all);
  return all;
}

std::vector<NodeCountResult> SearchNodes(const Problem& input, const SearchOptions& options,
                                         const std::vector<std::int64_t>& node_counts,
                                         std::int64_t tokens) {
  return Mapped<NodeCountResult>(node_counts, [&](const std::int64_t nodes) {
    return SearchCount(input, options, nodes, tokens);
  });
}

std::optional<std::size_t> CheapestOf(const std::vector<NodeCountResult>& counts, double tie) {
  double least = INFINITY;
  for (const NodeCountResult& row : counts) {
    least = row.Fits() ? std::min(least, row.gpu_hours) : least;
  }
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const bool is_cheap = counts[i].Fits() && counts[i].gpu_hours <= least * (1 + tie);
    if (is_cheap && (!best || counts[i].total < counts[*best].total)) {
      best = i;
    }
  }
  return best;
}

}  // namespace shardwright
