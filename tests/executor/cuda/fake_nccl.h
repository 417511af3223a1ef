#pragma once

// The functions of an NCCL for emulated GPUs, as nccl.h declares them; tests put them into a table
// or load them as a library.

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "executor/cuda/nccl.h"

extern "C" {
int ncclGetVersion(int* version);
int ncclGetUniqueId(shardwright::NcclUniqueId* id);
int ncclCommInitRankConfig(void** comm, int ranks, shardwright::NcclUniqueId id, int rank,
                           shardwright::NcclConfig* config);
int ncclCommSplit(void* comm, int color, int key, void** part, shardwright::NcclConfig* config);
int ncclCommGetAsyncError(void* comm, int* error);
int ncclCommFinalize(void* comm);
int ncclCommDestroy(void* comm);
int ncclCommAbort(void* comm);
const char* ncclGetErrorString(int result);
const char* ncclGetLastError(void* comm);
int ncclAllGather(const void* send, void* receive, std::size_t part, int type, void* comm,
                  void* stream);
int ncclReduceScatter(const void* send, void* receive, std::size_t part, int type, int op,
                      void* comm, void* stream);
int ncclAllReduce(const void* send, void* receive, std::size_t count, int type, int op, void* comm,
                  void* stream);
int ncclBroadcast(const void* send, void* receive, std::size_t count, int type, int root,
                  void* comm, void* stream);
int ncclGroupStart();
int ncclGroupEnd();
int ncclMemAlloc(void** memory, std::size_t bytes);
int ncclMemFree(void* memory);
int ncclCommWindowRegister(void* comm, void* memory, std::size_t bytes, void** window, int flags);
int ncclCommWindowDeregister(void* comm, void* window);
}

namespace shardwright::testing {

// Since the last call, over all ranks of this process: all-gathers whose memory lies in symmetric
// windows of a communicator that may use copy engines, other ones, sums of several ranks whose
// memory lies in no window though there are some, and what was against the rules of nccl.h.
struct FakeNcclReport {
  int by_copy_engines = 0, by_kernels = 0, outside_windows = 0;
  std::vector<std::string> mistakes;
};
[[nodiscard]] FakeNcclReport TakeFakeNcclReport();

[[nodiscard]] inline NcclTable FakeNccl() {
  (void)::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);  // as LoadNccl does
  return {.get_version = ncclGetVersion,
          .get_unique_id = ncclGetUniqueId,
          .comm_init = ncclCommInitRankConfig,
          .comm_split = ncclCommSplit,
          .comm_async_error = ncclCommGetAsyncError,
          .comm_finalize = ncclCommFinalize,
          .comm_destroy = ncclCommDestroy,
          .comm_abort = ncclCommAbort,
          .error_string = ncclGetErrorString,
          .last_error = ncclGetLastError,
          .all_gather = ncclAllGather,
          .reduce_scatter = ncclReduceScatter,
          .all_reduce = ncclAllReduce,
          .broadcast = ncclBroadcast,
          .group_start = ncclGroupStart,
          .group_end = ncclGroupEnd,
          .mem_alloc = ncclMemAlloc,
          .mem_free = ncclMemFree,
          .window_register = ncclCommWindowRegister,
          .window_deregister = ncclCommWindowDeregister};
}

}  // namespace shardwright::testing
