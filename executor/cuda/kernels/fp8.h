#pragma once

// Copies of matrices in fp8 with their scales, and their product where no library multiplies them.
// The largest magnitudes come first, as partial ones that every block of a copy looks through
// again, so that nobody waits for a kernel of one block.
//
// Example in E4M3, whose largest number is 448: a matrix with largest magnitude 3 is multiplied
// with 448 / 3 = 149.3 and rounded to 3 bits of fraction. The inverse 1 / 149.3 is kept. A product
// of two such copies sums fp8 numbers in fp32, and multiplies the sum with both inverses.
//
// With a scale per row the scale is a power of two: 128 for the magnitude 3. One outlier then
// spoils one row only. Source of both rules: torchao's float8 training.
//
// A copy takes one kernel for the largest magnitudes and one that casts or transposes. The
// transposed copy exists as fp8 products want the summed dimension of both operands contiguous.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/cuda/kernels/tile.h"
#include "executor/fp8.h"

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace shardwright::gpu {

#if defined(__CUDACC__)
SW_DEVICE std::uint8_t ToFp8(float value, Fp8Format format) {
  return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(
      value, __NV_SATFINITE, format == Fp8Format::kE4m3 ? __NV_E4M3 : __NV_E5M2));
}
SW_DEVICE float FromFp8(std::uint8_t bits, Fp8Format format) {
  return __half2float(
      __half(__nv_cvt_fp8_to_halfraw(bits, format == Fp8Format::kE4m3 ? __NV_E4M3 : __NV_E5M2)));
}
SW_DEVICE void WatchBytes(const void* /*address*/, std::int64_t /*bytes*/) {}
#else
inline std::uint8_t ToFp8(float value, Fp8Format format) {
  return FloatToFp8(value, format);
}
inline float FromFp8(std::uint8_t bits, Fp8Format format) {
  return Fp8ToFloat(bits, format);
}
inline void WatchBytes(const void* address, std::int64_t bytes) {
  if (access_watch != nullptr) {
    access_watch(address, bytes);
  }
}
#endif

// Eight bytes, of which `count` are there.
SW_DEVICE void StoreEightBytes(std::uint8_t* to, std::uint32_t low, std::uint32_t high,
                               std::int64_t count) {
  struct alignas(8) Words {
    std::uint32_t low, high;
  };
  WatchBytes(to, count < kVector ? count : kVector);
  if (count >= kVector && reinterpret_cast<std::uintptr_t>(to) % sizeof(Words) == 0) {
    *reinterpret_cast<Words*>(to) = {low, high};
    return;
  }
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    if (k < count) {
      to[k] =
          static_cast<std::uint8_t>((k < 4 ? low : high) >> (8U * static_cast<unsigned>(k % 4)));
    }
  }
}

// Four numbers as bytes of a word.
SW_DEVICE std::uint32_t FourFp8(const float* x, Fp8Format format) {
  std::uint32_t word = 0;
  SW_UNROLL
  for (int k = 0; k < 4; ++k) {
    word |= static_cast<std::uint32_t>(ToFp8(x[k], format)) << (8U * static_cast<unsigned>(k));
  }
  return word;
}

// A NaN is not larger than anything, so it does not become the scale.
SW_DEVICE float LargerMagnitude(float largest, float x) {
  const float size = fabsf(x);
  return size > largest ? size : largest;
}

// partial[b] = the largest magnitude that block b sees of x, n elements. Each block goes through x
// by steps of all blocks.
// Example: 1,000,000 elements by 64 blocks of 8,192 elements a step: block 0 takes steps 0 and 64,
// where step 64 begins at element 524,288.
struct Fp8MaxArgs {
  Array x = {};
  std::int64_t n = 0;
  float* partial = nullptr;
};
struct Fp8MaxKernel : KernelTraits<KernelId::kFp8Max, Fp8MaxArgs, 256> {
  static constexpr int kAtOnce = 4;
  static constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector * kAtOnce;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    auto* const scratch = block.Shared<float>(kThreads);
    PerThread<float> largest;
    block.Each([&](int t) {
      float most = 0.0F;
      for (std::int64_t base = block.index() * kPerBlock; base < args.n;
           base += block.count() * kPerBlock) {
        Eight eights[kAtOnce];
        SW_UNROLL
        for (int p = 0; p < kAtOnce; ++p) {
          const std::int64_t i = base + (std::int64_t{p} * kThreads + t) * kVector;
          eights[p] = i < args.n ? LoadEight(args.x, i, args.n - i) : Eight{};
        }
        SW_UNROLL
        for (int p = 0; p < kAtOnce; ++p) {
          float x[kVector];
          Unpack(eights[p], args.x.dtype, x);
          SW_UNROLL
          for (int k = 0; k < kVector; ++k) {
            most = LargerMagnitude(most, x[k]);
          }
        }
      }
      largest[t] = most;
    });
    const float most = BlockMax(block, scratch, largest);
    block.Each([&](int t) {
      if (t == 0) {
        args.partial[block.index()] = most;
      }
    });
  }
};

// partial[chunk][j] = the largest magnitude of column j among the chunk's rows. Blocks: chunks *
// CeilDiv(columns, 256). A warp reads 256 columns of every eighth row.
// These are scales of the transposed copy: column j of x is row j of y.
struct Fp8ColumnMaxArgs {
  Array x = {};
  std::int64_t rows = 0, columns = 0;
  std::int64_t rows_per_chunk = 0;
  float* partial = nullptr;
};
struct Fp8ColumnMaxKernel : KernelTraits<KernelId::kFp8ColumnMax, Fp8ColumnMaxArgs, 256> {
  static constexpr int kColumns = kWarp * kVector;  // of a block
  static constexpr int kWarps = kThreads / kWarp;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t tiles = (args.columns + kColumns - 1) / kColumns;
    const std::int64_t chunk = block.index() / tiles;
    const std::int64_t first = block.index() % tiles * kColumns;
    auto* const largest = block.Shared<float>(std::int64_t{kWarps} * kColumns);
    block.Each([&](int t) {
      const int place = t % kWarp * kVector;
      float most[kVector] = {};
      if (first + place < args.columns) {
        OwnRows(args, chunk, t / kWarp, first + place, most);
      }
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        largest[t / kWarp * kColumns + place + k] = most[k];
      }
    });
    block.Each([&](int t) {
      if (first + t >= args.columns) {
        return;
      }
      float most = 0.0F;
      SW_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        most = LargerMagnitude(most, largest[warp * kColumns + t]);
      }
      args.partial[chunk * args.columns + first + t] = most;
    });
  }

 private:
  static SW_DEVICE void OwnRows(const Args& args, std::int64_t chunk, int warp, std::int64_t column,
                                float* most) {
    constexpr int kAtOnce = 4;  // rows whose loads are under way together
    const std::int64_t begin = chunk * args.rows_per_chunk;
    const std::int64_t after = begin + args.rows_per_chunk;
    const std::int64_t end = after < args.rows ? after : args.rows;
    for (std::int64_t row = begin + warp; row < end; row += std::int64_t{kAtOnce} * kWarps) {
      Eight eights[kAtOnce];
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const std::int64_t at = row + std::int64_t{r} * kWarps;
        eights[r] = at < end ? LoadEight(args.x, at * args.columns + column, args.columns - column)
                             : Eight{};
      }
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        float x[kVector];
        Unpack(eights[r], args.x.dtype, x);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          most[k] = LargerMagnitude(most[k], x[k]);
        }
      }
    }
  }
};

// y = x in fp8, x of (rows, columns) with the same layout or, by Fp8TransposeKernel, y (columns,
// rows). `inverses` gets the factors that turn y's numbers back into x's: one number, or one per
// row of y. Example: x (4, 6) with a scale for each row gives 4 inverses; its transpose by the
// other kernel has 6 rows, so 6 inverses.
struct Fp8CastArgs {
  Array x = {};
  std::int64_t rows = 0, columns = 0;
  Fp8Format format = Fp8Format::kE4m3;
  bool by_row = false;  // a scale per row of y
  // Largest magnitudes: `partials` of the whole matrix, or of every column of x. Rows that have
  // scales are looked through here.
  const float* partial = nullptr;
  std::int64_t partials = 0;
  std::uint8_t* y = nullptr;
  float* inverses = nullptr;
};

// Of the whole matrix. For all threads.
// Every block folds all partials again, some hundred numbers, instead of waiting for a kernel that
// does it once; block 0 writes the inverse. All blocks find the same scale, as a maximum has no
// rounding.
SW_DEVICE float WholeScale(Block& block, float* scratch, const Fp8CastArgs& args) {
  PerThread<float> largest;
  block.Each([&](int t) {
    float most = 0.0F;
    for (std::int64_t i = t; i < args.partials; i += block.threads()) {
      most = LargerMagnitude(most, args.partial[i]);
    }
    largest[t] = most;
  });
  const float scale = Fp8Scale(BlockMax(block, scratch, largest), args.format, false);
  block.Each([&](int t) {
    if (t == 0 && block.index() == 0) {
      args.inverses[0] = 1.0F / scale;
    }
  });
  return scale;
}

// A block per row, or per kPerBlock elements where there is one scale.
struct Fp8CastKernel : KernelTraits<KernelId::kFp8Cast, Fp8CastArgs, 256> {
  static constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector * 4;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    auto* const scratch = block.Shared<float>(kThreads);
    const std::int64_t n = args.rows * args.columns;
    const std::int64_t length = args.by_row ? args.columns : kPerBlock;
    const std::int64_t begin = block.index() * length;
    const std::int64_t end = begin + length < n ? begin + length : n;
    const float scale =
        args.by_row ? RowScale(block, scratch, args, begin, end) : WholeScale(block, scratch, args);
    block.Each([&](int t) {
      for (std::int64_t i = begin + std::int64_t{t} * kVector; i < end;
           i += std::int64_t{kThreads} * kVector) {
        float x[kVector];
        Unpack(LoadEight(args.x, i, end - i), args.x.dtype, x);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          x[k] *= scale;
        }
        StoreEightBytes(args.y + i, FourFp8(x, args.format), FourFp8(x + 4, args.format), end - i);
      }
    });
  }

 private:
  static SW_DEVICE float RowScale(Block& block, float* scratch, const Args& args,
                                  std::int64_t begin, std::int64_t end) {
    PerThread<float> largest;
    block.Each([&](int t) {
      float most = 0.0F;
      for (std::int64_t i = begin + std::int64_t{t} * kVector; i < end;
           i += std::int64_t{kThreads} * kVector) {
        float x[kVector];
        Unpack(LoadEight(args.x, i, end - i), args.x.dtype, x);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          most = LargerMagnitude(most, x[k]);
        }
      }
      largest[t] = most;
    });
    const float scale = Fp8Scale(BlockMax(block, scratch, largest), args.format, true);
    block.Each([&](int t) {
      if (t == 0) {
        args.inverses[block.index()] = 1.0F / scale;
      }
    });
    return scale;
  }
};

// The transpose: a block turns a tile of 128 rows and 64 columns around in shared memory. Blocks:
// CeilDiv(rows, 128) * CeilDiv(columns, 64).
// Shared memory: 64 columns of 132 bytes. Reads and writes are both of 8 neighbours, where a
// transpose without shared memory would write single bytes.
struct Fp8TransposeKernel : KernelTraits<KernelId::kFp8Transpose, Fp8CastArgs, 256> {
  static constexpr int kRows = 128, kColumns = 64;
  static constexpr int kStride = kRows + 4;  // so that columns begin at different banks
  [[nodiscard]] static constexpr std::int64_t Shared() {
    return SharedSize<float>(kThreads) + SharedSize<float>(kColumns) +
           SharedSize<std::uint8_t>(std::int64_t{kColumns} * kStride);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    auto* const scratch = block.Shared<float>(kThreads);
    auto* const scales = block.Shared<float>(kColumns);
    auto* const tile = block.Shared<std::uint8_t>(std::int64_t{kColumns} * kStride);
    const std::int64_t across = (args.columns + kColumns - 1) / kColumns;
    const std::int64_t row = block.index() / across * kRows;
    const std::int64_t column = block.index() % across * kColumns;
    const float whole = args.by_row ? 0.0F : WholeScale(block, scratch, args);
    block.Each([&](int t) {
      if (t < kColumns && column + t < args.columns) {
        scales[t] = args.by_row ? ColumnScale(args, column + t, row == 0) : whole;
      }
    });
    block.Each([&](int t) { LoadTile(args, row, column, t, scales, tile); });
    block.Each([&](int t) {
      constexpr int kEights = kRows / kVector;
      for (int e = t; e < kColumns * kEights; e += kThreads) {
        const std::int64_t line = column + e / kEights;
        const std::int64_t at = row + e % kEights * kVector;
        if (line < args.columns && at < args.rows) {
          const auto* const words = reinterpret_cast<const std::uint32_t*>(
              tile + e / kEights * kStride + e % kEights * kVector);
          StoreEightBytes(args.y + line * args.rows + at, words[0], words[1], args.rows - at);
        }
      }
    });
  }

 private:
  static SW_DEVICE float ColumnScale(const Args& args, std::int64_t column, bool keeps_inverse) {
    float most = 0.0F;
    for (std::int64_t i = 0; i < args.partials; ++i) {
      most = LargerMagnitude(most, args.partial[i * args.columns + column]);
    }
    const float scale = Fp8Scale(most, args.format, true);
    if (keeps_inverse) {
      args.inverses[column] = 1.0F / scale;
    }
    return scale;
  }

  static SW_DEVICE void LoadTile(const Args& args, std::int64_t row, std::int64_t column, int t,
                                 const float* scales, std::uint8_t* tile) {
    constexpr int kEights = kColumns / kVector;
    constexpr int kOwn = kRows * kEights / kThreads;
    Eight eights[kOwn];
    SW_UNROLL
    for (int p = 0; p < kOwn; ++p) {
      const int e = p * kThreads + t;
      const std::int64_t i = row + e / kEights, j = column + e % kEights * kVector;
      eights[p] = i < args.rows && j < args.columns
                      ? LoadEight(args.x, i * args.columns + j, args.columns - j)
                      : Eight{};
    }
    SW_UNROLL
    for (int p = 0; p < kOwn; ++p) {
      const int e = p * kThreads + t;
      const int place = e % kEights * kVector;
      float x[kVector];
      Unpack(eights[p], args.x.dtype, x);
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        if (column + place + k < args.columns) {
          tile[(place + k) * kStride + e / kEights] = ToFp8(x[k] * scales[place + k], args.format);
        }
      }
    }
  }
};

// The product of two such copies, where no library takes it: a bf16 number holds every fp8 number,
// and sums are fp32. Not fast.
// Example: a sum of 3,000 with inverses 1 / 128 and 1 / 64 is stored as 0.366.
struct Fp8GemmKernel : KernelTraits<KernelId::kFp8Gemm, GemmArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t across = (args.n + kProductColumns - 1) / kProductColumns;
    const std::int64_t row = block.index() / across * kProductRows;
    const std::int64_t column = block.index() % across * kProductColumns;
    const auto* const a = static_cast<const std::uint8_t*>(args.a.array.data);
    const auto* const b = static_cast<const std::uint8_t*>(args.b.array.data);
    TileProduct<Bf16>(
        block, args.k,
        [&](int i, std::int64_t k) {
          return row + i < args.m ? FromFp8(a[(row + i) * args.a.row_stride + k], args.fp8.a_format)
                                  : 0.0F;
        },
        [&](std::int64_t k, int j) {
          return column + j < args.n
                     ? FromFp8(b[(column + j) * args.b.column_stride + k], args.fp8.b_format)
                     : 0.0F;
        },
        [&](int i, int j, float sum) {
          if (row + i >= args.m || column + j >= args.n) {
            return;
          }
          const float scale = args.fp8.a_inverses[args.fp8.by_row ? row + i : 0] *
                              args.fp8.b_inverses[args.fp8.by_row ? column + j : 0];
          const float bias = args.bias.data != nullptr ? Load(args.bias, column + j) : 0.0F;
          StoreOrAdd(args.c.array, (row + i) * args.c.row_stride + (column + j), sum * scale + bias,
                     args.adds);
        });
  }
};

}  // namespace shardwright::gpu
