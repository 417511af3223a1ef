// The CUDA device with its loopback ranks, on an emulated GPU, against the host device.

#include "executor/cuda/device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include "core/error.h"
#include "executor/cuda/session.h"
#include "executor/half.h"
#include "executor/host/tcp_processes.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/together.h"
#include "schedule/place.h"
#include "tests/executor/cuda/device_training.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/cuda/test_gpu.h"
#include "tests/executor/harness.h"
#include "traces/check.h"
#include "traces/waits.h"

namespace shardwright::testing {
namespace {

TEST_CASE("CudaDevice.TrainsAsTheHostDoes") {
  for (const Variant& variant : Variants()) {
    CAPTURE(std::string(variant.name));
    const Setup setup = SetupOf(variant);
    const Outcome host = Train(setup);
    const Outcome first = TrainOnGpu(setup, 1);
    CHECK(first.replicas_agree);
    CHECK(RelativeDifference(host, first) < variant.bound);
    REQUIRE(first.losses.size() == host.losses.size());
    for (std::size_t i = 0; i < host.losses.size(); ++i) {
      CHECK(first.losses[i] == doctest::Approx(host.losses[i]).epsilon(variant.bound));
    }
    CHECK(first.scaler == host.scaler);
    CHECK(first.ends == LastEnds(first.trace));
    // Another legal order of the streams: the same bits, or an edge is missing.
    const Outcome second = TrainOnGpu(setup, 2);
    CHECK(second.weights == first.weights);
    CHECK(second.losses == first.losses);
  }
}

TEST_CASE("CudaDevice.AnEventRecordedAgainOnAnotherStreamMeansItsLastRecording") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::unique_ptr<Gpu> gpu = MakeTestGpu(seed);
    const GpuEvent twice = gpu->NewEvent(false);
    const GpuEvent end = gpu->NewEvent(false);
    const GpuStream third = gpu->NewStream(false);
    gpu->Record(twice, gpu->NewStream(false));
    gpu->Record(twice, gpu->NewStream(false));
    gpu->Synchronize(twice);
    // The first recording may only now take place; it must not undo the second.
    gpu->WaitFor(third, twice);
    gpu->Record(end, third);
    gpu->Synchronize(end);
    CHECK(gpu->IsOver(twice));
  }
}

// The first element whose bits differ, or an empty text. A NaN is a NaN: IEEE 754 leaves its bits
// open, and x86's are not the GPU's. In fp16 zero gradients make some: Adam's epsilon rounds to 0.
std::string DescribeDifference(DType dtype, const std::vector<std::byte>& gpu,
                               const std::vector<std::byte>& host) {
  for (std::int64_t i = 0; i < std::ssize(host) / SizeOf(dtype); ++i) {
    const auto at = static_cast<std::size_t>(i * SizeOf(dtype));
    const float a = LoadFloat(dtype, gpu.data(), i), b = LoadFloat(dtype, host.data(), i);
    const bool are_nans = std::isnan(a) && std::isnan(b);
    if (!are_nans &&
        std::memcmp(&gpu[at], &host[at], static_cast<std::size_t>(SizeOf(dtype))) != 0) {
      std::ostringstream text;
      text << "element " << i << ": " << std::hexfloat << a << " on the GPU, " << b << " here";
      return text.str();
    }
  }
  return {};
}

TEST_CASE("CudaDevice.EveryOptimizerHasTheHostsBits") {
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kMomentum, OptimizerKind::kAdam, OptimizerKind::kAdamW,
        OptimizerKind::kAdadelta}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const OptimizerImpl impl : {OptimizerImpl::kForeach, OptimizerImpl::kFused}) {
        constexpr std::int64_t kCount = 700;
        std::vector<std::vector<std::byte>> host(4, std::vector<std::byte>(kCount * 4));
        for (std::size_t a = 0; a < 2; ++a) {  // parameters and gradients; states begin as zeros
          for (std::int64_t i = 0; i < kCount; ++i) {
            const auto at = static_cast<float>(i * (a == 0 ? 37 : 101) % 199);
            StoreFloat(dtype, host[a].data(), i, at / 100 - 1);
          }
        }
        std::vector<std::byte*> cuda;
        const std::unique_ptr<Gpu> gpu = MakeTestGpu(1);
        for (const std::vector<std::byte>& array : host) {
          cuda.push_back(ToGpu(*gpu, array));
        }
        const std::vector<OptimizerRange> ranges = {{0, 0, 0, 300, 0.1}, {310, 310, 310, 390, 0.0}};
        OptimizerOptions options;
        options.momentum = 0.9;
        std::vector<std::byte*> plain;
        for (std::vector<std::byte>& array : host) {
          plain.push_back(array.data());
        }
        const auto call_of = [&](const std::vector<std::byte*>& arrays, std::int64_t step) {
          OptimizerCall call;
          call.spec = {.kind = kind, .impl = impl};
          call.dtype = dtype;
          call.params = arrays[0];
          call.grads = arrays[1];
          call.states = {arrays[2], arrays[3]};
          call.ranges = ranges;
          call.learning_rate = 0.01;
          call.step = step;
          return call;
        };
        const GpuStream stream = gpu->NewStream(false);
        const GpuEvent event = gpu->NewEvent(false);
        for (std::int64_t step = 1; step <= 3; ++step) {
          UpdateShard(call_of(plain, step), options);
          SubmitShardUpdate(call_of(cuda, step), options, {*gpu, stream, nullptr});
          gpu->Record(event, stream);
          gpu->Synchronize(event);
        }
        INFO("optimizer " << static_cast<int>(kind) << ", dtype " << static_cast<int>(dtype));
        for (std::size_t a = 0; a < host.size(); ++a) {
          CHECK(DescribeDifference(dtype, FromGpu(*gpu, cuda[a], std::ssize(host[a])), host[a]) ==
                "");
        }
      }
    }
  }
}

TEST_CASE("CudaDevice.CountsLabelsAsTheHostDoes") {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kClasses = 700;  // more than threads of a block, no multiple
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    const std::unique_ptr<Gpu> gpu = MakeTestGpu(1);
    std::vector<std::byte> scores(static_cast<std::size_t>(kRows * kClasses * SizeOf(dtype)));
    std::vector<std::int64_t> labels(kRows);
    std::mt19937_64 random(5);
    for (std::int64_t row = 0; row < kRows; ++row) {
      // Few different scores, so that most rows have ties; some are no numbers.
      for (std::int64_t c = 0; c < kClasses; ++c) {
        const auto draw = static_cast<int>(random() % 512);
        const float score = draw == 0 ? kNan : static_cast<float>(draw % 19) - 9;
        StoreFloat(dtype, scores.data(), row * kClasses + c, row % 50 == 49 ? -INFINITY : score);
      }
      // Nearly always what the host takes for the largest, or a place that looks like it.
      const ConstView one{scores.data() + row * kClasses * SizeOf(dtype), dtype, kClasses};
      std::int64_t label = 0;
      while (CountCorrect(one, {&label, DType::kInt64, 1}).correct == 0) {
        ++label;
      }
      labels[static_cast<std::size_t>(row)] = row % 7 == 6 ? -100 : label + (row % 5 == 4 ? 19 : 0);
    }
    auto* const counts = reinterpret_cast<gpu::LabelCounts*>(
        gpu->Allocate(Bytes(static_cast<std::int64_t>(sizeof(gpu::LabelCounts))), false));
    auto* const verdicts = reinterpret_cast<std::uint8_t*>(gpu->Allocate(Bytes(kRows), false));
    OpSpec spec;
    spec.kind = OpKind::kCrossEntropy;
    spec.rows = kRows;
    spec.in = kClasses;
    ModelOpCall call;
    call.spec = &spec;
    call.inputs = {{ToGpu(*gpu, scores), dtype, kRows * kClasses},
                   {ToGpu(*gpu, labels), DType::kInt64, kRows}};
    const GpuStream stream = gpu->NewStream(false);
    const GpuEvent event = gpu->NewEvent(false);
    SubmitLabelCount(call, verdicts, counts, {*gpu, stream, nullptr});
    gpu->Record(event, stream);
    gpu->Synchronize(event);
    const Evaluation host = CountCorrect({scores.data(), dtype, kRows * kClasses},
                                         {labels.data(), DType::kInt64, kRows});
    const gpu::LabelCounts found = FromGpu(*gpu, counts, 1).front();
    CHECK(host.correct > 0);
    CHECK(host.correct < host.counted);
    CHECK(found.correct == host.correct);
    CHECK(found.counted == host.counted);
  }
}

TEST_CASE("CudaDevice.AMissingWaitComputesWrongNumbers") {
  // What the comparison of two seeds above relies on: without the event, the second stream may be
  // first.
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    for (const bool waits : {true, false}) {
      const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({.seed = seed});
      const GpuStream first = gpu->NewStream(false);
      const GpuStream second = gpu->NewStream(false);
      const GpuEvent written = gpu->NewEvent(false);
      const GpuEvent read = gpu->NewEvent(false);
      std::int32_t value = 0;
      std::int32_t copy = 0;
      gpu->Fill(&value, 1, sizeof value, first);
      gpu->Record(written, first);
      if (waits) {
        gpu->WaitFor(second, written);
      }
      gpu->Copy(&copy, &value, sizeof value, second);
      gpu->Record(read, second);
      gpu->Synchronize(read);
      CHECK((!waits || copy == 0x01010101));
      wrong += copy == 0x01010101 ? 0 : 1;
      gpu->Synchronize(written);
    }
  }
  CHECK(wrong > 0);
}

TEST_CASE("CudaDevice.TracesAreThoseOfTheProgram") {
  for (const Variant& variant : Variants()) {
    CAPTURE(std::string(variant.name));
    const Setup setup = SetupOf(variant);
    Trace trace = TrainOnGpu(setup, 3).trace;
    REQUIRE(!trace.spans.empty());
    const Program program = LowerForCuda(setup);
    DeriveWaits(program, trace);
    for (const std::string& finding : CheckTrace(program, trace)) {
      FAIL_CHECK(finding);
    }
  }
}

// One process, so that NCCL itself runs where there is one GPU.
TEST_CASE("CudaDevice.OneRankWithNcclTrainsAsLoopbackDoes") {
  NcclTable nccl{};
  if (const std::string missing = LoadTestNccl(&nccl); !missing.empty()) {
    MESSAGE("skipped: " << missing);
    return;
  }
  const Setup setup = SetupOf(Variants()[0]);
  const Program program = LowerForCuda(setup);
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  constexpr std::chrono::milliseconds kTimeout{60000};
  const std::unique_ptr<MessagePassing> alone = MeetByTcp(
      {.address = "127.0.0.1", .port = tcp::PortOf(listener), .listener = ::dup(listener.fd())},
      kTimeout);
  const std::unique_ptr<Gpu> gpu = MakeTestGpu(1);
  RunOptions run = setup.run;
  JoinRun(*alone, run);
  {
    CudaSession session(
        {setup.model, FindKernelSet(kPlainKernels, "test"), setup.job, program, setup.training},
        {.timeout = kTimeout, .processes = alone.get(), .nccl = &nccl}, *gpu, run);
    CHECK(!session.paths().empty());
    session.runtime().Initialize();
    session.runtime().RunSteps(setup.steps);
    std::vector<double> losses;  // weights may lie where the host cannot read them
    for (const StepReport& report : session.runtime().TakeReports()) {
      losses.push_back(report.loss);
    }
    CHECK(losses == TrainOnGpu(setup, 1).losses);
  }
  alone->Finish();
}

TEST_CASE("CudaDevice.ARankTellsWhatItIsIn") {
  OpRing ring;
  CHECK(ring.Describe() == "nothing under way; issued 0 ops");
  const std::vector<std::string> names = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
  for (const std::string& name : names) {
    ring.Issue(name);
  }
  ring.SetOpen(Stream::kCompute, &names[6], 2);
  CHECK(ring.Describe() ==
        "under way: compute: g and 1 behind it; issued 9 ops, last b, c, d, e, f, g, h, i");
  ring.SetOpen(Stream::kReduce, &names[8], 1);
  CHECK(ring.DescribeOpen() == "under way: compute: g and 1 behind it; reduce: i and 0 behind it");
  ring.SetOpen(Stream::kReduce, nullptr, 0);
  ring.SetOpen(Stream::kCompute, nullptr, 0);
  CHECK(ring.Describe() == "nothing under way; issued 9 ops, last b, c, d, e, f, g, h, i");
}

// What is told is what the rank was in at one moment, also while it goes on.
TEST_CASE("CudaDevice.ARankThatGoesOnTellsOneMoment") {
  OpRing ring;
  const std::string one = "one", three = "three";
  std::atomic<bool> is_over = false;
  std::thread rank([&] {
    while (!is_over) {
      ring.SetOpen(Stream::kCompute, &one, 1);
      ring.SetOpen(Stream::kCompute, nullptr, 0);
      ring.SetOpen(Stream::kCompute, &three, 3);
    }
  });
  const std::set<std::string> moments = {"nothing under way",
                                         "under way: compute: one and 0 behind it",
                                         "under way: compute: three and 2 behind it"};
  std::string other;
  for (int i = 0; i < 100'000 && other.empty(); ++i) {
    const std::string text = ring.DescribeOpen();
    other = moments.contains(text) ? "" : text;
  }
  is_over = true;
  rank.join();
  CHECK(other == "");
}

// Once it is stuck, nothing is ever over.
class StuckGpu : public ForwardingGpu {
 public:
  StuckGpu() : ForwardingGpu(MakeEmulatedGpu({})) {}
  [[nodiscard]] bool IsOver(GpuEvent event) override {
    return !is_stuck && ForwardingGpu::IsOver(event);
  }

  bool is_stuck = false;
};

TEST_CASE("CudaDevice.WorkThatDoesNotEndIsReportedWithWhatIsUnderWay") {
  const Setup setup = SetupOf(Variants()[0]);  // one rank
  const Program program = LowerForCuda(setup);
  StuckGpu gpu;
  CudaSession session(
      {setup.model, FindKernelSet(kPlainKernels, "test"), setup.job, program, setup.training},
      {.timeout = std::chrono::milliseconds(50)}, gpu, setup.run);
  session.runtime().Initialize();
  gpu.is_stuck = true;
  std::string text;
  try {
    session.runtime().RunSteps(1);
  } catch (const RunError& error) {
    text = error.what();
  }
  // The first op of the step is the copy of its inputs.
  CHECK(text.starts_with("rank 0: waited 50 ms for op "));
  CHECK(text.find("; under way: compute: mb0.fwd.copy_h2d and ") != std::string::npos);
}

TEST_CASE("CudaDevice.RefusesBeforeItRuns") {
  Setup setup = SetupOf(Variants()[0]);
  const Program program = LowerSetup(setup);
  const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({});
  const auto open = [&] {
    CudaSession session({setup.model, FindKernelSet("shardwright-host", "test"), setup.job, program,
                         setup.training},
                        {}, *gpu, setup.run);
  };
  CHECK_THROWS_WITH_AS(
      open(),
      "plan: kernel_set: got \"shardwright-host\", expected \"shardwright-cuda-plain\", the "
      "kernels that the CUDA device has; make the plan with --kernel-set shardwright-cuda-plain",
      InputError);
}

struct Allocation {
  std::byte* data;
  Bytes size;
  bool on_host;
};

// Writes down what is allocated.
class RecordingGpu : public ForwardingGpu {
 public:
  RecordingGpu() : ForwardingGpu(MakeEmulatedGpu({})) {}
  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override {
    std::byte* const data = ForwardingGpu::Allocate(size, on_host);
    const std::lock_guard lock(mutex_);
    all_.push_back({data, size, on_host});
    return data;
  }
  [[nodiscard]] std::vector<Allocation> Of(Bytes size, bool on_host) const {
    std::vector<Allocation> found;
    std::copy_if(all_.begin(), all_.end(), std::back_inserter(found),
                 [&](const Allocation& a) { return a.size == size && a.on_host == on_host; });
    return found;
  }
  [[nodiscard]] std::int64_t device_count() const {
    return std::count_if(all_.begin(), all_.end(), [](const Allocation& a) { return !a.on_host; });
  }

 private:
  std::mutex mutex_;
  std::vector<Allocation> all_;
};

TEST_CASE("CudaDevice.EveryRankHasTheArenasOfThePlacementAtEqualOffsets") {
  Setup setup = SetupOf(Variants()[2]);  // four ranks
  setup.plan.offload.optimizer = true;
  const Program program = LowerForCuda(setup);
  RecordingGpu gpu;
  CudaSession session({setup.model, FindKernelSet("shardwright-cuda-plain", "test"), setup.job,
                       program, setup.training},
                      {}, gpu, setup.run);
  const Placement& placement = session.placement();
  for (const Bytes offset : placement.offsets) {
    CHECK(offset.value % 256 == 0);  // what NCCL, cuBLASLt and cuDNN want is a divisor of it
  }
  const std::vector<Allocation> device = gpu.Of(placement.device_size, false);
  const std::vector<Allocation> host = gpu.Of(placement.host_size, true);
  REQUIRE(device.size() == 4);
  REQUIRE(host.size() == 4);
  const std::int64_t allocated = gpu.device_count();
  for (std::size_t r = 0; r < 4; ++r) {
    CHECK(reinterpret_cast<std::uintptr_t>(device[r].data) % 256 == 0);
    const Binding& binding = session.runtime().BindingOf(Rank(r));
    const Binding& first = session.runtime().BindingOf(Rank(0));
    for (std::size_t u = 0; u < binding.units.size(); ++u) {
      if (binding.units[u].parameters == nullptr) {
        continue;
      }
      // Masters in host memory, their copies on the GPU.
      CHECK(binding.units[u].parameters - device[r].data ==
            first.units[u].parameters - device[0].data);
      REQUIRE(binding.units[u].host_copy != nullptr);
      CHECK(binding.units[u].host_copy - host[r].data == first.units[u].host_copy - host[0].data);
    }
  }
  (void)RunToEnd(setup, program, session.runtime());
  CHECK(gpu.device_count() == allocated);  // steps allocate nothing
}

TEST_CASE("CudaDevice.OutOfMemoryIsSaidBeforeStepZero") {
  const Setup setup = SetupOf(Variants()[1]);
  const Program program = LowerForCuda(setup);
  const std::int64_t arena = Place(program).device_size.value;
  // The second rank's arena is one byte too large. Beside arenas, each rank has a word for faults.
  const std::int64_t memory = 2 * (arena + static_cast<std::int64_t>(sizeof(gpu::Fault))) - 1;
  const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({.memory = Bytes(memory)});
  const auto open = [&] {
    CudaSession session({setup.model, FindKernelSet("shardwright-cuda-plain", "test"), setup.job,
                         program, setup.training},
                        {}, *gpu, setup.run);
  };
  const std::string text = "rank 1: out of memory: the plan needs " + std::to_string(arena) +
                           " bytes of device memory, " + std::to_string(arena - 1) + " are free";
  CHECK_THROWS_WITH_AS(open(), text.c_str(), RunError);
}

TEST_CASE("EmulatedGpu.HasNoMoreMemoryThanItsMachine") {
  const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({});
  for (const bool on_host : {false, true}) {
    CHECK_THROWS_WITH_AS((void)gpu->Allocate(Bytes(std::int64_t{1} << 50), on_host),
                         "emulated GPU: out of memory: got 1125899906842624 bytes", RunError);
  }
}

// A GPU that has done everything long before the host's thread is back, but for the event by which
// its clock is set.
class HastyGpu : public ForwardingGpu {
 public:
  HastyGpu() : ForwardingGpu(MakeEmulatedGpu({})) {}
  void Record(GpuEvent event, GpuStream stream) override {
    ForwardingGpu::Record(event, stream);
    Synchronize(event);
    if (!std::exchange(is_first_, false)) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

 private:
  bool is_first_ = true;
};

TEST_CASE("CudaDevice.NothingEndsBeforeItIsIssued") {
  Setup setup = SetupOf(Variants()[0]);  // one rank: nobody to wait for
  setup.run.trace = true;
  const Program program = LowerForCuda(setup);
  HastyGpu gpu;
  CudaSession session({setup.model, FindKernelSet("shardwright-cuda-plain", "test"), setup.job,
                       program, setup.training},
                      {}, gpu, setup.run);
  Trace trace = RunToEnd(setup, program, session.runtime()).trace;
  REQUIRE(!trace.spans.empty());
  DeriveWaits(program, trace);
  CHECK(CheckTrace(program, trace) == std::vector<std::string>{});
}

TEST_CASE("CudaDevice.ALabelOutOfRangeEndsTheRun") {
  Setup setup = SetupOf(Variants()[1]);
  setup.run.inputs = [inner = setup.run.inputs](const BatchKey& key, std::span<const View> views) {
    inner(key, views);
    static_cast<std::int64_t*>(views.back().data)[0] = 1000;
  };
  std::string text;
  try {
    (void)TrainOnGpu(setup, 1);
  } catch (const RunError& error) {
    text = error.what();
  }
  CHECK(text.find("the data: got a label 1000, expected less than the number of classes") !=
        std::string::npos);
}

TEST_CASE("CudaDevice.ARankWithoutDataIsNamed") {
  Setup setup = SetupOf(Variants()[1]);
  setup.run.inputs = [inner = setup.run.inputs](const BatchKey& key, std::span<const View> views) {
    if (key.step == 1 && key.first_sample > 0) {
      throw InputError("this rank's data is gone");
    }
    inner(key, views);
  };
  std::string text;
  try {
    (void)TrainOnGpu(setup, 1);
  } catch (const RunError& error) {
    text = error.what();
  }
  CHECK(text == "rank 1: this rank's data is gone");
}

}  // namespace
}  // namespace shardwright::testing
