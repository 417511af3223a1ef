#include "planner/importers/document.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>
#include <toml++/toml.h>
#include <yaml-cpp/yaml.h>

#include "core/error.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxText = std::size_t{1} << 20;
constexpr std::size_t kMaxValues = 100'000;
constexpr int kMaxDepth = 50;

// An unquoted scalar as PyYAML's resolver reads it.
Json YamlScalar(const std::string& text) {
  static const std::regex kInteger("[-+]?(0|[1-9][0-9_]*)");
  static const std::regex kFloat(R"([-+]?([0-9][0-9_]*)?\.[0-9]*([eE][-+][0-9]+)?)");
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL") {
    return nullptr;
  }
  for (const char* word : {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}) {
    if (text == word) {
      return true;
    }
  }
  for (const char* word : {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}) {
    if (text == word) {
      return false;
    }
  }
  const bool is_short = text.size() <= 18;  // fits 64 bits; also bounds the regular expressions
  if (is_short && std::regex_match(text, kInteger)) {
    std::string digits = text;
    std::erase(digits, '_');
    return std::stoll(digits);
  }
  if (is_short && std::regex_match(text, kFloat)) {
    std::string digits = text;
    std::erase(digits, '_');
    const char* const begin = digits.data() + (digits.front() == '+' ? 1 : 0);
    const char* const end = digits.data() + digits.size();
    double number = 0;
    const auto [rest, error] = std::from_chars(begin, end, number);
    if (error == std::errc() && rest == end) {
      return number;
    }
  }
  return text;
}

// Aliases share nodes, so that a small text can stand for a huge tree.
class YamlReader {
 public:
  explicit YamlReader(const std::string& file) : file_(file) {}

  [[nodiscard]] Json Read(const YAML::Node& node, int depth) {
    if (++count_ > kMaxValues || depth > kMaxDepth) {
      throw InputError(file_, "aliases or nesting that make more than 100000 values or 50 levels",
                       "a settings file");
    }
    switch (node.Type()) {
      case YAML::NodeType::Map:
        return ReadMap(node, depth);
      case YAML::NodeType::Sequence: {
        Json list = Json::array();
        for (const YAML::Node& entry : node) {
          list.push_back(Read(entry, depth + 1));
        }
        return list;
      }
      case YAML::NodeType::Scalar:
        return node.Tag() == "!" ? Json(node.Scalar()) : YamlScalar(node.Scalar());
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
    }
    return nullptr;
  }

 private:
  Json ReadMap(const YAML::Node& node, int depth) {
    Json map = Json::object();
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) {
        throw InputError(file_, "a key that is no word", "names as keys");
      }
      const std::string key = entry.first.Scalar();
      if (map.contains(key)) {
        throw InputError(file_ + ": " + key, "the key twice", "each key once");
      }
      map[key] = Read(entry.second, depth + 1);
    }
    return map;
  }

  const std::string& file_;
  std::size_t count_ = 0;
};

Json FromYaml(const std::string& text, const std::string& file) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    const int line = error.mark.line + 1;
    throw InputError(file + ": line " + std::to_string(line), error.msg, "YAML");
  }
  return YamlReader(file).Read(root, 0);
}

Json FromToml(const std::string& text, const std::string& file) {
  try {
    std::ostringstream json;
    json << toml::json_formatter(toml::parse(text, file));
    return Json::parse(json.str());
  } catch (const toml::parse_error& error) {
    throw InputError(file + ": line " + std::to_string(error.source().begin.line),
                     std::string(error.description()), "TOML");
  } catch (const Json::exception&) {
    throw InputError(file, "a number that JSON has no name for", "finite numbers");
  }
}

std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  char quote = '\0';
  bool is_word = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != '\0') {
      quote == c ? void(quote = '\0') : word.push_back(c);
    } else if (c == '\'' || c == '"') {
      quote = c;
      is_word = true;
    } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r' ||
               (c == '\\' && i + 1 < text.size() && text[i + 1] == '\n')) {
      if (is_word || !word.empty()) {
        words.push_back(word);
      }
      word.clear();
      is_word = false;
    } else {
      word.push_back(c);
    }
  }
  if (is_word || !word.empty()) {
    words.push_back(word);
  }
  return words;
}

Json Guess(const std::string& word) {
  // nlohmann's library copies and prints nested values by recursion.
  if (std::count(word.begin(), word.end(), '[') + std::count(word.begin(), word.end(), '{') >
      kMaxDepth) {
    return word;
  }
  const Json value = Json::parse(word, nullptr, /*allow_exceptions=*/false);
  return value.is_number() || value.is_boolean() || value.is_array() ? value : Json(word);
}

Json FromCommandLine(const std::string& text, const std::string& file) {
  Json root = Json::object();
  std::string flag;
  const auto set = [&](const Json& value) {
    if (root.contains(flag)) {
      throw InputError(file + ": --" + flag, "the flag twice", "each flag once");
    }
    root[flag] = value;
    flag.clear();
  };
  for (const std::string& word : Words(text)) {
    if (word.starts_with("--")) {
      if (!flag.empty()) {
        set(true);
      }
      const std::size_t equals = word.find('=');
      flag = word.substr(2, equals == std::string::npos ? equals : equals - 2);
      for (char& c : flag) {
        c = c == '-' ? '_' : c;
      }
      if (equals != std::string::npos && !flag.empty()) {
        set(Guess(word.substr(equals + 1)));
      }
    } else if (!flag.empty()) {
      set(Guess(word));
    }
  }
  if (!flag.empty()) {
    set(true);
  }
  if (root.empty()) {
    throw InputError(file, "no flag", "JSON, YAML, TOML or a command line with flags");
  }
  return root;
}

}  // namespace

JsonValue ParseDocument(std::string_view view, const std::string& file) {
  if (view.size() > kMaxText) {
    throw InputError(file, std::to_string(view.size()) + " bytes",
                     "a settings file of at most 1 MiB");
  }
  const std::string text(view);
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json =
      file.ends_with(".json") || (first != std::string::npos && text[first] == '{');
  Json json;
  if (file.ends_with(".toml")) {
    json = FromToml(text, file);
  } else if (file.ends_with(".yaml") || file.ends_with(".yml")) {
    json = FromYaml(text, file);
  } else if (is_json) {
    return JsonValue::Parse(text, file);
  } else {
    json = FromCommandLine(text, file);
  }
  if (!json.is_object()) {
    throw InputError(file, "no table of settings", "keys and values");
  }
  try {
    return JsonValue::Parse(json.dump(), file);
  } catch (const Json::exception&) {  // a string that is no UTF-8
    throw InputError(file, "text that is not UTF-8", "UTF-8");
  }
}

JsonValue ReadDocument(const std::string& file) {
  return ParseDocument(ReadTextFile(file), file);
}

}  // namespace shardwright
