#include "executor/cuda/cudnn.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include <dlfcn.h>

namespace shardwright {
namespace {

#ifndef SHARDWRIGHT_CUDNN_LIBRARY
#define SHARDWRIGHT_CUDNN_LIBRARY ""
#endif

template <class Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

std::vector<std::string> Candidates() {
  if (const char* const path = std::getenv("SHARDWRIGHT_CUDNN"); path != nullptr) {
    return {path};
  }
  std::vector<std::string> names = {"libcudnn.so.9"};
  if (constexpr std::string_view kBuilt = SHARDWRIGHT_CUDNN_LIBRARY; !kBuilt.empty()) {
    names.emplace_back(kBuilt);
  }
  return names;
}

}  // namespace

std::string LoadCudnn(CudnnTable* table) {
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
    return problem;
  }
  std::size_t (*get_cuda_version)() = nullptr;
  const bool is_whole = Find(library, "cudnnGetCudartVersion", &get_cuda_version) &&
                        Find(library, "cudnnGetVersion", &table->get_version) &&
                        Find(library, "cudnnCreate", &table->create) &&
                        Find(library, "cudnnSetStream", &table->set_stream) &&
                        Find(library, "cudnnGetErrorString", &table->error_string) &&
                        Find(library, "cudnnGetLastErrorString", &table->last_error) &&
                        Find(library, "cudnnBackendCreateDescriptor", &table->desc_create) &&
                        Find(library, "cudnnBackendDestroyDescriptor", &table->desc_destroy) &&
                        Find(library, "cudnnBackendSetAttribute", &table->desc_set) &&
                        Find(library, "cudnnBackendGetAttribute", &table->desc_get) &&
                        Find(library, "cudnnBackendFinalize", &table->desc_finalize) &&
                        Find(library, "cudnnBackendExecute", &table->execute);
  if (!is_whole) {
    return "libcudnn lacks functions that cuDNN 9 has";
  }
  // It loads this library by name, and ends the process where it does not find it.
  const std::string products = "libcublasLt.so." + std::to_string(get_cuda_version() / 1000);
  if (dlopen(products.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    return "libcudnn needs another library: " + std::string(dlerror());
  }
  return DescribeCudnnVersion(table->get_version());
}

std::string DescribeCudnnVersion(std::size_t version) {
  constexpr std::size_t kOldest = 91100;  // deterministic gradients of attention on Hopper
  if (version >= kOldest) {
    return {};
  }
  // Before version 9 the major number is the thousands': 8907.
  constexpr std::size_t kNine = 90000;
  const std::size_t major = version < kNine ? version / 1000 : version / 10000;
  const std::size_t minor = version / 100 % (version < kNine ? 10 : 100);
  return "libcudnn is version " + std::to_string(major) + '.' + std::to_string(minor) + '.' +
         std::to_string(version % 100) + ", expected at least 9.11";
}

int CudnnTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return CudnnNumbers::kBf16;
    case DType::kFp16:
      return CudnnNumbers::kFp16;
    default:
      return -1;
  }
}

}  // namespace shardwright
