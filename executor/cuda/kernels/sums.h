#pragma once

// Sums whose order depends on shapes only: of columns, of the ranks' parts of a reduction, of
// squares.
//
// Every sum is split by shapes alone, so a run repeats bit for bit on the same number of ranks,
// whatever else the GPU does.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// partial[chunk][j] = sum over the chunk's rows of x[first + row * stride + j] in fp32, each times
// y[row * y_stride + j] where there is a y; a norm's y is normalized first. Blocks: chunks *
// CeilDiv(columns, 256). A warp reads 256 columns of a row; each sums every eighth row, and the
// warps' sums are added in order. Uses: the gradient of a bias is a sum of dy over rows; the
// gradient of a norm's weight is a sum of dy times the normalized x. Example: 8,192 rows of 4,096
// columns in 64 chunks are 64 x 16 = 1,024 blocks of 128 rows; each warp adds 16 rows, and
// PartialSumKernel adds the 64 chunks.
struct ColumnSumArgs {
  Array x = {}, y = {};
  std::int64_t rows = 0, columns = 0;
  std::int64_t first = 0, stride = 0, y_stride = 0;
  const float* means = nullptr;     // by row; null: 0
  const float* inverses = nullptr;  // by row; null: 1
  std::int64_t chunks = 1, rows_per_chunk = 0;
  float* partial = nullptr;
  // Without `partial` there is one chunk, and the sum goes here at once.
  Array to = {};
  bool adds = false;
};
// Shared memory: 8 warps x 256 columns x 4 bytes = 8 KiB.
struct ColumnSumKernel : KernelTraits<KernelId::kColumnSum, ColumnSumArgs, 256> {
  static constexpr int kMinBlocks = 3;
  static constexpr int kColumns = kWarp * kVector;  // of a block
  static constexpr int kWarps = kThreads / kWarp;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t tiles = (args.columns + kColumns - 1) / kColumns;
    const std::int64_t chunk = block.index() / tiles;
    const std::int64_t first_column = block.index() % tiles * kColumns;
    auto* const sums = block.Shared<float>(std::int64_t{kWarps} * kColumns);
    block.Each([&](int t) {
      const int place = t % kWarp * kVector;
      float sum[kVector] = {};
      if (first_column + place < args.columns) {
        if (IsHalf(args.x.dtype) && (args.y.data == nullptr || IsHalf(args.y.dtype))) {
          SumOwnRows<true>(args, chunk, t / kWarp, first_column + place, sum);
        } else {
          SumOwnRows<false>(args, chunk, t / kWarp, first_column + place, sum);
        }
      }
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        sums[t / kWarp * kColumns + place + k] = sum[k];
      }
    });
    block.Each([&](int t) {
      const std::int64_t column = first_column + t;
      if (column >= args.columns) {
        return;
      }
      float sum = 0.0F;
      SW_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sum += sums[warp * kColumns + t];
      }
      if (args.partial == nullptr) {
        StoreOrAdd(args.to, column, sum, args.adds);
      } else {
        args.partial[chunk * args.columns + column] = sum;
      }
    });
  }

 private:
  // Rows `warp`, `warp` + 8 and so on of the chunk.
  template <bool kHalf>
  static SW_DEVICE void SumOwnRows(const Args& args, std::int64_t chunk, int warp,
                                   std::int64_t column, float* sum) {
    constexpr int kAtOnce = kHalf ? 4 : 2;  // rows whose loads are under way together
    const Array x = Known<kHalf>(args.x), y = Known<kHalf>(args.y);
    const std::int64_t begin = chunk * args.rows_per_chunk;
    const std::int64_t after = begin + args.rows_per_chunk;
    const std::int64_t end = after < args.rows ? after : args.rows;
    const std::int64_t count = args.columns - column;
    for (std::int64_t row = begin + warp; row < end; row += std::int64_t{kAtOnce} * kWarps) {
      Eight xs[kAtOnce], ys[kAtOnce];
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const std::int64_t at = row + std::int64_t{r} * kWarps;
        if (at < end) {
          xs[r] = LoadEight(x, args.first + at * args.stride + column, count);
          if (args.y.data != nullptr) {
            ys[r] = LoadEight(y, at * args.y_stride + column, count);
          }
        }
      }
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const std::int64_t at = row + std::int64_t{r} * kWarps;
        if (at < end) {
          AddRow(args, at, xs[r], ys[r], sum);
        }
      }
    }
  }

  static SW_DEVICE void AddRow(const Args& args, std::int64_t row, const Eight& xs, const Eight& ys,
                               float* sum) {
    float x[kVector], y[kVector];
    Unpack(xs, args.x.dtype, x);
    if (args.y.data != nullptr) {
      Unpack(ys, args.y.dtype, y);
      const float mean = args.means != nullptr ? args.means[row] : 0.0F;
      const float inverse = args.inverses != nullptr ? args.inverses[row] : 1.0F;
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        x[k] *= (y[k] - mean) * inverse;
      }
    }
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      sum[k] += x[k];
    }
  }
};

// to[j] (+)= sum over chunks of partial[chunk][j], in order.
// Cost: 64 chunks of 4,096 columns are 1 MiB to read, small beside the 64 MiB of bf16 rows.
struct PartialSumArgs {
  const float* partial = nullptr;
  std::int64_t chunks = 0, columns = 0;
  Array to = {};
  bool adds = false;
};
struct PartialSumKernel : KernelTraits<KernelId::kPartialSum, PartialSumArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t column = block.index() * kThreads + t;
      if (column >= args.columns) {
        return;
      }
      float sum = 0.0F;
      for (std::int64_t chunk = 0; chunk < args.chunks; ++chunk) {
        sum += args.partial[chunk * args.columns + column];
      }
      StoreOrAdd(args.to, column, sum, args.adds);
    });
  }
};

// out[i] = (s_0[i] + s_1[i] + ...) / divisor over `sources` arrays of one dtype, summed in fp32 in
// order, rounded once.
// Example in bf16: four ranks hold 256, 1, 1 and 1. The fp32 sum 259 is stored as 260. Rounded
// behind each addition it would stay 256.
inline constexpr int kMostSources = 16;
struct FoldArgs {
  const void* sources[kMostSources] = {};
  int source_count = 0;
  DType dtype = DType::kFp32;
  std::int64_t source_begin = 0, out_begin = 0, n = 0;
  void* out = nullptr;
  float divisor = 1.0F;
};
// Used by loopback (executor/cuda/loopback.h), where one GPU holds the parts of all ranks.
struct FoldKernel : KernelTraits<KernelId::kFold, FoldArgs, 256> {
  static constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kPerBlock + std::int64_t{t} * kVector;
      const std::int64_t count = args.n - i;
      if (count <= 0) {
        return;
      }
      float sum[kVector] = {};
      for (int s = 0; s < args.source_count; ++s) {
        const Array source = {const_cast<void*>(args.sources[s]), args.dtype};
        float values[kVector];
        Unpack(LoadEight(source, args.source_begin + i, count), args.dtype, values);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          sum[k] = s == 0 ? values[k] : sum[k] + values[k];
        }
      }
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        sum[k] = args.divisor != 1.0F ? sum[k] / args.divisor : sum[k];
      }
      StoreEight({args.out, args.dtype}, args.out_begin + i, Pack(sum, args.dtype), count);
    });
  }
};

// partial[block] = sum of squares of the block's stretch, in fp64.
// Squares of bf16 gradients reach 10^76, which fp32 does not hold; fp64 does.
struct SquaresArgs {
  Array x = {};
  std::int64_t n = 0, per_block = 0;
  double* partial = nullptr;
};
struct SquaresKernel : KernelTraits<KernelId::kSquares, SquaresArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    PerThread<double> sums;
    const std::int64_t begin = block.index() * args.per_block;
    const std::int64_t end = begin + args.per_block < args.n ? begin + args.per_block : args.n;
    constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
    block.Each([&](int t) {
      double sum = 0.0;
      for (std::int64_t i = begin + std::int64_t{t} * kVector; i < end; i += kAtOnce * kApart) {
        Eight eights[kAtOnce] = {};
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (i + k * kApart < end) {
            eights[k] = LoadEight(args.x, i + k * kApart, end - i - k * kApart);
          }
        }
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          sum += SumOfSquares(eights[k], args.x.dtype);
        }
      }
      sums[t] = sum;
    });
    const double total = BlockSum(block, block.Shared<double>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        args.partial[block.index()] = total;
      }
    });
  }

 private:
  static constexpr int kAtOnce = 4;  // vectors whose loads are under way together

  static SW_DEVICE double SumOfSquares(const Eight& eight, DType dtype) {
    float values[kVector];
    Unpack(eight, dtype, values);
    double sum = 0.0;
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const auto value = static_cast<double>(values[k]);
      sum += value * value;
    }
    return sum;
  }
};

// *norm = the sum of `count` partial sums, as fp32. One block; large models have 60 k of them.
// `divisor` takes out the loss scale: gradients scaled by 1,024 have squares 2^20 times as large.
struct NormArgs {
  const double* partial = nullptr;
  std::int64_t count = 0;
  double divisor = 1.0;  // of the numbers whose squares were summed
  float* norm = nullptr;
};
struct NormKernel : KernelTraits<KernelId::kNorm, NormArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    PerThread<double> sums;
    block.Each([&](int t) {
      double sum = 0.0;
      for (std::int64_t i = t; i < args.count; i += kThreads) {
        sum += args.partial[i];
      }
      sums[t] = sum;
    });
    const double sum = BlockSum(block, block.Shared<double>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        *args.norm = static_cast<float>(sum / args.divisor / args.divisor);
      }
    });
  }
};

// x[i] *= min(1, max_norm / (sqrt(*squares) + 1e-6)), as clip_grad_norm_ computes it in fp32.
// Example: max_norm 1 and squares 16 give the factor 1 / (4 + 1e-6) = 0.25. Squares of 0.25 give a
// factor above 1: no gradient is read or written. Every thread computes the factor itself, so the
// host need not wait for the norm.
struct ClipArgs {
  Array x = {};
  std::int64_t n = 0;
  const float* squares = nullptr;
  float max_norm = 0.0F;
};
struct ClipKernel : KernelTraits<KernelId::kClip, ClipArgs, 256> {
  static constexpr int kVectors = 2;  // of a thread
  static constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector * kVectors;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const auto norm = static_cast<float>(sqrt(static_cast<double>(*args.squares)));
      const float reciprocal = 1.0F / (norm + 1e-6F);
      const float scaled = reciprocal * args.max_norm;
      const float factor = scaled > 1.0F ? 1.0F : scaled;
      if (factor == 1.0F) {
        return;
      }
      const std::int64_t first = block.index() * kPerBlock + std::int64_t{t} * kVector;
      Eight eights[kVectors] = {};
      SW_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const std::int64_t i = first + std::int64_t{v} * kThreads * kVector;
        if (i < args.n) {
          eights[v] = LoadEight(args.x, i, args.n - i);
        }
      }
      SW_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const std::int64_t i = first + std::int64_t{v} * kThreads * kVector;
        if (i < args.n) {
          float x[kVector];
          Unpack(eights[v], args.x.dtype, x);
          SW_UNROLL
          for (int k = 0; k < kVector; ++k) {
            x[k] *= factor;
          }
          StoreEight(args.x, i, Pack(x, args.x.dtype), args.n - i);
        }
      }
    });
  }
};

// z[channel] = sum over the channel's plane of x y; a block per channel.
// The gradient of a squeeze-and-excitation gate: one number per channel of a sample.
struct ChannelScaleGradArgs {
  Array x = {}, y = {}, z = {};
  std::int64_t plane = 0;
};
struct ChannelScaleGradKernel
    : KernelTraits<KernelId::kChannelScaleGrad, ChannelScaleGradArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    PerThread<float> sums;
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = t; i < a.plane; i += kThreads) {
        const std::int64_t at = block.index() * a.plane + i;
        sum += Load(a.x, at) * Load(a.y, at);
      }
      sums[t] = sum;
    });
    const float total = BlockSum(block, block.Shared<float>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        Store(a.z, block.index(), total);
      }
    });
  }
};

}  // namespace shardwright::gpu
