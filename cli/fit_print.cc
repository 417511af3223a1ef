#include "cli/fit_print.h"

#include <map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/table.h"
#include "core/json.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::string NumberText(double value, bool is_time) {
  return is_time ? Format(Seconds(value)) : Fixed(value, "%.3g");
}

std::vector<std::string> Cells(const ErrorStatistics& s) {
  return {std::to_string(s.count), Percent(s.mean), Percent(s.median),
          Percent(s.p90),          Percent(s.max),  SignedPercent(s.bias)};
}

void Row(Table& table, std::vector<std::string> cells, const ErrorStatistics& s) {
  const std::vector<std::string> more = Cells(s);
  cells.insert(cells.end(), more.begin(), more.end());
  table.Row(std::move(cells));
}

// The errors of left-out rows by source.
std::map<std::string, ErrorStatistics> BySource(const RunFit& fit) {
  std::map<std::string, std::vector<double>> errors;
  for (const LeftOutRow& row : fit.left_out_rows) {
    errors[row.source].push_back(row.error);
  }
  std::map<std::string, ErrorStatistics> statistics;
  for (const auto& [source, values] : errors) {
    statistics[source] = Summarise(values);
  }
  return statistics;
}

Json FitErrorsJson(const ErrorStatistics& s) {
  return {{"rows", s.count}, {"mean", s.mean}, {"median", s.median},
          {"p90", s.p90},    {"max", s.max},   {"bias", s.bias}};
}

}  // namespace

std::string RunFitText(const RunFit& fit) {
  Table numbers({kLeft, kLeft, kLeft, kRight, kRight, kRight, kRight, kLeft});
  numbers.Row({"GPU", "kernel set", "number", "value", "expected", "from", "to", ""});
  Table stacks({kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight, kRight});
  stacks.Row({"GPU", "kernel set", "spread", "rows", "mean", "median", "p90", "worst", "bias"});
  for (const FittedStack& stack : fit.stacks) {
    for (const FittedNumber& n : stack.numbers) {
      numbers.Row({stack.gpu, stack.kernel_set, n.path, NumberText(n.value, n.is_time),
                   NumberText(n.start, n.is_time), NumberText(n.lower, n.is_time),
                   NumberText(n.upper, n.is_time), n.is_own ? "" : "shared"});
    }
    Row(stacks, {stack.gpu, stack.kernel_set, Percent(stack.spread)}, stack.errors);
  }
  std::string text =
      "Numbers\n" + numbers.Text(2) + "\nErrors of the rows that were fitted\n" + stacks.Text(2);
  if (!fit.left_out_rows.empty()) {
    Table left_out({kLeft, kLeft, kLeft, kRight, kRight, kRight, kRight, kRight, kRight});
    left_out.Row(
        {"GPU", "framework", "left out", "rows", "mean", "median", "p90", "worst", "bias"});
    for (const LeftOutModel& model : fit.left_out) {
      Row(left_out, {model.gpus, model.family, model.model}, model.errors);
    }
    for (const auto& [source, statistics] : BySource(fit)) {
      Row(left_out, {"all", "of " + source, "each in turn"}, statistics);
    }
    Row(left_out, {"all", "all", "each in turn"}, fit.cross_validation);
    text += "\nErrors of rows that were left out\n" + left_out.Text(2);
  }
  return text + "\n" + std::to_string(fit.evaluations) + " simulations of all rows of a group, " +
         std::to_string(fit.skipped) + " rows skipped\n";
}

std::string RunFitJson(const RunFit& fit) {
  Json json = ReportHead("shardwright-fit");
  json["stacks"] = Json::array();
  for (const FittedStack& stack : fit.stacks) {
    Json numbers = Json::array();
    for (const FittedNumber& n : stack.numbers) {
      numbers.push_back({{"path", n.path},
                         {"value", n.value},
                         {"lower", n.lower},
                         {"upper", n.upper},
                         {"expected", n.start},
                         {"shared", !n.is_own}});
    }
    json["stacks"].push_back({{"gpu", stack.gpu},
                              {"kernel_set", stack.kernel_set},
                              {"spread", stack.spread},
                              {"numbers", numbers},
                              {"errors", FitErrorsJson(stack.errors)}});
  }
  json["left_out"] = Json::array();
  for (const LeftOutModel& model : fit.left_out) {
    json["left_out"].push_back({{"gpu", model.gpus},
                                {"framework", model.family},
                                {"model", model.model},
                                {"errors", FitErrorsJson(model.errors)}});
  }
  json["cross_validation"] = FitErrorsJson(fit.cross_validation);
  json["cross_validation_by_source"] = Json::object();
  for (const auto& [source, statistics] : BySource(fit)) {
    json["cross_validation_by_source"][source] = FitErrorsJson(statistics);
  }
  json["left_out_rows"] = Json::array();
  for (const LeftOutRow& row : fit.left_out_rows) {
    json["left_out_rows"].push_back({{"id", row.id}, {"error", row.error}});
  }
  json["skipped"] = fit.skipped;
  return json.dump(2) + '\n';
}

}  // namespace shardwright
