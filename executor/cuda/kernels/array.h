#pragma once

// Memory of any floating-point dtype as kernels see it: fp32 numbers, rounded to nearest even when
// they are stored.
//
// Kernels compute in fp32 whatever the dtype of the memory, as PyTorch's kernels do with their
// accumulate type. Only the stored result is rounded.
//
// Example: bf16 keeps 8 significant bits, so numbers from 256 to 512 are 2 apart. 257 lies in the
// middle of 256 and 258 and becomes 256, whose last bit is 0; 259 becomes 260. 1/3 becomes
// 0.333984. So a bf16 gradient of 256 to which a micro-batch adds 1 stays 256, here as in PyTorch.
//
// The CPU version of each conversion gives the bits of the GPU's, which the tests of kernels rely
// on.

#include <cstdint>

#include "core/units.h"
#include "executor/cuda/kernels/block.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <bit>

#include "executor/half.h"
#endif

namespace shardwright::gpu {

// Numbers in memory with a dtype that the kernel learns at run time. A null `data` is an absent
// operand: a linear layer without bias, or a gradient that nobody needs.
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
SW_DEVICE float FromBits(std::uint32_t bits) {
  return __uint_as_float(bits);
}
SW_DEVICE std::uint32_t ToBits(float value) {
  return __float_as_uint(value);
}
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
inline float FromBits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline std::uint32_t ToBits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
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

[[nodiscard]] SW_DEVICE bool IsHalf(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kFp16;
}

// Where kernels are loops on the CPU, a test may watch what the functions below read and write.
// Tables that kernels read as they are (ids, statistics of rows) are not seen.
#if defined(__CUDACC__)
// Tests use it to check that a kernel touches only its operands: Load of element 5 of a bf16 array
// at address 1,000 reports 2 bytes at 1,010.
SW_DEVICE void Watch(const Array& /*a*/, std::int64_t /*i*/, std::int64_t /*count*/) {}
#else
using AccessWatch = void (*)(const void* address, std::int64_t bytes);
inline thread_local AccessWatch access_watch = nullptr;  // of this thread's kernels
inline void Watch(const Array& a, std::int64_t i, std::int64_t count) {
  if (access_watch != nullptr) {
    const std::int64_t width = IsHalf(a.dtype) ? 2 : 4;
    access_watch(static_cast<const std::byte*>(a.data) + i * width, count * width);
  }
}
#endif

// An element. No branch holds more than the load, so that loads of several elements can be under
// way before the first is converted.
SW_DEVICE float Load(const Array& a, std::int64_t i) {
  Watch(a, i, 1);
  std::uint32_t bits = 0;
  if (IsHalf(a.dtype)) {
    bits = static_cast<const std::uint16_t*>(a.data)[i];
  } else {
    bits = static_cast<const std::uint32_t*>(a.data)[i];
  }
  if (a.dtype == DType::kFp16) {
    return ToFloat(Fp16{static_cast<std::uint16_t>(bits)});
  }
  return FromBits(a.dtype == DType::kBf16 ? bits << 16U : bits);
}

// Rounds to nearest even. bf16 keeps fp32's range; fp16 overflows to infinity above 65,504.
SW_DEVICE void Store(const Array& a, std::int64_t i, float value) {
  Watch(a, i, 1);
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
// Example in bf16: 256 in memory, value 3, `adds`: 259 in fp32, stored as 260. The order of the
// calls is the order of the micro-batches, so the result repeats bit for bit.
SW_DEVICE void StoreOrAdd(const Array& a, std::int64_t i, float value, bool adds) {
  Store(a, i, adds ? Load(a, i) + value : value);
}

// Eight neighbours as they lie in memory. A kernel loads all that it needs before it converts any
// of it, so that its loads are under way together: a conversion behind each load would wait for
// memory once per array.
// Eight 16-bit numbers are 16 bytes, the widest access of a thread: a warp reads 512 bytes at once.
// Eight fp32 numbers take two accesses.
inline constexpr int kVector = 8;
struct alignas(16) Sixteen {
  std::uint32_t words[4];
};
struct Eight {
  Sixteen pieces[2];  // 16-bit numbers need the first only
};

// The array, of which the compiler may know that its numbers have 16 bits: their vectors take half
// the registers.
// A kernel with four vectors in flight holds 16 registers of them instead of 32, so more blocks fit
// on a multiprocessor. Callers check IsHalf of every array first.
template <bool kHalf>
[[nodiscard]] SW_DEVICE Array Known(const Array& a) {
  return kHalf ? Array{a.data, a.dtype == DType::kBf16 ? DType::kBf16 : DType::kFp16} : a;
}

// Elements i to i + 7 of an array, of which `count` are there (the others are zeros): in 16-byte
// accesses where all are and the address allows.
// Example: a row of 20 fp32 features. Features 0 to 7 and 8 to 15 are whole vectors; of 16 to 23
// four are there, and the other four are zeros, which add nothing to a sum. In bf16 the second row
// begins at byte 40, which is no multiple of 16, so its vectors are loaded one number at a time.
SW_DEVICE Eight LoadEight(const Array& a, std::int64_t i, std::int64_t count = kVector) {
  Watch(a, i, count < kVector ? count : kVector);
  Eight eight{};
  if (IsHalf(a.dtype)) {
    const auto* const from = static_cast<const std::uint16_t*>(a.data) + i;
    if (count >= kVector && reinterpret_cast<std::uintptr_t>(from) % sizeof(Sixteen) == 0) {
      eight.pieces[0] = *reinterpret_cast<const Sixteen*>(from);
      return eight;
    }
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const std::uint32_t bits = k < count ? from[k] : 0U;
      eight.pieces[0].words[k / 2] |= bits << (16U * static_cast<unsigned>(k % 2));
    }
    return eight;
  }
  const auto* const from = static_cast<const std::uint32_t*>(a.data) + i;
  if (count >= kVector && reinterpret_cast<std::uintptr_t>(from) % sizeof(Sixteen) == 0) {
    eight.pieces[0] = reinterpret_cast<const Sixteen*>(from)[0];
    eight.pieces[1] = reinterpret_cast<const Sixteen*>(from)[1];
    return eight;
  }
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    eight.pieces[k / 4].words[k % 4] = k < count ? from[k] : 0U;
  }
  return eight;
}

// The reverse of LoadEight: the first `count` numbers are written, memory behind them stays
// untouched.
SW_DEVICE void StoreEight(const Array& a, std::int64_t i, const Eight& eight,
                          std::int64_t count = kVector) {
  Watch(a, i, count < kVector ? count : kVector);
  if (IsHalf(a.dtype)) {
    auto* const to = static_cast<std::uint16_t*>(a.data) + i;
    if (count >= kVector && reinterpret_cast<std::uintptr_t>(to) % sizeof(Sixteen) == 0) {
      *reinterpret_cast<Sixteen*>(to) = eight.pieces[0];
      return;
    }
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      if (k < count) {
        to[k] = static_cast<std::uint16_t>(eight.pieces[0].words[k / 2] >>
                                           (16U * static_cast<unsigned>(k % 2)));
      }
    }
    return;
  }
  auto* const to = static_cast<std::uint32_t*>(a.data) + i;
  if (count >= kVector && reinterpret_cast<std::uintptr_t>(to) % sizeof(Sixteen) == 0) {
    reinterpret_cast<Sixteen*>(to)[0] = eight.pieces[0];
    reinterpret_cast<Sixteen*>(to)[1] = eight.pieces[1];
    return;
  }
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    if (k < count) {
      to[k] = eight.pieces[k / 4].words[k % 4];
    }
  }
}

// The numbers of eight elements, and back; a stored number is rounded to nearest even.
SW_DEVICE void Unpack(const Eight& eight, DType dtype, float* to) {
  if (dtype == DType::kBf16) {
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const std::uint32_t word = eight.pieces[0].words[k / 2];
      to[k] = FromBits(k % 2 == 0 ? word << 16U : word & 0xffff0000U);
    }
    return;
  }
  if (dtype == DType::kFp16) {
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const std::uint32_t word = eight.pieces[0].words[k / 2];
      to[k] = ToFloat(Fp16{static_cast<std::uint16_t>(k % 2 == 0 ? word : word >> 16U)});
    }
    return;
  }
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    to[k] = FromBits(eight.pieces[k / 4].words[k % 4]);
  }
}

template <class T>
SW_DEVICE void PackHalves(const float* from, Sixteen* to) {
  SW_UNROLL
  for (int k = 0; k < kVector; k += 2) {
    T low, high;
    FromFloat(from[k], &low);
    FromFloat(from[k + 1], &high);
    to->words[k / 2] = low.bits | static_cast<std::uint32_t>(high.bits) << 16U;
  }
}

SW_DEVICE Eight Pack(const float* from, DType dtype) {
  Eight eight{};
  if (dtype == DType::kBf16) {
    PackHalves<Bf16>(from, &eight.pieces[0]);
  } else if (dtype == DType::kFp16) {
    PackHalves<Fp16>(from, &eight.pieces[0]);
  } else {
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      eight.pieces[k / 4].words[k % 4] = ToBits(from[k]);
    }
  }
  return eight;
}

// A kernel's report that the data asks for something impossible, in device memory. `kind` 0: none.
// Example: label 50,300 with a vocabulary of 50,257 reports {kLabel, 50300, 50257}. The host copies
// the report back with each loss and behind the last step, and ends the run. PyTorch stops with a
// device-side assert there. Of several faults in one step one is kept, and no sum depends on which.
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

// Calls `run` with a value of the type that numbers are loaded or multiplied as.
template <class Run>
SW_DEVICE void WithElement(DType multiply_as, const Run& run) {
  switch (multiply_as) {
    case DType::kBf16:
      return run(Bf16{});
    case DType::kFp16:
      return run(Fp16{});
    default:
      return run(0.0F);
  }
}

}  // namespace shardwright::gpu
