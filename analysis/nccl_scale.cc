#include "analysis/nccl_scale.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "analysis/csv.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "simulator/costs/collectives.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr double kAdapterRate = 48.5e9;  // B/s; SimAI's calbusbw.h counts ConnectX-7 so
constexpr double kAdapters = 8;
constexpr std::string_view kScope = "nodes_";

// A positive number that takes up all of `text`, or an error at its place.
double Positive(std::string_view text, const std::string& where) {
  const std::optional<double> value = NumberIn(text);
  if (!value || !(*value > 0) || !std::isfinite(*value) || *value > 1e15) {
    throw InputError(where, Quoted(text), "a positive number");
  }
  return *value;
}

std::vector<ScalePoint> ReadPoints(const CsvTable& table) {
  constexpr std::array<std::string_view, 4> kColumns = {"table", "bytes", "scope",
                                                        "fraction_of_link_rate"};
  table.Require(kColumns, "a table of efficiencies by size and nodes");
  std::vector<ScalePoint> points;
  for (const CsvRow& row : table.rows) {
    const auto text = [&](const char* column) -> const std::string& {
      return row.fields[table.Find(column)];
    };
    const std::string& scope = text("scope");
    if (text("table") != "nic_ratio" || !scope.starts_with(kScope)) {
      continue;
    }
    ScalePoint point;
    point.nodes =
        static_cast<std::int64_t>(Positive(scope.substr(kScope.size()), table.Where(row, "scope")));
    point.bytes =
        Bytes(static_cast<std::int64_t>(Positive(text("bytes"), table.Where(row, "bytes"))));
    point.published =
        Positive(text("fraction_of_link_rate"), table.Where(row, "fraction_of_link_rate"));
    if (point.nodes > 1) {
      points.push_back(point);
    }
  }
  if (points.empty()) {
    throw InputError(table.file, "no nic_ratio for two or more nodes", "some");
  }
  std::sort(points.begin(), points.end(), [](const ScalePoint& a, const ScalePoint& b) {
    return std::tie(a.nodes, a.bytes) < std::tie(b.nodes, b.bytes);
  });
  return points;
}

}  // namespace

ScaleReport ReportScaleOf(std::string_view text, const std::string& file) {
  ScaleReport report;
  report.points = ReadPoints(ParseCsv(text, file));
  std::vector<double> errors;
  for (ScalePoint& point : report.points) {
    const Cluster cluster = LoadCluster("h100-80 x8, nic 8x400 Gbit/s, network roce", point.nodes);
    const Profile profile = DefaultProfile(cluster.gpu, "");
    const std::int64_t ranks = cluster.RankCount();
    const CollectivePath path = FindCollectivePath(cluster, profile, {ranks, 1});
    const Seconds time = CollectiveTime(OpCode::kAllGather, point.bytes, path);
    const double sent =
        static_cast<double>(point.bytes.value) * BusBytesPerByte(OpCode::kAllGather, ranks);
    point.predicted = sent / time.value / (kAdapters * kAdapterRate);
    errors.push_back(point.published / point.predicted - 1);
  }
  report.errors = Summarise(errors);
  return report;
}

ScaleReport ReportScale(const std::string& file) {
  return ReportScaleOf(ReadTextFile(file), file);
}

}  // namespace shardwright
