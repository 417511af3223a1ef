#include "planner/importers/setting_keys.h"

#include <algorithm>
#include <cctype>

#include "core/error.h"
#include "core/text.h"
#include "planner/setting_tables.h"

namespace shardwright {
namespace {

const JsonValue& Data() {
  static const JsonValue data = [] {
    const EmbeddedFile& file = EmbeddedSettingTables().front();
    return JsonValue::Parse(file.text, std::string(file.path));
  }();
  return data;
}

// Strings as they are, other values as JSON texts if `as_json`.
std::vector<std::string> ListOf(const JsonValue& table, std::string_view key, bool as_json) {
  std::vector<std::string> list;
  const auto values = table.Find(key);
  for (std::size_t i = 0; values && i < values->size(); ++i) {
    list.push_back(as_json ? (*values)[i].Shown() : (*values)[i].AsString());
  }
  return list;
}

void AddFeatures(const JsonValue& features, SettingKey::Kind kind,
                 std::map<std::string, SettingKey>& keys) {
  for (const std::string& feature : features.Keys()) {
    const JsonValue table = features.At(feature);
    for (const std::string& key : table.Keys()) {
      keys[key] = {kind, feature, ListOf(table, key, /*as_json=*/true)};
    }
  }
}

const std::map<std::string, SettingKey>& Features() {
  static const std::map<std::string, SettingKey> features = [] {
    std::map<std::string, SettingKey> all;
    AddFeatures(Data().At("features"), SettingKey::Kind::kRefused, all);
    return all;
  }();
  return features;
}

bool Has(const std::vector<std::string>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// Does a word of the key begin with one of the words of plans?
bool NamesPlan(std::string_view key) {
  static const std::vector<std::string> words = ListOf(Data(), "plan_words", false);
  for (std::size_t at = 0; at < key.size(); ++at) {
    const bool begins = at == 0 || std::isalnum(static_cast<unsigned char>(key[at - 1])) == 0;
    if (begins && std::any_of(words.begin(), words.end(), [&](const std::string& word) {
          return LowerCase(key.substr(at, word.size())) == word;
        })) {
      return true;
    }
  }
  return false;
}

bool IsOff(const JsonValue& value) {
  static const std::vector<std::string> off = ListOf(Data(), "off", true);
  return Has(off, value.Shown());
}

[[noreturn]] void Refuse(const JsonValue& value, const SettingKey& key) {
  const std::string expected = Listed(key.off, {}, " or ");
  throw value.Error((expected.empty() ? "no such key" : expected) + ", since " + key.meaning +
                    " cannot be predicted");
}

}  // namespace

bool SettingKey::IsOff(const JsonValue& value) const {
  return Has(off, value.Shown());
}

SettingKeys::SettingKeys(const JsonValue& table) {
  const JsonValue used = table.At("used"), nothing = table.At("nothing");
  AddFeatures(table.At("refused"), SettingKey::Kind::kRefused, keys_);
  if (const auto said = table.Find("said")) {
    AddFeatures(*said, SettingKey::Kind::kSaid, keys_);
  }
  for (const std::string& source : nothing.Keys()) {
    for (const std::string& key : ListOf(nothing, source, false)) {
      keys_[key] = {SettingKey::Kind::kNothing, source, {}};
    }
  }
  for (const std::string& key : used.Keys()) {
    keys_[key] = {SettingKey::Kind::kUsed, used.At(key).AsString(), {}};
  }
  has_own_names_ = table.Find("own_names").has_value();
  is_open_ = table.Find("open").has_value();
  closed_ = ListOf(table, "closed", false);
  autos_ = ListOf(table, "auto", false);
}

const SettingKeys& SettingKeys::Of(std::string_view framework) {
  static const std::map<std::string, SettingKeys, std::less<>> tables = [] {
    std::map<std::string, SettingKeys, std::less<>> all;
    const JsonValue frameworks = Data().At("frameworks");
    for (const std::string& name : frameworks.Keys()) {
      all.emplace(name, SettingKeys(frameworks.At(name)));
    }
    return all;
  }();
  const auto found = tables.find(framework);
  SW_CHECK(found != tables.end(), std::string(framework));
  return found->second;
}

const std::vector<std::pair<std::string, std::string>>& SettingKeys::Marks() {
  static const std::vector<std::pair<std::string, std::string>> marks = [] {
    std::vector<std::pair<std::string, std::string>> all;
    const JsonValue list = Data().At("marks");
    for (std::size_t i = 0; i < list.size(); ++i) {
      all.emplace_back(list[i].At("key").AsString(), list[i].At("framework").AsString());
    }
    return all;
  }();
  return marks;
}

std::vector<std::string> SettingKeys::Words(std::string_view list) {
  return ListOf(Data(), list, false);
}

JsonValue SettingKeys::Table(std::string_view name) {
  return Data().At(name);
}

const SettingKey* SettingKeys::Find(const std::string& key) const {
  if (const auto found = keys_.find(key); found != keys_.end()) {
    return &found->second;
  }
  if (const auto found = Features().find(key.substr(key.rfind('.') + 1));
      found != Features().end()) {
    return &found->second;
  }
  for (std::size_t dot = key.rfind('.'); dot != std::string::npos && dot > 0;
       dot = key.rfind('.', dot - 1)) {
    if (const auto found = keys_.find(key.substr(0, dot + 1)); found != keys_.end()) {
      return &found->second;
    }
  }
  return nullptr;
}

bool SettingKeys::MayBeAuto(const std::string& key) const {
  return Has(autos_, key);
}

bool SettingKeys::IsOpen(std::string_view key) const {
  return is_open_ && std::none_of(closed_.begin(), closed_.end(),
                                  [&](const std::string& part) { return key.starts_with(part); });
}

bool SettingKeys::ChangesNothing(const Leaf& leaf, const std::vector<std::string>& known) const {
  const SettingKey* key = Find(leaf.key);
  if (key != nullptr && key->kind == SettingKey::Kind::kRefused) {
    if (!key->IsOff(leaf.value)) {
      Refuse(leaf.value, *key);
    }
    return true;
  }
  if (keys_.count(leaf.key) > 0) {
    return true;
  }
  // A dot in a key's own name: quoted in `leaf.key`.
  std::string plain = leaf.key;
  std::erase(plain, '"');
  const bool is_path = Has(known, plain) || (key == nullptr && Find(plain) != nullptr);
  if (plain != leaf.key && is_path) {
    throw leaf.value.Error("a table for each dot of this key, which no framework takes apart");
  }
  const auto typo = std::find_if(known.begin(), known.end(), [&](const std::string& name) {
    return IsMisspelt(name, leaf.key);
  });
  if (typo != known.end()) {
    throw leaf.value.Error("a key of this file to be known", "did you mean \"" + *typo + "\"?");
  }
  if (key != nullptr) {
    return true;
  }
  std::vector<std::string> names = known;
  for (const auto& [name, row] : keys_) {
    if (!name.ends_with('.')) {
      names.push_back(name);
    }
  }
  if (!IsOpen(leaf.key)) {
    throw leaf.value.Error("a known key; leave this one out if it changes nothing in training");
  }
  if (NamesPlan(leaf.key) && !IsOff(leaf.value)) {
    throw leaf.value.Error("a known key, since the name of this one says that a plan depends on it",
                           DidYouMean(leaf.key, names));
  }
  return false;
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

}  // namespace shardwright
