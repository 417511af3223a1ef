#pragma once

// NCCL, as far as it is used. Its functions come from a table, which is filled with dlsym, so that
// nothing links the library and tests put their own functions there.
// tests/executor/cuda/nccl_abi_check.cc compares these declarations with nccl.h where it is
// installed.

#include <climits>
#include <cstddef>
#include <string>

#include "core/units.h"

namespace shardwright {

// The numbers of nccl.h that are used; the same since NCCL 2.18.
struct NcclNumbers {
  static constexpr int kSuccess = 0, kInProgress = 7;
  static constexpr int kUint8 = 1, kInt64 = 4, kFp16 = 6, kFp32 = 7, kFp64 = 8, kBf16 = 9;
  static constexpr int kSum = 0, kAvg = 4;
  static constexpr int kSymmetricWindow = 1;  // since 2.27, of memory at multiples of
  static constexpr int kWindowAlignment = 4096;
  static constexpr int kCopyEngines = 2;  // NCCL_CTA_POLICY_ZERO, since 2.28
  static constexpr int kWindowVersion = 22700, kCopyVersion = 22800;
};

struct NcclUniqueId {
  char internal[128];
};

// The beginning of ncclConfig_t as version 2.28 has it; later versions accept a shorter one. A
// field with INT_MIN or null is left to NCCL.
struct NcclConfig {
  std::size_t size = 0;
  unsigned int magic = 0xcafebeef;
  unsigned int version = 0;
  int blocking = 0;  // calls return at once, so that a communicator that hangs can be aborted
  int cluster_size = INT_MIN, least_blocks = INT_MIN, most_blocks = INT_MIN;
  const char* network = nullptr;
  int shares_on_split = INT_MIN;
  // Here version 2.18 ended.
  int traffic_class = INT_MIN;
  const char* name = nullptr;
  int collnet = INT_MIN, block_policy = INT_MIN, shares_on_shrink = INT_MIN;
  int nvls_blocks = INT_MIN, channels_per_peer = INT_MIN, nvlink_centric = INT_MIN;
};

// Communicators and streams are opaque; functions return 0 or ncclResult_t.
struct NcclTable {
  int (*get_version)(int* version);
  int (*get_unique_id)(NcclUniqueId* id);
  int (*comm_init)(void** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  int (*comm_split)(void* comm, int color, int key, void** part, NcclConfig* config);
  int (*comm_async_error)(void* comm, int* error);
  int (*comm_finalize)(void* comm);
  int (*comm_destroy)(void* comm);
  int (*comm_abort)(void* comm);
  const char* (*error_string)(int result);
  const char* (*last_error)(void* comm);
  int (*all_gather)(const void* send, void* receive, std::size_t part, int type, void* comm,
                    void* stream);
  int (*reduce_scatter)(const void* send, void* receive, std::size_t part, int type, int op,
                        void* comm, void* stream);
  int (*all_reduce)(const void* send, void* receive, std::size_t count, int type, int op,
                    void* comm, void* stream);
  int (*broadcast)(const void* send, void* receive, std::size_t count, int type, int root,
                   void* comm, void* stream);
  int (*group_start)();
  int (*group_end)();
  // Since 2.27; null in older versions.
  int (*mem_alloc)(void** memory, std::size_t bytes);
  int (*mem_free)(void* memory);
  int (*window_register)(void* comm, void* memory, std::size_t bytes, void** window, int flags);
  int (*window_deregister)(void* comm, void* window);
};

// Fills the table from SHARDWRIGHT_NCCL (a path), libnccl.so.2 where the loader looks, or where it
// was when this program was built. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadNccl(NcclTable* table);

// Why a version, as NCCL numbers it (22809 for 2.28.9), will not do, or an empty text.
[[nodiscard]] std::string DescribeNcclVersion(int version);

// NCCL may start collectives of several communicators in another order than the host launched them.
// Says which version, or which variable of the environment, allows that; an empty text: neither.
[[nodiscard]] std::string DescribeNoLaunchOrder(int version);

// As the library in use reads it: all-gathers by copy engines where `version` has them.
[[nodiscard]] NcclConfig NcclConfigFor(int version);

// Why this library gets no symmetric windows, or an empty text. NCCL's own switch for them,
// NCCL_WIN_ENABLE=0, is heeded.
[[nodiscard]] std::string DescribeNoWindows(const NcclTable& table);

// NCCL's number for numbers that are summed; -1: it does not sum them.
[[nodiscard]] int NcclTypeOf(DType dtype);

}  // namespace shardwright
