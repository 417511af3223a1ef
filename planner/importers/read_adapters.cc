#include "planner/importers/read_adapters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

// The script's own name of a setting; empty: it has none.
std::string KeyOf(const JsonValue& keys, const char* setting) {
  const auto key = keys.Find(setting);
  return key ? key->AsString() : "";
}

std::optional<JsonValue> FindSet(const JsonValue& root, std::string_view key) {
  auto value = key.empty() ? std::nullopt : root.Find(key);
  const bool is_off =
      value &&
      ((value->IsBool() && !value->AsBool()) || (value->IsString() && value->AsString().empty()) ||
       (value->IsArray() && value->size() == 0) || (value->IsObject() && value->Keys().empty()));
  return is_off ? std::nullopt : std::move(value);
}

// "all-linear", "q_proj,v_proj", a pattern, or a list of names, as globs.
void AddTargets(const JsonValue& value, std::vector<std::string>& targets) {
  const std::string text = value.IsArray() ? "" : value.AsString();
  if (text == "all" || text == "all-linear") {
    targets.emplace_back("all-linear");
  } else if (text.find_first_of("()[]\\*|") == std::string::npos) {
    for (const std::string& name : NamesIn(value)) {
      // PEFT takes the ends of module names.
      targets.push_back(name.find('.') == std::string::npos ? name : "*." + name);
    }
  } else {
    const std::vector<std::string> globs = GlobsOfPattern(text);
    if (globs.empty()) {
      throw value.Error(
          "names, or a pattern of alternatives and numbers, since adapters by this "
          "pattern cannot be predicted");
    }
    for (const std::string& glob : globs) {
      targets.push_back(glob);
      // Of a model with a vision tower, whose text part stands alone here.
      for (const std::string_view text_part :
           {"model.language_model.", "model.text_model.", "language_model.model."}) {
        if (glob.starts_with(text_part)) {
          targets.push_back("model." + glob.substr(text_part.size()));
        }
      }
    }
  }
}

// How the weights of the checkpoint are stored, by the words that its name has on the hub; kMaster:
// whole.
FrozenFormat StoredFormat(const JsonValue& root) {
  constexpr std::array<std::string_view, 11> kOthers = {"gptq", "awq",   "aqlm",        "gguf",
                                                        "exl2", "hqq",   "nvfp4",       "mxfp4",
                                                        "-fp8", "w4a16", "prequantized"};
  for (const char* key : {"base_model", "model_name_or_path", "model"}) {
    const auto value = root.Find(key);
    const std::string name = value && value->IsString() ? LowerCase(value->AsString()) : "";
    const auto has = [&](std::string_view word) { return name.find(word) != std::string::npos; };
    if (has("bnb-4bit")) {  // Unsloth's
      return FrozenFormat::kNf4Double;
    }
    if (std::any_of(kOthers.begin(), kOthers.end(), has)) {
      throw value->Error(
          "a checkpoint of bitsandbytes, GPTQ or AWQ, or a whole one, since "
          "quantized weights of this kind cannot be predicted");
    }
  }
  return FrozenFormat::kMaster;
}

// The base below the adapters: LLaMA-Factory says bits, the others which of two.
FrozenFormat BaseOf(const JsonValue& root, const JsonValue& keys, FrozenFormat base) {
  const auto bits = root.Find("quantization_bit");
  const bool is_4 = FindSet(root, "load_in_4bit") || (bits && bits->AsInt(0, 64) == 4);
  const bool is_8 = FindSet(root, "load_in_8bit") || (bits && bits->AsInt(0, 64) == 8);
  if (bits && !is_4 && !is_8 && bits->AsInt(0, 64) != 0) {
    throw bits->Error("4 or 8, since weights in other numbers of bits cannot be predicted");
  }
  for (const char* key : {"bnb_4bit_quant_type", "quantization_type"}) {
    if (const auto type = root.Find(key); is_4 && type && type->AsString() != "nf4") {
      throw type->Error("nf4, since weights in " + type->AsString() + " cannot be predicted");
    }
  }
  if (const auto method = root.Find("quantization_method"); (is_4 || is_8) && method &&
                                                            method->AsString() != "bnb" &&
                                                            method->AsString() != "bitsandbytes") {
    throw method->Error("bnb, since weights quantized by another library cannot be predicted");
  }
  if (const FrozenFormat stored = StoredFormat(root); stored != FrozenFormat::kMaster) {
    return stored;  // whatever the other keys say
  }
  if (is_8) {
    return FrozenFormat::kInt8;
  }
  std::optional<JsonValue> twice = root.Find(KeyOf(keys, "double_quant"));
  if (const auto table = root.Find("bnb_config_kwargs"); table && table->IsObject()) {
    twice = table->Find("bnb_4bit_use_double_quant");
  }
  const bool is_double =
      twice ? twice->AsBool() : keys.At("defaults").Find("double_quant").has_value();
  return !is_4 ? base : is_double ? FrozenFormat::kNf4Double : FrozenFormat::kNf4;
}

// Each text so far, continued by each of these.
bool Append(std::vector<std::string>& texts, const std::vector<std::string>& ends) {
  constexpr std::size_t kMost = 4096;
  if (texts.size() * ends.size() > kMost) {
    return false;
  }
  std::vector<std::string> longer;
  for (const std::string& text : texts) {
    for (const std::string& end : ends) {
      longer.push_back(text + end);
    }
  }
  texts = std::move(longer);
  return true;
}

// Reads alternatives up to a closing bracket or the end; `at` is moved behind them. Null: not
// understood.
std::optional<std::vector<std::string>> Alternatives(std::string_view pattern, std::size_t& at,
                                                     int depth);

// A class of digits that the pattern begins with, each digit a text, and the length of the class.
// Example: "[4-6]x" is 4, 5 and 6, five characters. Empty: something else.
std::pair<std::vector<std::string>, std::size_t> Digits(std::string_view pattern) {
  for (const std::string_view all : {"\\d", "[\\d]"}) {
    if (pattern.starts_with(all)) {
      return {Digits("[0-9]").first, all.size()};
    }
  }
  constexpr std::size_t kLength = 5;
  const auto is_digit = [&](std::size_t i) { return pattern[i] >= '0' && pattern[i] <= '9'; };
  std::vector<std::string> digits;
  const bool is_class = pattern.size() >= kLength && pattern[0] == '[' && pattern[2] == '-' &&
                        pattern[4] == ']' && is_digit(1) && is_digit(3);
  for (char c = is_class ? pattern[1] : '9'; is_class && c <= pattern[3]; ++c) {
    digits.emplace_back(1, c);
  }
  return {digits, kLength};
}

// One name, class or group at `at`, without what repeats it.
std::optional<std::vector<std::string>> Atom(std::string_view pattern, std::size_t& at, int depth) {
  constexpr int kDeepest = 16;
  const char c = pattern[at++];
  if (c == '(') {
    at += pattern.substr(at).starts_with("?:") ? 2 : 0;
    auto inner = depth < kDeepest ? Alternatives(pattern, at, depth + 1) : std::nullopt;
    if (!inner || at >= pattern.size() || pattern[at] != ')') {
      return std::nullopt;
    }
    ++at;
    return inner;
  }
  const std::string_view rest = pattern.substr(at);
  if (const auto [digits, length] = Digits(pattern.substr(at - 1)); !digits.empty()) {
    at += length - 1;
    return digits;
  }
  if (c == '\\' && rest.starts_with('.')) {
    ++at;
    return std::vector<std::string>{"."};
  }
  if (c == '.' && (rest.starts_with('*') || rest.starts_with('+'))) {
    return std::vector<std::string>{"*"};
  }
  if (std::string_view("[]{}\\*+?)").find(c) != std::string_view::npos) {
    return std::nullopt;
  }
  return std::vector<std::string>{std::string(1, c)};
}

// A number that is a whole part of a name is a glob; others have one digit of the class or two.
// Example: "[0-9]+" behind "layers." is "*". Behind "layers.4" "[4-5]+" is 4, 5, 44, 45, 54, 55.
void RepeatDigits(const std::vector<std::string>& before, std::vector<std::string>& digits) {
  constexpr std::size_t kAll = 10;
  if (digits.size() == kAll &&
      AllOf(before, [](const std::string& text) { return text.ends_with('.'); })) {
    digits = {"*"};
    return;
  }
  std::vector<std::string> two = digits;
  Append(two, digits);
  digits.insert(digits.end(), two.begin(), two.end());
}

std::optional<std::vector<std::string>> Alternatives(std::string_view pattern, std::size_t& at,
                                                     int depth) {
  std::vector<std::string> all;
  std::vector<std::string> one = {""};
  while (at < pattern.size() && pattern[at] != ')') {
    if (pattern[at] == '|' || pattern[at] == '^' || pattern[at] == '$') {
      if (pattern[at++] == '|') {
        all.insert(all.end(), one.begin(), one.end());
        one = {""};
      }
      continue;
    }
    const bool is_group = pattern[at] == '(';
    const bool is_digit = !Digits(pattern.substr(at)).first.empty();
    auto atom = Atom(pattern, at, depth);
    if (!atom) {
      return std::nullopt;
    }
    const char repeat = at < pattern.size() ? pattern[at] : '\0';
    if (is_digit && (repeat == '+' || repeat == '*')) {
      RepeatDigits(one, *atom);
      if (repeat == '*') {
        atom->emplace_back("");
      }
    }
    const bool is_number = is_digit || atom->front() == "*";
    if (repeat == '?' && is_group) {
      atom->emplace_back("");
    } else if ((repeat == '+' || repeat == '*') && !is_number) {
      return std::nullopt;
    }
    at += repeat == '?' || repeat == '+' || repeat == '*' ? 1 : 0;
    if ((repeat == '?' && !is_group) || !Append(one, *atom)) {
      return std::nullopt;
    }
  }
  all.insert(all.end(), one.begin(), one.end());
  return all;
}

}  // namespace

Adapters ReadAdapters(const JsonValue& root, std::string_view script, FrozenFormat base) {
  const JsonValue keys = SettingKeys::Table("adapters").At(script);
  const auto find = [&](const char* setting) { return root.Find(KeyOf(keys, setting)); };
  const auto by_default = [&](const char* setting) {
    const auto value = keys.At("defaults").Find(setting);
    return value ? value->AsDouble() : 0.0;
  };
  constexpr std::int64_t kMostRank = std::int64_t{1} << 20;
  Adapters adapters;
  adapters.has_magnitudes = FindSet(root, KeyOf(keys, "dora")).has_value();
  adapters.quantizes_experts = FindSet(root, "quantize_moe_experts").has_value();
  if (const auto saved = FindSet(root, KeyOf(keys, "saved"))) {
    AddTargets(*saved, adapters.saved);
  }
  const auto rank = find("rank");
  adapters.rank = rank || by_default("rank") == 0.0
                      ? root.At(KeyOf(keys, "rank")).AsInt(1, kMostRank)
                      : static_cast<std::int64_t>(by_default("rank"));
  const auto alpha = find("alpha");
  adapters.alpha = alpha                       ? alpha->AsDouble()
                   : by_default("alpha") > 0.0 ? by_default("alpha")
                                               : 2.0 * static_cast<double>(adapters.rank);
  if (!(adapters.alpha > 0.0 && adapters.alpha <= kMaxLoraAlpha)) {
    throw root.At(KeyOf(keys, "alpha")).Error("a number above 0, at most 1e6");
  }
  if (FindSet(root, KeyOf(keys, "rslora"))) {  // alpha / sqrt(rank) in place of alpha / rank
    adapters.alpha *= std::sqrt(static_cast<double>(adapters.rank));
  }
  const auto dropout = find("dropout");
  adapters.dropout = dropout ? dropout->AsDouble() : by_default("dropout");
  if (!(adapters.dropout >= 0.0 && adapters.dropout < 1.0)) {
    throw dropout->Error("a fraction in [0, 1)");
  }
  if (const auto targets = FindSet(root, KeyOf(keys, "targets"))) {
    AddTargets(*targets, adapters.targets);
  }
  if (const auto all = FindSet(root, KeyOf(keys, "all_linear"));
      all && adapters.quantizes_experts) {
    throw all->Error("false beside quantize_moe_experts, as axolotl demands");
  }
  if (FindSet(root, KeyOf(keys, "all_linear")) ||
      (adapters.targets.empty() && by_default("all_linear") > 0.0)) {
    adapters.targets.emplace_back("all-linear");
  }
  adapters.base = BaseOf(root, keys, base);
  if (adapters.quantizes_experts && adapters.base <= FrozenFormat::kParam) {
    throw root.At("quantize_moe_experts")
        .Error("false without weights in 8 or 4 bits, as axolotl demands");
  }
  return adapters;
}

std::vector<std::string> NamesIn(const JsonValue& value) {
  std::vector<std::string> names;
  for (std::size_t i = 0; value.IsArray() && i < value.size(); ++i) {
    names.push_back(value[i].AsString());
  }
  const std::string text = value.IsArray() ? "" : value.AsString();
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::size_t first = text.find_first_not_of(' ', begin);
    if (first < end) {
      names.push_back(text.substr(first, end - first));
    }
    begin = end + 1;
  }
  return names;
}

void RefuseQuantized(const JsonValue& root) {
  if (StoredFormat(root) != FrozenFormat::kMaster) {
    throw root.At(root.Find("base_model") ? "base_model" : "model_name_or_path")
        .Error("a whole checkpoint, since quantized weights without adapters cannot be predicted");
  }
  for (const char* key : {"load_in_4bit", "load_in_8bit", "quantization_bit"}) {
    const auto value = FindSet(root, key);
    if (value && !(value->IsNumber() && value->AsDouble() == 0.0)) {
      throw value->Error(
          "no such key, since quantized weights without adapters cannot be predicted");
    }
  }
}

std::vector<std::string> GlobsOfPattern(std::string_view pattern) {
  std::size_t at = 0;
  const auto globs = Alternatives(pattern, at, 0);
  return globs && at == pattern.size() ? *globs : std::vector<std::string>();
}

}  // namespace shardwright
