// Why a job stands still, where no dump was written: lines of PyTorch's NCCL watchdog in the job's
// log, and what ncclras prints (NCCL 2.24 and later).

#include <cctype>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "analysis/hang.h"
#include "analysis/internal/hang_calls.h"
#include "analysis/internal/hang_order.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMostRanks = 1 << 17;
constexpr std::int64_t kLargestInteger = std::int64_t{1} << 53;
constexpr std::string_view kWork = "WorkNCCL(";
constexpr std::string_view kCounts = "launched up to operation ";
constexpr std::string_view kMissing = "Missing communicator data from ";

// The number right behind `key`; -1: there is none.
std::int64_t NumberAfter(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(key);
  if (at == std::string_view::npos) {
    return -1;
  }
  const std::string_view rest = line.substr(at + key.size());
  const std::size_t end = rest.find_first_not_of("0123456789");
  const std::int64_t number = IntegerIn(rest.substr(0, end)).value_or(-1);
  return number > kLargestInteger ? -1 : number;
}

// What stands between two marks; empty: they are not there.
std::string_view Between(std::string_view line, std::string_view from, std::string_view to) {
  const std::size_t at = line.find(from);
  const std::size_t end = at == std::string_view::npos ? at : line.find(to, at + from.size());
  return end == std::string_view::npos ? std::string_view()
                                       : line.substr(at + from.size(), end - at - from.size());
}

// "_REDUCE_SCATTER_BASE" -> "reduce-scatter".
std::string OpName(std::string_view type) {
  static constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"REDUCE_SCATTER", "reduce-scatter"}, {"ALLGATHER", "all-gather"},
      {"ALLREDUCE", "all-reduce"},          {"BROADCAST", "broadcast"},
      {"ALLTOALL", "all-to-all"},           {"BARRIER", "barrier"}};
  std::string upper(type);
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  for (const auto& [name, ours] : kNames) {
    if (Contains(upper, name)) {
      return std::string(ours);
    }
  }
  return LowerCase(type);
}

// The collective that timed out on a rank.
HangCall TimedOut(std::string_view line) {
  HangCall call;
  call.op = OpName(Between(line, "OpType=", ","));
  call.sequence = NumberAfter(line, "SeqNum=");
  const std::int64_t in = NumberAfter(line, "NumelIn="), out = NumberAfter(line, "NumelOut=");
  const bool is_gather = call.op == "all-gather";
  call.elements = std::max<std::int64_t>(0, is_gather ? out : in);
  // 64 elements of each rank are gathered to 1,024: 16 ranks.
  const std::int64_t whole = is_gather ? out : in, part = is_gather ? in : out;
  if ((is_gather || call.op == "reduce-scatter") && part > 0 && whole > part && whole % part == 0 &&
      whole / part <= kMostRanks) {
    call.group_size = whole / part;
  }
  return call;
}

struct Member {
  std::optional<HangCall> call;  // the first that timed out
  std::int64_t enqueued = -1;    // the last; -1: not said
};
using Members = std::map<std::int64_t, Member>;  // by rank

void Take(const HangCall& call, Member& member) {
  if (!member.call || call.sequence < member.call->sequence) {
    member.call = call;
  }
}

// Ranks by process group. Lines of older releases name no group; a later line of the rank about the
// same work may.
std::map<std::string, Members> ReadWatchdog(const std::vector<std::string_view>& lines) {
  std::map<std::string, Members> groups;
  for (const std::string_view line : lines) {
    std::int64_t rank = NumberAfter(line, "[rank");
    rank = rank >= 0 ? rank : NumberAfter(line, "Rank ");
    if (rank < 0) {
      continue;
    }
    const std::string name(Between(line, "[PG ", " Rank"));
    if (Contains(line, kWork) && NumberAfter(line, "SeqNum=") >= 0) {
      Take(TimedOut(line), groups[name][rank]);
    }
    const std::int64_t work = NumberAfter(line, "work: ");
    const std::int64_t enqueued = NumberAfter(line, "last enqueued NCCL work: ");
    if (work < 0 || enqueued < 0) {
      continue;
    }
    Member& member = groups[name][rank];
    member.enqueued = enqueued;
    Member& unnamed = groups[""][rank];
    if (!name.empty() && unnamed.call && unnamed.call->sequence == work) {
      Take(*unnamed.call, member);
      unnamed.call.reset();
    }
  }
  for (auto& [name, members] : groups) {
    std::erase_if(members, [](const auto& entry) { return !entry.second.call; });
  }
  std::erase_if(groups, [](const auto& group) { return group.second.empty(); });
  return groups;
}

// With the units, phase and micro-batch that the plan's program has for such a collective.
HangCall Named(HangCall call, const Program* program, std::int64_t rank) {
  for (std::size_t g = 0; program != nullptr && g < program->groups.size(); ++g) {
    if (program->groups[g].size < 2) {
      continue;
    }
    for (const HangCall& planned :
         internal::StepOf(*program, MembersOf(program->groups[g], rank))) {
      if (call.elements == 0 || !internal::AreAlike(planned, call)) {
        continue;
      }
      const bool is_first = call.units.empty();
      for (const std::string& unit : planned.units) {
        if (!IsIn(call.units, unit)) {
          call.units.push_back(unit);
        }
      }
      call.dtype = planned.dtype;
      call.micro_batch =
          is_first || call.micro_batch == planned.micro_batch ? planned.micro_batch : -1;
    }
  }
  return call;
}

using Variants = std::map<std::tuple<std::int64_t, std::string, std::int64_t>,
                          std::vector<std::int64_t>>;  // ranks by collective

// The job's silent ranks, of which a group that is whole waits for none.
std::vector<std::int64_t> SilentOf(const Members& members,
                                   const std::vector<std::int64_t>& missing) {
  const bool is_whole = AnyOf(members, [&](const auto& member) {
    return member.second.call->group_size == std::ssize(members);
  });
  return is_whole ? std::vector<std::int64_t>() : missing;
}

// One group: who is behind, who differs, who is silent.
HangFinding FindingOf(const Members& members, const std::vector<std::int64_t>& silent,
                      const Program* program) {
  Variants variants;
  for (const auto& [rank, member] : members) {
    variants[{member.call->sequence, member.call->op, member.call->elements}].push_back(rank);
  }
  // Most ranks are right; where as many stand in two places, those in the later one.
  const auto most = std::max_element(
      variants.begin(), variants.end(),
      [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  HangFinding finding;
  const auto call_of = [&](std::int64_t rank) {
    return Named(*members.at(rank).call, program, rank);
  };
  const auto first = variants.begin();
  const bool is_behind = std::get<0>(first->first) < std::get<0>(variants.rbegin()->first);
  finding.group_size = members.size() + silent.size();
  if (is_behind) {
    finding.kind = HangKind::kLate;
    finding.ranks = first->second;
    finding.expected = call_of(variants.rbegin()->second.front());
    finding.last = call_of(first->second.front());
    for (const auto& [key, ranks] : variants) {
      if (key != first->first) {
        finding.waiting.insert(finding.waiting.end(), ranks.begin(), ranks.end());
      }
    }
  } else if (variants.size() > 1) {
    const auto other = most == first ? std::next(first) : first;
    const bool is_even = other->second.size() == most->second.size();
    finding.expected = call_of(most->second.front());
    finding.found = call_of(other->second.front());
    finding.kind = is_even                                    ? HangKind::kUndecided
                   : finding.found->op != finding.expected.op ? HangKind::kOtherOp
                                                              : HangKind::kOtherSize;
    finding.ranks = other->second;
    finding.waiting = most->second;
  } else {
    finding.kind = silent.empty() ? HangKind::kAllWait : HangKind::kNoDump;
    finding.expected = call_of(first->second.front());
    finding.ranks = silent.empty() ? first->second : silent;
    finding.waiting = silent.empty() ? std::vector<std::int64_t>() : first->second;
  }
  SortAll(finding.waiting);
  return finding;
}

// "3", "1-4": the ranks that a list of ncclras names.
void AddListed(std::string_view text, std::set<std::int64_t>& ranks) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(", "), text.size());
    const std::string_view word = text.substr(0, end);
    const std::size_t dash = word.find('-');
    const std::optional<std::int64_t> from = IntegerIn(word.substr(0, dash));
    const std::optional<std::int64_t> to =
        dash == std::string_view::npos ? from : IntegerIn(word.substr(dash + 1));
    const std::int64_t next = ranks.empty() ? 0 : *ranks.rbegin() + 1;  // lists are ascending
    for (std::int64_t r = std::max(from.value_or(1), next); to && r <= std::min(*to, kMostRanks);
         ++r) {
      ranks.insert(r);
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// A communicator of ncclras's lists.
struct Communicator {
  std::string name;  // "#0-0"
  std::string op = "collective";
  std::map<std::int64_t, std::int64_t> ranks_at;          // how many, by the last operation
  std::map<std::int64_t, std::set<std::int64_t>> listed;  // which, where it lists them
  std::set<std::int64_t> missing;
};

std::vector<Communicator> ReadRas(const std::vector<std::string_view>& lines) {
  std::vector<Communicator> all;
  std::int64_t at = -1;
  bool lists_missing = false;
  for (const std::string_view line : lines) {
    const std::size_t mark = line.find('#');
    if (mark != std::string_view::npos && Contains(line.substr(mark), " (") &&
        NumberAfter(line, "#") >= 0) {
      all.push_back({std::string(Between(line.substr(mark), "", " (")), "collective", {}, {}, {}});
      at = -1;
      lists_missing = false;
    }
    if (all.empty()) {
      continue;
    }
    Communicator& one = all.back();
    if (const std::string_view op = Between(line, "have different ", " operation"); !op.empty()) {
      one.op = OpName(op) == "collective" ? "collective" : OpName(op);
    }
    lists_missing = lists_missing || Contains(line, kMissing);
    const std::int64_t rank = NumberAfter(line, "Rank ");
    const std::int64_t count = NumberAfter(line, kCounts);
    if (count >= 0) {
      lists_missing = false;
      at = count;
      const std::string_view before = line.substr(0, line.find(" ranks have"));
      const std::size_t digit = before.find_first_not_of(' ');
      const std::int64_t ranks =
          rank >= 0 ? 1 : IntegerIn(before.substr(std::min(digit, before.size()))).value_or(0);
      one.ranks_at[at] += std::clamp<std::int64_t>(ranks, 0, kMostRanks);
    }
    if (Contains(line, "missing rank")) {
      AddListed(line.substr(std::min(line.find(':') + 1, line.size())), one.missing);
    }
    if (rank >= 0 && lists_missing) {
      one.missing.insert(rank);
    } else if (rank >= 0 && at >= 0) {
      one.listed[at].insert(rank);
    }
  }
  return all;
}

// Nothing: its ranks are at the same operation, and all are there.
std::optional<HangFinding> FindingOf(Communicator one) {
  if (one.missing.empty() && one.ranks_at.size() < 2) {
    return std::nullopt;
  }
  std::set<std::int64_t> named = one.missing;
  auto size = std::ssize(one.missing);
  for (const auto& [at, count] : one.ranks_at) {
    size = std::min(size + count, kMostRanks);
    named.insert(one.listed[at].begin(), one.listed[at].end());
  }
  // Of the usual count ncclras lists nobody: the ranks that it does not name.
  const auto at_count = [&](std::int64_t at) {
    std::vector<std::int64_t> ranks(one.listed[at].begin(), one.listed[at].end());
    for (std::int64_t rank = 0; one.listed[at].empty() && rank < size; ++rank) {
      if (!named.contains(rank)) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  };
  HangFinding finding;
  finding.group = one.name;
  finding.group_size = static_cast<std::size_t>(size);
  finding.expected.op = one.op;
  finding.expected.sequence = one.ranks_at.empty() ? 0 : one.ranks_at.begin()->first + 1;
  finding.kind = one.missing.empty() ? HangKind::kLate : HangKind::kNoDump;
  finding.ranks.assign(one.missing.begin(), one.missing.end());
  if (one.missing.empty()) {
    finding.ranks = at_count(one.ranks_at.begin()->first);
    finding.waiting = at_count(one.ranks_at.rbegin()->first);
  }
  return finding;
}

std::vector<std::string_view> LinesOf(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

}  // namespace

bool IsHangLog(std::string_view text) {
  return Contains(text, kWork) || Contains(text, kCounts) || Contains(text, kMissing);
}

HangReport DiagnoseHangLog(std::string_view text, const Program* program) {
  const std::vector<std::string_view> lines = LinesOf(text);
  const std::map<std::string, Members> groups = ReadWatchdog(lines);
  HangReport report;
  std::set<std::int64_t> speaking;
  std::int64_t told_ranks = 0;
  for (const auto& [name, members] : groups) {
    for (const auto& [rank, member] : members) {
      speaking.insert(rank);
      told_ranks = std::max(told_ranks, member.call->group_size);
    }
  }
  const std::int64_t planned = program == nullptr ? 0 : MeshOf(*program).RankCount();
  const std::int64_t ranks =
      std::max({planned, told_ranks, speaking.empty() ? 0 : *speaking.rbegin() + 1});
  for (std::int64_t rank = 0; rank < ranks && ranks <= kMostRanks; ++rank) {
    report.ranks.push_back(rank);
    if (speaking.count(rank) == 0) {
      report.missing.push_back(rank);
    }
  }
  constexpr std::size_t kMostMembers = 8 * kMostRanks;  // of all groups
  std::size_t told = 0;
  const auto tell = [&](HangFinding finding) {
    told += finding.group_size;
    report.findings.push_back(std::move(finding));
  };
  for (const auto& [name, members] : groups) {
    ++report.groups;
    if (told <= kMostMembers) {
      HangFinding finding = FindingOf(members, SilentOf(members, report.missing), program);
      finding.group = name.empty() ? "not named" : name;
      tell(std::move(finding));
    }
    report.collectives = std::clamp(report.collectives + members.begin()->second.call->sequence - 1,
                                    report.collectives, kLargestInteger);
  }
  for (Communicator& one : groups.empty() ? ReadRas(lines) : std::vector<Communicator>()) {
    ++report.groups;
    std::optional<HangFinding> finding =
        told <= kMostMembers ? FindingOf(std::move(one)) : std::nullopt;
    if (finding) {
      for (std::size_t r = report.ranks.size(); r < finding->group_size; ++r) {
        report.ranks.push_back(static_cast<std::int64_t>(r));
      }
      tell(std::move(*finding));
    }
  }
  if (told > kMostMembers) {
    report.notes.emplace_back("only the first " + std::to_string(report.findings.size()) +
                              " groups that differ are told");
  }
  // Who differs or is silent is the cause, who waits its consequence.
  std::stable_partition(report.findings.begin(), report.findings.end(),
                        [](const HangFinding& f) { return f.kind != HangKind::kAllWait; });
  if (program == nullptr && !report.findings.empty() &&
      report.findings.front().kind == HangKind::kAllWait &&
      report.findings.front().expected.group_size == 0) {
    report.notes.emplace_back(
        "a log does not say how many ranks the job has: one that is not in it may be the cause; "
        "--plan says how many there are");
  } else if (program != nullptr && ranks > planned) {
    report.notes.emplace_back("the plan has " + std::to_string(planned) + " ranks, the log " +
                              std::to_string(ranks) + ": it is not the plan of this job");
  }
  report.notes.emplace_back(groups.empty()
                                ? "ask ncclras again after 10 s: counts that go on are no hang"
                                : "a log tells less than dumps: TORCH_FR_BUFFER_SIZE=2000 and "
                                  "TORCH_NCCL_DUMP_ON_TIMEOUT=1 write them");
  return report;
}

}  // namespace shardwright
