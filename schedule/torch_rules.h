#pragma once

// What releases of PyTorch do differently in fully_shard, FullyShardedDataParallel and
// DistributedDataParallel, as data: who lowers or checks a plan asks for a rule, not for a release.

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardwright {

// Releases whose rules are known; docs/conformance.md has what was compared with each.
enum class TorchRelease : std::uint8_t { k2_13, k2_8, k2_6 };

struct TorchRules {
  // fully_shard: clip_grad_norm_ sums one number per parameter over the shard group, else one.
  bool stacks_norms = true;
  // fully_shard: a forward inside backward neither frees what its unit gathered nor takes a place
  // in the order that backward gathers ahead by (post_forward of _fsdp_param_group.py).
  bool keeps_recomputed = true;
  // fully_shard: a unit that runs again after its own backward has begun gathers what was freed
  // meanwhile (_pre_forward of _fsdp_state.py).
  bool regathers_recomputed = true;
  // fully_shard: units of several modules, of which not all ran, end with the model's forward
  // (_force_complete_incomplete_states of _fsdp_state.py).
  bool ends_groups = true;
  // fully_shard: the root can be resharded after forward.
  bool reshards_root = true;
  // fully_shard: the end of backward reduces also units that are sharded then
  // (_root_post_backward_final_callback of _fsdp_state.py).
  bool reduces_sharded = true;
  // The selective checkpoint counts all that runs again, also what FSDP's hooks call
  // (_CachedTorchDispatchMode of checkpoint.py).
  bool counts_hooks = true;

  bool operator==(const TorchRules&) const = default;
};

inline constexpr TorchRules kTorch2_8 = {.stacks_norms = false,
                                         .keeps_recomputed = false,
                                         .regathers_recomputed = false,
                                         .ends_groups = false,
                                         .counts_hooks = false};

inline constexpr TorchRules kTorch2_6 = [] {
  TorchRules rules = kTorch2_8;
  rules.reshards_root = rules.reduces_sharded = false;
  return rules;
}();

// By TorchRelease.
inline constexpr std::array<TorchRules, 3> kTorchRules = {TorchRules{}, kTorch2_8, kTorch2_6};

[[nodiscard]] constexpr const TorchRules& RulesOf(TorchRelease release) {
  return kTorchRules[static_cast<std::size_t>(release)];
}

}  // namespace shardwright
