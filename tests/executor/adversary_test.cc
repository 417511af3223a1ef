// Random legal delays on random plans: nothing may change. The expected bits are those of the same
// plan without delays. SHARDWRIGHT_DEEP: 1,000 runs, and missing edges found by chance, too.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
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

// A wrong order is found by the trace's check or by other bits, or ends the run: the data that an
// op reads too early may be no label, for example.
bool IsFound(const Setup& setup, const Program& program, const Program& legal,
             const Outcome& expected) {
  try {
    const Outcome outcome = TrainProgram(setup, program, legal);
    return !outcome.findings.empty() || outcome.weights != expected.weights ||
           outcome.losses != expected.losses;
  } catch (const RunError&) {
    return true;
  }
}

bool IsFoundByChance(Setup setup, const Program& program, const Program& legal,
                     const Outcome& expected) {
  setup.host.delay_percent = 30;
  setup.host.max_delay = std::chrono::microseconds(1000);
  for (setup.host.delay_seed = 1; setup.host.delay_seed <= 500; ++setup.host.delay_seed) {
    if (IsFound(setup, program, legal, expected)) {
      return true;
    }
  }
  return false;
}

// The ops that `legal` has edges from and `program` has not, in each body, with this duration.
DurationTable SlowSources(const Program& legal, const Program& program, SimTime duration) {
  DurationTable table = {std::vector<SimTime>(legal.init.size()),
                         std::vector<SimTime>(legal.warmup.size()),
                         std::vector<SimTime>(legal.step.size())};
  const std::array<const Body*, 3> with = {&legal.init, &legal.warmup, &legal.step};
  const std::array<const Body*, 3> without = {&program.init, &program.warmup, &program.step};
  const std::array<std::vector<SimTime>*, 3> durations = {&table.init, &table.warmup, &table.step};
  for (std::size_t b = 0; b < with.size(); ++b) {
    for (std::uint32_t op = 0; op < with[b]->size(); ++op) {
      const auto left = without[b]->EdgesOf(OpId(op));
      for (const Edge edge : with[b]->EdgesOf(OpId(op))) {
        if (std::find(left.begin(), left.end(), edge) != left.end()) {
          continue;
        }
        if (!edge.is_carried()) {
          (*durations[b])[edge.value] = duration;
          continue;
        }
        for (std::size_t from = 0; from < with.size(); ++from) {  // whichever body ran before
          const auto& carries = with[from]->carries;
          if (edge.slot() < carries.size() && carries[edge.slot()].valid()) {
            (*durations[from])[carries[edge.slot()].value] = duration;
          }
        }
      }
    }
  }
  return table;
}

bool IsFoundByWaiting(Setup setup, const Program& program, const Program& legal,
                      const Outcome& expected) {
  for (const std::int64_t ms : {2, 20, 200, 2000}) {
    setup.run.durations = SlowSources(legal, program, SimTime(ms * 1'000'000'000));
    if (IsFound(setup, program, legal, expected)) {
      return true;
    }
  }
  return false;
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
//
// The op at the start of the edge is made to last: nothing orders the op at its end behind it any
// more, which therefore starts before the first one is over, and the trace shows it. Should this
// machine be too busy to run it by then, the first one lasts longer. The deep run also finds every
// edge with nothing but random delays.
TEST_CASE("Adversary: every planted missing edge is found" * doctest::skip(kHasThreadSanitizer)) {
  for (const Dialect dialect :
       {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 2);
    setup.steps = 2;
    const Program legal = LowerSetup(setup);
    const Outcome expected = Train(setup);
    int planted = 0;
    ForEachMutant(legal, [&](const Mutant& mutant) {
      // Edges within init are apart: what they order is over before a step begins.
      if (mutant.mutation != Mutation::kDeleteEdge || mutant.what.starts_with("init") ||
          Verify(mutant.program).empty()) {
        return;
      }
      ++planted;
      CAPTURE(std::string(NameOf(dialect)));
      CHECK_MESSAGE(IsFoundByWaiting(setup, mutant.program, legal, expected), mutant.what);
      if (IsDeep()) {
        CHECK_MESSAGE(IsFoundByChance(setup, mutant.program, legal, expected), mutant.what);
      }
    });
    MESSAGE(std::string(NameOf(dialect)) << ": " << planted << " missing edges");
    CHECK(planted >= 1);
  }
}

}  // namespace shardwright::testing
