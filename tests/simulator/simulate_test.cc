// Whole predictions for lowered plans: properties that hold whatever the numbers are.

#include "simulator/simulate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "tests/schedule/random_plan.h"
#include "tests/simulator/round_numbers.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::DrawDeepCase;
using testing::LowerCase;
using testing::RandomCase;
using testing::RoundCluster;
using testing::RoundProfile;

// A cluster of exactly as many ranks as the plan has, with the numbers of RoundCluster.
Cluster ClusterFor(std::int64_t ranks) {
  Cluster cluster = RoundCluster(1);
  const bool is_whole = ranks % 8 == 0;
  cluster.node_count = is_whole ? ranks / 8 : 1;
  cluster.gpus_per_node = is_whole ? 8 : ranks;
  if (!is_whole && ranks > 8) {
    cluster.node_count = ranks;  // one GPU of each node
    cluster.gpus_per_node = 1;
  }
  return cluster;
}

SimulateOptions Uncontended() {
  SimulateOptions options;
  options.contention = false;
  options.reserved = false;
  return options;
}

TEST_CASE("1,000 random plans: steps are steady, and contention changes no bytes") {
  const unsigned seed = 99;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const Profile profile = RoundProfile();
  int steady = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomCase c = DrawCase(random);
    CAPTURE(trial);
    CAPTURE(c.description);
    const Program program = LowerCase(c);
    const Cluster cluster = ClusterFor(c.plan.shard_size * c.plan.replicate_size);
    Simulator simulator(cluster, profile);
    SimulateOptions options = Uncontended();
    const SimulationResult alone = simulator.Run(program, options);
    options.contention = true;
    const SimulationResult beside = simulator.Run(program, options);
    CHECK(beside.memory.allocated == alone.memory.allocated);
    CHECK(beside.timing.steady.host_issue == alone.timing.steady.host_issue);
    steady += (alone.timing.is_steady ? 1 : 0) + (beside.timing.is_steady ? 1 : 0);
  }
  CHECK(steady >= 1900);
}

Program TinyLlama(std::int64_t ranks, std::int64_t accumulation) {
  const Model model = LoadModel("data/models/tiny-llama");
  Job job;
  job.sequence_length = 2048;
  job.global_batch = ranks * accumulation;
  Plan plan;
  plan.dialect = Dialect::kFsdp2;
  plan.shard_size = ranks;
  plan.accumulation = accumulation;
  plan.units = Wrap(model, ParseWrap("block", "test"), {}, plan.dialect, "test");
  return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
}

TEST_CASE("Through gloo everything runs in turn: a step lasts as long as its ops together") {
  const Program program = TinyLlama(8, 2);
  const Cluster cluster = RoundCluster(1);
  Profile profile = RoundProfile();
  // A host that is never behind.
  for (Number<Seconds> HostProfile::*number :
       {&HostProfile::kernel_launch, &HostProfile::op_issue, &HostProfile::collective_issue,
        &HostProfile::unit_hook, &HostProfile::copy_issue, &HostProfile::wake}) {
    (profile.host.*number).value = Seconds(0);
  }
  SimulateOptions options;
  options.reserved = false;
  const SimTime beside = Simulate(program, cluster, profile, options).step_time;
  profile.overlap.gloo.value = 1;
  const SimulationResult result = Simulate(program, cluster, profile, options);
  const PriceTable prices = PriceProgram(program, cluster, profile);
  SimTime together;
  for (const Op& op : program.step.ops) {
    together += prices.prices[op.shape.value].duration;
  }
  CHECK(result.step_time == together);
  CHECK(result.step_time > beside);
  CHECK(result.exposed_comm > SimTime(0));
}

TEST_CASE("Without contention a faster part is never slower, exactly") {
  const Program program = TinyLlama(16, 2);
  const auto step = [&](const Cluster& cluster, const Profile& profile) {
    return Simulate(program, cluster, profile, Uncontended()).step_time;
  };
  SimTime before_network, before_gpu, before_memory, before_host;
  for (int i = 0; i < 12; ++i) {
    const double factor = std::pow(1.5, i - 6);
    CAPTURE(factor);
    Profile network = RoundProfile();
    for (TransportProfile& transport : network.transports) {
      transport.efficiency.value *= factor / 20;
    }
    Cluster gpu = RoundCluster(2);
    for (auto& peak : gpu.gpu.peak_flops) {
      peak->value = peak->value * factor;
    }
    Cluster memory = RoundCluster(2);
    memory.gpu.memory_bandwidth.value = memory.gpu.memory_bandwidth.value * factor;
    Profile host = RoundProfile();
    host.host.kernel_launch.value = host.host.kernel_launch.value / factor;
    const SimTime by_network = step(RoundCluster(2), network);
    const SimTime by_gpu = step(gpu, RoundProfile());
    const SimTime by_memory = step(memory, RoundProfile());
    const SimTime by_host = step(RoundCluster(2), host);
    if (i > 0) {
      CHECK(by_network <= before_network);
      CHECK(by_gpu <= before_gpu);
      CHECK(by_memory <= before_memory);
      CHECK(by_host <= before_host);
    }
    before_network = by_network;
    before_gpu = by_gpu;
    before_memory = by_memory;
    before_host = by_host;
  }
}

TEST_CASE("With contention a faster part is at most half a percent slower") {
  const Program program = TinyLlama(16, 2);
  SimulateOptions options = Uncontended();
  options.contention = true;
  SimTime before;
  for (int i = 0; i < 24; ++i) {
    Profile network = RoundProfile();
    for (TransportProfile& transport : network.transports) {
      transport.efficiency.value *= std::pow(1.25, i - 12) / 20;
    }
    const SimTime time = Simulate(program, RoundCluster(2), network, options).step_time;
    if (i > 0) {
      if (time > before) {
        MESSAGE("slower with a faster network: ", before.value, " -> ", time.value, " ps");
      }
      CHECK(static_cast<double>(time.value) <= 1.005 * static_cast<double>(before.value));
    }
    before = time;
  }
}

TEST_CASE("With an infinite network a step is compute, copies and host issue") {
  const Program program = TinyLlama(16, 1);
  Profile profile = RoundProfile();
  for (TransportProfile& transport : profile.transports) {
    transport.efficiency.value = 1e15;
    for (ProtocolProfile& protocol : transport.protocols) {
      protocol.base_latency.value = protocol.hop_latency.value = Seconds(0);
    }
  }
  const Cluster cluster = RoundCluster(2);
  // Collectives take no time at all, so these are the prices with their durations struck out.
  PriceTable prices = PriceProgram(program, cluster, profile);
  SimTime compute;  // all work of the step's ops that are not collectives
  SimTime host;
  for (const Op& op : program.step.ops) {
    Price& price = prices.prices[op.shape.value];
    if (InfoOf(program.ShapeOf(op).code).is_collective) {
      CHECK(price.duration.value <= 1);
    }
    compute += price.duration;
    host += price.issue;
  }
  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  const SimTime step = RunEngine(program, prices, options, workspace).steady.time;
  // Nothing but compute, copies and issuing is left: the step is no longer than all of them one
  // after another, and no shorter than the compute stream's or the host's part.
  SimTime compute_stream;
  for (const Op& op : program.step.ops) {
    if (program.ShapeOf(op).stream == Stream::kCompute) {
      compute_stream += prices.prices[op.shape.value].duration;
    }
  }
  CHECK(step <= compute + host);
  CHECK(step >= compute_stream);
  CHECK(step >= host);
  // Without host cost and with copies beside the compute stream struck out, exactly the compute
  // stream is left.
  for (std::size_t s = 0; s < prices.prices.size(); ++s) {
    Price& price = prices.prices[s];
    price.issue = price.first_launch = price.tail = SimTime(0);
    if (program.shapes[s].stream != Stream::kCompute) {
      price.duration = SimTime(0);
    }
  }
  prices.wake_up = SimTime(0);
  CHECK(RunEngine(program, prices, options, workspace).steady.time == compute_stream);
}

TEST_CASE("Reserved memory covers the allocated peak and its costs show in the first step") {
  const Program program = TinyLlama(16, 1);
  const Cluster cluster = RoundCluster(2);
  const Profile profile = RoundProfile();
  SimulateOptions options;
  options.contention = false;
  const SimulationResult result = Simulate(program, cluster, profile, options);
  REQUIRE(result.memory.reserved.has_value());
  const ReservedMemory& reserved = *result.memory.reserved;
  CHECK(reserved.peak_first >= result.memory.allocated.device_first.total);
  CHECK(reserved.peak_steady >= result.memory.allocated.device_steady.total);
  CHECK(reserved.retries_first == 0);
  CHECK(!reserved.out_of_memory);
  const SimulationResult without = Simulate(program, cluster, profile, Uncontended());
  CHECK(result.first_step_time > without.first_step_time);  // the driver's calls for segments
  CHECK(result.step_time == without.step_time);             // none of them later
  // 500 B context, 300 B for the first communicator; gather and reduce share it under fsdp2.
  CHECK(result.memory.outside == Bytes(800));

  // With no more than the allocated peak the allocator must retry or fail, and says so.
  options.allocator.capacity = result.memory.allocated.DevicePeak().total;
  const SimulationResult tight = Simulate(program, cluster, profile, options);
  CHECK((tight.memory.reserved->out_of_memory || tight.memory.reserved->retries_first > 0));
}

// Periods of rounds of clock and replay by their definition: each with the delays that the one
// before found. Ends at the first round whose delays an earlier one had; `first` is that one.
struct Rounds {
  std::vector<SimTime> periods;
  std::size_t first = 0;
};

Rounds RunRounds(const Program& program, const Cluster& cluster, const Profile& profile,
                 const AllocatorOptions& options, std::size_t most) {
  const PriceTable prices = PriceProgram(program, cluster, profile);
  const DriverCosts costs{ToSimTime(profile.host.malloc.value), ToSimTime(profile.host.free.value)};
  EngineWorkspace workspace;
  Rounds rounds;
  std::vector<HostStalls> had(1);
  while (rounds.periods.size() < most) {
    EngineOptions engine;
    engine.stalls = &had.back();
    std::vector<Span> spans;
    const SimTime period =
        RunEngineWithSpans(program, prices, engine, workspace, spans).steady.time;
    rounds.periods.push_back(period);
    HostStalls found = had.back();
    (void)ReplayAllocator(program, spans, period, options, costs, found);
    const auto same = std::find(had.begin(), had.end(), found);
    rounds.first = static_cast<std::size_t>(same - had.begin());
    if (same != had.end()) {
      break;
    }
    had.push_back(found);
  }
  return rounds;
}

TEST_CASE("Tight memory: steps that settle, and cycles of them, as rounds by definition") {
  const Model model = LoadModel("bert-large");
  std::mt19937 random(5);
  int cycles = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const RandomCase c = DrawDeepCase(random, model);
    CAPTURE(c.description);
    const double room = std::uniform_real_distribution<double>(1.05, 1.25)(random);
    if (c.plan.dialect == Dialect::kNative) {
      continue;
    }
    const Program program = LowerCase(c);
    const Cluster cluster = ClusterFor(c.plan.shard_size * c.plan.replicate_size);
    const Profile profile = RoundProfile();
    SimulateOptions options;
    MemoryWorkspace memory;
    const Bytes peak = MeasureAllocated(program, memory).DevicePeak().total;
    options.allocator.capacity =
        Bytes(static_cast<std::int64_t>(static_cast<double>(peak.value) * room));
    const SimulationResult result = Simulate(program, cluster, profile, options);
    if (!result.unsettled) {
      continue;
    }
    CHECK(result.unsettled->least <= result.step_time);
    CHECK(result.step_time <= result.unsettled->most);
    const Rounds rounds = RunRounds(program, cluster, profile, options.allocator, 6);
    const auto begin =
        rounds.periods.begin() +
        static_cast<std::ptrdiff_t>(rounds.first < rounds.periods.size() ? rounds.first : 3);
    CHECK(result.unsettled->least == *std::min_element(begin, rounds.periods.end()));
    CHECK(result.unsettled->most == *std::max_element(begin, rounds.periods.end()));
    ++cycles;
  }
  CHECK(cycles > 0);
}

TEST_CASE("A trace covers the first and the last step, with memory beside it") {
  const Program program = TinyLlama(16, 1);
  SimulateOptions options = Uncontended();
  options.trace = true;
  options.reserved = true;
  const SimulationResult result = Simulate(program, RoundCluster(2), RoundProfile(), options);
  CHECK(result.trace.spans.size() == program.init.size() + 2 * program.step.size());
  std::int64_t peak = 0;
  Bytes most_reserved;
  for (const MemorySample& sample : result.trace.memory) {
    std::int64_t total = 0;
    for (const Bytes bytes : sample.device) {
      total += bytes.value;
    }
    peak = std::max(peak, total);
    CHECK(sample.reserved.value >= total);  // no allocation lies outside a segment
    most_reserved = std::max(most_reserved, sample.reserved);
  }
  // Reserved never shrinks without a retry, so a sample sees its peak.
  const ReservedMemory& reserved = *result.memory.reserved;
  CHECK(most_reserved == std::max(reserved.peak_first, reserved.peak_steady));
  CHECK(peak <= result.memory.allocated.DevicePeak().total.value);
  CHECK(peak > result.memory.allocated.DevicePeak().total.value / 2);
}

TEST_CASE("Links so slow that times leave their range are refused in one line") {
  const Program program = TinyLlama(16, 1);
  Profile profile = RoundProfile();
  for (TransportProfile& transport : profile.transports) {
    transport.efficiency.value = 1e-14;
  }
  CHECK_THROWS_AS((void)Simulate(program, RoundCluster(2), profile, Uncontended()), InputError);
  // Each op within its limit, the step not.
  PriceTable prices = PriceProgram(program, RoundCluster(2), RoundProfile());
  for (Price& price : prices.prices) {
    price.duration = ToSimTime(Seconds(9e5));
  }
  EngineOptions options;
  EngineWorkspace workspace;
  CHECK_THROWS_WITH_AS((void)RunEngine(program, prices, options, workspace),
                       "cluster and profile: got rates that let a step take weeks, expected rates "
                       "with which 8 steps "
                       "take less than 100 days",
                       InputError);
}

}  // namespace
}  // namespace shardwright
