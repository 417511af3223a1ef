// Calibrations whose answer is known, because the "measured" traces were simulated with a profile
// that the calibration does not see.

#include "analysis/calibrate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "simulator/costs/pricer.h"
#include "simulator/simulate.h"
#include "tests/simulator/round_numbers.h"

namespace shardwright {
namespace {

using testing::RoundCluster;
using testing::RoundProfile;

// GPT-2 on eight ranks of one node or on two nodes.
struct Case {
  std::int64_t nodes = 1;
  std::int64_t sequence = 512;
  std::int64_t micro_batch = 4;
  const char* model = "gpt2";
  std::int64_t ranks = 0;  // of one node; 0: all eight
  AttentionImpl attention = AttentionImpl::kFlash;
  std::int64_t accumulation = 1;
  const char* wrap = "block";
  bool clips = true;
};

struct Prepared {
  explicit Prepared(const Case& c) : cluster(RoundCluster(c.nodes)) {
    // Fast enough that matrix products are bound by their operations.
    cluster.gpu.memory_bandwidth.value = BytesPerSecond(5e12);
    cluster.gpus_per_node = c.ranks > 0 ? c.ranks : cluster.gpus_per_node;
    const Model model = LoadModel(c.model, {.sequence_length = c.sequence});
    KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
    kernels.attention = c.attention;
    Job job;
    job.sequence_length = c.sequence;
    job.clip_gradients = c.clips;
    job.global_batch = cluster.RankCount() * c.micro_batch * c.accumulation;
    Plan plan;
    plan.shard_size = cluster.RankCount();
    plan.micro_batch = c.micro_batch;
    plan.accumulation = c.accumulation;
    plan.units = Wrap(model, ParseWrap(c.wrap, "test"), ReshardChoice(), plan.dialect, "test");
    program = Lower({model, kernels, job, plan});
  }

  Cluster cluster;
  Program program;
};

// Every number that a GPT-2 step depends on differs from RoundProfile's.
Profile TrueProfile() {
  Profile profile = RoundProfile();
  for (auto& fraction : profile.compute.gemm) {
    fraction->value = 0.37;
  }
  profile.compute.gemm_ramp.value = Seconds(8e-6);
  profile.compute.attention.forward.value = 0.23;
  profile.compute.attention.backward.value = 0.31;
  profile.compute.elementwise.value = 0.61;
  profile.compute.reduction.value = 0.72;
  profile.compute.optimizer.value = 0.55;
  profile.compute.kernel_floor.value = Seconds(3e-6);
  profile.compute.kernel_gap.value = Seconds(0.4e-6);
  profile.host.kernel_launch.value = Seconds(2e-6);
  profile.host.op_issue.value = Seconds(1.5e-6);
  profile.host.collective_issue.value = Seconds(12e-6);
  profile.host.unit_hook.value = Seconds(9e-6);
  profile.host.copy_issue.value = Seconds(3e-6);
  for (TransportProfile& transport : profile.transports) {
    transport.efficiency.value *= 0.7;
    for (ProtocolProfile& protocol : transport.protocols) {
      protocol.base_latency.value = protocol.base_latency.value * 1.6;
      protocol.hop_latency.value = protocol.hop_latency.value * 1.6;
    }
  }
  return profile;
}

SimulationResult Run(const Prepared& prepared, const Profile& profile, bool contention) {
  SimulateOptions options;
  options.contention = contention;
  options.reserved = false;
  options.trace = true;
  return Simulate(prepared.program, prepared.cluster, profile, options);
}

double StepTime(const Prepared& prepared, const Profile& profile, bool contention) {
  return ToSeconds(Run(prepared, profile, contention).step_time).value;
}

const Origin kOrigin{NumberKind::kMeasured, "test", "2026-11-21"};

TEST_CASE("The profile behind simulated traces is found, and predicts other plans") {
  const Profile truth = TrueProfile();
  const Prepared one({.nodes = 1, .sequence = 128, .micro_batch = 1});  // the host is late
  const Prepared two({.nodes = 2, .sequence = 1024, .micro_batch = 1});
  const Prepared large({.nodes = 1, .micro_batch = 16});  // norms last longer than any kernel
  const Trace first = Run(one, truth, false).trace;
  const Trace second = Run(two, truth, false).trace;
  const Trace third = Run(large, truth, false).trace;
  const CalibrationResult result = Calibrate({{"one", one.program, one.cluster, first},
                                              {"two", two.program, two.cluster, second},
                                              {"large", large.program, large.cluster, third}},
                                             RoundProfile(), kOrigin);
  const Profile& found = result.profile;
  const auto bf16 = static_cast<std::size_t>(MathType::kBf16);
  CHECK(found.compute.gemm[bf16]->value == doctest::Approx(0.37).epsilon(0.01));
  CHECK(found.compute.gemm[bf16]->origin == kOrigin);
  CHECK(found.compute.attention.forward.value == doctest::Approx(0.23).epsilon(0.01));
  CHECK(found.compute.attention.backward.value == doctest::Approx(0.31).epsilon(0.01));
  CHECK(found.compute.elementwise.value == doctest::Approx(0.61).epsilon(0.01));
  CHECK(found.compute.reduction.value == doctest::Approx(0.72).epsilon(0.01));
  CHECK(found.compute.optimizer.value == doctest::Approx(0.55).epsilon(0.01));
  CHECK(found.compute.gemm_ramp.value.value / 8e-6 == doctest::Approx(1).epsilon(0.05));
  CHECK(found.host.kernel_launch.value.value / 2e-6 == doctest::Approx(1).epsilon(0.01));
  CHECK(found.host.op_issue.value.value / 1.5e-6 == doctest::Approx(1).epsilon(0.01));
  CHECK(found.host.copy_issue.value.value / 3e-6 == doctest::Approx(1).epsilon(0.01));
  // Gathers and reductions pay both, all-reduces the first alone.
  CHECK((found.host.collective_issue.value.value + found.host.unit_hook.value.value) / 21e-6 ==
        doctest::Approx(1).epsilon(0.01));
  CHECK(FindTransport(found, "nvlink").efficiency.value == doctest::Approx(0.56).epsilon(0.02));
  CHECK(FindTransport(found, "roce").efficiency.value == doctest::Approx(0.35).epsilon(0.02));
  for (const CalibratedRun& run : result.runs) {
    CAPTURE(run.name);
    CHECK(std::abs(run.after.value / run.before.value - 1) > 0.05);
  }
  // Plans that the fit has not seen: another size, another model.
  for (const Case& c : {Case{1, 256, 16, "gpt2"}, Case{2, 1024, 2, "gpt2-medium"}}) {
    CAPTURE(c.model);
    const Prepared other(c);
    const double expected = StepTime(other, truth, false);
    CHECK(StepTime(other, found, false) == doctest::Approx(expected).epsilon(0.01));
    CHECK(std::abs(StepTime(other, RoundProfile(), false) / expected - 1) > 0.05);
  }
}

// A driver's queue holds about a thousand launches; a host that is ahead waits for room in it,
// which is not what issuing costs.
TEST_CASE("Launches into a full queue say nothing of the host") {
  const Profile truth = TrueProfile();
  const Prepared prepared({.sequence = 1024, .micro_batch = 32, .accumulation = 4});
  Trace trace = Run(prepared, truth, false).trace;
  std::size_t held_back = 0;
  for (std::size_t i = 0; i < trace.spans.size(); ++i) {
    Span& span = trace.spans[i];
    const auto is_under_way = [&](const Span& other) { return other.end > span.issue_begin; };
    const auto before = std::span(trace.spans).first(i);
    if (std::count_if(before.begin(), before.end(), is_under_way) > 300) {
      span.issue_end = span.issue_end + ToSimTime(Seconds(7e-4));
      ++held_back;
    }
  }
  CHECK(held_back > trace.spans.size() / 2);
  const CalibrationResult result =
      Calibrate({{"run", prepared.program, prepared.cluster, trace}}, RoundProfile(), kOrigin);
  // What is left are ops of one launch, which do not tell the two apart.
  const HostProfile& host = result.profile.host;
  CHECK((host.kernel_launch.value + host.op_issue.value).value / 3.5e-6 ==
        doctest::Approx(1).epsilon(0.02));
}

// Ops that run side by side slow each other down, which hides what they take alone.
TEST_CASE("Attention is calibrated under the name of the library that ran it") {
  const Prepared run({.attention = AttentionImpl::kCudnn});
  Profile start = RoundProfile();
  Profile truth = TrueProfile();
  for (Profile* profile : {&start, &truth}) {
    profile->compute.cudnn_attention.forward.value =
        profile->compute.cudnn_attention.backward.value = 0.5;
  }
  truth.compute.cudnn_attention.forward.value = 0.4;
  const Trace trace = Run(run, truth, false).trace;
  const CalibrationResult result =
      Calibrate({{"run", run.program, run.cluster, trace}}, start, kOrigin);
  CHECK(result.profile.compute.cudnn_attention.forward.value == doctest::Approx(0.4).epsilon(0.01));
  CHECK(result.profile.compute.cudnn_attention.backward.value ==
        doctest::Approx(0.5).epsilon(0.01));
  CHECK(result.profile.compute.attention == start.compute.attention);
  const auto is_told = [&](const char* field) {
    return std::any_of(result.numbers.begin(), result.numbers.end(),
                       [&](const CalibratedNumber& number) { return number.field == field; });
  };
  CHECK(is_told("compute.cudnn_attention_forward"));
  CHECK_FALSE(is_told("compute.attention_forward"));
}

TEST_CASE("Contention disturbs a calibration little") {
  const Profile truth = TrueProfile();
  const Prepared one({.nodes = 1});
  const Trace trace = Run(one, truth, true).trace;
  const CalibrationResult result =
      Calibrate({{"one", one.program, one.cluster, trace}}, RoundProfile(), kOrigin);
  const double expected = StepTime(one, truth, true);
  CHECK(StepTime(one, result.profile, true) == doctest::Approx(expected).epsilon(0.1));
  CHECK(result.runs[0].after.value ==
        doctest::Approx(StepTime(one, result.profile, true)).epsilon(1e-9));
}

TEST_CASE("Numbers that no op depends on keep their value and origin") {
  Profile start = RoundProfile();
  start.copy.to_host.origin.source = "kept";  // nothing is offloaded
  start.host.malloc.origin.source = "kept";
  const Prepared one({.nodes = 1});
  const Trace trace = Run(one, TrueProfile(), false).trace;
  const CalibrationResult result =
      Calibrate({{"one", one.program, one.cluster, trace}}, start, kOrigin);
  CHECK(result.profile.copy.to_host == start.copy.to_host);
  CHECK(result.profile.host.malloc == start.host.malloc);
  CHECK(FindTransport(result.profile, "roce") == FindTransport(start, "roce"));
  CHECK(std::none_of(result.numbers.begin(), result.numbers.end(), [](const auto& number) {
    return number.field == "copy.to_host" || number.field.starts_with("transports.roce");
  }));
}

TEST_CASE("A profile calibrated with itself stays as it is") {
  const Profile start = RoundProfile();
  const Prepared one({.nodes = 1});
  const Trace trace = Run(one, start, false).trace;
  const CalibrationResult result =
      Calibrate({{"one", one.program, one.cluster, trace}}, start, kOrigin);
  CHECK_FALSE(result.numbers.empty());
  CHECK(result.runs[0].after.value ==
        doctest::Approx(result.runs[0].before.value).epsilon(1e-3).scale(1e-9));
}

// Any factor in [1/2, 2] on every number that a step depends on.
Profile RandomProfile(std::mt19937& random) {
  std::uniform_real_distribution<double> exponent(-1, 1);
  const auto factor = [&] { return std::exp2(exponent(random)); };
  Profile profile = TrueProfile();
  for (auto& fraction : profile.compute.gemm) {
    fraction->value = std::min(1.0, fraction->value * factor());
  }
  for (auto* fraction :
       {&profile.compute.attention.forward, &profile.compute.attention.backward,
        &profile.compute.elementwise, &profile.compute.reduction, &profile.compute.optimizer}) {
    fraction->value = std::min(1.0, fraction->value * factor());
  }
  for (auto* time :
       {&profile.compute.gemm_ramp, &profile.compute.kernel_floor, &profile.compute.kernel_gap,
        &profile.host.kernel_launch, &profile.host.op_issue, &profile.host.collective_issue,
        &profile.host.unit_hook}) {
    time->value = time->value * factor();
  }
  for (TransportProfile& transport : profile.transports) {
    transport.efficiency.value = std::min(1.0, transport.efficiency.value * factor());
  }
  return profile;
}

TEST_CASE("What is not called worse is nearer to the run, whatever is true") {
  const Prepared one({.nodes = 1, .sequence = 256, .micro_batch = 2});
  const Prepared two({.nodes = 2, .sequence = 256, .micro_batch = 1});
  std::mt19937 random(20261125);
  for (int round = 0; round < 12; ++round) {
    CAPTURE(round);
    const Prepared& prepared = round % 2 == 0 ? one : two;
    const Profile truth = RandomProfile(random);
    const Profile start = RandomProfile(random);
    const Trace trace = Run(prepared, truth, true).trace;
    CalibrationResult result =
        Calibrate({{"run", prepared.program, prepared.cluster, trace}}, start, kOrigin);
    // A simulated trace leaves out the steps between the first and the last one, so that no period
    // can be read off it.
    result.runs[0].measured = Seconds(StepTime(prepared, truth, true));
    // Ops slow each other down while they are measured, so a little is left; where the start was as
    // near by luck, the result is called worse and is not written. All-reduces over two nodes are
    // trees or rings, of latencies of both transports, so that one cannot be told from the other:
    // the farthest of the twelve is 10.6 % off.
    const CalibratedRun& run = result.runs[0];
    CHECK(std::abs(run.after.value / run.measured.value - 1) < 0.11);
    const bool is_nearer = std::abs(run.after.value - run.measured.value) <=
                           std::abs(run.before.value - run.measured.value);
    CHECK((is_nearer || result.IsWorse() ||
           std::abs(run.after.value - run.before.value) < kWorseCalibration * run.measured.value));
    CHECK_FALSE((is_nearer && result.IsWorse()));
  }
}

TEST_CASE("A calibration is worse when its runs are further off on the whole") {
  const auto run = [](double before, double after) {
    return CalibratedRun{"", Seconds(1), Seconds(before), Seconds(after)};
  };
  const auto is_worse = [](std::vector<CalibratedRun> runs) {
    return CalibrationResult{{}, {}, std::move(runs)}.IsWorse();
  };
  CHECK(is_worse({run(0.8, 0.7)}));
  CHECK(is_worse({run(1.1, 0.8)}));
  CHECK_FALSE(is_worse({run(0.8, 1.1)}));
  CHECK_FALSE(is_worse({run(1.0, 1.004)}));  // as good as the same
  CHECK_FALSE(is_worse({run(0.5, 0.9), run(1.0, 1.1)}));
  CHECK(is_worse({run(0.9, 1.0), run(1.0, 1.3)}));
  CHECK_FALSE(is_worse({}));
}

TEST_CASE("The norm of gradients, their scaling and the update have rates of their own") {
  Profile truth = TrueProfile();
  truth.compute.grad_norm.value = 0.11;
  truth.compute.grad_clip.value = 0.83;
  const Prepared one({.nodes = 1});
  const Trace trace = Run(one, truth, false).trace;
  const CalibrationResult result =
      Calibrate({{"one", one.program, one.cluster, trace}}, RoundProfile(), kOrigin);
  CHECK(result.profile.compute.optimizer.value == doctest::Approx(0.55).epsilon(0.01));
  CHECK(result.profile.compute.grad_norm.value == doctest::Approx(0.11).epsilon(0.01));
  CHECK(result.profile.compute.grad_clip.value == doctest::Approx(0.83).epsilon(0.01));
  CHECK(result.profile.compute.grad_norm.origin == kOrigin);
}

TEST_CASE("One collective of one size: the rate explains it, and other plans are uncertain") {
  const Profile truth = TrueProfile();
  const Prepared one({.nodes = 1, .wrap = "root", .clips = false});
  const Trace trace = Run(one, truth, false).trace;
  const Profile start = RoundProfile();
  const CalibrationResult result =
      Calibrate({{"one", one.program, one.cluster, trace}}, start, kOrigin);
  CHECK(result.of_one_size == std::vector<std::string>{"nvlink"});
  const TransportProfile& found = FindTransport(result.profile, "nvlink");
  CHECK(found.efficiency.value == doctest::Approx(0.56).epsilon(0.02));
  CHECK(found.protocols[0].base_latency ==
        FindTransport(start, "nvlink").protocols[0].base_latency);
  // The other profile says the same of this plan, and more of one with a unit for each block.
  REQUIRE(result.other.has_value());
  CHECK(StepTime(one, *result.other, false) ==
        doctest::Approx(StepTime(one, result.profile, false)).epsilon(0.01));
  const Prepared blocks({.nodes = 1, .clips = false});
  CHECK(StepTime(blocks, *result.other, false) > 1.2 * StepTime(blocks, result.profile, false));
  CHECK(StepTime(blocks, result.profile, false) ==
        doctest::Approx(StepTime(blocks, truth, false)).epsilon(0.05));
}

// Where ranks run on cores, and no host stands in the way.
Prepared OnCores(std::int64_t ranks, double cores) {
  Prepared prepared({.nodes = 1, .sequence = 256, .micro_batch = 2, .ranks = ranks});
  prepared.cluster.node_cores = cores;
  return prepared;
}
Profile WithoutHost(Profile profile) {
  profile.host = {};
  profile.host.op_issue.value = Seconds(1e-9);
  return profile;
}

TEST_CASE("More ranks than cores: what ops computed is their price, not how long they lasted") {
  const Profile truth = WithoutHost(TrueProfile());
  const Prepared prepared = OnCores(8, 4);
  Trace trace = Run(prepared, truth, true).trace;
  const auto gemm = [&] {
    const Profile found =
        Calibrate({{"run", prepared.program, prepared.cluster, trace}}, RoundProfile(), kOrigin)
            .profile;
    return found.compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value;
  };
  // Half a core each: they last twice as long, and that is all that a trace without them says.
  CHECK(gemm() == doctest::Approx(0.37 / 2).epsilon(0.05));
  const PriceTable prices = PriceProgram(prepared.program, prepared.cluster, truth);
  for (Span& span : trace.spans) {
    const Body& body = span.body == BodyKind::kInit     ? prepared.program.init
                       : span.body == BodyKind::kWarmup ? prepared.program.warmup
                                                        : prepared.program.step;
    span.cpu = prices.prices[body.ops[span.op.value].shape.value].duration;
  }
  CHECK(gemm() == doctest::Approx(0.37).epsilon(0.02));
}

TEST_CASE("What busy neighbours cost is told by runs with and without them") {
  Profile truth = WithoutHost(TrueProfile());
  truth.overlap.busy_cores.value = 0.04;
  const Prepared many = OnCores(8, 8);
  Prepared alone = OnCores(1, 8);
  alone.cluster.rank_threads = 1;
  const Trace busy = Run(many, truth, true).trace;
  const Trace quiet = Run(alone, truth, true).trace;
  const CalibrationResult result = Calibrate(
      {{"many", many.program, many.cluster, busy}, {"alone", alone.program, alone.cluster, quiet}},
      WithoutHost(RoundProfile()), kOrigin);
  CHECK(result.profile.overlap.busy_cores.value == doctest::Approx(0.04).epsilon(0.05));
  CHECK(result.profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value ==
        doctest::Approx(0.37).epsilon(0.02));
  // One run alone does not tell, and leaves the number as it was.
  Profile start = WithoutHost(RoundProfile());
  start.overlap.busy_cores.value = 0.01;
  const CalibrationResult one =
      Calibrate({{"alone", alone.program, alone.cluster, quiet}}, start, kOrigin);
  CHECK(one.profile.overlap.busy_cores == start.overlap.busy_cores);
}

TEST_CASE("What taking turns costs is told by runs of more ranks than cores") {
  Profile truth = WithoutHost(TrueProfile());
  truth.overlap.core_turns.value = 0.08;
  const Prepared many = OnCores(8, 4);
  Prepared alone = OnCores(1, 4);
  alone.cluster.rank_threads = 1;
  Trace busy = Run(many, truth, true).trace;
  const Trace quiet = Run(alone, truth, true).trace;
  for (Span& span : busy.spans) {  // half a core each: they compute for half of the time
    span.cpu = SimTime((span.end - span.start).value / 2);
  }
  const CalibrationResult result = Calibrate(
      {{"many", many.program, many.cluster, busy}, {"alone", alone.program, alone.cluster, quiet}},
      WithoutHost(RoundProfile()), kOrigin);
  CHECK(result.profile.overlap.core_turns.value == doctest::Approx(0.08).epsilon(0.05));
  CHECK(result.profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value ==
        doctest::Approx(0.37).epsilon(0.02));
}

TEST_CASE("Copies have a rate of their own, and on cores the operands of products") {
  Profile truth = WithoutHost(TrueProfile());
  truth.compute.copies.value = 0.21;
  truth.compute.gemm_operands.value = 0.4;
  // Products of few rows and of many.
  std::vector<Prepared> prepared;
  for (const std::int64_t sequence : {8, 512}) {
    prepared.emplace_back(Case{.nodes = 1, .sequence = sequence, .micro_batch = 1, .ranks = 1});
    prepared.back().cluster.node_cores = 16;
    prepared.back().cluster.rank_threads = 1;
  }
  const Trace little = Run(prepared[0], truth, true).trace;
  const Trace much = Run(prepared[1], truth, true).trace;
  const CalibrationResult result =
      Calibrate({{"little", prepared[0].program, prepared[0].cluster, little},
                 {"much", prepared[1].program, prepared[1].cluster, much}},
                WithoutHost(RoundProfile()), kOrigin);
  CHECK(result.profile.compute.copies.value == doctest::Approx(0.21).epsilon(0.02));
  CHECK(result.profile.compute.gemm_operands.value == doctest::Approx(0.4).epsilon(0.02));
  CHECK(result.profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value ==
        doctest::Approx(0.37).epsilon(0.02));
}

TEST_CASE("What threads share is told by what they computed together and how long it took") {
  Profile truth = WithoutHost(TrueProfile());
  truth.overlap.shared_work.value = 0.9;
  const Prepared prepared = OnCores(1, 4);
  truth.overlap.loop_start.value = Seconds(40e-6);
  Trace trace = Run(prepared, truth, true).trace;
  for (Span& span : trace.spans) {
    if (span.stream == Stream::kCompute) {
      // Amdahl and a start for each kernel: t = cpu (0.1 + 0.9 / 4) + k 40 us.
      const OpShape& shape = prepared.program.ShapeOf(prepared.program.step.ops[span.op.value]);
      const double lasted = ToSeconds(span.end - span.start).value;
      span.cpu = ToSimTime(Seconds((lasted - shape.kernel_count * 40e-6) / 0.325));
    }
  }
  const CalibrationResult result = Calibrate({{"run", prepared.program, prepared.cluster, trace}},
                                             WithoutHost(RoundProfile()), kOrigin);
  CHECK(result.profile.overlap.shared_work.value == doctest::Approx(0.9).epsilon(0.001));
  CHECK(result.profile.overlap.loop_start.value.value * 1e6 == doctest::Approx(40).epsilon(0.02));
  CHECK(result.profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value ==
        doctest::Approx(0.37).epsilon(0.02));
}

TEST_CASE("Ops of several threads count unless equal ones of one thread do") {
  const Profile truth = WithoutHost(TrueProfile());
  const Prepared shared = OnCores(1, 4);
  Prepared alone = OnCores(1, 4);
  alone.cluster.rank_threads = 1;
  Prepared other({.nodes = 1, .sequence = 64, .micro_batch = 2, .ranks = 1});
  other.cluster.node_cores = 1;
  const Trace threads = Run(shared, truth, true).trace;
  Trace same = Run(alone, truth, true).trace;
  for (Span& span : same.spans) {
    span.cpu = span.end - span.start;
  }
  const Trace unlike = Run(other, truth, true).trace;
  const auto products = [&](const std::vector<CalibrationRun>& runs) {
    const CalibrationResult result = Calibrate(runs, WithoutHost(RoundProfile()), kOrigin);
    const auto found =
        std::find_if(result.numbers.begin(), result.numbers.end(),
                     [](const CalibratedNumber& n) { return n.field == "compute.gemm.bf16"; });
    REQUIRE(found != result.numbers.end());
    return found->rows;
  };
  const CalibrationRun of_threads{"threads", shared.program, shared.cluster, threads};
  const CalibrationRun of_one{"one", alone.program, alone.cluster, same};
  const CalibrationRun of_other{"other", other.program, other.cluster, unlike};
  CHECK(products({of_threads, of_other}) == products({of_threads}) + products({of_other}));
  CHECK(products({of_threads, of_one}) == products({of_one}));
}

TEST_CASE("Our own runs do not go through gloo") {
  const Prepared prepared({.nodes = 1});
  const Trace trace = Run(prepared, RoundProfile(), false).trace;
  Profile start = RoundProfile();
  start.overlap.gloo.value = 1;
  const CalibrationResult result =
      Calibrate({{"run", prepared.program, prepared.cluster, trace}}, start, kOrigin);
  CHECK(result.profile.overlap.gloo.value == 0);
}

TEST_CASE("A trace without a complete step is refused by name") {
  const Prepared one({.nodes = 1});
  Trace trace = Run(one, RoundProfile(), false).trace;
  trace.spans.resize(10);
  try {
    (void)Calibrate({{"short.json", one.program, one.cluster, trace}}, RoundProfile(), kOrigin);
    FAIL("no error");
  } catch (const InputError& error) {
    CHECK(std::string(error.what()) ==
          "short.json: got no complete step, expected all ops of at least one step");
  }
}

}  // namespace
}  // namespace shardwright
