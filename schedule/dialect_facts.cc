#include "schedule/dialect_facts.h"

#include <array>
#include <cstddef>

namespace shardwright {
namespace {

constexpr DialectFacts kNative = {
    .offload = {.parameters = true, .optimizer = true, .activations = true, .moments = true},
    .early_gathers = EarlyGathers::kInFlight,
    .groups_modules = true,
    .has_groups = true,
    .takes_any_plan = true,
    .instead = Dialect::kFsdp2,
    .has_arena = true,
    .grads_as_reduced = true,
    .keeps_unlearned = false,
    .pass_end = PassEnd::kNorm,
    .one_communicator = false,
    .regathers_after_forward = true,
    .updates_host_at_once = true,
    .reduces_frozen = true,
};

constexpr DialectFacts kFsdp2 = {
    .offload = {.parameters = true},
    .early_gathers = EarlyGathers::kLists,
    .groups_modules = true,
    .has_groups = true,
    .selective_meets_units = false,
    .copies_units = true,
    .cuts_first_dimension = true,
};

constexpr DialectFacts kFsdp1 = {
    .offload = {.parameters = true},
    .early_gathers = EarlyGathers::kSwitches,
    .flat_units = true,
    .adds_on_host = false,
    .selective_meets_units = false,
    .keeps_root = true,
    .keeps_unsynced = true,
};

constexpr DialectFacts kDdp = {
    .mesh = MeshChoice::kReplicas,
    .default_wrap = "root",
    .frees_units = false,
    .checkpoints_blocks = false,
    .whole_parameters = true,
    .reduces_masters = true,
};

// Stages 1 and 2.
constexpr DialectFacts kZero12 = {
    .mesh = MeshChoice::kOneShardGroup,
    .default_wrap = "root",
    .wraps_only_so = true,
    .frees_units = false,
    .skips_sync = false,
    .checkpoints_blocks = false,
    .is_zero = true,
    .whole_parameters = true,
    .pass_end = PassEnd::kNothing,
    .counts_transfers = false,
};

constexpr DialectFacts kZero3 = {
    .mesh = MeshChoice::kOneShardGroup,
    .offload = {.parameters = true, .optimizer = true},
    .default_wrap = "module",
    .wraps_only_so = true,
    .has_leaf_modules = true,
    .frees_units = false,
    .skips_sync = false,
    .checkpoints_blocks = false,
    .is_zero = true,
    .shards_are_gathered = true,
    .pass_end = PassEnd::kNothing,
    .counts_transfers = false,
    .updates_host_at_once = true,
};

// By value of Dialect.
constexpr std::array<DialectFacts, kDialectNames.size()> kFacts = {kNative, kFsdp2,  kFsdp1, kDdp,
                                                                   kZero12, kZero12, kZero3};

}  // namespace

const DialectFacts& FactsOf(Dialect dialect) {
  return kFacts[static_cast<std::size_t>(dialect)];
}

}  // namespace shardwright
