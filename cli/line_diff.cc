#include "cli/line_diff.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace shardwright {
namespace {

constexpr std::size_t kContext = 3;

std::vector<std::string_view> LinesOf(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size() - 1);
    lines.push_back(text.substr(0, end + 1));
    text.remove_prefix(end + 1);
  }
  return lines;
}

// ' ', '-' or '+', and the line.
struct Edit {
  char kind = ' ';
  std::string_view line;
};

using TextLines = std::vector<std::string_view>;

// Removed and added lines between the parts that both texts begin and end with.
class Differ {
 public:
  Differ(const TextLines& before, const TextLines& after) : before_(before), after_(after) {}

  std::vector<Edit> Run() {
    const std::size_t least = std::min(before_.size(), after_.size());
    std::size_t head = 0, tail = 0;
    while (head < least && before_[head] == after_[head]) {
      ++head;
    }
    while (tail < least - head &&
           before_[before_.size() - 1 - tail] == after_[after_.size() - 1 - tail]) {
      ++tail;
    }
    Keep(0, head);
    Middle(head, before_.size() - tail, after_.size() - tail);
    Keep(before_.size() - tail, before_.size());
    return std::move(edits_);
  }

 private:
  void Keep(std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      edits_.push_back({' ', before_[i]});
    }
  }

  // Longest common subsequence by the table of all pairs, where that is of a bearable size.
  void Middle(std::size_t head, std::size_t end, std::size_t other_end) {
    constexpr std::size_t kMostPairs = std::size_t{1} << 24;
    const std::size_t rows = end - head, columns = other_end - head;
    const bool is_large = rows > 0 && columns > kMostPairs / rows;
    std::vector<std::uint32_t> common(is_large ? 0 : (rows + 1) * (columns + 1), 0);
    const auto at = [&](std::size_t i, std::size_t j) -> std::uint32_t& {
      return common[i * (columns + 1) + j];
    };
    for (std::size_t i = is_large ? 0 : rows; i-- > 0;) {
      for (std::size_t j = columns; j-- > 0;) {
        at(i, j) = before_[head + i] == after_[head + j] ? at(i + 1, j + 1) + 1
                                                         : std::max(at(i + 1, j), at(i, j + 1));
      }
    }
    std::size_t i = 0, j = 0;
    while (i < rows || j < columns) {
      if (!is_large && i < rows && j < columns && before_[head + i] == after_[head + j]) {
        edits_.push_back({' ', before_[head + i]});
        ++i;
        ++j;
      } else if (i < rows && (is_large || j == columns || at(i + 1, j) >= at(i, j + 1))) {
        edits_.push_back({'-', before_[head + i++]});
      } else {
        edits_.push_back({'+', after_[head + j++]});
      }
    }
  }

  const TextLines& before_;
  const TextLines& after_;
  std::vector<Edit> edits_;
};

// "12,5"; an empty range stands before its first line.
std::string Range(std::size_t first, std::size_t count) {
  return std::to_string(count == 0 ? first : first + 1) + "," + std::to_string(count);
}

// One hunk of edits [begin, end), which begin at these lines of the two texts.
std::string Hunk(const std::vector<Edit>& edits, std::size_t begin, std::size_t end,
                 std::size_t before, std::size_t after) {
  std::string body;
  std::size_t removed = 0, added = 0;
  for (std::size_t i = begin; i < end; ++i) {
    removed += edits[i].kind != '+' ? 1 : 0;
    added += edits[i].kind != '-' ? 1 : 0;
    body += edits[i].kind;
    body += edits[i].line;
    if (!edits[i].line.ends_with('\n')) {
      body += "\n\\ No newline at end of file\n";
    }
  }
  return "@@ -" + Range(before, removed) + " +" + Range(after, added) + " @@\n" + body;
}

}  // namespace

std::string UnifiedDiff(const std::string& before, const std::string& after,
                        const std::string& name) {
  if (before == after) {
    return "";
  }
  const TextLines old_lines = LinesOf(before), new_lines = LinesOf(after);
  const std::vector<Edit> edits = Differ(old_lines, new_lines).Run();
  std::string text = "--- a/" + name + "\n+++ b/" + name + "\n";
  std::size_t before_line = 0, after_line = 0;  // of edits[i]
  for (std::size_t i = 0; i < edits.size();) {
    if (edits[i].kind == ' ') {
      ++i, ++before_line, ++after_line;
      continue;
    }
    // The hunk goes on while less than two contexts lie between two changes.
    const std::size_t begin = i - std::min(i, kContext);
    std::size_t last = i;
    for (std::size_t k = i; k < edits.size() && k <= last + 2 * kContext; ++k) {
      last = edits[k].kind == ' ' ? last : k;
    }
    const std::size_t end = std::min(last + 1 + kContext, edits.size());
    text += Hunk(edits, begin, end, before_line - (i - begin), after_line - (i - begin));
    for (; i < end; ++i) {
      before_line += edits[i].kind != '+' ? 1 : 0;
      after_line += edits[i].kind != '-' ? 1 : 0;
    }
  }
  return text;
}

}  // namespace shardwright
