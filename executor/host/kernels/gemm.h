#pragma once

// Matrix product of any dtypes and strides, by the sgemm of OpenBLAS on each of its threads. What
// must be converted for it is so in the caller's workspace. Equal sizes, strides, dtypes and
// numbers of threads give equal bits on one machine: OpenBLAS chooses its loops by the processor
// and the sizes. It is loaded when it is first needed, since it maps memory and starts threads by
// the number of processors.

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/parallel.h"
#include "core/units.h"
#include "models/kernels/fp8.h"

namespace shardwright {

// Before it is multiplied, element (i, j) is multiplied with scales[i * row_stride + j *
// column_stride] and rounded; the result is divided by that scale again, which so depends on a's
// row or b's column at most.
struct GemmRounding {
  Fp8Format format = Fp8Format::kE4m3;
  const float* scales = nullptr;  // null: it is multiplied as it is
  std::int64_t row_stride = 0, column_stride = 0;
};

// Element (i, j) is at data[i * row_stride + j * column_stride], strides in elements. fp32, bf16 or
// fp16.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
  GemmRounding fp8 = {};  // of both operands or of none
};

// Rows of contiguous elements.
struct GemmResult {
  void* data = nullptr;
  DType dtype = DType::kFp32;
  std::int64_t row_stride = 0;
  bool accumulate = false;  // adds to what is there; a 16-bit sum is rounded once
  // Every part of the product is finished before it is stored or added, so that adding it gives the
  // bits of a product that was kept apart and added later. Needs the workspace of a 16-bit result,
  // as does a product in fp8.
  bool finish_first = false;
};

struct GemmSize {
  std::int64_t m = 0, n = 0, k = 0;
};

// Loads OpenBLAS; the first product does that, too. Throws EnvironmentError where there is none, so
// whoever is going to multiply asks before his threads start.
void LoadHostProducts();

// c = a (m, k) * b (k, n), and the n numbers of `bias` added to every row (null: none), all summed
// in fp32. `workspace`: HostGemmWorkspace (models/kernels/host.h) bytes, 64-byte aligned. `team`
// (null: the calling thread alone) shares the product. Requires m, n, k >= 1.
void HostGemm(const GemmSize& size, const GemmOperand& a, const GemmOperand& b, const GemmResult& c,
              const float* bias, std::span<std::byte> workspace, Team* team = nullptr);

}  // namespace shardwright
