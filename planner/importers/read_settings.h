#pragma once

// Reads a settings struct out of a document, by the same table by which emitters write it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/json.h"
#include "planner/emitters/settings.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {

// Every value that is no table, in sorted order of keys. Nulls are left out. A name that is empty
// or has a dot of its own stands in quotes, so that it is no path.
[[nodiscard]] std::vector<Leaf> LeavesOf(const JsonValue& root);

// Sets the value if the leaf's type fits; a whole float ("5e8") fits an integer.
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<bool>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::int64_t>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<double>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::string>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::vector<std::string>>& value);
// "a boolean", ... for errors.
[[nodiscard]] std::string_view TypeName(const SettingValue& value);

template <class S>
struct ReadResult {
  S settings;
  std::vector<std::string> left_out;  // keys that change nothing here
  std::vector<std::string> unknown;   // keys that nobody here knows
  std::vector<std::string> autos;     // keys that say "auto"
  // Keys that are on, and what each is taken for.
  std::vector<std::pair<std::string, std::string>> said;
};

// Reads the keys that `keys` calls used into `settings`. Strings "auto" count as absent, and are
// listed, where another file fills them in.
template <class S>
[[nodiscard]] ReadResult<S> ReadSettings(const JsonValue& root, std::span<const SettingRow<S>> rows,
                                         const SettingKeys& keys, S settings = {}) {
  std::vector<std::string> known;
  for (const SettingRow<S>& row : rows) {
    if (!keys.HasOwnNames()) {
      known.emplace_back(row.key);
    }
  }
  for (const auto& [name, key] : keys.all()) {
    if (key.kind == SettingKey::Kind::kUsed || key.kind == SettingKey::Kind::kSaid) {
      known.push_back(name);
    }
  }
  ReadResult<S> result{std::move(settings), {}, {}, {}, {}};
  for (const Leaf& leaf : LeavesOf(root)) {
    const auto used = keys.all().find(leaf.key);
    const bool is_named = used != keys.all().end() && used->second.kind == SettingKey::Kind::kUsed;
    const std::string_view name = is_named ? std::string_view(used->second.meaning) : leaf.key;
    if (used != keys.all().end() && used->second.kind == SettingKey::Kind::kSaid) {
      if (!used->second.IsOff(leaf.value)) {
        result.said.emplace_back(leaf.key, used->second.meaning);
      }
      continue;
    }
    if (is_named && name.starts_with('(')) {
      continue;
    }
    if (leaf.value.IsString() && leaf.value.AsString() == "auto" && keys.MayBeAuto(leaf.key)) {
      result.autos.push_back(leaf.key);
      continue;
    }
    bool is_known = false, is_read = false;
    std::string expected;
    for (const SettingRow<S>& row : rows) {
      if (row.key != name || (keys.HasOwnNames() && !is_named)) {
        continue;
      }
      is_known = true;
      std::visit(
          [&](auto member) {
            using Value = typename std::decay_t<decltype(result.settings.*member)>::value_type;
            is_read = ReadValue(leaf.value, result.settings.*member) || is_read;
            expected += (expected.empty() ? "" : " or ") + std::string(TypeName(Value()));
          },
          row.member);
    }
    if (!is_known) {
      const bool is_other = keys.ChangesNothing(leaf, known);
      (is_other ? result.left_out : result.unknown).push_back(leaf.key);
    } else if (!is_read) {
      throw leaf.value.Error(expected);
    }
  }
  return result;
}

}  // namespace shardwright
