#pragma once

// Strict JSON reading with field paths. Values with a unit are strings ("450 GB/s", "80 GiB",
// "5 us"); a bare number where a unit is needed is an error, and so are unknown and double keys.

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/units.h"

namespace shardwright {

// One node of a parsed JSON document. Cheap to copy; keeps the document alive. All As* functions
// throw InputError on a wrong type or range.
class JsonValue {
 public:
  // Parses `text`; `file` names it in errors. Throws InputError with line and column on bad
  // syntax, double keys, trailing data or nesting deeper than 200.
  [[nodiscard]] static JsonValue Parse(std::string_view text, const std::string& file);
  // Reads and parses a file. A file over 256 MiB is refused.
  [[nodiscard]] static JsonValue ReadFile(const std::string& file);

  // Looks through the document for the node: for errors, and for what is asked once.
  [[nodiscard]] Path path() const;
  [[nodiscard]] bool IsObject() const;
  [[nodiscard]] bool IsArray() const;
  [[nodiscard]] bool IsString() const;
  [[nodiscard]] bool IsNumber() const;
  [[nodiscard]] bool IsBool() const;
  [[nodiscard]] bool IsNull() const;

  // Objects. Find returns nothing for an absent key or a null value.
  [[nodiscard]] JsonValue At(std::string_view key) const;
  [[nodiscard]] std::optional<JsonValue> Find(std::string_view key) const;
  // Sorted by code unit, whatever the order in the file.
  [[nodiscard]] std::vector<std::string> Keys() const;
  // Throws on the first key that is not in `allowed`, with the nearest allowed key.
  void AllowOnly(std::initializer_list<std::string_view> allowed) const;
  void AllowOnly(const std::vector<std::string>& allowed) const;

  // Arrays.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] JsonValue operator[](std::size_t i) const;

  [[nodiscard]] std::string AsString() const;
  [[nodiscard]] bool AsBool() const;
  [[nodiscard]] double AsDouble() const;
  // From 0 up to, but not including, 1.
  [[nodiscard]] double AsProbability() const;
  // An integer in [min, max].
  [[nodiscard]] std::int64_t AsInt(std::int64_t min = 0, std::int64_t max = kMaxCount) const;
  [[nodiscard]] Bytes AsBytes() const;
  [[nodiscard]] BytesPerSecond AsBytesPerSecond() const;
  [[nodiscard]] FlopsPerSecond AsFlopsPerSecond() const;
  [[nodiscard]] Seconds AsSeconds() const;
  // The index of the string in `choices`; the error names the nearest one.
  [[nodiscard]] std::size_t AsChoice(std::initializer_list<std::string_view> choices) const;
  [[nodiscard]] std::size_t AsChoice(std::span<const std::string_view> choices) const;

  // An InputError at this node: "got <this value>, expected <expected>".
  [[nodiscard]] InputError Error(std::string_view expected, std::string_view hint = {}) const;
  // This node as compact JSON text, cut to 60 characters.
  [[nodiscard]] std::string Shown() const;

  // Counts above this are refused everywhere: no real model, cluster or job comes near.
  static constexpr std::int64_t kMaxCount = std::int64_t{1} << 50;

 private:
  struct Document;
  JsonValue(std::shared_ptr<const Document> document, const void* node);
  template <class T>
  T AsQuantity(T (*parse)(std::string_view, std::string_view), std::string_view rule) const;

  std::shared_ptr<const Document> document_;
  const void* node_ = nullptr;  // an nlohmann::json inside *document_
};

// Parsing of one quantity written as text, for JSON, inline descriptions and flags alike.
// `where` names the place in errors. Units: B KB MB GB TB KiB MiB GiB TiB; B/s .. TB/s, bit/s ..
// Tbit/s; ps ns us ms s min h; FLOP/s .. PFLOP/s with K M G T P prefixes. Negative, infinite and
// missing units are refused. Bytes are rounded to whole ones, except that a fraction of "B" is
// refused.
[[nodiscard]] Bytes ParseBytes(std::string_view text, std::string_view where);
[[nodiscard]] BytesPerSecond ParseBytesPerSecond(std::string_view text, std::string_view where);
[[nodiscard]] FlopsPerSecond ParseFlopsPerSecond(std::string_view text, std::string_view where);
[[nodiscard]] Seconds ParseSeconds(std::string_view text, std::string_view where);

// What those four expect, as their errors say it.
inline constexpr std::string_view kBytesRule = "a size such as \"80 GiB\" or \"512 MB\"";
inline constexpr std::string_view kBytesPerSecondRule =
    "a rate such as \"50 GB/s\" or \"400 Gbit/s\"";
inline constexpr std::string_view kFlopsPerSecondRule = "a rate such as \"989 TFLOP/s\"";
inline constexpr std::string_view kSecondsRule = "a time such as \"5 us\" or \"1.5 ms\"";

// Human forms with 3-4 significant digits: "1.25 GiB", "83.1 us", "450 GB/s".
[[nodiscard]] std::string Format(Bytes b);
[[nodiscard]] std::string Format(Seconds s);
[[nodiscard]] std::string Format(BytesPerSecond r);
[[nodiscard]] std::string Format(FlopsPerSecond r);

// Forms for files: the shortest text that the Parse functions read back to the same value, in the
// largest unit that allows that: "80 GiB", "450 GB/s", "83.1 us".
[[nodiscard]] std::string FormatExact(Bytes b);
[[nodiscard]] std::string FormatExact(Seconds s);
[[nodiscard]] std::string FormatExact(BytesPerSecond r);
[[nodiscard]] std::string FormatExact(FlopsPerSecond r);

// The whole of a text file. Throws InputError when it is missing, a folder, unreadable or larger
// than `largest` bytes.
[[nodiscard]] std::string ReadTextFile(const std::string& file,
                                       std::int64_t largest = std::int64_t{256} << 20);

// Whole-file output that never leaves a half-written file: writes to a temporary file in the same
// folder, then renames. Throws EnvironmentError. "-" writes to standard output.
void WriteFileAtomically(const std::string& file, std::string_view content);

}  // namespace shardwright
