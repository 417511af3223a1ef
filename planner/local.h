#pragma once

// Searches for the best plan of one mesh, batch and offload: checkpointing is fitted to the memory
// that is left, then units, resharding, prefetch and checkpointing are improved one at a time.
//
// Example of checkpointing, with 4 blocks: pattern "mlp" saves 1 GiB of a block for 10 ms, "full"
// saves 3 GiB for 40 ms. The ladder has 8 steps. At step 4 all blocks have "mlp" and 4 GiB are
// saved, at step 5 the first block has "full" and 6 GiB are. If 5 GiB are missing, step 5 is taken.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "planner/bounds.h"
#include "planner/evaluator.h"
#include "planner/measure.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"

namespace shardwright {

// Patterns that no mixture of two others beats in both memory and time, from the fastest to the one
// with the least memory. A mixture is a number of steps along them: after n blocks x k steps all
// blocks have pattern k; one step more moves the first block on.
class MixLadder {
 public:
  // `offloads`: activations live on the host.
  MixLadder(const Space& space, const Measured& measured, bool offloads);

  [[nodiscard]] std::size_t steps() const { return blocks_ * (patterns_.size() - 1); }
  [[nodiscard]] std::size_t blocks() const { return blocks_; }
  // Bytes that `step` keeps less than step 0.
  [[nodiscard]] double Saved(std::size_t step) const;
  // No step takes so many bytes less than `step`; infinite where some blocks were not measured.
  [[nodiscard]] double MostSavedFrom(std::size_t step) const;
  // The first step that saves at least so much; steps() if none does.
  [[nodiscard]] std::size_t StepSaving(double bytes) const;
  // The first step that copies at least so much less to the host than `step`; steps() if none does.
  [[nodiscard]] std::size_t StepCopyingLess(std::size_t step, double bytes) const;
  // The step at which forward and backward are fastest when each lasts as long as the slower of its
  // kernels and its copies of offloaded activations.
  struct Phases {
    double forward = 0, backward = 0;                     // seconds without checkpointing
    double to_host_per_byte = 0, to_device_per_byte = 0;  // seconds
  };
  [[nodiscard]] std::size_t BestStep(const Phases& phases) const;
  [[nodiscard]] std::vector<RecomputeRegion> Regions(const Space& space, std::size_t step) const;
  [[nodiscard]] std::string Label(const Space& space, std::size_t step) const;

 private:
  [[nodiscard]] double At(const std::vector<double>& by_pattern, std::size_t step) const;
  // Of `extra` blocks that take the next pattern: with copies spread over all, since each layer
  // waits for those of the last but one, else the first ones, whose memory is held the longest.
  [[nodiscard]] bool IsExtra(std::size_t block, std::size_t extra) const;

  std::size_t blocks_ = 0;
  bool spreads_ = false;
  bool is_whole_ = false;  // all blocks were measured
  // By pattern of the ladder, per block on average.
  std::vector<std::size_t> patterns_;
  std::vector<double> saved_;    // device bytes
  std::vector<double> copied_;   // bytes to the host
  std::vector<double> seconds_;  // more than without checkpointing
};

struct InnerChoice {
  std::vector<UnitPlan> units;
  std::string units_label;
  std::string reshard_label;
  std::string prefetch_label;
  std::int64_t in_flight = 2;
  Transfers transfers = Transfers::kAtOnce;                     // native
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;  // fsdp1
  bool forward_prefetch = false;                                // fsdp1
  std::size_t mix = 0;                                          // step on the ladder

  bool operator==(const InnerChoice&) const = default;
};

struct Evaluated {
  InnerChoice inner;
  Outcome outcome;
  CandidateStatus status = CandidateStatus::kFits;
  Bytes deficit;
};

class LocalSearch {
 public:
  // All references must outlive it. Plans have no time where they break `limits`.
  LocalSearch(const Problem& input, const SearchOptions& options, const Space& space,
              const Measured& measured, const OuterChoice& outer, const Limits& limits);

  // From now on plans are fitted to `aim`, at most the limits; the best one is to be found again.
  void AimAt(const Limits& aim);

  // Evaluates the first units and fits checkpointing to the limits.
  void Seed(Evaluator& evaluator);
  // Tries changes until none helps or `effort` plans were simulated. `stop` ends it early.
  void Refine(Evaluator& evaluator, std::int64_t effort);

  // Evaluates the best plan with the same checkpointing in all blocks, rounded towards less memory.
  void TrySymmetric(Evaluator& evaluator);

  // Evaluates the best plan with each cut that treats all blocks alike, and all units freed alike;
  // `thoroughly`: with each order of transfers, too.
  void TryUniform(Evaluator& evaluator, bool thoroughly);

  [[nodiscard]] const std::vector<Evaluated>& evaluated() const { return evaluated_; }
  // The fastest that fits the aim; null: none does.
  [[nodiscard]] const Evaluated* best() const;
  [[nodiscard]] Plan PlanOf(const InnerChoice& inner) const;
  [[nodiscard]] std::string LabelOf(const InnerChoice& inner) const;

 private:
  static constexpr std::size_t kNoIndex = static_cast<std::size_t>(-1);

  [[nodiscard]] static std::string NameOfReshard(const Reshard& reshard);
  const Evaluated& Evaluate(Evaluator& evaluator, const InnerChoice& inner);
  // Evaluates `inner` with as little checkpointing as fits, starting from its mix; returns the
  // index of the best that fits or of the last one tried.
  std::size_t Fit(Evaluator& evaluator, InnerChoice inner);
  // Gives `inner` the first units that the dialect can have, without checkpointing where none can
  // have its own.
  void TakeAllowed(Evaluator& evaluator, InnerChoice& inner);
  [[nodiscard]] bool IsStopped() const;
  // Fits `inner`; true if it is better than the best so far.
  bool Try(Evaluator& evaluator, const InnerChoice& inner);
  void TryFamilies(Evaluator& evaluator);
  void TryReshards(Evaluator& evaluator);
  [[nodiscard]] InnerChoice Keeping(std::size_t count) const;
  void TryKeeping(Evaluator& evaluator);
  void TryInFlight(Evaluator& evaluator);
  void TryTransfers(Evaluator& evaluator);
  [[nodiscard]] std::vector<InnerChoice> OtherOrders(const std::vector<InnerChoice>& choices) const;
  void TryPrefetch(Evaluator& evaluator);
  void TryMixes(Evaluator& evaluator);
  void TryMix(Evaluator& evaluator, std::size_t mix);
  [[nodiscard]] std::vector<UnitPlan> Items() const;
  void TryPartitions(Evaluator& evaluator);
  void TryPartition(Evaluator& evaluator, const std::vector<UnitPlan>& items, std::uint64_t cuts);

  const Problem& in_;
  const SearchOptions& options_;
  const Space& space_;
  const DialectFacts& facts_;
  OuterChoice outer_;
  Limits limits_;
  Limits aim_;
  MixLadder ladder_;
  std::size_t first_mix_ = 0;
  std::vector<Evaluated> evaluated_;
  std::size_t best_ = kNoIndex;
  std::int64_t effort_ = 0;  // plans that may still be simulated
};

}  // namespace shardwright
