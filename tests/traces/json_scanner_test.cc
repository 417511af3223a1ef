#include "traces/internal/json_scanner.h"

#include <cstdint>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "tests/traces/temporary_file.h"

namespace shardwright {
namespace {

using internal::JsonScanner;
using Json = nlohmann::json;

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::size_t Draw(std::size_t n) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::size_t>(state_ >> 33) % n;
  }

 private:
  std::uint64_t state_;
};

Json TakeValue(JsonScanner& scanner) {
  switch (scanner.Peek()) {
    case JsonScanner::Kind::kObject: {
      Json object = Json::object();
      scanner.EnterObject();
      while (const auto key = scanner.NextKey()) {
        const std::string name(*key);
        object[name] = TakeValue(scanner);
      }
      return object;
    }
    case JsonScanner::Kind::kArray: {
      Json array = Json::array();
      scanner.EnterArray();
      while (scanner.NextElement()) {
        array.push_back(TakeValue(scanner));
      }
      return array;
    }
    case JsonScanner::Kind::kString:
      return std::string(scanner.Text().value());
    case JsonScanner::Kind::kNumber:
    case JsonScanner::Kind::kWord:
      // Words, -Infinity too, are no text.
      if (const auto text = scanner.Text()) {
        return std::stoll(std::string(*text));
      }
      return nullptr;
  }
  return nullptr;
}

Json Scan(const std::string& text) {
  const testing::TemporaryFile file(text);
  JsonScanner scanner(file.name());
  Json value = TakeValue(scanner);
  scanner.End();
  return value;
}

// "read", or what is wrong.
std::string ErrorOf(const std::string& text, bool skip = false) {
  const testing::TemporaryFile file(text);
  try {
    JsonScanner scanner(file.name());
    skip ? scanner.Skip() : void(TakeValue(scanner));
    scanner.End();
  } catch (const InputError& error) {
    return std::string(error.what()).substr(file.name().size());
  }
  return "read";
}

std::string RandomString(Random& random) {
  static const std::vector<std::string> kPieces = {"a",      "quite a long name of a kernel",
                                                   "\"",     "\\",
                                                   "\n",     "\t",
                                                   "\x01",   "\u00e9",
                                                   "\u20ac", "\U0001f600",
                                                   "/",      ""};
  std::string text;
  for (std::size_t i = random.Draw(5); i > 0; --i) {
    text += kPieces[random.Draw(kPieces.size())];
  }
  return text;
}

Json RandomValue(Random& random, std::size_t depth) {
  switch (random.Draw(depth < 5 ? 6 : 3)) {
    case 0:
      return RandomString(random);
    case 1:
      return static_cast<std::int64_t>(random.Draw(1'000'000)) - 500'000;
    case 2:
      return nullptr;
    case 3: {
      Json array = Json::array();
      for (std::size_t i = random.Draw(5); i > 0; --i) {
        array.push_back(RandomValue(random, depth + 1));
      }
      return array;
    }
    default: {
      Json object = Json::object();
      for (std::size_t i = random.Draw(5); i > 0; --i) {
        object[RandomString(random)] = RandomValue(random, depth + 1);
      }
      return object;
    }
  }
}

TEST_CASE("Scanner: random documents are what nlohmann's library wrote") {
  Random random(7);
  for (int i = 0; i < 200; ++i) {
    const Json value = RandomValue(random, 0);
    const bool ascii = random.Draw(2) == 0;  // as \uXXXX and pairs of them
    const std::string text = value.dump(random.Draw(3) == 0 ? 2 : -1, ' ', ascii);
    CAPTURE(text);
    CHECK(Scan(text) == value);
    CHECK(ErrorOf(text, true) == "read");
  }
}

TEST_CASE("Scanner: tokens may lie across the border of two pieces") {
  const std::string document =
      R"({"a long key \"x\"" : [12345678, "text\u20acmore", null, {}], "b":0})";
  const Json value = Json::parse(document);
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  for (std::size_t before = 0; before <= document.size() + 2; ++before) {
    const std::string text = std::string(kPiece - before, ' ') + document;
    CAPTURE(before);
    CHECK(Scan(text) == value);
    CHECK(ErrorOf(text, true) == "read");
  }
}

TEST_CASE("Scanner: the rest of an object can be left") {
  const testing::TemporaryFile file(R"([{"a":1,"b":{"c":[{}]},"d":"}"},{"a":2},{"a":3}  ])");
  JsonScanner scanner(file.name());
  REQUIRE(scanner.Peek() == JsonScanner::Kind::kArray);
  scanner.EnterArray();
  std::string seen;
  while (scanner.NextElement()) {
    REQUIRE(scanner.Peek() == JsonScanner::Kind::kObject);
    scanner.EnterObject();
    REQUIRE(scanner.NextKey() == "a");
    seen += scanner.Text().value();
    scanner.LeaveObject();
  }
  scanner.End();
  CHECK(seen == "123");
}

TEST_CASE("Scanner: broken JSON is refused with the place") {
  const auto broken = [](int byte, const std::string& what) {
    return ": got broken JSON at byte " + std::to_string(byte) + ": " + what +
           ", expected a whole trace";
  };
  CHECK(ErrorOf("") == broken(0, "the end of the file"));
  CHECK(ErrorOf("{\"a\" 1}") == broken(5, "an unexpected 1"));
  CHECK(ErrorOf("{\"a\":1,}") == broken(7, "an unexpected }"));
  CHECK(ErrorOf("{a:1}") == broken(1, "an unexpected a"));
  CHECK(ErrorOf("[1 2]") == broken(3, "an unexpected 2"));
  CHECK(ErrorOf("[1") == broken(2, "the end of the file"));
  CHECK(ErrorOf("[1]]") == broken(3, "an unexpected ]"));
  CHECK(ErrorOf("[tru]") == broken(1, "an unexpected t"));
  CHECK(ErrorOf("[\"a]") == broken(4, "a string without an end"));
  CHECK(ErrorOf("[\"a\nb\"]") == broken(3, "an unexpected byte 10"));
  CHECK(ErrorOf(std::string("[1,\0]", 5)) == broken(3, "an unexpected byte 0"));
  CHECK(ErrorOf(R"(["\x"])") == broken(5, "an unknown escape before here"));
  CHECK(ErrorOf(R"(["\u12"])") == broken(7, "an unknown escape before here"));
  for (const bool skip : {false, true}) {
    CHECK(ErrorOf("[{]}", skip) == broken(2, "an unexpected ]"));
    CHECK(ErrorOf("[[1]", skip) == broken(4, "the end of the file"));
    CHECK(ErrorOf("[;]", skip) == broken(1, "an unexpected ;"));
    CHECK(ErrorOf("[NaN,-Infinity,true]", skip) == "read");
  }
  // Half of a pair of surrogates is no character.
  CHECK(Scan(R"(["\ud83d!"])") == Json::array({"\uFFFD!"}));
}

}  // namespace
}  // namespace shardwright
