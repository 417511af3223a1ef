#pragma once

// Numbers about hardware and software together with where they come from. No source, no number.

#include <cstdint>
#include <string>

namespace shardwright {

// How a number came about.
enum class NumberKind : std::uint8_t {
  kSpec,       // the maker's data sheet, or exact arithmetic on it
  kPublished,  // measured by others, who published it
  kMeasured,   // measured by this project or by the user (`shardwright calibrate`)
  kFitted,  // chosen so that a model reproduces published or measured values; `source` says which
  kUnverified,  // believed from general knowledge, not looked up
  kAssumed,     // a judgement; `source` gives the reasoning
};

// "spec", "published", ... as written in JSON.
[[nodiscard]] const char* NumberKindName(NumberKind kind);

struct Origin {
  NumberKind kind = NumberKind::kAssumed;
  std::string source;  // document, URL, repository@commit, or the reasoning behind an assumption
  std::string date;    // YYYY-MM-DD on which the source was read or the measurement made; may be
                       // empty for what is assumed

  bool operator==(const Origin&) const = default;
};

// T is a quantity of core/units.h, or double for a fraction or factor, or std::int64_t for a count.
template <class T>
struct Number {
  T value{};
  Origin origin;
  // Half-width of the band the value is believed to lie in, relative to the value; 0: not known.
  double spread = 0;

  bool operator==(const Number&) const = default;
};

}  // namespace shardwright
