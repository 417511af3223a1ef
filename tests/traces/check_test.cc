// CheckTrace on a trace made by hand, with each kind of fault planted, and on simulated traces.

#include "traces/check.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/traces/simulated_traces.h"
#include "tests/traces/tiny_program.h"

namespace shardwright {
namespace {

using testing::DrawTrace;
using testing::SimulatedTrace;
using testing::TinyProgram;
using testing::TinyTrace;
using Findings = std::vector<std::string>;

constexpr SimTime kMicrosecond{1'000'000};

Span& SpanOf(Trace& trace, std::uint32_t rank, std::uint32_t step, std::uint32_t op) {
  for (Span& span : trace.spans) {
    if (span.rank == Rank(rank) && span.step == step && span.body == BodyKind::kStep &&
        span.op == OpId(op)) {
      return span;
    }
  }
  FAIL("no such span");
  return trace.spans.front();
}

// What is found after a change of TinyTrace.
Findings After(const std::function<void(Trace&)>& change) {
  Trace trace = TinyTrace();
  change(trace);
  return CheckTrace(TinyProgram("layer", "layer.linear"), trace);
}

void Erase(Trace& trace, const std::function<bool(const Span&)>& is_gone) {
  std::erase_if(trace.spans, is_gone);
}

TEST_CASE("A trace that follows the execution model has no findings") {
  CHECK(After([](Trace&) {}) == Findings());
  // Later steps alone, and steps with a gap between them, are fine as well.
  CHECK(After([](Trace& t) { Erase(t, [](const Span& s) { return s.step == 0; }); }) == Findings());
  CHECK(After([](Trace& t) {
          for (Span& span : t.spans) {
            span.step *= 5;
          }
        }) == Findings());
  CHECK(CheckTrace(TinyProgram("layer", "layer.linear"), Trace()) == Findings());
}

TEST_CASE("Missing, doubled and misplaced ops are found") {
  CHECK(After([](Trace& t) {
          Erase(t,
                [](const Span& s) { return s.rank == Rank(1) && s.step == 1 && s.op == OpId(2); });
        }) == Findings{"rank 1, step 1: mb0.layer.linear.bwd is missing"});
  CHECK(After([](Trace& t) {
          const Span span = SpanOf(t, 1, 1, 5);
          t.spans.push_back(span);
        }) == Findings{"rank 1, step 1: opt.host_wait runs twice",
                       "rank 1, step 1: opt.host_wait is issued 13 us before the host is free"});
  CHECK(After([](Trace& t) { std::swap(t.spans[1], t.spans[2]); }).front() ==
        "rank 0, step 0: mb0.layer.fwd.all_gather is issued before mb0.layer.linear.fwd but stands "
        "behind it");
  CHECK(After([](Trace& t) { t.spans.back().op = OpId(6); }) ==
        Findings{"rank 1, step 1: no op has number 6"});
  CHECK(After([](Trace& t) { SpanOf(t, 0, 0, 1).stream = Stream::kCopyIn; }) ==
        Findings{"rank 0, step 0: mb0.layer.linear.fwd runs on stream copy_in and not on compute"});
}

TEST_CASE("Ranks and steps that do not fit together are found") {
  CHECK(After([](Trace& t) {
          Erase(t, [](const Span& s) { return s.rank == Rank(1) && s.step == 1; });
        }) == Findings{"rank 1: other steps are recorded than on rank 0"});
  CHECK(After([](Trace& t) {
          Erase(t, [](const Span& s) { return s.step == 0 && s.body == BodyKind::kStep; });
        }) == Findings{"rank 0: init is recorded, but not the first step",
                       "rank 1: init is recorded, but not the first step"});
  CHECK(After([](Trace& t) {
          for (Span& span : t.spans) {
            if (span.body == BodyKind::kInit && span.rank == Rank(0)) {
              span.step = 1;
            }
          }
        }).front() == "rank 0, step 1: has a body that does not run in this step");
}

TEST_CASE("An op before its edge, also one carried from the step before, is found") {
  CHECK(After([](Trace& t) {
          // Its own stream is free since 4 us.
          SpanOf(t, 0, 0, 1).arrival = SpanOf(t, 0, 0, 1).start = kMicrosecond * 14;
        }) == Findings{"rank 0, step 0: mb0.layer.linear.fwd starts 1 us before "
                       "mb0.layer.fwd.all_gather ends, which it waits for"});
  // The gather of step 1 starts at 32 us.
  CHECK(After([](Trace& t) { SpanOf(t, 0, 0, 4).end = kMicrosecond * 33; }) ==
        Findings{"rank 0, step 0: opt.host_wait starts 5 us before opt.optimizer_step ends, which "
                 "it waits for",
                 "rank 0, step 1: mb0.layer.fwd.all_gather starts 1 us before opt.optimizer_step "
                 "ends, which it waits for from the body before"});
}

TEST_CASE("Overlap on a stream, and of the host, is found") {
  CHECK(After([](Trace& t) {
          Span& backward = SpanOf(t, 0, 0, 2);
          backward.arrival = backward.start = kMicrosecond * 17 + SimTime(500'000);
        }) == Findings{"rank 0, step 0: mb0.layer.linear.bwd starts 500 ns before "
                       "mb0.layer.linear.fwd ends, which is before it on stream compute"});
  CHECK(After([](Trace& t) { SpanOf(t, 1, 0, 3).issue_begin -= SimTime(2000); }) ==
        Findings{"rank 1, step 0: mb0.layer.bwd.reduce_scatter is issued 2 ns before the host is "
                 "free"});
  CHECK(After([](Trace& t) {
          // Init is not over before the first step's compute: streams are queues across bodies.
          t.spans[0].end = kMicrosecond * 16;
        }) == Findings{"rank 0, step 0: mb0.layer.linear.fwd starts 1 us before "
                       "layer.init.initialize ends, which is before it on stream compute"});
}

TEST_CASE("Collectives of one communicator that overlap are found, though on two streams") {
  CHECK(After([](Trace& t) {
          for (const std::uint32_t rank : {0U, 1U}) {
            // The gather now lasts until 24 us, and the ops between are squeezed in behind it.
            Span& gather = SpanOf(t, rank, 0, 0);
            gather.end = kMicrosecond * 24;
            for (const std::uint32_t op : {1U, 2U}) {
              Span& span = SpanOf(t, rank, 0, op);
              span.arrival = span.start = span.end = kMicrosecond * 24;
            }
            SpanOf(t, rank, 0, 3).arrival = SpanOf(t, rank, 0, 3).start = kMicrosecond * 23;
          }
        }) == Findings{"rank 0, step 0: mb0.layer.bwd.reduce_scatter starts 1 us before "
                       "mb0.layer.linear.bwd ends, which it waits for",
                       "rank 0, step 0: mb0.layer.bwd.reduce_scatter starts 1 us before "
                       "mb0.layer.fwd.all_gather ends, which is before it in group shard",
                       "rank 1, step 0: mb0.layer.bwd.reduce_scatter starts 1 us before "
                       "mb0.layer.linear.bwd ends, which it waits for",
                       "rank 1, step 0: mb0.layer.bwd.reduce_scatter starts 1 us before "
                       "mb0.layer.fwd.all_gather ends, which is before it in group shard"});
}

TEST_CASE("A collective that is over on one rank before another takes part is found") {
  CHECK(After([](Trace& t) {
          Span& gather = SpanOf(t, 1, 0, 0);
          gather.start = gather.arrival = kMicrosecond * 11;
          gather.end = SimTime(11'999'000);
        }) == Findings{"rank 0, step 0: mb0.layer.fwd.all_gather starts 1 ns after it ends on rank "
                       "1"});
}

TEST_CASE("Times of one span that contradict each other are found") {
  const std::string head = "rank 0, step 1: mb0.layer.linear.fwd ";
  const auto set = [&](SimTime Span::*member, std::int64_t microseconds) {
    return After([&](Trace& t) { SpanOf(t, 0, 1, 1).*member = kMicrosecond * microseconds; });
  };
  CHECK(set(&Span::issued, 30) == Findings{head + "is issued before the host begins to issue it"});
  CHECK(set(&Span::issued, 33) == Findings{head + "is issued after the host has issued all of it"});
  CHECK(set(&Span::arrival, 36) == Findings{head + "starts before it could"});
  CHECK(set(&Span::end, 34) == Findings{head + "ends before it starts"});
  CHECK(After([](Trace& t) {
          Span& wait = SpanOf(t, 0, 1, 5);
          wait.issued = wait.issue_end = wait.end = kMicrosecond * 49;
        }) == Findings{"rank 0, step 1: opt.host_wait starts before it is issued"});
  CHECK(After([](Trace& t) {
          for (std::uint32_t op = 1; op < 6; ++op) {  // the host is late, the device is not
            Span& span = SpanOf(t, 0, 1, op);
            span.issue_begin = op == 1 ? span.issue_begin : kMicrosecond * 39;
            span.issued = op == 1 ? span.issued : kMicrosecond * 39;
            span.issue_end = kMicrosecond * 39;
            if (op > 1) {
              span.arrival = span.start = std::max(span.start, kMicrosecond * 39);
            }
          }
        }) == Findings{head + "ends before the host has issued all of it"});
}

TEST_CASE("No more than kMostFindings are reported") {
  const Findings findings = After([](Trace& t) {
    for (Span& span : t.spans) {
      span.arrival = span.end + SimTime(1);
    }
  });
  CHECK(findings.size() == kMostFindings);
}

TEST_CASE("Simulated traces of random plans have no findings") {
  const unsigned seed = 20;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 150; ++trial) {
    const SimulatedTrace simulated = DrawTrace(random, trial % 3 == 0);
    CAPTURE(trial);
    CAPTURE(simulated.description);
    const Findings findings = CheckTrace(simulated.program, simulated.trace);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front()));
  }
}

}  // namespace
}  // namespace shardwright
