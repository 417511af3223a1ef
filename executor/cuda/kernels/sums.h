#pragma once

// Sums whose order depends on shapes only: of columns, of the ranks' parts of a reduction, of
// squares.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// partial[chunk][j] = sum over the chunk's rows of x[first + row * stride + j] in fp32, each times
// y[row * y_stride + j] where there is a y; a norm's y is normalized first. Blocks: chunks *
// CeilDiv(columns, 256), a thread per column.
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
struct ColumnSumKernel {
  static constexpr KernelId kId = KernelId::kColumnSum;
  using Args = ColumnSumArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t tiles = (args.columns + kThreads - 1) / kThreads;
    const std::int64_t chunk = block.index() / tiles;
    block.Each([&](int t) {
      const std::int64_t column = block.index() % tiles * kThreads + t;
      if (column >= args.columns) {
        return;
      }
      float sum = 0.0F;
      const std::int64_t begin = chunk * args.rows_per_chunk;
      for (std::int64_t row = begin; row < begin + args.rows_per_chunk && row < args.rows; ++row) {
        float value = Load(args.x, args.first + row * args.stride + column);
        if (args.y.data != nullptr) {
          const float y = Load(args.y, row * args.y_stride + column);
          const float mean = args.means != nullptr ? args.means[row] : 0.0F;
          value *= (y - mean) * (args.inverses != nullptr ? args.inverses[row] : 1.0F);
        }
        sum += value;
      }
      if (args.partial == nullptr) {
        StoreOrAdd(args.to, column, sum, args.adds);
      } else {
        args.partial[chunk * args.columns + column] = sum;
      }
    });
  }
};

// to[j] (+)= sum over chunks of partial[chunk][j], in order.
struct PartialSumArgs {
  const float* partial = nullptr;
  std::int64_t chunks = 0, columns = 0;
  Array to = {};
  bool adds = false;
};
struct PartialSumKernel {
  static constexpr KernelId kId = KernelId::kPartialSum;
  using Args = PartialSumArgs;
  static constexpr int kThreads = 256;

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
inline constexpr int kMostSources = 16;
struct FoldArgs {
  const void* sources[kMostSources] = {};
  int source_count = 0;
  DType dtype = DType::kFp32;
  std::int64_t source_begin = 0, out_begin = 0, n = 0;
  void* out = nullptr;
  float divisor = 1.0F;
};
struct FoldKernel {
  static constexpr KernelId kId = KernelId::kFold;
  using Args = FoldArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= args.n) {
        return;
      }
      float sum = 0.0F;
      for (int s = 0; s < args.source_count; ++s) {
        const float value =
            Load({const_cast<void*>(args.sources[s]), args.dtype}, args.source_begin + i);
        sum = s == 0 ? value : sum + value;
      }
      Store({args.out, args.dtype}, args.out_begin + i,
            args.divisor != 1.0F ? sum / args.divisor : sum);
    });
  }
};

// partial[block] = sum of squares of the block's stretch, in fp64.
struct SquaresArgs {
  Array x = {};
  std::int64_t n = 0, per_block = 0;
  double* partial = nullptr;
};
struct SquaresKernel {
  static constexpr KernelId kId = KernelId::kSquares;
  using Args = SquaresArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    PerThread<double> sums;
    const std::int64_t begin = block.index() * args.per_block;
    const std::int64_t end = begin + args.per_block < args.n ? begin + args.per_block : args.n;
    block.Each([&](int t) {
      double sum = 0.0;
      for (std::int64_t i = begin + t; i < end; i += kThreads) {
        const auto value = static_cast<double>(Load(args.x, i));
        sum += value * value;
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
};

// *norm = the sum of `count` partial sums, as fp32. One block; large models have 60 k of them.
struct NormArgs {
  const double* partial = nullptr;
  std::int64_t count = 0;
  double divisor = 1.0;  // of the numbers whose squares were summed
  float* norm = nullptr;
};
struct NormKernel {
  static constexpr KernelId kId = KernelId::kNorm;
  using Args = NormArgs;
  static constexpr int kThreads = 256;

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
struct ClipArgs {
  Array x = {};
  std::int64_t n = 0;
  const float* squares = nullptr;
  float max_norm = 0.0F;
};
struct ClipKernel {
  static constexpr KernelId kId = KernelId::kClip;
  using Args = ClipArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      const auto norm = static_cast<float>(sqrt(static_cast<double>(*args.squares)));
      const float reciprocal = 1.0F / (norm + 1e-6F);
      const float scaled = reciprocal * args.max_norm;
      const float factor = scaled > 1.0F ? 1.0F : scaled;
      if (i < args.n && factor != 1.0F) {
        Store(args.x, i, Load(args.x, i) * factor);
      }
    });
  }
};

}  // namespace shardwright::gpu
