#include "core/json.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/budget.h"
#include "core/files.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "core/threads.h"

namespace shardwright {

using Json = nlohmann::json;

struct JsonValue::Document {
  std::string file;
  Json root;
};

namespace {

// The parser is iterative, but readers of nested files recurse: the limit keeps their stack small.
constexpr std::size_t kDeepest = 200;
constexpr std::size_t kLongestShown = 60;
// Of a document that a person or a planner wrote; traces have readers of their own.
constexpr std::int64_t kMostValues = 4'000'000;

const Json& AsJson(const void* node) {
  return *static_cast<const Json*>(node);
}

// "file:line:column" of byte `offset` of `text`; both count from 1, the column in bytes.
std::string At(const std::string& file, std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + CountOf(before, '\n');
  const std::size_t newline = before.rfind('\n');
  const std::size_t column =
      newline == std::string_view::npos ? before.size() + 1 : before.size() - newline;
  return file + ':' + std::to_string(line) + ':' + std::to_string(column);
}

// A forward iterator that tells how far the parser has read, which its callbacks do not.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at = nullptr;
  const char** furthest = nullptr;

  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    *furthest = ++at;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator& o) const { return at == o.at; }
  bool operator!=(const CountingIterator& o) const { return at != o.at; }
};

// Builds the document and refuses what nlohmann's own builder lets through: double keys (the last
// would win silently) and deep nesting. Called by the parser in document order. Where keys keep
// their order they are not looked up.
template <class Json>
class Builder : public nlohmann::json_sax<Json> {
 public:
  using string_t = typename Json::string_t;
  using binary_t = typename Json::binary_t;
  using number_float_t = typename Json::number_float_t;
  using number_integer_t = typename Json::number_integer_t;
  using number_unsigned_t = typename Json::number_unsigned_t;

  Builder(std::string_view text, const std::string& file)
      : text_(text), file_(file), values_(file, "values", kMostValues) {}

  const char** furthest() { return &furthest_; }
  Json& root() { return root_; }

  bool null() override { return Add(nullptr) != nullptr; }
  bool boolean(bool v) override { return Add(v) != nullptr; }
  bool number_integer(number_integer_t v) override { return Add(v) != nullptr; }
  bool number_unsigned(number_unsigned_t v) override { return Add(v) != nullptr; }
  bool number_float(number_float_t v, const string_t& /*text*/) override {
    return Add(v) != nullptr;
  }
  bool string(string_t& v) override { return Add(std::move(v)) != nullptr; }
  bool binary(binary_t& /*v*/) override { return false; }
  bool start_object(std::size_t /*count*/) override { return Open(Json::object()); }
  bool start_array(std::size_t /*count*/) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& v) override {
    auto& object = open_.back()->template get_ref<typename Json::object_t&>();
    if constexpr (std::is_same_v<Json, nlohmann::ordered_json>) {
      member_ = &object.emplace_back(v, nullptr).second;
      return true;
    } else {
      const auto [slot, is_new] = object.emplace(v, nullptr);
      if (!is_new) {
        throw InputError(Here(), "the key \"" + v + "\" a second time",
                         "each key once in an object");
      }
      member_ = &slot->second;
      return true;
    }
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    // `position` counts the bytes read, so the byte in question is the one before, except at the
    // end.
    const std::string what = error.what();
    const bool at_end = what.find("unexpected end of input") != std::string::npos;
    const std::size_t offset = at_end ? text_.size() : (position > 0 ? position - 1 : 0);
    throw SyntaxError(At(file_, text_, offset), what);
  }

 private:
  [[nodiscard]] std::string Here() const {
    const auto read = furthest_ == nullptr ? 0 : furthest_ - text_.data();
    return At(file_, text_, static_cast<std::size_t>(read > 0 ? read - 1 : 0));
  }

  // nlohmann's message ends "... - <found>; expected <rule>" or "... - <lexer error>; last read:
  // ...".
  static InputError SyntaxError(const std::string& where, const std::string& what) {
    constexpr std::string_view kUnexpected = "unexpected ";
    constexpr std::string_view kExpected = "; expected ";
    const std::size_t dash = what.find(" - ");
    std::string found = dash == std::string::npos ? what : what.substr(dash + 3);
    const std::size_t bracket = found.find("] ");
    if (dash == std::string::npos && bracket != std::string::npos) {
      found = found.substr(bracket + 2);
    }
    std::string expected = "JSON";
    if (const std::size_t at = found.rfind(kExpected); at != std::string::npos) {
      expected = found.substr(at + kExpected.size());
      found.resize(at);
    }
    // The position says it better; what the lexer has buffered differs between library versions.
    found.resize(std::min(found.size(), found.find("; last read: ")));
    if (found.starts_with(kUnexpected)) {
      found = found.substr(kUnexpected.size());
    }
    return {where, found, expected};
  }

  template <class T>
  Json* Add(T&& v) {
    values_.Take();
    ThrowIfStopped();
    if (open_.empty()) {
      root_ = Json(std::forward<T>(v));
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      return &parent.template get_ref<typename Json::array_t&>().emplace_back(std::forward<T>(v));
    }
    *member_ = Json(std::forward<T>(v));
    return member_;
  }

  bool Open(Json empty) {
    if (open_.size() == kDeepest) {
      throw InputError(Here(), "a value nested deeper than " + std::to_string(kDeepest) + " levels",
                       "at most " + std::to_string(kDeepest));
    }
    open_.push_back(Add(std::move(empty)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& file_;
  Budget values_;
  const char* furthest_ = nullptr;
  Json root_;
  // Arrays and objects around the current position. A pointer stays valid: its container only grows
  // after the element has been closed and popped.
  std::vector<Json*> open_;
  Json* member_ = nullptr;  // where the value of the last key goes
};

std::string OneOf(std::span<const std::string> words) {
  return (words.size() == 1 ? "" : "one of ") + Listed(words, Quoted);
}

}  // namespace

JsonValue::JsonValue(std::shared_ptr<const Document> document, const void* node)
    : document_(std::move(document)), node_(node) {}

namespace {

// Whether `node` is `from` or inside of it.
bool Holds(const Json& from, const void* node) {
  return &from == node || (from.is_structured() &&
                           AnyOf(from, [&](const Json& child) { return Holds(child, node); }));
}

template <class Json>
Json Build(std::string_view text, const std::string& file) {
  Builder<Json> builder(text, file);
  const CountingIterator begin{text.data(), builder.furthest()};
  const CountingIterator end{text.data() + text.size(), builder.furthest()};
  const bool is_complete = Json::sax_parse(begin, end, &builder);
  SW_CHECK(is_complete, "every refusal throws");
  return std::move(builder.root());
}

}  // namespace

nlohmann::ordered_json ParseOrdered(std::string_view text, const std::string& file) {
  return Build<nlohmann::ordered_json>(text, file);
}

std::string PrintedJson(const nlohmann::ordered_json& value,
                        const std::function<bool(const nlohmann::ordered_json& value,
                                                 std::size_t indent)>& is_on_one_line,
                        std::size_t indent) {
  std::string text;
  if (!value.is_structured() || value.empty() || is_on_one_line(value, indent)) {
    bool in_string = false;
    const std::string flat = value.dump();
    for (std::size_t i = 0; i < flat.size(); ++i) {
      text += flat[i];
      if (in_string && flat[i] == '\\') {
        text += flat[++i];
      } else if (flat[i] == '"') {
        in_string = !in_string;
      } else if (!in_string && (flat[i] == ',' || flat[i] == ':')) {
        text += ' ';
      }
    }
    return text;
  }
  text = value.is_object() ? "{" : "[";
  for (const auto& [key, child] : value.items()) {
    text += (text.size() > 1 ? ",\n" : "\n") + std::string(indent + 2, ' ') +
            (value.is_object() ? nlohmann::json(key).dump() + ": " : "") +
            PrintedJson(child, is_on_one_line, indent + 2);
  }
  return text + '\n' + std::string(indent, ' ') + (value.is_object() ? '}' : ']');
}

JsonValue JsonValue::Parse(std::string_view text, const std::string& file) {
  auto document = std::make_shared<Document>(Document{file, Build<Json>(text, file)});
  const Json* root = &document->root;
  return {std::move(document), root};
}

Path JsonValue::path() const {
  Path path(document_->file);
  for (const Json* at = &document_->root; at != node_;) {
    auto child = at->begin();
    while (!Holds(*child, node_)) {
      ++child;
    }
    path = at->is_object() ? path.Field(child.key())
                           : path.Index(static_cast<std::size_t>(child - at->begin()));
    at = &*child;
  }
  return path;
}

JsonValue JsonValue::ReadFile(const std::string& file) {
  return Parse(ReadTextFile(file), file);
}

std::string ReadTextFile(const std::string& file, std::int64_t largest) {
  InputFile in(file, "a file");
  std::string text;
  // Room at once: growing by doubling takes up to three times as much.
  text.reserve(static_cast<std::size_t>(std::min(in.size(), largest)));
  Budget budget(file, "bytes", largest);
  std::array<char, 1 << 16> block{};
  while (const std::size_t count = in.Read(block.data(), block.size())) {
    budget.Take(static_cast<std::int64_t>(count));
    text.append(block.data(), count);
  }
  return text;
}

bool JsonValue::IsObject() const {
  return AsJson(node_).is_object();
}
bool JsonValue::IsArray() const {
  return AsJson(node_).is_array();
}
bool JsonValue::IsString() const {
  return AsJson(node_).is_string();
}
bool JsonValue::IsNumber() const {
  return AsJson(node_).is_number();
}
bool JsonValue::IsBool() const {
  return AsJson(node_).is_boolean();
}
bool JsonValue::IsNull() const {
  return AsJson(node_).is_null();
}

namespace {

const Json& ObjectAt(const void* node, const JsonValue& value) {
  if (!AsJson(node).is_object()) {
    throw value.Error("an object");
  }
  return AsJson(node);
}

template <class Words>
void Allow(const Json& object, const Words& allowed, const JsonValue& value) {
  for (const auto& [key, member] : object.items()) {
    if (!IsIn(allowed, key)) {
      const std::vector<std::string> words(allowed.begin(), allowed.end());
      throw InputError(value.path().str(), "unknown key " + Quoted(key), OneOf(words),
                       DidYouMean(key, words));
    }
  }
}

}  // namespace

JsonValue JsonValue::At(std::string_view key) const {
  const Json& node = ObjectAt(node_, *this);
  const auto found = node.find(key);
  if (found == node.end()) {
    throw InputError(path().str(), "no key " + Quoted(key), "one", DidYouMean(key, Keys()));
  }
  return {document_, &*found};
}

std::optional<JsonValue> JsonValue::Find(std::string_view key) const {
  const Json& node = ObjectAt(node_, *this);
  const auto found = node.find(key);
  if (found == node.end() || found->is_null()) {
    return std::nullopt;
  }
  return JsonValue(document_, &*found);
}

std::vector<std::string> JsonValue::Keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : ObjectAt(node_, *this).items()) {
    keys.push_back(key);
  }
  return keys;
}

void JsonValue::AllowOnly(std::initializer_list<std::string_view> allowed) const {
  Allow(ObjectAt(node_, *this), allowed, *this);
}

void JsonValue::AllowOnly(const std::vector<std::string>& allowed) const {
  Allow(ObjectAt(node_, *this), allowed, *this);
}

std::size_t JsonValue::size() const {
  if (!IsArray()) {
    throw Error("an array");
  }
  return AsJson(node_).size();
}

JsonValue JsonValue::operator[](std::size_t i) const {
  SW_CHECK(i < size(), path().str());
  return {document_, &AsJson(node_)[i]};
}

std::string JsonValue::AsString() const {
  if (!IsString()) {
    throw Error("a string");
  }
  return AsJson(node_).get<std::string>();
}

bool JsonValue::AsBool() const {
  if (!IsBool()) {
    throw Error("true or false");
  }
  return AsJson(node_).get<bool>();
}

double JsonValue::AsDouble() const {
  if (!IsNumber()) {
    throw Error("a number");
  }
  return AsJson(node_).get<double>();
}

double JsonValue::AsProbability() const {
  const double p = AsDouble();
  if (!(p >= 0.0 && p < 1.0)) {
    throw Error("a probability from 0 up to, but not including, 1");
  }
  return p;
}

std::int64_t JsonValue::AsInt(std::int64_t min, std::int64_t max) const {
  const auto wrong = [&] {
    return Error("an integer from " + std::to_string(min) + " to " + std::to_string(max));
  };
  const Json& node = AsJson(node_);
  std::int64_t value = 0;
  if (node.is_number_unsigned()) {
    const auto big = node.get<std::uint64_t>();
    if (max < 0 || big > static_cast<std::uint64_t>(max)) {
      throw wrong();
    }
    value = static_cast<std::int64_t>(big);
  } else if (node.is_number_integer()) {
    value = node.get<std::int64_t>();
  } else if (node.is_number_float()) {
    // "1e9" is a fair way to write a count; above 2^53 a double no longer tells neighbours apart.
    const double real = node.get<double>();
    if (std::abs(real) > 9007199254740992.0 || real != std::floor(real)) {
      throw wrong();
    }
    value = static_cast<std::int64_t>(real);
  } else {
    throw wrong();
  }
  if (value < min || value > max) {
    throw wrong();
  }
  return value;
}

// A quantity is a string; anything else is shown without quotes, so that the reader sees 400 and
// not "400". The place is looked for where the text is wrong alone.
template <class T>
T JsonValue::AsQuantity(T (*parse)(std::string_view, std::string_view),
                        std::string_view rule) const {
  if (!IsString()) {
    throw Error(rule);
  }
  const auto& text = AsJson(node_).get_ref<const std::string&>();
  try {
    return parse(text, "");
  } catch (const InputError&) {
    return parse(text, path().str());
  }
}

Bytes JsonValue::AsBytes() const {
  return AsQuantity(ParseBytes, kBytesRule);
}

BytesPerSecond JsonValue::AsBytesPerSecond() const {
  return AsQuantity(ParseBytesPerSecond, kBytesPerSecondRule);
}

FlopsPerSecond JsonValue::AsFlopsPerSecond() const {
  return AsQuantity(ParseFlopsPerSecond, kFlopsPerSecondRule);
}

Seconds JsonValue::AsSeconds() const {
  return AsQuantity(ParseSeconds, kSecondsRule);
}

std::size_t JsonValue::AsChoice(std::initializer_list<std::string_view> choices) const {
  return AsChoice(std::span<const std::string_view>(choices.begin(), choices.size()));
}

std::size_t JsonValue::AsChoice(std::span<const std::string_view> choices) const {
  const std::vector<std::string> words(choices.begin(), choices.end());
  if (!IsString()) {
    throw Error(OneOf(words));
  }
  const std::string word = AsString();
  const auto found = FindIn(words, word);
  if (found == words.end()) {
    throw Error(OneOf(words), DidYouMean(word, words));
  }
  return static_cast<std::size_t>(found - words.begin());
}

InputError JsonValue::Error(std::string_view expected, std::string_view hint) const {
  return {path().str(), Shown(), expected, hint};
}

std::string JsonValue::Shown() const {
  std::string text = AsJson(node_).dump();
  if (text.size() > kLongestShown) {
    std::size_t cut = kLongestShown - 3;
    // Not in the middle of a UTF-8 character: continuation bytes are 10xxxxxx.
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0U) == 0x80U) {
      --cut;
    }
    text.resize(cut);
    text += "...";
  }
  return text;
}

}  // namespace shardwright
