#include "cli/flag_values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "cli/exit_codes.h"
#include "core/date.h"
#include "core/error.h"
#include "core/json.h"
#include "core/portable.h"
#include "core/text.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

UsageError FlagError(const Flag& flag, const std::string& expected, const std::string& hint = {}) {
  return UsageError(flag.name + ": got \"" + flag.text + "\", expected " + expected +
                    (hint.empty() ? "" : "; " + hint));
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string OneOf(NameList names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += i == 0 ? "" : i + 1 < names.size() ? ", " : " or ";
    text += names[i];
  }
  return text;
}

// The index of `word`, or names.size().
std::size_t IndexOf(std::string_view word, NameList names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == word) {
      return i;
    }
  }
  return names.size();
}

// What is wrong with the text of a flag is wrong with the command line.
template <class Read>
auto AsUsage(const Read& read) {
  try {
    return read();
  } catch (const InputError& error) {
    throw UsageError(error.what());
  }
}

std::string HintFor(std::string_view word, NameList names) {
  return DidYouMean(word, std::vector<std::string>(names.begin(), names.end()));
}

}  // namespace

void RefuseFlag(const Flag& flag, const std::string& expected) {
  throw FlagError(flag, expected);
}

std::int64_t ReadCount(const Flag& flag, std::int64_t min, std::int64_t max) {
  const std::optional<std::int64_t> value = IntegerIn(flag.text);
  if (!value || *value < min || *value > max) {
    const bool has_k = flag.text.ends_with('k') || flag.text.ends_with('K');  // "32k"
    const auto thousands = IntegerIn(std::string_view(flag.text).substr(0, flag.text.size() - 1));
    throw FlagError(flag,
                    "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]",
                    has_k && thousands && *thousands < max / 1024
                        ? "did you mean " + std::to_string(*thousands * 1024) + "?"
                        : "");
  }
  return *value;
}

std::int64_t ReadWholeNumber(const Flag& flag, std::int64_t min) {
  constexpr double kMost = 1e15;
  const std::optional<double> value = NumberIn(flag.text);
  if (!value || std::floor(*value) != *value ||
      !(*value >= static_cast<double>(min) && *value <= kMost)) {
    throw FlagError(flag, "a whole number from " + std::to_string(min) + " to 1e15, such as 5e8");
  }
  return static_cast<std::int64_t>(*value);
}

double ReadFraction(const Flag& flag) {
  const std::optional<double> value = NumberIn(flag.text);
  if (!value || !(*value >= 0.0 && *value < 1.0)) {
    throw FlagError(flag, "a fraction in [0, 1)");
  }
  return *value;
}

double ReadPositive(const Flag& flag, double max) {
  const std::optional<double> value = NumberIn(flag.text);
  if (!value || !(*value > 0.0 && *value <= max)) {
    throw FlagError(flag, "a number above 0, at most " + Fixed(max, "%g"));
  }
  return *value;
}

Bytes ReadBytes(const Flag& flag) {
  return AsUsage([&] { return ParseBytes(flag.text, flag.name); });
}

BytesPerSecond ReadRate(const Flag& flag) {
  return AsUsage([&] { return ParseBytesPerSecond(flag.text, flag.name); });
}

Seconds ReadTime(const Flag& flag, bool may_be_zero) {
  constexpr double kLargest = 1e12;
  constexpr std::pair<std::string_view, double> kUnits[] = {
      {"ms", 1e-3}, {"s", 1.0}, {"min", 60.0}, {"h", 3600.0}, {"days", 86400.0}};
  double value = 0.0;
  const char* const end = flag.text.data() + flag.text.size();
  const auto [stop, error] = FromChars(flag.text.data(), end, value);
  if (error == std::errc()) {
    std::string_view unit(stop, static_cast<std::size_t>(end - stop));
    unit.remove_prefix(unit.starts_with(' ') ? 1 : 0);
    for (const auto& [name, length] : kUnits) {
      const double seconds = value * length;
      if (unit == name && seconds <= kLargest &&
          (seconds > 0.0 || (may_be_zero && seconds == 0.0))) {
        return Seconds(seconds);
      }
    }
  }
  throw FlagError(flag, std::string(may_be_zero ? "a time" : "a time above 0") +
                            " in ms, s, min, h or days, such as \"90 s\"");
}

std::chrono::milliseconds ReadTimeout(const Flag& flag) {
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::ceil(ReadTime(flag, false).value * 1e3)));
}

std::string Today() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm day{};
  gmtime_r(&now, &day);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", &day);
  return text.data();
}

std::string ReadDate(const Flag& flag) {
  if (!IsDate(flag.text)) {
    throw FlagError(flag, "a date such as \"2026-11-21\"");
  }
  return flag.text;
}

std::size_t ReadChoice(const Flag& flag, NameList names) {
  const std::size_t index = IndexOf(flag.text, names);
  if (index == names.size()) {
    throw FlagError(flag, OneOf(names), HintFor(flag.text, names));
  }
  return index;
}

bool ReadSwitch(const Flag& flag) {
  static constexpr std::array<std::string_view, 2> kNames = {"on", "off"};
  return ReadChoice(flag, kNames) == 0;
}

std::vector<std::string> ReadList(const Flag& flag) {
  std::vector<std::string> parts = Split(flag.text, ',');
  for (const std::string& part : parts) {
    if (part.empty()) {
      throw FlagError(flag, "names separated by commas");
    }
  }
  return parts;
}

namespace {

// What stands behind a precision's name for the products of linear layers; none if nothing does.
std::optional<Fp8Products> Fp8Of(std::string_view name) {
  return name == "fp8"               ? std::optional(Fp8Products::kPerTensor)
         : name == "fp8-rowwise"     ? std::optional(Fp8Products::kPerRow)
         : name == "fp8-gathered"    ? std::optional(Fp8Products::kGathered)
         : name == "fp8-precomputed" ? std::optional(Fp8Products::kPrecomputed)
                                     : std::nullopt;
}

}  // namespace

Fp8Products ReadFp8Products(const Flag& flag) {
  return Fp8Of(std::string_view(flag.text).substr(flag.text.find('+') + 1))
      .value_or(Fp8Products::kNone);
}

namespace {

// "nf4", "int8" and the like, of parameters that do not learn.
std::optional<FrozenFormat> FrozenOf(std::string_view name) {
  const std::size_t index = IndexOf(std::string(name), kFrozenFormatNames);
  return index <= static_cast<std::size_t>(FrozenFormat::kParam) ||
                 index == kFrozenFormatNames.size()
             ? std::nullopt
             : std::optional(static_cast<FrozenFormat>(index));
}

}  // namespace

FrozenFormat ReadFrozenFormat(const Flag& flag) {
  return FrozenOf(std::string_view(flag.text).substr(flag.text.find('+') + 1))
      .value_or(FrozenFormat::kMaster);
}

Precision ReadPrecision(const Flag& flag) {
  using enum DType;
  const std::size_t plus = flag.text.find('+');
  const std::string_view suffix = std::string_view(flag.text).substr(plus + 1);
  const bool has_suffix = Fp8Of(suffix).has_value() || FrozenOf(suffix).has_value();
  const std::string name = !has_suffix                              ? flag.text
                           : plus == std::string::npos || plus == 0 ? "bf16-mixed"
                                                                    : flag.text.substr(0, plus);
  if (name == "bf16-mixed") {
    return {kFp32, kBf16, kFp32};
  }
  if (name == "fp16-mixed") {
    return {kFp32, kFp16, kFp32};
  }
  const std::size_t whole = IndexOf(name, kTrainingDTypeNames);
  if (whole < kTrainingDTypeNames.size()) {
    const auto type = static_cast<DType>(whole);
    return {type, type, type};
  }
  const std::vector<std::string> parts = Split(name, '/');
  Precision precision;
  const std::array<DType*, 3> types = {&precision.master, &precision.param, &precision.reduce};
  bool is_good = parts.size() == 3;
  for (std::size_t i = 0; is_good && i < 3; ++i) {
    const std::size_t index = IndexOf(parts[i], kTrainingDTypeNames);
    is_good = index < kTrainingDTypeNames.size();
    *types[i] = static_cast<DType>(index);
  }
  if (!is_good) {
    throw FlagError(flag,
                    "bf16-mixed, fp16-mixed, fp32, bf16, fp16 or master/param/reduce such as "
                    "fp32/bf16/fp32, alone or with +fp8, +fp8-rowwise, "
                    "+fp8-gathered or +fp8-precomputed, or with +nf4, +nf4_double or +int8 of what "
                    "is frozen");
  }
  return precision;
}

OptimizerSpec ReadOptimizer(const Flag& flag) {
  if (const std::optional<OptimizerSpec> named = OptimizerNamed(flag.text)) {
    return *named;
  }
  const std::vector<std::string> parts = Split(flag.text, ':');
  const std::array<NameList, 3> names = {kOptimizerNames, kOptimizerImplNames, kMatrixRuleNames};
  std::array<std::size_t, 3> chosen = {};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const NameList known = names[std::min<std::size_t>(i, 2)];
    const std::size_t index = IndexOf(parts[i], known);
    if (i > 2 || index == known.size()) {
      throw FlagError(flag,
                      OneOf(kOptimizerNames) + ", alone or with :" + OneOf(kOptimizerImplNames) +
                          " and then :" + OneOf(kMatrixRuleNames),
                      HintFor(parts[i], known));
    }
    chosen[i] = index;
  }
  OptimizerSpec optimizer;
  optimizer.kind = static_cast<OptimizerKind>(chosen[0]);
  optimizer.impl = static_cast<OptimizerImpl>(chosen[1]);
  optimizer.matrices = static_cast<MatrixRule>(chosen[2]);
  optimizer.states =
      optimizer.kind == OptimizerKind::kAdafactor ? StateFormat::kFp32 : StateFormat::kMaster;
  return optimizer;
}

AllocatorSettings ReadAllocator(const Flag& flag) {
  static constexpr std::array<std::string_view, 4> kNames = {
      "expandable_segments", "max_split_size_mb", "garbage_collection_threshold",
      "pinned_max_round_threshold_mb"};
  AllocatorSettings settings;
  for (const std::string& setting : ReadList(flag)) {
    const std::vector<std::string> parts = Split(setting, ':');
    const std::size_t name = IndexOf(parts[0], kNames);
    if (parts.size() != 2 || name == kNames.size()) {
      throw FlagError(flag,
                      "settings of PyTorch's allocator that change what fits, as "
                      "PYTORCH_ALLOC_CONF has them: expandable_segments:True|False, "
                      "max_split_size_mb:N, garbage_collection_threshold:X, "
                      "pinned_max_round_threshold_mb:N",
                      HintFor(parts[0], kNames));
    }
    const Flag value{flag.name + ' ' + parts[0], parts[1]};
    if (name == 0) {
      if (parts[1] != "True" && parts[1] != "False") {
        throw FlagError(value, "True or False");
      }
      settings.expandable_segments = parts[1] == "True";
    } else if (name == 1) {
      settings.max_split_size = ReadCount(value, 21, std::int64_t{1} << 20) * kMiB;
    } else if (name == 3) {
      settings.pinned_max_round_mib = static_cast<std::int32_t>(ReadCount(value, 1, 1 << 20));
    } else {
      settings.garbage_collection_threshold = ReadFraction(value);
    }
  }
  return settings;
}

Offload ReadOffload(const Flag& flag) {
  static constexpr std::array<std::string_view, 5> kNames = {"none", "parameters", "optimizer",
                                                             "activations", "moments"};
  Offload offload;
  bool none = false;
  const std::array<bool*, 5> fields = {&none, &offload.parameters, &offload.optimizer,
                                       &offload.activations, &offload.moments};
  for (const std::string& part : ReadList(flag)) {
    const std::size_t index = IndexOf(part, kNames);
    if (index == kNames.size()) {
      throw FlagError(flag, OneOf(kNames), HintFor(part, kNames));
    }
    *fields[index] = true;
  }
  return offload;
}

ReshardChoice ReadReshard(const Flag& flag) {
  ReshardChoice choice;
  choice.is_set = true;
  const std::size_t index = IndexOf(flag.text, kReshardNames);
  if (index < kReshardNames.size()) {
    choice.reshard.kind = static_cast<Reshard::Kind>(index);
    return choice;
  }
  if (flag.text == "step") {
    choice.reshard.kind = Reshard::Kind::kNever;
    choice.keeps_gathered = true;
    return choice;
  }
  if (flag.text.find_first_not_of("0123456789") != std::string::npos) {
    throw FlagError(flag, "always, never, step or a number of ranks",
                    HintFor(flag.text, kReshardNames));
  }
  choice.reshard.kind = Reshard::Kind::kToGroup;
  choice.reshard.group = ReadCount(flag, 1, std::int64_t{1} << 24);
  return choice;
}

namespace {

constexpr std::array<std::string_view, 4> kMeshWords = {"ep", "tp", "cp", "pp"};

// For "pp:2", "PP=2" or " pp=2" the hint is pp=2.
[[noreturn]] void RefuseMeshWord(const Flag& word) {
  std::string name, number;
  for (const char c : word.text) {
    const bool is_digit = c >= '0' && c <= '9';
    const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (is_digit) {
      number += c;
    } else if (lower >= 'a' && lower <= 'z' && number.empty()) {
      name += lower;
    } else if (!number.empty()) {
      break;
    }
  }
  const bool is_known = IndexOf(name, kMeshWords) < kMeshWords.size() && !number.empty();
  throw FlagError(word,
                  "ranks that share the parameters, and behind commas ep=, tp=, cp= or pp=, such "
                  "as 64,tp=8 or 64,pp=4x2",
                  is_known ? "did you mean \"" + name + "=" + number + "\"?" : "");
}

// Behind a number of stages: a schedule and "even", each at most once.
void ReadPipelineParts(const Flag& word, std::span<const std::string> parts, ShardChoice& choice) {
  std::vector<std::string_view> names(kPipelineScheduleNames.begin(), kPipelineScheduleNames.end());
  names.emplace_back("even");
  std::array<bool, 2> is_said = {};
  for (const std::string& part : parts) {
    const std::size_t index = ReadChoice({word.name, part}, names);
    const bool is_even = index + 1 == names.size();
    if (std::exchange(is_said[is_even ? 1 : 0], true)) {
      RefuseFlag(word, "one schedule, and even once");
    }
    if (is_even) {
      choice.edge_layers = 0;
    } else {
      choice.schedule = static_cast<PipelineSchedule>(index);
    }
  }
}

// "8:async" of tp, "8:ring" of cp, "4x2:gpipe:even" of pp.
void ReadMeshWord(const Flag& word, std::size_t kind, std::int64_t& count, ShardChoice& choice) {
  static constexpr std::array<std::string_view, 1> kAsync = {"async"};
  const bool is_pipeline = kind == 3;
  const std::vector<std::string> parts = Split(word.text, kind > 0 ? ':' : '\0');
  const std::vector<std::string> counts = Split(parts.front(), is_pipeline ? 'x' : '\0');
  if (counts.front() == "any") {
    RefuseFlag(word, "any alone, which a search tries, or a number such as 4" +
                         word.text.substr(std::string_view("any").size()));
  }
  count = ReadCount({word.name, counts.front()}, 1, kMaxRanks);
  if (counts.size() > 2 || (!is_pipeline && parts.size() > 2)) {
    RefuseFlag(
        word, is_pipeline ? "ranks and stages of each, such as 4x2" : "one word behind the number");
  }
  if (counts.size() > 1) {
    choice.stages = ReadCount({word.name, counts[1]}, 1, kMaxRanks);
    choice.schedule = PipelineSchedule::kInterleaved1F1B;
  }
  if (is_pipeline) {
    ReadPipelineParts(word, std::span(parts).subspan(1), choice);
  } else if (parts.size() > 1 && kind == 1) {
    choice.tensor_async = ReadChoice({word.name, parts[1]}, kAsync) == 0;
  } else if (parts.size() > 1) {
    choice.method =
        static_cast<ContextMethod>(ReadChoice({word.name, parts[1]}, kContextMethodNames));
  }
}

}  // namespace

ShardChoice ReadShard(const Flag& flag) {
  ShardChoice choice;
  std::int64_t* const counts[] = {&choice.experts, &choice.tensor, &choice.context,
                                  &choice.pipeline, &choice.size};
  bool is_said[std::size(counts)] = {};  // each at most once, in any order
  for (const std::string& text : Split(flag.text, ',')) {
    const std::size_t equals = text.find('=');
    const bool is_size = equals == std::string::npos;
    const std::size_t kind =
        is_size ? kMeshWords.size() : IndexOf(text.substr(0, equals), kMeshWords);
    if (is_size ? !IntegerIn(text) : kind == kMeshWords.size()) {
      RefuseMeshWord({flag.name, text});
    }
    if (std::exchange(is_said[kind], true)) {
      RefuseFlag({flag.name, text}, "each kind of ranks once");
    }
    if (is_size) {
      choice.size = ReadCount({flag.name, text}, 1, kMaxRanks);
    } else {
      ReadMeshWord({flag.name + ' ' + text.substr(0, equals), text.substr(equals + 1)}, kind,
                   *counts[kind], choice);
    }
  }
  return choice;
}

void ReadMode(const Flag& flag, Job& job) {
  const std::vector<std::string> words = Split(flag.text, ',');
  std::vector<std::string_view> names(kJobModeNames.begin(), kJobModeNames.end());
  names.insert(names.end(), kTrainsByNames.begin() + 1, kTrainsByNames.end());
  if (words[0] == "ppo") {
    throw FlagError(flag, "grpo, since a value model that learns beside the policy is not planned");
  }
  const std::size_t name = ReadChoice({flag.name, words[0]}, names);
  job.mode = name == 1 ? JobMode::kForward : JobMode::kTrain;
  job.trains_by = name < 2 ? TrainsBy::kOwn : static_cast<TrainsBy>(name - 1);
  const bool is_grpo = job.trains_by == TrainsBy::kGrpo;
  Rollout& rollout = job.rollout = {};
  rollout.engine = is_grpo ? 0.3 : 0.0;  // TRL's vllm_gpu_memory_utilization
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  static constexpr std::array<std::string_view, 1> kSleep = {"sleep"};
  const std::map<std::string, std::function<void(const Flag&)>> readers = {
      {"completion", [&](const Flag& f) { rollout.completion = ReadCount(f, 1, kMost); }},
      {"generations", [&](const Flag& f) { rollout.generations = ReadCount(f, 2, kMost); }},
      {"updates", [&](const Flag& f) { rollout.updates = ReadCount(f, 1, kMost); }},
      {"beta", [&](const Flag& f) { rollout.has_reference = ReadFraction(f) > 0; }},
      {"seconds", [&](const Flag& f) { rollout.seconds = ReadPositive(f, kMaxGeneration); }},
      {"sleep", [&](const Flag& f) { rollout.sleeps = ReadChoice(f, kSleep) == 0; }},
      {"engine", [&](const Flag& f) {
         rollout.by_trainer = f.text == "trainer";
         rollout.engine = rollout.by_trainer || f.text == "apart" ? 0.0 : ReadFraction(f);
       }}};
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::vector<std::string> parts = Split(words[i], '=');
    const auto reader = readers.find(parts[0]);
    if (!is_grpo || reader == readers.end() || parts.size() > 2) {
      throw FlagError(flag,
                      "behind grpo alone completion, generations, updates, beta, engine, "
                      "sleep or seconds, such as completion=1024");
    }
    reader->second({flag.name + ' ' + parts[0], parts.back()});
  }
  // TRL corrects what an engine samples by a forward, and needs one where updates share it.
  rollout.has_old = is_grpo && (!rollout.by_trainer || rollout.updates > 1);
}

WrapSpec ReadWrap(const Flag& flag) {
  return AsUsage([&] { return ParseWrap(flag.text, flag.name); });
}

RecomputeChoice ReadRecompute(const Flag& flag) {
  static constexpr std::array<std::string_view, 3> kNames = {"none", "full", "selective"};
  RecomputeChoice choice;
  if (flag.text.starts_with("selective:")) {
    choice.is_on = true;
    choice.kind = RecomputeKind::kSelective;
    choice.keep_every = ReadCount({flag.name, flag.text.substr(10)}, 1, 65535);
    return choice;
  }
  if (flag.text.starts_with("full:")) {
    choice.is_on = true;
    choice.part = ReadPositive({flag.name, flag.text.substr(5)}, 1);
    return choice;
  }
  const std::size_t index = ReadChoice(flag, kNames);
  choice.is_on = index > 0;
  if (index == 2) {
    choice.kind = RecomputeKind::kSelective;
    choice.keep_every = 2;
  }
  return choice;
}

}  // namespace shardwright
