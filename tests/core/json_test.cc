#include "core/json.h"

#include <cstdint>
#include <functional>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

// The text of the InputError that `action` throws.
std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

std::string ParseError(const std::string& text) {
  return ErrorOf([&] { (void)JsonValue::Parse(text, "f.json"); });
}

JsonValue Parse(const std::string& text) {
  return JsonValue::Parse(text, "f.json");
}

TEST_CASE("Json: values of every type") {
  const JsonValue v =
      Parse(R"({"a": [1, -2, 2.5, "x", true, null], "n": {"deep": "80 GiB"}, "z": null})");
  REQUIRE(v.IsObject());
  CHECK(v.Keys() == std::vector<std::string>{"a", "n", "z"});
  const JsonValue a = v.At("a");
  REQUIRE(a.size() == 6);
  CHECK(a[0].AsInt() == 1);
  CHECK(a[1].AsInt(-5, 5) == -2);
  CHECK(a[2].AsDouble() == 2.5);
  CHECK(a[3].AsString() == "x");
  CHECK(a[4].AsBool());
  CHECK(a[5].IsNull());
  CHECK(v.At("n").At("deep").AsBytes() == Bytes(std::int64_t{80} << 30));
  CHECK(v.At("n").At("deep").path().str() == "f.json: n.deep");
  CHECK(a[3].path().str() == "f.json: a[3]");
  CHECK_FALSE(v.Find("z").has_value());
  CHECK_FALSE(v.Find("absent").has_value());
  CHECK(v.Find("a").has_value());
  CHECK(v.At("z").IsNull());
}

TEST_CASE("Json: a value outlives its document") {
  const JsonValue inner = Parse(R"({"a": {"b": "kept"}})").At("a").At("b");
  CHECK(inner.AsString() == "kept");
}

TEST_CASE("Json: integers may be written as whole floats, but only where doubles are exact") {
  CHECK(Parse("1e9").AsInt() == 1000000000);
  CHECK(Parse("4096.0").AsInt() == 4096);
  CHECK(Parse("1125899906842624").AsInt() == JsonValue::kMaxCount);
  CHECK(ErrorOf([] { (void)Parse("2.5").AsInt(); }) ==
        "f.json: got 2.5, expected an integer from 0 to 1125899906842624");
  CHECK(ErrorOf([] { (void)Parse("1e30").AsInt(); }) ==
        "f.json: got 1e+30, expected an integer from 0 to 1125899906842624");
  CHECK(ErrorOf([] { (void)Parse("1125899906842625").AsInt(); }) ==
        "f.json: got 1125899906842625, expected an integer from 0 to 1125899906842624");
  CHECK(ErrorOf([] { (void)Parse("18446744073709551615").AsInt(); }) ==
        "f.json: got 18446744073709551615, expected an integer from 0 to 1125899906842624");
  CHECK(ErrorOf([] { (void)Parse("-1").AsInt(1, 8); }) ==
        "f.json: got -1, expected an integer from 1 to 8");
  CHECK(ErrorOf([] { (void)Parse("7").AsInt(-8, -1); }) ==
        "f.json: got 7, expected an integer from -8 to -1");
}

TEST_CASE("Json: a thousand-digit number is refused, not wrapped") {
  CHECK(ErrorOf([] { (void)Parse("1" + std::string(30, '0')).AsInt(); }) ==
        "f.json: got 1e+30, expected an integer from 0 to 1125899906842624");
  CHECK(ParseError("1e999") == "f.json:1:5: got number overflow parsing '1e999', expected JSON");
}

TEST_CASE("Json: truncated and malformed text names line and column") {
  CHECK(ParseError("") == "f.json:1:1: got end of input, expected '[', '{', or a literal");
  CHECK(ParseError("{\n  \"a\": [1, 2") == "f.json:2:13: got end of input, expected ']'");
  CHECK(ParseError("{\n  \"a\": ") ==
        "f.json:2:8: got end of input, expected '[', '{', or a literal");
  CHECK(ParseError("{\"a\" 1}") == "f.json:1:6: got number literal, expected ':'");
  CHECK(ParseError("{\"a\": 1}\n}") == "f.json:2:1: got '}', expected end of input");
  CHECK(ParseError("[1,]") == "f.json:1:4: got ']', expected '[', '{', or a literal");
  CHECK(ParseError("{\"a\": tru}") == "f.json:1:10: got invalid literal, expected JSON");
  CHECK(ParseError("[\"abc") ==
        "f.json:1:6: got invalid string: missing closing quote, expected JSON");
  CHECK(ParseError("[NaN]") == "f.json:1:2: got invalid literal, expected JSON");
}

TEST_CASE("Json: every prefix of a document is refused") {
  const std::string text = R"({"name": "x", "list": [1, 2.5e3, true], "o": {"k": null}})";
  for (std::size_t length = 0; length < text.size(); ++length) {
    CAPTURE(length);
    CHECK(ParseError(text.substr(0, length)) != "no error");
  }
  CHECK(ParseError(text) == "no error");
}

// The position is that of the key's closing quote.
TEST_CASE("Json: a key may stand once in an object") {
  CHECK(ParseError("{\"a\": 1,\n \"b\": {\"c\": 1, \"c\": 2}}") ==
        "f.json:2:18: got the key \"c\" a second time, expected each key once in an object");
  CHECK(ParseError(R"([{"c": 1}, {"c": 2}])") == "no error");
  CHECK(ParseError(R"({"c": {"c": {"c": 1}}})") == "no error");
}

TEST_CASE("Json: nesting is limited to 200") {
  CHECK(ParseError(std::string(200, '[') + std::string(200, ']')) == "no error");
  CHECK(ParseError(std::string(201, '[') + std::string(201, ']')) ==
        "f.json:1:201: got a value nested deeper than 200 levels, expected at most 200");
  // A hostile file must not exhaust the stack.
  CHECK(ParseError(std::string(2000000, '[')) ==
        "f.json:1:201: got a value nested deeper than 200 levels, expected at most 200");
}

TEST_CASE("Json: unknown, missing and mistyped fields") {
  const JsonValue v = Parse(R"({"links": [{"bandwith": "1 GB/s"}], "rate": 400})");
  const JsonValue link = v.At("links")[0];
  CHECK(ErrorOf([&] {
          link.AllowOnly({"bandwidth", "latency"});
        }) ==
        "f.json: links[0]: got unknown key \"bandwith\", expected one of \"bandwidth\", "
        "\"latency\"; did you mean \"bandwidth\"?");
  CHECK(ErrorOf([&] { (void)link.At("latency"); }) ==
        "f.json: links[0]: got no key \"latency\", expected one");
  CHECK(ErrorOf([&] { (void)link.At("bandwidth"); }) ==
        "f.json: links[0]: got no key \"bandwidth\", expected one; did you mean \"bandwith\"?");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsBytesPerSecond(); }) ==
        "f.json: rate: got 400, expected a rate such as \"50 GB/s\" or \"400 Gbit/s\"");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsBytes(); }) ==
        "f.json: rate: got 400, expected a size such as \"80 GiB\" or \"512 MB\"");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsSeconds(); }) ==
        "f.json: rate: got 400, expected a time such as \"5 us\" or \"1.5 ms\"");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsFlopsPerSecond(); }) ==
        "f.json: rate: got 400, expected a rate such as \"989 TFLOP/s\"");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsString(); }) ==
        "f.json: rate: got 400, expected a string");
  CHECK(ErrorOf([&] { (void)v.At("rate").AsBool(); }) ==
        "f.json: rate: got 400, expected true or false");
  CHECK(ErrorOf([&] { (void)v.At("rate").size(); }) == "f.json: rate: got 400, expected an array");
  CHECK(ErrorOf([&] { (void)v.At("rate").At("x"); }) ==
        "f.json: rate: got 400, expected an object");
  CHECK(ErrorOf([&] { (void)v.At("links").AsDouble(); }) ==
        "f.json: links: got [{\"bandwith\":\"1 GB/s\"}], expected a number");
}

TEST_CASE("Json: choices") {
  CHECK(Parse("\"b\"").AsChoice({"a", "b"}) == 1);
  CHECK(ErrorOf([] {
          (void)Parse("\"falsh\"").AsChoice({"flash", "materialised"});
        }) ==
        "f.json: got \"falsh\", expected one of \"flash\", \"materialised\"; did you mean "
        "\"flash\"?");
  CHECK(ErrorOf([] { (void)Parse("3").AsChoice({"a"}); }) == "f.json: got 3, expected \"a\"");
}

TEST_CASE("Json: a long value is cut between characters") {
  // 30 two-byte characters and two quotes are 62 bytes; the cut at 57 would split the 29th.
  std::string long_text = "\"";
  for (int i = 0; i < 30; ++i) {
    long_text += "\xc3\xa9";
  }
  const std::string shown = Parse(long_text + '"').Shown();
  CHECK(shown == long_text.substr(0, 57) + "...");
  CHECK(Parse("\"" + std::string(58, 'x') + "\"").Shown().size() == 60);
}

TEST_CASE("Json: files that cannot be read") {
  const testing::ScratchFolder folder;
  CHECK(ErrorOf([] { (void)JsonValue::ReadFile("no/such.json"); }) ==
        "no/such.json: got no such file, expected a file");
  CHECK(ErrorOf([&] { (void)JsonValue::ReadFile(folder.path()); }) ==
        folder.path() + ": got a folder, expected a file");
  const std::string file = folder.Write("a.json", "{\"a\": 1}");
  CHECK(JsonValue::ReadFile(file).At("a").AsInt() == 1);
  CHECK(ErrorOf([&] { (void)ReadTextFile(file, 4); }) ==
        file + ": got more than 4 bytes, expected at most 4; --budget 2 allows twice as many");
}

}  // namespace
}  // namespace shardwright
