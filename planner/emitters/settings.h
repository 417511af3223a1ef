#pragma once

// Settings files of frameworks: a struct with one optional member per key, and one table that joins
// keys and members. Emitters write by the table, importers read by it, so that both agree.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace shardwright {

using SettingValue =
    std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

// "zero_optimization.stage" = 3. Dots in a key separate nested tables.
struct Setting {
  std::string key;
  SettingValue value;

  bool operator==(const Setting&) const = default;
};

// Unset members are not written: the framework's default holds.
template <class S>
using SettingMember = std::variant<std::optional<bool> S::*, std::optional<std::int64_t> S::*,
                                   std::optional<double> S::*, std::optional<std::string> S::*,
                                   std::optional<std::vector<std::string>> S::*>;

template <class S>
struct SettingRow {
  std::string_view key;
  SettingMember<S> member;
};

// The settings that are set, in the order of the table.
template <class S>
[[nodiscard]] std::vector<Setting> ListSettings(std::span<const SettingRow<S>> rows,
                                                const S& settings) {
  std::vector<Setting> list;
  for (const SettingRow<S>& row : rows) {
    std::visit(
        [&](auto member) {
          if ((settings.*member).has_value()) {
            list.push_back({std::string(row.key), *(settings.*member)});
          }
        },
        row.member);
  }
  return list;
}

// Texts that hold `list`; keys that share a table must stand together. Each ends with a newline.
[[nodiscard]] std::string SettingsAsJson(const std::vector<Setting>& list);
// `comment`: lines for the top of the file, without '#'.
[[nodiscard]] std::string SettingsAsYaml(const std::vector<Setting>& list,
                                         std::string_view comment);
[[nodiscard]] std::string SettingsAsToml(const std::vector<Setting>& list,
                                         std::string_view comment);

// Throws InputError: `where` says `value` for the key.
[[noreturn]] void RefuseSetting(const std::string& where, std::string_view key,
                                const std::string& value, std::string_view expected);

}  // namespace shardwright
