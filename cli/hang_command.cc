// Why a job stands still.

#include <array>
#include <ctime>
#include <optional>

#include <nlohmann/json.hpp>

#include "analysis/hang.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/budget.h"
#include "core/error.h"
#include "core/files.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "traces/flight_recorder.h"
#include "traces/gzip.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

// "2026-11-26 14:02:07.123 UTC".
std::string HangTime(std::int64_t nanoseconds) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const auto seconds = static_cast<std::time_t>(nanoseconds / kSecond);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 64> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  std::string milliseconds = std::to_string(nanoseconds % kSecond / 1'000'000);
  milliseconds.insert(0, 3 - milliseconds.size(), '0');
  return std::string(text.data(), size) + '.' + milliseconds + " UTC";
}

// "layers.3" -> "layers.4"; "3" -> "4". Empty: no small number ends it.
std::string Successor(const std::string& name) {
  constexpr std::size_t kMostDigits = 9;
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  return digits == name.size() || name.size() - digits > kMostDigits
             ? ""
             : name.substr(0, digits) + std::to_string(std::stol(name.substr(digits)) + 1);
}

// "a, layers.0-2 LAST c": three or more that follow each other as a range.
std::string RangesText(const std::vector<std::string>& names, const std::string& last) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < names.size();) {
    std::size_t end = i + 1;
    while (end < names.size() && names[end] == Successor(names[end - 1])) {
      ++end;
    }
    end = end - i < 3 ? i + 1 : end;
    const std::string& high = names[end - 1];
    parts.push_back(names[i] + (end - i == 1
                                    ? ""
                                    : '-' + high.substr(high.find_last_not_of("0123456789") + 1)));
    i = end;
  }
  std::string text;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == parts.size() ? last : ", ") + parts[i];
  }
  return text;
}

// "rank 3", "ranks 0 and 1", "ranks 0-2 and 5".
std::string RankList(const std::vector<std::int64_t>& ranks) {
  std::vector<std::string> names =
      Mapped<std::string>(ranks, [&](const std::int64_t rank) { return std::to_string(rank); });
  return (ranks.size() == 1 ? "rank " : "ranks ") + RangesText(names, " and ");
}

// "272 fp32 elements".
std::string ElementsText(const HangCall& call) {
  return WithCommas(call.elements) + ' ' + (call.dtype.empty() ? "" : call.dtype + ' ') +
         "elements";
}

// "all-gather of 272 fp32 elements".
std::string CallShape(const HangCall& call) {
  return call.op + (call.elements == 0 ? "" : " of " + ElementsText(call));
}

// "the all-gather of layers.17 in backward of micro-batch 2, step 3", or what is known of it.
std::string CallText(const HangCall& call) {
  std::string text = "the ";
  if (call.units.empty()) {
    text += CallShape(call);
  } else {
    text += call.op + " of " + RangesText(call.units, " or ");
  }
  if (call.phase != HangPhase::kUnknown) {
    text += " in " + std::string(NameOf(call.phase));
  }
  if (call.micro_batch >= 0) {
    text += " of micro-batch " + std::to_string(call.micro_batch);
  }
  if (call.step >= 0) {
    text += ", step " + std::to_string(call.step);
  }
  if (call.units.empty() && !call.site.empty()) {
    text += " (" + call.site + ')';
  }
  return text;
}

// Some dumps do not say when.
std::string SinceText(const HangFinding& finding) {
  return finding.since == 0 ? "" : " since " + HangTime(finding.since);
}

std::string WaitText(const HangFinding& finding) {
  if (finding.waiting.empty()) {
    return "";
  }
  return "; " + RankList(finding.waiting) + (finding.waiting.size() == 1 ? " waits" : " wait") +
         " there" + SinceText(finding);
}

std::string Headline(const HangFinding& finding) {
  const std::string who = RankList(finding.ranks);
  const std::string expected = CallText(finding.expected);
  const std::string found = finding.found.has_value() ? CallText(*finding.found) : "";
  switch (finding.kind) {
    case HangKind::kNoDump:
      return who + " left no dump: dead, or not among these files; the others are in " + expected +
             SinceText(finding);
    case HangKind::kSkipped:
      return who + " skipped " +
             (finding.skipped > 1 ? std::to_string(finding.skipped) + " collectives, the first is "
                                  : "") +
             expected + WaitText(finding);
    case HangKind::kExtra:
      return who + " issued " + found + ", which nobody else did" +
             (finding.waiting.empty()
                  ? ""
                  : "; " + RankList(finding.waiting) + " issued " + expected +
                        (finding.since == 0 ? "" : " at " + HangTime(finding.since)));
    case HangKind::kSwapped:
      return who + " issued " + found + " before " + expected + WaitText(finding);
    case HangKind::kOtherOp:
      return who + " issued " + found + " in the place of " + expected + WaitText(finding);
    case HangKind::kOtherSize:
    case HangKind::kOtherDtype:
      return who + " issued " + expected + " with " + ElementsText(*finding.found) +
             ", the others with " + ElementsText(finding.expected) + WaitText(finding);
    case HangKind::kUndecided:
      return who + " issued " + found + ", " + RankList(finding.waiting) + " issued " + expected +
             ", and nothing tells who is right";
    case HangKind::kLate:
      if (finding.found) {
        return who + (finding.ranks.size() == 1 ? " has issued " : " have issued ") + expected +
               ", but no GPU there has started it" + WaitText(finding);
      }
      return who + (finding.ranks.size() == 1 ? " has" : " have") + " not come to " + expected +
             WaitText(finding);
    case HangKind::kAllWait: {
      // Dumps tell who waits, logs who gave up.
      const std::vector<std::int64_t>& all =
          finding.ranks.empty() ? finding.waiting : finding.ranks;
      return RankList(all) + (all.size() == 1 ? " waits in " : " all wait in ") + expected +
             SinceText(finding) + ", which does not end: look at the network and at the GPUs";
    }
  }
  return "";
}

// All that is known of a call.
std::string DetailText(const HangCall& call) {
  std::string text = CallText(call).substr(std::string_view("the ").size());
  if (!call.units.empty()) {
    text += call.elements == 0 ? "" : ", " + ElementsText(call);
    text += call.site.empty() ? "" : ", " + call.site;
  }
  return text + (call.created == 0 ? "" : ", " + HangTime(call.created));
}

std::string FindingText(const HangFinding& finding) {
  Table table({kLeft, kLeft});
  table.Row({"process group", finding.group + ", " + std::to_string(finding.group_size) +
                                  " ranks, collective " +
                                  std::to_string(finding.expected.sequence)});
  if (!finding.waiting.empty()) {
    table.Row({RankList(finding.waiting), DetailText(finding.expected)});
  }
  if (finding.found.has_value()) {
    table.Row({RankList(finding.ranks), DetailText(*finding.found)});
  }
  if (finding.last.has_value()) {
    table.Row({finding.found.has_value() ? "before that" : "the last of " + RankList(finding.ranks),
               DetailText(*finding.last)});
  }
  return Wrapped(Headline(finding), kReportWidth, 2) + "\n" + table.WrappedText(2);
}

std::string HangText(const HangReport& report) {
  std::string text;
  for (const HangFinding& finding : report.findings) {
    text += FindingText(finding) + "\n";
  }
  if (report.findings.empty()) {
    text += "no hang: ";
  }
  std::vector<std::int64_t> seen;
  std::set_difference(report.ranks.begin(), report.ranks.end(), report.missing.begin(),
                      report.missing.end(), std::back_inserter(seen));
  text += RankList(seen) + ": " + WithCommas(report.collectives) + " collectives of " +
          WithCommas(static_cast<std::int64_t>(report.groups)) +
          (report.groups == 1 ? " process group" : " process groups") + " are alike\n";
  return text;
}

Json HangCallJson(const HangCall& call) {
  const auto number = [](std::int64_t value) { return value < 0 ? Json() : Json(value); };
  const auto name = [](std::string_view value) { return value.empty() ? Json() : Json(value); };
  return {{"op", call.op},
          {"elements", call.elements == 0 ? Json() : Json(call.elements)},
          {"dtype", name(call.dtype)},
          {"units", call.units},
          {"phase", name(NameOf(call.phase))},
          {"micro_batch", number(call.micro_batch)},
          {"step", number(call.step)},
          {"site", name(call.site)},
          {"issued", call.created == 0 ? Json() : Json(HangTime(call.created))}};
}

std::string HangJson(const HangReport& report) {
  Json json = {{"schema", "shardwright-hang"},
               {"schema_version", 1},
               {"hangs", !report.findings.empty()},
               {"ranks", report.ranks},
               {"missing", report.missing},
               {"process_groups", report.groups},
               {"collectives_alike", report.collectives},
               {"findings", Json::array()},
               {"notes", report.notes}};
  for (const HangFinding& finding : report.findings) {
    const auto call = [](const std::optional<HangCall>& value) {
      return value.has_value() ? HangCallJson(*value) : Json();
    };
    json["findings"].push_back(
        {{"kind", NameOf(finding.kind)},
         {"ranks", finding.ranks},
         {"text", Headline(finding)},
         {"process_group", finding.group},
         {"collective", finding.expected.sequence},
         {"expected", HangCallJson(finding.expected)},
         {"skipped", finding.kind == HangKind::kSkipped ? Json(finding.skipped) : Json()},
         {"found", call(finding.found)},
         {"last", call(finding.last)},
         {"waiting", finding.waiting},
         {"since", finding.since == 0 ? Json() : Json(HangTime(finding.since))}});
  }
  return json.dump(2) + "\n";
}

// All logs one behind the other; empty: the files are dumps, which may be far larger.
std::string TextOfLogs(const std::vector<std::string>& names) {
  Budget budget(names.front(), "bytes of logs", std::int64_t{256} << 20);
  std::string text;
  for (const std::string& name : names) {
    if (!Exists(name) || IsFolder(name)) {
      return "";
    }
    TextSource source(name);
    std::array<char, 1 << 16> block{};
    const std::size_t begin = text.size();
    while (const std::size_t count = source.Read(block.data(), block.size())) {
      if (text.size() == begin && (block[0] == '{' || block[0] == '\x80')) {
        return "";
      }
      budget.Take(static_cast<std::int64_t>(count));
      text.append(block.data(), count);
    }
    text += '\n';
  }
  return IsHangLog(text) ? text : "";  // a rank that stands still says nothing in its own log
}

}  // namespace

int HangCommand(const Arguments& arguments) {
  Seconds patience(5.0);
  arguments.Set("--patience", patience, [](const Flag& flag) { return ReadTime(flag, true); });
  std::optional<Program> program;
  if (arguments.Get("--plan").is_given()) {
    program = LowerAndVerify(ReadPlanFile(arguments.Get("--plan").text, arguments.streams));
  }
  const Program* planned = program.has_value() ? &*program : nullptr;
  const std::vector<std::string>& names = arguments.lists.at("DUMP");
  const std::string log = TextOfLogs(names);
  const HangReport report = log.empty() ? DiagnoseHang(ReadFlightDumps(names), planned, patience)
                                        : DiagnoseHangLog(log, planned);
  if (!log.empty() && report.groups == 0) {
    throw InputError(names.front(), "lines of a hang without their rank or number",
                     "those of PyTorch's watchdog, such as \"[rank3]: ... WorkNCCL(SeqNum=7, "
                     "OpType=ALLREDUCE, NumelIn=8, NumelOut=8\", or what ncclras prints");
  }
  arguments.Print(arguments.IsJson() ? HangJson(report) : HangText(report));
  for (const std::string& note : report.notes) {
    Warn(note);
  }
  return report.findings.empty() ? kExitOk : kExitNo;
}

}  // namespace shardwright
