// Only Emscripten needs this file; elsewhere it is empty.

#include "core/portable.h"

#ifdef __EMSCRIPTEN__

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace shardwright {
namespace {

bool IsDigit(char c) {
  return c >= '0' && c <= '9';
}

const char* SkipDigits(const char* at, const char* last) {
  return std::find_if_not(at, last, IsDigit);
}

// Behind the decimal number that begins at `first`; `first` itself: there is none.
const char* EndOfNumber(const char* first, const char* last) {
  const char* at = first + (first != last && *first == '-' ? 1 : 0);
  const char* const whole = at;
  at = SkipDigits(at, last);
  std::ptrdiff_t digits = at - whole;
  if (at != last && *at == '.') {
    const char* const end = SkipDigits(at + 1, last);
    digits += end - (at + 1);
    at = digits > 0 ? end : at;
  }
  if (digits == 0) {
    return first;
  }
  if (at != last && (*at == 'e' || *at == 'E')) {
    const char* power = at + 1;
    power += power != last && (*power == '+' || *power == '-') ? 1 : 0;
    const char* const end = SkipDigits(power, last);
    at = end != power ? end : at;
  }
  return at;
}

// "inf", "infinity" and "nan" in any case, with their sign.
const char* EndOfWord(const char* first, const char* last, double& value) {
  const char* const begin = first + (first != last && *first == '-' ? 1 : 0);
  for (const char* word : {"infinity", "inf", "nan"}) {
    const auto length = static_cast<std::ptrdiff_t>(std::strlen(word));
    const auto is_same = [](char lower, char any) { return (any | 0x20) == lower; };
    if (last - begin >= length && std::equal(word, word + length, begin, is_same)) {
      value = word[0] == 'n' ? std::nan("") : HUGE_VAL;
      value = begin != first ? -value : value;
      return begin + length;
    }
  }
  return first;
}

}  // namespace

std::from_chars_result FromChars(const char* first, const char* last, double& value) {
  const char* const end = EndOfNumber(first, last);
  if (end == first) {
    const char* const word = EndOfWord(first, last, value);
    return {word, word == first ? std::errc::invalid_argument : std::errc()};
  }
  const std::string text(first, end);  // strtod wants its end marked
  const double read = std::strtod(text.c_str(), nullptr);
  const std::string digits = text.substr(0, text.find_first_of("eE"));
  const bool is_zero = digits.find_first_of("123456789") == std::string::npos;
  if (std::isinf(read) || (read == 0.0 && !is_zero)) {
    return {end, std::errc::result_out_of_range};
  }
  value = read;
  return {end, std::errc()};
}

std::to_chars_result ToChars(char* first, char* last, double value) {
  constexpr int kMostDigits = 17;
  std::array<char, 400> text{};
  int length = 0;
  int digits = 1;
  for (; digits <= kMostDigits; ++digits) {
    length = std::snprintf(text.data(), text.size(), "%.*e", digits - 1, value);
    if (digits == kMostDigits || !std::isfinite(value) ||
        std::strtod(text.data(), nullptr) == value) {
      break;
    }
  }
  if (std::isfinite(value)) {
    // The same digits without an exponent, where that is no longer.
    const int power = std::atoi(std::strchr(text.data(), 'e') + 1);
    std::array<char, 400> fixed{};
    const int decimals = std::max(0, digits - 1 - power);
    const int size = std::snprintf(fixed.data(), fixed.size(), "%.*f", decimals, value);
    if (size <= length) {
      text = fixed;
      length = size;
    }
  }
  if (length > last - first) {
    return {last, std::errc::value_too_large};
  }
  return {std::copy_n(text.data(), length, first), std::errc()};
}

}  // namespace shardwright

#endif
