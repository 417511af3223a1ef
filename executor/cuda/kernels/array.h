#pragma once

// Memory of any floating-point dtype as kernels see it: fp32 numbers, rounded to nearest even when
// they are stored.

#include <cstdint>

#include "core/units.h"
#include "executor/cuda/kernels/block.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "executor/half.h"
#endif

namespace shardwright::gpu {

// Null `data`: there is none.
struct Array {
  void* data = nullptr;
  DType dtype = DType::kFp32;
};

// Elements of the three dtypes as types, for kernels that are compiled for each.
struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

#if defined(__CUDACC__)
SW_DEVICE float ToFloat(float value) {
  return value;
}
SW_DEVICE float ToFloat(Bf16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}
SW_DEVICE float ToFloat(Fp16 value) {
  return __half2float(__ushort_as_half(value.bits));
}
SW_DEVICE void FromFloat(float value, float* to) {
  *to = value;
}
SW_DEVICE void FromFloat(float value, Bf16* to) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
SW_DEVICE void FromFloat(float value, Fp16* to) {
  to->bits = __half_as_ushort(__float2half_rn(value));
}
#else
inline float ToFloat(float value) {
  return value;
}
inline float ToFloat(Bf16 value) {
  return Bf16ToFloat(value.bits);
}
inline float ToFloat(Fp16 value) {
  return Fp16ToFloat(value.bits);
}
inline void FromFloat(float value, float* to) {
  *to = value;
}
// As the GPU converts: every NaN becomes this one.
inline constexpr std::uint16_t kNan16 = 0x7fff;
inline void FromFloat(float value, Bf16* to) {
  to->bits = value != value ? kNan16 : FloatToBf16(value);
}
inline void FromFloat(float value, Fp16* to) {
  to->bits = value != value ? kNan16 : FloatToFp16(value);
}
#endif

SW_DEVICE float Load(const Array& a, std::int64_t i) {
  switch (a.dtype) {
    case DType::kBf16:
      return ToFloat(static_cast<const Bf16*>(a.data)[i]);
    case DType::kFp16:
      return ToFloat(static_cast<const Fp16*>(a.data)[i]);
    default:
      return static_cast<const float*>(a.data)[i];
  }
}

SW_DEVICE void Store(const Array& a, std::int64_t i, float value) {
  switch (a.dtype) {
    case DType::kBf16:
      FromFloat(value, static_cast<Bf16*>(a.data) + i);
      return;
    case DType::kFp16:
      FromFloat(value, static_cast<Fp16*>(a.data) + i);
      return;
    default:
      static_cast<float*>(a.data)[i] = value;
  }
}

// A gradient: stored, or added to what is there; a 16-bit sum is rounded once.
SW_DEVICE void StoreOrAdd(const Array& a, std::int64_t i, float value, bool adds) {
  Store(a, i, adds ? Load(a, i) + value : value);
}

// Eight neighbours, in 16-byte accesses where the address allows.
inline constexpr int kVector = 8;
struct alignas(16) Sixteen {
  std::uint32_t words[4];
};

template <class T>
SW_DEVICE void LoadEightOf(const T* from, float* to) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(Sixteen) != 0) {
    for (int k = 0; k < kVector; ++k) {
      to[k] = ToFloat(from[k]);
    }
    return;
  }
  constexpr int kPieces = kVector * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(Sixteen));
  constexpr int kPer = kVector / kPieces;
  for (int p = 0; p < kPieces; ++p) {
    union {
      Sixteen whole;
      T parts[kPer];
    } piece;
    piece.whole = reinterpret_cast<const Sixteen*>(from)[p];
    for (int k = 0; k < kPer; ++k) {
      to[p * kPer + k] = ToFloat(piece.parts[k]);
    }
  }
}

template <class T>
SW_DEVICE void StoreEightOf(T* to, const float* from) {
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(Sixteen) != 0) {
    for (int k = 0; k < kVector; ++k) {
      FromFloat(from[k], to + k);
    }
    return;
  }
  constexpr int kPieces = kVector * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(Sixteen));
  constexpr int kPer = kVector / kPieces;
  for (int p = 0; p < kPieces; ++p) {
    union {
      Sixteen whole;
      T parts[kPer];
    } piece;
    for (int k = 0; k < kPer; ++k) {
      FromFloat(from[p * kPer + k], &piece.parts[k]);
    }
    reinterpret_cast<Sixteen*>(to)[p] = piece.whole;
  }
}

SW_DEVICE void LoadEight(const Array& a, std::int64_t i, float* to) {
  switch (a.dtype) {
    case DType::kBf16:
      return LoadEightOf(static_cast<const Bf16*>(a.data) + i, to);
    case DType::kFp16:
      return LoadEightOf(static_cast<const Fp16*>(a.data) + i, to);
    default:
      return LoadEightOf(static_cast<const float*>(a.data) + i, to);
  }
}

SW_DEVICE void StoreEight(const Array& a, std::int64_t i, const float* from) {
  switch (a.dtype) {
    case DType::kBf16:
      return StoreEightOf(static_cast<Bf16*>(a.data) + i, from);
    case DType::kFp16:
      return StoreEightOf(static_cast<Fp16*>(a.data) + i, from);
    default:
      return StoreEightOf(static_cast<float*>(a.data) + i, from);
  }
}

// What a kernel reports when the data asks for something impossible. Lies in device memory; zero
// `kind`: nothing.
struct Fault {
  std::int64_t kind = 0;   // of FaultKind
  std::int64_t value = 0;  // what the data said
  std::int64_t limit = 0;  // the first number that is too large
};
enum class FaultKind : std::int64_t { kNone, kTableRow, kLabel };

SW_DEVICE void Report(Fault* fault, FaultKind kind, std::int64_t value, std::int64_t limit) {
  fault->value = value;
  fault->limit = limit;
  fault->kind = static_cast<std::int64_t>(kind);
}

}  // namespace shardwright::gpu
