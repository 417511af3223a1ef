#pragma once

// Pulls values out of JSON of any size, plain or gzip, and steps over those that nobody wants. Text
// is looked at in place: traces of profilers are gigabytes, of which little counts.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "traces/gzip.h"

namespace shardwright::internal {

// A value is taken by one of Enter..., Text and Skip. All throw InputError for broken JSON, nesting
// deeper than 64 and tokens that are too long. Numbers and words are taken as they are spelled:
// whoever wants a number checks it. NaN and Infinity pass, since Python writes them.
class JsonScanner {
 public:
  // Stacks are shorter.
  static constexpr std::size_t kLongestToken = std::size_t{8} << 20;
  // Throws InputError when the file cannot be read.
  explicit JsonScanner(const std::string& file, std::size_t longest_token = kLongestToken);

  enum class Kind : std::uint8_t { kObject, kArray, kString, kNumber, kWord };
  // Of the next value.
  [[nodiscard]] Kind Peek();

  void EnterObject();
  // The next key, after which its value stands; nothing at the end of the object, which is left.
  [[nodiscard]] std::optional<std::string_view> NextKey();
  void EnterArray();
  // Whether another element stands there; if not, the array is left.
  [[nodiscard]] bool NextElement();

  // A string without its escapes, or a number; nothing for other values, which are stepped over.
  // Valid until the next call.
  [[nodiscard]] std::optional<std::string_view> Text();
  // What is inside of an object or array is not held against JSON's grammar, only its brackets and
  // strings are.
  void Skip();
  // Steps over what is left of the object that was entered last. A value must have been taken.
  void LeaveObject();
  // Nothing may follow.
  void End();

 private:
  [[noreturn]] void Fail(const std::string& what) const;
  [[noreturn]] void FailToken() const;
  bool Refill(const char* keep);
  char SkipSpace();
  char SkipMoreSpace();
  void SkipUntil(std::size_t outside, char end);
  void Enter();
  bool Leave(char end);
  std::string_view ScanString(bool keep_escapes);
  std::string_view ScanRun();
  std::string_view Unescape(std::string_view text);
  std::size_t AppendCharacter(std::string_view text, std::size_t at);

  std::string file_;
  std::size_t longest_token_;
  TextSource source_;
  std::vector<char> buffer_;  // the text from byte `offset_` of the file on
  const char* next_ = nullptr;
  const char* end_ = nullptr;  // a null character stands there
  std::size_t offset_ = 0;
  std::size_t depth_ = 0;
  bool is_first_ = false;  // an object or array was just entered
  std::string unescaped_;
};

}  // namespace shardwright::internal
