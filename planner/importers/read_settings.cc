#include "planner/importers/read_settings.h"

#include <array>
#include <cmath>
#include <cstdlib>

namespace shardwright {
namespace {

void AppendLeaves(const JsonValue& json, const std::string& prefix, std::vector<Leaf>& leaves) {
  for (const std::string& key : json.Keys()) {
    const std::optional<JsonValue> value = json.Find(key);
    if (!value) {
      continue;  // null: the framework's default
    }
    const bool is_plain = !key.empty() && key.find('.') == std::string::npos;
    const std::string full =
        (prefix.empty() ? "" : prefix + ".") + (is_plain ? key : '"' + key + '"');
    if (value->IsObject()) {
      AppendLeaves(*value, full, leaves);
    } else {
      leaves.push_back({full, *value});
    }
  }
}

}  // namespace

std::vector<Leaf> LeavesOf(const JsonValue& root) {
  std::vector<Leaf> leaves;
  AppendLeaves(root, "", leaves);
  return leaves;
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

std::string_view TypeName(const SettingValue& value) {
  constexpr std::array<std::string_view, 6> kNames = {
      "a boolean", "an integer", "a number", "a string", "a list of strings", "a list of integers"};
  return kNames[value.index()];
}

}  // namespace shardwright
