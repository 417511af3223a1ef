// Loads NCCL and knows its versions: 22809 is 2.28.9, and 2804 is 2.8.4.
//
//   2.18   ncclCommSplit: the oldest version that is taken
//   2.26   order of launches across communicators
//   2.27   symmetric windows, 2.28.3 to 2.28.6 excepted, which may corrupt them
//   2.28   all-gathers by copy engines, which leave the multiprocessors to kernels

#include "executor/cuda/nccl.h"

#include <cstdlib>
#include <string_view>

#include "core/library.h"

#ifndef SHARDWRIGHT_NCCL_LIBRARY
#define SHARDWRIGHT_NCCL_LIBRARY ""
#endif

namespace shardwright {
namespace {

// Versions before 2.9 are numbered with two digits less.
std::string VersionText(int version) {
  constexpr int kShort = 10000;
  const int minor = version < kShort ? version / 100 % 10 : version / 100 % 100;
  const int major = version < kShort ? version / 1000 : version / 10000;
  return std::to_string(major) + '.' + std::to_string(minor) + '.' + std::to_string(version % 100);
}

constexpr const char* kOrderVariable = "NCCL_LAUNCH_ORDER_IMPLICIT";

// As NCCL reads its switches: a number other than 0.
bool IsOn(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && std::strtoll(text, nullptr, 0) != 0;
}

// Fills the table. Returns why the library will not do, or an empty text.
std::string Fill(void* library, NcclTable* table) {
  const bool is_whole = FindFunction(library, "ncclGetVersion", &table->get_version) &&
                        FindFunction(library, "ncclGetUniqueId", &table->get_unique_id) &&
                        FindFunction(library, "ncclCommInitRankConfig", &table->comm_init) &&
                        FindFunction(library, "ncclCommSplit", &table->comm_split) &&
                        FindFunction(library, "ncclCommGetAsyncError", &table->comm_async_error) &&
                        FindFunction(library, "ncclCommFinalize", &table->comm_finalize) &&
                        FindFunction(library, "ncclCommDestroy", &table->comm_destroy) &&
                        FindFunction(library, "ncclCommAbort", &table->comm_abort) &&
                        FindFunction(library, "ncclGetErrorString", &table->error_string) &&
                        FindFunction(library, "ncclGetLastError", &table->last_error) &&
                        FindFunction(library, "ncclAllGather", &table->all_gather) &&
                        FindFunction(library, "ncclReduceScatter", &table->reduce_scatter) &&
                        FindFunction(library, "ncclAllReduce", &table->all_reduce) &&
                        FindFunction(library, "ncclBroadcast", &table->broadcast) &&
                        FindFunction(library, "ncclGroupStart", &table->group_start) &&
                        FindFunction(library, "ncclGroupEnd", &table->group_end);
  (void)(FindFunction(library, "ncclMemAlloc", &table->mem_alloc) &&
         FindFunction(library, "ncclMemFree", &table->mem_free) &&
         FindFunction(library, "ncclCommWindowRegister", &table->window_register) &&
         FindFunction(library, "ncclCommWindowDeregister", &table->window_deregister));
  int version = 0;
  if (table->get_version != nullptr && table->get_version(&version) == NcclNumbers::kSuccess) {
    std::string old = DescribeNcclVersion(version);
    if (!old.empty()) {
      return old;
    }
  }
  return is_whole ? std::string() : "libnccl lacks functions that NCCL 2.18 and later have";
}

}  // namespace

std::string LoadNccl(NcclTable* table) {
  // Two communicators of one device need a common order of their kernels (NCCL 2.26 and later keep
  // the order of launches then, see DescribeNoLaunchOrder); read when the library is loaded. To
  // NCCL an empty value is none.
  const char* const order = std::getenv(kOrderVariable);
  (void)::setenv(kOrderVariable, "1", order != nullptr && *order == '\0' ? 1 : 0);
  std::string problem, wrong;
  void* const library =
      LoadLibrary("SHARDWRIGHT_NCCL", {"libnccl.so.2", "libnccl.so"}, SHARDWRIGHT_NCCL_LIBRARY,
                  &problem, [&](void* opened) { return wrong = Fill(opened, table); });
  if (library != nullptr) {
    return {};
  }
  return wrong.empty() ? problem +
                             "; several GPUs need NCCL: install libnccl2 or set SHARDWRIGHT_NCCL "
                             "to its path"
                       : problem;
}

std::string DescribeNcclVersion(int version) {
  constexpr int kOldest = 21800;  // the first with ncclCommSplit
  if (version >= kOldest) {
    return {};
  }
  return "libnccl is version " + VersionText(version) + ", expected at least 2.18";
}

std::string DescribeNoLaunchOrder(int version) {
  constexpr int kFirst = 22600;  // the first that reads kOrderVariable
  if (version >= kFirst && IsOn(kOrderVariable)) {
    return {};
  }
  return (version < kFirst
              ? "NCCL " + VersionText(version) + " keeps no order of launches across " +
                    "communicators, 2.26 is the first"
              : std::string(kOrderVariable) +
                    " is off, so NCCL keeps no order of launches across communicators") +
         ": all collectives of a rank run one at a time, which simulate does not know";
}

NcclConfig NcclConfigFor(int version) {
  NcclConfig config;
  if (version >= NcclNumbers::kCopyVersion) {
    config.size = sizeof config;
    config.version = NcclNumbers::kCopyVersion;
    config.block_policy = NcclNumbers::kCopyEngines;
  } else {
    config.size = offsetof(NcclConfig, name);  // 2.18's, with its padding
    config.version = 21800;
  }
  return config;
}

std::string DescribeNoWindows(const NcclTable& table) {
  int version = 0;
  if (table.get_version(&version) != NcclNumbers::kSuccess ||
      version < NcclNumbers::kWindowVersion || table.window_deregister == nullptr) {
    return "NCCL " + VersionText(version) + " has none, 2.27 is the first";
  }
  constexpr int kFirstWrong = 22803, kFirstRight = 22807;
  if (version >= kFirstWrong && version < kFirstRight) {
    return "NCCL " + VersionText(version) + " may corrupt what lies in them, 2.28.7 does not";
  }
  const char* const enabled = std::getenv("NCCL_WIN_ENABLE");
  return enabled != nullptr && std::string_view(enabled) == "0" ? "NCCL_WIN_ENABLE=0"
                                                                : std::string();
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
