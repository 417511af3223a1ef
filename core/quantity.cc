// Quantities as text: "450 GB/s" to a rate and back. Declared in core/json.h.

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/json.h"
#include "core/portable.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

struct Unit {
  std::string_view name;
  double factor;  // in the base unit: B, B/s, FLOP/s or s
};

constexpr double kKibi = 1024.0;

constexpr std::array<Unit, 9> kByteUnits = {{{"B", 1},
                                             {"KB", 1e3},
                                             {"MB", 1e6},
                                             {"GB", 1e9},
                                             {"TB", 1e12},
                                             {"KiB", kKibi},
                                             {"MiB", kKibi* kKibi},
                                             {"GiB", kKibi* kKibi* kKibi},
                                             {"TiB", kKibi* kKibi* kKibi* kKibi}}};
// A bit is an eighth of a byte, exactly representable.
constexpr std::array<Unit, 14> kRateUnits = {{{"B/s", 1},
                                              {"KB/s", 1e3},
                                              {"MB/s", 1e6},
                                              {"GB/s", 1e9},
                                              {"TB/s", 1e12},
                                              {"KiB/s", kKibi},
                                              {"MiB/s", kKibi* kKibi},
                                              {"GiB/s", kKibi* kKibi* kKibi},
                                              {"TiB/s", kKibi* kKibi* kKibi* kKibi},
                                              {"bit/s", 0.125},
                                              {"Kbit/s", 125},
                                              {"Mbit/s", 125e3},
                                              {"Gbit/s", 125e6},
                                              {"Tbit/s", 125e9}}};
constexpr std::array<Unit, 7> kFlopUnits = {{{"FLOP/s", 1},
                                             {"KFLOP/s", 1e3},
                                             {"MFLOP/s", 1e6},
                                             {"GFLOP/s", 1e9},
                                             {"TFLOP/s", 1e12},
                                             {"PFLOP/s", 1e15},
                                             {"EFLOP/s", 1e18}}};
// Sub-second units are divisors, since 1e-6 is not exact and "5 us" should equal the literal 5e-6.
constexpr std::array<Unit, 7> kTimeUnits = {
    {{"ps", -1e12}, {"ns", -1e9}, {"us", -1e6}, {"ms", -1e3}, {"s", 1}, {"min", 60}, {"h", 3600}}};

// Nothing measured is larger; keeps sizes clear of 2^63 and times clear of SimTime's range.
constexpr double kLargestBytes = 0x1p62;
constexpr double kLargestSeconds = 1e6;
constexpr double kLargestRate = 1e24;

struct Parsed {
  double number = 0;
  std::string_view unit;
  double value = 0;
};

InputError Wrong(std::string_view text, std::string_view where, std::string_view rule,
                 const std::string& hint) {
  constexpr std::size_t kLongest = 60;
  std::string shown(text.substr(0, kLongest));
  if (text.size() > kLongest) {
    shown += "...";
  }
  return {where, '"' + shown + '"', rule, hint};
}

std::string UnitHint(std::string_view word, std::span<const Unit> units) {
  if (word.empty()) {
    return "the unit is missing";
  }
  std::vector<std::string> names = Mapped<std::string>(units, &Unit::name);
  // "Gb/s" would be one edit from "GB/s", and eight times wrong.
  if (word.ends_with("b/s") || word.ends_with("bps") || word.ends_with("Bps")) {
    return "write \"Gbit/s\" for bits or \"GB/s\" for bytes per second";
  }
  return DidYouMean(word, names);
}

Parsed ParseQuantity(std::string_view text, std::string_view where, std::span<const Unit> units,
                     std::string_view rule, double largest) {
  Parsed parsed;
  const char* end = text.data() + text.size();
  const auto [rest, error] = FromChars(text.data(), end, parsed.number);
  if (error == std::errc::result_out_of_range) {
    throw Wrong(text, where, rule, "the number is out of range");
  }
  if (error != std::errc() || !std::isfinite(parsed.number)) {
    throw Wrong(text, where, rule, "");
  }
  if (std::signbit(parsed.number)) {
    throw Wrong(text, where, rule, "it must not be negative");
  }
  parsed.unit = std::string_view(rest, static_cast<std::size_t>(end - rest));
  while (parsed.unit.starts_with(' ')) {
    parsed.unit.remove_prefix(1);
  }
  const auto unit = FindIn(units, parsed.unit, &Unit::name);
  if (unit == units.end()) {
    throw Wrong(text, where, rule, UnitHint(parsed.unit, units));
  }
  parsed.value = unit->factor < 0 ? parsed.number / -unit->factor : parsed.number * unit->factor;
  if (parsed.value > largest) {
    throw Wrong(text, where, rule, "it is too large");
  }
  return parsed;
}

// Two decimals below 10, one below 100, none above; trailing zeros go.
std::string ShortNumber(double v) {
  const double size = std::abs(v);
  const int decimals = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  std::array<char, 64> text{};
  const int length = size < 1e15 ? std::snprintf(text.data(), text.size(), "%.*f", decimals, v)
                                 : std::snprintf(text.data(), text.size(), "%.3g", v);
  std::string number(text.data(), static_cast<std::size_t>(length));
  if (number.find('.') != std::string::npos) {
    number.erase(number.find_last_not_of('0') + 1);
    if (number.ends_with('.')) {
      number.pop_back();
    }
  }
  return number;
}

// The largest of the ascending `units` in which |v| is at least 1 after rounding to its digits.
std::string Scaled(double v, std::span<const Unit> units) {
  if (!std::isfinite(v)) {
    return std::string(v > 0   ? "infinite "
                       : v < 0 ? "-infinite "
                               : "undefined ") +
           std::string(units.front().name);
  }
  const Unit* best = &units.front();
  for (const Unit& u : units) {
    // 0.9995 of a unit prints as "1000" of the one below, so it moves up already.
    if (std::abs(v) >= 0.9995 * u.factor) {
      best = &u;
    }
  }
  return ShortNumber(v / best->factor) + ' ' + std::string(best->name);
}

// The first of `units` in which the shortest decimal of `value` is at least 1 and reads back equal;
// the last one when none does. `read` parses.
template <class T, class Read>
std::string Exact(T value, std::span<const Unit> units, Read read) {
  std::string text;
  for (const Unit& u : units) {
    const auto number = static_cast<double>(value.value);
    const double scaled = u.factor < 0 ? number * -u.factor : number / u.factor;
    std::array<char, 64> digits{};
    const auto [end, error] = ToChars(digits.data(), digits.data() + digits.size(), scaled);
    SW_CHECK(error == std::errc(), "64 characters hold every double");
    text.assign(digits.data(), end);
    text += ' ';
    text += u.name;
    if (scaled >= 1 && read(text, "") == value) {
      return text;
    }
  }
  return text;
}

}  // namespace

Bytes ParseBytes(std::string_view text, std::string_view where) {
  const Parsed parsed = ParseQuantity(text, where, kByteUnits, kBytesRule, kLargestBytes);
  if (parsed.unit == "B") {
    // Whole bytes are read as an integer: a double is exact only up to 2^53.
    std::int64_t whole = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), whole);
    const bool is_integer = error == std::errc() && (*rest == ' ' || *rest == 'B');
    if (is_integer) {
      return Bytes(whole);
    }
    if (parsed.number != std::floor(parsed.number)) {
      throw Wrong(text, where, kBytesRule, "a byte has no fraction");
    }
  }
  return Bytes(std::llround(parsed.value));
}

BytesPerSecond ParseBytesPerSecond(std::string_view text, std::string_view where) {
  return BytesPerSecond(
      ParseQuantity(text, where, kRateUnits, kBytesPerSecondRule, kLargestRate).value);
}

FlopsPerSecond ParseFlopsPerSecond(std::string_view text, std::string_view where) {
  return FlopsPerSecond(
      ParseQuantity(text, where, kFlopUnits, kFlopsPerSecondRule, kLargestRate).value);
}

Seconds ParseSeconds(std::string_view text, std::string_view where) {
  return Seconds(ParseQuantity(text, where, kTimeUnits, kSecondsRule, kLargestSeconds).value);
}

std::string FormatExact(Bytes b) {
  constexpr std::array<Unit, 8> kUnits = {{{"TiB", kKibi * kKibi * kKibi * kKibi},
                                           {"GiB", kKibi * kKibi * kKibi},
                                           {"MiB", kKibi * kKibi},
                                           {"TB", 1e12},
                                           {"GB", 1e9},
                                           {"MB", 1e6},
                                           {"KiB", kKibi},
                                           {"KB", 1e3}}};
  // Six digits are what a person wrote; anything longer is a count of bytes.
  constexpr std::size_t kLongestHuman = 6;
  for (std::size_t i = 0; i < kUnits.size(); ++i) {
    std::string text = Exact(b, std::span(kUnits).subspan(i, 1), ParseBytes);
    const bool is_whole = std::abs(static_cast<double>(b.value)) >= kUnits[i].factor;
    if (is_whole && text.find(' ') <= kLongestHuman && ParseBytes(text, "") == b) {
      return text;
    }
  }
  return std::to_string(b.value) + " B";
}

std::string FormatExact(Seconds s) {
  constexpr std::array<Unit, 5> kUnits = {
      {{"s", 1}, {"ms", -1e3}, {"us", -1e6}, {"ns", -1e9}, {"ps", -1e12}}};
  constexpr std::array<Unit, 1> kBase = {{{"s", 1}}};
  const std::string text = s.value == 0 ? "0 s" : Exact(s, kUnits, ParseSeconds);
  return ParseSeconds(text, "") == s ? text : Exact(s, kBase, ParseSeconds);
}

std::string FormatExact(BytesPerSecond r) {
  constexpr std::array<Unit, 5> kUnits = {
      {{"TB/s", 1e12}, {"GB/s", 1e9}, {"MB/s", 1e6}, {"KB/s", 1e3}, {"B/s", 1}}};
  return Exact(r, kUnits, ParseBytesPerSecond);
}

std::string FormatExact(FlopsPerSecond r) {
  constexpr std::array<Unit, 5> kUnits = {
      {{"TFLOP/s", 1e12}, {"GFLOP/s", 1e9}, {"MFLOP/s", 1e6}, {"KFLOP/s", 1e3}, {"FLOP/s", 1}}};
  return Exact(r, kUnits, ParseFlopsPerSecond);
}

std::string Format(Bytes b) {
  constexpr std::array<Unit, 5> kUnits = {{{"B", 1},
                                           {"KiB", kKibi},
                                           {"MiB", kKibi * kKibi},
                                           {"GiB", kKibi * kKibi * kKibi},
                                           {"TiB", kKibi * kKibi * kKibi * kKibi}}};
  return Scaled(static_cast<double>(b.value), kUnits);
}

std::string Format(Seconds s) {
  // Seconds stay seconds up to two minutes, minutes up to two hours: "90 s" reads better than "1.5
  // min".
  constexpr std::array<Unit, 5> kUnits = {
      {{"ps", 1e-12}, {"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}};
  const double size = std::abs(s.value);
  if (size == 0) {
    return "0 s";
  }
  if (std::isfinite(size) && size >= 7200) {
    return ShortNumber(s.value / 3600) + " h";
  }
  if (std::isfinite(size) && size >= 120) {
    return ShortNumber(s.value / 60) + " min";
  }
  return Scaled(s.value, kUnits);
}

std::string Format(BytesPerSecond r) {
  constexpr std::array<Unit, 5> kUnits = {
      {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}, {"TB/s", 1e12}}};
  return Scaled(r.value, kUnits);
}

std::string Format(FlopsPerSecond r) {
  return Scaled(r.value, kFlopUnits);
}

}  // namespace shardwright
