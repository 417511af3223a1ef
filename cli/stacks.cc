#include "cli/stacks.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cli/stack_rows.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

std::vector<StackRow> ReadStacks() {
  const EmbeddedFile& file = EmbeddedStackRows()[0];
  const JsonValue root = JsonValue::Parse(file.text, std::string(file.path));
  const JsonValue rows = root.At("stacks");
  std::vector<StackRow> stacks;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto text = [&](const char* key) {
      const auto value = rows[i].Find(key);
      return value ? value->AsString() : std::string();
    };
    if (text("name").empty() || !text("gpu").empty()) {
      continue;
    }
    StackRow row{.name = text("name") + (text("compiled") == "y" ? "+compile" : ""),
                 .before = text("before"),
                 .before_version = text("before_version"),
                 .kernel_set = text("kernel_set"),
                 .attention = {},
                 .dialect = text("dialect")};
    if (const auto library = rows[i].Find("sdpa")) {
      row.attention = static_cast<AttentionImpl>(library->AsChoice(kAttentionNames));
    }
    stacks.push_back(std::move(row));
  }
  return stacks;
}

// "5.24" is {5, 24}, "2024-12" {2024, 12}; nothing for other text.
std::vector<std::int64_t> NumbersOf(std::string_view text) {
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(".-", begin), text.size());
    const auto number = IntegerIn(text.substr(begin, end - begin));
    if (!number) {
      return {};
    }
    numbers.push_back(*number);
    begin = end + 1;
  }
  return numbers;
}

}  // namespace

const std::vector<StackRow>& Stacks() {
  static const std::vector<StackRow> stacks = ReadStacks();
  return stacks;
}

std::optional<StackRow> FindStack(const std::string& word, const std::string& where) {
  const std::size_t at = word.find('@');
  const std::string name = LowerCase(word.substr(0, at));
  const auto is_set = [&](const KernelSetOptions& set) { return set.name == word; };
  if (AnyOf(BuiltinKernelSets(), is_set)) {
    return std::nullopt;
  }
  std::vector<StackRow> rows;
  for (const StackRow& row : Stacks()) {
    if (row.name == name) {
      rows.push_back(row);
    }
  }
  if (rows.empty() || at == std::string::npos) {
    return rows.empty() ? std::nullopt : std::optional(rows.back());
  }
  constexpr std::int64_t kFirstYear = 1990;  // what is less begins a version
  const std::vector<std::int64_t> when = NumbersOf(std::string_view(word).substr(at + 1));
  const bool is_date = !when.empty() && when.front() >= kFirstYear;
  if (when.empty() || (!is_date && rows.front().before_version.empty())) {
    throw InputError(where, Quoted(word),
                     name + (rows.front().before_version.empty()
                                 ? "@ and a date such as 2024-12"
                                 : "@ and a version such as 5.24, or a date such as 2024-12"));
  }
  const auto fits = [&](const StackRow& row) {
    return row.before.empty() || when < NumbersOf(is_date ? row.before : row.before_version);
  };
  const auto found = FindIf(rows, fits);
  if (found == rows.end()) {
    throw InputError(where, Quoted(word), name + " before " + rows.back().before,
                     "no later row of `shardwright list stacks` names it");
  }
  return *found;
}

}  // namespace shardwright
