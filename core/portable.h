#pragma once

// What the C++ library of Emscripten 3.1.6 lacks, and Debian 12's native ones have. Everywhere else
// these are the standard library's own.

#include <bit>
#include <charconv>

namespace shardwright {

#ifdef __EMSCRIPTEN__

// std::from_chars for a decimal number: no space or sign + before it; "inf" and "nan" are numbers.
std::from_chars_result FromChars(const char* first, const char* last, double& value);
// std::to_chars: the shortest digits that read back equal.
std::to_chars_result ToChars(char* first, char* last, double value);

template <class To, class From>
[[nodiscard]] constexpr To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// A page in a browser has one thread.
inline constexpr bool kHasThreads = false;

#else

inline std::from_chars_result FromChars(const char* first, const char* last, double& value) {
  return std::from_chars(first, last, value);
}
inline std::to_chars_result ToChars(char* first, char* last, double value) {
  return std::to_chars(first, last, value);
}

template <class To, class From>
[[nodiscard]] constexpr To BitCast(const From& from) {
  return std::bit_cast<To>(from);
}

inline constexpr bool kHasThreads = true;

#endif

}  // namespace shardwright
