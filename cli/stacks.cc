#include "cli/stacks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "bench/lab/stacks.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

std::vector<StackRow> ReadStacks() {
  const EmbeddedFile& file = EmbeddedStacks()[0];
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

// "5.24" is {5, 24}; nothing for other text.
std::vector<std::int64_t> NumbersOf(std::string_view version) {
  std::vector<std::int64_t> numbers;
  for (std::size_t begin = 0; begin <= version.size();) {
    const std::size_t end = std::min(version.find('.', begin), version.size());
    const auto number = IntegerIn(version.substr(begin, end - begin));
    if (!number || *number < 0) {
      return {};
    }
    numbers.push_back(*number);
    begin = end + 1;
  }
  return numbers;
}

// "2024", "2024-12" or "2024-12-31".
bool IsDate(std::string_view text) {
  constexpr std::string_view kForm = "dddd-dd-dd";
  for (std::size_t i = 0; i < std::min(text.size(), kForm.size()); ++i) {
    if (kForm[i] == '-' ? text[i] != '-' : text[i] < '0' || text[i] > '9') {
      return false;
    }
  }
  return text.size() == 4 || text.size() == 7 || text.size() == 10;
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
  if (std::any_of(BuiltinKernelSets().begin(), BuiltinKernelSets().end(), is_set)) {
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
  const std::string when = word.substr(at + 1);
  const bool has_versions = !rows.front().before_version.empty();
  const std::vector<std::int64_t> version =
      has_versions ? NumbersOf(when) : std::vector<std::int64_t>();
  const bool is_date = IsDate(when);
  if (!is_date && version.empty()) {
    throw InputError(
        where, '"' + word + '"',
        name + (has_versions ? "@ and a version such as 5.24, or a date such as 2024-12"
                             : "@ and a date such as 2024-12"));
  }
  const auto fits = [&](const StackRow& row) {
    return row.before.empty() ||
           (is_date ? when < row.before : version < NumbersOf(row.before_version));
  };
  const auto found = std::find_if(rows.begin(), rows.end(), fits);
  if (found == rows.end()) {
    throw InputError(where, '"' + word + '"', name + " before " + rows.back().before,
                     "no later row of `shardwright list stacks` names it");
  }
  return *found;
}

}  // namespace shardwright
