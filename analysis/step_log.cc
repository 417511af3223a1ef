#include "analysis/step_log.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "analysis/log_formats.h"
#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

enum class Logged : std::uint8_t {
  kStep,  // seconds
  kStepsPerSecond,
  kTokensPerGpu,  // per second
  kTokens,        // per second, of one GPU or of all
  kSamples,       // per second
  kReserved,      // bytes of one GPU
  kAllocated,     // likewise
};
using enum Logged;
constexpr std::array<std::string_view, 7> kQuantities = {
    "step", "steps_per_second", "tokens_per_gpu", "tokens", "samples", "reserved", "allocated"};

// A number stands between `before` and `after`; one of them may be empty. It counts `scale` units.
struct LogFormat {
  std::string framework, before, after;
  Logged quantity = kStep;
  double scale = 1;
};

constexpr std::string_view kProgressBar = "progress bar";
constexpr double kMostLogged = 1e15;  // no step, rate or memory of a GPU comes near

// log_formats.json. The lines come from torchtitan/components/metrics.py, transformers'
// speed_metrics, axolotl's and torchtune's metrics, DeepSpeed's ThroughputTimer and
// see_memory_usage, Megatron's training_log and report_memory, NeMo's progress bar, Composer's and
// OLMo's speed monitors, tqdm. PyTorch and nvidia-smi divide by 2^30 and say GB.
const std::vector<LogFormat>& Formats() {
  static const std::vector<LogFormat> formats = [] {
    const EmbeddedFile& file = EmbeddedLogFormats().front();
    const JsonValue rows = JsonValue::Parse(file.text, std::string(file.path)).At("formats");
    std::vector<LogFormat> all(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].AllowOnly({"framework", "before", "after", "quantity", "scale"});
      const auto before = rows[i].Find("before"), after = rows[i].Find("after");
      const auto scale = rows[i].Find("scale");
      all[i] = {rows[i].At("framework").AsString(), before ? before->AsString() : "",
                after ? after->AsString() : "",
                static_cast<Logged>(rows[i].At("quantity").AsChoice(kQuantities)),
                scale ? scale->AsDouble() : 1};
    }
    return all;
  }();
  return formats;
}

// Without the sequences that colour a terminal: ESC, '[', parameters, a letter.
std::string WithoutColours(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\x1b') {
      plain += text[i];
      continue;
    }
    while (i + 1 < text.size() &&
           std::string_view("[;0123456789").find(text[i + 1]) != std::string_view::npos) {
      ++i;
    }
    ++i;  // the letter
  }
  return plain;
}

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}
bool IsOfNumber(char c) {
  return IsDigit(c) || c == '.' || c == ',';
}

// The comma of "7,100": three digits behind it, and no fourth.
bool IsOfThousands(std::string_view line, std::size_t comma) {
  const std::size_t end = std::min(line.find_first_not_of("0123456789", comma + 1), line.size());
  return end == comma + 4;
}

// The number that begins at `begin`, behind blanks, quotes and signs of a key, and where it ends.
std::optional<double> NumberFrom(std::string_view line, std::size_t begin, std::size_t* end) {
  begin = line.find_first_not_of(" \t'\":=", begin);
  if (begin == std::string_view::npos || !IsDigit(line[begin])) {
    return std::nullopt;
  }
  std::string digits;
  std::size_t at = begin;
  for (; at < line.size() && IsOfNumber(line[at]); ++at) {
    if (line[at] != ',') {
      digits += line[at];
    } else if (!IsOfThousands(line, at)) {
      break;  // the comma of a list
    }
  }
  while (at + 1 < line.size() && (line[at] == 'e' || line[at] == 'E')) {  // 1.2e-05
    const std::size_t sign = at + (line[at + 1] == '-' || line[at + 1] == '+' ? 1 : 0);
    if (sign + 1 >= line.size() || !IsDigit(line[sign + 1])) {
      break;
    }
    std::size_t last = sign + 1;
    while (last < line.size() && IsDigit(line[last])) {
      ++last;
    }
    digits.append(line.substr(at, last - at));
    at = last;
  }
  while (digits.ends_with('.')) {
    digits.pop_back();
  }
  *end = at;
  return NumberIn(digits);
}

// The number that ends before `end`, blanks between them left out; "7.1k" and "1.2M" are one, too.
std::optional<double> NumberBefore(std::string_view line, std::size_t end) {
  while (end > 0 && line[end - 1] == ' ') {
    --end;
  }
  const char last = end > 0 ? line[end - 1] : ' ';
  const double scale = last == 'k' || last == 'K' ? 1e3 : last == 'M' ? 1e6 : 1;
  end -= scale > 1 ? 1 : 0;
  std::size_t begin = end;
  while (begin > 0 && IsOfNumber(line[begin - 1])) {
    --begin;
  }
  if (begin == end || (begin > 0 && line[begin - 1] == '-')) {
    return std::nullopt;
  }
  std::size_t read = 0;
  const std::optional<double> number = NumberFrom(line, begin, &read);
  // "61,3" is no number here: it may be 61.3, or two.
  return number && read == end ? std::optional(*number * scale) : std::nullopt;
}

// Bars of other work: "Loading checkpoint shards: 100%|", "Map: 100%|", "Evaluating: 12/40".
bool IsOfOtherWork(std::string_view line) {
  const std::string title = LowerCase(line.substr(0, line.find('[')));
  constexpr std::array<std::string_view, 10> kOthers = {
      "load", "map", "token", "filter", "eval", "valid", "fetch", "saving", "generat", "pack"};
  return AnyOf(kOthers, [&](std::string_view word) { return Contains(title, word); });
}

bool IsWordAt(std::string_view line, std::size_t at, std::string_view word) {
  const std::size_t behind = at + word.size();
  const auto is_letter = [&](std::size_t i) {
    const char c = static_cast<char>(line[i] | 0x20);
    return (c >= 'a' && c <= 'z') || line[i] == '/';
  };
  return line.substr(at, word.size()) == word && (behind >= line.size() || !is_letter(behind));
}

std::optional<double> ValueOf(const LogFormat& format, std::string_view line) {
  const std::string_view before = format.before;
  const std::string_view after = format.after;
  if (before.empty()) {
    for (std::size_t at = line.find(after); at != std::string_view::npos;
         at = line.find(after, at + 1)) {
      if (IsWordAt(line, at, after)) {
        return NumberBefore(line, at);
      }
    }
    return std::nullopt;
  }
  const std::size_t at = line.find(before);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  std::size_t end = 0;
  const std::optional<double> value = NumberFrom(line, at + before.size(), &end);
  const std::size_t unit = line.find_first_not_of(' ', end);
  const bool has_unit =
      after.empty() || (unit != std::string_view::npos && IsWordAt(line, unit, after));
  return has_unit ? value : std::nullopt;
}

// Values of one framework's lines, by quantity.
using Values = std::array<std::vector<double>, kQuantities.size()>;

std::size_t CountRates(const Values& values) {
  std::size_t most = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(kReserved); ++i) {
    most = std::max(most, values[i].size());
  }
  return most;
}

// Of the values but the first, which holds the start of the run.
double Median(std::vector<double> values) {
  if (values.size() > 2) {
    values.erase(values.begin());
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::map<std::string_view, Values> ValuesIn(std::string_view text) {
  std::map<std::string_view, Values> found;
  while (!text.empty()) {
    const std::size_t end =
        std::min(text.find_first_of("\r\n"), text.size());  // bars overwrite with \r
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    std::string_view said;  // of a line "7100 tokens/s/GPU", not its "tokens/s" once more
    for (const LogFormat& format : Formats()) {
      const std::optional<double> value = ValueOf(format, line);
      const bool is_rate = format.quantity < kReserved;
      if (value && *value > 0 && *value * format.scale < kMostLogged &&
          !(format.framework == kProgressBar && IsOfOtherWork(line)) &&
          !(is_rate && said == format.framework && format.before.empty())) {
        found[format.framework][static_cast<std::size_t>(format.quantity)].push_back(*value *
                                                                                     format.scale);
        said = is_rate ? std::string_view(format.framework) : said;
      }
    }
  }
  return found;
}

}  // namespace

StepLog ReadStepLog(std::string_view text, const std::string& file) {
  std::string plain = WithoutColours(text);
  for (const std::string_view spelt : {"/GPU", "per GPU", "Tokens", "Tok/"}) {
    for (std::size_t at = plain.find(spelt); at != std::string::npos; at = plain.find(spelt, at)) {
      plain.replace(at, spelt.size(), LowerCase(spelt));
    }
  }
  const std::map<std::string_view, Values> found = ValuesIn(plain);
  // A progress bar and typed words count where no line of a framework says a rate.
  const auto rank = [](const auto& entry) {
    const bool is_weak = entry.first == kProgressBar || entry.first == "typed";
    return std::pair(CountRates(entry.second) > 0 && !is_weak, CountRates(entry.second));
  };
  const auto best = std::max_element(
      found.begin(), found.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  if (best == found.end() || CountRates(best->second) == 0) {
    throw InputError(
        file, "no line that says how fast a step is",
        "a log of torchtitan, torchtune, Trainer, TRL, axolotl, DeepSpeed, Megatron-LM, NeMo, LLM "
        "Foundry or OLMo, a progress bar, or words such as \"7100 tokens/s/GPU 61 GiB\"");
  }
  StepLog log;
  log.framework = best->first;
  log.count = static_cast<std::int64_t>(CountRates(best->second));
  const auto median = [&](Logged quantity) -> std::optional<double> {
    const std::vector<double>& values = best->second[static_cast<std::size_t>(quantity)];
    return values.empty() ? std::nullopt : std::optional(Median(values));
  };
  log.tokens_per_second_per_gpu = median(kTokensPerGpu);
  log.tokens_per_second = median(kTokens);
  log.samples_per_second = median(kSamples);
  if (const std::optional<double> seconds = median(kStep)) {
    log.step_time = Seconds(*seconds);
  } else if (const std::optional<double> steps = median(kStepsPerSecond)) {
    log.step_time = Seconds(1 / *steps);
  }
  for (const auto& [framework, values] : found) {
    const bool is_reserved = !values[static_cast<std::size_t>(kReserved)].empty();
    const std::vector<double>& sizes =
        values[static_cast<std::size_t>(is_reserved ? kReserved : kAllocated)];
    if (!sizes.empty() && (framework == best->first || !log.memory)) {
      log.memory = Bytes(std::llround(*std::max_element(sizes.begin(), sizes.end())));
      log.is_reserved = is_reserved;
    }
  }
  return log;
}

}  // namespace shardwright
