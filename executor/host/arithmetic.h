#pragma once

// Element-wise loops over memory of any floating-point dtype. All arithmetic is fp32.

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/units.h"
#include "executor/call.h"

namespace shardwright {

// Elements [begin, begin + count) of `data` as floats.
void LoadFloats(DType dtype, const std::byte* data, std::int64_t begin, std::int64_t count,
                float* out);
void StoreFloats(DType dtype, std::byte* data, std::int64_t begin, std::int64_t count,
                 const float* in);

void ZeroFill(std::span<const ByteRange> ranges);
// Fills with 0xff bytes: NaN in every floating-point dtype, -1 as an integer.
void PoisonFill(std::span<const ByteRange> ranges);
void RunCopy(const CopyRun& run);
// data[i] /= divisor.
void Divide(const ElementRange& range, double divisor);

// A stretch of a reduction.
struct Fold {
  DType dtype = DType::kFp32;
  std::int64_t source_begin = 0;  // first element in every source
  std::int64_t out_begin = 0;
  std::int64_t count = 0;
  double divisor = 1.0;
};
// out[out_begin + i] = (((s_0 + s_1) + s_2) + ...) / divisor with s_r = sources[r][source_begin +
// i], summed in fp32, rounded to `dtype` once. A source may be `out` itself if both begin alike.
void FoldInOrder(const Fold& fold, std::span<const std::byte* const> sources, std::byte* out);

}  // namespace shardwright
