#include "planner/emitters/settings.h"

#include <cstddef>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/printable.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

Json AsJson(const SettingValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

// "a.b.c" -> the object a.b, and "c".
Json& TableOf(Json& root, std::string_view& key) {
  Json* table = &root;
  for (std::size_t dot = key.find('.'); dot != std::string_view::npos; dot = key.find('.')) {
    table = &(*table)[std::string(key.substr(0, dot))];
    key.remove_prefix(dot + 1);
  }
  return *table;
}

Json AsTree(const std::vector<Setting>& list) {
  Json root = Json::object();
  for (const Setting& setting : list) {
    std::string_view key = setting.key;
    Json& table = TableOf(root, key);
    table[std::string(key)] = AsJson(setting.value);
  }
  return root;
}

std::string CommentLines(std::string_view comment) {
  std::string text;
  while (!comment.empty()) {
    const std::size_t end = comment.find('\n');
    const std::string_view line = comment.substr(0, end);
    text += line.empty() ? "#\n" : "# " + PrintableLine(line) + "\n";
    comment.remove_prefix(end == std::string_view::npos ? comment.size() : end + 1);
  }
  return text;
}

// YAML and TOML both read JSON's numbers, lists and quoted strings. Strings stay quoted, so that
// YAML takes none of them for a number or a boolean ("no"). Control characters are escaped that
// JSON leaves alone: neither's parsers take all of them.
std::string Quoted(const Json& value) {
  return Printable(value.dump());
}

void AppendYaml(const Json& table, std::size_t indent, std::string& text) {
  for (const auto& [key, value] : table.items()) {
    text.append(indent, ' ');
    text += key + ":";
    if (value.is_object()) {
      text += "\n";
      AppendYaml(value, indent + 2, text);
    } else {
      text += " " + Quoted(value) + "\n";
    }
  }
}

void AppendToml(const Json& table, const std::string& prefix, std::string& text) {
  bool has_values = false;
  for (const auto& [key, value] : table.items()) {
    if (!value.is_object()) {
      if (!has_values && !prefix.empty()) {
        text += "\n[" + prefix + "]\n";
      }
      has_values = true;
      text += key + " = " + Quoted(value) + "\n";
    }
  }
  for (const auto& [key, value] : table.items()) {
    if (value.is_object()) {
      std::string name = prefix;
      name += name.empty() ? "" : ".";
      name += key;
      AppendToml(value, name, text);
    }
  }
}

}  // namespace

std::string SettingsAsJson(const std::vector<Setting>& list) {
  return AsTree(list).dump(2) + "\n";
}

std::string SettingsAsYaml(const std::vector<Setting>& list, std::string_view comment) {
  std::string text = CommentLines(comment);
  AppendYaml(AsTree(list), 0, text);
  return text;
}

std::string SettingsAsToml(const std::vector<Setting>& list, std::string_view comment) {
  std::string text = CommentLines(comment);
  AppendToml(AsTree(list), "", text);
  return text;
}

void RefuseSetting(const std::string& where, std::string_view key, const std::string& value,
                   std::string_view expected) {
  throw InputError(where + ": " + std::string(key), '"' + value + '"', expected);
}

}  // namespace shardwright
