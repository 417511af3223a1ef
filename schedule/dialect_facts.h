#pragma once

// What is known of each dialect before a plan of it is lowered: what users can choose, and what
// holds for all of its plans. Who plans or checks asks for a fact, never for a name, so that a new
// dialect is a row here and its rules in schedule/lower/. docs/lowering.md has the sources.

#include <cstdint>
#include <optional>
#include <string_view>

#include "schedule/plan.h"

namespace shardwright {

// How a plan says what is gathered early.
enum class EarlyGathers : std::uint8_t {
  kNone,
  kInFlight,  // Plan::in_flight, and in which turn by Plan::transfers
  kSwitches,  // Plan::forward_prefetch and backward_prefetch
  kLists,     // UnitPlan::forward_prefetch and backward_prefetch
};

// What compute waits for before the next forward pass, whatever the plan.
enum class PassEnd : std::uint8_t {
  kNothing,
  kNorm,        // the norm of all gradients, or the update on the host, once per step
  kReductions,  // all reductions, at the end of every backward pass
};

enum class MeshChoice : std::uint8_t { kAny, kReplicas, kOneShardGroup };

struct DialectFacts {
  // Choices.
  MeshChoice mesh = MeshChoice::kAny;
  // What the search may offload. PyTorch's offload_wrapper copies activations while compute and the
  // host wait, which is another program than the one with copies beside compute, so it is left out.
  Offload offload = {};
  EarlyGathers early_gathers = EarlyGathers::kNone;
  std::string_view default_wrap = "block";
  bool wraps_only_so = false;     // units follow default_wrap, whatever the model
  bool groups_modules = false;    // a unit may be any modules
  bool flat_units = false;        // a unit is one flat parameter, of one module
  bool has_leaf_modules = false;  // modules whose parts are fetched together can be named
  bool frees_units = true;        // units are gathered and freed one by one, as the plan says
  bool has_groups = false;   // resharding to smaller groups, and between replicas on the last alone
  bool skips_sync = true;    // gradients may wait for the last micro-batch
  bool adds_on_host = true;  // gradients of micro-batches add up there
  bool checkpoints_blocks = true;     // each block has its own way; else all or none
  bool selective_meets_units = true;  // selective checkpointing runs with units inside its regions
  bool is_zero = false;               // Plan::zero is its options
  bool takes_any_plan = false;        // says whatever other dialects' users choose
  std::optional<Dialect> instead = {};  // what comes nearest where none of its plans fits

  // Memory.
  bool has_arena = false;            // fixed offsets (Place); else a caching allocator
  bool whole_parameters = false;     // every rank has all of them, always
  bool shards_are_gathered = false;  // in the dtype of compute; masters lie beside them
  bool grads_as_reduced = false;     // are written where they are reduced from, in that dtype
  bool keeps_root = false;           // the root unit is never freed
  bool keeps_unsynced = false;       // what never reshards stays until micro-batches are synced
  bool keeps_unlearned = true;       // and for good where nothing learns: forward alone

  // Time.
  PassEnd pass_end = PassEnd::kReductions;
  bool copies_units = false;     // compute copies what was gathered, and gradients to be reduced
  bool counts_transfers = true;  // each pass moves every unit; else in buckets, or not at all
  bool one_communicator = true;  // gathers and reductions of the shard group take turns
  bool reduces_masters = false;  // gradients, in the optimizer's dtype
  bool regathers_after_forward = false;  // nothing is gathered for backward before forward is over
  bool updates_host_at_once = false;     // there, in one pass over parameters and states
  bool reduces_frozen = false;           // with a unit's gradients: zeros of what does not learn
  bool cuts_first_dimension = false;     // of each parameter, padded to the ranks
};

[[nodiscard]] const DialectFacts& FactsOf(Dialect dialect);
[[nodiscard]] inline const DialectFacts& FactsOf(const Plan& plan) {
  return FactsOf(plan.dialect);
}

}  // namespace shardwright
