#include "executor/cuda/nccl.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include <dlfcn.h>

namespace shardwright {
namespace {

#ifndef SHARDWRIGHT_NCCL_LIBRARY
#define SHARDWRIGHT_NCCL_LIBRARY ""
#endif

template <class Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

std::vector<std::string> Candidates() {
  if (const char* const path = std::getenv("SHARDWRIGHT_NCCL"); path != nullptr) {
    return {path};
  }
  std::vector<std::string> names = {"libnccl.so.2", "libnccl.so"};
  if (constexpr std::string_view kBuilt = SHARDWRIGHT_NCCL_LIBRARY; !kBuilt.empty()) {
    names.emplace_back(kBuilt);
  }
  return names;
}

}  // namespace

std::string LoadNccl(NcclTable* table) {
  // Two communicators of one device need a common order of their kernels (NCCL 2.26 and later keep
  // the order of launches then); read when the library is loaded.
  (void)::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  void* library = nullptr;
  std::string problem;
  for (const std::string& name : Candidates()) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      break;
    }
    problem = problem.empty() ? dlerror() : problem;
  }
  if (library == nullptr) {
    return problem +
           "; several GPUs need NCCL: install libnccl2 or set SHARDWRIGHT_NCCL to its path";
  }
  const bool is_whole = Find(library, "ncclGetVersion", &table->get_version) &&
                        Find(library, "ncclGetUniqueId", &table->get_unique_id) &&
                        Find(library, "ncclCommInitRankConfig", &table->comm_init) &&
                        Find(library, "ncclCommSplit", &table->comm_split) &&
                        Find(library, "ncclCommGetAsyncError", &table->comm_async_error) &&
                        Find(library, "ncclCommFinalize", &table->comm_finalize) &&
                        Find(library, "ncclCommDestroy", &table->comm_destroy) &&
                        Find(library, "ncclCommAbort", &table->comm_abort) &&
                        Find(library, "ncclGetErrorString", &table->error_string) &&
                        Find(library, "ncclGetLastError", &table->last_error) &&
                        Find(library, "ncclAllGather", &table->all_gather) &&
                        Find(library, "ncclReduceScatter", &table->reduce_scatter) &&
                        Find(library, "ncclAllReduce", &table->all_reduce) &&
                        Find(library, "ncclBroadcast", &table->broadcast) &&
                        Find(library, "ncclGroupStart", &table->group_start) &&
                        Find(library, "ncclGroupEnd", &table->group_end);
  int version = 0;
  if (table->get_version != nullptr && table->get_version(&version) == NcclNumbers::kSuccess) {
    const std::string old = DescribeNcclVersion(version);
    if (!old.empty()) {
      return old;
    }
  }
  return is_whole ? std::string() : "libnccl lacks functions that NCCL 2.18 and later have";
}

std::string DescribeNcclVersion(int version) {
  constexpr int kOldest = 21800;  // the first with ncclCommSplit
  if (version >= kOldest) {
    return {};
  }
  // Versions before 2.9 are numbered with two digits less.
  constexpr int kShort = 10000;
  const int minor = version < kShort ? version / 100 % 10 : version / 100 % 100;
  const int major = version < kShort ? version / 1000 : version / 10000;
  return "libnccl is version " + std::to_string(major) + '.' + std::to_string(minor) + '.' +
         std::to_string(version % 100) + ", expected at least 2.18";
}

int NcclTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFp32:
      return NcclNumbers::kFp32;
    case DType::kBf16:
      return NcclNumbers::kBf16;
    case DType::kFp16:
      return NcclNumbers::kFp16;
    default:
      return -1;
  }
}

}  // namespace shardwright
