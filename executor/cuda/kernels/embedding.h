#pragma once

// Table lookups. The gradient of a table row is one sum over the positions that looked it up, in
// order and without atomics. Every position is linked to the next one with its id, and a block
// walks each list.
//
// Example: ids 5, 2, 5, 7, 5.
//   next    2, -1, 4, -1, -1     position 0 -> 2 -> 4
//   tails   0, 0, 1, 0, 1        positions 2 and 4 come behind others
// Blocks of positions 0, 1 and 3 work: row 5 = dy[0] + dy[2] + dy[4], row 2 = dy[1], row 7 = dy[3].
// Rows that no position names are not written. PyTorch sorts the ids to the same end.
//
// Common words make long lists: of 8,192 positions with one id, one block sums all.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// `index_offset`: OPT's learned positions have 2, so position 0 reads row 2 of the table.
struct EmbeddingArgs {
  const std::int64_t* ids = nullptr;
  std::int64_t rows = 0, features = 0, vocab = 0;
  std::int64_t index_offset = 0;  // added to every id
  Array table = {}, y = {};
  Fault* fault = nullptr;
};

// Block per position. An id out of range is reported, and gets zeros.
struct EmbeddingKernel : KernelTraits<KernelId::kEmbedding, EmbeddingArgs, 128> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t position = block.index();
      const std::int64_t row = args.ids[position] + args.index_offset;
      const bool is_there = row >= 0 && row < args.vocab;
      if (!is_there && t == 0) {
        Report(args.fault, FaultKind::kTableRow, row, args.vocab);
      }
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.features;
           i += std::int64_t{kThreads} * kVector) {
        float values[kVector] = {};
        if (is_there) {
          Unpack(LoadEight(args.table, row * args.features + i, args.features - i),
                 args.table.dtype, values);
        }
        StoreEight(args.y, position * args.features + i, Pack(values, args.y.dtype),
                   args.features - i);
      }
    });
  }
};

// next[i] = the first position behind i with the same id, or -1; tails[j] = 1 where j is such a
// position, zero before. A thread per position compares its id with all behind it, which lie in
// shared memory in tiles (and eight more): 64 k positions are 2e9 comparisons.
struct EmbeddingLinksArgs {
  const std::int64_t* ids = nullptr;
  std::int64_t rows = 0;
  std::int64_t* next = nullptr;
  std::int64_t* tails = nullptr;  // by position: 1 where an earlier position links to it
};
struct EmbeddingLinksKernel : KernelTraits<KernelId::kEmbeddingLinks, EmbeddingLinksArgs, 64> {
  static constexpr int kTile = 1024;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    auto* const tile = block.Shared<std::int64_t>(kTile + kVector);
    const std::int64_t first = block.index() * kThreads;
    PerThread<std::int64_t> next;
    for (std::int64_t begin = first; begin < args.rows; begin += kTile) {
      block.Each([&](int t) {
        for (std::int64_t j = t; j < kTile + kVector; j += kThreads) {
          tile[j] = begin + j < args.rows ? args.ids[begin + j] : 0;
        }
      });
      block.Each([&](int t) {
        if (first + t < args.rows && (begin == first || next[t] < 0)) {
          const std::int64_t j = Find(tile, args.ids[first + t], begin == first ? t + 1 : 0);
          next[t] = j >= 0 && begin + j < args.rows ? begin + j : -1;
        }
      });
    }
    block.Each([&](int t) {
      if (first + t < args.rows) {
        args.next[first + t] = next[t];
        if (next[t] >= 0) {
          args.tails[next[t]] = 1;  // exactly one position links to it
        }
      }
    });
  }

 private:
  // The first place of the id in the tile, from j on, or -1; eight are compared at once.
  static SW_DEVICE std::int64_t Find(const std::int64_t* tile, std::int64_t id, int j) {
    std::int64_t found = -1;
    for (; found < 0 && j < kTile; j += kVector) {
      SW_UNROLL
      for (int k = kVector - 1; k >= 0; --k) {
        found = tile[j + k] == id ? j + k : found;
      }
    }
    return found;
  }
};

// Block per position; those that an earlier one links to have nothing to do. The gradient may hold
// `copies` arrays of all positions, of which the sum counts.
struct EmbeddingGradArgs {
  const std::int64_t* ids = nullptr;
  const std::int64_t* next = nullptr;
  const std::int64_t* tails = nullptr;
  std::int64_t rows = 0, features = 0, vocab = 0, index_offset = 0, copies = 1;
  std::int64_t padding_row = -1;  // gets no gradient
  Array dy = {}, grad = {};
  bool adds = false;
};
struct EmbeddingGradKernel : KernelTraits<KernelId::kEmbeddingGrad, EmbeddingGradArgs, 128> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t first = block.index();
      const std::int64_t row = args.ids[first] + args.index_offset;
      if (args.tails[first] != 0 || row < 0 || row >= args.vocab || row == args.padding_row) {
        return;
      }
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.features; i += kAtOnce * kApart) {
        SumList(args, first, row, i);
      }
    });
  }

 private:
  static constexpr int kAtOnce = 2;  // vectors whose loads are under way together
  static constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;

  // Features i to i + 7 of all positions with the block's id, and those that lie kApart behind.
  static SW_DEVICE void SumList(const Args& args, std::int64_t first, std::int64_t row,
                                std::int64_t i) {
    float sums[kAtOnce][kVector] = {};
    for (std::int64_t position = first; position >= 0; position = args.next[position]) {
      for (std::int64_t copy = 0; copy < args.copies; ++copy) {
        const std::int64_t at = (copy * args.rows + position) * args.features + i;
        Eight eights[kAtOnce] = {};
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (i + k * kApart < args.features) {
            eights[k] = LoadEight(args.dy, at + k * kApart, args.features - i - k * kApart);
          }
        }
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          float values[kVector];
          Unpack(eights[k], args.dy.dtype, values);
          SW_UNROLL
          for (int j = 0; j < kVector; ++j) {
            sums[k][j] += values[j];
          }
        }
      }
    }
    SW_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t feature = i + k * kApart;
      const std::int64_t count = args.features - feature;
      if (count <= 0) {
        continue;
      }
      const std::int64_t at = row * args.features + feature;
      if (args.adds) {
        float values[kVector];
        Unpack(LoadEight(args.grad, at, count), args.grad.dtype, values);
        SW_UNROLL
        for (int j = 0; j < kVector; ++j) {
          sums[k][j] += values[j];
        }
      }
      StoreEight(args.grad, at, Pack(sums[k], args.grad.dtype), count);
    }
  }
};

}  // namespace shardwright::gpu
