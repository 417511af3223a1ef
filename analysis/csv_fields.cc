#include "analysis/csv_fields.h"

#include <charconv>
#include <cmath>
#include <system_error>

#include "core/error.h"

namespace shardwright {

const std::string& CsvFields::Text(std::string_view column) const {
  return row.fields[table.Find(column)];
}

double CsvFields::Positive(std::string_view column) const {
  const std::string& text = Text(column);
  if (text.empty()) {
    return 0;
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > 0) ||
      !std::isfinite(value)) {
    throw InputError(table.Where(row, column), '"' + text + '"', "a positive number or nothing");
  }
  return value;
}

std::int64_t CsvFields::Count(std::string_view column) const {
  const double value = Positive(column);
  constexpr double kMost = 1e15;
  if (value != std::floor(value) || value > kMost) {
    throw InputError(table.Where(row, column), '"' + Text(column) + '"',
                     "a positive whole number or nothing");
  }
  return static_cast<std::int64_t>(value);
}

}  // namespace shardwright
