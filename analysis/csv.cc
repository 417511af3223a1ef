#include "analysis/csv.h"

#include <algorithm>

#include "core/error.h"

namespace shardwright {
namespace {

// Cuts a text into records.
class Reader {
 public:
  Reader(std::string_view text, const std::string& file) : text_(text), file_(file) {
    constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
    if (text_.starts_with(kByteOrderMark)) {
      at_ = kByteOrderMark.size();
    }
  }

  // The next record; false at the end of the text. Empty lines are no records.
  bool Next(CsvRow& row) {
    while (at_ < text_.size() && SkipLineEnd()) {
    }
    if (at_ >= text_.size()) {
      return false;
    }
    row.line = line_;
    row.fields.clear();
    while (true) {
      row.fields.push_back(text_[at_] == '"' ? Quoted() : Plain());
      if (at_ >= text_.size() || SkipLineEnd()) {
        return true;
      }
      ++at_;  // the comma
      if (at_ >= text_.size()) {
        row.fields.emplace_back();
        return true;
      }
    }
  }

  [[nodiscard]] InputError Error(std::string_view found, std::string_view expected) const {
    return {file_ + ": line " + std::to_string(line_), found, expected};
  }

 private:
  bool SkipLineEnd() {
    const std::string_view rest = text_.substr(at_);
    const std::size_t size = rest.starts_with("\r\n") ? 2 : rest.starts_with('\n') ? 1 : 0;
    line_ += size > 0 ? 1 : 0;
    at_ += size;
    return size > 0;
  }

  [[nodiscard]] bool IsAtFieldEnd() const {
    const std::string_view rest = text_.substr(at_);
    return rest.empty() || rest[0] == ',' || rest[0] == '\n' || rest.starts_with("\r\n");
  }

  std::string Plain() {
    const std::size_t begin = at_;
    while (!IsAtFieldEnd()) {
      if (text_[at_] == '"') {
        throw Error("a quote inside a field", "the whole field in quotes");
      }
      ++at_;
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string Quoted() {
    const std::int64_t first_line = line_;
    std::string field;
    ++at_;
    while (true) {
      if (at_ >= text_.size()) {
        line_ = first_line;
        throw Error("a quote that is never closed", "a closing quote");
      }
      const char c = text_[at_++];
      if (c != '"') {
        line_ += c == '\n' ? 1 : 0;
        field += c;
      } else if (at_ < text_.size() && text_[at_] == '"') {
        field += '"';
        ++at_;
      } else {
        break;
      }
    }
    if (!IsAtFieldEnd()) {
      throw Error("text behind a closing quote", "a comma or the end of the line");
    }
    return field;
  }

  std::string_view text_;
  const std::string& file_;
  std::size_t at_ = 0;
  std::int64_t line_ = 1;
};

}  // namespace

std::size_t CsvTable::Find(std::string_view column) const {
  const auto found = std::find(columns.begin(), columns.end(), column);
  return found == columns.end() ? kNoColumn : static_cast<std::size_t>(found - columns.begin());
}

void CsvTable::Require(std::span<const std::string_view> names, std::string_view table) const {
  for (const std::string_view name : names) {
    if (Find(name) == kNoColumn) {
      throw InputError(file + ": line 1", "no column " + std::string(name), table);
    }
  }
}

std::string CsvTable::Where(const CsvRow& row, std::string_view column) const {
  return file + ": line " + std::to_string(row.line) + ": " + std::string(column);
}

CsvTable ParseCsv(std::string_view text, const std::string& file) {
  CsvTable table;
  table.file = file;
  Reader reader(text, file);
  CsvRow row;
  if (!reader.Next(row)) {
    throw InputError(file, "no header", "a first line with the names of the columns");
  }
  table.columns = row.fields;
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    const std::string& name = table.columns[i];
    const std::string where = file + ": line " + std::to_string(row.line);
    if (name.empty()) {
      throw InputError(where, "no name for column " + std::to_string(i + 1), "a name");
    }
    if (table.Find(name) != i) {
      throw InputError(where, "two columns \"" + name + "\"", "different names");
    }
  }
  while (reader.Next(row)) {
    if (row.fields.size() != table.columns.size()) {
      throw InputError(file + ": line " + std::to_string(row.line),
                       std::to_string(row.fields.size()) + " fields",
                       std::to_string(table.columns.size()) + " as in the header");
    }
    table.rows.push_back(row);
  }
  return table;
}

std::string CsvField(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) {
    return std::string(text);
  }
  std::string quoted = "\"";
  for (const char c : text) {
    quoted += c;
    if (c == '"') {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace shardwright
