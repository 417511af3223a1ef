#pragma once

// Errors of the CUDA runtime. In libshardwright_cuda.so only.

#include <string>

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace shardwright {

// Throws RunError with CUDA's text.
inline void Check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    throw RunError(std::string(call) + ": " + cudaGetErrorString(status));
  }
}

}  // namespace shardwright
