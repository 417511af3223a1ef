// What can go wrong on the host device, and what its options do: faults, time-outs, memory limits,
// emulated durations, adversarial scheduling.

#include <atomic>
#include <chrono>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/host/device.h"
#include "executor/host/fault.h"
#include "schedule/place.h"
#include "schedule/verify.h"
#include "tests/executor/harness.h"
#include "tests/executor/tiny_training.h"
#include "tests/sanitizers.h"
#include "tests/schedule/mutate.h"
#include "tests/simulator/all_ranks.h"

namespace shardwright::testing {
namespace {

std::string ErrorOf(const Setup& setup) {
  try {
    (void)Train(setup);
  } catch (const RunError& error) {
    return error.what();
  }
  return "no error";
}

// Is this the call of rank 1 of the given layer? The tiny network's rank shows in its samples.
bool IsRankOne(const ModelOpCall& call, std::int64_t micro_batch) {
  return call.dropout.first_sample == micro_batch;
}

// A millisecond for every op of the compute stream, nothing for the others.
std::vector<SimTime> ComputeDurations(const Program& program, const Body& body) {
  constexpr SimTime kMillisecond(1'000'000'000);
  std::vector<SimTime> durations;
  for (const Op& op : body.ops) {
    const OpShape& shape = program.ShapeOf(op);
    const bool computes = shape.stream == Stream::kCompute && !InfoOf(shape.code).runs_on_host;
    durations.push_back(computes ? kMillisecond : SimTime(0));
  }
  return durations;
}

}  // namespace

TEST_CASE("FaultBoard: the first cause is kept, and told to a watcher of before or after") {
  FaultBoard board;
  std::vector<std::string> heard;
  const auto hear = [&](const std::string& cause) { heard.push_back(cause); };
  board.OnReport(hear);
  CHECK(heard.empty());
  board.ThrowIfFailed();
  board.Report("first");
  board.Report("second");
  CHECK(heard == std::vector<std::string>{"first"});
  board.OnReport(hear);
  CHECK(heard == std::vector<std::string>{"first", "first"});
  CHECK_THROWS_WITH_AS(board.ThrowIfFailed(), "first", RunError);
  CHECK_FALSE(board.is_environment());
}

TEST_CASE("FaultBoard: what the machine does not give stays its failure") {
  FaultBoard of_machine, of_run;
  of_machine.Report("op x: ", EnvironmentError("no thread"));
  of_machine.Report("second");
  CHECK(of_machine.is_environment());
  CHECK_THROWS_WITH_AS(of_machine.ThrowIfFailed(), "op x: no thread", EnvironmentError);
  of_run.Report("op x: ", std::runtime_error("on fire"));
  of_run.Report("second", true);
  CHECK_FALSE(of_run.is_environment());
  CHECK_THROWS_WITH_AS(of_run.ThrowIfFailed(), "op x: on fire", RunError);
}

TEST_CASE("HostDevice: a kernel without thread or memory fails by the machine, not by the run") {
  for (const bool is_memory : {false, true}) {
    Setup setup = TinySetup(Dialect::kFsdp2, 3);
    setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
      if (IsRankOne(call, 2) && is_backward && call.spec->in == 9) {
        if (is_memory) {
          throw std::bad_alloc();
        }
        throw EnvironmentError("cannot start a thread");
      }
      ReferenceKernel(call, is_backward);
    };
    CHECK_THROWS_AS(ErrorOf(setup), EnvironmentError);
  }
}

TEST_CASE("HostDevice: a kernel that throws ends the run on all ranks, named") {
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 3);
    std::atomic<int> calls = 0;
    setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
      if (IsRankOne(call, 2) && is_backward && call.spec->in == 9 && ++calls == 4) {
        throw std::runtime_error("the kernel is on fire");
      }
      ReferenceKernel(call, is_backward);
    };
    // block2's, block1's and block0's down projections of the first step, then block2's again.
    CHECK(ErrorOf(setup) == "rank 1, op mb0.block2.down.bwd: the kernel is on fire");
  }
}

TEST_CASE("HostDevice: a data source that throws ends the run") {
  Setup setup = TinySetup(Dialect::kFsdp2, 2);
  setup.run.inputs = [](const BatchKey& key, std::span<const View> tensors) {
    if (key.step == 1 && key.first_sample == 2) {
      throw InputError("data.bin: the file is torn");
    }
    FillTinyBatch(key, tensors);
  };
  CHECK(ErrorOf(setup) == "rank 1: data.bin: the file is torn");
}

TEST_CASE("HostDevice: a rank that stalls is named after the time-out") {
  Setup setup = TinySetup(Dialect::kFsdp2, 3);
  setup.host.timeout = std::chrono::milliseconds(2000);
  std::atomic<bool> once = false;
  setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
    if (IsRankOne(call, 2) && call.spec->in == 9 && !once.exchange(true)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(6000));
    }
    ReferenceKernel(call, is_backward);
  };
  const std::string error = ErrorOf(setup);
  // Which of the others notices first, and in which gather, depends on their speed.
  CAPTURE(error);
  CHECK(error.find(": waited 2000 ms for rank 1") != std::string::npos);
  CHECK(error.find("rank 1, op") == std::string::npos);
}

// Nobody waits for a single rank, so it watches itself.
TEST_CASE("HostDevice: an op that does not end is named") {
  Setup setup = TinySetup(Dialect::kNative, 1);
  setup.host.timeout = std::chrono::milliseconds(1000);
  std::atomic<bool> once = false;
  setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
    if (is_backward && call.spec->in == 9 && !once.exchange(true)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5000));
    }
    ReferenceKernel(call, is_backward);
  };
  CHECK(ErrorOf(setup) ==
        "rank 0, op mb0.block2.down.bwd: not over after 2000 ms, twice the time-out");
}

TEST_CASE("HostDevice: a plan that does not fit the memory limit") {
  Setup setup = TinySetup(Dialect::kNative, 2);
  const Program program = LowerSetup(setup);
  const Bytes needed = Place(program).device_size;
  setup.host.memory_limit = needed;
  CHECK(ErrorOf(setup) == "no error");
  setup.host.memory_limit = needed - Bytes(1);
  CHECK(ErrorOf(setup) == "rank 0: out of memory: the plan needs " + std::to_string(needed.value) +
                              " bytes of device memory, the limit is " +
                              std::to_string(needed.value - 1));
}

TEST_CASE("HostDevice: an adversary's delays change nothing") {
  for (const Dialect dialect :
       {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 3);
    setup.plan.accumulation = 2;
    const Outcome expected = Train(setup);
    setup.host.delay_percent = 30;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      setup.host.delay_seed = seed;
      const Outcome outcome = Train(setup);
      CHECK(outcome.weights == expected.weights);
      CHECK(outcome.findings == std::vector<std::string>{});
    }
  }
}

// ThreadSanitizer would report the planted races, and rightly.
TEST_CASE("HostDevice: an adversary finds every planted missing edge" *
          doctest::skip(kHasThreadSanitizer)) {
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 2);
    setup.steps = 2;
    setup.host.delay_percent = 30;
    setup.host.max_delay = std::chrono::microseconds(1000);
    const Program legal = LowerSetup(setup);
    int planted = 0, index = 0;
    ForEachMutant(legal, [&](const Mutant& mutant) {
      // A sample of them keeps the test short; deletions in init show in nothing but the first
      // step.
      if (mutant.mutation != Mutation::kDeleteEdge || mutant.what.starts_with("init") ||
          ++index % 4 != 0 || Verify(mutant.program).empty()) {
        return;
      }
      ++planted;
      bool found = false;
      for (std::uint64_t seed = 1; seed <= 200 && !found; ++seed) {
        setup.host.delay_seed = seed;
        found = !TrainProgram(setup, mutant.program, legal).findings.empty();
      }
      CHECK_MESSAGE(found, mutant.what);
    });
    CHECK(planted >= 3);
  }
}

// The simulator and the host device are given the same durations. Nothing can be faster than the
// simulator says; by how much a run is slower depends on the machine (durations_test.cc, deep).
TEST_CASE("HostDevice: emulated durations are never undercut") {
  std::mt19937 random(5);
  for (const Dialect dialect :
       {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup setup = TinySetup(dialect, 2);
    const Program program = LowerSetup(setup);
    PriceTable prices;
    prices.prices.resize(program.shapes.size());
    for (Price& price : prices.prices) {
      constexpr std::int64_t kMillisecond = 1'000'000'000;  // ps
      price.duration = SimTime((1 + random() % 4) * kMillisecond);
    }
    for (std::size_t s = 0; s < program.shapes.size(); ++s) {
      const OpCode code = program.shapes[s].code;
      if (code == OpCode::kStreamWait || code == OpCode::kHostWait) {
        prices.prices[s] = Price();
      }
    }
    const auto durations = [&](const Body& body) {
      std::vector<SimTime> of_ops;
      for (const Op& op : body.ops) {
        of_ops.push_back(prices.prices[op.shape.value].duration);
      }
      return of_ops;
    };
    setup.run.durations = {durations(program.init), durations(program.warmup),
                           durations(program.step)};
    AllRanksOptions options;
    options.contention = false;
    options.steps = 3;
    const std::vector<RankProgram> ranks(2, RankProgram{&program, &prices, 1.0});
    const AllRanksResult simulated = RunAllRanks(ranks, options);
    std::int64_t expected = 0;
    for (const SimTime step : simulated.step_times) {
      expected += step.value;
    }
    const Outcome outcome = Train(setup);
    std::int64_t begin = 0, end = 0;
    for (const Span& span : outcome.trace.spans) {
      std::int64_t& of_body = span.body == BodyKind::kInit ? begin : end;
      of_body = std::max(of_body, span.end.value);
    }
    CAPTURE(std::string(NameOf(dialect)));
    CHECK(end - begin >= expected);
    CHECK(outcome.findings == std::vector<std::string>{});
  }
}

// Where the host waits inside a step it notices the end of a step only a step later, and those of
// the last two at once.
TEST_CASE("HostDevice: a step ends with its last op, whenever the host notices") {
  struct Case {
    std::string name;
    Dialect dialect;
    std::function<void(Plan& plan)> change;
    bool host_updates = false;  // so that a step begins when the one before is over
  };
  const std::vector<Case> cases = {
      {"offloaded parameters", Dialect::kFsdp2, [](Plan& plan) { plan.offload.parameters = true; },
       true},
      {"offloaded optimizer", Dialect::kNative, [](Plan& plan) { plan.offload.optimizer = true; },
       true},
      {"rate limiter", Dialect::kFsdp1, [](Plan&) {}},
      {"event limit", Dialect::kZero3, [](Plan&) {}},
      {"no wait", Dialect::kFsdp2, [](Plan&) {}},
  };
  for (const Case& of : cases) {
    CAPTURE(of.name);
    Setup setup = TinySetup(of.dialect, 2);
    of.change(setup.plan);
    setup.steps = 4;
    const Program program = LowerSetup(setup);
    setup.run.durations.step = ComputeDurations(program, program.step);
    const Outcome outcome = Train(setup);
    REQUIRE(outcome.ends.size() == 4);
    CHECK(outcome.ends == LastEnds(outcome.trace));
    SimTime least;
    for (const SimTime duration : setup.run.durations.step) {
      least += duration;
    }
    for (std::size_t step = 1; of.host_updates && step < outcome.ends.size(); ++step) {
      CAPTURE(step);
      CHECK(outcome.ends[step] - outcome.ends[step - 1] >= least);
    }
  }
}

TEST_CASE("A span says what its thread computed, and sleeping is no computing") {
  Setup setup = TinySetup(Dialect::kFsdp2, 2);
  const Program program = LowerSetup(setup);
  constexpr SimTime kLong{20'000'000'000};  // 20 ms, far more than the tiny network takes
  for (const Op& op : program.step.ops) {
    const bool is_collective = InfoOf(program.ShapeOf(op).code).is_collective;
    setup.run.durations.step.push_back(is_collective ? kLong : SimTime(0));
  }
  const Outcome outcome = Train(setup);
  int computed = 0;
  for (const Span& span : outcome.trace.spans) {
    if (span.body != BodyKind::kStep || span.stream == Stream::kHost) {
      continue;
    }
    const OpCode code = program.ShapeOf(program.step.ops[span.op.value]).code;
    CAPTURE(InfoOf(code).name);
    if (InfoOf(code).is_collective) {
      CHECK(span.end - span.start >= kLong);
      CHECK(span.cpu.value < kLong.value / 2);
    } else if (code == OpCode::kCompute) {
      CHECK(span.cpu > SimTime(0));
      ++computed;
    }
  }
  CHECK(computed > 0);
}

}  // namespace shardwright::testing
