#include "executor/host/kernels/rows.h"

#include <string>

#include "core/error.h"
#include "executor/half.h"
#include "executor/host/kernels/clones.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

SHARDWRIGHT_CLONES void LoadBf16(const std::uint16_t* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = Bf16ToFloat(from[i]);
  }
}

SHARDWRIGHT_CLONES void LoadFp16(const std::uint16_t* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = Fp16ToFloat(from[i]);
  }
}

SHARDWRIGHT_CLONES void StoreBf16(const float* from, std::int64_t n, std::uint16_t* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = FloatToBf16(from[i]);
  }
}

SHARDWRIGHT_CLONES void StoreFp16(const float* from, std::int64_t n, std::uint16_t* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = FloatToFp16(from[i]);
  }
}

SHARDWRIGHT_CLONES void AddFp32(const float* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] += from[i];
  }
}

}  // namespace

void LoadFloats(const ConstView& from, std::int64_t offset, std::int64_t n, float* to) {
  if (from.dtype == DType::kFp32) {
    std::copy_n(static_cast<const float*>(from.data) + offset, n, to);
    return;
  }
  const std::uint16_t* bits = static_cast<const std::uint16_t*>(from.data) + offset;
  from.dtype == DType::kBf16 ? LoadBf16(bits, n, to) : LoadFp16(bits, n, to);
}

float ReadOne(const ConstView& from, std::int64_t i) {
  float value = 0.0F;
  LoadFloats(from, i, 1, &value);
  return value;
}

void StoreFloats(const float* from, std::int64_t n, const View& to, std::int64_t offset) {
  if (to.dtype == DType::kFp32) {
    std::copy_n(from, n, static_cast<float*>(to.data) + offset);
    return;
  }
  std::uint16_t* bits = static_cast<std::uint16_t*>(to.data) + offset;
  to.dtype == DType::kBf16 ? StoreBf16(from, n, bits) : StoreFp16(from, n, bits);
}

void AddFloats(const float* from, std::int64_t n, const View& to, std::int64_t offset) {
  if (to.dtype == DType::kFp32) {
    AddFp32(from, n, static_cast<float*>(to.data) + offset);
    return;
  }
  ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
    ChunkBuffer sum;
    LoadFloats(AsConst(to), offset + begin, count, sum.values.data());
    AddFp32(from + begin, count, sum.values.data());
    StoreFloats(sum.values.data(), count, to, offset + begin);
  });
}

const float* ReadFloats(const ConstView& from, std::int64_t offset, std::int64_t n, float* buffer) {
  if (from.dtype == DType::kFp32) {
    return static_cast<const float*>(from.data) + offset;
  }
  LoadFloats(from, offset, n, buffer);
  return buffer;
}

float* ResultFloats(const View& to, std::int64_t offset, float* buffer) {
  return to.dtype == DType::kFp32 ? static_cast<float*>(to.data) + offset : buffer;
}

void FinishFloats(const float* values, std::int64_t n, const View& to, std::int64_t offset) {
  if (to.dtype != DType::kFp32) {
    StoreFloats(values, n, to, offset);
  }
}

void ZeroFill(const View& view) {
  std::fill_n(static_cast<std::byte*>(view.data), view.elements * SizeOf(view.dtype), std::byte{0});
}

void StoreParamGrad(const float* values, std::int64_t n, const ParamGrad& to, std::int64_t offset) {
  if (to.accumulate) {
    AddFloats(values, n, to.view, offset);
  } else {
    StoreFloats(values, n, to.view, offset);
  }
}

std::span<std::byte> Scratch::Take(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(HostAligned(bytes));
  SW_CHECK(used_ + size <= memory_.size(), "a kernel needs " + std::to_string(used_ + size) +
                                               " bytes of workspace, declared are " +
                                               std::to_string(memory_.size()));
  const std::span<std::byte> piece = memory_.subspan(used_, size);
  used_ += size;
  return piece;
}

float* Scratch::Floats(std::int64_t n) {
  return reinterpret_cast<float*>(Take(n * static_cast<std::int64_t>(sizeof(float))).data());
}

std::int64_t* Scratch::Integers(std::int64_t n) {
  return reinterpret_cast<std::int64_t*>(
      Take(n * static_cast<std::int64_t>(sizeof(std::int64_t))).data());
}

}  // namespace shardwright
