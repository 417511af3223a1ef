#pragma once

namespace shardwright {

// What standard output can show. A pipe gets no colours.
struct Terminal {
  bool is_terminal = false;
  bool colours = false;  // a terminal, and neither NO_COLOR nor TERM=dumb
};
[[nodiscard]] Terminal StandardOutput();

enum class Ink { kGood, kBad };
// While it lives, what is printed to standard output has a colour, where colours are shown. The
// escapes go past the gate (core/printable.h), which lets none through.
class Inked {
 public:
  Inked(Ink ink, const Terminal& terminal);
  ~Inked();
  Inked(const Inked&) = delete;
  Inked& operator=(const Inked&) = delete;

 private:
  const bool is_on_;
};

}  // namespace shardwright
