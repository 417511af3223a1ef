#pragma once

// Tables in RFC 4180 form: comma separated, fields with commas, quotes or line breaks in double
// quotes. Lines end in CRLF or LF.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

struct CsvRow {
  std::int64_t line = 0;            // where the record starts, counted from 1
  std::vector<std::string> fields;  // as many as the header has
};

struct CsvTable {
  std::string file;                  // names the table in errors
  std::vector<std::string> columns;  // the header; names are unique
  std::vector<CsvRow> rows;

  static constexpr std::size_t kNoColumn = static_cast<std::size_t>(-1);
  // Index of the column with this name, or kNoColumn. O(columns).
  [[nodiscard]] std::size_t Find(std::string_view column) const;
  // Throws InputError for a column that is not there; `table` is what the file should be.
  void Require(std::span<const std::string_view> names, std::string_view table) const;
  // "<file>: line 7: <column>", the place of a field in errors.
  [[nodiscard]] std::string Where(const CsvRow& row, std::string_view column) const;
};

// Reads a table. A byte order mark and empty lines are skipped. Throws InputError with the line for
// an empty file, an unfinished quote, text behind a closing quote, a quote inside an unquoted
// field, a record with more or fewer fields than the header, and empty or double column names.
[[nodiscard]] CsvTable ParseCsv(std::string_view text, const std::string& file);

// One field as it must stand in a file: quoted if it has to be.
[[nodiscard]] std::string CsvField(std::string_view text);

}  // namespace shardwright
