#pragma once

// A block's part of a large product on tensor cores: 128 x 64 results. Eight neighbours are loaded
// at a time, and the next part of the operands while this one is multiplied. A warp uses each piece
// that it takes from shared memory for several results.
//
// How it gains on TileProduct (tile.h), for one step of depth 32 in one block:
//
//                                       TileProduct    WideProduct
//   numbers from device memory          4,096          6,144
//   multiply-adds                       131,072        262,144
//   16 x 16 loads per 16 x 16 product   2              6 for 8 products
//
// A warp makes 64 x 32 results, 4 x 2 pieces. For 16 of depth it loads 4 left and 2 right pieces
// and multiplies each left with each right piece.

#include <cstdint>
#include <type_traits>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/tile.h"

namespace shardwright::gpu {

inline constexpr int kWideRows = 128;
inline constexpr int kWideColumns = 64;
inline constexpr int kWideDepth = 32;
inline constexpr int kWideWarpRows = 64, kWideWarpColumns = 32;  // of one warp
static_assert(kWideRows / kWideWarpRows * (kWideColumns / kWideWarpColumns) * kWarp ==
              kProductThreads);

[[nodiscard]] constexpr std::int64_t WideShared() {
  // Whichever way the operands lie: their lines are padded.
  constexpr std::int64_t kLeft = std::int64_t{kWideRows} * (kWideDepth + kPadElements);
  constexpr std::int64_t kRight = std::int64_t{kWideColumns} * (kWideDepth + kPadElements);
  constexpr std::int64_t kSums = std::int64_t{kWideRows} * (kWideColumns + kPadSums);
  return SharedSize<Bf16>(kLeft) + SharedSize<Bf16>(kRight) + SharedSize<float>(kSums);
}

// An operand: `lines` lines of `length` neighbours. Line i is the one that the list names at first
// + i, or line first + i without a list, times its factor.
// Example, the inputs of a mixture of experts: `list` holds the token of each slot, and expert 3
// owns slots 40 to 42 with tokens 7, 2 and 9. With first = 40 and lines = 3, line 1 is row 2 of the
// array. `factors` holds the router's weight of each slot; line 1 is multiplied with factors[41].
struct Lines {
  Array array = {};
  std::int64_t first = 0, lines = 0, length = 0;
  const std::int64_t* list = nullptr;
  const float* factors = nullptr;  // null: 1

  // Eight from `place` on; zeros outside.
  [[nodiscard]] SW_DEVICE Eight At(std::int64_t line, std::int64_t place) const {
    if (line >= lines || place >= length) {
      return {};
    }
    const std::int64_t at = list != nullptr ? list[first + line] : first + line;
    return LoadEight(array, at * length + place, length - place);
  }
  [[nodiscard]] SW_DEVICE float Factor(std::int64_t line) const {
    return factors != nullptr && line < lines ? factors[first + line] : 1.0F;
  }
};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<Bf16> {
  static constexpr DType kValue = DType::kBf16;
};
template <>
struct DTypeOf<Fp16> {
  static constexpr DType kValue = DType::kFp16;
};

// kLines lines of kLength of an operand, from (line, place) on, on their way to shared memory: a
// thread's share.
// Example: 128 lines of 32 are 4 vectors a line, 512 vectors for 128 threads, so each thread holds
// 4. Thread 5 holds the vectors of lines 1, 33, 65 and 97 that begin at place 8.
//
// Numbers that already have the dtype of the product, and no factor, go through untouched. Others
// are converted and rounded on their way.
template <int kLines, int kLength>
struct WideShare {
  static constexpr int kAcross = kLength / kVector;
  static constexpr int kOwn = kLines * kAcross / kProductThreads;
  static constexpr int kStride = kLength + kPadElements;
  Eight eights[kOwn];

  SW_DEVICE void Load(const Lines& from, std::int64_t line, std::int64_t place, int t) {
    SW_UNROLL
    for (int p = 0; p < kOwn; ++p) {
      const int e = p * kProductThreads + t;
      eights[p] = from.At(line + e / kAcross, place + e % kAcross * kVector);
    }
  }
  template <class T>
  SW_DEVICE void Store(const Lines& from, std::int64_t line, int t, T* to) const {
    const bool is_as_it_is = from.array.dtype == DTypeOf<T>::kValue && from.factors == nullptr;
    SW_UNROLL
    for (int p = 0; p < kOwn; ++p) {
      const int e = p * kProductThreads + t;
      Sixteen rounded = eights[p].pieces[0];
      if (!is_as_it_is) {
        float x[kVector];
        Unpack(eights[p], from.array.dtype, x);
        const float factor = from.Factor(line + e / kAcross);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          x[k] *= factor;
        }
        PackHalves<T>(x, &rounded);
      }
      *reinterpret_cast<Sixteen*>(to + e / kAcross * kStride + e % kAcross * kVector) = rounded;
    }
  }
};

// A warp's sums. Operands in shared memory, a transposed one the other way round.
template <class T>
class WideSums {
 public:
  static constexpr int kDown = kWideWarpRows / kTile, kAcross = kWideWarpColumns / kTile;

#if defined(__CUDACC__)
  SW_DEVICE void Zero() {
    SW_UNROLL
    for (auto& row : sums_) {
      SW_UNROLL
      for (auto& sum : row) {
        nvcuda::wmma::fill_fragment(sum, 0.0F);
      }
    }
  }
  template <bool kTransposedA, bool kTransposedB>
  SW_DEVICE void Multiply(const T* a, int a_stride, const T* b, int b_stride) {
    using nvcuda::wmma::col_major;
    using nvcuda::wmma::fragment;
    using nvcuda::wmma::row_major;
    using Element = typename TensorCore<T>::Element;
    using Left = fragment<nvcuda::wmma::matrix_a, 16, 16, 16, Element,
                          std::conditional_t<kTransposedA, col_major, row_major>>;
    using Right = fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Element,
                           std::conditional_t<kTransposedB, col_major, row_major>>;
    SW_UNROLL
    for (int k = 0; k < kWideDepth; k += kTile) {
      Left left[kDown];
      SW_UNROLL
      for (int i = 0; i < kDown; ++i) {
        nvcuda::wmma::load_matrix_sync(
            left[i],
            reinterpret_cast<const Element*>(a) +
                (kTransposedA ? k * a_stride + i * kTile : i * kTile * a_stride + k),
            static_cast<unsigned>(a_stride));
      }
      SW_UNROLL
      for (int j = 0; j < kAcross; ++j) {
        Right right;
        nvcuda::wmma::load_matrix_sync(
            right,
            reinterpret_cast<const Element*>(b) +
                (kTransposedB ? j * kTile * b_stride + k : k * b_stride + j * kTile),
            static_cast<unsigned>(b_stride));
        SW_UNROLL
        for (int i = 0; i < kDown; ++i) {
          nvcuda::wmma::mma_sync(sums_[i][j], left[i], right, sums_[i][j]);
        }
      }
    }
  }
  SW_DEVICE void StoreTo(float* to, int stride) const {
    SW_UNROLL
    for (int i = 0; i < kDown; ++i) {
      SW_UNROLL
      for (int j = 0; j < kAcross; ++j) {
        nvcuda::wmma::store_matrix_sync(to + i * kTile * stride + j * kTile, sums_[i][j],
                                        static_cast<unsigned>(stride), nvcuda::wmma::mem_row_major);
      }
    }
  }

 private:
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sums_[kDown][kAcross];
#else
  void Zero() {
    for (auto& row : sums_) {
      for (Accumulator<T>& sum : row) {
        sum.Zero();
      }
    }
  }
  template <bool kTransposedA, bool kTransposedB>
  void Multiply(const T* a, int a_stride, const T* b, int b_stride) {
    for (int i = 0; i < kDown; ++i) {
      for (int j = 0; j < kAcross; ++j) {
        sums_[i][j].template Multiply<kTransposedA, kTransposedB>(
            a + i * kTile * (kTransposedA ? 1 : a_stride), a_stride,
            b + j * kTile * (kTransposedB ? b_stride : 1), b_stride, kWideDepth);
      }
    }
  }
  void StoreTo(float* to, int stride) const {
    for (int i = 0; i < kDown; ++i) {
      for (int j = 0; j < kAcross; ++j) {
        sums_[i][j].StoreTo(to + i * kTile * stride + j * kTile, stride);
      }
    }
  }

 private:
  Accumulator<T> sums_[kDown][kAcross];
#endif
};

// The results from (row, column) on: store(i, j, sum) takes them, i and j counted from there, also
// what lies outside. Lines of an operand are rows or columns of the result, or what is summed over.
// While a step is multiplied, the operands of the next one are on their way to registers; the next
// Store waits for them. Shared memory: 10,240 + 5,120 + 34,816 = 50,176 bytes.
template <class T, bool kSumsLeftLines, bool kSumsRightLines, class Store>
SW_DEVICE void WideProduct(Block& block, std::int64_t row, std::int64_t column, std::int64_t depth,
                           const Lines& left, const Lines& right, const Store& store) {
  using Left =
      WideShare<kSumsLeftLines ? kWideDepth : kWideRows, kSumsLeftLines ? kWideRows : kWideDepth>;
  using Right = WideShare<kSumsRightLines ? kWideDepth : kWideColumns,
                          kSumsRightLines ? kWideColumns : kWideDepth>;
  constexpr int kSumStride = kWideColumns + kPadSums;
  auto* const a = block.Shared<T>(std::int64_t{kWideRows} * (kWideDepth + kPadElements));
  auto* const b = block.Shared<T>(std::int64_t{kWideColumns} * (kWideDepth + kPadElements));
  auto* const c = block.Shared<float>(std::int64_t{kWideRows} * kSumStride);
  struct Shares {
    Left left;
    Right right;
  };
  PerThread<Shares> shares;
  PerWarp<WideSums<T>> sums;
  const auto load = [&](std::int64_t k) {
    block.Each([&](int t) {
      shares[t].left.Load(left, kSumsLeftLines ? k : row, kSumsLeftLines ? row : k, t);
      shares[t].right.Load(right, kSumsRightLines ? k : column, kSumsRightLines ? column : k, t);
    });
  };
  block.EachWarp([&](int warp) { sums[warp].Zero(); });
  load(0);
  for (std::int64_t k = 0; k < depth; k += kWideDepth) {
    block.Each([&](int t) {
      shares[t].left.template Store<T>(left, kSumsLeftLines ? k : row, t, a);
      shares[t].right.template Store<T>(right, kSumsRightLines ? k : column, t, b);
    });
    if (k + kWideDepth < depth) {
      load(k + kWideDepth);
    }
    block.EachWarp([&](int warp) {
      const int i = warp / 2 * kWideWarpRows, j = warp % 2 * kWideWarpColumns;
      sums[warp].template Multiply<kSumsLeftLines, !kSumsRightLines>(
          a + i * (kSumsLeftLines ? 1 : Left::kStride), Left::kStride,
          b + j * (kSumsRightLines ? 1 : Right::kStride), Right::kStride);
    });
  }
  block.EachWarp([&](int warp) {
    sums[warp].StoreTo(c + warp / 2 * kWideWarpRows * kSumStride + warp % 2 * kWideWarpColumns,
                       kSumStride);
  });
  block.Each([&](int t) {
    for (int e = t; e < kWideRows * kWideColumns; e += kProductThreads) {
      const int i = e / kWideColumns, j = e % kWideColumns;
      store(i, j, c[i * kSumStride + j]);
    }
  });
}

}  // namespace shardwright::gpu
