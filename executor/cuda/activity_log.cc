// How spans get their times. Example: op 5 launches two kernels.
//
//   Begin(span)   external id 5 is pushed for this thread
//   launches      CUPTI numbers the API calls: correlations 101 and 102
//   End()         the id is popped
//   records       external: 101 -> 5, 102 -> 5
//                 kernels: 101 from 1,000 to 1,400 ns, 102 from 1,500 to 1,900 ns
//   Write(clock)  the span begins at 1,000 and ends at 1,900 ns
//
// An op's span is from the first begin to the last end of its kernels and copies. Events around
// each op would do the same, but add work between ops, which short ops feel.
//
// CUPTI hands out records in buffers of 4 MiB, on a thread of its own. Records of one op may come
// in any order and in several buffers, so they are joined in Write only.

#include "executor/cuda/activity_log.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "core/error.h"
#include "core/library.h"

#ifndef SHARDWRIGHT_CUPTI_LIBRARY
#define SHARDWRIGHT_CUPTI_LIBRARY ""
#endif

namespace shardwright {
namespace {

// CUPTI tells the calls of its records' ids only where it records API calls, too.
constexpr std::array kKinds = {
    CuptiNumbers::kExternal, CuptiNumbers::kRuntime,  CuptiNumbers::kDriver, CuptiNumbers::kKernel,
    CuptiNumbers::kCopy,     CuptiNumbers::kPeerCopy, CuptiNumbers::kFill};
constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr std::size_t kBufferAlignment = 8;  // of records

std::atomic<ActivityLog*> current = nullptr;  // its callbacks have no argument of ours

std::uint64_t Nanoseconds(std::chrono::steady_clock::time_point time) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

// Fills the table. Returns why the library will not do, or an empty text.
std::string Fill(void* library, CuptiTable* table) {
  const bool is_whole =
      FindFunction(library, "cuptiActivityRegisterTimestampCallback", &table->register_timestamp) &&
      FindFunction(library, "cuptiActivityRegisterCallbacks", &table->register_callbacks) &&
      FindFunction(library, "cuptiActivityEnable", &table->enable) &&
      FindFunction(library, "cuptiActivityDisable", &table->disable) &&
      FindFunction(library, "cuptiActivityFlushAll", &table->flush) &&
      FindFunction(library, "cuptiActivityGetNextRecord", &table->next_record) &&
      FindFunction(library, "cuptiActivityGetNumDroppedRecords", &table->dropped) &&
      FindFunction(library, "cuptiActivityPushExternalCorrelationId", &table->push) &&
      FindFunction(library, "cuptiActivityPopExternalCorrelationId", &table->pop);
  return is_whole ? std::string() : "libcupti lacks functions that CUDA 12 and 13 have";
}

}  // namespace

std::string LoadCupti(CuptiTable* table) {
  std::string problem;
  void* const library = LoadLibrary(
      "SHARDWRIGHT_CUPTI", {"libcupti.so.13", "libcupti.so.12", "libcupti.so"},
      SHARDWRIGHT_CUPTI_LIBRARY, &problem, [&](void* opened) { return Fill(opened, table); });
  return library == nullptr ? problem : std::string();
}

// CUPTI reads our clock for its records, so that no conversion between clocks is needed.
std::unique_ptr<ActivityLog> ActivityLog::Start(const CuptiTable& table, std::string* problem) {
  std::unique_ptr<ActivityLog> log(new ActivityLog(table));
  ActivityLog* none = nullptr;
  SW_CHECK(current.compare_exchange_strong(none, log.get()), "two logs of activities");
  const auto try_to = [&](int status, const char* call) {
    if (status != CuptiNumbers::kSuccess && problem->empty()) {
      *problem = std::string(call) + ": CUPTI error " + std::to_string(status);
    }
  };
  // Times of the clock that the host's have.
  try_to(table.register_timestamp([] { return Nanoseconds(std::chrono::steady_clock::now()); }),
         "cuptiActivityRegisterTimestampCallback");
  try_to(table.register_callbacks(&Requested, &Completed), "cuptiActivityRegisterCallbacks");
  for (const std::uint32_t kind : kKinds) {
    try_to(problem->empty() ? table.enable(kind) : CuptiNumbers::kSuccess, "cuptiActivityEnable");
  }
  return problem->empty() ? std::move(log) : nullptr;
}

ActivityLog::~ActivityLog() {
  for (const std::uint32_t kind : kKinds) {
    (void)table_.disable(kind);
  }
  (void)table_.flush(CuptiNumbers::kForced);
  current = nullptr;
}

void ActivityLog::Begin(Span& span) {
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = works_.size();
    works_.push_back(&span);
  }
  if (const int status = table_.push(CuptiNumbers::kCustom, id); status != CuptiNumbers::kSuccess) {
    throw RunError("cuptiActivityPushExternalCorrelationId: CUPTI error " + std::to_string(status));
  }
}

void ActivityLog::End() {
  std::uint64_t id = 0;
  (void)table_.pop(CuptiNumbers::kCustom, &id);
}

void ActivityLog::Requested(std::uint8_t** buffer, std::size_t* size, std::size_t* most) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *most = 0;  // as many as there is room for
}

void ActivityLog::Completed(void* context, std::uint32_t stream, std::uint8_t* buffer,
                            std::size_t /*size*/, std::size_t valid) {
  if (ActivityLog* const log = current; log != nullptr) {
    const std::lock_guard lock(log->mutex_);
    void* record = nullptr;
    while (valid > 0 && log->table_.next_record(buffer, valid, &record) == CuptiNumbers::kSuccess) {
      log->Add(*static_cast<const CuptiRecord*>(record));
    }
    std::size_t dropped = 0;
    (void)log->table_.dropped(context, stream, &dropped);
    log->dropped_ += dropped;
  }
  std::free(buffer);
}

// Records of unknown work, and of API calls, are left out. End 0 says that CUPTI has no time.
void ActivityLog::Add(const CuptiRecord& record) {
  const auto add = [&](const auto& activity) {
    if (activity.end > 0) {
      activities_.push_back({activity.correlation, activity.start, activity.end});
    }
  };
  switch (record.kind) {
    case CuptiNumbers::kKernel:
      return add(reinterpret_cast<const CuptiKernel&>(record));
    case CuptiNumbers::kCopy:
    case CuptiNumbers::kFill:
      return add(reinterpret_cast<const CuptiCopy&>(record));
    case CuptiNumbers::kPeerCopy:
      return add(reinterpret_cast<const CuptiPeerCopy&>(record));
    case CuptiNumbers::kExternal: {
      const auto& external = reinterpret_cast<const CuptiExternal&>(record);
      if (external.external_kind == CuptiNumbers::kCustom) {
        externals_[external.correlation] = external.external;
      }
      return;
    }
    default:  // API calls
      return;
  }
}

// O(records), with one look-up by hash for each.
std::size_t ActivityLog::Write(const RunClock& clock) {
  (void)table_.flush(CuptiNumbers::kForced);
  const std::lock_guard lock(mutex_);
  std::vector<Activity> work(works_.size());
  for (const Activity& activity : activities_) {
    const auto external = externals_.find(activity.correlation);
    if (external == externals_.end() || external->second >= work.size()) {
      continue;  // not of an op
    }
    Activity& all = work[external->second];
    all.start = all.end == 0 ? activity.start : std::min(all.start, activity.start);
    all.end = std::max(all.end, activity.end);
  }
  const auto time_of = [&](std::uint64_t ns) {
    return clock.TimeOf(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns)));
  };
  for (std::size_t i = 0; i < work.size(); ++i) {
    if (work[i].end == 0) {
      continue;
    }
    works_[i]->start = time_of(work[i].start);
    works_[i]->end = time_of(work[i].end);
  }
  works_.clear();
  externals_.clear();
  activities_.clear();
  return std::exchange(dropped_, 0);
}

}  // namespace shardwright
