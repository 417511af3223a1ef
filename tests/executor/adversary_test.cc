// Random legal delays on random plans: nothing may change. The expected bits are those of the same
// plan without delays. SHARDWRIGHT_DEEP: 1,000 runs, and every edge that may be planted.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/verify.h"
#include "tests/executor/harness.h"
#include "tests/executor/random_tiny.h"
#include "tests/executor/tiny_training.h"
#include "tests/sanitizers.h"
#include "tests/schedule/mutate.h"

namespace shardwright::testing {
namespace {

bool IsDeep() {
  return std::getenv("SHARDWRIGHT_DEEP") != nullptr;
}

// A wrong order is found by the trace's check or by other bits.
bool Differs(const Outcome& outcome, const Outcome& expected) {
  return !outcome.findings.empty() || outcome.weights != expected.weights ||
         outcome.losses != expected.losses;
}

}  // namespace

TEST_CASE("Adversary: random delays on random plans change no bit") {
  const int plans = IsDeep() ? 100 : 5;
  const int runs_per_plan = IsDeep() ? 10 : 4;
  std::mt19937 random(20261121);
  for (int p = 0; p < plans; ++p) {
    Setup setup = RandomTinySetup(random);
    const Outcome expected = Train(setup);
    CHECK(expected.findings == std::vector<std::string>{});
    for (int r = 0; r < runs_per_plan; ++r) {
      setup.host.delay_percent = 10 + static_cast<int>(random() % 60);
      setup.host.max_delay = std::chrono::microseconds(20 + random() % 500);
      setup.host.delay_seed = random();
      const Outcome outcome = Train(setup);
      CAPTURE(p);
      CAPTURE(std::string(NameOf(setup.plan.dialect)));
      CAPTURE(setup.host.delay_seed);
      CHECK(outcome.weights == expected.weights);
      CHECK(outcome.losses == expected.losses);
      CHECK(outcome.replicas_agree == expected.replicas_agree);
      CHECK(outcome.findings == std::vector<std::string>{});
    }
  }
}

// Missing edges are races, which ThreadSanitizer would report, and rightly.
TEST_CASE("Adversary: every planted missing edge is found" * doctest::skip(kHasThreadSanitizer)) {
  const int every = IsDeep() ? 1 : 9;
  for (const Dialect dialect :
       {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 2);
    setup.steps = 2;
    const Program legal = LowerSetup(setup);
    const Outcome expected = Train(setup);
    setup.host.delay_percent = 30;
    setup.host.max_delay = std::chrono::microseconds(1000);
    int planted = 0, found_count = 0, index = 0;
    std::uint64_t runs = 0;
    ForEachMutant(legal, [&](const Mutant& mutant) {
      // Edges within init are apart: what they order is over before a step begins.
      if (mutant.mutation != Mutation::kDeleteEdge || mutant.what.starts_with("init") ||
          Verify(mutant.program).empty() || index++ % every != 0) {
        return;
      }
      ++planted;
      bool found = false;
      for (std::uint64_t seed = 1; seed <= 500 && !found; ++seed, ++runs) {
        setup.host.delay_seed = seed;
        found = Differs(TrainProgram(setup, mutant.program, legal), expected);
      }
      found_count += found ? 1 : 0;
      CHECK_MESSAGE(found, mutant.what);
    });
    MESSAGE(std::string(NameOf(dialect)) << ": " << found_count << " of " << planted
                                         << " missing edges found in " << runs << " runs");
    CHECK(planted >= 1);
  }
}

}  // namespace shardwright::testing
