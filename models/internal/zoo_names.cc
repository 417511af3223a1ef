#include "models/internal/zoo_names.h"

#include "core/embedded.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/zoo_aliases.h"

namespace shardwright::internal {
namespace {

// zoo_aliases.json. "trained_as": parts of a name that say how weights were trained or stored, not
// how large they are. "same_sizes": models of another name with the same sizes.
const JsonValue& Aliases() {
  static const JsonValue aliases = [] {
    const EmbeddedFile& file = EmbeddedZooAliases().front();
    return JsonValue::Parse(file.text, std::string(file.path));
  }();
  return aliases;
}

bool IsOfTraining(std::string_view part) {
  const JsonValue words = Aliases().At("trained_as");
  bool is_found = false;
  for (std::size_t i = 0; i < words.size() && !is_found; ++i) {
    is_found = words[i].AsString() == part;
  }
  return is_found;
}

// Without the parts that say how weights were trained.
std::string SizePart(const std::string& name) {
  std::string kept;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('-', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (!IsOfTraining(part)) {
      kept += (kept.empty() ? "" : "-") + part;
    }
    begin = end + 1;
  }
  return kept;
}

// "llama3-8b" for "llama-3-8b", and "qwen-3-8b" for "qwen3-8b". Empty: the name begins otherwise.
std::string OtherDash(const std::string& name) {
  const std::size_t letters = name.find_first_not_of("abcdefghijklmnopqrstuvwxyz");
  if (letters == 0 || letters >= name.size()) {
    return "";
  }
  const std::string family = name.substr(0, letters);
  return name[letters] == '-' ? family + name.substr(letters + 1)
                              : family + "-" + name.substr(letters);
}

}  // namespace

std::string ZooNameOf(std::string_view spelled, std::span<const std::string> names) {
  const auto known = [&](const std::string& name) { return IsIn(names, name); };
  const std::string name = LowerCase(spelled.substr(spelled.rfind('/') + 1));
  if (known(name)) {
    return name;
  }
  const std::string part = SizePart(name);
  for (const std::string& other : {part, OtherDash(part)}) {
    if (known(other)) {
      return other;
    }
  }
  const auto same = Aliases().At("same_sizes").Find(part);
  return same ? same->AsString() : "";
}

}  // namespace shardwright::internal
