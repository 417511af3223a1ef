#include "analysis/validate_nccl.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace shardwright {
namespace {

// Sizes that the goals are stated for. Below, only latency counts, which FSDP hardly sees.
constexpr Bytes kSmallestScored{64LL << 10};
constexpr Bytes kLargestScored{16LL << 30};

bool IsScoredSize(const PreparedSweep::Entry& entry) {
  return entry.skip_reason.empty() && entry.row.bytes >= kSmallestScored &&
         entry.row.bytes <= kLargestScored;
}

// Errors of one group while they are collected.
struct Collected {
  std::size_t rows = 0;
  std::vector<double> errors;
};

const Profile& ProfileOf(const SweepPlace& place, const std::string& wanted,
                         std::map<std::string, std::unique_ptr<Profile>>& profiles) {
  Profile profile;
  if (!wanted.empty() || !place.profile.empty()) {
    const std::string& name = wanted.empty() ? place.profile : wanted;
    if (const auto known = profiles.find(name); known != profiles.end()) {
      return *known->second;
    }
    profile = LoadProfile(name);
    return *profiles.emplace(name, std::make_unique<Profile>(std::move(profile))).first->second;
  }
  // The network's numbers: no stack changes them.
  profile = DefaultProfile(place.cluster.gpu, "");
  if (profile.architecture.empty()) {
    profile = DefaultProfile(place.cluster.gpu, "torch");  // MI300X has no other
  }
  const auto known = profiles.find(profile.name);
  if (known != profiles.end()) {
    return *known->second;
  }
  const std::string name = profile.name;
  return *profiles.emplace(name, std::make_unique<Profile>(std::move(profile))).first->second;
}

}  // namespace

PreparedSweep PrepareSweep(const std::vector<SweepRow>& rows, const std::string& profile) {
  PreparedSweep sweep;
  // Rows of one system are many; its cluster and path are found once.
  using Key =
      std::tuple<std::string, std::string, std::string, std::int64_t, std::int64_t, std::int64_t>;
  struct Known {
    std::optional<SweepPlace> place;
    const Profile* profile = nullptr;
    CollectivePath path;
  };
  std::map<Key, Known> known;
  for (const SweepRow& row : rows) {
    PreparedSweep::Entry& entry = sweep.entries.emplace_back();
    entry.row = row;
    SweepSkip skip;
    const Key key(row.system, row.gpu, row.network, row.gpus, row.nodes, row.gpus_per_node);
    auto at = known.find(key);
    if (at == known.end() || !at->second.place) {
      // What keeps one row from being placed, such as its operation, need not hold for the next.
      Known& now = known[key];
      now.place = PlaceOfRow(row, skip);
      if (now.place) {
        now.profile = &ProfileOf(*now.place, profile, sweep.profiles);
        now.path = FindCollectivePath(now.place->cluster, *now.profile, now.place->group);
      }
      at = known.find(key);
    }
    const std::optional<OpCode> op = PlaceableOp(row, skip);
    if (!at->second.place || !op) {
      entry.skip_reason = skip.reason;
      continue;
    }
    entry.fabric = at->second.place->fabric;
    entry.op = *op;
    entry.profile = at->second.profile;
    entry.path = at->second.path;
  }
  return sweep;
}

Seconds PredictEntry(const PreparedSweep::Entry& entry) {
  SW_CHECK(entry.profile != nullptr, "a skipped row is not predicted");
  const HostProfile& host = entry.profile->host;
  Seconds call = host.library_call.value;
  if (entry.op == OpCode::kAllToAll) {
    call += static_cast<double>(entry.path.ring.size - 1) * host.library_peer.value;
  }
  return std::max(CollectiveTime(entry.op, entry.row.bytes, entry.path), call) +
         ToolTime(entry.row);
}

double EntryError(const PreparedSweep::Entry& entry) {
  return PredictEntry(entry).value / entry.row.time.value - 1;
}

bool IsScored(const PreparedSweep::Entry& entry) {
  return IsScoredSize(entry) &&
         (entry.op == OpCode::kAllGather || entry.op == OpCode::kReduceScatter);
}

SweepReport ReportSweep(const PreparedSweep& sweep) {
  SweepReport report;
  report.rows = sweep.entries.size();
  std::map<std::tuple<std::string, std::string, std::string>, Collected> groups;
  std::map<std::string, Collected> by_op;
  std::map<std::pair<std::string, std::string>, std::size_t> skipped;
  std::vector<double> scored;
  for (const PreparedSweep::Entry& entry : sweep.entries) {
    const std::string source = ShortSource(entry.row);
    if (!entry.skip_reason.empty()) {
      ++skipped[{source, entry.skip_reason}];
      continue;
    }
    Collected& group = groups[{source, entry.fabric, entry.row.op}];
    Collected& op = by_op[entry.row.op];
    ++group.rows;
    ++op.rows;
    if (IsScoredSize(entry)) {
      const double error = EntryError(entry);
      group.errors.push_back(error);
      op.errors.push_back(error);
      if (IsScored(entry)) {
        scored.push_back(error);
      }
    }
  }
  for (const auto& [key, group] : groups) {
    const auto& [source, fabric, op] = key;
    report.groups.push_back({source, fabric, op, group.rows, Summarise(group.errors)});
  }
  for (const auto& [op, group] : by_op) {
    report.by_op.push_back({"", "", op, group.rows, Summarise(group.errors)});
  }
  for (const auto& [key, rows] : skipped) {
    report.skipped.push_back({key.first, key.second, rows});
  }
  report.scored = Summarise(scored);
  return report;
}

}  // namespace shardwright
