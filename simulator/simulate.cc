#include "simulator/simulate.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "simulator/launch_queue.h"

namespace shardwright {
namespace {

// Where a program runs in one arena with fixed offsets (Place), what PyTorch's allocator would
// reserve for it is told for comparison only: it never ends and costs no time.
constexpr Bytes kEndless{std::int64_t{1} << 50};

struct ReservedInput {
  const Program& program;
  const PriceTable& prices;
  EngineOptions engine;
  AllocatorOptions allocator;
  DriverCosts costs;
};

bool Drains(const std::vector<HostStall>& stalls) {
  return std::any_of(stalls.begin(), stalls.end(), [](const HostStall& s) { return s.drains; });
}

// One run of the clock with the delays that a replay of the allocator found, and the replay of its
// times, which finds delays in turn.
struct Round {
  HostStalls included;
  SimTime period;
};

ReservedMemory RunRound(const ReservedInput& input, Round& round, EngineWorkspace& workspace,
                        EngineResult& timing, std::vector<Span>& spans, HostStalls& found) {
  EngineOptions options = input.engine;
  options.stalls = &round.included;
  spans.clear();
  timing = RunEngineWithSpans(input.program, input.prices, options, workspace, spans);
  round.period = timing.steady.time;
  HoldHostBack(input.program, input.prices, round.included,
               timing.is_steady ? round.period : SimTime(), spans);
  found = round.included;
  return ReplayAllocator(input.program, spans, timing.steady.time, input.allocator, input.costs,
                         found);
}

struct FoundReserved {
  ReservedMemory memory;
  std::optional<StepTimeRange> range;
};

// Rounds that agree on no step: answers with the one of median period (the lower of two).
FoundReserved RunMedian(const ReservedInput& input, std::vector<Round> rounds,
                        EngineWorkspace& workspace, EngineResult& timing,
                        std::vector<Span>& spans) {
  std::sort(rounds.begin(), rounds.end(),
            [](const Round& a, const Round& b) { return a.period < b.period; });
  FoundReserved result;
  result.range = StepTimeRange{rounds.front().period, rounds.back().period};
  HostStalls ignored;
  result.memory =
      RunRound(input, rounds[(rounds.size() - 1) / 2], workspace, timing, spans, ignored);
  return result;
}

// The allocator delays the host and the host's times decide what the allocator can reuse: both are
// run in turn until the delays stay the same. Where a host that waits for the device has no need
// to, steps in which it runs ahead until memory is used up take turns with steps in which it does
// not: the answer has the waiting of the former and their memory. Other rounds return to the delays
// of an earlier one, or come to no end: those between, or the later half, are a range.
FoundReserved FindReserved(const ReservedInput& input, EngineWorkspace& workspace,
                           EngineResult& timing, std::vector<Span>& spans) {
  constexpr std::size_t kMostRounds = 6;
  std::vector<Round> rounds(1);
  ReservedMemory reserved;
  while (true) {
    Round& round = rounds.back();
    HostStalls stalls;
    ReservedMemory found = RunRound(input, round, workspace, timing, spans, stalls);
    if (Drains(round.included.later_steps) && found.retries_steady == 0) {
      return {reserved, {}};  // steps of two kinds take turns
    }
    reserved = std::move(found);
    // In one arena nothing waits for an allocator.
    if (input.program.memory == MemoryRegime::kArena || reserved.out_of_memory ||
        stalls == round.included) {
      return {reserved, {}};
    }
    auto first = std::find_if(rounds.begin(), rounds.end(),
                              [&](const Round& r) { return r.included == stalls; });
    if (first == rounds.end() && rounds.size() == kMostRounds) {
      first = rounds.begin() + kMostRounds / 2;
    }
    if (first != rounds.end()) {
      return RunMedian(input, {first, rounds.end()}, workspace, timing, spans);
    }
    rounds.push_back({std::move(stalls), SimTime()});
  }
}

void AddReserved(const ReservedMemory& reserved, std::vector<MemorySample>& samples) {
  SW_CHECK(reserved.timeline.size() == samples.size(),
           "the allocator's replay and the memory samples cover different steps");
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].reserved = reserved.timeline[i];
  }
}

}  // namespace

Bytes OutsideBytes(const Program& program, const MemoryProfile& profile) {
  const auto communicators = std::count_if(program.groups.begin(), program.groups.end(),
                                           [](const Group& group) { return group.size > 1; });
  Bytes bytes = profile.context.value;
  if (communicators > 0) {
    bytes += profile.first_communicator.value +
             profile.next_communicator.value * static_cast<std::int64_t>(communicators - 1);
  }
  return bytes;
}

Simulator::Simulator(const Cluster& cluster, const Profile& profile)
    : cluster_(&cluster), profile_(&profile), pricer_(std::in_place, cluster, profile) {}

void Simulator::Use(const Cluster& cluster, const Profile& profile) {
  cluster_ = &cluster;
  profile_ = &profile;
  pricer_.emplace(cluster, profile);
}

SimulatedMemory Simulator::Allocated(const Program& program, const Repetitions& repetitions) {
  return {MeasureAllocated(program, repetitions, memory_), OutsideBytes(program, profile_->memory),
          std::nullopt};
}

SimulationResult Simulator::Run(const Program& program, const SimulateOptions& options) {
  pricer_->Price(program, prices_);
  SimulationResult result;
  const Repetitions repetitions = options.periodic ? FindRepetitions(program) : Repetitions();
  result.memory = Allocated(program, repetitions);
  EngineOptions engine;
  engine.contention = options.contention;
  engine.periodic = options.periodic;
  engine.repetitions = &repetitions;
  engine.max_steps = options.max_steps;
  std::vector<Span>& spans = result.trace.spans;
  if (options.reserved) {
    AllocatorOptions allocator = options.allocator;
    if (allocator.capacity.value == 0) {
      const Bytes usable = cluster_->gpu.usable_memory.value - result.memory.outside;
      allocator.capacity = std::max(usable, Bytes(1));
    }
    if (program.memory == MemoryRegime::kArena) {
      allocator.capacity = kEndless;
    }
    const DriverCosts costs{ToSimTime(profile_->host.malloc.value),
                            ToSimTime(profile_->host.free.value)};
    FoundReserved found =
        FindReserved({program, prices_, engine, allocator, costs}, engine_, result.timing, spans);
    result.memory.reserved = std::move(found.memory);
    result.unsettled = found.range;
  } else if (options.trace) {
    result.timing = RunEngineWithSpans(program, prices_, engine, engine_, spans);
    HoldHostBack(program, prices_, {},
                 result.timing.is_steady ? result.timing.steady.time : SimTime(), spans);
  } else {
    result.timing = RunEngine(program, prices_, engine, engine_);
  }
  if (options.trace) {
    AppendMemorySamples(program, spans, result.trace.memory);
    if (result.memory.reserved) {
      AddReserved(*result.memory.reserved, result.trace.memory);
    }
  } else {
    spans.clear();
  }
  result.step_time = result.timing.steady.time;
  result.first_step_time = result.timing.first.time;
  result.exposed_comm = result.timing.steady.ExposedCommunication();
  return result;
}

SimulationResult Simulate(const SimulateInput& input) {
  return Simulator(input.cluster, input.profile).Run(input.program, input.options);
}

}  // namespace shardwright
