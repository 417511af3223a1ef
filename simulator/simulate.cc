// One step of a program in time and memory: prices, the clock, and the caching allocator, which
// delay each other.
//
// Example without reserved memory: price each shape once, measure the allocated bytes without a
// clock, and run steps until two are alike. With reserved memory the times decide which blocks the
// allocator can reuse, and the allocator's calls to the driver delay the host. Rounds look for an
// answer to both:
//
//   round 1   no delays; the replay finds a retry in each step, which stalls the host for 30 ms
//   round 2   steps with these 30 ms; the replay now finds one of 25 ms
//   round 3   steps with 25 ms; the replay finds 25 ms again: the answer
//
// If the delays return to an earlier round's, or six rounds agree on none, the answer is the round
// of median step time, and `unsettled` holds the fastest and the slowest. Programs in one arena
// (native) wait for no allocator: one round.

#include "simulator/simulate.h"

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
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
  bool steady_only = false;
  bool needs_spans = false;
};

bool Drains(const std::vector<HostStall>& stalls) {
  return AnyOf(stalls, &HostStall::drains);
}

// One run of the clock with the delays that a replay of the allocator found, and the replay of its
// times, which finds delays in turn.
struct Round {
  HostStalls included;
  SimTime period;
  EngineResult timing;
  ReservedMemory memory;
};

void RunClock(const ReservedInput& input, Round& round, EngineWorkspace& workspace,
              std::vector<Span>& spans) {
  EngineOptions options = input.engine;
  options.stalls = &round.included;
  spans.clear();
  round.timing = RunEngineWithSpans(input.program, input.prices, options, workspace, spans);
  round.period = round.timing.steady.time;
  HoldHostBack(input.program, input.prices, round.included,
               round.timing.is_steady ? round.period : SimTime(), spans);
}

// Returns the delays that the replay of this round's times finds.
HostStalls RunRound(const ReservedInput& input, Round& round, EngineWorkspace& workspace,
                    std::vector<Span>& spans) {
  RunClock(input, round, workspace, spans);
  HostStalls found = round.included;
  round.memory = ReplayAllocator(input.program, spans, round.period, input.allocator, input.costs,
                                 found, input.steady_only);
  return found;
}

struct FoundReserved {
  ReservedMemory memory;
  std::optional<StepTimeRange> range;
};

// Rounds that agree on no step: answers with the one of median period (the lower of two).
FoundReserved TakeMedian(const ReservedInput& input, std::vector<Round> rounds,
                         EngineWorkspace& workspace, EngineResult& timing,
                         std::vector<Span>& spans) {
  SortBy(rounds, &Round::period);
  Round& median = rounds[(rounds.size() - 1) / 2];
  if (input.needs_spans) {
    RunClock(input, median, workspace, spans);
  }
  timing = median.timing;
  return {std::move(median.memory), StepTimeRange{rounds.front().period, rounds.back().period}};
}

// The allocator delays the host, and the host's times decide what the allocator can reuse. Both are
// run in turn until the delays stay the same. A host that waits for the device has no need to run
// ahead. So steps in which it runs ahead until memory is used up may take turns with steps in which
// it does not; the answer then has the waiting of the former and their memory. Other rounds return
// to the delays of an earlier one, or come to no end: the rounds between, or the later half, are a
// range.
FoundReserved FindReserved(const ReservedInput& input, EngineWorkspace& workspace,
                           EngineResult& timing, std::vector<Span>& spans) {
  constexpr std::size_t kMostRounds = 6;
  std::vector<Round> rounds(1);
  while (true) {
    Round& round = rounds.back();
    HostStalls stalls = RunRound(input, round, workspace, spans);
    timing = round.timing;
    if (Drains(round.included.later_steps) && round.memory.retries_steady == 0) {
      return {std::move(rounds[rounds.size() - 2].memory), {}};  // steps of two kinds take turns
    }
    // In one arena nothing waits for an allocator.
    if (input.program.memory == MemoryRegime::kArena || round.memory.out_of_memory ||
        stalls == round.included) {
      return {std::move(round.memory), {}};
    }
    auto first = FindIn(rounds, stalls, &Round::included);
    if (first == rounds.end() && rounds.size() == kMostRounds) {
      first = rounds.begin() + kMostRounds / 2;
    }
    if (first != rounds.end()) {
      rounds.erase(rounds.begin(), first);
      return TakeMedian(input, std::move(rounds), workspace, timing, spans);
    }
    Round next;
    next.included = std::move(stalls);
    rounds.push_back(std::move(next));
  }
}

// Replays the allocator without times, for a program whose frees wait for no other stream. The
// order of the host's calls alone decides then. `waits` says whether steady steps make the host
// wait.
ReservedMemory ReplayUntimed(const ReservedInput& input, std::vector<Span>& spans, bool& waits) {
  spans.clear();
  const auto append = [&](const Body& body, BodyKind kind, std::uint32_t step) {
    for (std::uint32_t op = 0; op < body.ops.size(); ++op) {
      Span span;
      span.body = kind;
      span.step = step;
      span.op = OpId(op);
      spans.push_back(span);
    }
  };
  const Program& program = input.program;
  append(program.init, BodyKind::kInit, 0);
  const bool has_warmup = !program.warmup.ops.empty();
  append(has_warmup ? program.warmup : program.step,
         has_warmup ? BodyKind::kWarmup : BodyKind::kStep, 0);
  append(program.step, BodyKind::kStep, 1);
  HostStalls stalls;
  ReservedMemory memory = ReplayAllocator(program, spans, SimTime(), input.allocator, input.costs,
                                          stalls, /*until_full=*/true);
  waits = !stalls.later_steps.empty() || memory.retries_steady > 0;
  spans.clear();
  return memory;
}

void AddReserved(const ReservedMemory& reserved, std::vector<MemorySample>& samples) {
  SW_CHECK(reserved.timeline.size() == samples.size(),
           "the allocator's replay and the memory samples cover different steps");
  for (std::size_t i = 0; i < samples.size(); ++i) {
    samples[i].reserved = reserved.timeline[i];
  }
}

}  // namespace

bool RecordsStreams(const Program& program) {
  const std::vector<MemoryPoint>& points = program.step.points;
  return AnyOf(points, [](const MemoryPoint& point) { return point.recorded_streams != 0; });
}

Bytes OutsideBytes(const Program& program, const MemoryProfile& profile) {
  const auto communicators =
      CountIf(program.groups, [](const Group& group) { return group.size > 1; });
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

SimulatedMemory Simulator::Allocated(const Program& program) {
  return {MeasureAllocated(program, memory_), OutsideBytes(program, profile_->memory),
          std::nullopt};
}

AllocatorOptions AllocatorOptionsOf(const AllocatorSettings& settings, Bytes capacity) {
  AllocatorOptions options;
  options.capacity = capacity;
  options.expandable_segments = settings.expandable_segments;
  if (settings.max_split_size > Bytes(0)) {
    options.max_split_size = settings.max_split_size;
  }
  options.gc_threshold = settings.garbage_collection_threshold;
  return options;
}

SimulationResult Simulator::Run(const Program& program, const SimulateOptions& options) {
  pricer_->Price(program, prices_);
  SimulationResult result;
  result.memory = Allocated(program);
  EngineOptions engine;
  engine.contention = options.contention;
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
    const bool needs_spans = options.trace || options.spans;
    const ReservedInput input{program,    prices_, engine, allocator, costs, options.steady_only,
                              needs_spans};
    if (options.steady_only && !needs_spans && !RecordsStreams(program) &&
        program.memory != MemoryRegime::kArena) {
      bool waits = false;
      ReservedMemory memory = ReplayUntimed(input, spans, waits);
      if (!waits && !memory.out_of_memory) {
        result.timing = RunEngine(program, prices_, engine, engine_);
      }
      if (memory.out_of_memory || result.timing.is_steady) {
        result.memory.reserved = std::move(memory);
      }
    }
    if (!result.memory.reserved) {
      FoundReserved found = FindReserved(input, engine_, result.timing, spans);
      result.memory.reserved = std::move(found.memory);
      result.unsettled = found.range;
    }
  } else if (options.trace || options.spans) {
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
  } else if (!options.spans) {
    spans.clear();
  }
  result.step_time = result.timing.steady.time;
  result.first_step_time = result.timing.first.time;
  result.exposed_comm = result.timing.steady.ExposedCommunication();
  return result;
}

SimulationResult Simulate(const Program& program, const Cluster& cluster, const Profile& profile,
                          const SimulateOptions& options) {
  return Simulator(cluster, profile).Run(program, options);
}

}  // namespace shardwright
