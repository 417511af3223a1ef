#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "analysis/csv.h"

namespace shardwright {

// The fields of one row of a table whose columns are known to be there. Refers to both.
struct CsvFields {
  const CsvTable& table;
  const CsvRow& row;

  [[nodiscard]] const std::string& Text(std::string_view column) const;
  // 0 for an empty field. Throws InputError with the line for anything but a positive number.
  [[nodiscard]] double Positive(std::string_view column) const;
  // The same for whole numbers up to 10^15.
  [[nodiscard]] std::int64_t Count(std::string_view column) const;
};

}  // namespace shardwright
