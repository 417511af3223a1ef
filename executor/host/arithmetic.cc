#include "executor/host/arithmetic.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "executor/host/kernels/rows.h"

namespace shardwright {

void LoadFloats(DType dtype, const std::byte* data, std::int64_t begin, std::int64_t count,
                float* out) {
  LoadFloats(ConstView{data, dtype}, begin, count, out);
}

void StoreFloats(DType dtype, std::byte* data, std::int64_t begin, std::int64_t count,
                 const float* in) {
  StoreFloats(in, count, View{data, dtype}, begin);
}

void ZeroFill(std::span<const ByteRange> ranges) {
  for (const ByteRange& r : ranges) {
    std::memset(r.data, 0, static_cast<std::size_t>(r.bytes));
  }
}

void PoisonFill(std::span<const ByteRange> ranges) {
  for (const ByteRange& r : ranges) {
    std::memset(r.data, 0xff, static_cast<std::size_t>(r.bytes));
  }
}

void RunCopy(const CopyRun& run) {
  if (run.from_dtype == run.to_dtype && !run.accumulate) {
    std::memcpy(run.to, run.from, static_cast<std::size_t>(run.count * SizeOf(run.to_dtype)));
    return;
  }
  std::array<float, kChunk> value{};
  std::array<float, kChunk> sum{};
  for (std::int64_t begin = 0; begin < run.count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, run.count - begin);
    LoadFloats(run.from_dtype, run.from, begin, n, value.data());
    if (run.accumulate) {
      LoadFloats(run.to_dtype, run.to, begin, n, sum.data());
      for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
        value[i] = sum[i] + value[i];
      }
    }
    StoreFloats(run.to_dtype, run.to, begin, n, value.data());
  }
}

void Divide(const ElementRange& range, double divisor) {
  if (divisor == 1.0) {
    return;
  }
  const auto d = static_cast<float>(divisor);
  std::array<float, kChunk> value{};
  for (std::int64_t begin = 0; begin < range.count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, range.count - begin);
    LoadFloats(range.dtype, range.data, begin, n, value.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      value[i] /= d;
    }
    StoreFloats(range.dtype, range.data, begin, n, value.data());
  }
}

void FoldInOrder(const Fold& fold, std::span<const std::byte* const> sources, std::byte* out) {
  const auto d = static_cast<float>(fold.divisor);
  std::array<float, kChunk> sum{};
  std::array<float, kChunk> value{};
  for (std::int64_t begin = 0; begin < fold.count; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, fold.count - begin);
    const auto size = static_cast<std::size_t>(n);
    LoadFloats(fold.dtype, sources.front(), fold.source_begin + begin, n, sum.data());
    for (const std::byte* source : sources.subspan(1)) {
      LoadFloats(fold.dtype, source, fold.source_begin + begin, n, value.data());
      for (std::size_t i = 0; i < size; ++i) {
        sum[i] += value[i];
      }
    }
    if (fold.divisor != 1.0) {
      for (std::size_t i = 0; i < size; ++i) {
        sum[i] /= d;
      }
    }
    StoreFloats(fold.dtype, out, fold.out_begin + begin, n, sum.data());
  }
}

}  // namespace shardwright
