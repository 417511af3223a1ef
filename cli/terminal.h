#pragma once

#include <cstddef>
#include <string>

namespace shardwright {

// What standard output can show. A pipe gets neither colours nor pictures.
struct Terminal {
  bool is_terminal = false;
  bool colours = false;  // a terminal, and neither NO_COLOR nor TERM=dumb
  bool unicode = false;  // the locale's encoding is UTF-8
  std::size_t width = 80;
};
[[nodiscard]] Terminal StandardOutput();

enum class Ink { kGood, kBad };
// `text` in a colour, where colours are shown.
[[nodiscard]] std::string Coloured(const std::string& text, Ink ink, const Terminal& terminal);

}  // namespace shardwright
