// Traces by a CUPTI that is none: it gives every call of an emulated GPU a correlation id, and
// delivers its records in a buffer of CUPTI's layout.

#include "executor/cuda/activity_log.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "executor/cuda/session.h"
#include "executor/host/kernels/table.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/harness.h"
#include "traces/check.h"
#include "traces/waits.h"

namespace shardwright::testing {
namespace {

// CUPTI is one per process, and so is this.
struct FakeCupti {
  std::mutex mutex;
  // Guarded by mutex.
  std::uint32_t calls = 0;
  std::vector<std::byte> records;
  std::uint64_t (*now)() = nullptr;
  void (*requested)(std::uint8_t**, std::size_t*, std::size_t*) = nullptr;
  void (*completed)(void*, std::uint32_t, std::uint8_t*, std::size_t, std::size_t) = nullptr;
  int enable_status = 0;
  std::size_t dropped = 0;
};
FakeCupti fake;
thread_local std::vector<std::uint64_t> externals;

template <class Record>
void Append(const Record& record) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(&record);
  fake.records.insert(fake.records.end(), bytes, bytes + sizeof record);
}

std::size_t SizeOfRecord(const void* record) {
  switch (static_cast<const CuptiRecord*>(record)->kind) {
    case CuptiNumbers::kKernel:
      return sizeof(CuptiKernel);
    case CuptiNumbers::kExternal:
      return sizeof(CuptiExternal);
    default:
      return sizeof(CuptiCopy);
  }
}

int Flush(std::uint32_t /*flag*/) {
  const std::lock_guard lock(fake.mutex);
  if (fake.completed == nullptr || fake.records.empty()) {
    return 0;
  }
  std::uint8_t* buffer = nullptr;
  std::size_t size = 0;
  std::size_t most = 1;
  fake.requested(&buffer, &size, &most);
  REQUIRE(size >= fake.records.size());
  std::memcpy(buffer, fake.records.data(), fake.records.size());
  fake.completed(nullptr, 0, buffer, size, fake.records.size());
  fake.records.clear();
  return 0;
}

int NextRecord(std::uint8_t* buffer, std::size_t valid, void** record) {
  auto* const next =
      *record == nullptr ? buffer : static_cast<std::uint8_t*>(*record) + SizeOfRecord(*record);
  constexpr int kNoMore = 12;
  *record = next;
  return next < buffer + valid ? 0 : kNoMore;
}

CuptiTable FakeTable() {
  CuptiTable table{};
  table.register_timestamp = [](std::uint64_t (*now)()) {
    fake.now = now;
    return 0;
  };
  table.register_callbacks = [](auto* requested, auto* completed) {
    fake.requested = requested;
    fake.completed = completed;
    return 0;
  };
  table.enable = [](std::uint32_t) { return fake.enable_status; };
  table.disable = [](std::uint32_t) { return 0; };
  table.flush = Flush;
  table.next_record = NextRecord;
  table.dropped = [](void*, std::uint32_t, std::size_t* count) {
    *count = std::exchange(fake.dropped, 0);
    return 0;
  };
  table.push = [](int kind, std::uint64_t id) {
    CHECK(kind == CuptiNumbers::kCustom);
    externals.push_back(id);
    return 0;
  };
  table.pop = [](int, std::uint64_t* id) {
    *id = externals.back();
    externals.pop_back();
    return 0;
  };
  return table;
}

class ProfiledGpu : public ForwardingGpu {
 public:
  explicit ProfiledGpu(std::uint64_t seed) : ForwardingGpu(MakeEmulatedGpu({.seed = seed})) {}

  void Copy(void* to, const void* from, std::int64_t bytes, GpuStream stream) override {
    Profile<CuptiCopy>(CuptiNumbers::kCopy, stream,
                       [&] { ForwardingGpu::Copy(to, from, bytes, stream); });
  }
  void Fill(void* to, std::uint8_t byte, std::int64_t bytes, GpuStream stream) override {
    Profile<CuptiCopy>(CuptiNumbers::kFill, stream,
                       [&] { ForwardingGpu::Fill(to, byte, bytes, stream); });
  }
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    Profile<CuptiKernel>(CuptiNumbers::kKernel, stream,
                         [&] { ForwardingGpu::Launch(launch, stream); });
  }

 private:
  template <class Record, class Submit>
  static void Profile(std::uint32_t kind, GpuStream stream, const Submit& submit) {
    Record record{};
    record.kind = kind;
    {
      const std::lock_guard lock(fake.mutex);
      record.correlation = ++fake.calls;
      if (!externals.empty()) {
        Append(CuptiExternal{CuptiNumbers::kExternal, CuptiNumbers::kCustom, externals.back(),
                             record.correlation, 0});
      }
    }
    const auto begun = std::make_shared<std::uint64_t>(0);
    auto* const queue = static_cast<EmulatedStream*>(stream.value);
    queue->Push([begun] {
      *begun = fake.now();
      return true;
    });
    submit();
    queue->Push([begun, record]() mutable {
      record.start = *begun;
      record.end = fake.now();
      const std::lock_guard lock(fake.mutex);
      Append(record);
      return true;
    });
  }
};

TEST_CASE("ActivityLog.TracesAreThoseOfTheProgram") {
  for (const Dialect dialect :
       {Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kZero3}) {
    Setup setup = TinySetup(dialect, 2);
    setup.run.trace = true;
    const KernelSetOptions& kernels = FindKernelSet("shardwright-cuda-plain", "test");
    const Program program = Lower({setup.model, kernels, setup.job, setup.plan});
    REQUIRE(Verify(program).empty());
    std::string problem;
    const std::unique_ptr<ActivityLog> log = ActivityLog::Start(FakeTable(), &problem);
    REQUIRE(log != nullptr);
    ProfiledGpu gpu(static_cast<std::uint64_t>(dialect) + 1);
    CudaSession session({setup.model, kernels, setup.job, program, setup.training},
                        {.activities = log.get()}, gpu, setup.run);
    session.runtime().Initialize();
    session.runtime().RunSteps(3);
    Trace trace = session.TakeTrace();
    REQUIRE(!trace.spans.empty());
    std::size_t idle = 0;  // ops without work on the GPU: stream_wait
    for (const Span& span : trace.spans) {
      idle += span.end == SimTime(0) ? 1 : 0;
    }
    CHECK(idle < trace.spans.size() / 2);
    DeriveWaits(program, trace);
    for (const std::string& finding : CheckTrace(program, trace)) {
      FAIL_CHECK(finding);
    }
  }
}

TEST_CASE("ActivityLog.AnOpLastsFromItsFirstToItsLastActivity") {
  std::string problem;
  const std::unique_ptr<ActivityLog> log = ActivityLog::Start(FakeTable(), &problem);
  REQUIRE(log != nullptr);
  const RunClock clock{std::chrono::steady_clock::time_point()};
  Span first;
  Span second;
  log->Begin(first);
  const std::uint64_t id = externals.back();
  log->End();
  log->Begin(second);
  log->End();
  Span third;
  log->Begin(third);
  const std::uint64_t copied = externals.back();
  log->End();
  CHECK(externals.empty());
  CuptiKernel kernel{};
  kernel.kind = CuptiNumbers::kKernel;
  kernel.correlation = 7;
  kernel.start = 300;
  kernel.end = 400;
  CuptiCopy copy{};
  copy.kind = CuptiNumbers::kCopy;
  copy.correlation = 8;
  copy.start = 100;
  copy.end = 200;
  CuptiCopy alone = copy;
  alone.correlation = 10;
  CuptiCopy other = copy;  // nobody's
  other.correlation = 9;
  other.end = 900;
  Append(kernel);  // before the record that says whose it is
  Append(CuptiExternal{CuptiNumbers::kExternal, CuptiNumbers::kCustom, id, 7, 0});
  Append(CuptiExternal{CuptiNumbers::kExternal, CuptiNumbers::kCustom, id, 8, 0});
  constexpr int kOpenAcc = 1;
  Append(CuptiExternal{CuptiNumbers::kExternal, kOpenAcc, id, 9, 0});
  Append(CuptiExternal{CuptiNumbers::kExternal, CuptiNumbers::kCustom, copied, 10, 0});
  Append(copy);
  Append(alone);
  Append(other);
  fake.dropped = 3;
  CHECK(log->Write(clock) == 3);
  CHECK(first.start == SimTime(100'000));
  CHECK(first.end == SimTime(400'000));
  CHECK(second.end == SimTime(0));
  CHECK(third.end == SimTime(200'000));
}

TEST_CASE("ActivityLog.SaysWhyThereIsNone") {
  fake.enable_status = 39;
  std::string problem;
  CHECK(ActivityLog::Start(FakeTable(), &problem) == nullptr);
  CHECK(problem == "cuptiActivityEnable: CUPTI error 39");
  fake.enable_status = 0;
}

}  // namespace
}  // namespace shardwright::testing
