#pragma once

// Matrix products of operands in shared memory, 16 x 16 results per warp: tensor cores for 16-bit
// numbers (WMMA), multiply-adds for fp32, loops on the CPU. Sums are fp32.
//
// The products of a block go through three kinds of memory:
//
//   device memory   operands, read once for each block that needs them
//   shared memory   parts of 64 x 32 and 32 x 64, read by all warps of the block
//   registers       sums of 16 x 16, which stay there until the end
//
// Example: c of 1,000 x 768 with a depth of 512 has 16 x 12 = 192 blocks of 64 x 64 results. Each
// goes through 512 / 32 = 16 steps. A step loads 2 x 2,048 numbers and makes 131,072 multiply-adds:
// 32 for each number loaded.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"

#if defined(__CUDACC__)
#include <mma.h>
#endif

namespace shardwright::gpu {

inline constexpr int kTile = 16;

[[nodiscard]] constexpr std::int64_t RoundTile(std::int64_t n) {
  return (n + kTile - 1) / kTile * kTile;
}

// Padding of a row in shared memory. Rows then start at different banks, and pieces of 16 x 16 stay
// 32-byte aligned. Shared memory has 32 banks of 4 bytes; two rows that begin at the same bank wait
// for each other. Example: 32 bf16 numbers are 16 banks, so every second row would begin at bank 0.
// With 8 more a row is 20 banks, and 8 rows begin at 0, 20, 8, 28, 16, 4, 24, 12.
inline constexpr int kPadElements = 8;
inline constexpr int kPadSums = 4;

#if defined(__CUDACC__)

template <class T>
struct TensorCore;
template <>
struct TensorCore<Bf16> {
  using Element = __nv_bfloat16;
};
template <>
struct TensorCore<Fp16> {
  using Element = __half;
};

// A 16 x 16 sum that a warp holds.
template <class T>
class Accumulator {
 public:
  SW_DEVICE void Zero() { nvcuda::wmma::fill_fragment(sum_, 0.0F); }
  SW_DEVICE void LoadFrom(const float* from, int stride) {
    nvcuda::wmma::load_matrix_sync(sum_, from, static_cast<unsigned>(stride),
                                   nvcuda::wmma::mem_row_major);
  }
  SW_DEVICE void StoreTo(float* to, int stride) const {
    nvcuda::wmma::store_matrix_sync(to, sum_, static_cast<unsigned>(stride),
                                    nvcuda::wmma::mem_row_major);
  }
  // += a (16, depth) b (depth, 16); a transposed operand is stored the other way round.
  template <bool kTransposedA, bool kTransposedB>
  SW_DEVICE void Multiply(const T* a, int a_stride, const T* b, int b_stride, int depth) {
    using nvcuda::wmma::col_major;
    using nvcuda::wmma::row_major;
    using Element = typename TensorCore<T>::Element;
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, Element,
                           std::conditional_t<kTransposedA, col_major, row_major>>
        left;
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, Element,
                           std::conditional_t<kTransposedB, col_major, row_major>>
        right;
    for (int k = 0; k < depth; k += kTile) {
      nvcuda::wmma::load_matrix_sync(
          left, reinterpret_cast<const Element*>(a + (kTransposedA ? k * a_stride : k)),
          static_cast<unsigned>(a_stride));
      nvcuda::wmma::load_matrix_sync(
          right, reinterpret_cast<const Element*>(b + (kTransposedB ? k : k * b_stride)),
          static_cast<unsigned>(b_stride));
      nvcuda::wmma::mma_sync(sum_, left, right, sum_);
    }
  }

 private:
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sum_;
};

// Lane l holds half a row: row l / 2, columns 8 (l % 2) and following.
template <>
class Accumulator<float> {
 public:
  SW_DEVICE void Zero() {
    for (float& v : sum_) {
      v = 0.0F;
    }
  }
  SW_DEVICE void LoadFrom(const float* from, int stride) {
    for (int j = 0; j < 8; ++j) {
      sum_[j] = from[Row() * stride + Column() + j];
    }
  }
  SW_DEVICE void StoreTo(float* to, int stride) const {
    for (int j = 0; j < 8; ++j) {
      to[Row() * stride + Column() + j] = sum_[j];
    }
  }
  template <bool kTransposedA, bool kTransposedB>
  SW_DEVICE void Multiply(const float* a, int a_stride, const float* b, int b_stride, int depth) {
    for (int k = 0; k < depth; ++k) {
      const float left = kTransposedA ? a[k * a_stride + Row()] : a[Row() * a_stride + k];
      for (int j = 0; j < 8; ++j) {
        const int column = Column() + j;
        sum_[j] += left * (kTransposedB ? b[column * b_stride + k] : b[k * b_stride + column]);
      }
    }
  }

 private:
  static SW_DEVICE int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static SW_DEVICE int Row() { return Lane() / 2; }
  static SW_DEVICE int Column() { return Lane() % 2 * 8; }

  float sum_[8];
};

#else

template <class T>
class Accumulator {
 public:
  void Zero() {
    for (float& v : sum_) {
      v = 0.0F;
    }
  }
  void LoadFrom(const float* from, int stride) {
    for (int i = 0; i < kTile * kTile; ++i) {
      sum_[i] = from[i / kTile * stride + i % kTile];
    }
  }
  void StoreTo(float* to, int stride) const {
    for (int i = 0; i < kTile * kTile; ++i) {
      to[i / kTile * stride + i % kTile] = sum_[i];
    }
  }
  template <bool kTransposedA, bool kTransposedB>
  void Multiply(const T* a, int a_stride, const T* b, int b_stride, int depth) {
    for (int i = 0; i < kTile; ++i) {
      for (int k = 0; k < depth; ++k) {
        const float left = ToFloat(kTransposedA ? a[k * a_stride + i] : a[i * a_stride + k]);
        for (int j = 0; j < kTile; ++j) {
          sum_[i * kTile + j] +=
              left * ToFloat(kTransposedB ? b[j * b_stride + k] : b[k * b_stride + j]);
        }
      }
    }
  }

 private:
  float sum_[kTile * kTile];
};

#endif

// An operand in shared memory.
template <class T>
struct Panel {
  T* data = nullptr;
  int stride = 0;

  [[nodiscard]] SW_DEVICE T* At(int row) const { return data + std::int64_t{row} * stride; }
};

// c (rows, columns) (+)= a (rows, depth) b (depth, columns); sizes are multiples of 16. Warps share
// the 16 x 16 pieces.
// Example: 64 x 64 results by 4 warps are 16 pieces, four of each warp. Warp 1 makes pieces 1, 5, 9
// and 13, which are the second column of pieces. Rows behind the end of an operand are zeros in its
// panel, so no size but a multiple of 16 occurs here.
struct PanelSizes {
  int rows, columns, depth;
};
template <bool kTransposedA, bool kTransposedB, class T>
SW_DEVICE void MultiplyPanels(const Block& block, const PanelSizes& sizes, const Panel<T>& a,
                              const Panel<T>& b, const Panel<float>& c, bool adds) {
  const int across = sizes.columns / kTile;
  block.EachWarp([&](int warp) {
    for (int piece = warp; piece < sizes.rows / kTile * across; piece += block.warps()) {
      const int row = piece / across * kTile;
      const int column = piece % across * kTile;
      float* const result = c.At(row) + column;
      Accumulator<T> sum;
      if (adds) {
        sum.LoadFrom(result, c.stride);
      } else {
        sum.Zero();
      }
      sum.template Multiply<kTransposedA, kTransposedB>(
          kTransposedA ? a.data + row : a.At(row), a.stride,
          kTransposedB ? b.At(column) : b.data + column, b.stride, sizes.depth);
      sum.StoreTo(result, c.stride);
    }
  });
}

// One block's part of a large product: `left(i, k)` and `right(k, j)` give operands (as floats,
// zero outside), `store(i, j, sum)` takes what comes out; i and j count inside the part.
// 128 threads are 4 warps; each keeps 4 of the 16 pieces, a row of pieces, in registers.
inline constexpr int kProductRows = 64;
inline constexpr int kProductColumns = 64;
inline constexpr int kProductDepth = 32;
inline constexpr int kProductThreads = 128;

template <class T>
[[nodiscard]] constexpr std::int64_t ProductShared() {
  constexpr std::int64_t kLeft = std::int64_t{kProductRows} * (kProductDepth + kPadElements);
  constexpr std::int64_t kRight = std::int64_t{kProductDepth} * (kProductColumns + kPadElements);
  constexpr std::int64_t kSums = std::int64_t{kProductRows} * (kProductColumns + kPadSums);
  return SharedSize<T>(kLeft) + SharedSize<T>(kRight) + SharedSize<float>(kSums);
}

// kCount elements of a tile: element e is number(e) and goes to place(e). Eight loads of a thread
// come before their use, so that they are under way together.
// Example: 2,048 numbers for 128 threads are two rounds of 8 loads each.
template <int kCount, class Number, class Place>
SW_DEVICE void LoadTile(int t, const Number& number, const Place& place) {
  constexpr int kAtOnce = 8;
  SW_NO_UNROLL
  for (int begin = t; begin < kCount; begin += kAtOnce * kProductThreads) {
    float numbers[kAtOnce];
    SW_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      numbers[n] = number(begin + n * kProductThreads);
    }
    SW_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      FromFloat(numbers[n], place(begin + n * kProductThreads));
    }
  }
}

// Shared memory for bf16: 5,120 bytes for the left part, 4,608 for the right part, and 17,408 for
// the sums. The sums pass through shared memory at the end, so that store() gets each with its
// place.
template <class T, class Left, class Right, class Finish>
SW_DEVICE void TileProduct(Block& block, std::int64_t depth, const Left& left, const Right& right,
                           const Finish& store) {
  constexpr int kLeftStride = kProductDepth + kPadElements;
  constexpr int kRightStride = kProductColumns + kPadElements;
  constexpr int kSumStride = kProductColumns + kPadSums;
  constexpr int kPieces = kProductRows / kTile * (kProductColumns / kTile);
  constexpr int kWarps = kProductThreads / kWarp;
  const Panel<T> a{block.Shared<T>(std::int64_t{kProductRows} * kLeftStride), kLeftStride};
  const Panel<T> b{block.Shared<T>(std::int64_t{kProductDepth} * kRightStride), kRightStride};
  const Panel<float> c{block.Shared<float>(std::int64_t{kProductRows} * kSumStride), kSumStride};
  struct Sums {
    Accumulator<T> pieces[kPieces / kWarps];
  };
  PerWarp<Sums> sums;
  block.EachWarp([&](int warp) {
    for (Accumulator<T>& piece : sums[warp].pieces) {
      piece.Zero();
    }
  });
  for (std::int64_t k0 = 0; k0 < depth; k0 += kProductDepth) {
    block.Each([&](int t) {
      LoadTile<kProductRows * kProductDepth>(
          t,
          [&](int e) {
            const std::int64_t k = k0 + e % kProductDepth;
            return k < depth ? left(e / kProductDepth, k) : 0.0F;
          },
          [&](int e) { return a.At(e / kProductDepth) + e % kProductDepth; });
      LoadTile<kProductDepth * kProductColumns>(
          t,
          [&](int e) {
            const std::int64_t k = k0 + e / kProductColumns;
            return k < depth ? right(k, e % kProductColumns) : 0.0F;
          },
          [&](int e) { return b.At(e / kProductColumns) + e % kProductColumns; });
    });
    block.EachWarp([&](int warp) {
      for (int p = 0; p < kPieces / kWarps; ++p) {
        const int piece = warp * (kPieces / kWarps) + p;
        const int row = piece / (kProductColumns / kTile) * kTile;
        const int column = piece % (kProductColumns / kTile) * kTile;
        sums[warp].pieces[p].template Multiply<false, false>(
            a.At(row), kLeftStride, b.data + column, kRightStride, kProductDepth);
      }
    });
  }
  block.EachWarp([&](int warp) {
    for (int p = 0; p < kPieces / kWarps; ++p) {
      const int piece = warp * (kPieces / kWarps) + p;
      const int row = piece / (kProductColumns / kTile) * kTile;
      const int column = piece % (kProductColumns / kTile) * kTile;
      sums[warp].pieces[p].StoreTo(c.At(row) + column, kSumStride);
    }
  });
  block.Each([&](int t) {
    for (int e = t; e < kProductRows * kProductColumns; e += kProductThreads) {
      const int i = e / kProductColumns;
      const int j = e % kProductColumns;
      store(i, j, c.At(i)[j]);
    }
  });
}

// The number of parts that n falls into: 1,000 in parts of 64 are 16.
SW_DEVICE std::int64_t Parts(std::int64_t n, std::int64_t part) {
  return (n + part - 1) / part;
}

}  // namespace shardwright::gpu
