#pragma once

// Times products on one GPU for CublasLt. In libshardwright_cuda.so only.

#include <memory>

#include "executor/cuda/cublaslt.h"

namespace shardwright {

// Of GPU number `device`.
[[nodiscard]] std::unique_ptr<ProductTimer> MakeCudaProductTimer(int device);

}  // namespace shardwright
