#include "cli/sweep_axes.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "cli/exit_codes.h"

namespace shardwright {
namespace {

using Counts = std::vector<std::int64_t>;

TEST_CASE("ReadCounts: lists, doubling and steps") {
  const auto read = [](const std::string& text) { return ReadCounts({"--nodes", text}, 4096); };
  CHECK(read("3") == Counts{3});
  CHECK(read("4,1,4") == Counts{4, 1, 4});
  CHECK(read("1..8") == Counts{1, 2, 4, 8});
  CHECK(read("3..20") == Counts{3, 6, 12});
  CHECK(read("8..32:8") == Counts{8, 16, 24, 32});
  CHECK(read("1,4..9:3") == Counts{1, 4, 7});
  for (const std::string bad : {"", ",", "1,", "0", "x", "1..", "..4", "4..1", "1..4:0", "1..4:",
                                "1..5000", "1..2..3", "1:2", "1..4096:1", "99999999999999999999"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS((void)read(bad), UsageError);
  }
  CHECK_THROWS_WITH(
      (void)read("4..1"),
      "--nodes: got \"4..1\", expected a range from the smaller to the larger number");
}

TEST_CASE("ReadFactors, ReadLevelFactors") {
  CHECK(ReadFactors({"-f", "0.5,1,2e1"}) == std::vector<double>{0.5, 1, 20});
  for (const std::string bad : {"0", "-1", "nan", "inf", "1001", "1,,2", "1x", "."}) {
    CAPTURE(bad);
    CHECK_THROWS_AS((void)ReadFactors({"-f", bad}), UsageError);
  }
  CHECK(ReadLevelFactors({"-f", "2"}).first == "network");
  const auto [level, factors] = ReadLevelFactors({"-f", "pod:0.25,4"});
  CHECK(level == "pod");
  CHECK(factors == std::vector<double>{0.25, 4});
}

}  // namespace
}  // namespace shardwright
