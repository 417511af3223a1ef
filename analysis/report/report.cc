#include "analysis/report/report.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "analysis/report/html_text.h"
#include "analysis/report_page.h"
#include "analysis/report_scripts.h"
#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

// A run that is this much slower or faster is not what was predicted: as much as the band of a step
// time on a GPU without any known run.
constexpr double kUnlikeGap = 0.25;

// "12.3 %", "12 %".
std::string Percent(double fraction) {
  std::string number = Fixed(fraction * 100.0, "%.1f");
  number.resize(number.size() - (number.ends_with(".0") ? 2 : 0));
  return number + " %";
}

const EmbeddedFile& PageFile(std::string_view name) {
  for (const EmbeddedFile& file : EmbeddedReportPage()) {
    if (file.path.ends_with(name)) {
      return file;
    }
  }
  SW_CHECK(false, "no page file " + std::string(name));
  return EmbeddedReportPage().front();
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

// Scripts by their hashes, and nothing from anywhere else.
std::string PolicyOf() {
  std::string policy =
      "default-src 'none'; img-src data:; style-src " + PolicyHash(PageFile("style.css").sha256);
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

bool IsUnlike(const ReportInput& input) {
  return input.comparison != nullptr && std::abs(input.comparison->gap()) > kUnlikeGap;
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
    const auto value = FindIf(values, [&](const auto& entry) { return entry.first == name; });
    SW_CHECK(value != values.end(), "nothing for {{" + std::string(name) + "}}");
    html.append(page.substr(0, begin)).append(value->second);
    page.remove_prefix(end + 2);
  }
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
  const bool fits = input.prediction.misfits.empty();
  std::string style = "<style>";
  style.append(PageFile("style.css").text).append("</style>");
  return Fill(PageFile("page.html").text, {{"policy", PolicyOf()},
                                           {"title", EscapeHtml(input.title)},
                                           {"style", style},
                                           {"verdict", EscapeHtml(VerdictOf(input))},
                                           {"verdict_class", !fits             ? "no"
                                                             : IsUnlike(input) ? "doubt"
                                                                               : "yes"},
                                           {"license", EscapeHtml(PageFile("d3_license.txt").text)},
                                           {"data", EscapeJson(ReportJson(input))},
                                           {"scripts", ScriptsHtml()}});
}

}  // namespace shardwright
