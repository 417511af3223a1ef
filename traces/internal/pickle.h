#pragma once

// Pickles as data: numbers, texts, lists, tuples and dictionaries.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace shardwright::internal {

// A value of a pickle; those that occur in several places are stored once.
class Pickle {
 public:
  enum class Kind : std::uint8_t { kNone, kBool, kInt, kFloat, kText, kList, kDict };
  using Ref = std::uint32_t;

  // Nothing in it is ever run: opcodes that call, import or build are refused. `rule` says in
  // errors what is expected. Throws InputError for code, damaged files and those that cost too
  // much.
  [[nodiscard]] static Pickle Read(const std::string& file, std::string_view rule);
  // The same of a JSON document, which `file` holds.
  [[nodiscard]] static Pickle OfJson(const JsonValue& document, const std::string& file,
                                     std::string_view rule);

  [[nodiscard]] Ref root() const { return root_; }
  [[nodiscard]] Kind KindOf(Ref ref) const { return values_[ref].kind; }
  [[nodiscard]] std::int64_t IntOf(Ref ref) const { return values_[ref].number; }
  [[nodiscard]] const std::string& TextOf(Ref ref) const {
    return texts_[static_cast<std::size_t>(values_[ref].number)];
  }
  // Of a list or tuple.
  [[nodiscard]] const std::vector<Ref>& ItemsOf(Ref ref) const {
    return lists_[static_cast<std::size_t>(values_[ref].number)];
  }
  // The value of a key that is a text; kNothing without it. The last one of equal keys counts.
  static constexpr Ref kNothing = 0xffffffffU;
  [[nodiscard]] Ref Find(Ref dict, std::string_view key) const;
  // The value of a key, which must be there and be of that kind.
  [[nodiscard]] Ref Required(Ref dict, std::string_view key, Kind kind) const;
  // What is wrong with the file at the field `where`.
  [[noreturn]] void Fail(std::string_view where, std::string_view found) const;
  [[nodiscard]] std::int64_t file_size() const { return file_size_; }

 private:
  friend class PickleReader;
  Ref AddJson(const JsonValue& value);
  struct Value {
    Kind kind = Kind::kNone;
    std::int64_t number = 0;  // the value, or an index into a table below
  };
  std::vector<Value> values_;
  std::vector<std::string> texts_;
  std::vector<std::vector<Ref>> lists_;  // of a dictionary: key, value, key, value, ...
  Ref root_ = 0;
  std::string file_;
  std::string_view rule_;
  std::int64_t file_size_ = 0;
};

}  // namespace shardwright::internal
