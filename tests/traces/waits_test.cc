// DeriveWaits on simulated traces that have lost what a GPU does not tell.

#include "traces/waits.h"

#include <cstddef>
#include <random>

#include <doctest/doctest.h>

#include "tests/traces/simulated_traces.h"
#include "tests/traces/tiny_program.h"
#include "traces/check.h"

namespace shardwright {
namespace {

TEST_CASE("What a span waited for follows from when the others ended") {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const testing::SimulatedTrace drawn = testing::DrawTrace(random, true);
    CAPTURE(drawn.description);
    Trace trace = drawn.trace;
    for (Span& span : trace.spans) {
      if (span.stream != Stream::kHost) {
        span.start = span.arrival;  // of the rank itself
        span.ready = span.arrival = SimTime(0);
      }
    }
    DeriveWaits(drawn.program, trace);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < trace.spans.size(); ++i) {
      wrong += trace.spans[i] == drawn.trace.spans[i] ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("What did nothing on the GPU lies where it could have begun") {
  Trace trace = testing::TinyTrace();
  Trace without = trace;
  for (Span& span : without.spans) {
    if (span.stream != Stream::kHost) {
      span.ready = span.arrival = span.start = span.end = SimTime(0);
    }
  }
  const Program program = testing::TinyProgram("layer", "layer.linear");
  DeriveWaits(program, without);
  CHECK(CheckTrace(program, without).empty());
  for (std::size_t i = 0; i < trace.spans.size(); ++i) {
    CHECK(without.spans[i].end <= trace.spans[i].end);
  }
}

}  // namespace
}  // namespace shardwright
