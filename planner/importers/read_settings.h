#pragma once

// Reads a settings struct out of a document, by the same table by which emitters write it.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "core/json.h"
#include "planner/emitters/settings.h"

namespace shardwright {

// A key of the framework that no settings struct holds. A key that ends in '.' stands for a whole
// table.
struct OtherKey {
  std::string_view key;
  // JSON texts between '|' that change nothing here, such as "1|null"; empty: any value. Another
  // value is an error, since the prediction would be of a different run.
  std::string_view neutral = {};
};

// A value at the end of a key path: "fsdp_config.version".
struct Leaf {
  std::string key;
  JsonValue value;
};

// Every value that is no table, in sorted order of keys. Nulls are left out.
[[nodiscard]] std::vector<Leaf> LeavesOf(const JsonValue& root);

// Whether a key that nobody knows may stand there, as in files that a user's script reads, too.
using MayBeUnknown = bool (*)(std::string_view key);

// False where `leaf` is unknown and may be. Throws unless it is one of `others` with a neutral
// value: an unknown key gets the nearest one. A key that is one letter away from a known one is
// refused, wherever it stands.
[[nodiscard]] bool CheckOther(const Leaf& leaf, std::span<const OtherKey> others,
                              const std::vector<std::string>& known, MayBeUnknown may_be_unknown);

// Do the words differ by one letter that is added, dropped or changed, or by two that are swapped?
[[nodiscard]] bool IsMisspelt(std::string_view a, std::string_view b);

// Sets the value if the leaf's type fits; a whole float ("5e8") fits an integer.
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<bool>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::int64_t>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<double>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::string>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json, std::optional<std::vector<std::string>>& value);
[[nodiscard]] bool ReadValue(const JsonValue& json,
                             std::optional<std::vector<std::int64_t>>& value);
// "a boolean", ... for errors.
[[nodiscard]] std::string_view TypeName(const SettingValue& value);

template <class S>
struct ReadResult {
  S settings;
  std::vector<std::string> left_out;  // keys that change nothing here
  std::vector<std::string> unknown;   // keys that nobody here knows
  std::vector<std::string> autos;     // keys that say "auto"
};

// Strings "auto" count as absent, and are listed: Transformers fills them in for DeepSpeed. Keys in
// `skipped` are the caller's.
template <class S>
[[nodiscard]] ReadResult<S> ReadSettings(const JsonValue& root, std::span<const SettingRow<S>> rows,
                                         std::span<const OtherKey> others,
                                         std::span<const std::string_view> skipped = {},
                                         MayBeUnknown may_be_unknown = nullptr) {
  std::vector<std::string> known;
  for (const SettingRow<S>& row : rows) {
    known.emplace_back(row.key);
  }
  ReadResult<S> result;
  for (const Leaf& leaf : LeavesOf(root)) {
    if (std::find(skipped.begin(), skipped.end(), leaf.key) != skipped.end()) {
      continue;
    }
    bool is_known = false, is_read = leaf.value.IsString() && leaf.value.AsString() == "auto";
    if (is_read) {
      result.autos.push_back(leaf.key);
    }
    std::string expected;
    for (const SettingRow<S>& row : rows) {
      if (row.key != leaf.key) {
        continue;
      }
      is_known = true;
      std::visit(
          [&](auto member) {
            using Value = typename std::decay_t<decltype(result.settings.*member)>::value_type;
            is_read = is_read || ReadValue(leaf.value, result.settings.*member);
            expected += (expected.empty() ? "" : " or ") + std::string(TypeName(Value()));
          },
          row.member);
    }
    if (!is_known) {
      const bool is_other = CheckOther(leaf, others, known, may_be_unknown);
      (is_other ? result.left_out : result.unknown).push_back(leaf.key);
    } else if (!is_read) {
      throw leaf.value.Error(expected);
    }
  }
  return result;
}

}  // namespace shardwright
