#include "cli/comparison_print.h"

#include <cmath>
#include <cstddef>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::size_t kMostParts = 8;  // in the report for people
constexpr std::size_t kMostOps = 8;
constexpr std::size_t kMostOpsInJson = 50;
// Parts that differ by less than this fraction of the step are not worth a line.
constexpr double kLeastPart = 0.002;

// "+1.2 ms"; a time alone has no sign.
std::string Signed(double seconds) {
  return (seconds < 0 ? "-" : "+") + Format(Seconds(std::abs(seconds)));
}

// measured / simulated - 1, "+12.3 %"; above three times as a factor, "x5.18".
std::string ChangeText(double simulated, double measured) {
  if (simulated <= 0) {
    return "";
  }
  const double change = measured / simulated - 1;
  if (change > 2) {
    return Fixed(change + 1, "x%.3g");
  }
  return (change < 0 ? "" : "+") + Percent(change);
}

void TimeRow(Table& table, const std::string& name, Seconds simulated, Seconds measured) {
  table.Row({name, Format(simulated), Format(measured), Signed(measured.value - simulated.value),
             ChangeText(simulated.value, measured.value)});
}

Table TimeTable(const std::string& first) {
  Table table({kLeft, kRight, kRight, kRight, kRight});
  table.Row({first, "simulated", "measured", "difference", ""});
  return table;
}

std::string PartsText(const Comparison& c) {
  Table table = TimeTable("part of the step");
  std::size_t rows = 0;
  for (const StepPart& part : c.parts) {
    const double difference = std::abs(part.measured.value - part.simulated.value);
    if (rows == kMostParts || difference < kLeastPart * c.simulated_step.value) {
      break;
    }
    TimeRow(table, part.name, part.simulated, part.measured);
    ++rows;
  }
  return rows == 0 ? "" : "\nThe gap, seen from the compute stream\n" + table.Text(2);
}

std::string ClassesText(const Comparison& c) {
  Table table = TimeTable("class (ops per step)");
  for (const ClassComparison& row : c.classes) {
    if (row.simulated.value > 0 || row.measured.value > 0) {
      TimeRow(table, std::string(NameOf(row.op_class)) + " (" + WithCommas(row.ops) + ")",
              row.simulated, row.measured);
    }
  }
  return "\nBusy time by class, one step\n" + table.Text(2);
}

std::string OpsText(const Program& program, const Comparison& c) {
  Table table = TimeTable("op");
  for (std::size_t i = 0; i < std::min(c.ops.size(), kMostOps); ++i) {
    TimeRow(table, OpName(program, program.step.ops[c.ops[i].op.value]), c.ops[i].simulated,
            c.ops[i].measured);
  }
  return c.ops.empty() ? "" : "\nOps that differ most\n" + table.Text(2);
}

std::string NameOfSegment(const SegmentComparison& row) {
  std::string name =
      row.phase == Phase::kOptimizer ? std::string() : "mb" + std::to_string(row.micro_batch) + '.';
  name += row.unit.empty() ? std::string() : row.unit + '.';
  return name + std::string(NameOf(row.phase)) + " compute";
}

std::string SegmentsText(const Comparison& c) {
  if (c.segments.empty()) {
    return "";
  }
  Table table = TimeTable("compute of a unit");
  for (std::size_t i = 0; i < std::min(c.segments.size(), kMostOps); ++i) {
    const SegmentComparison& row = c.segments[i];
    TimeRow(table, NameOfSegment(row), row.simulated, row.measured);
  }
  return "\nUnits that differ most\n" + table.Text(2);
}

std::string CalibrationsText(const Comparison& c) {
  Table table({kLeft, kRight, kRight, kRight, kLeft});
  table.Row({"calibrated", "factor", "step", "left", "profile"});
  const auto left = [&](Seconds step) { return ChangeText(step.value, c.measured_step.value); };
  for (std::size_t i = 0; i < std::min(c.calibrations.size(), kMostParts); ++i) {
    const Calibration& row = c.calibrations[i];
    table.Row({row.name, Fixed(row.factor, "x%.3g"), Format(row.step_time), left(row.step_time),
               row.fields});
  }
  table.Row({"all of them", "", Format(c.calibrated_step), left(c.calibrated_step), ""});
  return c.calibrations.empty() ? "" : "\nWhat calibrating would change\n" + table.Text(2);
}

std::string MemoryText(const MemoryComparison& m) {
  if (m.simulated_peak == Bytes(0) || m.measured_peak == Bytes(0)) {
    return "\nMemory: not recorded in both traces\n";
  }
  Table table({kLeft, kRight, kRight});
  table.Row({"bytes at the peak", "simulated", "measured"});
  for (std::size_t i = 0; i < kCategoryCount; ++i) {
    if (m.simulated[i] != Bytes(0) || m.measured[i] != Bytes(0)) {
      table.Row({std::string(NameOf(static_cast<Category>(i))), Format(m.simulated[i]),
                 Format(m.measured[i])});
    }
  }
  table.Row({"all", Format(m.simulated_peak), Format(m.measured_peak)});
  return "\nMemory of one device\n" + table.Text(2);
}

std::string MatchedLine(const Comparison& c) {
  return WithCommas(c.matched) + " of " + WithCommas(c.spans) + " spans matched";
}

Json PairJson(Seconds simulated, Seconds measured) {
  return {{"simulated_s", simulated.value}, {"measured_s", measured.value}};
}

Json NamedPair(const std::string& name, Seconds simulated, Seconds measured) {
  Json json = {{"name", name}};
  json.update(PairJson(simulated, measured));
  return json;
}

const char* NameOf(MatchedBy by) {
  return by == MatchedBy::kSizes    ? "sizes"
         : by == MatchedBy::kNumber ? "number, since sizes were not recorded"
                                    : "names of kernels, since calls were not recorded";
}

void AddDifferences(const char* side, const std::vector<MatchDifference>& rows, Table& table) {
  for (const MatchDifference& row : rows) {
    table.Row({side, WithCommas(row.count), row.what});
  }
}

Json DifferencesJson(const std::vector<MatchDifference>& rows) {
  return Mapped<Json>(rows, [&](const MatchDifference& row) -> Json {
    return {{"what", row.what}, {"count", row.count}};
  });
}

}  // namespace

std::string MatchText(const RunMatch& match) {
  const auto round = [](double number) { return WithCommas(std::llround(number)); };
  Table groups({kLeft, kRight, kRight, kRight, kRight, kLeft});
  groups.Row({"of one step", "planned", "recorded", "alike", "", "told by"});
  Table differences({kLeft, kRight, kLeft});
  for (const MatchGroup& group : match.groups) {
    groups.Row({group.name, round(group.planned), round(group.recorded), round(group.matched),
                Percent(group.score), NameOf(group.by)});
    AddDifferences("missing", group.missing, differences);
    AddDifferences("too many", group.extra, differences);
  }
  const std::string rest = differences.Text(2);
  return std::string(match.IsRun() ? "A run of this plan" : "Not a run of this plan") + "\n" +
         groups.Text(2) + (match.IsRun() || rest.empty() ? std::string() : "\n" + rest);
}

std::string MatchJson(const RunMatch& match) {
  Json groups = Mapped<Json>(match.groups, [&](const MatchGroup& group) -> Json {
    return {{"name", group.name},
            {"told_by", group.by == MatchedBy::kSizes    ? "sizes"
                        : group.by == MatchedBy::kNumber ? "number"
                                                         : "kernels"},
            {"planned", group.planned},
            {"recorded", group.recorded},
            {"matched", group.matched},
            {"score", group.score},
            {"missing", DifferencesJson(group.missing)},
            {"too_many", DifferencesJson(group.extra)}};
  });
  return Json{{"is_run", match.IsRun()}, {"groups", groups}}.dump();
}

std::string ComparisonText(const PlanFile& file, const Program& program, const Comparison& c) {
  std::string text = c.match.groups.empty() ? std::string() : MatchText(c.match) + "\n";
  text += TitleOf(file) + ", " + WithCommas(c.ranks) + " ranks, " + WithCommas(c.measured_steps) +
          " steps measured on all of them together (the first ones do not count)\n";
  for (const std::string& note : c.notes) {
    text += "note: " + note + "\n";
  }
  text += "\n";
  Table step = TimeTable("");
  TimeRow(step, "step time", c.simulated_step, c.measured_step);
  text += step.Text(2);
  text += "  measured steps from " + Format(c.measured_shortest) + " to " +
          Format(c.measured_longest) + "\n";
  text += PartsText(c) + ClassesText(c) + OpsText(program, c) + SegmentsText(c) +
          CalibrationsText(c) + MemoryText(c.memory) + "\n";
  for (const std::string& finding : c.findings) {
    text += "contradicts the program: " + finding + "\n";
  }
  return text + MatchedLine(c) + "\n";
}

std::string ComparisonJson(const PlanFile& file, const Program& program, const Comparison& c) {
  Json json = ReportHead("shardwright-comparison");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["match"] = c.match.groups.empty() ? Json() : Json::parse(MatchJson(c.match));
  json["ranks"] = c.ranks;
  json["measured_steps"] = c.measured_steps;
  json["step_time"] = PairJson(c.simulated_step, c.measured_step);
  json["step_time"]["gap"] = c.gap();
  json["step_time"]["measured_shortest_s"] = c.measured_shortest.value;
  json["step_time"]["measured_longest_s"] = c.measured_longest.value;
  json["spans"] = c.spans;
  json["matched"] = c.matched;
  json["findings"] = c.findings;
  json["notes"] = c.notes;
  json["parts"] = Mapped<Json>(c.parts, [&](const StepPart& part) {
    return NamedPair(part.name, part.simulated, part.measured);
  });
  json["classes"] = Json::array();
  for (const ClassComparison& row : c.classes) {
    Json entry = NamedPair(std::string(NameOf(row.op_class)), row.simulated, row.measured);
    entry["ops"] = row.ops;
    json["classes"].push_back(std::move(entry));
  }
  json["ops"] = Json::array();
  for (std::size_t i = 0; i < std::min(c.ops.size(), kMostOpsInJson); ++i) {
    json["ops"].push_back(NamedPair(OpName(program, program.step.ops[c.ops[i].op.value]),
                                    c.ops[i].simulated, c.ops[i].measured));
  }
  json["segments"] = Json::array();
  for (const SegmentComparison& row : c.segments) {
    Json entry = NamedPair(NameOfSegment(row), row.simulated, row.measured);
    entry["unit"] = row.unit;
    entry["phase"] = NameOf(row.phase);
    entry["micro_batch"] = row.micro_batch;
    json["segments"].push_back(std::move(entry));
  }
  json["calibrations"] = Mapped<Json>(c.calibrations, [&](const Calibration& row) -> Json {
    return {{"name", row.name},
            {"factor", row.factor},
            {"step_time_s", row.step_time.value},
            {"profile", row.fields}};
  });
  json["calibrated_step_time_s"] = c.calibrated_step.value;
  Json categories = Json::object();
  for (std::size_t i = 0; i < kCategoryCount; ++i) {
    categories[std::string(NameOf(static_cast<Category>(i)))] = {
        {"simulated_bytes", c.memory.simulated[i].value},
        {"measured_bytes", c.memory.measured[i].value}};
  }
  json["memory"] = {{"simulated_peak_bytes", c.memory.simulated_peak.value},
                    {"measured_peak_bytes", c.memory.measured_peak.value},
                    {"at_peak", categories}};
  // Names may hold any bytes of a user's file.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace shardwright
