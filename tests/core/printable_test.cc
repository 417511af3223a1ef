#include "core/printable.h"

#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

namespace shardwright {

TEST_CASE("Printable: what controls a terminal is shown") {
  CHECK(Printable("plain, \xc3\xa9t\xc3\xa9, \xe6\xb8\xac, \xf0\x9f\x99\x82\n\ttext") ==
        "plain, \xc3\xa9t\xc3\xa9, \xe6\xb8\xac, \xf0\x9f\x99\x82\n\ttext");
  CHECK(Printable("\x1b[31m\r\b\a\x7f") == "\\u001b[31m\\u000d\\u0008\\u0007\\u007f");
  CHECK(Printable(std::string("a\0b", 3)) == "a\\u0000b");
  CHECK(Printable("\xc2\x80 \xc2\x9b \xc2\x9f \xc2\xa0") == "\\u0080 \\u009b \\u009f \xc2\xa0");
  CHECK(Printable("\xd8\x9c \xe2\x80\x8e\xe2\x80\x8f") == "\\u061c \\u200e\\u200f");
  CHECK(Printable("\xe2\x80\xaa\xe2\x80\xae\xe2\x81\xa6\xe2\x81\xa9") ==
        "\\u202a\\u202e\\u2066\\u2069");
  CHECK(Printable("\xe2\x80\xa8\xe2\x80\xa9") == "\\u2028\\u2029");
  CHECK(Printable("\xef\xbf\xbd\xef\xbf\xbe\xef\xbf\xbf") == "\xef\xbf\xbd\\ufffe\\uffff");
  CHECK(PrintableLine("two\nlines\tand \x1b") == "two\\nlines\\tand \\u001b");
}

// A terminal of eight bits takes 0x9b for the beginning of a command.
TEST_CASE("Printable: bytes that are no UTF-8 are shown") {
  CHECK(Printable("\x9b[31m") == "\\x9b[31m");
  CHECK(Printable("\xc0\x9b") == "\\xc0\\x9b");                    // longer than needed
  CHECK(Printable("\xe0\x82\x9b") == "\\xe0\\x82\\x9b");           // likewise
  CHECK(Printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // half of a pair of UTF-16
  CHECK(Printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  CHECK(Printable("\xc3") == "\\xc3");
  CHECK(Printable("\xc3(") == "\\xc3(");
  CHECK(Printable("\xff\xfe") == "\\xff\\xfe");
}

// Whatever one or two bytes come: what is printed is UTF-8 without control characters, and what had
// none stays.
TEST_CASE("Printable: all pairs of bytes") {
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const std::string text = {static_cast<char>(a), static_cast<char>(b)};
      const std::string shown = PrintableLine(text);
      REQUIRE(nlohmann::json::accept('"' + nlohmann::json(shown).dump().substr(1)));
      for (const char c : shown) {
        const auto byte = static_cast<unsigned char>(c);
        REQUIRE((byte >= 0x20 && byte != 0x7f));
      }
      REQUIRE(PrintableLine(shown) == shown);
      const bool is_ascii = a >= 0x20 && a < 0x7f && b >= 0x20 && b < 0x7f;
      REQUIRE((!is_ascii || shown == text));
    }
  }
}

TEST_CASE("Printable: a JSON document keeps its meaning") {
  const nlohmann::json json = {{"name\x1b\x7f", "\xc2\x9b\xe2\x80\xae\x7f\n\t"}};
  CHECK(nlohmann::json::parse(Printable(json.dump(2))) == json);
}

}  // namespace shardwright
