#pragma once

// The matrix product for what cuBLASLt does not take, or when it is not there. Not fast.
//
// A block makes 64 x 64 results (tile.h). Example: m = 1,000 and n = 768 are 16 x 12 = 192 blocks;
// block 13 makes rows 64 to 127 of columns 64 to 127.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/cuda/kernels/tile.h"
#include "models/kernels/fp8.h"

namespace shardwright::gpu {

// Element (i, j) is at data[i * row_stride + j * column_stride].
// Example: PyTorch stores a linear layer's weight as (out, in) and multiplies with its transpose.
// With in = 512 that is b = {weight, row_stride 1, column_stride 512}: no copy is made.
struct Matrix {
  Array array = {};
  std::int64_t row_stride = 0, column_stride = 1;
};

enum class GemmGelu : std::uint8_t { kNone, kApply, kDerivative };

// Operands in fp8 (DType::kFp8): a's rows and b's columns lie one element behind the other, and the
// sums are multiplied with an inverse of each, of all or of a's row and of b's column.
struct Fp8Operands {
  const float* a_inverses = nullptr;  // device memory; null: the operands are not fp8
  const float* b_inverses = nullptr;
  Fp8Format a_format = Fp8Format::kE4m3, b_format = Fp8Format::kE4m3;
  bool by_row = false;
};

// c (m, n) (+)= a (m, k) b (k, n) + bias (n). Operands of one 16-bit dtype are multiplied as such,
// others in fp32; sums are fp32, rounded once.
struct GemmArgs {
  std::int64_t m = 0, n = 0, k = 0;
  Matrix a = {}, b = {}, c = {};
  Array bias = {};  // null: none
  // Sums over k beside the product, of a's rows (m) or of b's columns (n), one of them and no bias;
  // null: none. Libraries make them, our own kernel does not.
  Array row_sums = {}, column_sums = {};
  // GELU's tanh form behind the sums, by libraries only; rows lie as c's do. kApply: what it is
  // applied to goes to `gelu_input`; kDerivative: c is multiplied by its derivative there.
  GemmGelu gelu = GemmGelu::kNone;
  Array gelu_input = {};
  bool adds = false;
  DType multiply_as = DType::kFp32;
  Fp8Operands fp8 = {};  // multiplied by Fp8GemmKernel or a library
};

struct GemmKernel : KernelTraits<KernelId::kGemm, GemmArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& args) {
    const std::int64_t across = (args.n + kProductColumns - 1) / kProductColumns;
    const std::int64_t row = block.index() / across * kProductRows;
    const std::int64_t column = block.index() % across * kProductColumns;
    TileProduct<T>(
        block, args.k,
        [&](int i, std::int64_t k) {
          return row + i < args.m
                     ? Load(args.a.array, (row + i) * args.a.row_stride + k * args.a.column_stride)
                     : 0.0F;
        },
        [&](std::int64_t k, int j) {
          return column + j < args.n ? Load(args.b.array, k * args.b.row_stride +
                                                              (column + j) * args.b.column_stride)
                                     : 0.0F;
        },
        [&](int i, int j, float sum) {
          if (row + i >= args.m || column + j >= args.n) {
            return;
          }
          const float bias = args.bias.data != nullptr ? Load(args.bias, column + j) : 0.0F;
          StoreOrAdd(args.c.array, (row + i) * args.c.row_stride + (column + j), sum + bias,
                     args.adds);
        });
  }
};

}  // namespace shardwright::gpu
