#pragma once

// Four kinds of failure, four treatments (see docs/errors.md): bad input throws InputError, our
// bugs abort through SW_CHECK, the environment throws EnvironmentError, "no" is a result.

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shardwright {

// Bad input by the user. what() is "<where>: got <found>, expected <rule>[; <hint>]", where
// <where> is "<file>: <field path>".
class InputError : public std::runtime_error {
 public:
  explicit InputError(const std::string& message) : std::runtime_error(message) {}
  InputError(std::string_view where, std::string_view found, std::string_view expected,
             std::string_view hint = {});
};

// Something this machine lacks or refuses: a file cannot be written, a library is missing.
class EnvironmentError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A failure while a plan runs: out of memory, a lost rank, a device error.
class RunError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Place in a file: "plan.json: units[3].modules[0]". Extended on the way down, by value.
class Path {
 public:
  Path() = default;
  explicit Path(std::string file) : file_(std::move(file)) {}
  [[nodiscard]] Path Field(std::string_view name) const;
  [[nodiscard]] Path Index(std::size_t i) const;
  // "<file>: <field path>", or "<file>" at the root.
  [[nodiscard]] std::string str() const;
  [[nodiscard]] const std::string& file() const { return file_; }

 private:
  std::string file_;
  std::string field_;
};

// The candidate with the smallest edit distance to `word`, when that distance is at most
// max(2, word length / 3); empty otherwise. Ties go to the earlier candidate.
[[nodiscard]] std::string NearestMatch(std::string_view word,
                                       std::span<const std::string> candidates);
// "did you mean \"x\"?" for the nearest match, or empty.
[[nodiscard]] std::string DidYouMean(std::string_view word,
                                     std::span<const std::string> candidates);

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& detail);

}  // namespace shardwright

// Stops the program on a bug of ours; on in release builds. `...` is a std::string expression.
#define SW_CHECK(condition, ...)                                                            \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      ::shardwright::CheckFailed(__FILE__, __LINE__, #condition, std::string(__VA_ARGS__)); \
    }                                                                                       \
  } while (false)
