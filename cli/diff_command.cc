// What two plans choose differently, and what that changes.

#include <cctype>
#include <cmath>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_diff.h"
#include "cli/prediction.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// The name that tells an element of an array from its sisters; empty: its index does.
std::string KeyOf(const Json& element) {
  for (const char* key : {"name", "module"}) {
    if (element.is_object() && element.contains(key) && element[key].is_string()) {
      return element[key].get<std::string>();
    }
  }
  return "";
}

// Every value by its path: "plan.units[model.layers.3].reshard" -> "\"always\"".
void Flatten(const Json& json, const std::string& path,
             std::map<std::string, std::string>& fields) {
  if (json.is_object()) {
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const auto& [key, value] : json.items()) {
      std::string inner = prefix;
      Flatten(value, inner.append(key), fields);
    }
  } else if (json.is_array() && !json.empty() && json[0].is_object()) {
    for (std::size_t i = 0; i < json.size(); ++i) {
      const std::string key = KeyOf(json[i]);
      Flatten(json[i], path + "[" + (key.empty() ? std::to_string(i) : key) + "]", fields);
    }
  } else {
    fields[path] = json.is_string() ? json.get<std::string>() : json.dump();
  }
}

std::map<std::string, std::string> FieldsOf(const PlanFile& file) {
  std::map<std::string, std::string> fields;
  Flatten(ParseOrdered(PlanFileJson(file), "plan"), "", fields);
  return fields;
}

std::string WithoutNumbers(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    const bool is_digit = std::isdigit(static_cast<unsigned char>(c)) != 0;
    if (!is_digit) {
      pattern += c;
    } else if (!pattern.ends_with('#')) {
      pattern += '#';
    }
  }
  return pattern;
}

Prediction PredictPlan(const PlanFile& file) {
  PlanPrograms programs({file, file.plan});
  CheckLegal(programs.Largest());
  const SimulateOptions options = SimulateOptionsOf(file, programs.Largest());
  Simulator simulator(file.cluster, file.profile);
  AccountedStep step = AccountForPlan(simulator, programs, options, SumsOf(file));
  return Predict(file, step.result, std::move(step.account));
}

std::string Shown(const std::string& value) {
  return value.empty() ? "-" : value;
}

std::string SignedChange(double before, double after) {
  if (before == after) {
    return "";
  }
  return before == 0.0 ? "new"
                       : (after > before ? "+" : "-") + Percent(std::abs(after / before - 1.0));
}

// One reason of the steps' times: seconds of it before and after.
struct Why {
  std::string what;
  double before = 0;
  double after = 0;
};

// Where the times of the steps differ, by enough to be worth a line; the largest first.
std::vector<Why> WhyOf(const Prediction& a, const Prediction& b) {
  constexpr double kLeast = 0.002;  // of the step
  std::vector<Why> rows;
  const auto add = [&](std::string_view what, SimTime before, SimTime after) {
    Why row{std::string(what), ToSeconds(before).value, ToSeconds(after).value};
    if (std::abs(row.after - row.before) >= kLeast * a.step_time.value) {
      rows.push_back(std::move(row));
    }
  };
  add("the model's FLOPs at peak", a.waterfall.at_peak, b.waterfall.at_peak);
  for (std::size_t i = 0; i < kMfuLossCount; ++i) {
    add(NameOf(static_cast<MfuLoss>(i)), a.waterfall.lost[i], b.waterfall.lost[i]);
  }
  StableSort(rows, [](const Why& x, const Why& y) {
    return std::abs(x.after - x.before) > std::abs(y.after - y.before);
  });
  return rows;
}

std::string WhyText(const Prediction& a, const Prediction& b) {
  const std::vector<Why> rows = WhyOf(a, b);
  Table table({kLeft, kRight, kRight, kRight});
  table.Row({"where the time differs", "before", "after", ""});
  for (const Why& row : rows) {
    const double change = row.after - row.before;
    table.Row({row.what, Format(Seconds(row.before)), Format(Seconds(row.after)),
               (change > 0 ? "+" : "") + Format(Seconds(change))});
  }
  return rows.empty() ? "" : "\n" + table.Text();
}

std::string DiffText(const std::vector<PlanChange>& changes, const Prediction& a,
                     const Prediction& b) {
  std::string text;
  Table fields({kLeft, kLeft, kLeft, kLeft});
  for (const PlanChange& change : changes) {
    fields.Row({change.field, Shown(change.before), "-> " + Shown(change.after),
                change.alike > 1 ? "and " + std::to_string(change.alike - 1) + " alike" : ""});
  }
  text += changes.empty() ? "The plans are equal.\n" : fields.Text() + "\n";
  Table figures({kLeft, kRight, kRight, kRight});
  figures.Row({"", "before", "after", ""});
  const auto add_time = [&](const char* name, Seconds before, Seconds after) {
    figures.Row({name, Format(before), Format(after), SignedChange(before.value, after.value)});
  };
  const auto add_bytes = [&](const char* name, Bytes before, Bytes after) {
    figures.Row(
        {name, Format(before), Format(after),
         SignedChange(static_cast<double>(before.value), static_cast<double>(after.value))});
  };
  add_time("step time", a.step_time, b.step_time);
  add_time("exposed communication", a.exposed_comm, b.exposed_comm);
  add_bytes("allocated at the peak", a.device_peak.total, b.device_peak.total);
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    const Bytes before = a.device_peak.by_category[c], after = b.device_peak.by_category[c];
    if (before != after) {
      add_bytes(("  " + std::string(NameOf(static_cast<Category>(c)))).c_str(), before, after);
    }
  }
  add_bytes("reserved", a.reserved, b.reserved);
  figures.Row({"fits", a.misfits.empty() ? "yes" : "no", b.misfits.empty() ? "yes" : "no", ""});
  return text + figures.Text() + WhyText(a, b);
}

Json FiguresJson(const Prediction& p) {
  return {{"step_time_s", p.step_time.value},
          {"exposed_comm_s", p.exposed_comm.value},
          {"peak_allocated_bytes", p.device_peak.total.value},
          {"peak_reserved_bytes", p.reserved.value},
          {"peak_by_category", BytesByCategory(p.device_peak)},
          {"fits", p.misfits.empty()}};
}

std::string DiffJson(const std::vector<PlanChange>& changes, const Prediction& a,
                     const Prediction& b) {
  Json json = ReportHead("shardwright-diff");
  json["changes"] = ChangesJson(changes);
  json["before"] = FiguresJson(a);
  json["after"] = FiguresJson(b);
  json["why"] = Mapped<Json>(WhyOf(a, b), [&](const Why& row) -> Json {
    return {{"what", row.what}, {"before_s", row.before}, {"after_s", row.after}};
  });
  return json.dump(2) + "\n";
}

}  // namespace

int DiffCommand(const Arguments& arguments) {
  const std::string first = arguments.Get("PLAN").text;
  const std::string second = arguments.Get("OTHER").text;
  if (first == "-" && second == "-") {
    throw UsageError("diff: only one of the two plans can be standard input");
  }
  const PlanFile before = ReadPlanFile(first, arguments.streams);
  const PlanFile after = ReadPlanFile(second, arguments.streams);
  arguments.Print(arguments.IsJson() ? PlanDiffJson(before, after)
                                     : "before  " + TitleOf(before) + "\nafter   " +
                                           TitleOf(after) + "\n\n" + PlanDiffText(before, after));
  return kExitOk;
}

std::vector<PlanChange> PlanChanges(const PlanFile& before, const PlanFile& after) {
  const std::map<std::string, std::string> old_fields = FieldsOf(before);
  const std::map<std::string, std::string> new_fields = FieldsOf(after);
  std::set<std::string> paths;
  for (const auto* fields : {&old_fields, &new_fields}) {
    for (const auto& [path, value] : *fields) {
      paths.insert(path);
    }
  }
  const auto value_in = [](const std::map<std::string, std::string>& fields,
                           const std::string& path) {
    const auto it = fields.find(path);
    return it == fields.end() ? std::string() : it->second;
  };
  std::vector<PlanChange> changes;
  std::map<std::string, std::size_t> index;
  for (const std::string& path : paths) {
    PlanChange change{path, value_in(old_fields, path), value_in(new_fields, path)};
    if (change.before == change.after) {
      continue;
    }
    const std::string pattern = WithoutNumbers(path) + "\n" + WithoutNumbers(change.before) + "\n" +
                                WithoutNumbers(change.after);
    // Plain fields stand alone; only those of array elements repeat.
    const auto [it, is_new] =
        index.try_emplace(path.find('[') == std::string::npos ? path : pattern, changes.size());
    if (is_new) {
      changes.push_back(std::move(change));
    } else {
      ++changes[it->second].alike;
    }
  }
  return changes;
}

Json ChangesJson(const std::vector<PlanChange>& changes) {
  return Mapped<Json>(changes, [&](const PlanChange& change) -> Json {
    return {{"field", change.field},
            {"before", change.before},
            {"after", change.after},
            {"alike", change.alike}};
  });
}

std::string PlanDiffText(const PlanFile& before, const PlanFile& after) {
  return DiffText(PlanChanges(before, after), PredictPlan(before), PredictPlan(after));
}

std::string PlanDiffJson(const PlanFile& before, const PlanFile& after) {
  return DiffJson(PlanChanges(before, after), PredictPlan(before), PredictPlan(after));
}

}  // namespace shardwright
