// Searches against all plans of small jobs.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/search.h"
#include "tests/planner/random_jobs.h"
#include "tests/sanitizers.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

using testing::Case;
using testing::Draw;
using testing::DrawCase;
using testing::ForEachPlan;
using testing::IsDeep;
using testing::NativeSearch;
using testing::Simulated;
using testing::SimulatePlan;

std::string WordsOf(const Plan& plan) {
  std::string text =
      "shard " + std::to_string(plan.shard_size) + " micro " + std::to_string(plan.micro_batch) +
      " sync " + std::to_string(static_cast<int>(plan.sync)) + " in flight " +
      std::to_string(plan.in_flight) + (plan.transfers == Transfers::kInTurn ? " in turn" : "") +
      " recompute " + std::to_string(plan.recompute.size()) + " units";
  for (const UnitPlan& unit : plan.units) {
    text += " " + unit.name + "*" + std::to_string(unit.modules.size()) +
            (unit.reshard.kind == Reshard::Kind::kNever ? "k" : "");
  }
  return text;
}

// How much slower than the fastest of all plans of random job `i` the search's fastest is.
double SlowerThanAll(int i, int most_blocks) {
  CAPTURE(i);
  std::mt19937 random(static_cast<unsigned>(i));
  const int blocks = static_cast<int>(Draw(random, 2, most_blocks));
  const Case c = DrawCase(random, blocks);
  std::vector<Simulated> all;
  std::vector<Plan> plans;
  for (const bool moments : {false, true}) {
    ForEachPlan(c, blocks, moments, [&](const Plan& plan) {
      all.push_back(SimulatePlan(c, plan));
      plans.push_back(plan);
    });
  }
  SearchOptions options = NativeSearch(c);
  // Between the least memory of all plans and the most; of those with moments on the device (the
  // first half), since pieces of the others may need more in the arena.
  const auto [least, most] = std::minmax_element(
      all.begin(), all.begin() + std::ssize(all) / 2,
      [](const Simulated& x, const Simulated& y) { return x.memory < y.memory; });
  options.memory_limit =
      least->memory + Bytes((most->memory - least->memory).value * Draw(random, 1, 4) / 3);
  double best = INFINITY;
  for (const Simulated& s : all) {
    best = s.memory <= options.memory_limit ? std::min(best, s.seconds) : best;
  }
  const SearchResult result = Search(c, options);
  REQUIRE(result.is_feasible);
  CHECK(result.lower_bound.value <= best * (1 + 1e-9));
  CHECK(result.best.step_time.value * (1 - result.proven_gap) <= best * (1 + 1e-9));
  double fastest = INFINITY;
  for (const Candidate& candidate : result.candidates) {
    if (candidate.status == CandidateStatus::kFits) {
      fastest = std::min(fastest, candidate.step_time.value);
    }
  }
  CHECK(result.best.step_time.value <= fastest * (1 + options.tie) * (1 + 1e-9));
  for (std::size_t p = 0; p < all.size() && fastest > best * (1 + options.tie); ++p) {
    if (all[p].seconds == best && all[p].memory <= options.memory_limit) {
      MESSAGE("job " << i << " slower by " << fastest / best - 1 << " (gap " << result.proven_gap
                     << ") than " << WordsOf(plans[p]) << "; found " << WordsOf(result.best.plan));
      break;
    }
  }
  return fastest / best - 1;
}

TEST_CASE("Search is as fast as exhaustive enumeration, or within the gap it proves") {
  const int count = IsDeep() ? 300 : testing::kHasSanitizer ? 2 : 4;
  int equal = 0;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    const double slower = SlowerThanAll(i, IsDeep() ? 7 : 4);
    equal += slower <= 1e-9 ? 1 : 0;
    worst = std::max(worst, slower);
  }
  MESSAGE("as fast as enumeration or faster in " << equal << " of " << count
                                                 << " jobs; at worst slower by " << worst);
}

// Here one program in four sets of words is the fastest, and its arena does not fit. Once one was
// refused the others still counted as plans that fit, and were measured in place of others.
TEST_CASE("What does not fit does not fit in other words either") {
  (void)SlowerThanAll(45, 7);
}

// Equal blocks: each unit has as many of them, but for a shorter last one, and all keep and free
// alike.
bool IsSymmetric(const Plan& plan, int blocks) {
  std::size_t most = 0;
  std::size_t count = 0;
  std::size_t last = 0;
  for (const UnitPlan& unit : plan.units) {
    const bool is_block = unit.modules.front().starts_with("block");
    if (is_block && count > 0 && (last < most || unit.modules.size() > most)) {
      return false;
    }
    last = is_block ? unit.modules.size() : last;
    count += is_block ? 1 : 0;
    most = std::max(most, is_block ? unit.modules.size() : 0);
  }
  const std::size_t full = most == 0 ? 0 : (static_cast<std::size_t>(blocks) + most - 1) / most;
  return count == full && (plan.recompute.empty() ||
                           std::ssize(plan.recompute) == static_cast<std::ptrdiff_t>(blocks));
}

TEST_CASE("Symmetric layers get symmetric plans unless asymmetry pays more than the tie") {
  int asymmetric = 0, refuted = 0;
  const int count = IsDeep() ? 50 : testing::kHasSanitizer ? 2 : 3;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(50 + i));
    constexpr int kBlocks = 4;
    const Case c = DrawCase(random, kBlocks);
    SearchOptions options = NativeSearch(c);
    options.fixed.offload = true;
    const SearchResult result = Search(c, options);
    REQUIRE(result.is_feasible);
    if (IsSymmetric(result.best.plan, kBlocks)) {
      continue;
    }
    ++asymmetric;
    // All symmetric plans: units of equal size, resharding and checkpointing alike in all of them.
    double fastest = INFINITY;
    Plan symmetric;
    ForEachPlan(c, kBlocks, false, [&](const Plan& plan) {
      if (IsSymmetric(plan, kBlocks)) {
        const Simulated s = SimulatePlan(c, plan);
        if (s.memory <= result.memory_limit && s.seconds < fastest) {
          fastest = s.seconds;
          symmetric = plan;
        }
      }
    });
    if (result.best.step_time.value >= fastest * (1 - options.tie)) {
      ++refuted;
      MESSAGE("job " << i << ": " << WordsOf(result.best.plan) << " takes "
                     << result.best.step_time.value / fastest << " of " << WordsOf(symmetric));
    }
    for (const Candidate& candidate : result.candidates) {
      if (candidate.status == CandidateStatus::kFits && IsSymmetric(candidate.plan, kBlocks)) {
        CHECK(candidate.step_time > result.best.step_time);
      }
    }
  }
  MESSAGE(asymmetric << " of " << count << " plans are asymmetric, " << refuted
                     << " of them pay less than the tie against all symmetric plans");
  CHECK(refuted == 0);
}

// Another link or the memory each time.
void ScaleBandwidth(Case& c, int which, double factor) {
  const std::vector<std::string> levels = LinkLevels(c.cluster);
  const auto index = static_cast<std::size_t>(which) % (levels.size() + 1);
  if (index < levels.size()) {
    ScaleLinks(c.cluster, levels[index], factor, "test");
  } else {
    c.cluster.gpu.memory_bandwidth.value =
        BytesPerSecond(c.cluster.gpu.memory_bandwidth.value.value * factor);
  }
}

TEST_CASE("A change of a bandwidth by 0.1 % keeps the plan, or gains a percent") {
  const int count = IsDeep() ? 100 : testing::kHasSanitizer ? 1 : 4;
  int flips = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(80 + i));
    Case c = DrawCase(random, 3);
    SearchOptions options = NativeSearch(c);
    const SearchResult before = Search(c, options);
    ScaleBandwidth(c, i, 1.001);
    REQUIRE(before.is_feasible);
    options.previous = &before.best.plan;
    const SearchResult after = Search(c, options);
    REQUIRE(after.is_feasible);
    if (after.best.plan == before.best.plan) {
      continue;
    }
    ++flips;
    const Simulated old = SimulatePlan(c, before.best.plan);
    CHECK(after.best.step_time.value * (1 + options.tie) <= old.seconds);
  }
  MESSAGE(flips << " of " << count << " plans changed");
}

}  // namespace
}  // namespace shardwright
