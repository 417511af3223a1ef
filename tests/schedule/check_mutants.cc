#include "tests/schedule/check_mutants.h"

#include <array>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/verify.h"
#include "tests/schedule/brute_force.h"

namespace shardwright {
namespace {

// Does the finding name what docs/execution_model.md promises?
void CheckNames(const Finding& finding, Mutation mutation) {
  CHECK(!finding.second.empty());
  CHECK(!finding.text.empty());
  if (finding.rule == 1) {
    return;
  }
  CHECK(!finding.buffer.empty());
  CHECK(!finding.first.empty());
  // Where a point was dropped there may be no other op: nothing allocates, nothing writes.
  if (mutation != Mutation::kDropPoint && mutation != Mutation::kDuplicatePoint) {
    CHECK(finding.first != "(none)");
  }
}

void CheckMutant(const Mutant& mutant, MutantCounts& counts) {
  CAPTURE(mutant.what);
  const std::set<int> broken = BruteForceBrokenRules(mutant.program);
  const std::vector<Finding> findings = Verify(mutant.program);
  CHECK(findings.empty() == broken.empty());
  ++(broken.empty() ? counts.legal : counts.illegal)[mutant.mutation];
  std::set<int> rules;
  for (const Finding& finding : findings) {
    CAPTURE(finding.text);
    CheckNames(finding, mutant.mutation);
    rules.insert(finding.rule);
    CHECK(broken.count(finding.rule) == 1);
  }
  // Where a life begins or ends at the wrong place, the page does not say to which life the
  // accesses belong that follow; then only the verdict is compared.
  if (findings.size() < kMaxFindings && broken.count(2) + broken.count(3) == 0) {
    CHECK(rules == broken);
  }
}

}  // namespace

std::string MutantCounts::Text() const {
  const char* const names[] = {"edges",          "events",         "waits",
                               "frees moved",    "points dropped", "points doubled",
                               "buffers shrunk", "sides switched"};
  std::string text;
  for (int m = 0; m <= static_cast<int>(Mutation::kSwitchSide); ++m) {
    const auto count = [&](const std::map<Mutation, std::size_t>& of) {
      const auto found = of.find(static_cast<Mutation>(m));
      return std::to_string(found == of.end() ? 0 : found->second);
    };
    text +=
        std::string(names[m]) + ": " + count(illegal) + " illegal, " + count(legal) + " legal; ";
  }
  return text + "swaps: " + std::to_string(swaps_illegal_alone) + " illegal alone, " +
         std::to_string(swaps_illegal_together) + " illegal together, " +
         std::to_string(swaps_legal) + " legal";
}

void CheckMutants(const Program& program, MutantCounts& counts, std::size_t stride) {
  for (const Finding& finding : Verify(program)) {
    FAIL_CHECK(finding.text);
  }
  CHECK(BruteForceBrokenRules(program).empty());
  std::size_t number = 0;
  ForEachMutant(program, [&](const Mutant& mutant) {
    if (number++ % stride == 0) {
      CheckMutant(mutant, counts);
    }
  });
  ForEachSwappedPair(program, [&](const Program& mutant, const std::string& what) {
    if (number++ % stride != 0) {
      return;
    }
    CAPTURE(what);
    const std::array<const Program*, 2> ranks = {&program, &mutant};
    const bool is_legal_alone = BruteForceBrokenRules(mutant).empty();
    const bool is_legal = is_legal_alone && BruteForceRanksAgree(ranks);
    const std::vector<Finding> findings = VerifyRanks(ranks);
    CAPTURE((findings.empty() ? std::string() : findings.front().text));
    CHECK(findings.empty() == is_legal);
    ++(is_legal         ? counts.swaps_legal
       : is_legal_alone ? counts.swaps_illegal_together
                        : counts.swaps_illegal_alone);
  });
}

}  // namespace shardwright
