#include "analysis/internal/hang_guide.h"

#include <cstddef>
#include <string>
#include <utility>

#include "core/ranges.h"
#include "topologies/mesh.h"

namespace shardwright::internal {
namespace {

// How far ahead it is looked for what a rank went on with.
constexpr std::size_t kMostAhead = 4096;

// Gloo's all-reduce of a reduce-scatter is known by its frames, which JSON lacks, or by the plan.
void RenameReductions(const std::vector<HangCall>& step, GroupCalls& group) {
  for (RankCalls& member : group.members) {
    for (HangCall& call : member.calls) {
      HangCall scatter = call;
      scatter.op = "reduce-scatter";
      if (call.op == "all-reduce" && call.phase == HangPhase::kUnknown && !IsInStep(step, call) &&
          IsInStep(step, scatter)) {
        call.op = scatter.op;
      }
    }
  }
}

// Of the last calls.
double PlannedShare(const std::vector<HangCall>& step, const GroupCalls& group) {
  constexpr std::ptrdiff_t kEnough = 200;
  std::ptrdiff_t planned = 0, seen = 0;
  for (const RankCalls& member : group.members) {
    for (auto call = member.calls.rbegin(); call != member.calls.rend() && seen < kEnough; ++call) {
      ++seen;
      planned += IsInStep(step, *call) ? 1 : 0;
    }
  }
  return seen == 0 ? 0.0 : static_cast<double>(planned) / static_cast<double>(seen);
}

void AddNames(HangCall& named, const HangCall& planned, std::int64_t step, bool is_first) {
  for (const std::string& unit : planned.units) {
    if (!IsIn(named.units, unit)) {
      named.units.push_back(unit);
    }
  }
  if (named.phase == HangPhase::kUnknown) {
    named.phase = planned.phase;
  }
  named.micro_batch =
      is_first || named.micro_batch == planned.micro_batch ? planned.micro_batch : -1;
  named.step = is_first || named.step == step ? step : -1;
  named.place = is_first ? planned.place : named.place;
}

}  // namespace

void AssignRanks(const Program& program, GroupCalls& group) {
  double best = 0.0;
  std::vector<std::int64_t> ranks;
  for (const Group& planned : program.groups) {
    const std::vector<std::int64_t> around = MembersOf(planned, group.members[0].rank);
    const bool has_all = AllOf(group.members, [&](const RankCalls& member) {
      return std::binary_search(around.begin(), around.end(), member.rank);
    });
    if (planned.size < 2 || !has_all) {
      continue;
    }
    GroupCalls renamed = group;
    const std::vector<HangCall> step = StepOf(program, around);
    RenameReductions(step, renamed);
    if (const double share = PlannedShare(step, renamed); share > best) {
      best = share;
      ranks = around;
    }
  }
  if (!ranks.empty()) {
    group.ranks = std::move(ranks);
  }
}

HangGuide::HangGuide(const Program* program, GroupCalls& group, bool from_start)
    : from_start_(from_start) {
  if (program == nullptr) {
    return;
  }
  step_ = StepOf(*program, group.ranks);
  RenameReductions(step_, group);
  constexpr double kMost = 0.5;
  if (PlannedShare(step_, group) <= kMost) {
    step_.clear();
  }
}

std::vector<StepPlace> HangGuide::Places(std::span<const HangCall> before) const {
  return PlacesAfter(step_, before, from_start_);
}

HangCall HangGuide::Named(const HangCall& call, std::span<const HangCall> before) const {
  HangCall named = call;
  if (step_.empty()) {
    return named;
  }
  bool is_first = true;
  for (const StepPlace& place : Places(before)) {
    const HangCall& planned = step_[place.index];
    if (!AreAlike(planned, call)) {
      continue;
    }
    AddNames(named, planned, place.step, is_first);
    is_first = false;
  }
  return named;
}

std::vector<HangCall> HangGuide::Ahead(std::span<const HangCall> calls) const {
  std::vector<HangCall> ahead;
  if (step_.empty()) {
    return ContinuationOf(calls, std::min(calls.size() + 1, kMostAhead));
  }
  const StepPlace place = Places(calls).front();
  for (std::size_t k = 0; k < std::min(step_.size(), kMostAhead); ++k) {
    HangCall call = step_[(place.index + k) % step_.size()];
    call.step = place.step < 0
                    ? -1
                    : place.step + static_cast<std::int64_t>((place.index + k) / step_.size());
    ahead.push_back(std::move(call));
  }
  return ahead;
}

}  // namespace shardwright::internal
