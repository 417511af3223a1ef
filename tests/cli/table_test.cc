#include "cli/table.h"

#include <cstdint>
#include <string>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

using enum Table::Align;

TEST_CASE("WithCommas: groups of three") {
  CHECK(WithCommas(0) == "0");
  CHECK(WithCommas(999) == "999");
  CHECK(WithCommas(1000) == "1,000");
  CHECK(WithCommas(-1000) == "-1,000");
  CHECK(WithCommas(-999) == "-999");
  CHECK(WithCommas(8030261248) == "8,030,261,248");
  CHECK(WithCommas(INT64_MIN) == "-9,223,372,036,854,775,808");
}

TEST_CASE("Table: columns as wide as their longest cell, no blanks at line ends") {
  Table table({kLeft, kRight, kLeft});
  table.Row({"a", "1", "x"});
  table.Row({"long", "1000", ""});
  CHECK(table.Text() == "a        1  x\nlong  1000\n");
  CHECK(table.Text(2) == "  a        1  x\n  long  1000\n");
  CHECK(Percent(0.4264) == "42.6 %");
}

TEST_CASE("Wrapped: broken at spaces, words stay whole") {
  CHECK(Wrapped("ab cd ef\nx\n", 5, 1) == "ab cd\n ef\nx\n");
  CHECK(Wrapped("abcdefgh ij", 5, 2) == "abcdefgh ij\n");
  Table table({kLeft, kLeft});
  table.Row({"name", std::string(70, 'a') + " " + std::string(60, 'b')});
  CHECK(table.WrappedText(2) ==
        "  name  " + std::string(70, 'a') + "\n        " + std::string(60, 'b') + "\n");
}

}  // namespace
}  // namespace shardwright
