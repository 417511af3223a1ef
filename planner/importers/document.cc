#include "planner/importers/document.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <sstream>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>
#include <toml++/toml.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include "core/budget.h"
#include "core/error.h"

namespace shardwright {
namespace {

using Json = nlohmann::json;  // sorted: looking a key up in an ordered_json is a linear search

constexpr std::int64_t kMaxText = std::int64_t{1} << 20;
constexpr std::int64_t kMaxValues = 100'000;
constexpr std::size_t kMaxDepth = 50;

// As PyYAML has them: 0, 12, -1_000.
bool IsYamlInteger(std::string_view text) {
  text.remove_prefix(text.find_first_of("-+") == 0 ? 1 : 0);
  return text == "0" || (!text.empty() && text[0] != '0' && text[0] != '_' &&
                         text.find_first_not_of("0123456789_") == text.npos);
}

// Of what from_chars reads, what PyYAML has for one: 1., -.5, 1_0.5e+3; not 1e5.
bool IsYamlFloat(std::string_view text) {
  const std::size_t dot = text.find('.'), mark = text.find_first_of("eE"), first = text.find('_');
  return dot != text.npos && !text.starts_with("+-") &&
         (first == text.npos ||
          (text.rfind('_') < dot && text.find_first_of("0123456789") < first)) &&
         (mark == text.npos || text.find_first_of("+-", mark) == mark + 1);
}

// An unquoted scalar as PyYAML's resolver reads it.
Json YamlScalar(const std::string& text) {
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
  const bool is_short = text.size() <= 18;  // fits 64 bits
  if (is_short && IsYamlInteger(text)) {
    std::string digits = text;
    std::erase(digits, '_');
    return std::stoll(digits);
  }
  if (is_short && IsYamlFloat(text)) {
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

// Counts the values of a document and refuses deep ones.
class Limits {
 public:
  explicit Limits(const std::string& file) : file_(file), values_(file, "values", kMaxValues) {}

  void Enter(std::size_t depth) {
    values_.Take();
    if (depth > kMaxDepth) {
      RefuseDepth();
    }
  }
  [[noreturn]] void RefuseDepth() const {
    const std::string levels = std::to_string(kMaxDepth) + " levels";
    throw InputError(file_, "a value nested deeper than " + levels, "at most " + levels);
  }
  [[nodiscard]] const std::string& file() const { return file_; }

 private:
  const std::string& file_;
  Budget values_;
};

// Aliases share nodes, so that a small text can stand for a huge tree.
Json FromYaml(const YAML::Node& node, std::size_t depth, Limits& limits) {
  limits.Enter(depth);
  switch (node.Type()) {
    case YAML::NodeType::Map: {
      Json map = Json::object();
      for (const auto& entry : node) {
        if (!entry.first.IsScalar()) {
          throw InputError(limits.file(), "a key that is no word", "names as keys");
        }
        const std::string& key = entry.first.Scalar();
        if (map.contains(key)) {
          throw InputError(limits.file() + ": " + key, "the key twice", "each key once");
        }
        map[key] = FromYaml(entry.second, depth + 1, limits);
      }
      return map;
    }
    case YAML::NodeType::Sequence: {
      Json list = Json::array();
      for (const YAML::Node& entry : node) {
        list.push_back(FromYaml(entry, depth + 1, limits));
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

// A file of settings has one document. YAML::LoadAll would read all that follow, and never ends on
// "&a b]": it makes an empty document of a bracket that nothing opened, and stays before it.
class OneDocument : public YAML::EventHandler {
 public:
  explicit OneDocument(const std::string& file) : file_(file) {}

  void OnDocumentStart(const YAML::Mark& /*mark*/) override {
    if (++documents_ > 1) {
      throw InputError(file_, "2 YAML documents or more", "one");
    }
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnAlias(const YAML::Mark& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnScalar(const YAML::Mark& /*mark*/, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                const std::string& /*value*/) override {}
  void OnSequenceStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/,
                       YAML::anchor_t /*anchor*/, YAML::EmitterStyle::value /*style*/) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& /*mark*/, const std::string& /*tag*/, YAML::anchor_t /*anchor*/,
                  YAML::EmitterStyle::value /*style*/) override {}
  void OnMapEnd() override {}

 private:
  const std::string& file_;
  int documents_ = 0;
};

Json ReadYaml(const std::string& text, const std::string& file) {
  YAML::Node document;
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    for (OneDocument one(file); parser.HandleNextDocument(one);) {
    }
    document = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    const int line = error.mark.line + 1;
    throw InputError(file + ": line " + std::to_string(line), error.msg, "YAML");
  }
  Limits limits(file);
  return FromYaml(document, 0, limits);
}

// The text behind the string or comment that begins at `at`; it may end inside.
std::size_t AfterOpaque(std::string_view text, std::size_t at) {
  const char quote = text[at];
  if (quote == '#') {
    return std::min(text.find_first_of("\n\r\v\f", at), text.size());
  }
  const bool is_long = text.substr(at).starts_with(std::string(3, quote));
  const std::size_t marks = is_long ? 3 : 1;
  std::size_t end = at + marks;
  for (; end < text.size() && text.substr(end, marks) != std::string(marks, quote); ++end) {
    if (!is_long && text[end] == '\n') {
      return end;  // no string: the parser says so
    }
    end += quote == '"' && text[end] == '\\' ? 1 : 0;
  }
  end = std::min(end + marks, text.size());
  // A long string may end with one or two quotes of its own.
  for (int own = 0; is_long && own < 2 && end < text.size() && text[end] == quote; ++own) {
    ++end;
  }
  return end;
}

// toml++ builds and frees the tables of a dotted key (a.a.a = 1) by recursion, and has no limit of
// its own for their number. Each dot of a key, and each bracket, is a level.
void CheckTomlDepth(std::string_view text, const Limits& limits) {
  std::vector<std::size_t> around;  // levels of the brackets that are open, each with its key
  std::size_t levels = 0;           // their sum
  std::size_t dots = 0;             // since the last key or value began
  for (std::size_t at = 0; at < text.size(); ++at) {
    switch (text[at]) {
      case '#':
      case '"':
      case '\'':
        at = AfterOpaque(text, at) - 1;
        break;
      case '.':
        ++dots;
        break;
      case '{':
      case '[':
        around.push_back(dots + 1);
        levels += dots + 1;
        dots = 0;
        break;
      case '}':
      case ']':
        if (!around.empty()) {
          levels -= around.back();
          around.pop_back();
        }
        break;
      case ',':
      case '\n':
        dots = 0;
        break;
      default:
        break;
    }
    if (levels + dots > kMaxDepth) {
      limits.RefuseDepth();
    }
  }
}

Json FromToml(const toml::node& node, std::size_t depth, Limits& limits) {
  limits.Enter(depth);
  if (const toml::table* table = node.as_table()) {
    Json map = Json::object();
    for (const auto& [key, value] : *table) {
      map[std::string(key.str())] = FromToml(value, depth + 1, limits);
    }
    return map;
  }
  if (const toml::array* array = node.as_array()) {
    Json list = Json::array();
    for (const toml::node& entry : *array) {
      list.push_back(FromToml(entry, depth + 1, limits));
    }
    return list;
  }
  if (const auto* text = node.as_string()) {
    return text->get();
  }
  if (const auto* number = node.as_integer()) {
    return number->get();
  }
  if (const auto* truth = node.as_boolean()) {
    return truth->get();
  }
  if (const auto* number = node.as_floating_point(); number && std::isfinite(number->get())) {
    return number->get();
  }
  // Dates, and numbers that JSON has no name for, as they are written.
  std::ostringstream words;
  node.visit([&words](const auto& value) {
    if constexpr (toml::is_value<decltype(value)>) {
      words << value;
    }
  });
  return words.str();
}

Json ReadToml(const std::string& text, const std::string& file) {
  Limits limits(file);
  CheckTomlDepth(text, limits);
  try {
    return FromToml(toml::parse(text, file), 0, limits);
  } catch (const toml::parse_error& error) {
    throw InputError(file + ": line " + std::to_string(error.source().begin.line),
                     std::string(error.description()), "TOML");
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

// Shells leave out what stands behind a # at the beginning of a line.
std::string WithoutComments(const std::string& text) {
  std::string kept;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::size_t first = text.find_first_not_of(" \t", begin);
    if (first >= end || text[first] != '#') {
      kept.append(text, begin, end + 1 - begin);
    }
    begin = end + 1;
  }
  return kept;
}

Json Guess(const std::string& word) {
  if (word == "True" || word == "False") {
    return word == "True";
  }
  // nlohmann's library copies and prints nested values by recursion.
  if (std::count_if(word.begin(), word.end(), [](char c) { return c == '[' || c == '{'; }) >
      std::ptrdiff_t{kMaxDepth}) {
    return word;
  }
  const Json value = Json::parse(word, nullptr, /*allow_exceptions=*/false);
  return value.is_number() || value.is_boolean() || value.is_structured() ? value : Json(word);
}

// "tensor_model_parallel_size" of "--tensor-model-parallel-size=8".
std::string NameOfFlag(const std::string& word) {
  std::string name = word.substr(word.find_first_not_of('-'));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// Variables of a script, as its plain assignments say them: SIZE=8, SIZE=${2:-8}.
class Variables {
 public:
  explicit Variables(const std::string& file) : budget_(file, "bytes of settings", kMaxText) {}

  // Takes an assignment, and none behind it: ARGS=(--bf16 and ARGS="--bf16 --seq-length 8" leave
  // flags, which count where they are. False: the word is none.
  bool Take(std::string& word) {
    const std::size_t equals = word.find('=');
    std::string name = word.substr(0, equals);
    name = name.substr(0, name.size() - (name.ends_with('+') ? 1 : 0));  // ARGS+=(--bf16
    if (equals == std::string::npos || name.empty() ||
        name.find_first_not_of(kOfNames) != std::string::npos) {
      return false;
    }
    const std::string value = WithValues(word.substr(equals + 1));
    const bool is_list = value.starts_with('(');
    const std::size_t first = value.find_first_not_of(" \t\n\\", is_list ? 1 : 0);
    word = is_list || value.substr(std::min(first, value.size())).starts_with("--")
               ? value.substr(std::min(first, value.size()))
               : "";
    if (word.empty() && !values_.emplace(name, value).second && values_[name] != value) {
      values_[name] = "$" + name;  // which of the two, only the shell knows
    }
    return true;
  }

  // Names without a value stay.
  [[nodiscard]] std::string WithValues(std::string_view word) {
    std::string text;
    for (std::size_t at = word.find('$'); at != word.npos; at = word.find('$')) {
      text += word.substr(0, at);
      word.remove_prefix(at + 1);
      const bool is_braced = word.starts_with('{');
      const std::string_view inside = word.substr(is_braced ? 1 : 0);
      const std::size_t name = std::min(inside.find_first_not_of(kOfNames), inside.size());
      const std::size_t end = is_braced ? std::min(inside.find('}'), inside.size()) : name;
      const std::string_view more = inside.substr(std::min(name, end), end - std::min(name, end));
      const auto found = values_.find(std::string(inside.substr(0, name)));
      const std::size_t length = std::min(end + (is_braced ? 2 : 0), word.size());
      budget_.Take(found != values_.end() ? std::ssize(found->second) : 0);
      text += found != values_.end()   ? found->second
              : more.starts_with(":-") ? std::string(more.substr(2))
                                       : "$" + std::string(word.substr(0, length));
      word.remove_prefix(length);
    }
    return text + std::string(word);
  }

 private:
  static constexpr std::string_view kOfNames =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";

  std::map<std::string, std::string> values_;
  Budget budget_;  // B=$A$A, C=$B$B, ... double
};

// A script's words with the values of its variables. Throws InputError for flags that are there
// under a condition.
std::vector<std::string> ScriptWords(const std::string& text, const std::string& file) {
  std::vector<std::string> words;
  Variables variables(file);
  int depth = 0;  // of conditions around the word
  for (std::string& word : Words(WithoutComments(text))) {
    depth += word == "if" || word == "case" ? 1 : word == "fi" || word == "esac" ? -1 : 0;
    bool is_assigned = variables.Take(word);
    if (word.ends_with(')') && word.find('(') == std::string::npos) {
      word.pop_back();
      is_assigned = is_assigned || word.empty();  // nothing but the end of a list
    }
    const std::string value = variables.WithValues(word);
    const bool is_flag = value.size() > 2 && value.starts_with("--");
    if (is_flag && depth > 0) {
      throw InputError(file + ": " + value.substr(0, value.find_first_of(" =")),
                       "a flag under a condition of the shell",
                       "the command line as it runs, which bash -x prints");
    }
    if (is_flag && (is_assigned || value.find(' ') < value.find('='))) {  // several in quotes
      for (const std::string& part : Words(value)) {
        words.push_back(part);
      }
    } else if (!value.empty() || !is_assigned) {
      words.push_back(value);
    }
  }
  return words;
}

Json FromCommandLine(const std::string& text, const std::string& file) {
  Json root = Json::object();
  std::string flag;
  const auto set = [&](const Json& value) {  // of the flag that waits for one, if any
    if (flag.empty()) {
      return;
    }
    if (root.contains(flag) && root[flag] != value) {
      throw InputError(file + ": --" + flag, "the flag twice", "each flag once");
    }
    root[flag] = value;
    flag.clear();
  };
  std::string before;
  for (const std::string& word : ScriptWords(text, file)) {
    const bool is_command = before == "trl";
    before = word;
    if (!word.empty() && word.find_first_not_of('+') == std::string::npos) {
      set(true);  // the next command, as bash -x prints it
      continue;
    }
    if (!root.contains("script") && (is_command || word.ends_with(".py"))) {
      set(true);
      flag = "script";
      set((is_command ? "trl/" : "") + word);
    } else if (word.size() > 2 && word.starts_with("--")) {
      set(true);
      const std::size_t equals = word.find('=');
      flag = NameOfFlag(word);
      if (equals != std::string::npos) {
        set(Guess(word.substr(equals + 1)));
      }
    } else {
      set(Guess(word));
    }
  }
  set(true);
  if (root.empty()) {
    throw InputError(file, "no flag", "JSON, YAML, TOML or a command line with flags");
  }
  return root;
}

}  // namespace

JsonValue ParseDocument(std::string_view view, const std::string& file) {
  Budget(file, "bytes of settings", kMaxText).Take(std::ssize(view));
  if (view.find('\0') != std::string_view::npos) {
    throw InputError(file, "a NUL byte", "text in UTF-8");
  }
  const std::string text(view);
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json =
      file.ends_with(".json") || (first != std::string::npos && text[first] == '{');
  Json json;
  if (file.ends_with(".toml")) {
    json = ReadToml(text, file);
  } else if (file.ends_with(".yaml") || file.ends_with(".yml")) {
    json = ReadYaml(text, file);
    if (json.is_object() && json.contains("MODEL_ARGS") && json["MODEL_ARGS"].is_object()) {
      Json flags = Json::object();  // of Megatron-LM's tests
      for (const auto& [flag, value] : json["MODEL_ARGS"].items()) {
        flags[flag.starts_with("--") ? NameOfFlag(flag) : flag] =
            value.is_string() ? Guess(value.get<std::string>()) : value;
      }
      json = std::move(flags);
    }
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
