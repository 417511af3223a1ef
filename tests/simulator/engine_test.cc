// Expected values: closed forms by hand, or the reference simulator of reference_engine.h, which
// shares no code with the engines.

#include "simulator/engine.h"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "tests/simulator/random_program.h"
#include "tests/simulator/reference_engine.h"

namespace shardwright {
namespace {

EngineOptions Linear(bool periodic) {
  EngineOptions options;
  options.contention = false;
  options.periodic = periodic;
  return options;
}

EngineOptions Events() {
  EngineOptions options;
  options.contention = false;
  options.force_events = true;
  return options;
}

// Spans of init and the first step, and of later steps as far as `spans` has them, are the
// reference's.
void CheckSpans(const ReferenceResult& reference, const std::vector<Span>& spans) {
  for (const Span& span : spans) {
    const std::size_t body = span.body == BodyKind::kInit ? 0 : span.step + 1;
    const ReferenceTime& expected = reference.bodies.at(body).at(span.op.value);
    CHECK(span.issued.value == expected.issued);
    CHECK(span.start.value == expected.start);
    CHECK(span.end.value == expected.end);
  }
}

TEST_CASE("Both engines give the times of the reference simulator on random programs") {
  EngineWorkspace workspace;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {3, 2, 4, false});
    constexpr int kSteps = 9;
    const ReferenceResult reference = RunReference(random.program, random.prices, kSteps);

    std::vector<Span> spans;
    const EngineResult events =
        RunEngineWithSpans(random.program, random.prices, Events(), workspace, spans);
    CheckSpans(reference, spans);
    CHECK(events.init.value == reference.fronts[0]);
    CHECK(events.first.time.value == reference.fronts[1] - reference.fronts[0]);
    if (events.is_steady) {
      CHECK(events.steady.time.value == reference.fronts[kSteps] - reference.fronts[kSteps - 1]);
    }

    spans.clear();
    const EngineResult linear =
        RunEngineWithSpans(random.program, random.prices, Linear(false), workspace, spans);
    if (linear.steps == 2) {  // later steps may lie behind a jump in time
      CheckSpans(reference, spans);
    }
    CHECK(linear.init == events.init);
    CHECK(linear.first == events.first);
    if (linear.is_steady && events.is_steady) {
      CHECK(linear.steady.time == events.steady.time);
    }
  }
}

TEST_CASE("Skipping repeats changes no time") {
  EngineWorkspace workspace;
  int steady = 0;
  std::int64_t exact_ops = 0;
  std::int64_t periodic_ops = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {40, 12, 6, false});
    const EngineResult exact = RunEngine(random.program, random.prices, Linear(false), workspace);
    const EngineResult periodic = RunEngine(random.program, random.prices, Linear(true), workspace);
    CHECK(periodic.init == exact.init);
    CHECK(periodic.first == exact.first);
    CHECK(periodic.is_steady == exact.is_steady);
    CHECK(periodic.steady == exact.steady);
    steady += exact.is_steady ? 1 : 0;
    exact_ops += exact.simulated_ops;
    periodic_ops += periodic.simulated_ops;
  }
  CHECK(steady >= 950);
  CHECK(periodic_ops * 3 < exact_ops);  // otherwise this test would show little
}

TEST_CASE("Skipping repeats in the event loop changes no time, with and without contention") {
  EngineWorkspace workspace;
  std::int64_t exact_ops = 0;
  std::int64_t periodic_ops = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {40, 12, 6, seed % 4 != 0});
    EngineOptions options;
    options.contention = seed % 4 != 0;
    options.force_events = true;
    EngineResult periodic = RunEngine(random.program, random.prices, options, workspace);
    options.periodic = false;
    EngineResult exact = RunEngine(random.program, random.prices, options, workspace);
    if (periodic.is_steady && !exact.is_steady) {
      // It saw the steady state before the end of the last step; exact mode needs one step more,
      // and one after it.
      options.max_steps += 2;
      exact = RunEngine(random.program, random.prices, options, workspace);
    }
    exact_ops += exact.simulated_ops;
    periodic_ops += periodic.simulated_ops;
    periodic.simulated_ops = exact.simulated_ops;
    periodic.steps = exact.steps;
    CHECK(periodic == exact);
  }
  // Half of the programs have host waits or are bound by the host, and skip nothing.
  CHECK(periodic_ops * 4 < exact_ops * 3);
}

}  // namespace
}  // namespace shardwright
