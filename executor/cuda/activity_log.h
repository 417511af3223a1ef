#pragma once

// When each op's work ran on the GPU, by CUPTI's activity records: they are exact, and take no
// events between ops. CUPTI's functions come from a table, which is filled with dlsym, so that
// nothing links the library and tests put their own functions there. Only the used part is declared
// here, the same since CUDA 11.8. tests/executor/cuda/cupti_abi_check.cc compares it with the
// headers where they are installed.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/units.h"
#include "executor/host/clock.h"
#include "traces/trace.h"

namespace shardwright {

struct CuptiNumbers {
  static constexpr int kSuccess = 0;
  static constexpr std::uint32_t kCopy = 1, kFill = 2, kDriver = 4, kRuntime = 5, kKernel = 10,
                                 kPeerCopy = 22, kExternal = 39;
  static constexpr int kCustom = 3;            // kind of external ids
  static constexpr std::uint32_t kForced = 1;  // flush
};

// The beginnings of CUPTI's records, without padding of their own.
struct CuptiRecord {
  std::uint32_t kind;
};
struct CuptiKernel {
  std::uint32_t kind, unused[3];
  std::uint64_t start, end;  // ns of our clock
  std::uint64_t unused2;
  std::uint32_t device, context, stream, unused3[10], correlation;
};
struct CuptiCopy {  // and fills
  std::uint32_t kind, unused;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, correlation;
};
struct CuptiPeerCopy {
  std::uint32_t kind, unused;
  std::uint64_t bytes, start, end;
  std::uint32_t device, context, stream, ends[4], correlation;
};
struct CuptiExternal {
  std::uint32_t kind, external_kind;
  std::uint64_t external;
  std::uint32_t correlation, unused;
};

struct CuptiTable {
  int (*register_timestamp)(std::uint64_t (*now)());
  int (*register_callbacks)(void (*requested)(std::uint8_t** buffer, std::size_t* size,
                                              std::size_t* most),
                            void (*completed)(void* context, std::uint32_t stream,
                                              std::uint8_t* buffer, std::size_t size,
                                              std::size_t valid));
  int (*enable)(std::uint32_t kind);
  int (*disable)(std::uint32_t kind);
  int (*flush)(std::uint32_t flag);
  int (*next_record)(std::uint8_t* buffer, std::size_t valid, void** record);
  int (*dropped)(void* context, std::uint32_t stream, std::size_t* count);
  int (*push)(int kind, std::uint64_t id);
  int (*pop)(int kind, std::uint64_t* id);
};

// Fills the table from SHARDWRIGHT_CUPTI (a path), libcupti.so where the loader looks, or where it
// was when this program was built. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadCupti(CuptiTable* table);

// One of a process at a time, since CUPTI is one.
class ActivityLog {
 public:
  // Begins to record, best before the GPU is opened. Null where CUPTI refuses, as it does under
  // another profiler; then `problem` says what.
  [[nodiscard]] static std::unique_ptr<ActivityLog> Start(const CuptiTable& table,
                                                          std::string* problem);
  ~ActivityLog();
  ActivityLog(const ActivityLog&) = delete;
  ActivityLog& operator=(const ActivityLog&) = delete;

  // All work that the calling thread gives to the GPU from now on, until End, is the span's. CUPTI
  // does not know whose work it is that another thread gives for it.
  void Begin(Span& span);
  void End();
  // Writes start and end of all spans since the last call, as times of the clock; spans without
  // work stay as they are. No work is under way. Returns how many records CUPTI has dropped.
  [[nodiscard]] std::size_t Write(const RunClock& clock);

 private:
  explicit ActivityLog(const CuptiTable& table) : table_(table) {}
  static void Requested(std::uint8_t** buffer, std::size_t* size, std::size_t* most);
  static void Completed(void* context, std::uint32_t stream, std::uint8_t* buffer, std::size_t size,
                        std::size_t valid);
  void Add(const CuptiRecord& record);

  // Of one API call's work.
  struct Activity {
    std::uint32_t correlation = 0;
    std::uint64_t start = 0, end = 0;  // ns
  };

  const CuptiTable table_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Span*> works_;                                    // number i has external id i
  std::unordered_map<std::uint32_t, std::uint64_t> externals_;  // by correlation
  std::vector<Activity> activities_;
  std::size_t dropped_ = 0;
};

}  // namespace shardwright
