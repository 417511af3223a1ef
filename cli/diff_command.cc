// What two plans choose differently, and what that changes.

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/prediction.h"
#include "cli/table.h"
#include "core/json.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/simulate.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr const char* kAbout = R"(Shows what two plans choose differently, and what that changes.

Examples:
  shardwright diff a.json b.json
  shardwright plan --model gpt2 --cluster dgx-a100 --reshard never | shardwright diff a.json - --json

Units are joined by name. Equal changes of units whose names differ in numbers only are one line.)";

constexpr std::array<PositionalRow, 2> kPositionals = {{
    {"PLAN", "plan file or - (standard input)", "diff needs two plan files", false,
     FileRole::kRead},
    {"OTHER", "plan file or - (standard input)", "diff needs two plan files", false,
     FileRole::kRead},
}};

// One field that differs; an absent side is empty.
struct Change {
  std::string field;
  std::string before;
  std::string after;
  std::int64_t alike = 1;  // fields with this change, but for numbers in their names
};

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
  Flatten(Json::parse(PlanFileJson(file)), "", fields);
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

std::vector<Change> ChangesOf(const PlanFile& before, const PlanFile& after) {
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
  std::vector<Change> changes;
  std::map<std::string, std::size_t> index;
  for (const std::string& path : paths) {
    Change change{path, value_in(old_fields, path), value_in(new_fields, path)};
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

Prediction PredictPlan(const PlanFile& file) {
  const Program program = LowerAndVerify(file);
  SimulateOptions options;
  options.trace = true;
  options.allocator.capacity = AllocatorCapacity(UsableMemory(file), program, file.profile);
  return Predict(file, program,
                 Simulate({.program = program,
                           .cluster = file.cluster,
                           .profile = file.profile,
                           .options = options}));
}

std::string Shown(const std::string& value) {
  return value.empty() ? "-" : value;
}

std::string SignedPercent(double before, double after) {
  if (before == after) {
    return "";
  }
  return before == 0.0 ? "new"
                       : (after > before ? "+" : "-") + Percent(std::abs(after / before - 1.0));
}

std::string DiffText(const std::vector<Change>& changes, const Prediction& a, const Prediction& b) {
  std::string text;
  Table fields({kLeft, kLeft, kLeft, kLeft});
  for (const Change& change : changes) {
    fields.Row({change.field, Shown(change.before), "-> " + Shown(change.after),
                change.alike > 1 ? "and " + std::to_string(change.alike - 1) + " alike" : ""});
  }
  text += changes.empty() ? "The plans are equal.\n" : fields.Text() + "\n";
  Table figures({kLeft, kRight, kRight, kRight});
  const auto add_time = [&](const char* name, Seconds before, Seconds after) {
    figures.Row({name, Format(before), Format(after), SignedPercent(before.value, after.value)});
  };
  const auto add_bytes = [&](const char* name, Bytes before, Bytes after) {
    figures.Row(
        {name, Format(before), Format(after),
         SignedPercent(static_cast<double>(before.value), static_cast<double>(after.value))});
  };
  add_time("step time", a.step_time, b.step_time);
  add_time("exposed communication", a.exposed_comm, b.exposed_comm);
  add_bytes("allocated at the peak", a.device_peak.total, b.device_peak.total);
  add_bytes("reserved", a.reserved, b.reserved);
  figures.Row({"fits", a.misfits.empty() ? "yes" : "no", b.misfits.empty() ? "yes" : "no", ""});
  return text + figures.Text();
}

Json FiguresJson(const Prediction& p) {
  return {{"step_time_s", p.step_time.value},
          {"exposed_comm_s", p.exposed_comm.value},
          {"peak_allocated_bytes", p.device_peak.total.value},
          {"peak_reserved_bytes", p.reserved.value},
          {"fits", p.misfits.empty()}};
}

std::string DiffJson(const std::vector<Change>& changes, const Prediction& a, const Prediction& b) {
  Json json;
  json["schema"] = "shardwright-diff";
  json["schema_version"] = 1;
  json["changes"] = Json::array();
  for (const Change& change : changes) {
    json["changes"].push_back({{"field", change.field},
                               {"before", change.before},
                               {"after", change.after},
                               {"alike", change.alike}});
  }
  json["before"] = FiguresJson(a);
  json["after"] = FiguresJson(b);
  return json.dump(2) + "\n";
}

int RunDiff(const Arguments& arguments) {
  const std::string first = arguments.Get("PLAN").text;
  const std::string second = arguments.Get("OTHER").text;
  if (first == "-" && second == "-") {
    throw UsageError("diff: only one of the two plans can be standard input");
  }
  const PlanFile before = ReadPlanFile(first, arguments.streams);
  const PlanFile after = ReadPlanFile(second, arguments.streams);
  const std::vector<Change> changes = ChangesOf(before, after);
  const Prediction a = PredictPlan(before);
  const Prediction b = PredictPlan(after);
  arguments.Print(arguments.IsJson() ? DiffJson(changes, a, b) : DiffText(changes, a, b));
  return kExitOk;
}

}  // namespace

extern const Command kDiffCommand;
const Command kDiffCommand = {"diff", kAbout, kPositionals, {}, {}, RunDiff};

}  // namespace shardwright
