// Is what a log says of a run right?

#include <cmath>

#include <nlohmann/json.hpp>

#include "analysis/judge.h"
#include "analysis/step_log.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kLargestLog = std::int64_t{64} << 20;
constexpr std::size_t kShownCauses = 5;
constexpr double kAnotherRun = 5;  // as many times slower or faster

StepLog ReadLog(const Arguments& arguments) {
  const std::string log = arguments.text.at("LOG");
  if (log == "-") {
    return ReadStepLog(arguments.streams.read(), arguments.streams.source);
  }
  const bool is_words = !Exists(log) && log.find(' ') != std::string::npos;
  return is_words ? ReadStepLog(log, "LOG") : ReadStepLog(ReadTextFile(log, kLargestLog), log);
}

Json ToJson(const StepLog& log, const Judgement& judgement) {
  Json json = ReportHead("judge");
  json["log"] = {
      {"framework", log.framework}, {"values", log.count}, {"assumed", judgement.assumed}};
  json["step_time_s"] = {{"measured", judgement.measured.value},
                         {"predicted", judgement.predicted.value},
                         {"band", judgement.band},
                         {"as_predicted", judgement.IsTimeAsPredicted()}};
  json["memory_bytes"] = {{"predicted", judgement.predicted_memory.value},
                          {"error", judgement.memory_error.value},
                          {"reserved", log.is_reserved},
                          {"as_predicted", judgement.IsMemoryAsPredicted()}};
  json["memory_bytes"]["measured"] =
      judgement.measured_memory ? Json(judgement.measured_memory->value) : Json();
  json["causes"] = Mapped<Json>(judgement.causes, [&](const Cause& cause) -> Json {
    return {{"name", cause.name},
            {"step_time_s", cause.step_time.value},
            {"memory_bytes", cause.memory.value_or(judgement.predicted_memory).value},
            {"mismatch", cause.mismatch},
            {"check", cause.check}};
  });
  return json;
}

std::string Verdict(const StepLog& log, const Judgement& judgement) {
  std::string text = "step time  " + Format(judgement.measured) + " measured, " +
                     Format(judgement.predicted) + " +- " + Percent(judgement.band) +
                     " predicted: ";
  const double difference = judgement.Difference();
  text += judgement.IsTimeAsPredicted()
              ? "as predicted"
              : Percent(std::abs(difference)) + (difference > 0 ? " slower" : " faster") +
                    " than predicted";
  const char* counted = log.is_reserved ? "reserved" : "allocated";
  text += "\nmemory     ";
  if (!judgement.measured_memory) {
    return text + "not in the log; " + Format(judgement.predicted_memory) + " " + counted +
           " predicted\n";
  }
  return text + Format(*judgement.measured_memory) + " measured, " +
         Format(judgement.predicted_memory) + " +- " + Format(judgement.memory_error) + " " +
         counted + " predicted" +
         (judgement.IsMemoryAsPredicted() ? ": as predicted\n" : ": not as predicted\n");
}

std::string ToText(const PlanFile& file, const StepLog& log, const Judgement& judgement) {
  std::string text = TitleOf(file) + "\nlog        " + PrintableLine(log.framework) + ", " +
                     WithCommas(log.count) + (log.count == 1 ? " value" : " values") + "\n" +
                     Verdict(log, judgement);
  if (!judgement.assumed.empty()) {
    text += "assumed    " + judgement.assumed + "\n";
  }
  if (judgement.IsTimeAsPredicted() && judgement.IsMemoryAsPredicted()) {
    return text;
  }
  if (judgement.causes.empty()) {
    return text + "\nNo cause that we can simulate explains it: is it the plan of this run?\n";
  }
  if (std::abs(std::log1p(judgement.Difference())) > std::log(kAnotherRun)) {
    text +=
        "\nThat is more than single causes make: is it the plan of this run, with its model, batch "
        "and GPUs?\n";
  }
  const auto explains_memory = [&](const Cause& cause) {
    const Bytes memory = cause.memory.value_or(judgement.predicted_memory);
    return std::abs((memory - *judgement.measured_memory).value) <= judgement.memory_error.value;
  };
  if (judgement.measured_memory && NoneOf(judgement.causes, explains_memory)) {
    text += "\nNone of these causes explains the memory, nor do two of them: is it another plan?\n";
  }
  text += judgement.IsTimeAsPredicted() ? "\nWhat would explain it, likeliest first\n"
          : judgement.IsMemoryAsPredicted()
              ? "\nWhat would explain the step time, likeliest first\n"
              : "\nWhat would explain step time or memory, likeliest first\n";
  for (std::size_t i = 0; i < std::min(kShownCauses, judgement.causes.size()); ++i) {
    const Cause& cause = judgement.causes[i];
    const Bytes memory = cause.memory.value_or(judgement.predicted_memory);
    text += "  " + std::to_string(i + 1) + ". " + cause.name + ": " + Format(cause.step_time) +
            ", " + Format(memory) + "\n     to be sure: " + cause.check + "\n";
  }
  return text;
}

}  // namespace

int JudgeCommand(const Arguments& arguments) {
  arguments.Require("--plan");
  if (arguments.text.at("LOG") == "-" && arguments.Get("--plan").text == "-") {
    throw UsageError("LOG and --plan both want standard input");
  }
  const StepLog log = ReadLog(arguments);
  const PlanFile file = ReadPlanFile(arguments.Get("--plan").text, arguments.streams);
  const Judgement judgement = JudgeLog(file, log);
  arguments.Print(arguments.IsJson() ? ToJson(log, judgement).dump(2) + "\n"
                                     : ToText(file, log, judgement));
  return judgement.IsTimeAsPredicted() && judgement.IsMemoryAsPredicted() ? kExitOk : kExitNo;
}

}  // namespace shardwright
