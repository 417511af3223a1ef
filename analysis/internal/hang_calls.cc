#include "analysis/internal/hang_calls.h"

#include <array>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "core/ranges.h"
#include "core/text.h"

namespace shardwright::internal {
namespace {

std::string FileName(const std::string& path) {
  const std::size_t slash = path.find_last_of("/\\");
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

// Frames of libraries tell what they do, not where the job is.
bool IsOfLibrary(const FlightFrame& frame) {
  return frame.file.empty() || frame.file.starts_with('<') || Contains(frame.file, "/torch/") ||
         Contains(frame.file, "/site-packages/") || Contains(frame.file, "/dist-packages/") ||
         Contains(frame.file, "/lib/python3") || Contains(frame.file, "/multiprocessing/") ||
         Contains(frame.file, "torch/csrc/") || Contains(frame.file, "importlib");
}

// FSDP's hooks, autograd and optimizers are told by their functions.
HangPhase PhaseOf(const FlightDump& dump, const FlightCall& call) {
  bool is_forward = false;
  for (const std::size_t i : call.frames) {
    const FlightFrame& frame = dump.frames[i];
    if (Contains(frame.function, "post_backward") || Contains(frame.function, "pre_backward") ||
        Contains(frame.function, "backward_prefetch") || frame.function == "_engine_run_backward" ||
        (frame.function == "backward" && Contains(frame.file, "torch/"))) {
      return HangPhase::kBackward;
    }
    if (frame.function == "step" && Contains(frame.file, "torch/optim/")) {
      return HangPhase::kOptimizer;
    }
    is_forward = is_forward || Contains(frame.function, "pre_forward") ||
                 (frame.function == "_call_impl" && Contains(frame.file, "nn/modules/module.py"));
  }
  return is_forward ? HangPhase::kForward : HangPhase::kUnknown;
}

std::string SiteOf(const FlightDump& dump, const FlightCall& call) {
  for (const std::size_t i : call.frames) {
    const FlightFrame& frame = dump.frames[i];
    if (!IsOfLibrary(frame)) {
      return FileName(frame.file) + ':' + std::to_string(frame.line) + " in " + frame.function;
    }
  }
  return "";
}

// Gloo reduces and scatters by an all-reduce of the whole array.
bool IsReduceScatter(const FlightDump& dump, const FlightCall& call) {
  constexpr std::size_t kInnermost = 4;
  return std::any_of(
      call.frames.begin(),
      call.frames.begin() +
          std::min(std::ssize(call.frames), static_cast<std::ptrdiff_t>(kInnermost)),
      [&](std::size_t i) { return dump.frames[i].function.starts_with("reduce_scatter"); });
}

std::string DtypeOf(const std::string& name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kNames = {
      {{"Float", "fp32"}, {"BFloat16", "bf16"}, {"Half", "fp16"}}};
  for (const auto& [torch, ours] : kNames) {
    if (name == torch) {
      return std::string(ours);
    }
  }
  return name;
}

HangCall Normalized(const FlightDump& dump, const FlightCall& call) {
  HangCall result;
  const std::string& name = call.name;
  if (Contains(name, "barrier")) {
    result.op = "barrier";
  } else if (Contains(name, "reduce_scatter") || Contains(name, "REDUCE_SCATTER")) {
    result.op = "reduce-scatter";
    result.elements = call.elements_in;
  } else if (Contains(name, "all_gather") || Contains(name, "allgather") ||
             Contains(name, "ALLGATHER")) {
    result.op = "all-gather";
    result.elements = call.elements_out;
  } else if (Contains(name, "all_reduce") || Contains(name, "allreduce")) {
    result.op = IsReduceScatter(dump, call) ? "reduce-scatter" : "all-reduce";
    result.elements = call.elements_in;
  } else if (Contains(name, "broadcast")) {
    result.op = "broadcast";
    result.elements = std::max(call.elements_in, call.elements_out);
  } else {
    result.op = name;
  }
  result.dtype = result.elements > 0 ? DtypeOf(call.dtype) : "";
  result.phase = PhaseOf(dump, call);
  result.site = SiteOf(dump, call);
  result.sequence = call.sequence;
  result.created = call.created;
  result.is_over = call.completed != 0 || call.retired;
  result.is_scheduled = call.is_scheduled;
  return result;
}

// Several calls with one number are one launch.
void Merge(HangCall& to, const HangCall& from) {
  if (from.op == "coalesced") {
    return;
  }
  if (to.op == "coalesced") {
    to = from;
    return;
  }
  to.elements += from.elements;
  to.is_over = to.is_over && from.is_over;
}

RankCalls CallsOf(const FlightDump& dump, std::size_t group) {
  RankCalls result{.rank = dump.rank, .written = dump.written, .calls = {}, .is_complete = {}};
  for (const FlightCall& call : dump.calls) {
    result.written = std::max({result.written, call.created, call.completed});
    if (call.group != group || call.is_message) {
      continue;
    }
    const HangCall next = Normalized(dump, call);
    if (!result.calls.empty() && call.sequence == result.Last()) {
      Merge(result.calls.back(), next);
      result.is_complete.back() = result.is_complete.back() && call.completed != 0;
      continue;
    }
    if (result.calls.empty() || call.sequence != result.Last() + 1) {
      result.calls.clear();  // numbers began anew: the group was made once more
      result.is_complete.clear();
      result.first = call.sequence;
    }
    result.calls.push_back(next);
    result.is_complete.push_back(call.completed != 0);
  }
  return result;
}

std::vector<std::int64_t> AllRanks(const std::vector<FlightDump>& dumps) {
  std::vector<std::int64_t> ranks;
  for (const FlightDump& dump : dumps) {
    ranks.push_back(dump.rank);
    for (const FlightGroup& group : dump.groups) {
      ranks.insert(ranks.end(), group.ranks.begin(), group.ranks.end());
    }
    SortAll(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  }
  return ranks;
}

}  // namespace

bool AreAlike(const HangCall& a, const HangCall& b) {
  const bool same_phase =
      a.phase == b.phase || a.phase == HangPhase::kUnknown || b.phase == HangPhase::kUnknown;
  return a.op == b.op && a.elements == b.elements && same_phase &&
         (a.dtype == b.dtype || a.dtype.empty() || b.dtype.empty());
}

std::vector<GroupCalls> GroupsOf(const std::vector<FlightDump>& dumps) {
  const std::vector<std::int64_t> all = AllRanks(dumps);
  std::map<std::int64_t, const FlightDump*> dump_of;
  for (const FlightDump& dump : dumps) {
    dump_of[dump.rank] = &dump;
  }
  // One name can stand for groups of different ranks.
  std::map<std::pair<std::string, std::vector<std::int64_t>>, GroupCalls> found;
  for (const FlightDump& dump : dumps) {
    for (std::size_t i = 0; i < dump.groups.size(); ++i) {
      const FlightGroup& group = dump.groups[i];
      RankCalls calls = CallsOf(dump, i);
      if (calls.calls.empty()) {
        continue;
      }
      const bool is_world = group.ranks.empty() && group.description == "default_pg";
      GroupCalls& to = found[{group.name, is_world ? all : group.ranks}];
      to.ranks = is_world ? all : group.ranks;
      to.name = group.description.empty() || group.description == "undefined"
                    ? group.name
                    : group.description + " (" + group.name + ")";
      to.members.push_back(std::move(calls));
    }
  }
  std::vector<GroupCalls> groups;
  for (auto& [key, group] : found) {
    if (group.ranks.empty()) {
      group.knows_ranks = false;
      for (const RankCalls& member : group.members) {
        group.ranks.push_back(member.rank);
      }
    }
    // A member that issued nothing is late from the first collective on.
    std::set<std::int64_t> there;
    for (const RankCalls& member : group.members) {
      there.insert(member.rank);
    }
    for (const std::int64_t rank : group.ranks) {
      const auto dump = dump_of.find(rank);
      if (dump != dump_of.end() && there.count(rank) == 0) {
        group.members.push_back(CallsOf(*dump->second, dump->second->groups.size()));
      }
    }
    SortBy(group.members, &RankCalls::rank);
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace shardwright::internal
