#include "analysis/csv_fields.h"

#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace shardwright {

const std::string& CsvFields::Text(std::string_view column) const {
  return row.fields[table.Find(column)];
}

double CsvFields::Positive(std::string_view column) const {
  const std::string& text = Text(column);
  if (text.empty()) {
    return 0;
  }
  const std::optional<double> value = NumberIn(text);
  if (!value || !(*value > 0) || !std::isfinite(*value)) {
    throw InputError(table.Where(row, column), Quoted(text), "a positive number or nothing");
  }
  return *value;
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
