#pragma once

// Lists the plans that the search considers, as a few independent choices; docs/planning.md has
// all.
//
// Example: 8 GPUs, 4 samples per rank, FSDP2. Shard sizes are 1, 2, 4 and 8 (the divisors of 8),
// micro-batches 1, 2 and 4 (the divisors of 4). Each pair, with each set of things to offload and
// each way to reduce accumulated gradients, is an OuterChoice.

#include <cstdint>
#include <string>
#include <vector>

#include "planner/search.h"
#include "topologies/mesh.h"

namespace shardwright {

// Ranks of the cluster that read samples of their own, where as many others cut layers or tokens as
// `cut` says. Throws InputError where these do not divide the ranks.
[[nodiscard]] std::int64_t DataRanks(const Cluster& cluster, const Mesh& cut);

// The choices that decide most of memory and communication. Each combination has its own lower
// bounds.
struct OuterChoice {
  std::int64_t shard_size = 1;
  std::int64_t replicate_size = 1;
  std::int64_t tensor_size = 1;
  std::int64_t context_size = 1;
  std::int64_t micro_batch = 1;
  std::int64_t accumulation = 1;
  SyncMode sync = SyncMode::kEvery;
  Offload offload;
};

// One way to cut the model into units, the root last.
struct UnitFamily {
  std::string name;  // "block", "torchtitan", "2 blocks", "inside blocks", "root", ...
  std::vector<UnitPlan> units;
  bool is_nested = false;  // units inside of others
};

// One way to checkpoint a block: disjoint regions at or below it. Empty: none.
struct RecomputePattern {
  std::string name;                      // "none", "full", "selective:2", "full mlp"
  std::vector<RecomputeRegion> regions;  // modules relative to the block; "": the block itself
};

struct Space {
  std::vector<OuterChoice> outer;
  std::vector<UnitFamily> families;
  std::vector<Reshard> reshards;  // of the units that are not kept anyway; empty: only as given
  std::vector<std::int64_t> in_flight;
  std::vector<std::string> blocks;         // FQNs of the repeated blocks, in forward order
  std::vector<RecomputePattern> patterns;  // the first is "none"; only that one if it is fixed
  // gradient_checkpointing_enable() is all that the dialect's users have: one pattern for all
  // blocks.
  bool recomputes_all_or_none = false;
};

// The outer choices alone.
[[nodiscard]] std::vector<OuterChoice> OuterChoices(const Problem& input,
                                                    const SearchOptions& options);

// Throws InputError for a job that no plan can have.
[[nodiscard]] Space MakeSpace(const Problem& input, const SearchOptions& options);

// How many things are offloaded; kMostOffloads at most.
inline constexpr int kMostOffloads = 3;
[[nodiscard]] int CountOf(const Offload& offload);

// Of offloaded moments, at most, that are on the device at once.
[[nodiscard]] Bytes MostMomentsInFlight(const SearchOptions& options);

// "ddp", "full", "hybrid", "zero2"..., with what is offloaded.
[[nodiscard]] std::string FamilyName(const OuterChoice& outer, const SearchOptions& options);

// "shard 8 x replicate 2, micro-batch 1 x 4".
[[nodiscard]] std::string LabelOf(const OuterChoice& outer);

// Can who speaks the dialect run the plan's checkpointing with its units? PyTorch's selective
// checkpointing meets the hooks of FSDP units inside the region twice and fails
// (_CachedTorchDispatchMode, torch 2.13; 2.8 does not count what hooks call).
[[nodiscard]] bool CanRecompute(const Plan& plan);

// The shard group and the replicate group of the mesh, in this order.
[[nodiscard]] std::vector<Group> GroupsOf(const OuterChoice& outer);

// Does `plan` have this outer choice?
[[nodiscard]] bool Is(const OuterChoice& outer, const Plan& plan);
void SetOuter(const OuterChoice& outer, Plan& plan);

// The plan with this outer choice, no units and no recompute.
[[nodiscard]] Plan OuterPlan(const OuterChoice& outer, const SearchOptions& options);

// The regions of `pattern` in the block `fqn`.
void AppendRegions(const RecomputePattern& pattern, const std::string& fqn,
                   std::vector<RecomputeRegion>& regions);

}  // namespace shardwright
