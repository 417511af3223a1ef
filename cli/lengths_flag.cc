#include "cli/lengths_flag.h"

#include <string_view>

#include <nlohmann/json.hpp>

#include "cli/estimate_print.h"
#include "cli/flag_values.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/printable.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::string_view kLognormal = "lognormal:";
constexpr std::uint64_t kSeed = 1;

Lengths ReadLognormal(const Flag& flag) {
  constexpr double kMost = 1e9;
  const std::string numbers = flag.text.substr(kLognormal.size());
  const std::size_t comma = numbers.find(',');
  Lengths lengths;
  if (comma != std::string::npos) {
    lengths = LognormalLengths(ReadPositive({flag.name, numbers.substr(0, comma)}, kMost),
                               ReadPositive({flag.name, numbers.substr(comma + 1)}, kMost));
  }
  if (lengths.empty()) {
    RefuseFlag(flag, "lognormal:MEAN,P99 with a 99th percentile of 1 to 14.9 times the mean");
  }
  return lengths;
}

Json LengthStepsJson(const StepsOfLengths& steps) {
  return {{"mean_s", steps.mean.value},  {"p50_s", steps.p50.value},
          {"p99_s", steps.p99.value},    {"tokens_per_s_per_gpu", steps.tokens_per_second_per_gpu},
          {"padding", steps.padding},    {"batches", steps.batches},
          {"simulated", steps.simulated}};
}

// `tokens` of the data on `ranks` GPUs.
void AddRow(const char* name, const StepsOfLengths& steps, double tokens, double ranks,
            Table& table) {
  table.Row({name, "mean " + Format(steps.mean), "p50 " + Format(steps.p50),
             "p99 " + Format(steps.p99),
             WithCommas(std::llround(steps.tokens_per_second_per_gpu)) + " tokens/s per GPU",
             Percent(steps.padding) + " padding",
             Tokens(tokens) + " tokens take " +
                 Duration(tokens / (ranks * steps.tokens_per_second_per_gpu))});
}

}  // namespace

Lengths ReadLengths(const Flag& flag) {
  return flag.text.starts_with(kLognormal) ? ReadLognormal(flag)
                                           : ParseLengths(ReadTextFile(flag.text), flag.text);
}

Arguments WithLongest(Arguments arguments) {
  const Flag lengths = arguments.Get("--lengths");
  if (!lengths.is_given()) {
    return arguments;
  }
  const std::string longest = std::to_string(ReadLengths(lengths).back().length);
  if (!arguments.Get("--seq").is_given()) {
    if (!arguments.command.empty()) {  // once of several questions
      Say("note: --seq " + longest + ", the longest of --lengths");
    }
    arguments.text["--seq"] = longest;
  }
  return arguments;
}

std::string WithLengths(const Arguments& arguments, const PlanFile& file, std::string report) {
  const Flag flag = arguments.Get("--lengths");
  if (!flag.is_given()) {
    return report;
  }
  const Lengths lengths = ReadLengths(flag);
  const StepsByLength steps = SampleStepsByLength(file, lengths, kSeed);
  if (arguments.IsJson()) {
    Json json = ParseOrdered(report, "report");
    json["lengths"] = {{"seed", kSeed}, {"padded", LengthStepsJson(steps.padded)}};
    json["lengths"]["packed"] = steps.packed ? LengthStepsJson(*steps.packed) : Json();
    return json.dump(2) + "\n";
  }
  double samples = 0, tokens = 0;
  for (const LengthCount& one : lengths) {
    samples += static_cast<double>(one.count);
    tokens += static_cast<double>(one.count) * static_cast<double>(one.length);
  }
  report += "\nSo far all samples had " + WithCommas(file.job.sequence_length) +
            " tokens. Steps of samples as long as " + PrintableLine(flag.text) + " says: mean " +
            WithCommas(std::llround(tokens / samples)) + ", longest " +
            WithCommas(lengths.back().length) + " tokens\n";
  Table table({kLeft, kLeft, kLeft, kLeft, kRight, kRight, kLeft});
  std::int64_t all = 1'000'000'000;
  arguments.Set("--tokens", all, [](const Flag& given) { return ReadWholeNumber(given, 1); });
  const auto ranks = static_cast<double>(file.cluster.RankCount());
  AddRow("padded", steps.padded, static_cast<double>(all), ranks, table);
  if (steps.packed) {
    AddRow("packed", *steps.packed, static_cast<double>(all), ranks, table);
  }
  return report + table.Text(2) + "  " + WithCommas(steps.padded.batches) +
         " batches drawn with seed " + std::to_string(kSeed) +
         "; tokens/s counts the data's tokens, of at most " + WithCommas(file.job.sequence_length) +
         " a sample, for which the memory above is\n";
}

}  // namespace shardwright
