// Ranks as processes with a GPU each, here threads with an emulated GPU each and an NCCL that is
// none (fake_nccl.cc); and the watch over their collectives.

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include "core/error.h"
#include "executor/cuda/nccl_world.h"
#include "executor/cuda/session.h"
#include "executor/host/tcp_processes.h"
#include "executor/host/tcp_socket.h"
#include "executor/host/together.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/fake_nccl.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::chrono::milliseconds kTimeout{60000};

// Runs `work` as processes that have met; returns what each of them threw.
std::vector<std::string> RunTogether(int size,
                                     const std::function<void(MessagePassing& all)>& work) {
  const tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  std::vector<std::string> causes(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Launch launch{.rank = r, .size = size, .address = "127.0.0.1", .port = tcp::PortOf(listener)};
      launch.key = "of this test";
      launch.listener = r == 0 ? ::dup(listener.fd()) : -1;
      try {
        const std::unique_ptr<MessagePassing> all = MeetByTcp(launch, kTimeout);
        work(*all);
        all->Finish();
      } catch (const RunError& error) {
        causes[static_cast<std::size_t>(r)] = error.what();
      }
    });
  }
  threads.clear();  // joins
  return causes;
}

struct Losses {
  std::vector<double> by_step;  // of rank 0
  std::vector<std::string> causes;
  Trace trace;  // of rank 0, where the setup asks for one
};

Losses TrainByNccl(const Setup& setup, std::chrono::milliseconds timeout = kTimeout,
                   const NcclTable& nccl = FakeNccl(), ActivityLog* activities = nullptr) {
  const KernelSetOptions& kernels = FindKernelSet("shardwright-cuda-plain", "test");
  const Program program = Lower({setup.model, kernels, setup.job, setup.plan});
  SW_CHECK(Verify(program).empty(), "a plan");
  const int ranks = static_cast<int>(program.shard_size * program.replicate_size);
  Losses losses;
  losses.causes = RunTogether(ranks, [&](MessagePassing& all) {
    const auto seed = static_cast<std::uint64_t>(all.rank() + 1);
    const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({.seed = seed});
    RunOptions run = setup.run;
    run.poison = true;
    JoinRun(all, run);
    CudaSession session({setup.model, kernels, setup.job, program, setup.training},
                        {.timeout = timeout,
                         .processes = &all,
                         .nccl = &nccl,
                         .activities = all.rank() == 0 ? activities : nullptr},
                        *gpu, run);
    session.faults().OnReport([&](const std::string& cause) { all.Fail(cause); });
    session.runtime().Initialize();
    session.runtime().RunSteps(setup.steps);
    if (all.rank() == 0) {
      for (const StepReport& report : session.runtime().TakeReports()) {
        losses.by_step.push_back(report.loss);
      }
      losses.trace = setup.run.trace ? session.runtime().TakeTrace() : Trace();
    }
  });
  return losses;
}

struct Variant {
  const char* name;
  Dialect dialect;
  std::int64_t ranks;
  std::function<void(Setup& s)> change;
};

Setup SetupOf(const Variant& variant) {
  Setup setup = TinySetup(variant.dialect, variant.ranks);
  setup.job.optimizer.kind = OptimizerKind::kSgd;
  setup.training.optimizer.learning_rate = 0.5;
  variant.change(setup);
  return setup;
}

TEST_CASE("Nccl.AsksAgainAtOnceBeforeItSleeps") {
  using namespace std::chrono_literals;
  CHECK(NcclWorld::PauseAfter(0ns) == 0us);
  CHECK(NcclWorld::PauseAfter(999us) == 0us);
  CHECK(NcclWorld::PauseAfter(1ms) == 100us);
  CHECK(NcclWorld::PauseAfter(60s) == 100us);
}

TEST_CASE("Nccl.TrainsAsTheHostDoes") {
  const auto nothing = [](Setup&) {};
  const auto clip = [](Setup& s) {
    s.job.clip_gradients = true;
    s.training.clip_norm = 0.05;
  };
  const std::vector<Variant> variants = {
      {"native", Dialect::kNative, 2, nothing},
      {"fsdp2, clipping", Dialect::kFsdp2, 2, clip},
      {"zero3, clipping", Dialect::kZero3, 2, clip},
      {"zero1, weights gathered in pieces", Dialect::kZero1, 2,
       [](Setup& s) { s.plan.zero.allgather_bucket = 60; }},
      {"ddp", Dialect::kDdp, 3, nothing},
      {"hybrid", Dialect::kNative, 4,
       [](Setup& s) {
         s.plan.shard_size = 2;
         s.plan.replicate_size = 2;
       }},
      {"clipping in host memory", Dialect::kFsdp2, 2,
       [clip](Setup& s) {
         clip(s);
         s.plan.offload.parameters = true;
       }},
  };
  for (const Variant& variant : variants) {
    INFO(variant.name);
    const Setup setup = SetupOf(variant);
    const Outcome host = Train(setup);
    const Losses losses = TrainByNccl(setup);
    CHECK(losses.causes == std::vector<std::string>(static_cast<std::size_t>(variant.ranks)));
    const FakeNcclReport report = TakeFakeNcclReport();
    CHECK(report.mistakes == std::vector<std::string>());
    CHECK(report.by_kernels == 0);
    CHECK(report.outside_windows == 0);
    // DDP gathers nothing, ZeRO-1 here in parts that lie apart.
    CHECK((report.by_copy_engines > 0) ==
          (variant.dialect != Dialect::kDdp && variant.dialect != Dialect::kZero1));
    // A loss depends on every weight, so those of later steps tell of the updates before them.
    REQUIRE(losses.by_step.size() == host.losses.size());
    for (std::size_t i = 0; i < host.losses.size(); ++i) {
      CHECK(losses.by_step[i] == doctest::Approx(host.losses[i]).epsilon(1e-5));
    }
  }
}

// One rank's end of a group of all.
struct Pair {
  Pair(MessagePassing& all, const NcclTable& nccl)
      : me(all.rank()),
        gpu(MakeEmulatedGpu({.seed = static_cast<std::uint64_t>(me)})),
        world(nccl, all, *gpu, kTimeout, faults),
        group(world.MakeGroup({all.size(), 0, 1}, "all")),
        place{*gpu, gpu->NewStream(true), gpu->NewEvent(false), gpu->NewEvent(false),
              gpu->NewEvent(false)} {}

  [[nodiscard]] std::byte* Floats(const std::vector<float>& values) const {
    std::byte* const data =
        gpu->Allocate(Bytes(static_cast<std::int64_t>(values.size() * sizeof(float))), false);
    std::memcpy(data, values.data(), values.size() * sizeof(float));
    return data;
  }
  void Run(const CollectiveCall& call) const {
    const std::string name = "op";
    group->Submit(me, call, name, place);
    const GpuEvent end = gpu->NewEvent(false);
    gpu->Record(end, place.stream);
    gpu->Synchronize(end);
  }
  [[nodiscard]] static float At(const std::byte* data, std::size_t i) {
    return reinterpret_cast<const float*>(data)[i];
  }

  const std::int64_t me;
  const std::unique_ptr<Gpu> gpu;
  FaultBoard faults;
  NcclWorld world;
  const std::unique_ptr<GpuGroup> group;
  const CollectivePlace place;
};

TEST_CASE("Nccl.PartsOfAGatherMayLieApart") {
  const NcclTable nccl = FakeNccl();
  const auto causes = RunTogether(2, [&](MessagePassing& all) {
    const Pair pair(all, nccl);
    const auto own = static_cast<float>(pair.me);
    CollectiveCall gather;
    gather.code = OpCode::kAllGather;
    gather.elements = 4;
    gather.send = pair.Floats({own, own + 10});
    gather.receive = pair.Floats({-1, -1, -1, -1, -1, -1});
    gather.receive_stride = 4 * sizeof(float);
    pair.Run(gather);
    const std::vector<float> expected = {0, 10, -1, -1, 1, 11};
    for (std::size_t i = 0; i < expected.size(); ++i) {
      CHECK(Pair::At(gather.receive, i) == expected[i]);
    }
  });
  CHECK(causes == std::vector<std::string>(2));
}

// How a world of two, which may change its table by rank, says that it gathers; and what it did.
struct GatherPath {
  std::string words;
  FakeNcclReport report;
};
GatherPath PathOf(const std::function<void(NcclTable& nccl, int rank)>& change) {
  GatherPath path;
  (void)TakeFakeNcclReport();
  const auto causes = RunTogether(2, [&](MessagePassing& all) {
    NcclTable nccl = FakeNccl();
    change(nccl, all.rank());
    Pair pair(all, nccl);
    auto* const memory = reinterpret_cast<float*>(pair.world.Allocate(Bytes(5000)));
    const auto own = static_cast<float>(pair.me);
    memory[100 + pair.me] = own + 1;
    CollectiveCall gather;
    gather.code = OpCode::kAllGather;
    gather.elements = 2;
    gather.send = reinterpret_cast<std::byte*>(memory + 100 + pair.me);
    gather.receive = reinterpret_cast<std::byte*>(memory + 100);
    pair.Run(gather);
    CHECK(memory[100] == 1.0F);
    CHECK(memory[101] == 2.0F);
    if (all.rank() == 1) {
      path.words = pair.world.paths();
    }
  });
  CHECK(causes == std::vector<std::string>(2));
  path.report = TakeFakeNcclReport();
  CHECK(path.report.mistakes == std::vector<std::string>());
  return path;
}

TEST_CASE("Nccl.GathersByCopyEnginesWhereTheLibraryHasThem") {
  const GatherPath best = PathOf([](NcclTable&, int) {});
  CHECK(best.words ==
        "memory in symmetric windows; all-gathers by copy engines where all GPUs of a group are "
        "joined by NVLink");
  CHECK(best.report.by_copy_engines == 2);
  const GatherPath older = PathOf([](NcclTable& nccl, int) {
    nccl.get_version = [](int* version) {
      *version = 22705;
      return NcclNumbers::kSuccess;
    };
  });
  CHECK(older.words ==
        "memory in symmetric windows; all-gathers by kernels, NCCL 2.28 is the first with copy "
        "engines");
  CHECK(older.report.by_kernels == 2);
  const GatherPath oldest = PathOf([](NcclTable& nccl, int) {
    nccl.get_version = [](int* version) {
      *version = 21805;
      return NcclNumbers::kSuccess;
    };
    nccl.window_deregister = nullptr;
  });
  CHECK(oldest.words ==
        "no symmetric windows (NCCL 2.18.5 has none, 2.27 is the first); "
        "all-gathers by kernels; warning: NCCL 2.18.5 keeps no order of launches across "
        "communicators, 2.26 is the first: all collectives of a rank run one at a time, which "
        "simulate does not know");
  // One rank without is enough.
  const GatherPath refused = PathOf([](NcclTable& nccl, int rank) {
    if (rank == 0) {
      nccl.mem_alloc = [](void**, std::size_t) { return 1; };
    }
  });
  CHECK(refused.words ==
        "no symmetric windows (ncclMemAlloc refused on a rank); all-gathers by kernels");
  CHECK(refused.report.by_kernels == 2);
  ::setenv("NCCL_WIN_ENABLE", "0", 1);
  CHECK(PathOf([](NcclTable&, int) {}).words ==
        "no symmetric windows (NCCL_WIN_ENABLE=0); all-gathers by kernels");
  ::unsetenv("NCCL_WIN_ENABLE");
}

// Versions whose release notes name corruption in windows.
TEST_CASE("Nccl.NoWindowsWhereTheyCorrupt") {
  const auto problem_of = [](int (*version)(int*)) {
    NcclTable nccl = FakeNccl();
    nccl.get_version = version;
    return DescribeNoWindows(nccl);
  };
  CHECK(problem_of([](int* v) { return *v = 22706, 0; }).empty());
  CHECK(problem_of([](int* v) { return *v = 22807, 0; }).empty());
  CHECK(problem_of([](int* v) { return *v = 22803, 0; }) ==
        "NCCL 2.28.3 may corrupt what lies in them, 2.28.7 does not");
  CHECK(!problem_of([](int* v) { return *v = 22806, 0; }).empty());
}

TEST_CASE("Nccl.TwoRanksOnOneGpuAreToldOfLoopback") {
  const auto causes = RunTogether(2, [&](MessagePassing& all) {
    NcclTable nccl = FakeNccl();
    nccl.comm_init = [](void**, int, NcclUniqueId, int, NcclConfig*) { return 5; };
    nccl.last_error = [](void*) -> const char* {
      return "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000";
    };
    const Pair pair(all, nccl);
  });
  CHECK(
      causes[0].find("(5): Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000; "
                     "ranks in processes need a GPU each: --loopback 2 runs all of them on one") !=
      std::string::npos);
}

// Before 2.26 kernels of two communicators have no order: ours wait for the one before. So they do
// where the order is switched off.
TEST_CASE("Nccl.WithoutAnOrderOneCollectiveRunsAtATime") {
  for (const bool is_old : {true, false}) {
    INFO(is_old);
    NcclTable older = FakeNccl();
    ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", is_old ? "1" : "0", 1);
    if (is_old) {
      older.get_version = [](int* version) {
        *version = 22505;
        return NcclNumbers::kSuccess;
      };
      older.window_deregister = nullptr;
    }
    Setup setup = SetupOf({"native", Dialect::kNative, 2, [](Setup&) {}});
    setup.run.trace = true;
    const Losses losses = TrainByNccl(setup, kTimeout, older);
    CHECK(losses.causes == std::vector<std::string>(2));
    const Program program = Lower(
        {setup.model, FindKernelSet("shardwright-cuda-plain", "test"), setup.job, setup.plan});
    std::vector<Span> collectives;
    std::set<GroupId> groups;
    for (const Span& span : losses.trace.spans) {
      if (span.body != BodyKind::kStep) {
        continue;
      }
      const OpShape& shape = program.ShapeOf(program.step.ops[span.op.value]);
      if (shape.code == OpCode::kAllGather || shape.code == OpCode::kReduceScatter) {
        collectives.push_back(span);
        groups.insert(shape.group);
      }
    }
    CHECK(groups.size() == 2);
    std::sort(collectives.begin(), collectives.end(),
              [](const Span& x, const Span& y) { return x.issued < y.issued; });
    for (std::size_t i = 1; i < collectives.size(); ++i) {
      CHECK(collectives[i].start >= collectives[i - 1].end);
    }
    CHECK(TakeFakeNcclReport().mistakes == std::vector<std::string>());
  }
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
}

// Several targets, and divisors that are not the number of ranks: sums of 1, 2, 3, 4 and 10, 20,
// 30, 40.
TEST_CASE("Nccl.SumsAreDividedAndScattered") {
  const NcclTable nccl = FakeNccl();
  const auto causes = RunTogether(2, [&](MessagePassing& all) {
    const Pair pair(all, nccl);
    const bool is_first = pair.me == 0;
    const float scale = is_first ? 1.0F : 10.0F;
    for (const double divisor : {1.0, 2.0, 4.0}) {
      const auto divide = static_cast<float>(divisor);
      CollectiveCall scatter;
      scatter.code = OpCode::kReduceScatter;
      scatter.elements = 4;
      scatter.divisor = divisor;
      scatter.send = pair.Floats({scale, 2 * scale, 3 * scale, 4 * scale});
      scatter.receive = pair.Floats({-1, -1});
      pair.Run(scatter);
      CHECK(Pair::At(scatter.receive, 0) == (is_first ? 11.0F : 33.0F) / divide);
      CHECK(Pair::At(scatter.receive, 1) == (is_first ? 22.0F : 44.0F) / divide);
    }
    CollectiveCall reduce;
    reduce.code = OpCode::kAllReduce;
    reduce.elements = 3;
    reduce.divisor = 4.0;
    reduce.receive = pair.Floats({scale, 2 * scale, 99});
    reduce.zeros = {{reduce.receive + 2 * sizeof(float), sizeof(float)}};
    reduce.send = reduce.receive;
    pair.Run(reduce);
    CHECK(Pair::At(reduce.receive, 0) == 11.0F / 4);
    CHECK(Pair::At(reduce.receive, 1) == 22.0F / 4);
    CHECK(Pair::At(reduce.receive, 2) == 0.0F);
  });
  CHECK(causes == std::vector<std::string>(2));
}

// A third in bf16 is 0.333984: by that factor the average would be 1.953125.
TEST_CASE("Nccl.AveragesAreSumsThatWeDivide") {
  const NcclTable nccl = FakeNccl();
  const auto causes = RunTogether(3, [&](MessagePassing& all) {
    const Pair group(all, nccl);
    CollectiveCall reduce;
    reduce.code = OpCode::kAllReduce;
    reduce.dtype = DType::kBf16;
    reduce.elements = 1;
    reduce.divisor = 3.0;
    reduce.send = reduce.receive = group.Floats({0});
    StoreFloat(DType::kBf16, reduce.receive, 0, group.me == 2 ? 1.84375F : 2.0F);
    group.Run(reduce);
    CHECK(LoadFloat(DType::kBf16, reduce.receive, 0) == 1.9453125F);
    // The sum, 120000, is too large for fp16; the average is not.
    reduce.dtype = DType::kFp16;
    StoreFloat(DType::kFp16, reduce.receive, 0, 40000.0F);
    group.Run(reduce);
    CHECK(LoadFloat(DType::kFp16, reduce.receive, 0) == doctest::Approx(40000).epsilon(1e-3));
  });
  CHECK(causes == std::vector<std::string>(3));
}

// CUPTI gives nothing to the threads from which NCCL launches: events tell when collectives ran.
TEST_CASE("Nccl.CollectivesOfATraceHaveTimesBesideCupti") {
  CuptiTable silent{};
  silent.register_timestamp = [](std::uint64_t (*)()) { return 0; };
  silent.register_callbacks = [](auto*, auto*) { return 0; };
  silent.enable = silent.disable = silent.flush = [](std::uint32_t) { return 0; };
  silent.push = [](int, std::uint64_t) { return 0; };
  silent.pop = [](int, std::uint64_t*) { return 0; };
  std::string problem;
  const std::unique_ptr<ActivityLog> log = ActivityLog::Start(silent, &problem);
  REQUIRE(log != nullptr);
  Setup setup = SetupOf({"native", Dialect::kNative, 2, [](Setup&) {}});
  setup.run.trace = true;
  const Losses losses = TrainByNccl(setup, kTimeout, FakeNccl(), log.get());
  CHECK(losses.causes == std::vector<std::string>(2));
  const Program program =
      Lower({setup.model, FindKernelSet("shardwright-cuda-plain", "test"), setup.job, setup.plan});
  std::size_t collectives = 0;
  for (const Span& span : losses.trace.spans) {
    const Op& op = BodyOf(program, span.body).ops[span.op.value];
    if (InfoOf(program.ShapeOf(op).code).is_collective) {
      ++collectives;
      CHECK(span.start >= span.issued);
      CHECK(span.end > span.start);
    }
  }
  CHECK(collectives > 0);
}

// Plants a fault in the library while it lives.
class Planted {
 public:
  explicit Planted(const char* what) { ::setenv("SHARDWRIGHT_FAKE_NCCL", what, 1); }
  ~Planted() { ::unsetenv("SHARDWRIGHT_FAKE_NCCL"); }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
};

TEST_CASE("Nccl.AnErrorEndsAllRanksWithItsOpAndPeers") {
  const Planted fault("fail 1 1");
  const Losses losses = TrainByNccl(SetupOf({"", Dialect::kFsdp2, 2, [](Setup&) {}}));
  REQUIRE(losses.causes.size() == 2);
  // Found by the watch or by the next call, which has a hint behind it.
  const auto cause = [&](std::size_t rank) {
    return losses.causes[rank].substr(0, losses.causes[rank].find(';'));
  };
  CHECK(cause(0) == cause(1));
  CHECK(losses.causes[0].find("rank 1, op ") == 0);
  CHECK(losses.causes[0].find(": unhandled system error (2): planted by a test") !=
        std::string::npos);
}

TEST_CASE("Nccl.ACollectiveThatNeverEndsEndsAllRanks") {
  const Planted fault("stall 1 2");  // the first one of a group has longer, as the set-up has
  const Losses losses =
      TrainByNccl(SetupOf({"", Dialect::kFsdp2, 2, [](Setup&) {}}), std::chrono::milliseconds(200));
  REQUIRE(losses.causes.size() == 2);
  // Both wait for the other then, and either may be the first to say so.
  CHECK(losses.causes[0].find(": waited 200 ms for rank ") != std::string::npos);
  CHECK(losses.causes[1].find(": waited 200 ms for rank ") != std::string::npos);
}

TEST_CASE("LoadNccl.NamesWhatIsMissing") {
  ::setenv("SHARDWRIGHT_NCCL", "/nonexistent/libnccl.so.2", 1);
  NcclTable table{};
  CHECK(LoadNccl(&table) ==
        "/nonexistent/libnccl.so.2: cannot open shared object file: No such file or directory; "
        "several GPUs need NCCL: install libnccl2 or set SHARDWRIGHT_NCCL to its path");
  ::setenv("SHARDWRIGHT_NCCL", "libm.so.6", 1);
  CHECK(LoadNccl(&table) == "libnccl lacks functions that NCCL 2.18 and later have");
  ::unsetenv("SHARDWRIGHT_NCCL");
  // To NCCL an empty switch is off, and off is its default.
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "", 1);
  (void)LoadNccl(&table);
  CHECK(std::string(std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT")) == "1");
  // As ncclGetVersion numbers them: before 2.9 without tens.
  CHECK(DescribeNcclVersion(22809).empty());
  CHECK(DescribeNcclVersion(21800).empty());
  CHECK(DescribeNoLaunchOrder(22602).empty());
  CHECK(!DescribeNoLaunchOrder(22505).empty());
  for (const char* const off : {"0", "no"}) {
    ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", off, 1);
    CHECK(
        DescribeNoLaunchOrder(22602) ==
        "NCCL_LAUNCH_ORDER_IMPLICIT is off, so NCCL keeps no order of launches across "
        "communicators: all collectives of a rank run one at a time, which simulate does not know");
  }
  ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
  CHECK(DescribeNcclVersion(21703) == "libnccl is version 2.17.3, expected at least 2.18");
  CHECK(DescribeNcclVersion(2804) == "libnccl is version 2.8.4, expected at least 2.18");
}

// A watch whose events are over when the test says so.
struct FakeWatch {
  explicit FakeWatch(std::int64_t rank)
      : watch(rank, std::chrono::milliseconds(1000), std::chrono::milliseconds(3000),
              {.new_event =
                   [this] {
                     events.push_back(std::make_unique<bool>(false));
                     return GpuEvent{events.back().get()};
                   },
               .is_over = [](GpuEvent event) { return *static_cast<bool*>(event.value); },
               .problem_of = [this](std::size_t c) { return problems[c]; },
               .tell =
                   [this](const std::vector<CollectiveProgress>& mine) {
                     told = mine;
                     ++times_told;
                   },
               .told_by = [this](std::int64_t r) { return others[r]; },
               .fail = {}}) {}

  CollectiveWatch::Events Submit(std::size_t communicator, const std::string& op) {
    const CollectiveWatch::Events submitted = watch.Next(communicator);
    watch.Submitted(communicator, op, submitted);
    return submitted;
  }
  static void Set(GpuEvent event) { *static_cast<bool*>(event.value) = true; }

  std::vector<std::unique_ptr<bool>> events;
  std::map<std::size_t, std::string> problems;
  std::map<std::int64_t, std::vector<CollectiveProgress>> others;
  std::vector<CollectiveProgress> told;
  int times_told = 0;
  CollectiveWatch watch;
};

TEST_CASE("CollectiveWatch.CountsTimeFromWhenTheStreamComesToACollective") {
  FakeWatch fake(0);
  const std::size_t c = fake.watch.AddCommunicator({3, 0, 2}, "the gathers");
  const CollectiveWatch::Clock::time_point start;
  const auto after = [&](int ms) { return start + std::chrono::milliseconds(ms); };
  const CollectiveWatch::Events first = fake.Submit(c, "a");
  const CollectiveWatch::Events second = fake.Submit(c, "b");
  CHECK(fake.watch.Look(after(0)).empty());
  CHECK(fake.told == std::vector<CollectiveProgress>{{2, 0, 0}});
  // Long work before it is not its fault.
  CHECK(fake.watch.Look(after(5000)).empty());
  FakeWatch::Set(first.begin);
  CHECK(fake.watch.Look(after(5000)).empty());
  CHECK(fake.told == std::vector<CollectiveProgress>{{2, 1, 0}});
  CHECK(fake.watch.Look(after(6000)).empty());
  FakeWatch::Set(first.end);
  FakeWatch::Set(second.begin);
  CHECK(fake.watch.Look(after(6500)).empty());
  CHECK(fake.told == std::vector<CollectiveProgress>{{2, 2, 1}});
  CHECK(fake.watch.Look(after(7500)).empty());
  // Rank 2 is in the collective, rank 4 is not.
  fake.others[2] = {{2, 2, 1}};
  fake.others[4] = {{2, 1, 0}};
  CHECK(fake.watch.Look(after(7501)) ==
        "rank 0, op b: waited 1000 ms for rank 4 (collective 2 of the gathers; rank 4 has begun 1 "
        "and issued 2)");
  // Nobody has told anything.
  fake.others.clear();
  CHECK(fake.watch.Look(after(7501)) ==
        "rank 0, op b: waited 1000 ms for ranks 2, 4 (collective 2 of the gathers)");
  FakeWatch::Set(second.end);
  CHECK(fake.watch.Look(after(9000)).empty());
  CHECK(fake.told == std::vector<CollectiveProgress>{{2, 2, 2}});
}

// Ranks connect in the first one, and load what they need.
TEST_CASE("CollectiveWatch.TheFirstCollectiveHasLonger") {
  FakeWatch fake(0);
  const std::size_t c = fake.watch.AddCommunicator({2, 0, 1}, "the gathers");
  const CollectiveWatch::Clock::time_point start;
  FakeWatch::Set(fake.Submit(c, "a").begin);
  CHECK(fake.watch.Look(start).empty());
  CHECK(fake.watch.Look(start + std::chrono::milliseconds(3000)).empty());
  CHECK(fake.watch.Look(start + std::chrono::milliseconds(3001)) ==
        "rank 0, op a: waited 3000 ms for rank 1 (collective 1 of the gathers)");
}

// Ten seconds of steps with a look every 50 ms: 200 looks, and eight reports per time-out of one
// second. A report costs a message to every other rank.
TEST_CASE("CollectiveWatch.ReportsAreFewAndNotUnderTheLockOfLaunches") {
  FakeWatch fake(0);
  const std::size_t c = fake.watch.AddCommunicator({512, 0, 1}, "the gathers");
  const CollectiveWatch::Clock::time_point start;
  for (int look = 0; look < 200; ++look) {
    const CollectiveWatch::Events events = fake.Submit(c, "x");
    FakeWatch::Set(events.begin);
    FakeWatch::Set(events.end);
    CHECK(fake.watch.Look(start + look * std::chrono::milliseconds(50)).empty());
  }
  CHECK(fake.times_told > 40);
  CHECK(fake.times_told <= 80);
  std::size_t launched = 0;
  CollectiveWatch launching(0, std::chrono::milliseconds(1000), std::chrono::milliseconds(1000),
                            {.new_event = [] { return GpuEvent{}; },
                             .is_over = [](GpuEvent) { return false; },
                             .problem_of = [](std::size_t) { return std::string(); },
                             .tell =
                                 [&](const std::vector<CollectiveProgress>&) {
                                   // Waits without end under the lock.
                                   std::jthread([&] {
                                     (void)launching.Next(0);
                                     ++launched;
                                   });
                                 },
                             .told_by = {},
                             .fail = {}});
  (void)launching.AddCommunicator({1, 0, 1}, "one");
  CHECK(launching.Look(start).empty());
  CHECK(launched == 1);
}

TEST_CASE("CollectiveWatch.ReportsWhatACommunicatorSays") {
  FakeWatch fake(1);
  (void)fake.watch.AddCommunicator({2, 0, 1}, "the reductions of ranks 0, 1");
  const std::size_t c = fake.watch.AddCommunicator({2, 0, 1}, "the gathers of ranks 0, 1");
  (void)fake.Submit(c, "x");
  CHECK(fake.watch.Look({}).empty());
  fake.problems[c] = "NCCL: remote error (6)";
  CHECK(fake.watch.Look({}) == "rank 1, op x: NCCL: remote error (6) (the gathers of ranks 0, 1)");
}

}  // namespace
}  // namespace shardwright::testing
