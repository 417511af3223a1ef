#pragma once

// What each key of a framework's settings means here: setting_keys.json as a table. A key is used,
// changes nothing, is said to be taken for something simpler, is refused with the name of its
// feature, or is unknown.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"

namespace shardwright {

// A value at the end of a key path: "fsdp_config.version".
struct Leaf {
  std::string key;
  JsonValue value;
};

struct SettingKey {
  enum class Kind : std::uint8_t { kUsed, kNothing, kSaid, kRefused };
  Kind kind = Kind::kNothing;
  // kUsed: a key of the framework's settings struct, or "(words)" where a reader takes the key by
  // itself. kNothing: the source of that. kSaid: what it is taken for. kRefused: the feature.
  std::string meaning;
  std::vector<std::string> off;  // the last two: values, as JSON texts, that leave it off

  [[nodiscard]] bool IsOff(const JsonValue& value) const;
};

class SettingKeys {
 public:
  // "trainer", "axolotl", ...: a name of the data file.
  [[nodiscard]] static const SettingKeys& Of(std::string_view framework);
  // The framework whose file has this key at its top, in the order of the data file: pairs of key
  // and framework.
  [[nodiscard]] static const std::vector<std::pair<std::string, std::string>>& Marks();

  // A list of the data file: "silent", the settings that name no choice of a plan; "own_models",
  // how the checkpoints of Automodel's own models begin; "recomputed_parts", of a layer, in
  // Automodel.
  [[nodiscard]] static std::vector<std::string> Words(std::string_view list);
  // Another table of the data file, whose reader knows it.
  [[nodiscard]] static JsonValue Table(std::string_view name);

  // By the whole key, by its last word among the features of all frameworks, or by a table
  // ("checkpoint.") that it stands in. Null: unknown.
  [[nodiscard]] const SettingKey* Find(const std::string& key) const;
  // Are keys of the settings struct no keys of this file, unless they are listed as used?
  [[nodiscard]] bool HasOwnNames() const { return has_own_names_; }
  // May the value be "auto", which another file fills in?
  [[nodiscard]] bool MayBeAuto(const std::string& key) const;
  [[nodiscard]] const std::map<std::string, SettingKey>& all() const { return keys_; }

  // For a key that no settings struct holds. Returns true if it changes nothing, false if it is
  // unknown and may be. `known` are the keys that the struct holds. Throws InputError for a refused
  // feature and for a key one letter away from a known one. An unknown key is an error in a file
  // that no script reads. Elsewhere it is one if it is on and has a word of plans in its name, such
  // as "rank" or "offload".
  [[nodiscard]] bool ChangesNothing(const Leaf& leaf, const std::vector<std::string>& known) const;

 private:
  explicit SettingKeys(const JsonValue& table);
  [[nodiscard]] bool IsOpen(std::string_view key) const;

  std::map<std::string, SettingKey> keys_;
  bool has_own_names_ = false;
  bool is_open_ = false;             // scripts have keys of their own in it
  std::vector<std::string> closed_;  // but not those that begin so
  std::vector<std::string> autos_;
};

// Do the words differ by one letter that is added, dropped or changed, or by two that are swapped?
[[nodiscard]] bool IsMisspelt(std::string_view a, std::string_view b);

}  // namespace shardwright
