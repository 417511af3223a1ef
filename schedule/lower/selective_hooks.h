#pragma once

// torch's selective checkpoint keeps a list of calls per operator and looks up in it, by number,
// what runs again. FSDP's hooks call operators, too (record_function is one), and not as many in
// backward as in forward; one more than there was fails (_CachedTorchDispatchMode of checkpoint.py,
// torch 2.13; 2.8 counts only what it keeps). A dialect tells here what its hooks call.

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/lower/emitter.h"

namespace shardwright {

enum class HookCall : std::uint8_t { kRecord, kCopyIn, kCopyOut, kAllGather };

class SelectiveHooks {
 public:
  explicit SelectiveHooks(const Emitter& emitter) : e_(emitter) {}

  void BeginMicroBatch();
  // The hooks that follow run inside of this region of the analysis, or in none: kNoRegion.
  void InRegion(std::uint32_t region, Phase phase);
  // The hooks of the unit call this operator. Throws InputError where torch fails.
  void See(UnitId u, HookCall what, std::size_t times = 1);

 private:
  using Counts = std::array<std::uint32_t, 4>;

  const Emitter& e_;
  std::uint32_t region_ = kNoRegion;  // around the hook at hand
  bool is_rerun_ = false;             // of the region
  std::vector<Counts> seen_;          // per region, in forward
  Counts seen_again_{};               // in its recomputation
};

}  // namespace shardwright
