#include "core/printable.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "core/ranges.h"

namespace shardwright {
namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t size = 0;  // in bytes; 0: this is no UTF-8
};

// The one that begins at `text`. Requires a byte.
Character Decode(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return {first, 1};
  }
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < size) {
    return {};
  }
  std::uint32_t code = first & (0xffU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0U) != 0x80U) {
      return {};
    }
    code = code << 6U | (byte(i) & 0x3fU);
  }
  constexpr std::array<std::uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  return code < kLeast[size] || code > 0x10ffff || is_surrogate ? Character{}
                                                                : Character{code, size};
}

// C0, DEL and C1; marks, embeddings, overrides and isolates of bidirectional writing; separators of
// lines and paragraphs; what Unicode promises never to be a character, which YAML refuses.
bool IsControl(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x061c || code == 0x200e ||
         code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2066 && code <= 0x2069) || code == 0xfffe || code == 0xffff;
}

std::string Escaped(std::string_view text, bool is_line) {
  std::string shown;
  shown.reserve(text.size());
  std::array<char, 8> escape{};
  while (!text.empty()) {
    // Most texts are printable ASCII but for their ends of lines, and some are megabytes long.
    const auto plain = static_cast<std::size_t>(
        FindIf(text, [](char c) { return c < ' ' || c > '~'; }) - text.begin());
    shown += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) {
      break;
    }
    const Character character = Decode(text);
    const bool is_blank = text[0] == '\n' || text[0] == '\t';
    if (character.size == 0) {
      std::snprintf(escape.data(), escape.size(), "\\x%02x",
                    static_cast<unsigned>(static_cast<unsigned char>(text[0])));
      shown += escape.data();
    } else if (is_blank && is_line) {
      shown += text[0] == '\n' ? "\\n" : "\\t";
    } else if (!is_blank && IsControl(character.code)) {
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(character.code));
      shown += escape.data();
    } else {
      shown += text.substr(0, character.size);
    }
    text.remove_prefix(character.size == 0 ? 1 : character.size);
  }
  return shown;
}

void Write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
}

}  // namespace

std::string Printable(std::string_view text) {
  return Escaped(text, false);
}

std::string PrintableLine(std::string_view text) {
  return Escaped(text, true);
}

void Say(std::string_view line) {
  Write(PrintableLine(line) + '\n');
}

void SayLines(std::string_view lines) {
  Write(Printable(lines));
}

void SayProgress(std::string_view line) {
  Write('\r' + PrintableLine(line));
}

}  // namespace shardwright
