#include "core/ranges.h"

#include <array>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include "core/units.h"

namespace shardwright {
namespace {

struct Unit {
  std::string name;
  std::int64_t elements = 0;
  bool is_root = false;

  [[nodiscard]] Bytes Size() const { return Bytes(2 * elements); }
};

const std::vector<Unit> kUnits = {{"root", 5, true}, {"a", 7}, {"b", 5}, {"a", 1}};

TEST_CASE("the first entry of a value is found, by itself or by a member") {
  CHECK(FindIn(kUnits, "a", &Unit::name) - kUnits.begin() == 1);
  CHECK(FindIn(kUnits, "c", &Unit::name) == kUnits.end());
  constexpr std::array<int, 3> kNumbers = {4, 2, 2};
  CHECK(FindIn(kNumbers, 2) - kNumbers.begin() == 1);
  CHECK(FindIf(kNumbers, [](int n) { return n > 4; }) == kNumbers.end());
}

TEST_CASE("predicates over all entries, and over none") {
  CHECK(IsIn(kUnits, Bytes(14), &Unit::Size));
  CHECK_FALSE(IsIn(kUnits, Bytes(12), &Unit::Size));
  CHECK(AnyOf(kUnits, &Unit::is_root));
  CHECK_FALSE(AllOf(kUnits, &Unit::is_root));
  CHECK_FALSE(NoneOf(kUnits, &Unit::is_root));
  CHECK(CountIf(kUnits, &Unit::is_root) == 1);
  CHECK(CountOf(kUnits, 5, &Unit::elements) == 2);
  const std::vector<Unit> none;
  CHECK_FALSE(AnyOf(none, &Unit::is_root));
  CHECK(AllOf(none, &Unit::is_root));
  CHECK(NoneOf(none, &Unit::is_root));
}

TEST_CASE("sorting by a member keeps the order of equals where it is stable") {
  std::vector<Unit> units = kUnits;
  StableSortBy(units, &Unit::elements);
  CHECK(Mapped<std::string>(units, &Unit::name) == std::vector<std::string>{"a", "root", "b", "a"});
  StableSortBy(units, &Unit::name, std::greater<>());
  CHECK(Mapped<std::int64_t>(units, &Unit::elements) == std::vector<std::int64_t>{5, 5, 1, 7});
  std::vector<int> numbers = {3, 1, 2};
  SortAll(numbers);
  CHECK(numbers == std::vector<int>{1, 2, 3});
  SortBy(numbers, [](int n) { return n % 3; });
  CHECK(numbers == std::vector<int>{3, 1, 2});
}

TEST_CASE("sums begin at 0 and run from the first entry on") {
  CHECK(Summed<std::int64_t>(kUnits, &Unit::elements) == 18);
  CHECK(Summed<Bytes>(kUnits, &Unit::Size) == Bytes(36));
  CHECK(Summed<double>(std::vector<double>{1e16, 1, -1e16}) == 0);  // 1e16 + 1 rounds to 1e16
  CHECK(Summed<Bytes>(std::vector<Bytes>{}) == Bytes(0));
  const std::map<std::string, int> counts = {{"x", 2}, {"y", 3}};
  CHECK(Summed<int>(counts, [](const auto& row) { return row.second; }) == 5);
}

}  // namespace
}  // namespace shardwright
