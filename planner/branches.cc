// The outer choices of a search, each with its bound and the plans simulated for it.
//
// Example: 40 branches, of which 10 lack memory. The other 30 have bounds from 1.00 to 2.50 s.
// Seeding the first 8 finds a plan of 1.10 s. With a tie of 1 % every branch with a bound above
// 1.111 s is then hopeless, and none of its plans is simulated.
//
// Cost: one measurement per micro-batch and one linear program per branch, both on all threads.
// Branches with one mesh share the rows of the program, which are the larger part of it.

#include "planner/branches.h"

#include <cmath>
#include <tuple>
#include <utility>

#include "core/ranges.h"

namespace shardwright {
namespace {

// Bounds are taken over a few rates of transfers out of a continuum; where transfers share links,
// this much may be missed between.
constexpr double kBoundSlack = 2e-4;

}  // namespace

Branches::Branches(const Problem& input, const SearchOptions& options, const Limits& limits,
                   Workers& workers)
    : in_(input),
      options_(options),
      limits_(limits),
      aim_(limits),
      workers_(workers),
      space_(MakeSpace(input, options)) {
  List sizes;
  for (const OuterChoice& outer : space_.outer) {
    order_.push_back(branches_.size());
    branches_.push_back({outer, {}, CandidateStatus::kNotTried, nullptr});
    if (measured_.try_emplace(outer.micro_batch).second) {
      sizes.push_back(static_cast<std::size_t>(outer.micro_batch));
    }
  }
  workers_.ForEach(sizes.size(), [&](std::size_t i, Evaluator&) {
    const auto size = static_cast<std::int64_t>(sizes[i]);
    measured_.at(size) = Measure(in_, options_, space_, size);
  });
  if (options.base.pipeline_size > 1) {
    parts_ = StageParts(input, options, space_, workers);
  }
  const std::vector<OuterBound> bounds = BoundsOf(order_, limits_);
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    branches_[i].bound = bounds[i];
    if (bounds[i].deficit > Bytes(0)) {
      branches_[i].status = CandidateStatus::kPrunedMemory;
    }
  }
  StableSort(order_, [&](std::size_t x, std::size_t y) {
    return BoundOf(branches_[x]) < BoundOf(branches_[y]);
  });
}

// Bounds under `limits`. With a lower memory limit they rise, since the program then has to pay for
// recomputation.
std::vector<OuterBound> Branches::BoundsOf(const List& list, const Limits& limits) const {
  std::vector<OuterBound> result(list.size());
  if (parts_.empty()) {
    AddBounds(list, limits, nullptr, result);
  }
  for (const StagePart& part : parts_) {
    AddBounds(list, limits, &part, result);
  }
  return result;
}

void Branches::AddBounds(const List& list, const Limits& limits, const StagePart* part,
                         std::vector<OuterBound>& result) const {
  const Bounds bounds(part == nullptr ? in_ : part->problem, options_, limits);
  // Branches with the same mesh share what their transfers do to kernels.
  std::map<std::tuple<std::int64_t, bool, bool>, List> groups;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const OuterChoice& outer = branches_[list[i]].outer;
    groups[{outer.shard_size, outer.offload.activations, outer.offload.moments}].push_back(i);
  }
  std::vector<List> tasks;
  for (auto& [key, group] : groups) {
    tasks.push_back(std::move(group));
  }
  workers_.ForEach(tasks.size(), [&](std::size_t t, Evaluator&) {
    const Occupancy occupancy = bounds.OccupancyOf(branches_[list[tasks[t].front()]].outer);
    for (const std::size_t i : tasks[t]) {
      const OuterChoice& outer = branches_[list[i]].outer;
      const std::int64_t size = outer.micro_batch;
      const OuterBound bound = part == nullptr ? bounds.Of(outer, measured_.at(size), occupancy)
                                               : bounds.Of(outer, part->measured.at(size),
                                                           occupancy, part->bubble.at(size));
      OuterBound& most = result[i];
      most.time = std::max(most.time, bound.time * (1 - kBoundSlack));
      most.memory = std::max(most.memory, bound.memory);
      most.memory_at_turn = std::max(most.memory_at_turn, bound.memory_at_turn);
      most.deficit = std::max(most.deficit, bound.deficit);
    }
  });
}

Branches::List Branches::With(CandidateStatus status) const {
  List list;
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(list),
               [&](std::size_t i) { return branches_[i].status == status; });
  return list;
}

const Branch* Branches::Of(const Plan& plan) const {
  const auto found = FindIf(branches_, [&](const Branch& b) { return Is(b.outer, plan); });
  return found == branches_.end() ? nullptr : &*found;
}

void Branches::Seed(const List& list) {
  workers_.ForEach(list.size(), [&](std::size_t i, Evaluator& evaluator) {
    Branch& branch = branches_[list[i]];
    branch.status = CandidateStatus::kFits;
    if (branch.local == nullptr) {
      const Measured& measured = measured_.at(branch.outer.micro_batch);
      branch.local =
          std::make_unique<LocalSearch>(in_, options_, space_, measured, branch.outer, limits_);
    }
    branch.local->AimAt(aim_);
    branch.local->Seed(evaluator);
  });
}

void Branches::Refine(const List& list, std::int64_t effort) {
  workers_.ForEach(list.size(), [&](std::size_t i, Evaluator& evaluator) {
    LocalSearch& local = *branches_[list[i]].local;
    local.Refine(evaluator, effort);
    local.TrySymmetric(evaluator);
  });
}

void Branches::TryUniform(const List& list, bool thoroughly) {
  workers_.ForEach(list.size(), [&](std::size_t i, Evaluator& evaluator) {
    branches_[list[i]].local->TryUniform(evaluator, thoroughly);
  });
}

void Branches::Restart() {
  for (Branch& branch : branches_) {
    if (branch.local != nullptr) {
      branch.local->AimAt(aim_);
    }
    if (branch.status != CandidateStatus::kPrunedMemory) {
      branch.status = CandidateStatus::kNotTried;
    }
  }
}

double Branches::CostOf(const Outcome& outcome) const {
  return options_.objective == Objective::kMemory ? static_cast<double>(outcome.Memory().value)
                                                  : outcome.step_time.value;
}

double Branches::BoundOf(const Branch& branch) const {
  return options_.objective == Objective::kMemory ? static_cast<double>(branch.bound.memory.value)
                                                  : branch.bound.time.value;
}

double Branches::Incumbent(int offloads) const {
  double best = INFINITY;
  for (const Branch& branch : branches_) {
    if (branch.best() != nullptr && CountOf(branch.outer.offload) <= offloads) {
      best = std::min(best, CostOf(branch.best()->outcome));
    }
  }
  return best;
}

bool Branches::IsHopeless(const Branch& branch) const {
  const double tie = 1 + options_.tie;
  const bool has_ties = options_.objective != Objective::kMemory;
  const int fewer = CountOf(branch.outer.offload) - 1;
  return BoundOf(branch) > Incumbent() * tie ||
         (has_ties && BoundOf(branch) * tie > Incumbent(fewer));
}

Seconds Branches::LowerBound() const {
  double least = INFINITY;
  for (const Branch& branch : branches_) {
    if (branch.status != CandidateStatus::kPrunedMemory) {
      least = std::min(least, branch.bound.time.value);
    }
  }
  return Seconds(std::isfinite(least) ? least : 0.0);
}

Candidate Branches::CandidateOf(const Branch& branch) const {
  Candidate c;
  c.family = FamilyName(branch.outer, options_);
  c.bound = branch.bound.time;
  c.memory_bound = branch.bound.memory;
  c.deficit = branch.bound.deficit;
  c.status = branch.status;
  return c;
}

// A branch that was simulated gives one candidate per plan, any other branch one candidate without
// a plan's units.
void Branches::Append(const Branch& branch, std::vector<Candidate>& candidates) const {
  Candidate c = CandidateOf(branch);
  if (branch.local == nullptr) {
    c.plan = OuterPlan(branch.outer, options_);
    c.label = LabelOf(branch.outer);
    candidates.push_back(std::move(c));
    return;
  }
  for (const Evaluated& e : branch.local->evaluated()) {
    if (e.outcome.is_allowed) {
      c.plan = branch.local->PlanOf(e.inner);
      c.label = branch.local->LabelOf(e.inner);
      SetOutcome(e.outcome, limits_, c);
      candidates.push_back(c);
    }
  }
}

std::string Branches::Refusal() const {
  std::string first;
  for (const std::size_t i : order_) {
    if (branches_[i].local == nullptr) {
      continue;
    }
    for (const Evaluated& e : branches_[i].local->evaluated()) {
      if (e.outcome.is_allowed) {
        return "";
      }
      first = first.empty() ? e.outcome.refusal : first;
    }
  }
  return first;
}

}  // namespace shardwright
