#pragma once

// Keeps the outer choices of a search (mesh, batch, offload): each with its bound, and with the
// plans that were simulated for it.
//
// Example: shard 8 has a bound of 1.0 s, and its best plan so far takes 1.1 s. Shard 4 has a bound
// of 1.2 s: it becomes kPrunedTime, and none of its plans is simulated.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "planner/bounds.h"
#include "planner/evaluator.h"
#include "planner/local.h"
#include "planner/measure.h"
#include "planner/search.h"
#include "planner/space.h"
#include "planner/stage_parts.h"

namespace shardwright {

struct Branch {
  OuterChoice outer;
  OuterBound bound;
  CandidateStatus status = CandidateStatus::kNotTried;
  std::unique_ptr<LocalSearch> local;  // once plans were looked for

  // The fastest plan that fits the aim; null: there is none, or none was looked for.
  [[nodiscard]] const Evaluated* best() const { return local == nullptr ? nullptr : local->best(); }
};

class Branches {
 public:
  using List = std::vector<std::size_t>;

  // Finds the bounds. All arguments must outlive it.
  Branches(const Problem& input, const SearchOptions& options, const Limits& limits,
           Workers& workers);

  [[nodiscard]] const Space& space() const { return space_; }
  [[nodiscard]] Branch& operator[](std::size_t i) { return branches_[i]; }
  [[nodiscard]] const Branch& operator[](std::size_t i) const { return branches_[i]; }
  // In the order of the space.
  [[nodiscard]] auto begin() const { return branches_.begin(); }
  [[nodiscard]] auto end() const { return branches_.end(); }
  [[nodiscard]] std::size_t size() const { return branches_.size(); }
  // All, the least bound first.
  [[nodiscard]] const List& order() const { return order_; }
  // Those of a status, in that order.
  [[nodiscard]] List With(CandidateStatus status) const;
  // The one with this outer choice; null: the space has none.
  [[nodiscard]] const Branch* Of(const Plan& plan) const;

  // Plans seeded from now on are fitted to so much device memory.
  void AimAt(Bytes device) { aim_.device = device; }
  [[nodiscard]] Bytes aim() const { return aim_.device; }
  // Of plans that are fitted to that.
  [[nodiscard]] std::vector<OuterBound> BoundsAtAim(const List& list) const {
    return BoundsOf(list, aim_);
  }
  // Looks for the first plans of each.
  void Seed(const List& list);
  // Improves the best ones, with so many simulations for each.
  void Refine(const List& list, std::int64_t effort);
  void TryUniform(const List& list, bool thoroughly);
  // None is seeded yet, but what was simulated is known.
  void Restart();

  // The quantity that the objective minimises, of a plan and as the bound of a branch.
  [[nodiscard]] double CostOf(const Outcome& outcome) const;
  [[nodiscard]] double BoundOf(const Branch& branch) const;
  // Of the best plan so far that offloads at most so many things; infinite without one.
  [[nodiscard]] double Incumbent(int offloads = kMostOffloads) const;
  // No plan of the branch would be chosen: it is slower than the best one so far, or not faster by
  // the tie than one that offloads less.
  [[nodiscard]] bool IsHopeless(const Branch& branch) const;
  // Over all branches that may hold a plan that fits.
  [[nodiscard]] Seconds LowerBound() const;

  // A candidate with the fields that all plans of a branch share.
  [[nodiscard]] Candidate CandidateOf(const Branch& branch) const;
  // All plans that were looked at; of a branch without any what they would share.
  void Append(const Branch& branch, std::vector<Candidate>& candidates) const;
  // Why the dialect cannot express the first plan that was looked at; empty if it can express one.
  [[nodiscard]] std::string Refusal() const;

 private:
  [[nodiscard]] std::vector<OuterBound> BoundsOf(const List& list, const Limits& limits) const;
  // Of the whole job, or of a pipeline's rank (`part`).
  void AddBounds(const List& list, const Limits& limits, const StagePart* part,
                 std::vector<OuterBound>& result) const;

  const Problem& in_;
  const SearchOptions& options_;
  Limits limits_;
  Limits aim_;
  Workers& workers_;
  Space space_;
  std::map<std::int64_t, Measured> measured_;  // by micro-batch
  std::vector<StagePart> parts_;               // of a pipeline
  std::vector<Branch> branches_;
  List order_;
};

}  // namespace shardwright
