#pragma once

// DeepSpeed ZeRO stage 3: parameters are partitioned one by one, fetched module by module and
// ahead of use along the order that the first pass recorded, and released when they are not used
// again soon. Rules: docs/lowering.md, section zero3.
//
// Example: a weight of 512 x 512 on 4 ranks is cut as a flat array: each rank keeps 65,536
// elements. zero3.cc has the memory of a rank, zero3_fetches.cc the fetches.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "schedule/lower/fetch_order.h"
#include "schedule/lower/zero_rules.h"

namespace shardwright {

class Zero3Rules : public ZeroRules {
 public:
  Zero3Rules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units);

  // The first pass records the order of fetches and neither prefetches nor keeps anything.
  [[nodiscard]] bool FirstStepDiffers() const override { return !InPlace(); }
  void BeginStep(bool first) override;
  void BeginMicroBatch(bool first, bool last) override;
  void PreForward(UnitId u, Phase phase) override;
  void PostForward(UnitId u, Phase phase) override;
  void PreBackward(UnitId u) override;
  void BackwardLeft(UnitId u, bool done) override;
  void GivenBack(std::span<const UnitId> units) override;
  void InRegion(std::uint32_t region, Phase phase) override;
  void EndForward() override;
  void EndBackward() override;
  void EndStep() override;

  BufferId ParameterStorage(UnitId u, std::uint32_t model_op) override;

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override;
  // Partitions of gradients are laid out as those of the weights, frozen ones included.
  [[nodiscard]] std::int64_t GradElements(const UnitInfo& unit) const override;
  void InitUnit(UnitId u) override;
  [[nodiscard]] std::vector<std::vector<UnitId>> UpdatedTogether() const override {
    return SubGroups(TrainableUnits());
  }
  void GradReady(std::uint32_t i, UnitId unit) override;
  void AddPart(Part part, BufferId grad) override;
  [[nodiscard]] bool ReducesAtOnce() const override { return true; }

 private:
  static constexpr std::uint32_t kNoFetch = 0xffffffffu;

  // One all-gather. Several parameters go through a flat buffer and are copied out, all of them
  // when the first of its units is waited for; since 0.6 a parameter alone is gathered into place.
  struct Fetch {
    std::vector<UnitId> units;
    BufferId flat;
    OpId gathered;
    std::size_t left = 0;  // units not waited for yet
    bool complete = false;
  };

  // A call of one of the unit's modules. Units that are parts of one, and have the module in
  // common, are called together; what is done then, is done once, with the last of them.
  struct Call {
    ModuleId module;
    bool hooked = false;  // some input needs a gradient
  };
  // The calls of a unit in the model's order, and where a pass is.
  struct Calls {
    std::vector<Call> all;
    std::vector<std::size_t> with_backward;  // which of `all`
    std::size_t next_forward = 0, next_backward = 0;
    std::int64_t regions_again = 0;  // of those that ran again, how many next_forward knows of
    std::vector<ModuleId> active;    // fetched and not released: they keep the parameters
  };
  // A module whose backward has been fetched for and not released, and the frozen units that it
  // keeps because a region ran again beneath it.
  struct Backward {
    ModuleId module;
    std::vector<UnitId> recomputed;
  };

  // One rank computes on its partitions, which are whole.
  [[nodiscard]] bool InPlace() const { return plan_.shard_size == 1 && !plan_.offload.parameters; }
  [[nodiscard]] bool Persists(UnitId u) const;
  [[nodiscard]] bool IsAway(UnitId u) { return !At(u).unsharded.valid(); }

  template <class T>
  static void AddOnce(std::vector<T>& list, T entry) {
    if (std::find(list.begin(), list.end(), entry) == list.end()) {
      list.push_back(entry);
    }
  }

  // zero3_calls.cc: which module is called.
  void CountNames();
  void FindCalls(const std::vector<ResolvedUnit>& units);
  [[nodiscard]] Calls& CallsOf(UnitId u);
  [[nodiscard]] const Call& NextForwardCall(UnitId u);
  [[nodiscard]] bool AllCalled(ModuleId module);
  void KeepRecomputed(ModuleId module);
  // zero3_fetches.cc: fetching and releasing.
  void FetchModule(ModuleId module, Phase phase);
  void ReleaseModule(ModuleId module);
  [[nodiscard]] bool IsUsedSoon(ModuleId module, UnitId u);
  void ReleaseBackward(ModuleId module);
  void ReleaseLeftovers();
  void Release(UnitId u);
  void GatherTogether(std::vector<UnitId> units, Phase phase);
  void Gather(const std::vector<UnitId>& units, Phase phase);
  [[nodiscard]] BufferId NewFlat(const std::vector<UnitId>& units, Bytes full, Phase phase);
  [[nodiscard]] BufferId NewGathered(Bytes full);
  [[nodiscard]] OpId LastComputeBefore(OpId op) const;
  [[nodiscard]] BufferId FromHost(UnitId u, Phase phase, bool direct);
  void CopyIn(std::span<const BufferId> parts, Bytes slice, BufferId flat, Emitter::Where where);
  void NewUnsharded(UnitId u, Phase phase);
  void Wait(UnitId u, Phase phase);
  void CopyOut(const Fetch& fetch, Phase phase);
  void WaitForCopies(Phase phase, UnitId u);
  void LimitHost(std::deque<OpId>& events, Phase phase, UnitId u);
  void FreeUnsharded(UnitId u);
  void EndPass(Phase phase);
  void GatherPersistent();

  // zero3_reductions.cc: reducing.
  [[nodiscard]] bool FitsBucket(std::int64_t elements) const {
    return plan_.zero.contiguous_gradients && elements_ + elements <= plan_.zero.reduce_bucket;
  }
  // Since 0.6 only what lies in the bucket is all-reduced, if that is asked for: without a bucket,
  // and of a gradient too large for it, parts are scattered (__reduce_and_partition_ipg_grads).
  [[nodiscard]] bool Scatters() const {
    return ScattersGradients(plan_) ||
           (!plan_.zero.before_deepspeed_0_6 &&
            (!plan_.zero.contiguous_gradients || elements_ > plan_.zero.reduce_bucket));
  }
  void FlushBefore(std::int64_t elements);
  void AddMember(const Member& member);
  void Flush();
  void FreeReduced();
  void ScatterMembers(Emitter::Where where);
  void UseMembers();
  [[nodiscard]] BufferId Scatter(BufferId input, Bytes full, Emitter::Where where);
  void StoreParts(BufferId out, Emitter::Where where);
  void AverageMembers();
  void Average(BufferId source, std::int64_t elements, std::span<const Member> members,
               UnitId unit);
  [[nodiscard]] BufferId Partition(UnitId u);
  void NewPartitions();
  void CountGradients();
  void SendWhatIsComplete();
  void SendToUpdate(UnitId u);

  // A unit's partition in the compute dtype.
  BufferId HoldShard(BufferId buffer, UnitId u) {
    return Hold(buffer, u, Holds::kShard, job_.precision.param);
  }

  // Makes the buffers, where they are on the device, slices of one flat tensor.
  void Flatten(std::span<const BufferId> buffers);
  void FlattenSubGroups(std::span<const BufferId> buffers);
  void FlattenPartitions();
  void NewBucket();

  // The update, one sub-group after the other.
  void Update();
  // Masters and states of the host's update are not page-locked.
  [[nodiscard]] std::vector<Bytes> HostBlocks(UnitId u, Category category) const override {
    return category == Category::kShardedGradient && grad_blocks_[u.value] > Bytes(0)
               ? std::vector{grad_blocks_[u.value]}
               : std::vector<Bytes>();
  }
  void PadHost();
  [[nodiscard]] std::vector<std::vector<UnitId>> SubGroups(std::span<const UnitId> units) const;
  void UpdateGroup(const std::vector<UnitId>& units, std::span<const BufferId> norms);
  void UpdateOnHost(const std::vector<UnitId>& units);

  Stream copy_ = Stream::kCopyIn, reduce_ = Stream::kReduce;
  // Whose pool gathered parameters come from: before 0.6 that of a stream of their own
  // (PartitionedParameterCoordinator's comm_stream).
  Stream storage_ = Stream::kCopyIn;
  std::vector<BufferId> low_;                  // per unit: partition in the compute dtype
  std::vector<Bytes> grad_blocks_;             // of a sub-group's first unit: its gradients' block
                                               // on the host, less what its other units have
  std::vector<BufferId> low_on_host_;          // per unit: the same, as the host's update casts it
  std::vector<BufferId> sums_on_host_;         // per unit: its gradient between micro-batches
  std::vector<std::int64_t> stored_;           // per unit: gradient elements reduced in this pass
  std::vector<std::int64_t> due_;              // per unit: those that a pass reduces
  std::vector<BufferId> persistent_;           // per unit: its weights, if they persist
  std::vector<Calls> calls_;                   // per unit
  std::int64_t regions_again_ = 0;             // that have run again
  std::uint32_t again_from_ = 0;               // the first op of the last one
  std::vector<std::vector<UnitId>> units_of_;  // per module that is called: whose parameters it has
  std::vector<std::size_t> names_;             // per module: how often it has its hooks
  std::vector<std::size_t> called_;            // per module: how many of them in this call
  std::vector<Backward> backward_;             // the one that was fetched for last at the end
  std::vector<int> hooks_left_;  // per module: ds_grads_remaining of its last forward call
  std::vector<Fetch> fetches_;   // of the step
  std::vector<std::uint32_t> fetch_of_;
  FetchOrder order_;
  // Per module, unit and next call: is the unit to be kept? Found in the first pass behind the
  // recorded one, and kept for good (__params_to_release has an lru_cache).
  std::map<std::tuple<ModuleId, UnitId, std::int64_t>, bool> used_soon_;
  std::deque<OpId> fetch_events_, reduce_events_;
  OpId copy_tail_;  // last op that the gather stream was given, and what compute has waited for
  OpId seen_tail_;
  BufferId bucket_;
  std::vector<Member> members_;  // of the open bucket
  // Gradients beside the last bucket. Before 0.6 each rank takes its part of them, and
  // they are gone, when the next one is reduced (partition_previous_reduced_grads).
  std::vector<BufferId> reduced_;
  std::int64_t elements_ = 0;
  OpId last_reduce_;
  std::uint32_t flat_tensors_ = 0;
};

}  // namespace shardwright
