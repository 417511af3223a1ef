#include "core/error.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/printable.h"

namespace shardwright {
namespace {

// No more than so many bytes, and no half UTF-8 character: continuation bytes are 10xxxxxx.
std::string Cut(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) {
    return std::string(text);
  }
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0U) == 0x80U) {
    --limit;
  }
  return std::string(text.substr(0, limit)) + "...";
}

// A file can hold values of many megabytes, which say no more on a terminal than their beginning.
constexpr std::size_t kLongestPart = 4000;

std::string FormatInputError(std::string_view where, std::string_view found,
                             std::string_view expected, std::string_view hint) {
  std::string text(where);
  text += ": got ";
  text += Cut(found, kLongestPart);
  text += ", expected ";
  text += Cut(expected, kLongestPart);
  if (!hint.empty()) {
    text += "; ";
    text += Cut(hint, kLongestPart);
  }
  return text;
}

// Twice the number of characters to insert, remove or replace, and once that of neighbours to swap
// (optimal string alignment): swapping is the likeliest mistake. O(|a| |b|) time, O(|b|) space.
std::size_t Unlikeness(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> above(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = 2 * j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = 2 * i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({above[j] + 2, row[j - 1] + 2, above[j - 1] + (a[i - 1] == b[j - 1] ? 0U : 2U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

}  // namespace

InputError::InputError(std::string_view where, std::string_view found, std::string_view expected,
                       std::string_view hint)
    : std::runtime_error(FormatInputError(where, found, expected, hint)) {}

Path Path::Field(std::string_view name) const {
  // Paths are copied for each value on the way down: a long key must not be.
  constexpr std::size_t kLongestName = 200;
  Path p = *this;
  if (!p.field_.empty()) {
    p.field_ += '.';
  }
  p.field_ += Cut(name, kLongestName);
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
  std::size_t least = 2 * std::max<std::size_t>(2, word.size() / 3) + 1;
  // A hint is not worth a second: names can be many and long.
  constexpr std::size_t kMostWork = 100'000'000;
  std::size_t work = 0;
  for (const std::string& c : candidates) {
    const std::size_t extra =
        c.size() > word.size() ? c.size() - word.size() : word.size() - c.size();
    if (2 * extra >= least) {
      continue;
    }
    work += word.size() * c.size();
    if (work > kMostWork) {
      break;
    }
    const std::size_t distance = Unlikeness(word, c);
    if (distance < least) {
      least = distance;
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
  Say("shardwright: internal error at " + std::string(file) + ':' + std::to_string(line) + ": " +
      condition + " is false" + (detail.empty() ? "" : ": " + detail));
  // 70 is EX_SOFTWARE: the documented exit code for a bug of ours. No destructors run.
  std::_Exit(70);
}

}  // namespace shardwright
