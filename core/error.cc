#include "core/error.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace shardwright {
namespace {

std::string FormatInputError(std::string_view where, std::string_view found,
                             std::string_view expected, std::string_view hint) {
  std::string text(where);
  text += ": got ";
  text += found;
  text += ", expected ";
  text += expected;
  if (!hint.empty()) {
    text += "; ";
    text += hint;
  }
  return text;
}

// Levenshtein distance, O(|a| |b|) time, O(|b|) space.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t up = row[j];
      row[j] = std::min({up + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0U : 1U)});
      diagonal = up;
    }
  }
  return row[b.size()];
}

}  // namespace

InputError::InputError(std::string_view where, std::string_view found, std::string_view expected,
                       std::string_view hint)
    : std::runtime_error(FormatInputError(where, found, expected, hint)) {}

Path Path::Field(std::string_view name) const {
  Path p = *this;
  if (!p.field_.empty()) {
    p.field_ += '.';
  }
  p.field_ += name;
  return p;
}

Path Path::Index(std::size_t i) const {
  Path p = *this;
  p.field_ += '[' + std::to_string(i) + ']';
  return p;
}

std::string Path::str() const {
  if (field_.empty()) {
    return file_;
  }
  return file_.empty() ? field_ : file_ + ": " + field_;
}

std::string NearestMatch(std::string_view word, std::span<const std::string> candidates) {
  // Long hostile words cannot be near anything; do not pay the quadratic distance for them.
  constexpr std::size_t kLongestWord = 200;
  std::string best;
  if (word.size() > kLongestWord) {
    return best;
  }
  std::size_t best_distance = std::max<std::size_t>(2, word.size() / 3) + 1;
  for (const std::string& c : candidates) {
    const std::size_t d = EditDistance(word, c);
    if (d < best_distance) {
      best_distance = d;
      best = c;
    }
  }
  return best;
}

std::string DidYouMean(std::string_view word, std::span<const std::string> candidates) {
  const std::string best = NearestMatch(word, candidates);
  return best.empty() ? std::string() : "did you mean \"" + best + "\"?";
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& detail) {
  std::fprintf(stderr, "shardwright: internal error at %s:%d: %s is false%s%s\n", file, line,
               condition, detail.empty() ? "" : ": ", detail.c_str());
  // 70 is EX_SOFTWARE: the documented exit code for a bug of ours. No destructors run.
  std::_Exit(70);
}

}  // namespace shardwright
