// Verify and Place on lowered programs of every dialect, against the brute-force order.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "schedule/place.h"
#include "schedule/plan.h"
#include "schedule/program.h"
#include "tests/schedule/check_mutants.h"
#include "tests/schedule/check_placement.h"
#include "tests/schedule/random_plan.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::LowerCase;
using testing::RandomCase;

// The next random lowered program with at most `max_ops` ops in its bodies: the brute force needs
// time and memory that grow with the square.
Program DrawProgram(std::mt19937& random, std::size_t max_ops, std::string& description) {
  for (;;) {
    const RandomCase c = DrawCase(random);
    Program program = LowerCase(c);
    if (program.init.size() + program.warmup.size() + program.step.size() <= max_ops) {
      description = c.description;
      return program;
    }
  }
}

// SHARDWRIGHT_ALL_MUTANTS=1 looks at all mutants instead of a sample: minutes instead of seconds.
std::size_t Stride() {
  return std::getenv("SHARDWRIGHT_ALL_MUTANTS") != nullptr ? 1 : 29;
}

TEST_CASE("Verify judges mutants of 200 random lowered programs as the brute force does") {
  std::mt19937 random(20260101);
  MutantCounts counts;
  std::map<std::string, int> programs;
  for (int trial = 0; trial < 200; ++trial) {
    std::string description;
    const Program program = DrawProgram(random, 200, description);
    CAPTURE(trial);
    CAPTURE(description);
    ++programs[program.dialect];
    CheckMutants(program, counts, Stride());
  }
  CHECK(programs.size() == 4);
  for (const Mutation mutation :
       {Mutation::kDeleteEdge, Mutation::kDeleteEvent, Mutation::kMoveFreeEarlier,
        Mutation::kDropPoint, Mutation::kDuplicatePoint}) {
    CAPTURE(static_cast<int>(mutation));
    CHECK(counts.illegal[mutation] > 0);
  }
  MESSAGE(counts.Text());
}

TEST_CASE("Place: whoever shares bytes is ordered, in lowered programs") {
  struct Ratios {
    int count = 0;
    double sum = 0.0;
    double worst = 0.0;
  };
  std::map<std::string, Ratios> ratios;
  std::mt19937 random(20260102);
  for (int trial = 0; trial < 200; ++trial) {
    std::string description;
    const Program program = DrawProgram(random, 500, description);
    CAPTURE(trial);
    CAPTURE(description);
    const Placement placement = CheckPlacement(program);
    const Bytes peak = PeakAllocated(program);
    if (peak >= kMiB) {  // below that the alignment of small buffers decides
      Ratios& entry = ratios[program.dialect];
      ++entry.count;
      entry.sum += Ratio(placement.device_size, peak);
      entry.worst = std::max(entry.worst, Ratio(placement.device_size, peak));
    }
  }
  for (const auto& [dialect, entry] : ratios) {
    MESSAGE(dialect, ": arena over allocated peak in ", entry.count, " programs: mean ",
            entry.sum / entry.count, ", worst ", entry.worst);
  }
}

}  // namespace
}  // namespace shardwright
