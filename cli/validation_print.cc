#include "cli/validation_print.h"

#include <array>
#include <cstddef>
#include <map>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/table.h"
#include "core/text.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

struct Metric {
  const char* title;
  const char* key;
  const ErrorStatistics ValidatedGroup::*statistics;
};
constexpr std::array<Metric, 4> kMetrics = {
    {{"step time", "step_time", &ValidatedGroup::step_time},
     {"memory allocated", "memory_allocated", &ValidatedGroup::allocated},
     {"memory reserved", "memory_reserved", &ValidatedGroup::reserved},
     {"memory of the device", "memory_device", &ValidatedGroup::device}}};

void AddGroup(const ValidatedGroup& group, const Metric& metric, Table& table) {
  const ErrorStatistics& s = group.*metric.statistics;
  if (s.count == 0) {
    return;
  }
  const std::string source = group.source.empty() ? "all" : group.source;
  table.Row({source, group.gpu_class.empty() ? "all" : group.gpu_class, std::to_string(s.count),
             Percent(s.mean), Percent(s.median), Percent(s.p90), Percent(s.max),
             SignedPercent(s.bias)});
}

std::string MetricText(const ValidationReport& report, const Metric& metric) {
  if ((report.pooled.*metric.statistics).count == 0) {
    return "";
  }
  Table table({kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  table.Row({"source", "GPU", "rows", "mean", "median", "p90", "worst", "bias"});
  for (const ValidatedGroup& source : report.sources) {
    std::vector<const ValidatedGroup*> groups;
    for (const ValidatedGroup& group : report.groups) {
      if (group.source == source.source && (group.*metric.statistics).count > 0) {
        groups.push_back(&group);
      }
    }
    for (const ValidatedGroup* group : groups) {
      AddGroup(*group, metric, table);
    }
    if (groups.size() > 1) {
      AddGroup(source, metric, table);
    }
  }
  AddGroup(report.pooled, metric, table);
  return std::string("Errors of ") + metric.title + "\n" + table.Text(2) + '\n';
}

std::string RowsText(const ValidationReport& report) {
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight, kRight, kLeft});
  table.Row({"row", "predicted s", "measured s", "error", "predicted GiB", "measured GiB", "error",
             "profile"});
  for (const ValidatedRow& row : report.rows) {
    if (!row.skipped.empty()) {
      continue;
    }
    const bool has_time = row.has_step_time;
    const bool has_memory = row.has_memory;
    table.Row({row.run.id, Fixed(row.prediction.step_time.value, "%.4f"),
               has_time ? Fixed(row.measured_step_time_s, "%.4f") : "",
               has_time ? SignedPercent(row.step_time_error) : "",
               has_memory ? Fixed(row.predicted_memory_gib, "%.2f") : "",
               has_memory ? Fixed(row.measured_memory_gib, "%.2f") : "",
               has_memory ? SignedPercent(row.memory_error) : "", row.profile});
  }
  return "Rows\n" + table.WrappedText(2) + '\n';
}

// Reasons, the most frequent lists of ids kept short.
std::string SkippedText(const std::vector<ValidatedRow>& rows) {
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const ValidatedRow& row : rows) {
    if (!row.skipped.empty()) {
      by_reason[row.skipped].push_back(row.run.id);
    }
  }
  if (by_reason.empty()) {
    return "";
  }
  Table table({kRight, kLeft, kLeft});
  for (const auto& [reason, ids] : by_reason) {
    constexpr std::size_t kShown = 3;
    const std::string shown = Listed(std::span(ids).first(std::min(kShown, ids.size())));
    table.Row({std::to_string(ids.size()), reason, shown + (ids.size() > kShown ? ", ..." : "")});
  }
  return "Rows skipped\n" + table.WrappedText(2) + '\n';
}

std::string NotesText(const std::vector<ValidatedRow>& rows) {
  std::map<std::string, std::size_t> counts;
  for (const ValidatedRow& row : rows) {
    for (const std::string& note : row.notes) {
      ++counts[note];
    }
  }
  if (counts.empty()) {
    return "";
  }
  Table table({kRight, kLeft});
  for (const auto& [note, count] : counts) {
    table.Row({std::to_string(count), note});
  }
  return "Assumed, with the number of rows\n" + table.WrappedText(2) + '\n';
}

std::string TwinsText(const ValidationReport& report) {
  if (report.twins.empty()) {
    return "";
  }
  Table table({kRight, kRight, kRight, kLeft});
  table.Row({"rows", "step time", "memory", "which"});
  for (const TwinGroup& group : report.twins) {
    table.Row({std::to_string(group.ids.size()), Percent(group.step_time_spread),
               Percent(group.memory_spread), Listed(group.ids)});
  }
  return "Rows that differ only in what they measured, (largest - smallest) / mean\n" +
         table.WrappedText(2) + '\n';
}

const char* OutcomeName(RunOutcome outcome) {
  switch (outcome) {
    case RunOutcome::kUnknown:
      return "";
    case RunOutcome::kFits:
      return "fits";
    case RunOutcome::kFitsMax:
      return "fits_max";
    case RunOutcome::kOom:
      return "oom";
    case RunOutcome::kPresumedOom:
      return "failed_presumed_oom";
  }
  return "";
}

double MarginGibi(const ValidatedRow& row) {
  return static_cast<double>(row.prediction.Margin().value) / kGibi;
}

std::string OutcomesText(const OutOfMemoryReport& outcomes) {
  const OutOfMemoryScore& score = outcomes.score;
  Table table({kLeft, kLeft, kLeft, kRight});
  table.Row({"row", "measured", "predicted", "margin GiB"});
  for (const ValidatedRow& row : outcomes.rows) {
    if (row.skipped.empty() && !row.run.id.starts_with("oom-ref")) {
      table.Row({row.run.id, OutcomeName(row.run.outcome),
                 row.prediction.out_of_memory ? "oom" : "fits", Fixed(MarginGibi(row), "%+.2f")});
    }
  }
  return "Out of memory\n  " + std::to_string(score.oom_found) + " of " +
         std::to_string(score.oom) + " found, " + std::to_string(score.false_alarms) +
         " false alarms in " + std::to_string(score.fits) + " that fit, " +
         std::to_string(score.presumed_found) + " of " + std::to_string(score.presumed) +
         " that failed for an unpublished reason, " + std::to_string(score.skipped) + " skipped\n" +
         table.Text(2) + '\n' + SkippedText(outcomes.rows) + NotesText(outcomes.rows);
}

std::string BandsText(const ValidationReport& report) {
  if (report.pooled.band_median == 0) {
    return "";
  }
  Table table({kLeft, kRight, kRight, kRight});
  table.Row({"source", "rows", "inside", "median half-width"});
  std::vector<ValidatedGroup> groups = report.sources;
  groups.push_back(report.pooled);
  for (const ValidatedGroup& group : groups) {
    if (group.band_median > 0) {
      table.Row({group.source.empty() ? "all" : group.source, std::to_string(group.step_time.count),
                 Percent(group.band_coverage), Percent(group.band_median)});
    }
  }
  return "Step times inside the stated band (90 %)\n" + table.Text(2) + '\n';
}

Json RunErrorsJson(const ErrorStatistics& s) {
  if (s.count == 0) {
    return nullptr;
  }
  return {{"rows", s.count}, {"mean", s.mean}, {"median", s.median},
          {"p90", s.p90},    {"max", s.max},   {"bias", s.bias}};
}

Json GroupJson(const ValidatedGroup& group) {
  Json json;
  json["source"] = group.source.empty() ? Json(nullptr) : Json(group.source);
  json["gpu_class"] = group.gpu_class.empty() ? Json(nullptr) : Json(group.gpu_class);
  json["rows"] = group.rows;
  json["skipped"] = group.skipped;
  for (const Metric& metric : kMetrics) {
    json[metric.key] = RunErrorsJson(group.*metric.statistics);
  }
  json["band_coverage"] = group.band_median > 0 ? Json(group.band_coverage) : Json(nullptr);
  json["band_median"] = group.band_median > 0 ? Json(group.band_median) : Json(nullptr);
  return json;
}

Json RowJson(const ValidatedRow& row) {
  Json json;
  json["id"] = row.run.id;
  if (!row.skipped.empty()) {
    json["skipped"] = row.skipped;
    return json;
  }
  json["predicted"] = row.prediction.step_time.value;
  json["measured"] = row.has_step_time ? Json(row.measured_step_time_s) : Json(nullptr);
  json["error"] = row.has_step_time ? Json(row.step_time_error) : Json(nullptr);
  json["profile"] = row.profile;
  json["band"] = row.band > 0 ? Json(row.band) : Json(nullptr);
  if (row.has_memory) {
    constexpr std::array<const char*, 4> kKinds = {"", "allocated", "reserved", "device"};
    json["memory"] = {{"kind", kKinds[static_cast<std::size_t>(row.run.memory_kind)]},
                      {"predicted_gib", row.predicted_memory_gib},
                      {"measured_gib", row.measured_memory_gib},
                      {"error", row.memory_error}};
  }
  json["out_of_memory"] = row.prediction.out_of_memory;
  json["notes"] = row.notes;
  return json;
}

Json OutcomesJson(const OutOfMemoryReport& outcomes) {
  const OutOfMemoryScore& score = outcomes.score;
  Json json;
  json["recall"] = score.oom > 0 ? Json(score.Recall()) : Json(nullptr);
  json["false_alarms"] = score.fits > 0 ? Json(score.FalseAlarmRate()) : Json(nullptr);
  json["rows"] = score.rows;
  json["skipped"] = score.skipped;
  json["oom_rows"] = score.oom;
  json["oom_found"] = score.oom_found;
  json["fits_rows"] = score.fits;
  json["false_alarm_rows"] = score.false_alarms;
  json["presumed_rows"] = score.presumed;
  json["presumed_found"] = score.presumed_found;
  json["details"] = Json::array();
  for (const ValidatedRow& row : outcomes.rows) {
    Json detail = {{"id", row.run.id}, {"outcome", OutcomeName(row.run.outcome)}};
    if (row.skipped.empty()) {
      detail["predicted_oom"] = row.prediction.out_of_memory;
      detail["margin_gib"] = MarginGibi(row);
      detail["notes"] = row.notes;
    } else {
      detail["skipped"] = row.skipped;
    }
    json["details"].push_back(detail);
  }
  return json;
}

}  // namespace

std::string ValidationText(const ValidationOutput& output) {
  const ValidationReport& report = output.report;
  std::string text =
      RowsText(report) + SkippedText(report.rows) + NotesText(report.rows) + TwinsText(report);
  if (output.outcomes) {
    text += OutcomesText(*output.outcomes);
  }
  for (const Metric& metric : kMetrics) {
    text += MetricText(report, metric);
  }
  text += BandsText(report);
  text.pop_back();  // one of the two line ends
  return text;
}

std::string ValidationJson(const ValidationOutput& output) {
  Json json = ReportHead("shardwright-validation");
  json["groups"] = Json::array();
  for (const ValidatedGroup& group : output.report.groups) {
    json["groups"].push_back(GroupJson(group));
  }
  json["sources"] = Json::array();
  for (const ValidatedGroup& source : output.report.sources) {
    json["sources"].push_back(GroupJson(source));
  }
  json["pooled"] = GroupJson(output.report.pooled);
  json["oom"] = output.outcomes ? OutcomesJson(*output.outcomes) : Json(nullptr);
  json["rows"] = Json::array();
  for (const ValidatedRow& row : output.report.rows) {
    json["rows"].push_back(RowJson(row));
  }
  json["twins"] = Json::array();
  for (const TwinGroup& group : output.report.twins) {
    json["twins"].push_back({{"ids", group.ids},
                             {"step_time_spread", group.step_time_spread},
                             {"memory_spread", group.memory_spread}});
  }
  return json.dump(2) + '\n';
}

}  // namespace shardwright
