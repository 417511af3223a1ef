#include "analysis/report/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "analysis/report/figures.h"
#include "analysis/report/html_text.h"
#include "analysis/report_page.h"
#include "analysis/report_scripts.h"
#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"

namespace shardwright {
namespace {

constexpr std::size_t kLargestShares = 8;
// A run that is this much slower or faster is not what was predicted: as much as the band of a step
// time on a GPU without any known run.
constexpr double kUnlikeGap = 0.25;

std::string Percent(double fraction) {
  return Pixels(fraction * 100.0) + " %";
}

std::string_view PageFile(std::string_view name) {
  for (const EmbeddedFile& file : EmbeddedReportPage()) {
    if (file.path.ends_with(name)) {
      return file.text;
    }
  }
  SW_CHECK(false, "no page file " + std::string(name));
  return {};
}

int DigitOf(char c) {
  return c <= '9' ? c - '0' : c - 'a' + 10;
}

// "'sha256-...'" of 64 hexadecimal digits: the form that a content security policy wants.
std::string PolicyHash(std::string_view hex) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text = "'sha256-";
  std::uint32_t bits = 0;
  int count = 0;
  for (const char c : hex) {
    bits = bits << 4 | static_cast<std::uint32_t>(DigitOf(c));
    count += 4;
    if (count >= 6) {
      count -= 6;
      text += kDigits[bits >> count & 63U];
    }
  }
  // 256 bits end in four that belong to a last digit, which one padding sign completes.
  text += kDigits[bits << 2 & 63U];
  return text + "='";
}

std::string HashOfStyle() {
  for (const EmbeddedFile& file : EmbeddedReportPage()) {
    if (file.path.ends_with("style.css")) {
      return PolicyHash(file.sha256);
    }
  }
  return "";
}

// Scripts by their hashes, and nothing from anywhere else.
std::string PolicyOf() {
  std::string policy = "default-src 'none'; img-src data:; style-src " + HashOfStyle();
  policy += "; script-src";
  for (const EmbeddedFile& file : EmbeddedReportScripts()) {
    policy += " " + PolicyHash(file.sha256);
  }
  return policy + "; base-uri 'none'; form-action 'none'";
}

std::string ScriptsHtml() {
  std::string html;
  for (const EmbeddedFile& file : EmbeddedReportScripts()) {
    html += "<script>";
    html += file.text;
    html += "</script>\n";
  }
  return html;
}

std::string ShareText(const Program& program, const TimeShare& share) {
  std::string text(InfoOf(share.code).name);
  text += share.unit == kNoSubject ? "" : " of " + program.units[share.unit].name;
  text += " in " + std::string(NameOf(share.phase));
  return text + (share.use == TimeUse::kRun ? "" : ", " + std::string(NameOf(share.use)));
}

std::string SharesTable(const Program& program, const char* caption,
                        const std::vector<TimeShare>& shares, SimTime step) {
  HtmlTable table{
      caption, {"what", "time", "of the step", "stretches"}, {false, true, true, true}, {}};
  for (std::size_t i = 0; i < std::min(shares.size(), kLargestShares); ++i) {
    table.rows.push_back({ShareText(program, shares[i]), Format(ToSeconds(shares[i].time)),
                          Percent(Ratio(shares[i].time, step)), std::to_string(shares[i].count)});
  }
  return HtmlOf(table);
}

bool IsUnlike(const ReportInput& input) {
  return input.comparison != nullptr && std::abs(input.comparison->gap()) > kUnlikeGap;
}

using Figures = std::vector<std::pair<std::string, std::string>>;

// What a run changes: "step time", or "step time, simulated" with "step time, measured".
void AddTimes(const std::string& suffix, Seconds step, double speed, const Prediction& p,
              Figures& figures) {
  figures.emplace_back("step time" + suffix, Format(step));
  figures.emplace_back("tokens/s per GPU" + suffix,
                       std::to_string(std::llround(p.tokens_per_second_per_gpu * speed)));
  figures.emplace_back("MFU" + suffix, Percent(p.mfu * speed));
}

std::string FiguresHtml(const ReportInput& input) {
  const Prediction& p = input.prediction;
  const bool is_measured = input.comparison != nullptr;
  Figures figures;
  AddTimes(is_measured ? ", simulated" : "", p.step_time, 1.0, p, figures);
  if (is_measured) {
    const Seconds measured = input.comparison->measured_step;
    AddTimes(", measured", measured, p.step_time.value / measured.value, p, figures);
  }
  figures.emplace_back("exposed communication", Format(p.exposed_comm));
  figures.emplace_back("allocated at the peak", Format(p.device_peak.total));
  figures.emplace_back("reserved", Format(p.reserved));
  figures.emplace_back("outside the allocator", Format(p.outside));
  figures.emplace_back("usable", Format(p.usable));
  std::string html = "<dl>\n";
  for (const auto& [name, value] : figures) {
    html += "<div><dt>" + EscapeHtml(name) + "</dt><dd>" + EscapeHtml(value) + "</dd></div>\n";
  }
  return html + "</dl>";
}

std::string Legend(const std::vector<std::pair<std::string, std::string>>& classes) {
  std::string html;
  for (const auto& [style, name] : classes) {
    html +=
        "<li><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\"><rect width=\"14\" height=\"14\" "
        "class=\"" +
        style + "\"/></svg>" + EscapeHtml(name) + "</li>\n";
  }
  return html;
}

std::string WithSpaces(std::string_view name) {
  std::string text(name);
  std::replace(text.begin(), text.end(), '_', ' ');
  return text;
}

std::string OpLegend(const Program& program) {
  std::array<bool, kOpColourCount> is_used{};
  is_used[static_cast<std::size_t>(OpColour::kHost)] = true;
  for (const Op& op : program.step.ops) {
    is_used[static_cast<std::size_t>(ColourOf(program, op))] = true;
  }
  std::vector<std::pair<std::string, std::string>> classes;
  for (std::size_t c = 0; c < kOpColourCount; ++c) {
    if (is_used[c]) {
      classes.emplace_back("op" + std::to_string(c), WithSpaces(NameOf(static_cast<OpColour>(c))));
    }
  }
  classes.emplace_back("wait", "compute waits (hatched)");
  return Legend(classes);
}

std::string MemoryLegend(const Recording& recording) {
  std::vector<std::pair<std::string, std::string>> classes;
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    if (std::any_of(recording.memory.begin(), recording.memory.end(),
                    [&](const MemorySample& sample) { return sample.device[c] > Bytes(0); })) {
      classes.emplace_back("memory" + std::to_string(c),
                           WithSpaces(NameOf(static_cast<Category>(c))));
    }
  }
  return Legend(classes);
}

std::string MemoryTable(const ReportInput& input) {
  const MemoryPeak& peak = input.prediction.device_peak;
  const bool is_measured = input.comparison != nullptr;
  // Other profilers record sums only.
  const bool has_categories = input.measured != nullptr;
  HtmlTable table{"At the peak of any step", {"category", "simulated"}, {false, true}, {}};
  if (is_measured) {
    table.head.emplace_back("measured");
    table.is_number.push_back(true);
  }
  const auto add = [&](const std::string& name, Bytes simulated, Bytes measured, bool is_known) {
    std::vector<std::string> row = {name, Format(simulated)};
    if (is_measured) {
      row.push_back(is_known ? Format(measured) : "");
    }
    table.rows.push_back(std::move(row));
  };
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    const Bytes measured = is_measured ? input.comparison->memory.measured[c] : Bytes(0);
    if (peak.by_category[c] > Bytes(0) || measured > Bytes(0)) {
      add(WithSpaces(NameOf(static_cast<Category>(c))), peak.by_category[c], measured,
          has_categories);
    }
  }
  const Bytes measured = is_measured ? input.comparison->memory.measured_peak : Bytes(0);
  add("all", peak.total, measured, has_categories || measured > Bytes(0));
  return HtmlOf(table);
}

std::string UnitTable(const UnitPicture& picture) {
  HtmlTable table{"",
                  {"unit", "parameters", "gathered", "resharded after forward", "recomputed"},
                  {false, true, true, false, false},
                  {}};
  for (const UnitRow& row : picture.units) {
    table.rows.push_back({row.name, std::to_string(row.parameters), Format(row.gathered),
                          row.reshard, row.recompute});
  }
  return HtmlOf(table);
}

// Empty for our own traces, which know ops.
std::string SegmentsTable(const Comparison& c) {
  HtmlTable table{
      "Compute of a unit, kernel by kernel in other profilers: largest difference first",
      {"unit", "pass", "micro-batch", "simulated", "measured"},
      {false, false, true, true, true},
      {}};
  for (std::size_t i = 0; i < std::min(c.segments.size(), kLargestShares); ++i) {
    const SegmentComparison& row = c.segments[i];
    const bool has_micro_batch = row.phase != Phase::kOptimizer;
    table.rows.push_back({row.unit.empty() ? "all" : row.unit, std::string(NameOf(row.phase)),
                          has_micro_batch ? std::to_string(row.micro_batch) : "",
                          Format(row.simulated), Format(row.measured)});
  }
  return HtmlOf(table);
}

std::string ComparisonHtml(const ReportInput& input) {
  if (input.comparison == nullptr) {
    return "";
  }
  const Comparison& c = *input.comparison;
  HtmlTable parts{"The step, seen from the compute stream: largest difference first",
                  {"part", "simulated", "measured", "difference"},
                  {false, true, true, true},
                  {}};
  for (const StepPart& part : c.parts) {
    const double difference = (part.measured - part.simulated).value;
    parts.rows.push_back({part.name, Format(part.simulated), Format(part.measured),
                          (difference < 0 ? "-" : "+") + Format(Seconds(std::abs(difference)))});
  }
  HtmlTable ops{
      "Ops with the largest difference", {"op", "simulated", "measured"}, {false, true, true}, {}};
  for (std::size_t i = 0; i < std::min(c.ops.size(), kLargestShares); ++i) {
    ops.rows.push_back({OpName(input.program, input.program.step.ops[c.ops[i].op.value]),
                        Format(c.ops[i].simulated), Format(c.ops[i].measured)});
  }
  std::string html = "<section id=\"comparison\">\n<h2>Simulated and measured</h2>\n<p>" +
                     std::to_string(c.measured_steps) + " steps on " + std::to_string(c.ranks) +
                     " ranks were measured, from " + Format(c.measured_shortest) + " to " +
                     Format(c.measured_longest) + "; " + std::to_string(c.matched) + " of " +
                     std::to_string(c.spans) + " spans matched.</p>\n";
  for (const std::string& finding : c.findings) {
    html += "<p>Contradicts the program: " + EscapeHtml(finding) + "</p>\n";
  }
  for (const std::string& note : c.notes) {
    html += "<p>" + EscapeHtml(note) + "</p>\n";
  }
  return html + HtmlOf(parts) + HtmlOf(ops) + SegmentsTable(c) + "</section>";
}

std::string PlansTable(const char* caption, const char* head,
                       const std::vector<ConsideredPlan>& plans) {
  HtmlTable table{caption, {head, "step time", "memory", ""}, {false, true, true, false}, {}};
  for (const ConsideredPlan& plan : plans) {
    table.rows.push_back(
        {plan.label, Format(plan.step_time), Format(plan.memory), plan.is_chosen ? "chosen" : ""});
  }
  return HtmlOf(table);
}

std::string ChoicesHtml(const Choices* choices) {
  if (choices == nullptr) {
    return "";
  }
  HtmlTable rejected{"Not chosen",
                     {"family", "reason", "plans", "best", "missing at least"},
                     {false, false, true, true, true},
                     {}};
  for (const RejectedPlans& plans : choices->rejected) {
    rejected.rows.push_back({plans.family, plans.reason, std::to_string(plans.count),
                             plans.best_time > Seconds(0) ? Format(plans.best_time) : "",
                             plans.least_deficit > Bytes(0) ? Format(plans.least_deficit) : ""});
  }
  return "<section id=\"choices\">\n<h2>Plans that were considered</h2>\n<div class=\"pair\">"
         "<div id=\"pareto\" class=\"live\"></div>\n" +
         HtmlOf(rejected) + "</div>" + PlansTable("From fast to frugal", "plan", choices->pareto) +
         PlansTable("What if", "change", choices->what_if) + "</section>";
}

std::string InputsTable(const ReportInput& input) {
  const PlanFile& file = input.file;
  HtmlTable of_job{"The job", {"input", "value"}, {false, false}, {}};
  HtmlTable of_plan{"The plan", {"input", "value"}, {false, false}, {}};
  HtmlTable* table = &of_job;
  const auto add = [&](const char* name, std::string value) {
    table->rows.push_back({name, std::move(value)});
  };
  add("model", file.model.model.name + " (" + HashText(file.model.hash) + ")");
  add("cluster", std::to_string(file.cluster.node_count) + " x " + file.cluster.name + ", " +
                     std::to_string(file.cluster.RankCount()) + " x " + file.cluster.gpu.name);
  add("kernel set", file.kernels.name);
  add("profile", file.profile.name);
  add("sequence length", std::to_string(file.job.sequence_length));
  table = &of_plan;
  add("dialect", std::string(NameOf(file.plan.dialect)));
  add("mesh", std::to_string(file.plan.shard_size) + " shards x " +
                  std::to_string(file.plan.replicate_size) + " replicas");
  add("batch", std::to_string(file.plan.micro_batch) + " per micro-batch x " +
                   std::to_string(file.plan.accumulation) + " micro-batches");
  add("plan file", HashText(Fnv1a64(input.plan_json)));
  return HtmlOf(of_job) + HtmlOf(of_plan);
}

// Replaces each {{name}} of the page once; what is put in is not looked at again.
std::string Fill(std::string_view page,
                 const std::vector<std::pair<std::string_view, std::string>>& values) {
  std::string html;
  while (true) {
    const std::size_t begin = page.find("{{");
    if (begin == std::string_view::npos) {
      return html.append(page);
    }
    const std::size_t end = page.find("}}", begin);
    SW_CHECK(end != std::string_view::npos, "an open {{ in the page");
    const std::string_view name = page.substr(begin + 2, end - begin - 2);
    const auto value = std::find_if(values.begin(), values.end(),
                                    [&](const auto& entry) { return entry.first == name; });
    SW_CHECK(value != values.end(), "nothing for {{" + std::string(name) + "}}");
    html.append(page.substr(0, begin)).append(value->second);
    page.remove_prefix(end + 2);
  }
}

std::vector<Recording> RecordingsOf(const ReportInput& input) {
  std::vector<Recording> recordings = {SimulatedRecording(input.program, input.simulation.trace,
                                                          input.simulation.step_time,
                                                          input.prediction.attribution)};
  if (input.measured != nullptr) {
    std::optional<Recording> measured = MeasuredRecording(input.program, *input.measured);
    if (measured) {
      recordings.push_back(std::move(*measured));
    }
  } else if (input.recorded != nullptr) {
    recordings.push_back(ForeignRecording(*input.recorded));
  }
  return recordings;
}

// "3.1 % less than simulated"; "12.5 times the simulated step" where percents say nothing.
std::string GapText(double gap) {
  if (gap > 1.0) {
    return Fixed(1.0 + gap, gap < 99.0 ? "%.1f" : "%.0f") + " times the simulated step";
  }
  return Percent(std::abs(gap)) + (gap < 0 ? " less" : " more") + " than simulated";
}

}  // namespace

std::string VerdictOf(const ReportInput& input) {
  const Prediction& p = input.prediction;
  std::string text;
  if (p.misfits.empty()) {
    text = "Fits, with " + Format(p.usable - p.Needed()) + " of " + Format(p.usable) + " to spare.";
  } else {
    text = p.misfits.front();
    text[0] = static_cast<char>(text[0] == 'd' ? 'D' : text[0]);
    text += ".";
  }
  if (IsUnlike(input)) {
    text += " But the run took " + GapText(input.comparison->gap()) +
            ": the times here do not describe it.";
  }
  text += " A step takes " + Format(p.step_time) + " (" +
          std::to_string(std::llround(p.tokens_per_second_per_gpu)) + " tokens/s per GPU, MFU " +
          Percent(p.mfu) + ")";
  if (p.exposed_comm.value > 0) {
    text +=
        "; " + Percent(p.exposed_comm.value / p.step_time.value) + " of it waits for communication";
  }
  if (!p.attribution.idle.empty()) {
    const TimeShare& longest = p.attribution.idle.front();
    text += "; compute waits longest, " + Format(ToSeconds(longest.time)) + ", for " +
            ShareText(input.program, longest);
  }
  text += ".";
  if (input.comparison != nullptr) {
    const double gap = input.comparison->gap();
    text += " Measured: " + Format(input.comparison->measured_step) + ", " + GapText(gap);
    text += input.comparison->parts.empty() ? "."
                                            : "; the largest difference is in \"" +
                                                  input.comparison->parts.front().name + "\".";
  }
  return text;
}

std::string ReportHtml(const ReportInput& input) {
  const std::vector<Recording> recordings = RecordingsOf(input);
  const UnitPicture picture = DrawUnits(input.file, input.program);
  const Prediction& p = input.prediction;
  std::string style = "<style>";
  style.append(PageFile("style.css")).append("</style>");
  return Fill(
      PageFile("page.html"),
      {{"policy", PolicyOf()},
       {"title", EscapeHtml(input.title)},
       {"style", style},
       {"verdict", EscapeHtml(VerdictOf(input))},
       {"verdict_class", !p.misfits.empty() ? "no"
                         : IsUnlike(input)  ? "doubt"
                                            : "yes"},
       {"figures", FiguresHtml(input)},
       {"timeline", TimelineFigure(input.program, recordings)},
       {"op_legend", OpLegend(input.program)},
       {"memory", MemoryFigure(recordings, p.usable - p.outside)},
       {"memory_legend", MemoryLegend(recordings.front())},
       {"memory_table", MemoryTable(input)},
       {"units", UnitsFigure(picture)},
       {"unit_count", std::to_string(picture.units.size())},
       {"unit_table", UnitTable(picture)},
       {"choices", ChoicesHtml(input.choices)},
       {"comparison", ComparisonHtml(input)},
       {"critical_table",
        SharesTable(input.program, "The critical path: making anything else faster does not help",
                    p.attribution.critical, p.attribution.step_time)},
       {"waits_table", SharesTable(input.program, "What the compute stream waited for, in the end",
                                   p.attribution.idle, p.attribution.step_time)},
       {"inputs", InputsTable(input)},
       {"license", EscapeHtml(PageFile("d3_license.txt"))},
       {"data", EscapeJson(ReportJson(input))},
       {"scripts", ScriptsHtml()}});
}

}  // namespace shardwright
