// Loads cuDNN and checks its version. Example of its numbers: 91002 is 9.10.2, 8907 is 8.9.7.
//
// PyTorch 2.8 to 2.10 brings 9.10.2, so this version is the oldest that is taken. A library that is
// missing or older is no error: attention and convolutions go to our own kernels, with a warning.

#include "executor/cuda/cudnn.h"

#include "core/library.h"

#ifndef SHARDWRIGHT_CUDNN_LIBRARY
#define SHARDWRIGHT_CUDNN_LIBRARY ""
#endif

namespace shardwright {

namespace {

// Fills the table. Returns why the library will not do, or an empty text.
std::string Fill(void* library, CudnnTable* table) {
  std::string problem;
  std::size_t (*get_cuda_version)() = nullptr;
  const bool is_whole =
      FindFunction(library, "cudnnGetCudartVersion", &get_cuda_version) &&
      FindFunction(library, "cudnnGetVersion", &table->get_version) &&
      FindFunction(library, "cudnnCreate", &table->create) &&
      FindFunction(library, "cudnnDestroy", &table->destroy) &&
      FindFunction(library, "cudnnSetStream", &table->set_stream) &&
      FindFunction(library, "cudnnGetErrorString", &table->error_string) &&
      FindFunction(library, "cudnnGetLastErrorString", &table->last_error) &&
      FindFunction(library, "cudnnBackendCreateDescriptor", &table->desc_create) &&
      FindFunction(library, "cudnnBackendDestroyDescriptor", &table->desc_destroy) &&
      FindFunction(library, "cudnnBackendSetAttribute", &table->desc_set) &&
      FindFunction(library, "cudnnBackendGetAttribute", &table->desc_get) &&
      FindFunction(library, "cudnnBackendFinalize", &table->desc_finalize) &&
      FindFunction(library, "cudnnBackendExecute", &table->execute);
  if (!is_whole) {
    return "libcudnn lacks functions that cuDNN 9 has";
  }
  // It loads this library by name, and ends the process where it does not find it.
  const std::string products = "libcublasLt.so." + std::to_string(get_cuda_version() / 1000);
  if (OpenLibrary(products, &problem) == nullptr) {
    return "libcudnn needs another library: " + problem;
  }
  return DescribeCudnnVersion(table->get_version());
}

}  // namespace

std::string LoadCudnn(CudnnTable* table) {
  std::string problem;
  void* const library =
      LoadLibrary("SHARDWRIGHT_CUDNN", {"libcudnn.so.9"}, SHARDWRIGHT_CUDNN_LIBRARY, &problem,
                  [&](void* opened) { return Fill(opened, table); });
  return library == nullptr ? problem : std::string();
}

std::string DescribeCudnnVersion(std::size_t version) {
  constexpr std::size_t kOldest = 91002;  // PyTorch's from 2.8 to 2.10; plans as 9.11's
  if (version >= kOldest) {
    return {};
  }
  // Before version 9 the major number is the thousands': 8907.
  constexpr std::size_t kNine = 90000;
  const std::size_t major = version < kNine ? version / 1000 : version / 10000;
  const std::size_t minor = version / 100 % (version < kNine ? 10 : 100);
  return "libcudnn is version " + std::to_string(major) + '.' + std::to_string(minor) + '.' +
         std::to_string(version % 100) + ", expected at least 9.10.2";
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
