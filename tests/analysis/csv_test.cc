#include "analysis/csv.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& text) {
  try {
    (void)ParseCsv(text, "t.csv");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

// The examples of RFC 4180, section 2.
TEST_CASE("Csv: quoted fields keep commas, quotes and line breaks") {
  const CsvTable table =
      ParseCsv("a,b,c\r\n\"1,5\",\"say \"\"x\"\"\",\"two\r\nlines\"\r\n,,\r\n", "t.csv");
  CHECK(table.columns == std::vector<std::string>{"a", "b", "c"});
  REQUIRE(table.rows.size() == 2);
  CHECK(table.rows[0].fields == std::vector<std::string>{"1,5", "say \"x\"", "two\r\nlines"});
  CHECK(table.rows[1].fields == std::vector<std::string>{"", "", ""});
  CHECK(table.rows[0].line == 2);
  CHECK(table.rows[1].line == 4);  // the second record began on line 2 and took two lines
}

TEST_CASE("Csv: byte order mark, LF, empty lines and a missing last line end") {
  const CsvTable table = ParseCsv("\xEF\xBB\xBFx,y\n\n1,2\n\n3,", "t.csv");
  CHECK(table.columns == std::vector<std::string>{"x", "y"});
  REQUIRE(table.rows.size() == 2);
  CHECK(table.rows[1].fields == std::vector<std::string>{"3", ""});
  CHECK(table.Find("y") == 1);
  CHECK(table.Find("z") == CsvTable::kNoColumn);
  CHECK(table.Where(table.rows[1], "y") == "t.csv: line 5: y");
}

TEST_CASE("Csv: errors name the line") {
  CHECK(ErrorOf("") == "t.csv: got no header, expected a first line with the names of the columns");
  CHECK(ErrorOf("a,a\n") == "t.csv: line 1: got two columns \"a\", expected different names");
  CHECK(ErrorOf("a,\n") == "t.csv: line 1: got no name for column 2, expected a name");
  CHECK(ErrorOf("a,b\n1\n") == "t.csv: line 2: got 1 fields, expected 2 as in the header");
  CHECK(ErrorOf("a\n\"1\n2") ==
        "t.csv: line 2: got a quote that is never closed, expected a closing quote");
  CHECK(ErrorOf("a\n\"1\"2\n") ==
        "t.csv: line 2: got text behind a closing quote, expected a comma or the end of the line");
  CHECK(ErrorOf("a\n1\"2\n") ==
        "t.csv: line 2: got a quote inside a field, expected the whole field in quotes");
}

TEST_CASE("Csv: a written field reads back") {
  for (const std::string text : {"plain", "a,b", "say \"x\"", "two\nlines", ""}) {
    const CsvTable table = ParseCsv("h,i\n" + CsvField(text) + ",1\n", "t.csv");
    CHECK(table.rows[0].fields[0] == text);
  }
}

}  // namespace
}  // namespace shardwright
