#include "analysis/error_statistics.h"

#include <doctest/doctest.h>

namespace shardwright {
namespace {

TEST_CASE("ErrorStatistics: worked out by hand") {
  // Sizes sorted: 0.01 0.02 0.03 0.04 0.10. Mean 0.2 / 5, median the third, p90 at position
  // 0.9 * 4 = 3.6: 0.04 + 0.6 * 0.06 = 0.076. Signed sum -0.10 + 0.02 - 0.03 + 0.04 + 0.01 = -0.06.
  const ErrorStatistics s = Summarise({-0.10, 0.02, -0.03, 0.04, 0.01});
  CHECK(s.count == 5);
  CHECK(s.mean == doctest::Approx(0.04));
  CHECK(s.median == doctest::Approx(0.03));
  CHECK(s.p90 == doctest::Approx(0.076));
  CHECK(s.max == doctest::Approx(0.10));
  CHECK(s.bias == doctest::Approx(-0.012));
}

TEST_CASE("ErrorStatistics: no and one error") {
  CHECK(Summarise({}) == ErrorStatistics());
  const ErrorStatistics s = Summarise({-0.5});
  CHECK(s.mean == doctest::Approx(0.5));
  CHECK(s.p90 == doctest::Approx(0.5));
  CHECK(s.bias == doctest::Approx(-0.5));
}

TEST_CASE("ErrorStatistics: the median of an even number lies between the middle two") {
  CHECK(Quantile({4, 1, 3, 2}, 0.5) == doctest::Approx(2.5));
  CHECK(Quantile({4, 1, 3, 2}, 0) == doctest::Approx(1));
  CHECK(Quantile({4, 1, 3, 2}, 1) == doctest::Approx(4));
}

}  // namespace
}  // namespace shardwright
