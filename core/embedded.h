#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// One data file that the build put into the program (sw_embed in cmake/Shardwright.cmake), so that
// the program finds its zoo, catalog and profiles wherever it is installed. The views live as long
// as the program.
struct EmbeddedFile {
  std::string_view name;  // File name without its last extension: "llama-3-8b".
  std::string_view text;  // The whole file, byte for byte.
  std::string_view path;  // From the repository root, for messages: "models/zoo/llama-3-8b.json".
  std::string_view sha256 = {};  // Of `text`, 64 hexadecimal digits.
};

// The names, sorted.
[[nodiscard]] inline std::vector<std::string> NamesOf(std::span<const EmbeddedFile> files) {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : files) {
    names.emplace_back(file.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace shardwright
