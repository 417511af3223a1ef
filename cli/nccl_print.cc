#include "cli/nccl_print.h"

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/units.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::vector<std::string> ErrorCells(const ErrorStatistics& s) {
  if (s.count == 0) {
    return {"0", "", "", "", "", ""};
  }
  return {std::to_string(s.count), Percent(s.mean), Percent(s.median),
          Percent(s.p90),          Percent(s.max),  SignedPercent(s.bias)};
}

void AddRow(std::vector<std::string> cells, const ErrorStatistics& statistics, Table& table) {
  for (std::string& cell : ErrorCells(statistics)) {
    cells.push_back(std::move(cell));
  }
  table.Row(std::move(cells));
}

Json StatisticsJson(const ErrorStatistics& s) {
  return {{"count", s.count}, {"mean", s.mean}, {"median", s.median},
          {"p90", s.p90},     {"max", s.max},   {"bias", s.bias}};
}

Json GroupJson(const SweepGroup& group) {
  Json json;
  if (!group.source.empty()) {
    json["source"] = group.source;
    json["fabric"] = group.fabric;
  }
  json["op"] = group.op;
  json["rows"] = group.rows;
  json["errors"] = StatisticsJson(group.errors);
  return json;
}

std::string LeftOutText(const std::vector<LeftOutFabric>& left_out) {
  if (left_out.empty()) {
    return "";
  }
  Table table({kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  table.Row({"fabric", "predicted from", "rows", "mean", "median", "p90", "worst", "bias"});
  for (const LeftOutFabric& fabric : left_out) {
    AddRow({fabric.fabric, fabric.from}, fabric.above_64_mib, table);
  }
  return "\nEach fabric left out of the fit and predicted from its link rates, above 64 MiB\n\n" +
         table.Text();
}

Json LeftOutJson(const std::vector<LeftOutFabric>& left_out) {
  Json json = Json::array();
  for (const LeftOutFabric& fabric : left_out) {
    json.push_back({{"fabric", fabric.fabric},
                    {"from", fabric.from},
                    {"above_64_mib", StatisticsJson(fabric.above_64_mib)},
                    {"all", StatisticsJson(fabric.all)}});
  }
  return json;
}

// A row per size, a column per number of nodes.
std::string ScaleText(const ScaleReport& scale) {
  std::set<std::int64_t> nodes;
  std::map<Bytes, std::map<std::int64_t, const ScalePoint*>> by_size;
  for (const ScalePoint& point : scale.points) {
    nodes.insert(point.nodes);
    by_size[point.bytes][point.nodes] = &point;
  }
  Table table(std::vector<Table::Align>(nodes.size() + 1, kRight));
  std::vector<std::string> header = {"size"};
  for (const std::int64_t count : nodes) {
    header.push_back(std::to_string(count) + " nodes");
  }
  table.Row(std::move(header));
  for (const auto& [bytes, points] : by_size) {
    std::vector<std::string> cells = {Format(bytes)};
    for (const std::int64_t count : nodes) {
      const auto at = points.find(count);
      cells.push_back(at == points.end() ? ""
                                         : Fixed(at->second->predicted, "%.3f") + " / " +
                                               Fixed(at->second->published, "%.3f"));
    }
    table.Row(std::move(cells));
  }
  Table errors({kRight, kRight, kRight, kRight, kRight, kRight});
  errors.Row({"points", "mean", "median", "p90", "worst", "bias"});
  errors.Row(ErrorCells(scale.errors));
  return "\nFraction of the adapters' rate, predicted / published\n\n" + table.Text() + "\n" +
         errors.Text();
}

Json ScaleJson(const ScaleReport& scale) {
  Json json;
  json["errors"] = StatisticsJson(scale.errors);
  json["points"] = Json::array();
  for (const ScalePoint& point : scale.points) {
    json["points"].push_back({{"nodes", point.nodes},
                              {"bytes", point.bytes.value},
                              {"published", point.published},
                              {"predicted", point.predicted}});
  }
  return json;
}

// Times in microseconds, factors as they are.
std::string NumberText(const NetworkNumber& number, double value) {
  return number.is_time ? Format(Seconds(value)) : Fixed(value, "%.3f");
}

}  // namespace

std::string SweepText(const SweepOutput& output) {
  const SweepReport& report = output.report;
  Table groups({kLeft, kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight, kRight});
  groups.Row({"source", "fabric", "collective", "rows", "scored", "mean", "median", "p90", "worst",
              "bias"});
  for (const SweepGroup& group : report.groups) {
    AddRow({group.source, group.fabric, group.op, std::to_string(group.rows)}, group.errors,
           groups);
  }
  Table ops({kLeft, kRight, kRight, kRight, kRight, kRight, kRight, kRight});
  ops.Row({"collective", "rows", "scored", "mean", "median", "p90", "worst", "bias"});
  for (const SweepGroup& group : report.by_op) {
    AddRow({group.op, std::to_string(group.rows)}, group.errors, ops);
  }
  Table all({kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  all.Row({"", "scored", "mean", "median", "p90", "worst", "bias"});
  AddRow({"all-gather and reduce-scatter"}, report.scored, all);
  std::string text = std::to_string(report.rows) +
                     " rows. Scored are sizes from 64 KiB to 16 GiB; errors are predicted / "
                     "measured time - 1.\n\n" +
                     groups.Text() + "\n" + ops.Text() + "\n" + all.Text();
  if (!report.skipped.empty()) {
    Table skipped({kLeft, kRight, kLeft});
    skipped.Row({"source", "skipped", "why"});
    for (const SkippedRows& rows : report.skipped) {
      skipped.Row({rows.source, std::to_string(rows.rows), rows.reason});
    }
    text += "\n" + skipped.Text();
  }
  return text + LeftOutText(output.left_out) + (output.scale ? ScaleText(*output.scale) : "");
}

std::string SweepJson(const PreparedSweep& sweep, const SweepOutput& output) {
  const SweepReport& report = output.report;
  Json json = ReportHead("shardwright-collective-validation");
  json["groups"] = Json::array();
  for (const SweepGroup& group : report.groups) {
    json["groups"].push_back(GroupJson(group));
  }
  json["by_op"] = Json::array();
  for (const SweepGroup& group : report.by_op) {
    json["by_op"].push_back(GroupJson(group));
  }
  json["pooled"] = StatisticsJson(report.scored);
  json["skipped"] = Json::array();
  for (const SkippedRows& rows : report.skipped) {
    json["skipped"].push_back(
        {{"source", rows.source}, {"reason", rows.reason}, {"rows", rows.rows}});
  }
  if (!output.left_out.empty()) {
    json["left_out"] = LeftOutJson(output.left_out);
  }
  if (output.scale) {
    json["scale"] = ScaleJson(*output.scale);
  }
  json["rows"] = Json::array();
  for (const PreparedSweep::Entry& entry : sweep.entries) {
    if (!entry.skip_reason.empty()) {
      continue;
    }
    json["rows"].push_back({{"line", entry.row.line},
                            {"fabric", entry.fabric},
                            {"op", entry.row.op},
                            {"bytes", entry.row.bytes.value},
                            {"predicted_s", PredictEntry(entry).value},
                            {"measured_s", entry.row.time.value},
                            {"error", EntryError(entry)},
                            {"profile", entry.profile->name}});
  }
  return json.dump(2) + "\n";
}

std::string NetworkFitText(const NetworkFit& fit) {
  Table table({kLeft, kRight, kRight, kRight});
  table.Row({"number", "found", "lowest", "highest"});
  for (const NetworkNumber& number : fit.numbers) {
    table.Row({NumberName(number), NumberText(number, number.value),
               NumberText(number, number.lower), NumberText(number, number.upper)});
  }
  Table all({kRight, kRight, kRight, kRight, kRight, kRight});
  all.Row({"fitted rows", "mean", "median", "p90", "worst", "bias"});
  all.Row(ErrorCells(fit.errors));
  return std::to_string(fit.numbers.size()) + " numbers, " + std::to_string(fit.evaluations) +
         " evaluations.\n\n" + table.Text() + "\n" + all.Text() + LeftOutText(fit.left_out);
}

std::string NetworkFitJson(const NetworkFit& fit) {
  Json json = ReportHead("shardwright-network-fit");
  json["numbers"] = Json::array();
  for (const NetworkNumber& number : fit.numbers) {
    json["numbers"].push_back({{"name", NumberName(number)},
                               {"fabric", number.fabric},
                               {"transport", number.transport},
                               {"protocol", number.protocol},
                               {"field", number.field},
                               {"unit", number.is_time ? "s" : ""},
                               {"value", number.value},
                               {"lower", number.lower},
                               {"upper", number.upper}});
  }
  json["errors"] = StatisticsJson(fit.errors);
  if (!fit.left_out.empty()) {
    json["left_out"] = LeftOutJson(fit.left_out);
  }
  return json.dump(2) + "\n";
}

}  // namespace shardwright
