#include "analysis/hang.h"

#include <array>
#include <cmath>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "analysis/internal/hang_calls.h"
#include "analysis/internal/hang_group.h"
#include "analysis/internal/hang_guide.h"
#include "core/ranges.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using internal::GroupCalls;
using internal::GroupDiagnosis;
using internal::RankCalls;

// A rank that is inside a collective of one group cannot come to those of another.
bool IsHeldElsewhere(const std::vector<GroupCalls>& groups, const HangFinding& finding) {
  return AllOf(finding.ranks, [&](std::int64_t rank) {
    return std::any_of(groups.begin(), groups.end(), [&](const GroupCalls& group) {
      return group.name != finding.group &&
             std::any_of(group.members.begin(), group.members.end(), [&](const RankCalls& member) {
               return member.rank == rank && !member.calls.empty() && !member.calls.back().is_over;
             });
    });
  });
}

void AddRanks(const std::vector<FlightDump>& dumps, const Program* program, HangReport& report) {
  std::set<std::int64_t> ranks, there;
  for (std::int64_t rank = 0; program != nullptr && rank < MeshOf(*program).RankCount(); ++rank) {
    ranks.insert(rank);
  }
  for (const FlightDump& dump : dumps) {
    there.insert(dump.rank);
    for (const FlightGroup& group : dump.groups) {
      ranks.insert(group.ranks.begin(), group.ranks.end());
    }
  }
  ranks.insert(there.begin(), there.end());
  report.ranks.assign(ranks.begin(), ranks.end());
  std::set_difference(ranks.begin(), ranks.end(), there.begin(), there.end(),
                      std::back_inserter(report.missing));
}

// It says that somebody did nothing, not what somebody did.
bool IsLate(const HangFinding& finding) {
  return finding.kind == HangKind::kLate || finding.kind == HangKind::kAllWait;
}

// Whether a rank that is missing in both comes to the collective of `a` first: in the program's
// order, where it is known. Ranks of other groups may have come to theirs at any time before.
bool IsBefore(const HangFinding& a, const HangFinding& b) {
  const auto place = [](const HangCall& call) { return std::pair(call.step, call.place); };
  const bool are_known =
      std::min({a.expected.step, a.expected.place, b.expected.step, b.expected.place}) >= 0;
  return are_known && place(a.expected) != place(b.expected) ? place(a.expected) < place(b.expected)
                                                             : a.since < b.since;
}

// What is only the consequence of another finding goes.
void KeepCauses(const std::vector<GroupCalls>& groups, HangReport& report) {
  std::vector<HangFinding>& findings = report.findings;
  // The dead first, then who did something else: others come late because of them.
  const auto order = [](const HangFinding& finding) {
    return std::tuple(finding.kind != HangKind::kNoDump, IsLate(finding), finding.since);
  };
  StableSort(findings,
             [&](const HangFinding& a, const HangFinding& b) { return order(a) < order(b); });
  std::vector<HangFinding> causes;
  std::set<std::int64_t> guilty, victims;
  for (HangFinding& finding : findings) {
    const bool is_known =
        AnyOf(finding.ranks, [&](std::int64_t rank) { return guilty.count(rank) > 0; });
    // Who waited there may have been ended by it, and its collective with it.
    const bool are_victims =
        AllOf(finding.ranks, [&](std::int64_t rank) { return victims.count(rank) > 0; });
    if (IsLate(finding) &&
        (is_known || are_victims || !report.missing.empty() || IsHeldElsewhere(groups, finding))) {
      continue;
    }
    victims.insert(finding.waiting.begin(), finding.waiting.end());
    guilty.insert(finding.ranks.begin(), finding.ranks.end());
    causes.push_back(std::move(finding));
  }
  if (causes.empty() && !findings.empty()) {
    causes = std::move(findings);  // each waits for another: no first one
  }
  findings = std::move(causes);
}

}  // namespace

std::string_view NameOf(HangKind kind) {
  static constexpr std::array<std::string_view, kHangKindCount> kNames = {
      "no_dump",    "skipped",     "extra",     "swapped", "other_op",
      "other_size", "other_dtype", "undecided", "late",    "all_wait"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string_view NameOf(HangPhase phase) {
  static constexpr std::array<std::string_view, 4> kNames = {"", "forward", "backward",
                                                             "optimizer"};
  return kNames[static_cast<std::size_t>(phase)];
}

HangReport DiagnoseHang(const std::vector<FlightDump>& dumps, const Program* program,
                        Seconds patience) {
  std::vector<GroupCalls> groups = internal::GroupsOf(dumps);
  for (GroupCalls& group : groups) {
    if (program != nullptr && !group.knows_ranks) {
      internal::AssignRanks(*program, group);
    }
  }
  groups.erase(std::remove_if(groups.begin(), groups.end(),
                              [](const GroupCalls& group) { return group.ranks.size() < 2; }),
               groups.end());
  HangReport report;
  AddRanks(dumps, program, report);
  report.groups = groups.size();
  bool has_plan = false;
  HangFinding died;
  for (const GroupCalls& group : groups) {
    GroupDiagnosis found =
        internal::DiagnoseGroup(group, program, std::llround(patience.value * 1e9));
    has_plan = has_plan || found.has_plan;
    std::move(found.findings.begin(), found.findings.end(), std::back_inserter(report.findings));
    report.collectives += found.alike;
    std::vector<std::int64_t> absent;
    std::set_intersection(group.ranks.begin(), group.ranks.end(), report.missing.begin(),
                          report.missing.end(), std::back_inserter(absent));
    if (!absent.empty() && !found.waiting.waiting.empty() &&
        (died.since == 0 || IsBefore(found.waiting, died))) {
      died = std::move(found.waiting);
    }
  }
  // Who did something else is the cause; others died of it.
  const bool has_cause =
      AnyOf(report.findings, [](const HangFinding& finding) { return !IsLate(finding); });
  if (died.since != 0 && !has_cause) {
    died.ranks = report.missing;
    report.findings.push_back(std::move(died));
  } else if (!report.missing.empty()) {
    report.notes.emplace_back(has_cause ? "some ranks left no dump"
                                        : "some ranks left no dump, and nobody waits for them");
  }
  KeepCauses(groups, report);
  if (program != nullptr && !has_plan) {
    report.notes.emplace_back("no process group has the ranks of a group of the plan");
  }
  return report;
}

}  // namespace shardwright
