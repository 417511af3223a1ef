#pragma once

// What the plan says of the collectives of a process group.

#include <span>
#include <vector>

#include "analysis/hang.h"
#include "analysis/internal/hang_calls.h"
#include "analysis/internal/hang_order.h"
#include "schedule/program.h"

namespace shardwright::internal {

// Gives a group whose ranks no dump names those of the group of the plan that its members are in
// and whose step has most of its calls.
void AssignRanks(const Program& program, GroupCalls& group);

class HangGuide {
 public:
  // `program` null, or one whose step has little of what the group did (a group for other things
  // that has the same ranks): there is no plan. Calls of `group` that the plan knows under another
  // name get that one.
  HangGuide(const Program* program, GroupCalls& group, bool from_start);

  [[nodiscard]] bool HasPlan() const { return !step_.empty(); }
  [[nodiscard]] const std::vector<HangCall>& step() const { return step_; }

  // Where a rank is after these; requires a plan.
  [[nodiscard]] std::vector<StepPlace> Places(std::span<const HangCall> before) const;
  // `call` with what the plan says of it, if it is what the plan has behind `before`.
  [[nodiscard]] HangCall Named(const HangCall& call, std::span<const HangCall> before) const;
  // What is to come after `calls`: by the plan, or as it came before.
  [[nodiscard]] std::vector<HangCall> Ahead(std::span<const HangCall> calls) const;

 private:
  bool from_start_;
  std::vector<HangCall> step_;
};

}  // namespace shardwright::internal
