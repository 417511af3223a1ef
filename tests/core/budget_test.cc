#include "core/budget.h"

#include <ctime>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <sys/resource.h>

#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

template <class F>
std::string ErrorOf(F f) {
  try {
    f();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// Puts the factor back.
struct Factor {
  explicit Factor(std::int64_t factor) { SetBudgetFactor(factor); }
  ~Factor() { SetBudgetFactor(1); }
  Factor(const Factor&) = delete;
  Factor& operator=(const Factor&) = delete;
};

TEST_CASE("Budget: what passes the limit is refused, with the limit and the flag") {
  Budget rows("a.json", "rows", 1'234'567);
  rows.Take(1'234'566);
  rows.Take();
  const std::string text =
      "a.json: got more than 1,234,567 rows, expected at most 1,234,567; --budget 2 allows twice "
      "as many";
  CHECK(ErrorOf([&] { rows.Take(); }) == text);
  CHECK(ErrorOf([&] { rows.Take(); }) == text);  // still
  rows.Take(0);
  CHECK(ErrorOf([&] { Budget("b", "bytes", 5).Take(INT64_MAX); }) ==
        "b: got more than 5 bytes, expected at most 5; --budget 2 allows twice as many");
  CHECK(ErrorOf([&] {
          Budget("c", "bytes", 1000).Take(1001);
        }).starts_with("c: got more than 1,000 "));
}

TEST_CASE("Budget: the factor multiplies all limits") {
  const Factor factor(3);
  Budget rows("a", "rows", 10);
  rows.Take(30);
  CHECK(ErrorOf([&] { rows.Take(); }) ==
        "a: got more than 30 rows, expected at most 30; --budget 6 allows twice as many");
}

TEST_CASE("AvailableMemory: positive, and no more than the process may take") {
  CHECK(AvailableMemory() > 0);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  rlimit limit = before;
  limit.rlim_cur = rlim_t{1} << 40;
  if (setrlimit(RLIMIT_AS, &limit) == 0) {
    CHECK(AvailableMemory() <= std::int64_t{1} << 40);
    CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  }
}

TEST_CASE("JsonValue: more values than any document has are refused") {
  std::string text = "[";
  for (int i = 0; i < 4'000'000; ++i) {
    text += "1,";
  }
  text += "1]";
  CHECK(ErrorOf([&] { (void)JsonValue::Parse(text, "v.json"); }) ==
        "v.json: got more than 4,000,000 values, expected at most 4,000,000; --budget 2 allows "
        "twice as many");
}

// A key of 10 MB over 100,000 numbers: each number's path would be a copy of it, a terabyte in all.
TEST_CASE("Path: long names are cut") {
  const Path path = Path("f").Field(std::string(10'000'000, 'x'));
  CHECK(path.str() == "f: " + std::string(200, 'x') + "...");
  CHECK(Path("f").Field(std::string(200, 'x')).str() == "f: " + std::string(200, 'x'));
  CHECK(Path("f").Field(std::string(199, 'x') + "\u00e9\u00e9").str() ==
        "f: " + std::string(199, 'x') + "...");  // not within a character
}

// 200,000 names of 130 letters beside a word of 150: each comparison is 20,000 steps.
TEST_CASE("NearestMatch: takes no minutes, however many candidates there are") {
  std::vector<std::string> names;
  for (int i = 0; i < 200'000; ++i) {
    names.push_back(std::to_string(i) + std::string(130, 'a'));
  }
  const std::clock_t begin = std::clock();
  (void)NearestMatch(std::string(150, 'b'), names);
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 5);
  names.emplace_back("plan");
  CHECK(NearestMatch("plna", names) == "plan");  // lengths tell most of them apart
}

}  // namespace
}  // namespace shardwright
