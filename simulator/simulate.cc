#include "simulator/simulate.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "schedule/plan.h"

namespace shardwright {
namespace {

// Native programs run in one arena with fixed offsets (Place). What PyTorch's allocator would
// reserve for them is told for comparison only: it never ends and costs no time.
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

// The allocator delays the host and the host's times decide what the allocator can reuse: both are
// run in turn until the delays stay the same. Where a host that waits for the device has no need
// to, steps in which it runs ahead until memory is used up take turns with steps in which it does
// not: the answer has the waiting of the former and their memory.
ReservedMemory FindReserved(const ReservedInput& input, EngineWorkspace& workspace,
                            EngineResult& timing, std::vector<Span>& spans) {
  constexpr int kMostRounds = 6;
  HostStalls stalls;
  ReservedMemory reserved;
  for (int round = 0; round < kMostRounds; ++round) {
    const HostStalls included = stalls;
    EngineOptions options = input.engine;
    options.stalls = &included;
    spans.clear();
    timing = RunEngineWithSpans(input.program, input.prices, options, workspace, spans);
    ReservedMemory found = ReplayAllocator(input.program, spans, timing.steady.time,
                                           input.allocator, input.costs, stalls);
    if (Drains(included.later_steps) && found.retries_steady == 0) {
      break;  // steps of two kinds take turns
    }
    reserved = std::move(found);
    if (input.program.dialect == NameOf(Dialect::kNative)) {
      break;  // runs in one arena: nothing waits for an allocator
    }
    if (stalls == included || reserved.out_of_memory) {
      break;
    }
  }
  return reserved;
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
    : cluster_(cluster), profile_(profile), pricer_(cluster, profile) {}

SimulationResult Simulator::Run(const Program& program, const SimulateOptions& options) {
  pricer_.Price(program, prices_);
  SimulationResult result;
  result.memory.allocated = MeasureAllocated(program, options.periodic, memory_);
  result.memory.outside = OutsideBytes(program, profile_.memory);
  EngineOptions engine;
  engine.contention = options.contention;
  engine.periodic = options.periodic;
  engine.max_steps = options.max_steps;
  std::vector<Span>& spans = result.trace.spans;
  if (options.reserved) {
    AllocatorOptions allocator = options.allocator;
    if (allocator.capacity.value == 0) {
      const Bytes usable = cluster_.gpu.usable_memory.value - result.memory.outside;
      allocator.capacity = std::max(usable, Bytes(1));
    }
    if (program.dialect == NameOf(Dialect::kNative)) {
      allocator.capacity = kEndless;
    }
    const DriverCosts costs{ToSimTime(profile_.host.malloc.value),
                            ToSimTime(profile_.host.free.value)};
    result.memory.reserved =
        FindReserved({program, prices_, engine, allocator, costs}, engine_, result.timing, spans);
  } else if (options.trace) {
    result.timing = RunEngineWithSpans(program, prices_, engine, engine_, spans);
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
