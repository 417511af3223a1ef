#include "planner/importers/read_settings.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "core/error.h"

namespace shardwright {
namespace {

void AppendLeaves(const JsonValue& json, const std::string& prefix, std::vector<Leaf>& leaves) {
  for (const std::string& key : json.Keys()) {
    const std::optional<JsonValue> value = json.Find(key);
    if (!value) {
      continue;  // null: the framework's default
    }
    const std::string full = prefix.empty() ? key : prefix + "." + key;
    if (value->IsObject()) {
      AppendLeaves(*value, full, leaves);
    } else {
      leaves.push_back({full, *value});
    }
  }
}

bool IsNeutral(const std::string& value, std::string_view neutral) {
  while (!neutral.empty()) {
    const std::size_t end = neutral.find('|');
    if (neutral.substr(0, end) == value) {
      return true;
    }
    neutral.remove_prefix(end == std::string_view::npos ? neutral.size() : end + 1);
  }
  return false;
}

bool Covers(std::string_view other, const std::string& key) {
  return other.ends_with('.') ? key.starts_with(other) : key == other;
}

}  // namespace

std::vector<Leaf> LeavesOf(const JsonValue& root) {
  std::vector<Leaf> leaves;
  AppendLeaves(root, "", leaves);
  return leaves;
}

bool IsMisspelt(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) {
    std::swap(a, b);
  }
  if (b.size() - a.size() > 1 || a.size() < 4 || a == b) {
    return false;
  }
  std::size_t front = 0, back = 0;
  while (front < a.size() && a[front] == b[front]) {
    ++front;
  }
  while (back + front < a.size() && a[a.size() - 1 - back] == b[b.size() - 1 - back]) {
    ++back;
  }
  const std::size_t changed = a.size() - front - back;
  return changed + (b.size() - a.size()) <= 1 ||
         (changed == 2 && a.size() == b.size() && a[front] == b[front + 1] &&
          a[front + 1] == b[front]);
}

bool CheckOther(const Leaf& leaf, std::span<const OtherKey> others,
                const std::vector<std::string>& known, MayBeUnknown may_be_unknown) {
  const auto found = std::find_if(others.begin(), others.end(), [&](const OtherKey& other) {
    return Covers(other.key, leaf.key);
  });
  if (found != others.end() && !found->key.ends_with('.')) {
    if (found->neutral.empty() || IsNeutral(leaf.value.Shown(), found->neutral)) {
      return true;
    }
    std::string expected(found->neutral);
    for (std::size_t bar = expected.find('|'); bar != std::string::npos; bar = expected.find('|')) {
      expected.replace(bar, 1, " or ");
    }
    throw leaf.value.Error(expected + ", since anything else cannot be predicted");
  }
  const auto typo = std::find_if(known.begin(), known.end(),
                                 [&](const std::string& key) { return IsMisspelt(key, leaf.key); });
  if (typo == known.end() && found != others.end()) {
    return true;
  }
  if (typo == known.end() && may_be_unknown != nullptr && may_be_unknown(leaf.key)) {
    return false;
  }
  std::vector<std::string> keys = known;
  for (const OtherKey& other : others) {
    if (!other.key.ends_with('.')) {
      keys.emplace_back(other.key);
    }
  }
  throw leaf.value.Error("a key of this file to be known", typo != known.end()
                                                               ? "did you mean \"" + *typo + "\"?"
                                                               : DidYouMean(leaf.key, keys));
}

bool ReadValue(const JsonValue& json, std::optional<bool>& value) {
  if (json.IsBool()) {
    value = json.AsBool();
  }
  return json.IsBool();
}

bool ReadValue(const JsonValue& json, std::optional<std::int64_t>& value) {
  constexpr double kLimit = 9e15;  // whole numbers are exact below 2^53
  if (!json.IsNumber()) {
    return false;
  }
  const double number = json.AsDouble();
  if (!(std::abs(number) < kLimit) || number != std::floor(number)) {
    return false;
  }
  value = static_cast<std::int64_t>(number);
  return true;
}

bool ReadValue(const JsonValue& json, std::optional<double>& value) {
  if (json.IsNumber()) {
    value = json.AsDouble();
    return true;
  }
  // PyYAML reads 1e-4, which has no point, as a string, and so do people's command lines.
  if (json.IsString()) {
    const std::string text = json.AsString();
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && std::isfinite(number)) {
      value = number;
      return true;
    }
  }
  return false;
}

bool ReadValue(const JsonValue& json, std::optional<std::string>& value) {
  if (json.IsString()) {
    value = json.AsString();
  } else if (json.IsBool()) {
    value = json.AsBool() ? "yes" : "no";  // an unquoted word in YAML
  } else if (json.IsNumber()) {
    value = json.Shown();
  }
  return json.IsString() || json.IsBool() || json.IsNumber();
}

bool ReadValue(const JsonValue& json, std::optional<std::vector<std::string>>& value) {
  if (json.IsString()) {
    value = std::vector<std::string>{json.AsString()};
    return true;
  }
  std::vector<std::string> list;
  for (std::size_t i = 0; json.IsArray() && i < json.size(); ++i) {
    if (!json[i].IsString()) {
      return false;
    }
    list.push_back(json[i].AsString());
  }
  if (json.IsArray()) {
    value = list;
  }
  return json.IsArray();
}

bool ReadValue(const JsonValue& json, std::optional<std::vector<std::int64_t>>& value) {
  std::optional<std::int64_t> number;
  if (ReadValue(json, number)) {
    value = std::vector<std::int64_t>{*number};
    return true;
  }
  std::vector<std::int64_t> list;
  for (std::size_t i = 0; json.IsArray() && i < json.size(); ++i) {
    if (!ReadValue(json[i], number)) {
      return false;
    }
    list.push_back(*number);
  }
  if (json.IsArray()) {
    value = list;
  }
  return json.IsArray();
}

std::string_view TypeName(const SettingValue& value) {
  constexpr std::array<std::string_view, 6> kNames = {
      "a boolean", "an integer", "a number", "a string", "a list of strings", "a list of integers"};
  return kNames[value.index()];
}

}  // namespace shardwright
