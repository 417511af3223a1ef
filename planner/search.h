#pragma once

// The planner: the fastest plan of a job that fits, and a proof of how much faster any other plan
// could be. docs/planning.md describes the method, the space, and the derivation of the bound.
// search.cc has an example.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/plan.h"
#include "schedule/problem.h"
#include "schedule/wrap.h"
#include "simulator/memory.h"

namespace shardwright {

// The quantity that the search minimises among plans that fit.
enum class Objective : std::uint8_t {
  kTime,    // step time; among plans within SearchOptions::tie of the fastest, what offloads
            // least, then the least memory
  kMemory,  // peak memory; the faster one among equals
  kPareto,  // as kTime, and SearchFront looks for the whole front of time against memory
  kCost,    // as kTime for one node count; SearchNodes compares node counts by GPU-hours
};

// Which choices the search may not change: it takes them from SearchOptions::base.
struct FixedChoices {
  bool mesh = false;         // shard_size and replicate_size
  bool micro_batch = false;  // and with it accumulation, which follows from the global batch
  bool sync = false;
  bool units = false;  // units with all they say; excludes `reshard`
  bool recompute = false;
  bool offload = false;
  bool in_flight = false;
  bool transfers = false;
  bool prefetch = false;  // fsdp1: backward_prefetch and forward_prefetch

  bool operator==(const FixedChoices&) const = default;
};

struct SearchProgress {
  std::int64_t simulated = 0;
  Seconds best;         // 0: none fits so far
  Seconds lower_bound;  // 0: not known yet
};

struct SearchOptions {
  // Dialect, the options of the dialect that are not searched, and every fixed choice.
  Plan base;
  FixedChoices fixed;
  ReshardChoice reshard;  // set: of all units, whatever their boundaries
  Objective objective = Objective::kTime;
  // Kept unless another plan is more than `tie` better, or it does not fit: small changes of a
  // cluster or a profile then do not change the plan. Must outlive the search. Null: none.
  const Plan* previous = nullptr;
  double tie = 0.01;  // step times within this fraction of the fastest count as equal
  // A plan whose allocator retries may be chosen where it is half as fast again as all others.
  bool takes_retries = true;
  // Per device, with what lives outside the allocator; 0: what the GPU has less the job's margin.
  Bytes memory_limit{0};
  int threads = 0;  // 0: what the machine has. The result does not depend on it
  // No further mesh, batch and offload is tried after so many simulations. A count and no time, so
  // that results repeat. Below 50: brief, few are refined and the front is not measured. 0: of the
  // most promising ones, and others until one fits, unrefined, and nothing about the floor.
  std::int64_t effort = 2000;
  const std::atomic<bool>* stop = nullptr;  // set by others: return the best plan so far
  std::function<void(const SearchProgress&)> progress;  // called now and then by one thread
};

enum class CandidateStatus : std::uint8_t {
  kFits,
  kOverDevice,    // simulated; peak memory is above the device's limit
  kOverHost,      // simulated; offloading needs more page-locked host memory than a node has
  kFragmented,    // simulated; the caching allocator's fragmentation leaves no room
  kRetries,       // simulated; the caching allocator has to give memory back and ask again
  kPrunedMemory,  // not simulated: the bound of its memory is above the limit
  kPrunedTime,    // not simulated: the bound of its time is above the best plan's time
  kNotTried,      // not simulated: the search stopped before
};
[[nodiscard]] std::string_view NameOf(CandidateStatus status);

// One plan, or a family of plans that agree in mesh, batch and offload, that the search looked at.
struct Candidate {
  std::string family;    // "ddp", "full", "hybrid", with " + offload" and what is offloaded
  std::string label;     // all choices in a few words
  std::string baseline;  // whose default it is ("torchtitan, recompute full"); empty: found here
  bool is_previous = false;  // SearchOptions::previous
  // With kPrunedMemory and kPrunedTime only what the family shares is set; it has no units.
  Plan plan;
  CandidateStatus status = CandidateStatus::kFits;
  Seconds bound;       // no plan of this mesh, batch and offload is faster
  Bytes memory_bound;  // and none needs less device memory
  Seconds step_time;   // simulated
  Bytes memory;        // simulated: peak allocated + outside the allocator, per device
  // Bytes that the device must have for the framework to run the plan: those that the caching
  // allocator reserves (native: the arena), and those outside. Known of the chosen plan and of the
  // front; 0: not known.
  Bytes needed;
  Bytes host_memory;    // page-locked, per node
  Bytes deficit;        // what is missing (device or host); 0 if it fits
  std::string why_not;  // of a plan of the front that is faster than the chosen one: why it is not

  [[nodiscard]] Bytes Needs() const { return std::max(memory, needed); }
  bool operator==(const Candidate&) const = default;
};

// Candidates that were not chosen, summed up by family and reason.
struct RejectedFamily {
  std::string family;
  std::string reason;  // "memory", "host memory", "bound", "slower", "within 1 %", "close to the
                       // limit", ...
  std::int64_t count = 0;  // candidates
  Seconds best_time;       // of those simulated; 0: none was
  Seconds bound;           // the least one
  Bytes least_deficit;     // of "memory" and "host memory"

  bool operator==(const RejectedFamily&) const = default;
};

// Why nothing fits: the plan that misses least, and what its peak is made of.
struct MemoryFloor {
  Candidate candidate;
  MemoryPeak peak;
  Bytes outside;
  Bytes host_deficit;  // the least one of plans that only the host's memory is too small for
};

// The chosen plan seen by the caching allocator, as `simulate` sees it.
struct ChosenPlan {
  std::size_t index = 0;  // into SearchResult::candidates
  Plan plan;
  Seconds step_time;
  MemoryPeak peak;           // allocated
  Bytes outside;             // of the allocator
  Bytes reserved;            // by the caching allocator, at most
  std::int64_t retries = 0;  // of the caching allocator; not 0 only where nothing fits without
  Bytes host_memory;         // page-locked, per node
  Seconds bubble;            // of a pipeline: what its ranks wait for each other, in the mean
};

struct SearchResult {
  bool is_feasible = false;
  ChosenPlan best;                    // if is_feasible
  Bytes memory_limit;                 // per device
  Seconds lower_bound;                // no plan of the space (docs/planning.md) that fits is faster
  double proven_gap = 0;              // (step_time - lower_bound) / step_time
  std::vector<Candidate> candidates;  // in a fixed order; the chosen one is among them
  // The chosen plan, and of those whose need is known those that no other beats in both step time
  // and need; by time.
  std::vector<std::size_t> pareto;
  std::vector<RejectedFamily> rejected;
  MemoryFloor floor;  // if !is_feasible
  std::int64_t simulated = 0;
  std::int64_t pruned_by_memory = 0;  // families of plans
  std::int64_t pruned_by_time = 0;
  bool is_complete = true;  // false: stopped early
  Seconds search_time;      // the only field that differs between equal searches
};

// Searches the plans of a problem whose job.global_batch is a multiple of the ranks. Throws
// InputError for a job that no plan can have (a global batch that is not a multiple of the ranks)
// and for fixed choices that contradict each other.
[[nodiscard]] SearchResult Search(const Problem& input, const SearchOptions& options);

// The fraction of a device's memory that a plan should leave where nobody says another: the error
// of predictions of what PyTorch reserves, and the band of what lies outside the allocator (the
// profile's spreads).
[[nodiscard]] double DefaultMargin(const Cluster& cluster, const Profile& profile);
// Device memory that plans may use: as the options say, or what the GPU has less the job's margin.
[[nodiscard]] Bytes MemoryLimit(const Problem& input, const SearchOptions& options);

}  // namespace shardwright
