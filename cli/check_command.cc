// `shardwright check`: limits on what jobs need, for a repository's CI.

#include <array>
#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "cli/check_budget.h"
#include "cli/command.h"
#include "cli/plan_diff.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// Something that is not as it should be.
struct Breach {
  const BudgetJob* job = nullptr;
  GateMetric metric = GateMetric::kMemory;
  std::string what;   // "memory: 74.1 GiB, at most 72 GiB"
  std::string cause;  // "plan.recompute: ...": since the record; empty: not known
};

std::string Shown(GateMetric metric, double value) {
  switch (metric) {
    case GateMetric::kMemory:
      return Format(Bytes(static_cast<std::int64_t>(value)));
    case GateMetric::kTime:
      return Format(Seconds(value));
    case GateMetric::kExposed:
      return Percent(value);
    case GateMetric::kCost:
      break;
  }
  return Fixed(value, "%.4g");
}

// What is exposed is a share of the step: from 1.7 % to 2.1 % of a shorter step is 0.4 points.
bool IsMore(GateMetric metric, double now, double last, double tolerance) {
  return now > (metric == GateMetric::kExposed ? last + tolerance : last * (1 + tolerance));
}

// "model.json.hidden_size: 512 -> 640", and how many more lines of that section changed; without a
// section of all of them.
std::string CauseText(const PlanFile& before, const PlanFile& after,
                      const std::optional<std::string>& section) {
  std::string text;
  std::int64_t more = 0;
  for (const PlanChange& change : PlanChanges(before, after)) {
    const bool is_of_it = !section || change.field == *section ||
                          change.field.starts_with(*section + ".") ||
                          change.field.starts_with(*section + "[");
    // An empty list says less than what its elements were.
    const bool is_emptied = change.before + change.after == "[]";
    if (!is_of_it || is_emptied || change.field == "model.hash") {
      continue;
    }
    if (text.empty()) {
      text = change.field + ": " + (change.before.empty() ? "-" : change.before) + " -> " +
             (change.after.empty() ? "-" : change.after);
      more = change.alike - 1;
    } else {
      more += change.alike;
    }
  }
  return text + (more > 0 ? ", and " + std::to_string(more) + " more" : "");
}

// What is over, without its cause.
void CheckJob(const BudgetJob& job, const GateFigures& now, const RecordedJob* last,
              double tolerance, std::vector<Breach>& breaches) {
  for (const std::string& misfit : now.misfits) {
    breaches.push_back({&job, GateMetric::kMemory, misfit, ""});
  }
  for (std::size_t i = 0; i < kGateMetricCount; ++i) {
    const auto metric = static_cast<GateMetric>(i);
    const double value = now.values[i];
    std::string what;
    if (job.limits[i] && value > *job.limits[i]) {
      what = Shown(metric, value) + ", at most " + Shown(metric, *job.limits[i]);
    } else if (last != nullptr && IsMore(metric, value, last->figures.values[i], tolerance)) {
      what = Shown(metric, value) + ", was " + Shown(metric, last->figures.values[i]) +
             " at the last record";
    }
    if (!what.empty()) {
      breaches.push_back({&job, metric, std::string(NameOf(metric)) + ": " + what, ""});
    }
  }
}

// What changed since the record and did it.
void NameCauses(const PlanFile& before, std::span<Breach> breaches_of_job) {
  if (breaches_of_job.empty()) {
    return;
  }
  const PlanFile& after = breaches_of_job.front().job->plan;
  const GateCauses causes = FindCauses(before, after);
  for (Breach& breach : breaches_of_job) {
    breach.cause = CauseText(before, after, causes[static_cast<std::size_t>(breach.metric)]);
  }
}

// What docs.github.com says of workflow commands: these characters would end or split one.
std::string Escaped(const std::string& text, bool is_property) {
  std::string escaped;
  for (const char c : text) {
    const bool is_special =
        c == '%' || c == '\r' || c == '\n' || (is_property && (c == ':' || c == ','));
    std::array<char, 8> code{};
    std::snprintf(code.data(), code.size(), "%%%02X", static_cast<unsigned char>(c));
    escaped += is_special ? std::string(code.data()) : std::string(1, c);
  }
  return escaped;
}

std::string WithCause(const Breach& breach) {
  return PrintableLine(breach.what + (breach.cause.empty() ? "" : "; " + breach.cause));
}

std::string Annotations(const std::string& file, const std::vector<Breach>& breaches) {
  std::string text;
  for (const Breach& breach : breaches) {
    text += "::error file=" + Escaped(PrintableLine(file), true) +
            ",line=" + std::to_string(breach.job->line) +
            ",title=" + Escaped(PrintableLine(breach.job->name), true) +
            "::" + Escaped(WithCause(breach), false) + "\n";
  }
  return text;
}

std::string CheckText(const std::vector<RecordedJob>& now, const std::vector<Breach>& breaches) {
  Table table({kLeft, kRight, kRight, kRight, kRight, kLeft});
  table.Row({"job", "memory", "step time", "exposed", "GPUh/1e9", ""});
  std::string reasons;
  for (const RecordedJob& job : now) {
    const auto is_of_it = [&](const Breach& breach) { return breach.job->name == job.name; };
    const bool is_broken = AnyOf(breaches, is_of_it);
    std::vector<std::string> cells = {PrintableLine(job.name)};
    for (std::size_t i = 0; i < kGateMetricCount; ++i) {
      cells.push_back(Shown(static_cast<GateMetric>(i), job.figures.values[i]));
    }
    cells.emplace_back(is_broken ? "over" : "ok");
    table.Row(cells);
  }
  for (const Breach& breach : breaches) {
    reasons += PrintableLine(breach.job->name) + ": " + WithCause(breach) + "\n";
  }
  return table.Text() + (reasons.empty() ? "" : "\n" + reasons);
}

std::string CheckJson(const std::vector<RecordedJob>& now, const std::vector<Breach>& breaches) {
  Json json = ReportHead("shardwright-check");
  json["ok"] = breaches.empty();
  json["jobs"] = Json::array();
  for (const RecordedJob& job : now) {
    Json row{{"name", job.name}, {"fits", job.figures.misfits.empty()}};
    for (std::size_t i = 0; i < kGateMetricCount; ++i) {
      row[std::string(NameOf(static_cast<GateMetric>(i)))] = job.figures.values[i];
    }
    json["jobs"].push_back(row);
  }
  json["breaches"] = Mapped<Json>(breaches, [&](const Breach& breach) -> Json {
    return {{"job", breach.job->name},
            {"line", breach.job->line},
            {"what", breach.what},
            {"cause", breach.cause}};
  });
  return json.dump(2) + "\n";
}

}  // namespace

int CheckCommand(const Arguments& arguments) {
  const std::string file = arguments.Get("BUDGET").text;
  const JobBudget budget = ReadBudget(file);
  std::vector<RecordedJob> last;
  if (arguments.Get("--last").is_given()) {
    last = ReadRecord(arguments.Get("--last").text);
  }
  std::vector<RecordedJob> now;
  std::vector<Breach> breaches;
  for (const BudgetJob& job : budget.jobs) {
    now.push_back({job.name, GateFiguresOf(job.plan), job.plan});
    const auto recorded = FindIn(last, job.name, &RecordedJob::name);
    const std::size_t begin = breaches.size();
    CheckJob(job, now.back().figures, recorded == last.end() ? nullptr : &*recorded,
             budget.tolerance, breaches);
    if (recorded != last.end()) {
      NameCauses(recorded->plan, std::span(breaches).subspan(begin));
    }
  }
  if (arguments.Get("--save").is_given()) {
    WriteFileAtomically(arguments.Get("--save").text, RecordJson(now));
  }
  arguments.Print(arguments.IsJson()          ? CheckJson(now, breaches)
                  : arguments.Has("--github") ? Annotations(file, breaches)
                                              : CheckText(now, breaches));
  return breaches.empty() ? kExitOk : kExitNo;
}

}  // namespace shardwright
