#include "cli/advise_report.h"

#include <cmath>
#include <cstddef>
#include <numeric>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/comparison_print.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/printable.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::size_t kMostUnits = 6;  // in the report for people
constexpr std::size_t kMostNumbers = 8;
constexpr std::size_t kMostPatchLines = 24;

// One kind of time of a step. All of them add up to it.
struct CostRow {
  const char* name;
  double seconds = 0;
};

std::vector<CostRow> CostRows(const StepCosts& costs) {
  const auto& run = costs.parts.run;
  const auto& wait = costs.parts.wait;
  const auto of = [&](OpClass op_class) { return run[static_cast<std::size_t>(op_class)]; };
  const auto idle = [&](Stream stream) { return wait[static_cast<std::size_t>(stream)]; };
  const double copies = of(OpClass::kDeviceCopy), updates = of(OpClass::kOptimizer);
  const double compute = std::accumulate(run.begin(), run.end(), 0.0) - copies - updates;
  const double loading = std::min(costs.data_loading, costs.before_first);
  std::vector<CostRow> rows = {
      {"compute", compute},
      {"copies of parameters and gradients", copies},
      {"optimizer", updates},
      {"exposed gathers", idle(Stream::kGather) + idle(Stream::kCopyIn)},
      {"exposed reductions", idle(Stream::kReduce) + idle(Stream::kReplicate)},
      {"exposed copies to and from the host", idle(Stream::kH2d) + idle(Stream::kD2h)},
      {"waiting for other ranks", costs.parts.peers},
      {"waiting for the data loader", loading},
      {"the optimizer, on the host", costs.host_updates},
      {costs.on_device ? "waiting for the host" : "the host, between ops",
       costs.parts.host_issue + costs.parts.other + idle(Stream::kHost) + idle(Stream::kCompute) -
           loading - costs.host_updates},
      {"waiting for the communicator", costs.parts.communicator},
  };
  std::erase_if(rows, [](const CostRow& row) { return row.seconds <= 0; });
  return rows;
}

std::string CostsText(const StepCosts& costs) {
  Table table({kLeft, kRight, kRight});
  for (const CostRow& row : CostRows(costs)) {
    table.Row({row.name, Format(Seconds(row.seconds)), Percent(row.seconds / costs.parts.period)});
  }
  return "\nWhere a step goes\n" + table.Text(2);
}

// Those that compute waits for most.
std::string UnitsText(const StepCosts& costs) {
  std::vector<const UnitCosts*> rows =
      Mapped<const UnitCosts*>(costs.units, [&](const UnitCosts& unit) { return &unit; });
  StableSort(rows,
             [](const UnitCosts* a, const UnitCosts* b) { return a->Exposed() > b->Exposed(); });
  if (rows.empty() || rows.front()->Exposed() <= 0) {
    return "";
  }
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
  table.Row({"unit", "gathers", "for backward", "reductions", "take", "exposed", "of the step"});
  for (std::size_t i = 0; i < std::min(rows.size(), kMostUnits); ++i) {
    const UnitCosts& unit = *rows[i];
    table.Row({unit.unit.empty() ? "(not named)" : PrintableLine(unit.unit),
               Fixed(unit.gathers, "%.3g"), Fixed(unit.backward_gathers, "%.3g"),
               Fixed(unit.reductions + unit.all_reductions, "%.3g"),
               Format(Seconds(unit.gather_busy + unit.reduce_busy)),
               Format(Seconds(unit.Exposed())), Percent(unit.Exposed() / costs.parts.period)});
  }
  const std::size_t more = rows.size() - std::min(rows.size(), kMostUnits);
  return "\nUnits that compute waits for\n" + table.Text(2) +
         (more == 0 ? "" : "  and " + std::to_string(more) + " more\n");
}

std::string NumberText(const CalibratedNumber& number, double value) {
  return number.is_time ? Format(Seconds(value)) : Fixed(value, "%.3g");
}

// Numbers that moved, the furthest first.
std::string CalibrationText(const AdviseReport& report) {
  if (!report.calibration) {
    return "";
  }
  std::vector<CalibratedNumber> numbers = report.calibration->numbers;
  const auto moved = [](const CalibratedNumber& n) {
    return n.before > 0 && n.after > 0 ? std::abs(std::log(n.after / n.before)) : 0.0;
  };
  std::erase_if(numbers, [&](const CalibratedNumber& n) { return moved(n) < 0.01; });
  StableSort(numbers, [&](const auto& a, const auto& b) { return moved(a) > moved(b); });
  const CalibratedRun& run = report.calibration->runs.front();
  std::string text = "\nThe profile\n  step measured " + Format(run.measured) + ", simulated " +
                     Format(run.before) + " before";
  if (!report.is_corrected) {
    return text + "; the trace's own numbers say " + Format(run.after) +
           ", which is worse: it stays as it is\n";
  }
  text += ", " + Format(run.after) + " with what the trace tells\n";
  Table table({kLeft, kRight, kRight, kRight});
  table.Row({"number", "before", "after", "error"});
  for (std::size_t i = 0; i < std::min(numbers.size(), kMostNumbers); ++i) {
    table.Row({numbers[i].field, NumberText(numbers[i], numbers[i].before),
               NumberText(numbers[i], numbers[i].after), Percent(numbers[i].spread)});
  }
  return numbers.empty() ? text : text + table.Text(2);
}

std::string MoreMemory(std::int64_t bytes) {
  return bytes == 0  ? ""
         : bytes > 0 ? "; " + Format(Bytes(bytes)) + " more memory"
                     : "; " + Format(Bytes(-bytes)) + " less memory";
}

std::string GainText(const Advice& advice, double step) {
  std::string text = advice.is_predicted ? "" : "at most ";
  text += Percent(advice.gain / step);
  if (advice.is_predicted) {
    text += " +- " + Percent(advice.band / step);
  }
  return text;
}

std::string AdviceText(const AdviseReport& report) {
  std::string text;
  const double step = report.costs.parts.period;
  if (!report.has_fsdp_problem) {
    text += "\nNo FSDP problem: " + Format(Seconds(report.costs.Exposed())) + " (" +
            Percent(report.costs.Exposed() / step) +
            ") of a step is exposed communication, and no other choice gains 2 %\n";
  }
  if (!report.advice.empty()) {
    text += "\nAdvice, by gain over effort\n";
  }
  int number = 0;
  for (const Advice& advice : report.advice) {
    text += "  " + std::to_string(++number) + ". " + std::string(NameOf(advice.topic)) + ": " +
            PrintableLine(advice.what) + "\n     gains " + GainText(advice, step) + ", takes " +
            std::string(NameOf(advice.effort)) + MoreMemory(advice.memory.value_or(0)) + "\n";
    text += advice.seen.empty() ? "" : "     seen: " + PrintableLine(advice.seen) + "\n";
    text += advice.how.empty() ? "" : "     how:  " + advice.how + "\n";
  }
  return text;
}

// The first lines of it.
std::string PatchText(const std::string& patch) {
  std::string text;
  std::size_t begin = 0, lines = 0;
  for (; begin < patch.size() && lines < kMostPatchLines; ++lines) {
    const std::size_t end = std::min(patch.find('\n', begin), patch.size() - 1);
    std::string line = patch.substr(begin, end + 1 - begin);
    constexpr std::size_t kWidest = kReportWidth - 2;
    if (line.size() > kWidest) {
      line = line.substr(0, kWidest - 4) + "...\n";
    }
    text += "  " + line;
    begin = end + 1;
  }
  const auto rest =
      std::count(patch.begin() + static_cast<std::ptrdiff_t>(begin), patch.end(), '\n');
  return text + (rest == 0 ? "" : "  ... and " + std::to_string(rest) + " lines (--patch FILE)\n");
}

std::string BetterText(const AdviseReport& report) {
  if (!report.has_plan) {
    return "";
  }
  if (!report.better) {
    return "\nNo plan is known that is better by more than a percent.\n";
  }
  const BetterPlan& better = *report.better;
  std::string text = "\nThe better plan: " + Format(better.step_time) + " a step, " +
                     Percent(better.gain) + " +- " + Percent(better.band) + " less; it needs " +
                     Format(better.memory_after) + " per GPU, not " + Format(better.memory_before) +
                     "\n";
  Table table({kLeft, kLeft, kLeft, kLeft});
  const auto shown = [](const std::string& value) { return value.empty() ? "-" : value; };
  for (const PlanChange& change : better.changes) {
    table.Row({change.field, shown(change.before), "-> " + shown(change.after),
               change.alike > 1 ? "and " + std::to_string(change.alike - 1) + " alike" : ""});
  }
  return text + table.Text(2) + "\nPatch of the settings for " + better.target + "\n" +
         PatchText(better.patch);
}

Json CostsJson(const StepCosts& costs) {
  Json json;
  json["step_s"] = costs.parts.period;
  json["shortest_s"] = costs.shortest;
  json["longest_s"] = costs.longest;
  json["steps"] = costs.steps;
  json["ranks"] = costs.ranks;
  json["micro_batches"] = costs.micro_batches;
  json["exposed_comm_s"] = costs.Exposed();
  json["parts"] = Mapped<Json>(CostRows(costs), [&](const CostRow& row) -> Json {
    return {{"name", row.name}, {"seconds", row.seconds}};
  });
  json["units"] = Mapped<Json>(costs.units, [&](const UnitCosts& unit) -> Json {
    return {{"unit", unit.unit},
            {"gathers", unit.gathers},
            {"backward_gathers", unit.backward_gathers},
            {"late_gathers", unit.late_gathers},
            {"reductions", unit.reductions},
            {"all_reductions", unit.all_reductions},
            {"largest_gather_bytes", unit.gathered.value},
            {"busy_s", unit.gather_busy + unit.reduce_busy},
            {"exposed_forward_gathers_s", unit.forward_exposed},
            {"exposed_backward_gathers_s", unit.backward_exposed},
            {"exposed_reductions_s", unit.reduce_exposed}};
  });
  return json;
}

Json CalibrationJson(const AdviseReport& report) {
  if (!report.calibration) {
    return nullptr;
  }
  const CalibratedRun& run = report.calibration->runs.front();
  Json json = {{"is_corrected", report.is_corrected},
               {"measured_s", run.measured.value},
               {"before_s", run.before.value},
               {"after_s", run.after.value}};
  json["numbers"] =
      Mapped<Json>(report.calibration->numbers, [&](const CalibratedNumber& number) -> Json {
        return {{"field", number.field},
                {"unit", number.is_time ? "s" : "fraction"},
                {"before", number.before},
                {"after", number.after},
                {"spread", number.spread}};
      });
  return json;
}

Json AdviceJson(const Advice& advice, double step) {
  return {{"topic", NameOf(advice.topic)},
          {"what", advice.what},
          {"seen", advice.seen},
          {"how", advice.how},
          {"effort", NameOf(advice.effort)},
          {"gain_s", advice.gain},
          {"gain", advice.gain / step},
          {"band", advice.is_predicted ? Json(advice.band / step) : Json(nullptr)},
          {"is_predicted", advice.is_predicted},
          {"more_memory_bytes", advice.memory ? Json(*advice.memory) : Json(nullptr)}};
}

Json BetterJson(const BetterPlan& better) {
  Json json = {{"step_time_s", better.step_time.value},
               {"gain", better.gain},
               {"band", better.band},
               {"memory_before_bytes", better.memory_before.value},
               {"memory_after_bytes", better.memory_after.value}};
  json["changes"] = ChangesJson(better.changes);
  json["target"] = better.target;
  json["patch"] = better.patch;
  json["plan_file"] = ParseOrdered(PlanFileJson(better.file), "plan");
  return json;
}

}  // namespace

std::string AdviseText(const AdviseReport& report) {
  const StepCosts& costs = report.costs;
  std::string text = PrintableLine(report.title) + "\n" + Format(Seconds(costs.parts.period)) +
                     " a step (" + Format(Seconds(costs.shortest)) + " to " +
                     Format(Seconds(costs.longest)) + ", " + std::to_string(costs.steps) +
                     (costs.steps == 1 ? " step of " : " steps of ") + std::to_string(costs.ranks) +
                     (costs.ranks == 1 ? " rank)\n" : " ranks)\n");
  text += CostsText(costs) + UnitsText(costs) + CalibrationText(report) + AdviceText(report) +
          BetterText(report);
  for (const std::string& note : report.notes) {
    text += "\nNote: " + PrintableLine(note);
  }
  return text + (report.notes.empty() ? "" : "\n");
}

std::string AdviseJson(const AdviseReport& report) {
  Json json = ReportHead("shardwright-advice");
  json["title"] = report.title;
  json["match"] = report.match ? Json::parse(MatchJson(*report.match)) : Json(nullptr);
  json["costs"] = CostsJson(report.costs);
  json["calibration"] = CalibrationJson(report);
  json["has_fsdp_problem"] = report.has_fsdp_problem;
  json["advice"] = Mapped<Json>(report.advice, [&](const Advice& advice) {
    return AdviceJson(advice, report.costs.parts.period);
  });
  json["better"] = report.better ? BetterJson(*report.better) : Json(nullptr);
  json["notes"] = report.notes;
  json["text"] = AdviseText(report);
  return json.dump(2) + "\n";
}

}  // namespace shardwright
